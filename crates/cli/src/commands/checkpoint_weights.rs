//! `ferrospeed checkpoint to-fp32|export-hf`: the weights of a checkpoint, ours or DeepSpeed's, as a file or a model directory.

use std::path::{Path, PathBuf};

use ferrospeed_checkpoint::deepspeed::Fp32Weights;
use ferrospeed_checkpoint::pt::{TensorTable, Unknown, Value, write_pt};
use ferrospeed_checkpoint::{Checkpoint, CheckpointError, Dtype, Kind, TensorEntry};
use ferrospeed_command::{Failure, terminal};
use ferrospeed_models::ModelError;
use ferrospeed_models::adapter::{stored_name, write_into};
use ferrospeed_models::directory::{
    DEFAULT_SHARD_BYTES, GENERATION_FILES, NewDirectory, TOKENIZER_FILES, copy_files, set_dtype, write_config,
};
use ferrospeed_models::weights::{TensorToWrite, write_directory, write_file};
use ferrospeed_nn::adapter::part_of;
use ferrospeed_tensor::DType;

use super::checkpoint::WeightType;
use super::checkpoint_which::Which;

/// Weights of either kind of checkpoint, one tensor at a time.
pub(super) enum Weights {
    Ours(Box<Checkpoint>, bool),
    DeepSpeed(Fp32Weights),
}

/// A tensor's name, shape and stored type.
type Listed = (String, Vec<u64>, Dtype);

impl Weights {
    pub(super) fn open(
        which: &Which,
        exclude_frozen: bool,
        unknown: Unknown,
    ) -> Result<Weights, CheckpointError> {
        match which.open_and_say() {
            Ok(checkpoint) => Ok(Weights::Ours(Box::new(checkpoint), exclude_frozen)),
            Err(CheckpointError::NotFound { .. }) => Ok(Weights::DeepSpeed(Fp32Weights::open(
                &which.folder(),
                which.tag.as_deref(),
                exclude_frozen,
                unknown,
            )?)),
            Err(other) => Err(other),
        }
    }

    /// Every tensor; tied ones under all of their names, or under one.
    fn list(&self, with_aliases: bool) -> Vec<Listed> {
        match self {
            Weights::Ours(checkpoint, exclude_frozen) => {
                let tensors = checkpoint.manifest().tensors.iter().filter(|tensor| match tensor.kind {
                    Kind::Master | Kind::Buffer => true,
                    Kind::Weight => !exclude_frozen,
                    Kind::State(_) | Kind::Rank(_) => false,
                });
                let listed =
                    |name: &String, tensor: &TensorEntry| (name.clone(), tensor.shape.clone(), tensor.dtype);
                let aliases = checkpoint.manifest().aliases.keys().filter(|_| with_aliases);
                let aliases = aliases.filter_map(|alias| Some(listed(alias, checkpoint.weights(alias)?)));
                tensors.map(|tensor| listed(&tensor.name, tensor)).chain(aliases).collect()
            }
            Weights::DeepSpeed(weights) => {
                let tensors = weights.tensors().iter();
                let tensors = tensors.filter(|tensor| with_aliases || tensor.alias_of.is_none());
                tensors.map(|tensor| (tensor.name.clone(), tensor.shape.clone(), tensor.dtype)).collect()
            }
        }
    }

    /// What the model was trained in, where the checkpoint says; f32 copies are kept of 16 bits too.
    fn trained_type(&self) -> Dtype {
        match self {
            Weights::Ours(checkpoint, _) => checkpoint.manifest().origin.dtype,
            Weights::DeepSpeed(_) => Dtype::F32,
        }
    }

    /// A tensor's bytes as stored.
    fn read(&self, name: &str) -> Result<Vec<u8>, CheckpointError> {
        let absent = || CheckpointError::Request(format!("'{name}' is not in the checkpoint"));
        match self {
            Weights::Ours(checkpoint, _) => {
                let entry = checkpoint.weights(name).or_else(|| checkpoint.entry(&Kind::Buffer, name));
                let entry = entry.ok_or_else(absent)?;
                let mut bytes = Vec::new();
                checkpoint.read_bytes(entry, 0..entry.numel(), &mut bytes)?;
                Ok(bytes)
            }
            Weights::DeepSpeed(weights) => {
                weights.read(weights.tensors().iter().find(|tensor| tensor.name == name).ok_or_else(absent)?)
            }
        }
    }

