//! What `cli` promises, a module per topic: a new test goes into the file of its topic, a new topic gets a line here.

mod adapters;
mod autotuning;
mod backends;
mod bench;
mod checkpoint;
mod checkpoint_newest;
mod commands;
mod conversations;
mod curriculum;
mod data;
mod elastic;
// Those of a library crate of its own, which would be one more executable.
mod eval;
#[path = "../../../evaluate/tests/it/main.rs"]
mod evaluate;
mod examined;
mod examples;
mod experts;
mod hub;
#[path = "../../../hub/tests/it/main.rs"]
mod hub_itself;
mod launch;
mod launchers;
mod limits;
mod model;
mod monitors;
mod observing;
mod printed;
mod profile;
mod quickstart;
mod refusals;
mod replaced_run;
mod resume;
mod resume_changes;
mod resume_place;
mod run_faults;
mod run_folder;
mod save_faults;
mod serve;
mod support;
mod tensor_parallel;
mod terminal;
mod train;
mod train_documents;
mod train_sequence;
mod train_sparse;
mod trainer;
