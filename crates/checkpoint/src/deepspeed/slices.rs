//! Slices of layers: what tensor-parallel ranks wrote into files of their own, as one model, and how a model is cut for them.
//!
//! DeepSpeed's files do not say how a weight is cut; a program may, in `universal_checkpoint_info`: patterns of names that are
//! cut by columns, or not at all. Where it says nothing, weights under Megatron's names are cut as Megatron cuts them, vectors
//! that differ lie end to end, and what all slices have alike is not cut. A matrix that differs and has another name is refused.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use regex::RegexSet;

use super::export::Cut;
use super::foreign::{Tensor, Understood};
use super::source::slice;
use super::spelling::Whole;
use crate::error::{CheckpointError, Result};
use crate::load::Checkpoint;
use crate::manifest::{Kind, TensorEntry};
use crate::part::Part;
use crate::pt::{PtFile, Unknown, Value};

/// The key under which a program says how its parameters are cut.
pub(super) const INFORMATION: &str = "universal_checkpoint_info";

const BY_COLUMNS: &str = "parameter_with_row_parallelism_patterns";
const IN_TWO_SECTIONS: &str = "parameter_with_2_sub_params_cat_dim_0";
const NOT_CUT: [&str; 2] = ["tp_replicated_parameter_patterns", "parameter_to_average_patterns"];

/// Megatron's names, which DeepSpeed's own loader knows too: of weights that are cut by columns, and by rows.
const MEGATRON_COLUMNS: [&str; 2] = ["attention.dense.weight", "mlp.dense_4h_to_h.weight"];
const MEGATRON_ROWS: [&str; 4] =
    ["attention.query_key_value.", "mlp.dense_h_to_4h.", "word_embeddings.weight", "final_linear.weight"];

/// How a tensor is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Every slice has all of it.
    Whole,
    /// Along a dim, each of some sections by itself.
    Along { dim: usize, sections: u64 },
}

/// What a program says of the names it has.
struct Information {
    columns: RegexSet,
    two_sections: RegexSet,
    not_cut: RegexSet,
}

impl Information {
    fn of(client: &serde_json::Value, path: &Path) -> Result<Option<Information>> {
        let Some(told) = client.get(INFORMATION) else { return Ok(None) };
        let patterns = |keys: &[&str]| {
            let lists = keys.iter().filter_map(|key| told.get(key)?.as_array());
            // Python's `re.match` begins where the name does.
            let anchored = lists.flatten().filter_map(|pattern| Some(format!("^(?:{})", pattern.as_str()?)));
            RegexSet::new(anchored)
                .map_err(|error| CheckpointError::file(path, format!("'{INFORMATION}': {error}")))
        };
        Ok(Some(Information {
            columns: patterns(&[BY_COLUMNS])?,
            two_sections: patterns(&[IN_TWO_SECTIONS])?,
            not_cut: patterns(&NOT_CUT)?,
        }))
    }

    fn way(&self, name: &str) -> Way {
        match () {
            () if self.not_cut.is_match(name) => Way::Whole,
            () if self.columns.is_match(name) => Way::Along { dim: 1, sections: 1 },
            () if self.two_sections.is_match(name) => Way::Along { dim: 0, sections: 2 },
            () => Way::Along { dim: 0, sections: 1 },
        }
    }
}

/// What all slices hold, as one model.
pub(super) fn join(path: &Path, unknown: Unknown, mut slices: Vec<Understood>) -> Result<Understood> {
    if slices.len() == 1 {
        return Ok(slices.swap_remove(0));
    }
    let mut files: Vec<PathBuf> = Vec::new();
    let mut all: Vec<HashMap<(String, Kind), Tensor>> = Vec::new();
    let mut order = Vec::new();
    let mut first = None;
    for (index, (contents, tensors, own)) in slices.into_iter().enumerate() {
        let steps = contents.training.optimizer_steps;
        let expected = first.get_or_insert(contents).training.optimizer_steps;
        if steps != expected {
            let why = format!("slice {index} made {steps} steps, slice 0 {expected}");
            return Err(CheckpointError::file(path, why));
        }
        let mut named = HashMap::new();
        for mut tensor in tensors {
            tensor.stretches.iter_mut().for_each(|stretch| stretch.file += files.len());
            let key = (tensor.spec.name.clone(), tensor.spec.kind.clone());
            if index == 0 {
                order.push(key.clone());
            }
            named.insert(key, tensor);
        }
        if named.len() != order.len() {
            let why = format!("slice {index} has {} tensors, slice 0 {}", named.len(), order.len());
            return Err(CheckpointError::file(path, why));
        }
        files.extend(own);
        all.push(named);
    }
    let contents = first.expect("there are several slices");
    let information = Information::of(&contents.client_state, path)?;
    let mut values = Values { files: &files, unknown, open: None };
    let mut ways: BTreeMap<String, Way> = BTreeMap::new();
    let mut joined = Vec::new();
    // What a weight is decides for its states.
    order.sort_by_key(|(_, kind)| matches!(kind, Kind::State(_)));
    for key in order {
        let tensors: Option<Vec<Tensor>> = all.iter_mut().map(|slice| slice.remove(&key)).collect();
        let (name, kind) = key;
        let tensors = tensors.ok_or_else(|| {
            CheckpointError::file(path, format!("'{name}' ({kind}) is not in the files of every slice"))
        })?;
        let way = match (ways.get(&name), &information) {
            (Some(way), _) => *way,
            (None, Some(information)) => information.way(&name),
            (None, None) => guessed(path, &name, &tensors, &mut values)?,
        };
        ways.insert(name, way);
        joined.extend(of_slices(path, way, tensors)?);
    }
    joined.sort_by_key(|tensor| tensor.spec.place);
    Ok((contents, joined, files))
}