    /// A tensor of floats in another type; others as stored.
    fn read_as(&self, (name, _, stored): &Listed, wanted: Dtype) -> Result<Vec<u8>, CheckpointError> {
        let bytes = self.read(name)?;
        if *stored == wanted || !stored.is_float() {
            return Ok(bytes);
        }
        let mut values = vec![0.0; bytes.len() / stored.size_bytes() as usize];
        let mut out = Vec::with_capacity(values.len() * wanted.size_bytes() as usize);
        let converted =
            stored.to_f32(&bytes, &mut values).and_then(|()| wanted.append_f32(&values, &mut out));
        converted.ok_or_else(|| CheckpointError::Request(format!("'{name}' cannot become {wanted:?}")))?;
        Ok(out)
    }
}

/// Our tensor type for a stored one; `None` for those that model files do not use.
fn tensor_type(dtype: Dtype) -> Option<DType> {
    Some(match dtype {
        Dtype::F32 | Dtype::F64 => DType::F32,
        Dtype::BF16 => DType::BF16,
        Dtype::F16 => DType::F16,
        Dtype::I64 => DType::I64,
        Dtype::I32 => DType::I32,
        Dtype::U8 => DType::U8,
        Dtype::BOOL => DType::Bool,
        Dtype::I16 | Dtype::I8 => return None,
    })
}

pub(super) fn to_fp32(weights: &Weights, output: &Path) -> Result<(), Failure> {
    match output.extension().and_then(|ending| ending.to_str()) {
        Some("safetensors") => {
            return write_safetensors(weights, true, Dtype::F32, |tensors, bytes| {
                write_file(output, tensors, bytes)
            });
        }
        Some("bin" | "pt" | "pth") => {}
        _ => {
            let why =
                "what kind of file is meant? Call it .safetensors, or .bin, .pt or .pth for one of torch";
            return Err(Failure::Usage(format!("{}: {why}", output.display())));
        }
    }
    let listed = weights.list(true);
    let mut table = TensorTable::default();
    let wanted = |stored: Dtype| if stored.is_float() { Dtype::F32 } else { stored };
    let pairs =
        listed.iter().map(|(name, shape, stored)| (Value::str(name), table.tensor(wanted(*stored), shape)));
    let value = Value::OrderedDict(pairs.collect());
    let mut open: Option<(usize, Vec<u8>)> = None;
    write_pt(output, &value, &table.storages, &mut |storage, range, out| {
        let bytes = match open.take() {
            Some((at, bytes)) if at == storage => bytes,
            _ => weights.read_as(&listed[storage], Dtype::F32)?,
        };
        let size = wanted(listed[storage].2).size_bytes();
        out.extend_from_slice(&bytes[(range.start * size) as usize..(range.end * size) as usize]);
        open = Some((storage, bytes));
        Ok(())
    })?;
    Ok(())
}

/// Lists all weights and hands them to a writer, one at a time.
fn write_safetensors(
    weights: &Weights,
    with_aliases: bool,
    wanted: Dtype,
    write: impl FnOnce(
        &[TensorToWrite],
        &mut dyn FnMut(&TensorToWrite) -> Result<Vec<u8>, ModelError>,
    ) -> Result<(), ModelError>,
) -> Result<(), Failure> {
    let listed = weights.list(with_aliases);
    let mut tensors = Vec::with_capacity(listed.len());
    for (name, shape, stored) in &listed {
        let dtype = tensor_type(if stored.is_float() { wanted } else { *stored });
        let dtype = dtype.ok_or_else(|| {
            Failure::Run(format!("'{name}' is {stored:?}, which safetensors models do not use"))
        })?;
        tensors.push(TensorToWrite {
            name: name.clone(),
            shape: shape.iter().map(|size| *size as usize).collect(),
            dtype,
        });
    }
    let mut read = |tensor: &TensorToWrite| {
        let listed = listed.iter().find(|(name, ..)| *name == tensor.name);
        let bytes = listed.map_or(Ok(Vec::new()), |listed| weights.read_as(listed, wanted));
        bytes.map_err(|error| ModelError::BadFile {
            path: PathBuf::from(&tensor.name),
            why: error.to_string(),
        })
    };
    write(&tensors, &mut read).map_err(|error| Failure::Run(error.to_string()))
}

