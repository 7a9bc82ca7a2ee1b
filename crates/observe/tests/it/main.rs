//! What `observe` promises, a module per topic: a new test goes into the file of its topic, a new topic gets a line here.

mod browser;
mod flops;
mod formulas;
mod golden;
mod report;
mod watch;
