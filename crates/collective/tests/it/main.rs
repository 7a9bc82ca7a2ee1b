//! What `collective` promises, a module per topic: a new test goes into the file of its topic, a new topic gets a line here.

mod all_to_all_golden;
mod hops;
mod one_bit;
mod shelves;
mod transposes;
