//! What `engine` promises, a module per topic: a new test goes into the file of its topic, a new topic gets a line here.

mod bad_input;
mod checkpoint;
mod checkpoint_golden;
mod common;
mod compression;
mod costs;
mod cuda;
mod curves;
mod eigenvalues;
mod equality;
mod equality_processes;
mod experts;
mod features;
mod golden_gathers;
mod golden_pipeline;
mod golden_traces;
mod golden_trajectories;
mod gradients;
#[path = "../../../comm/tests/it/support/hosts.rs"]
mod hosts;
mod memory;
mod meshes;
mod observing;
mod offload;
mod offload_faults;
mod one_bit;
mod optimizers;
mod parameters;
mod pipeline;
mod plan;
#[path = "../../../comm/tests/it/support/processes.rs"]
mod processes;
mod profiler;
mod released;
mod sequence;
mod spelling;
mod stage_killed;
mod stages_on_meshes;
mod tensor_parallel;
mod two_hosts;
mod zero_plus_plus;
