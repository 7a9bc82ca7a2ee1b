//! What `zero` promises, a module per topic: a new test goes into the file of its topic, a new topic gets a line here.

mod golden_partition;
mod one_bit_backends;
mod placed_bytes;
// An executable of its own would link all of this once more.
#[path = "../../../placement/tests/it/main.rs"]
mod placement;
