//! What `nn` promises, a module per topic: a new test goes into the file of its topic, a new topic gets a line here.

mod golden;
mod layers;
mod moe;
mod moe_apart;
mod moe_golden;
mod profile;
mod sequence_golden;
mod sparse_golden;
mod tensor_parallel;
