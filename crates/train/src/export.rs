//! The trained model as a Hugging Face directory. Every rank takes part, rank 0 writes; one tensor at a time.

use std::path::Path;

use ferrospeed_engine::Engine;
use ferrospeed_models::directory::{DEFAULT_SHARD_BYTES, set_dtype, write_config};
use ferrospeed_models::weights::{TensorToWrite, write_directory};
use ferrospeed_models::{Decoder, ModelError};
use ferrospeed_tensor::DType;
use ferrospeed_tensor::dtype::Float;
use serde_json::Value;

use crate::error::{Result, TrainError};

/// Writes `config.json` and weights. All ranks call it together.
pub(crate) fn export(engine: &Engine, model: &Decoder, config: &Value, folder: &Path) -> Result<()> {
    let dtype = engine.store().dtype();
    // In order of name, which is also the order in which the writer asks: so all ranks gather alike.
    let mut params = model.parameters().as_slice().to_vec();
    params.sort_by(|a, b| a.name().cmp(b.name()));
    if engine.world().rank() != 0 {
        for param in &params {
            engine.weight_as_read(param)?;
        }
        return Ok(());
    }
    let mut config = config.clone();
    set_dtype(&mut config, dtype);
    std::fs::create_dir_all(folder).map_err(TrainError::io(folder))?;
    write_config(folder, &config)?;

    let tensors: Vec<TensorToWrite> = params
        .iter()
        .map(|param| TensorToWrite {
            name: param.name().into(),
            shape: param.whole_shape().sizes().to_vec(),
            dtype,
        })
        .collect();
    let mut bytes = |tensor: &TensorToWrite| {
        let param = params.iter().find(|param| param.name() == tensor.name).expect("it was listed above");
        let failed = |why: String| ModelError::BadFile { path: folder.to_path_buf(), why };
        let values = engine.weight_as_read(param).map_err(|error| failed(error.to_string()))?;
        Ok(match dtype {
            DType::BF16 => values.iter().flat_map(|&v| half::bf16::narrow(v).to_le_bytes()).collect(),
            DType::F16 => values.iter().flat_map(|&v| half::f16::narrow(v).to_le_bytes()).collect(),
            _ => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        })
    };
    Ok(write_directory(folder, &tensors, DEFAULT_SHARD_BYTES, &mut bytes)?)
}
