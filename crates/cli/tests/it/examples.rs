//! The façade's complete programs: their own tests say whether they do what they show.

#[path = "../../../ferrospeed/examples/curriculum.rs"]
mod curriculum;
#[path = "../../../ferrospeed/examples/custom_model.rs"]
mod custom_model;
#[path = "../../../ferrospeed/examples/fine_tune.rs"]
mod fine_tune;
#[path = "../../../ferrospeed/examples/inference.rs"]
mod inference;
#[path = "../../../ferrospeed/examples/larger_than_memory.rs"]
mod larger_than_memory;
#[path = "../../../ferrospeed/examples/mixture.rs"]
mod mixture;
#[path = "../../../ferrospeed/examples/pipeline.rs"]
mod pipeline;
#[path = "../../../ferrospeed/examples/resuming.rs"]
mod resuming;
#[path = "../../../ferrospeed/examples/two_groups.rs"]
mod two_groups;
#[path = "../../../ferrospeed/examples/two_ways.rs"]
mod two_ways;
