//! The trained model as a Hugging Face directory. Every rank takes part, rank 0 writes; one tensor at a time.

use std::cell::Cell;
use std::path::Path;

use ferrospeed_checkpoint::{CheckpointError, agree};
use ferrospeed_engine::Engine;
use ferrospeed_models::directory::{DEFAULT_SHARD_BYTES, NewDirectory, set_dtype, write_config};
use ferrospeed_models::weights::{TensorToWrite, write_directory};
use ferrospeed_models::{Decoder, ModelError};
use ferrospeed_tensor::dtype::Float;
use ferrospeed_tensor::{DType, Param};
use serde_json::Value;

use crate::error::Result;

/// Writes `config.json` and weights, both or neither. All ranks call it together, and all hear when it failed.
pub(crate) fn export(engine: &Engine, model: &Decoder, config: &Value, folder: &Path) -> Result<()> {
    // In order of name, which is also the order in which the writer asks: so all ranks gather alike.
    let mut params = model.parameters().as_slice().to_vec();
    params.sort_by(|a, b| a.name().cmp(b.name()));
    let gathered = Cell::new(0);
    let written = match engine.world().rank() {
        0 => write(engine, &params, config, folder, &gathered),
        _ => Ok(()),
    };
    // Whatever happened on rank 0, its peers gather every parameter, and so does it.
    params[gathered.get()..].iter().try_for_each(|param| engine.weight_as_read(param).map(drop))?;
    let said = written.map_err(|error| CheckpointError::Request(error.to_string()));
    agree(&engine.world().group(), said)?;
    Ok(())
}

fn write(
    engine: &Engine,
    params: &[Param],
    config: &Value,
    folder: &Path,
    gathered: &Cell<usize>,
) -> std::result::Result<(), ModelError> {
    let dtype = engine.store().dtype();
    let mut config = config.clone();
    set_dtype(&mut config, dtype);
    let new = NewDirectory::over(folder)?;
    write_config(new.path(), &config)?;
    let tensors: Vec<TensorToWrite> = params
        .iter()
        .map(|param| TensorToWrite {
            name: param.name().into(),
            shape: param.whole_shape().sizes().to_vec(),
            dtype,
        })
        .collect();
    let mut bytes = |tensor: &TensorToWrite| {
        let param = &params[gathered.replace(gathered.get() + 1)];
        assert_eq!(param.name(), tensor.name, "the writer asks in order of name");
        let failed = |why: String| ModelError::BadFile { path: folder.to_path_buf(), why };
        let values = engine.weight_as_read(param).map_err(|error| failed(error.to_string()))?;
        Ok(match dtype {
            DType::BF16 => values.iter().flat_map(|&v| half::bf16::narrow(v).to_le_bytes()).collect(),
            DType::F16 => values.iter().flat_map(|&v| half::f16::narrow(v).to_le_bytes()).collect(),
            _ => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        })
    };
    write_directory(new.path(), &tensors, DEFAULT_SHARD_BYTES, &mut bytes)?;
    new.finish()
}
