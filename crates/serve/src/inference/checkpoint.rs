//! `checkpoint` of an inference configuration: a description that names the files of a model's weights.
//!
//! `{"type": "ds_model", "checkpoints": [files…], "version": 1.0, "base_dir": "…"}`, or the path of such a JSON file. The files hold whole
//! tensors under Hugging Face's names, as torch's or safetensors; every rank takes its slices from them. What
//! `save_mp_checkpoint_path` writes is read so, on any number of ranks.

use std::path::{Path, PathBuf};

use ferrospeed_models::decoder::dtype_of_name;
use ferrospeed_models::directory::{WriteOptions, convert};
use serde_json::{Map, Value, json};

use super::{InferenceError, Result};
use crate::ServeError;

/// A longer description is none.
const LONGEST: u64 = 64 << 20;
/// What the written description is called.
pub(super) const WRITTEN: &str = "ds_inference_config.json";

/// The files that a description names, each below its `base_dir`, or below that of the configuration.
pub(super) fn files(described: &Value, base_dir: &str) -> Result<Vec<PathBuf>> {
    let wrong = |key: &str, why: String| InferenceError::Setting {
        path: vec!["checkpoint".into(), key.to_owned()],
        why,
    };
    let description: Map<String, Value> = match described {
        Value::String(path) => read(Path::new(path))?,
        Value::Object(object) => object.clone(),
        other => return Err(wrong("", format!("{other} is neither a path nor an object"))),
    };
    for key in ["type", "checkpoints", "version"] {
        if !description.contains_key(key) {
            return Err(wrong(key, "is missing".into()));
        }
    }
    let kind = description["type"].as_str().unwrap_or_default();
    match kind.to_ascii_lowercase().as_str() {
        "ds_model" | "bloom" => {}
        "megatron" => {
            let why =
                "its files name tensors as Megatron does; convert them to Hugging Face's names".to_owned();
            return Err(InferenceError::NotBuilt { what: "a Megatron checkpoint".into(), why });
        }
        _ => return Err(wrong("type", format!("{} checkpoint type is not supported", description["type"]))),
    }
    let known =
        ["type", "checkpoints", "version", "parallelization", "tp_size", "mp_size", "base_dir", "dtype"];
    if let Some(key) = description.keys().find(|key| !known.contains(&key.as_str())) {
        return Err(wrong(key, "is not known".into()));
    }
    let is_cut = description["checkpoints"].is_object()
        || description.get("parallelization").is_some_and(|how| how != "pp");
    if is_cut {
        let why = "its files hold slices that were cut for one number of ranks; name files with whole tensors (\"parallelization\": \"pp\"), of which each rank reads its slices".to_owned();
        return Err(InferenceError::NotBuilt { what: "a checkpoint in slices".into(), why });
    }
    let base = description.get("base_dir").and_then(Value::as_str).unwrap_or(base_dir);
    let names = description["checkpoints"].as_array().filter(|names| !names.is_empty());
    let names = names.ok_or_else(|| wrong("checkpoints", "is no list of files".into()))?;
    let path = |name: &Value| {
        let name = name.as_str().ok_or_else(|| wrong("checkpoints", format!("{name} is no file name")))?;
        Ok(Path::new(base).join(name))
    };
    names.iter().map(path).collect()
}

fn read(path: &Path) -> Result<Map<String, Value>> {
    let failed = |why: String| InferenceError::File { file: path.to_path_buf(), why };
    let bytes = ferrospeed_files::read(path, LONGEST).map_err(|error| failed(error.to_string()))?;
    serde_json::from_slice(&bytes).map_err(|error| failed(format!("is no description: {error}")))
}

/// Writes a model's weights in a type, with the description by which they are read again; both or neither.
pub(super) fn save(directory: &Path, target: &Path, dtype: &str, ranks: usize) -> Result<()> {
    let options = WriteOptions { dtype: dtype_of_name(dtype), ..WriteOptions::default() };
    convert(directory, target, &options).map_err(ServeError::from)?;
    describe(target, dtype, ranks).inspect_err(|_| {
        // It was not there before.
        let _ = std::fs::remove_dir_all(target);
    })
}

fn describe(target: &Path, dtype: &str, ranks: usize) -> Result<()> {
    let failed = |why: String| InferenceError::File { file: target.to_path_buf(), why };
    let entries = std::fs::read_dir(target).map_err(|error| failed(error.to_string()))?;
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| name.ends_with(".safetensors"))
        .collect();
    names.sort();
    let description = json!({
        "type": "ds_model", "base_dir": target.display().to_string(), "checkpoints": names, "version": 1.0,
        "parallelization": "pp", "tp_size": ranks, "dtype": dtype,
    });
    let text = format!("{description:#}\n");
    ferrospeed_files::write(target.join(WRITTEN), text).map_err(|error| failed(error.to_string()))
}
