//! What `tune` promises, a module per topic: a new test goes into the file of its topic, a new topic gets a line here.

mod activations;
mod golden;
mod plan;
mod search;
mod simulate;
mod slices;
mod tuning;
