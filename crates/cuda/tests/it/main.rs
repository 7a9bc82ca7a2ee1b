//! What `cuda` promises, a module per topic: a new test goes into the file of its topic, a new topic gets a line here.

mod attention;
mod few_rows;
mod integers;
mod on_gpu;
mod one_bit;
mod ops;
mod pages;
mod steps;
