//! The f32 weights of a ZeRO checkpoint, as DeepSpeed's `zero_to_fp32` extracts them.
//!
//! The same names in the same order with the same bits, and the same refusals: a folder without optimizer files, one
//! whose optimizer is not ZeRO's, and one from which a rank's file is missing.

use std::path::Path;

use crate::deepspeed::is_universal;
use crate::deepspeed::source::{DeepSpeedFiles, Stretch, find, shapes, slice, whole};
use crate::error::{CheckpointError, Result};
use crate::manifest::Dtype;
use crate::pt::{TensorTable, Unknown, Value, write_pt};

/// One extracted tensor; its bytes are read when they are asked for.
#[derive(Debug, Clone)]
pub struct Fp32Tensor {
    /// Its name.
    pub name: String,
    /// Its shape.
    pub shape: Vec<u64>,
    /// Its type: f32, except for frozen parameters, which stay as they were saved.
    pub dtype: Dtype,
    /// The name of the tied parameter that this is another name of.
    pub alias_of: Option<String>,
    stretches: Vec<Stretch>,
}

/// All f32 weights of a checkpoint, in DeepSpeed's order.
pub struct Fp32Weights {
    files: DeepSpeedFiles,
    tensors: Vec<Fp32Tensor>,
}

/// The ZeRO stage of an optimizer state.
pub(crate) fn stage_of(value: &Value) -> Option<u64> {
    match value {
        Value::Object { args, .. } => args.first()?.as_u64(),
        other => other.as_u64(),
    }
}

/// `partition_count`: a number, or one per group, of which the largest counts.
pub(crate) fn partitions(value: &Value) -> Option<u64> {
    match value.items() {
        Some(items) => items.iter().map(Value::as_u64).collect::<Option<Vec<_>>>()?.into_iter().max(),
        None => value.as_u64(),
    }
}

impl Fp32Weights {
    /// Finds the weights of a checkpoint in the folder `dir`.
    pub fn open(
        dir: &Path,
        tag: Option<&str>,
        exclude_frozen_parameters: bool,
        unknown: Unknown,
    ) -> Result<Fp32Weights> {
        let named = crate::directory::named(dir, tag);
        if let Some(path) = named.into_iter().chain([dir.to_path_buf()]).find(|path| is_universal(path)) {
            let why = "is a universal checkpoint, with each parameter in a folder of its own: make one of ours of it with \
                       `ferrospeed checkpoint import-deepspeed`, and extract the weights of that";
            return Err(CheckpointError::file(&path, why));
        }
        let files = DeepSpeedFiles::open(&find(dir, tag)?, unknown)?;
        let tensors = extract(&files, exclude_frozen_parameters)?;
        Ok(Fp32Weights { files, tensors })
    }

    /// The tensors, in order.
    pub fn tensors(&self) -> &[Fp32Tensor] {
        &self.tensors
    }

    /// The bytes of a tensor, little-endian, in its type.
    pub fn read(&self, tensor: &Fp32Tensor) -> Result<Vec<u8>> {
        let mut out = Vec::new();
        for stretch in &tensor.stretches {
            if stretch.tensor.dtype == tensor.dtype {
                let range = stretch.start..stretch.start + stretch.len;
                self.files.files[stretch.file].read(&stretch.tensor, range, &mut out)?;
            } else {
                let values = self.files.read_f32(std::slice::from_ref(stretch))?;
                out.extend(values.iter().flat_map(|value| value.to_le_bytes()));
            }
        }
        Ok(out)
    }
}

impl Fp32Weights {
    /// Writes all of them as a torch file, one tensor in memory at a time.
    pub fn write_pt(&self, path: &Path) -> Result<()> {
        let mut table = TensorTable::default();
        let pairs = self.tensors.iter();
        let pairs = pairs
            .map(|tensor| (Value::str(&tensor.name), table.tensor(tensor.dtype, &tensor.shape)))
            .collect();
        let mut open: Option<(usize, Vec<u8>)> = None;
        write_pt(path, &Value::OrderedDict(pairs), &table.storages, &mut |storage, range, out| {
            let bytes = match open.take() {
                Some((at, bytes)) if at == storage => bytes,
                _ => self.read(&self.tensors[storage])?,
            };
            let size = self.tensors[storage].dtype.size_bytes();
            out.extend_from_slice(&bytes[(range.start * size) as usize..(range.end * size) as usize]);
            open = Some((storage, bytes));
            Ok(())
        })
    }
}