/// How a tensor is cut that nothing is said of.
fn guessed(path: &Path, name: &str, tensors: &[Tensor], values: &mut Values<'_>) -> Result<Way> {
    if MEGATRON_COLUMNS.iter().any(|known| name.contains(known)) {
        return Ok(Way::Along { dim: 1, sections: 1 });
    }
    if MEGATRON_ROWS.iter().any(|known| name.contains(known)) {
        return Ok(Way::Along { dim: 0, sections: 1 });
    }
    if values.are_alike(tensors)? {
        return Ok(Way::Whole);
    }
    if tensors[0].spec.shape.len() == 1 {
        return Ok(Way::Along { dim: 0, sections: 1 });
    }
    let why = format!(
        "'{name}' differs between {} slices, and nothing says how it is cut: save it with a client state whose '{INFORMATION}' lists '{BY_COLUMNS}' and '{}'",
        tensors.len(),
        NOT_CUT[0]
    );
    Err(CheckpointError::file(path, why))
}

/// The slices of one tensor, each as a part of the whole.
fn of_slices(path: &Path, way: Way, mut tensors: Vec<Tensor>) -> Result<Vec<Tensor>> {
    let Way::Along { dim, sections } = way else {
        tensors.truncate(1);
        return Ok(tensors);
    };
    let mut shape = tensors[0].spec.shape.clone();
    let fits = |tensor: &Tensor| {
        let own = &tensor.spec.shape;
        let elsewhere =
            own.iter().zip(&shape).enumerate().all(|(at, (own, first))| at == dim || own == first);
        own.len() == shape.len() && dim < own.len() && elsewhere && own[dim].is_multiple_of(sections)
    };
    if !tensors.iter().all(fits) {
        let shapes: Vec<_> = tensors.iter().map(|tensor| &tensor.spec.shape).collect();
        let why = format!("slices {shapes:?} of '{}' make no whole along dim {dim}", tensors[0].spec.name);
        return Err(CheckpointError::file(path, why));
    }
    let lengths: Vec<u64> = tensors.iter().map(|tensor| tensor.spec.shape[dim] / sections).collect();
    let section: u64 = lengths.iter().sum();
    shape[dim] = section * sections;
    let place = tensors[0].spec.place;
    let mut before = 0;
    for (tensor, length) in tensors.iter_mut().zip(lengths) {
        let range = |index: u64| [index * section + before, index * section + before + length];
        tensor.spec.part = Some(Part { dim, ranges: (0..sections).map(range).collect() });
        (tensor.spec.shape, tensor.spec.place) = (shape.clone(), place);
        before += length;
    }
    tensors.retain(|tensor| tensor.spec.len > 0);
    Ok(tensors)
}

/// Reads values out of the torch files, one of which is open.
struct Values<'f> {
    files: &'f [PathBuf],
    unknown: Unknown,
    open: Option<(usize, PtFile)>,
}

