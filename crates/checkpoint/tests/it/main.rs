//! What `checkpoint` promises, a module per topic: a new test goes into the file of its topic, a new topic gets a line here.

mod common;
mod faults;
mod golden_deepspeed;
mod golden_pt;
mod hostile;
mod large;
mod moe_deepspeed;
mod pipeline_deepspeed;
mod power_failures;
