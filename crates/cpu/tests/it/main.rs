//! What `cpu` promises, a module per topic: a new test goes into the file of its topic, a new topic gets a line here.

mod levels;
mod products_f32;
mod rows_alone;
mod screen;
