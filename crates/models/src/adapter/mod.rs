//! Directories of adapters, as PEFT writes and reads them: `adapter_config.json` says which layers and how,
//! `adapter_model.safetensors` holds what was trained.
//!
//! [`AdapterFiles`] opens one, [`MergedWeights`] gives a model's weights with it worked in, and [`write()`] makes one. An adapter
//! whose configuration asks for something that is not computed here is refused with the field.

mod config;
mod files;
mod merged;
mod write;

pub use config::{ADAPTER_CONFIG, read, to_value};
pub use files::AdapterFiles;
pub use merged::MergedWeights;
pub use write::{stored_name, write, write_into};
