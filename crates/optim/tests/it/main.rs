//! What `optim` promises, a module per topic: a new test goes into the file of its topic, a new topic gets a line here.

mod golden;
mod muon;
mod one_bit_reference;
mod torch;
