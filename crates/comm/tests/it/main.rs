//! What `comm` promises, a module per topic: a new test goes into the file of its topic, a new topic gets a line here.

mod attacks;
mod encryption;
mod faults;
mod golden;
mod grid;
mod large;
mod mpi;
mod operations;
mod places;
mod processes;
mod support;