impl Values<'_> {
    /// Whether tensors have the same bits; where they differ little is read.
    fn are_alike(&mut self, tensors: &[Tensor]) -> Result<bool> {
        const CHUNK: u64 = 1 << 16;
        let (first, others) = tensors.split_first().expect("there are several slices");
        let alike =
            |other: &Tensor| (&first.spec.shape, first.spec.dtype) == (&other.spec.shape, other.spec.dtype);
        if !others.iter().all(alike) {
            return Ok(false);
        }
        for start in (0..first.spec.len).step_by(CHUNK as usize) {
            let len = CHUNK.min(first.spec.len - start);
            let expected = self.read(first, start, len)?;
            for other in others {
                if self.read(other, start, len)? != expected {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    fn read(&mut self, tensor: &Tensor, start: u64, len: u64) -> Result<Vec<u8>> {
        let mut out = Vec::new();
        for stretch in slice(&tensor.stretches, start, len).unwrap_or_default() {
            let file = match self.open.take() {
                Some((at, file)) if at == stretch.file => file,
                _ => PtFile::open_with(&self.files[stretch.file], self.unknown)?,
            };
            file.read(&stretch.tensor, stretch.start..stretch.start + stretch.len, &mut out)?;
            self.open = Some((stretch.file, file));
        }
        Ok(out)
    }
}

/// How a checkpoint is cut into slices when it is written: by tensor, the part of each; none of what every slice has.
pub(super) struct Slices {
    parts: HashMap<String, Vec<Cut>>,
    count: u64,
}

impl Slices {
    /// As it was cut when it was saved.
    pub(super) fn of(checkpoint: &Checkpoint, count: u64) -> Result<Slices> {
        let mut parts = HashMap::new();
        for entry in checkpoint.manifest().tensors.iter().filter(|_| count > 1) {
            if let Some(cut) = recut(entry, count).map_err(CheckpointError::Export)? {
                parts.insert(entry.name.clone(), cut);
            }
        }
        if count > 1 && parts.is_empty() {
            let why = format!(
                "nothing says how layers are cut into {count} slices: the checkpoint was saved without any"
            );
            return Err(CheckpointError::Export(why));
        }
        Ok(Slices { parts, count })
    }

    /// What a slice has of a tensor.
    pub(super) fn cut<'c>(&self, tensor: Whole<'c>, slice: u64) -> Whole<'c> {
        match self.parts.get(&tensor.name).and_then(|parts| parts.get(slice as usize)) {
            Some(part) => tensor.in_part(part.clone()),
            None => tensor,
        }
    }

    /// What readers must know to make wholes of them: exact names as patterns.
    pub(super) fn information(&self, checkpoint: &Checkpoint) -> Option<Value> {
        let of = |wanted: &dyn Fn(Option<&Part>) -> bool| {
            let tensors = checkpoint.manifest().tensors.iter();
            let tensors = tensors.filter(|entry| !matches!(entry.kind, Kind::State(_) | Kind::Rank(_)));
            let part = |name: &str| self.parts.get(name).and_then(|parts| parts.first().map(|part| &**part));
            let names = tensors.map(|entry| entry.name.as_str()).filter(|name| wanted(part(name)));
            Value::List(names.map(|name| Value::Str(format!("{}$", regex::escape(name)))).collect())
        };
        (self.count > 1).then(|| {
            Value::dict([
                ("universal_checkpoint_version", Value::Float(0.2)),
                (NOT_CUT[0], of(&|part| part.is_none())),
                (BY_COLUMNS, of(&|part| part.is_some_and(|part| part.dim == 1))),
                (IN_TWO_SECTIONS, of(&|part| part.is_some_and(|part| part.ranges.len() == 2))),
            ])
        })
    }
}

/// A tensor's parts for some slices: those it was saved in, or as many others of each of their sections.
fn recut(entry: &TensorEntry, count: u64) -> Result<Option<Vec<Cut>>, String> {
    let mut parts: Vec<&Part> = entry.pieces.iter().filter_map(|piece| piece.part.as_ref()).collect();
    parts.dedup();
    let (Some(first), Some(last)) = (parts.first(), parts.last()) else { return Ok(None) };
    let sections = first.ranges.len();
    let refuse = |why: &str| Err(format!("'{}' cannot be cut into {count} slices: {why}", entry.name));
    if first.dim > 1 || sections > 2 || (first.dim, sections) == (1, 2) {
        return refuse("DeepSpeed knows rows, columns and two sections of rows");
    }
    if parts.len() as u64 == count {
        return Ok(Some(parts.into_iter().map(|part| Arc::new(part.clone())).collect()));
    }
    if parts.iter().any(|part| part.ranges.len() != sections) {
        return refuse("it was not cut evenly");
    }
    let ends: Vec<[u64; 2]> = first.ranges.iter().zip(&last.ranges).map(|(a, b)| [a[0], b[1]]).collect();
    if ends.iter().any(|[start, end]| !(end - start).is_multiple_of(count)) {
        return refuse(&format!("{ends:?} of dim {} do not divide", first.dim));
    }
    let cut = |slice: u64| {
        let range = |[start, end]: &[u64; 2]| {
            let length = (end - start) / count;
            [start + slice * length, start + (slice + 1) * length]
        };
        Arc::new(Part { dim: first.dim, ranges: ends.iter().map(range).collect() })
    };
    Ok(Some((0..count).map(cut).collect()))
}