/// Writes a model's directory where there is none, whole or not at all.
pub(super) fn export_hf(
    which: &Which,
    output: &Path,
    dtype: Option<WeightType>,
    max_shard_bytes: usize,
) -> Result<(), Failure> {
    NewDirectory::sweep(output);
    if std::fs::read_dir(output).is_ok_and(|mut entries| entries.next().is_some()) || output.is_file() {
        let why = "is already there, and its files would stay beside the new ones; name a new directory";
        return Err(Failure::Usage(format!("{} {why}", output.display())));
    }
    let kind = write_new(which, output, dtype, max_shard_bytes)?;
    let why = if dtype.is_some() { "" } else { " (--dtype f32, bf16 or f16 writes another type)" };
    terminal::print_output(&format!("{}: weights in {kind:?}{why}\n", output.display()))
}

/// The same to where nothing is, without a word.
pub(super) fn export_quietly(which: &Which, output: &Path) -> Result<(), Failure> {
    write_new(which, output, None, DEFAULT_SHARD_BYTES).map(drop)
}

fn write_new(
    which: &Which,
    output: &Path,
    dtype: Option<WeightType>,
    max_shard_bytes: usize,
) -> Result<Dtype, Failure> {
    let failed = |error: ModelError| Failure::Run(error.to_string());
    let weights = Weights::open(which, false, Unknown::Refuse)?;
    let new = NewDirectory::create(output).map_err(failed)?;
    let kind = write_model(&weights, new.path(), dtype, max_shard_bytes)?;
    new.finish().map_err(failed)?;
    Ok(kind)
}

/// Writes adapters under the names that PEFT gives them.
fn write_adapter(
    output: &Path,
    config: &serde_json::Value,
    tensors: &[TensorToWrite],
    bytes: &mut dyn FnMut(&TensorToWrite) -> Result<Vec<u8>, ModelError>,
) -> Result<(), ModelError> {
    let adapted: Vec<&str> = tensors.iter().filter_map(|tensor| Some(part_of(&tensor.name)?.0)).collect();
    let stored = |tensor: &TensorToWrite| stored_name(&tensor.name, &adapted);
    let renamed: Vec<TensorToWrite> =
        tensors.iter().map(|tensor| TensorToWrite { name: stored(tensor), ..tensor.clone() }).collect();
    write_into(output, config, &renamed, &mut |wanted| {
        let own = tensors.iter().find(|tensor| stored(tensor) == wanted.name);
        own.map_or(Ok(Vec::new()), &mut *bytes)
    })
}

/// Gives the type of the weights.
fn write_model(
    weights: &Weights,
    output: &Path,
    dtype: Option<WeightType>,
    max_shard_bytes: usize,
) -> Result<Dtype, Failure> {
    let wanted = match dtype {
        None => weights.trained_type(),
        Some(WeightType::F32) => Dtype::F32,
        Some(WeightType::Bf16) => Dtype::BF16,
        Some(WeightType::F16) => Dtype::F16,
    };
    let failed = |error: ModelError| Failure::Run(error.to_string());
    let state = match weights {
        Weights::Ours(checkpoint, _) => Some(&checkpoint.manifest().client_state),
        Weights::DeepSpeed(_) => None,
    };
    // What was trained beside a model's weights is no model without them.
    match state.map(|state| &state["adapter"]["config"]).filter(|config| config.is_object()) {
        Some(config) => write_safetensors(weights, false, wanted, |tensors, bytes| {
            write_adapter(output, config, tensors, bytes)
        })?,
        None => {
            write_safetensors(weights, false, wanted, |tensors, bytes| {
                write_directory(output, tensors, max_shard_bytes, bytes)
            })?;
            // A run of a recipe knows what its model is.
            let Some(config) = state.and_then(|state| state.get("model_config")) else { return Ok(wanted) };
            let mut config = config.clone();
            if let Some(dtype) = tensor_type(wanted) {
                set_dtype(&mut config, dtype);
            }
            write_config(output, &config).map_err(failed)?;
        }
    }
    let Weights::Ours(checkpoint, _) = weights else { return Ok(wanted) };
    // The tokenizer lies where the run will export its own model: RUN/model beside RUN/checkpoints/TAG.
    let run =
        checkpoint.path().canonicalize().ok().and_then(|own| Some(own.ancestors().nth(2)?.join("model")));
    let Some(model) = run else { return Ok(wanted) };
    copy_files(&model, output, &TOKENIZER_FILES).map_err(failed)?;
    copy_files(&model, output, &GENERATION_FILES).map_err(failed)?;
    Ok(wanted)
}
