//! The weights of a checkpoint, ours or DeepSpeed's, in f32 and by name: what DeepSpeed's `zero_to_fp32` gives a program.
//!
//! DeepSpeed's third function, `load_state_dict_from_zero_checkpoint`, is a load of an engine with `load_module_only`.

use std::path::Path;

use crate::directory::resolve_any;
use crate::error::{CheckpointError, Result};
use crate::load::Checkpoint;
use crate::manifest::{Dtype, Kind, TensorEntry};
use crate::pt::{TensorTable, Value, write_pt};

/// One weight.
#[derive(Debug, Clone, PartialEq)]
pub struct Fp32Weight {
    /// Its name.
    pub name: String,
    /// Its shape.
    pub shape: Vec<u64>,
    /// Its values.
    pub values: Vec<f32>,
}

/// Every tensor of floats: parameters and buffers, and what is tied under each of its names.
fn listed(checkpoint: &Checkpoint) -> Vec<(&str, &TensorEntry)> {
    let manifest = checkpoint.manifest();
    let is_weight = |entry: &&TensorEntry| {
        matches!(entry.kind, Kind::Master | Kind::Weight | Kind::Buffer) && entry.dtype.is_float()
    };
    let own = manifest.tensors.iter().filter(is_weight).map(|entry| (&*entry.name, entry));
    let tied = manifest.aliases.keys().filter_map(|name| Some((&**name, checkpoint.weights(name)?)));
    own.chain(tied).collect()
}

fn read(checkpoint: &Checkpoint, entry: &TensorEntry) -> Result<Vec<f32>> {
    let mut values = vec![0.0; usize::try_from(entry.numel()).unwrap_or(usize::MAX)];
    checkpoint.read_f32(entry, 0..entry.numel(), &mut values)?;
    Ok(values)
}

/// All weights of the checkpoint `tag` in the folder `dir`, or of the one that `latest` names.
pub fn get_fp32_state_dict_from_zero_checkpoint(
    dir: impl AsRef<Path>,
    tag: Option<&str>,
) -> Result<Vec<Fp32Weight>> {
    let checkpoint = Checkpoint::open_any(&resolve_any(dir.as_ref(), tag)?)?;
    let weight = |(name, entry): (&str, &TensorEntry)| {
        let values = read(&checkpoint, entry)?;
        Ok(Fp32Weight { name: name.to_owned(), shape: entry.shape.clone(), values })
    };
    listed(&checkpoint).into_iter().map(weight).collect()
}

/// The same, into a file of torch, one weight in memory at a time.
pub fn convert_zero_checkpoint_to_fp32_state_dict(
    dir: impl AsRef<Path>,
    output: impl AsRef<Path>,
    tag: Option<&str>,
) -> Result<()> {
    let checkpoint = Checkpoint::open_any(&resolve_any(dir.as_ref(), tag)?)?;
    let listed = listed(&checkpoint);
    let mut table = TensorTable::default();
    let pairs = listed.iter().map(|(name, entry)| (Value::str(name), table.tensor(Dtype::F32, &entry.shape)));
    let value = Value::OrderedDict(pairs.collect());
    let mut open: Option<(usize, Vec<f32>)> = None;
    write_pt(output.as_ref(), &value, &table.storages, &mut |storage, range, out| {
        let values = match open.take() {
            Some((at, values)) if at == storage => values,
            _ => read(&checkpoint, listed[storage].1)?,
        };
        let wanted = &values[range.start as usize..range.end as usize];
        Dtype::F32.append_f32(wanted, out).ok_or_else(|| CheckpointError::Request("f32 is f32".into()))?;
        open = Some((storage, values));
        Ok(())
    })
}
