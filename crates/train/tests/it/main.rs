//! What `train` promises, a module per topic: a new test goes into the file of its topic, a new topic gets a line here.

mod conversations;
mod hugging_face;
mod layer_reduction;
mod objectives;
mod recipes;
mod stopping;
mod support;
mod validation;
