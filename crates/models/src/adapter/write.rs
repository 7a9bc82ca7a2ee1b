//! Making a directory of an adapter.

use std::path::Path;

use ferrospeed_nn::adapter::part_of;
use serde_json::Value;

use super::config::ADAPTER_CONFIG;
use crate::directory::{NewDirectory, write_json};
use crate::error::Result;
use crate::weights::{TensorToWrite, write_file};

/// The name that PEFT gives a parameter in its files; `adapted`: the paths of adapted layers, whose own parameters, but not those of
/// their adapters, lie one deeper in its memory.
pub fn stored_name(param: &str, adapted: &[&str]) -> String {
    let own = param.rsplit_once('.').filter(|(layer, _)| adapted.contains(layer) && part_of(param).is_none());
    match own {
        Some((layer, leaf)) => format!("base_model.model.{layer}.base_layer.{leaf}"),
        None => format!("base_model.model.{param}"),
    }
}

/// Writes configuration and tensors into a directory that may hold files, both or neither: weights that lie there are replaced.
pub fn write(
    directory: &Path,
    config: &Value,
    tensors: &[TensorToWrite],
    bytes: &mut dyn FnMut(&TensorToWrite) -> Result<Vec<u8>>,
) -> Result<()> {
    let new = NewDirectory::over(directory)?;
    write_into(new.path(), config, tensors, bytes)?;
    new.finish()
}

/// The same into a directory that is being made.
pub fn write_into(
    directory: &Path,
    config: &Value,
    tensors: &[TensorToWrite],
    bytes: &mut dyn FnMut(&TensorToWrite) -> Result<Vec<u8>>,
) -> Result<()> {
    write_file(&directory.join("adapter_model.safetensors"), tensors, bytes)?;
    write_json(&directory.join(ADAPTER_CONFIG), config)
}