fn extract(files: &DeepSpeedFiles, exclude_frozen: bool) -> Result<Vec<Fp32Tensor>> {
    let optimizers = files.optimizers();
    if optimizers.is_empty() {
        return Err(CheckpointError::file(
            &files.path,
            "holds no *_optim_states.pt: there are no ZeRO states to extract",
        ));
    }
    let stage = files.optimizer(0, "zero_stage").ok().and_then(stage_of).ok_or_else(|| {
        files.fail(
            files.model_files,
            "is not a ZeRO checkpoint: it says no stage (BF16 and MoE optimizers do not); import it instead",
        )
    })?;
    let names = std::fs::read_dir(&files.path).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let is_of_layer = |name: &str| name.starts_with("layer_") && name.contains("-model_");
    if names.into_iter().any(|name| is_of_layer(&name.to_string_lossy())) {
        let why = "is a pipeline's, each of whose stages has optimizer files of its own: make a checkpoint of ours of it with `ferrospeed checkpoint import-deepspeed`, and extract the weights of that";
        return Err(CheckpointError::file(&files.path, why));
    }
    let ranks = files.optimizer(0, "partition_count").ok().and_then(partitions);
    let ranks = ranks.ok_or_else(|| files.fail(files.model_files, "says no partition_count"))?;
    if ranks != optimizers.len() as u64 {
        let why = format!(
            "has {} optimizer files, {ranks} were written: a rank's file is missing, or files of another checkpoint were left here",
            optimizers.len()
        );
        return Err(CheckpointError::file(&files.path, why));
    }
    let mut tensors = buffers(files)?;
    if !exclude_frozen {
        tensors.extend(frozen(files, stage)?);
    }
    for (name, shape, stretches) in trained(files, stage)? {
        tensors.push(Fp32Tensor { name, shape, dtype: Dtype::F32, alias_of: None, stretches });
    }
    let aliases = files.at(0, &["shared_params"]).ok().and_then(Value::pairs).unwrap_or_default();
    for (alias, canonical) in aliases {
        let (Some(alias), Some(canonical)) = (alias.as_str(), canonical.as_str()) else { continue };
        if let Some(found) = tensors.iter().find(|tensor| tensor.name == canonical).cloned() {
            tensors.retain(|tensor| tensor.name != alias);
            tensors.push(Fp32Tensor {
                name: alias.to_owned(),
                alias_of: Some(canonical.to_owned()),
                ..found
            });
        }
    }
    Ok(tensors)
}

/// The module's buffers, widened to f32.
pub(crate) fn buffers(files: &DeepSpeedFiles) -> Result<Vec<Fp32Tensor>> {
    let names = files.at(0, &["buffer_names"])?.items().unwrap_or_default();
    let names: Vec<&str> = names.iter().filter_map(Value::as_str).collect();
    let module = files.at(0, &["module"])?.pairs().unwrap_or_default();
    let entries = module.iter().filter_map(|(name, value)| Some((name.as_str()?, value.as_tensor()?)));
    let entries = entries.filter(|(name, _)| names.contains(name));
    let buffer = |(name, tensor): (&str, &crate::pt::StoredTensor)| Fp32Tensor {
        name: name.to_owned(),
        shape: tensor.shape.clone(),
        // What is no float cannot be widened exactly; it stays.
        dtype: match tensor.dtype {
            Dtype::F16 | Dtype::BF16 | Dtype::F64 => Dtype::F32,
            other => other,
        },
        alias_of: None,
        stretches: vec![whole(0, tensor)],
    };
    Ok(entries.map(buffer).collect())
}

/// Parameters that were not trained.
pub(crate) fn frozen(files: &DeepSpeedFiles, stage: u64) -> Result<Vec<Fp32Tensor>> {
    let Some(list) = files.at(0, &["frozen_param_shapes"]).ok().and_then(shapes) else {
        return Ok(Vec::new());
    };
    let mut tensors = Vec::new();
    for (name, shape) in list {
        let sources = if stage == 3 { 0..files.model_files } else { 0..1 };
        let fragment = |file: usize| {
            let found = files.at(file, &["frozen_param_fragments"])?.get(&name).and_then(Value::as_tensor);
            found
                .map(|tensor| whole(file, tensor))
                .ok_or_else(|| files.fail(file, format!("has no fragment of frozen '{name}'")))
        };
        let fragments = sources.map(fragment).collect::<Result<Vec<_>>>()?;
        let numel = shape.iter().product();
        let stretches = slice(&fragments, 0, numel);
        let stretches =
            stretches.ok_or_else(|| files.fail(0, format!("frozen '{name}' is shorter than {shape:?}")))?;
        let dtype = crate::deepspeed::source::common_type(&fragments).unwrap_or(Dtype::F32);
        tensors.push(Fp32Tensor { name, shape, dtype, alias_of: None, stretches });
    }
    Ok(tensors)
}

