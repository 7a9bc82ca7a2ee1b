//! The façade's complete programs: their own tests say whether they do what they show.

#[path = "../../../ferrospeed/examples/custom_model.rs"]
mod custom_model;
