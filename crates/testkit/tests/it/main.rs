//! What `testkit` promises, a module per topic: a new test goes into the file of its topic, a new topic gets a line here.

mod faults;
mod layers;
mod library;
mod recordings;
