//! What `models` promises, a module per topic: a new test goes into the file of its topic, a new topic gets a line here.

mod config_fields;
mod directory;
mod documents;
mod families;
mod gguf;
mod golden;
mod hostile;
mod layer_drop;
mod limits;
mod memory;
mod mxfp4;
mod names;
mod order;
mod packed;
mod pages;
mod profile;
mod published;
mod routing;
mod sparse_attention;
mod stages;
mod token_drop;
mod torch_files;