/// A parameter, its shape and where its elements lie.
pub(crate) type Placed = (String, Vec<u64>, Vec<Stretch>);

/// Trained parameters and where their f32 weights lie.
pub(crate) fn trained(files: &DeepSpeedFiles, stage: u64) -> Result<Vec<Placed>> {
    let groups = files.param_shapes()?;
    let ranks = files.optimizers().len();
    if stage == 3 {
        let flats =
            (0..ranks).map(|rank| files.tensors(rank, "fp32_flat_groups")).collect::<Result<Vec<_>>>()?;
        return per_parameter(files, &groups, &flats, true);
    }
    let parts = (0..ranks)
        .map(|rank| files.tensors(rank, "single_partition_of_fp32_groups"))
        .collect::<Result<Vec<_>>>()?;
    flat_groups(files, &groups, &parts, ranks as u64)
}

/// Stages 1 and 2: `parts[rank][group]`, end to end over ranks.
pub(crate) fn flat_groups(
    files: &DeepSpeedFiles,
    groups: &[Vec<(String, Vec<u64>)>],
    parts: &[Vec<Stretch>],
    ranks: u64,
) -> Result<Vec<Placed>> {
    let mut placed = Vec::new();
    for (index, group) in groups.iter().enumerate() {
        let flat: Option<Vec<Stretch>> = parts.iter().map(|part| part.get(index).cloned()).collect();
        let flat = flat.ok_or_else(|| {
            files.fail(files.model_files, format!("has no part of parameter group {index}"))
        })?;
        let available: u64 = flat.iter().map(|stretch| stretch.len).sum();
        let mut at = 0;
        for (name, shape) in group {
            let numel: u64 = shape.iter().product();
            let stretches = slice(&flat, at, numel);
            let stretches = stretches.ok_or_else(|| {
                files.fail(
                    files.model_files,
                    format!("'{name}' ends after the {available} elements of group {index}"),
                )
            })?;
            placed.push((name.clone(), shape.clone(), stretches));
            at += numel;
        }
        let rounded = |numel: u64| numel.next_multiple_of(2 * ranks);
        if rounded(at) != rounded(available) {
            let why = format!(
                "consumed {at} numels out of {available}: parameters and parts of group {index} do not fit"
            );
            return Err(files.fail(files.model_files, why));
        }
    }
    Ok(placed)
}

/// Stage 3: `flats[rank]`, sub-groups end to end; each parameter's share at the same place on every rank.
pub(crate) fn per_parameter(
    files: &DeepSpeedFiles,
    groups: &[Vec<(String, Vec<u64>)>],
    flats: &[Vec<Stretch>],
    check: bool,
) -> Result<Vec<Placed>> {
    let ranks = flats.len() as u64;
    let mut placed = Vec::new();
    let mut at = 0;
    for (name, shape) in groups.iter().flatten() {
        let numel: u64 = shape.iter().product();
        let share = numel.div_ceil(ranks);
        let mut stretches = Vec::new();
        for flat in flats {
            let part = slice(flat, at, share);
            let part = part.ok_or_else(|| {
                files.fail(files.model_files, format!("'{name}' ends after a rank's elements"))
            })?;
            stretches.extend(part);
        }
        let stretches = slice(&stretches, 0, numel).unwrap_or_default();
        placed.push((name.clone(), shape.clone(), stretches));
        at += share;
    }
    let available: u64 = flats.first().map_or(0, |flat| flat.iter().map(|stretch| stretch.len).sum());
    if check && at != available {
        let why = format!(
            "consumed {} numels out of {}: parameters and parts do not fit",
            at * ranks,
            available * ranks
        );
        return Err(files.fail(files.model_files, why));
    }
    Ok(placed)
}

impl Fp32Tensor {
    pub(crate) fn into_placed(self) -> (Placed, Dtype) {
        ((self.name, self.shape, self.stretches), self.dtype)
    }
}
