//! A model directory whose linear layers have weights of 8 or 4 bits.
//!
//! The form is our own: `config.json` and everything else stays as it is, a packed weight stands under its name with `.q8_0`,
//! `.q4_0` or `.f8_e4m3` behind, and `.turned` before that where the family has weights as `[inputs, outputs]`. Embeddings, norms, biases and routers stay whole. Made for `serve`; it can be read wherever a model can.

use std::path::Path;

use ferrospeed_tensor::packed::{PackedBits, PackedWeight};
use ferrospeed_tensor::{DType, Param};

use crate::config::ModelConfig;
use crate::decoder::Decoder;
use crate::directory::{NewDirectory, WriteOptions, encode, set_dtype, write_config};
use crate::error::{ModelError, Result};
use crate::model_files::ModelFiles;
use crate::weights::{TensorToWrite, Written, packed_name, packed_shape, write_counted};

/// Copies the model in `source`, a directory or a GGUF file, to the new directory `target` with weights of so many bits. What stays whole gets the type that
/// `options` names, or keeps its own.
pub fn pack(source: &Path, target: &Path, bits: PackedBits, options: &WriteOptions) -> Result<Written> {
    write_parameters(&ModelFiles::open(source)?, target, Some(bits), options)
}

/// Writes every parameter of a causal language model under its name: those that can be in so many bits, the others whole.
pub(crate) fn write_parameters(
    files: &ModelFiles,
    target: &Path,
    bits: Option<PackedBits>,
    options: &WriteOptions,
) -> Result<Written> {
    let ModelConfig::Decoder(decoder) = files.model()? else {
        return Err(ModelError::file(files.path(), "is no causal language model; only such are packed"));
    };
    let weights = files.weights();
    let model = Decoder::new(*decoder);
    let params = model.parameters().as_slice();
    weights.check(params)?;
    let mut planned: Vec<(TensorToWrite, &Param)> = Vec::new();
    for param in params {
        let (name, shape) = (param.name(), param.shape().sizes());
        let packing = bits.and_then(|bits| model.packing(param, bits));
        let tensor = match packing.and_then(|packing| Some((packing, packed_shape(shape, packing)?))) {
            Some((packing, shape)) => {
                TensorToWrite { name: packed_name(name, packing), shape, dtype: DType::U8 }
            }
            None => {
                let dtype = options.dtype.or_else(|| weights.dtype_of(param)).unwrap_or(files.dtype());
                TensorToWrite { name: name.to_owned(), shape: shape.to_vec(), dtype }
            }
        };
        planned.push((tensor, param));
    }
    if bits.is_some() && !planned.iter().any(|(tensor, _)| tensor.dtype == DType::U8) {
        let why = "has no weight that can be stored packed: the inputs of its layers are no multiple of 32";
        return Err(ModelError::file(files.path(), why));
    }
    planned.sort_by(|a, b| a.0.name.cmp(&b.0.name));
    let tensors: Vec<TensorToWrite> = planned.iter().map(|(tensor, _)| tensor.clone()).collect();
    let mut config = files.config().clone();
    if let Some(dtype) = options.dtype {
        set_dtype(&mut config, dtype);
    }
    let new = NewDirectory::create(target)?;
    files.write_companions(new.path())?;
    write_config(new.path(), &config)?;
    let written = write_counted(new.path(), &tensors, options.max_shard_bytes, &mut |tensor| {
        let place = planned.binary_search_by(|(other, _)| other.name.cmp(&tensor.name));
        let param = planned[place.expect("every tensor to write was planned")].1;
        if let (DType::U8, Some(packing)) = (tensor.dtype, bits.and_then(|bits| model.packing(param, bits))) {
            return Ok(PackedWeight::load(param, packing, files.source())?.to_file_bytes());
        }
        let mut values = vec![0.0; param.numel()];
        files.source().load(param, 0..param.numel(), &mut values)?;
        encode(&tensor.name, &values, tensor.dtype)
    })?;
    new.finish()?;
    Ok(written)
}
