//! What `config` promises, a module per topic: a new test goes into the file of its topic, a new topic gets a line here.

mod deepspeed_keys;
mod docs;
mod examples;
mod golden;
mod messages;
mod property;
