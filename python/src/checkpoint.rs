//! Checkpoints: saved and loaded by the engine; what a program keeps besides goes along as JSON.

use std::path::PathBuf;

use ferrospeed_engine::{Format, LoadOptions, SaveOptions};
use pyo3::prelude::*;
use serde_json::Value;

use crate::engine::Engine;
use crate::errors::refused;

/// Adds what is here to the module.
pub(crate) fn add(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(save, module)?)?;
    module.add_function(wrap_pyfunction!(load, module)?)?;
    module.add_function(wrap_pyfunction!(save_16bit_model, module)?)
}

/// Whose files: `ferrospeed`, `deepspeed` or `universal`.
fn format(name: &str) -> PyResult<Format> {
    match name {
        "ferrospeed" => Ok(Format::Ferrospeed),
        "deepspeed" => Ok(Format::DeepSpeed),
        "universal" => Ok(Format::Universal),
        _ => Err(refused(format!(
            "'{name}' is no checkpoint format; there are ferrospeed, deepspeed and universal"
        ))),
    }
}

/// Writes a checkpoint and returns its folder. All ranks call it together.
#[pyfunction]
fn save(
    py: Python<'_>,
    engine: &Engine,
    folder: PathBuf,
    tag: Option<String>,
    client_state: &str,
    save_latest: bool,
    exclude_frozen_parameters: bool,
    format_name: &str,
) -> PyResult<PathBuf> {
    let client_state: Value =
        serde_json::from_str(client_state).map_err(|error| refused(format!("client_state: {error}")))?;
    let format = format(format_name)?;
    let options = SaveOptions {
        tag,
        client_state,
        save_latest,
        exclude_frozen_parameters,
        format,
        ..SaveOptions::default()
    };
    engine.with(py, |training| training.save_checkpoint(&folder, &options))
}

/// Loads one. Returns its folder and what the program kept, as JSON. All ranks call it together.
#[pyfunction]
fn load(
    py: Python<'_>,
    engine: &Engine,
    folder: PathBuf,
    tag: Option<String>,
    load_module_strict: bool,
    load_optimizer_states: bool,
    load_lr_scheduler_states: bool,
    load_module_only: bool,
) -> PyResult<(PathBuf, String)> {
    engine.with(py, |training| {
        let options = LoadOptions {
            tag: tag.as_deref(),
            load_module_strict,
            load_optimizer_states,
            load_lr_scheduler_states,
            load_module_only,
            ..LoadOptions::default()
        };
        let loaded = training.load_checkpoint(&folder, &options)?;
        Ok((loaded.path, loaded.client_state.to_string()))
    })
}

/// Writes the weights as kernels read them into one torch file. All ranks call it together.
#[pyfunction]
fn save_16bit_model(
    py: Python<'_>,
    engine: &Engine,
    folder: PathBuf,
    name: &str,
    exclude_frozen_parameters: bool,
) -> PyResult<PathBuf> {
    engine.with(py, |training| training.save_16bit_model(&folder, name, exclude_frozen_parameters))
}
