//! Two spellings of one model: the names that weight files have, which are ours, and those of transformers 5 in memory, which
//! DeepSpeed then writes.
//!
//! There, GPT-NeoX's head is `lm_head`, Mixtral's mixture `mlp`, and the experts of a layer lie stacked in two tensors:
//! `…experts.gate_up_proj`, `[experts, 2·inner, width]`, and `…experts.down_proj`, `[experts, width, inner]`. A stack is its
//! experts' matrices end to end, so neither way needs more than a list of stretches.

use std::collections::{BTreeMap, HashSet};

use crate::deepspeed::export::{Cut, Part};
use crate::error::{CheckpointError, Result};
use crate::load::Checkpoint;
use crate::manifest::{Dtype, Kind, Manifest, Piece, TensorEntry};

/// By which names an exported checkpoint calls its parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Spelling {
    /// Those of weight files, which are those of transformers 4 in memory.
    #[default]
    Files,
    /// Those of transformers 5 in memory.
    Transformers5,
}

/// Where a parameter of ours is in a model of transformers 5.
#[derive(Debug, PartialEq, Eq)]
struct Place {
    name: String,
    /// In a stack: which expert's, and which of how many matrices that lie together.
    stacked: Option<(u64, u64, u64)>,
}

fn place_of(name: &str) -> Place {
    let plain = |name: String| Place { name, stacked: None };
    if name == "embed_out.weight" {
        return plain("lm_head.weight".into());
    }
    let renamed = name.replace(".block_sparse_moe.", ".mlp.");
    let stacked = renamed.split_once(".experts.").and_then(|(layer, expert)| {
        let (index, matrix) = expert.strip_suffix(".weight")?.split_once('.')?;
        let (stack, slot, slots) = match matrix {
            "w1" | "gate_proj" => ("gate_up_proj", 0, 2),
            "w3" | "up_proj" => ("gate_up_proj", 1, 2),
            "w2" | "down_proj" => ("down_proj", 0, 1),
            _ => return None,
        };
        let stacked = Some((index.parse().ok()?, slot, slots));
        Some(Place { name: format!("{layer}.experts.{stack}"), stacked })
    });
    stacked.unwrap_or_else(|| plain(renamed))
}

/// A tensor as it is exported: one of ours, or several end to end.
#[derive(Debug, Clone)]
pub(crate) struct Whole<'c> {
    pub(crate) name: String,
    pub(crate) kind: Kind,
    pub(crate) shape: Vec<u64>,
    pub(crate) dtype: Dtype,
    parts: Vec<&'c TensorEntry>,
    /// Of which part of one of ours it is; of all where there is none.
    of: Option<Cut>,
}

impl<'c> Whole<'c> {
    fn one(name: String, entry: &'c TensorEntry) -> Whole<'c> {
        let (kind, shape, dtype) = (entry.kind.clone(), entry.shape.clone(), entry.dtype);
        Whole { name, kind, shape, dtype, parts: vec![entry], of: None }
    }

    /// The same under another name.
    pub(crate) fn called(self, name: String) -> Whole<'c> {
        Whole { name, ..self }
    }

    /// A part of it, as a tensor of its own.
    pub(crate) fn in_part(mut self, part: Cut) -> Whole<'c> {
        self.shape[part.dim] = part.ranges.iter().map(|[start, end]| end - start).sum();
        self.of = Some(part);
        self
    }

    pub(crate) fn numel(&self) -> u64 {
        self.shape.iter().product()
    }

    pub(crate) fn all(&self) -> Vec<Part<'c>> {
        self.cut(0, self.numel())
    }

    /// `len` elements from `start` on, padded with zeros where it ends.
    pub(crate) fn cut(&self, start: u64, len: u64) -> Vec<Part<'c>> {
        let (mut cut, mut at, end) = (Vec::new(), 0, start + len);
        for entry in &self.parts {
            let numel = if self.of.is_some() { self.numel() } else { entry.numel() };
            let (from, to) = (start.max(at), end.min(at + numel));
            if from < to {
                cut.push(Part::Of { entry, of: self.of.clone(), start: from - at, len: to - from });
            }
            at += numel;
        }
        let missing = end - end.min(at.max(start));
        if missing > 0 {
            cut.push(Part::Zeros(missing));
        }
        cut
    }
}

/// Tensors of one kind as they are exported, in their order; a stack stands where its first matrix stood.
pub(crate) fn spelled<'c>(
    checkpoint: &Checkpoint,
    entries: impl IntoIterator<Item = &'c TensorEntry>,
    spelling: Spelling,
) -> Result<Vec<Whole<'c>>> {
    let mut wholes: Vec<Whole<'c>> = Vec::new();
    let mut stacks: BTreeMap<(Kind, String), Stack<'c>> = BTreeMap::new();
    for entry in entries {
        let place = match spelling {
            Spelling::Files => Place { name: entry.name.clone(), stacked: None },
            Spelling::Transformers5 => place_of(&entry.name),
        };
        let Some((expert, slot, slots)) = place.stacked else {
            wholes.push(Whole::one(place.name, entry));
            continue;
        };
        let stack = stacks.entry((entry.kind.clone(), place.name.clone())).or_insert_with(|| {
            wholes.push(Whole::one(place.name, entry));
            Stack { at: wholes.len() - 1, slots, matrices: BTreeMap::new() }
        });
        stack.matrices.insert(expert * slots + slot, entry);
    }
    for ((_, name), stack) in stacks {
        let whole = &mut wholes[stack.at];
        let is_complete = stack.matrices.keys().copied().eq(0..stack.matrices.len() as u64);
        let first = stack.matrices.values().next().expect("a stack begins with a matrix");
        let is_even =
            stack.matrices.values().all(|entry| entry.shape == first.shape && entry.dtype == first.dtype);
        let experts = stack.matrices.len() as u64 / stack.slots;
        match first.shape[..] {
            [rows, columns]
                if is_complete && is_even && experts * stack.slots == stack.matrices.len() as u64 =>
            {
                whole.shape = vec![experts, stack.slots * rows, columns];
                whole.parts = stack.matrices.into_values().collect();
            }
            _ => {
                let why = format!(
                    "'{name}' cannot be put together for transformers 5: an expert's matrix is missing, of another shape or type, or in another parameter group"
                );
                return Err(CheckpointError::file(checkpoint.path(), why));
            }
        }
    }
    Ok(wholes)
}

/// A stack in the making.
struct Stack<'c> {
    /// Its place among the exported tensors.
    at: usize,
    /// How many matrices of an expert lie in it.
    slots: u64,
    matrices: BTreeMap<u64, &'c TensorEntry>,
}

/// The name under which an alias or its parameter is exported.
pub(crate) fn respelled(name: &str, spelling: Spelling) -> String {
    match spelling {
        Spelling::Files => name.to_owned(),
        Spelling::Transformers5 => place_of(name).name,
    }
}

/// Calls what another program wrote by the names of a model's parameters, where it has transformers 5's: stacks are cut into
/// their experts. Names that mean nothing to the model stay as they are.
pub(crate) fn spell_as(manifest: &mut Manifest, wanted: &[&str]) {
    let known: HashSet<String> = manifest.tensors.iter().map(|tensor| tensor.name.clone()).collect();
    let mut places: BTreeMap<String, Vec<(&str, Place)>> = BTreeMap::new();
    for name in wanted.iter().filter(|name| !known.contains(**name)) {
        let place = place_of(name);
        if known.contains(&place.name) {
            places.entry(place.name.clone()).or_default().push((name, place));
        }
    }
    if places.is_empty() {
        return;
    }
    let tensors = std::mem::take(&mut manifest.tensors);
    for tensor in tensors {
        let cut: Option<Vec<TensorEntry>> = places
            .get(&tensor.name)
            .map(|places| places.iter().map(|(name, place)| part_of(&tensor, name, place)))
            .and_then(Iterator::collect);
        match cut {
            Some(cut) => manifest.tensors.extend(cut),
            None => manifest.tensors.push(tensor),
        }
    }
    for group in &mut manifest.training.groups {
        let params = std::mem::take(&mut group.params);
        for param in params {
            match places.get(&param) {
                Some(places) => group.params.extend(places.iter().map(|(name, _)| (*name).to_owned())),
                None => group.params.push(param),
            }
        }
    }
}

/// A parameter out of the tensor that it has in transformers 5; `None` if that is no such stack.
fn part_of(tensor: &TensorEntry, name: &str, place: &Place) -> Option<TensorEntry> {
    let Some((expert, slot, slots)) = place.stacked else {
        return Some(TensorEntry { name: name.to_owned(), ..tensor.clone() });
    };
    let &[experts, rows, columns] = &tensor.shape[..] else { return None };
    if expert >= experts || rows % slots != 0 {
        return None;
    }
    let shape = vec![rows / slots, columns];
    let len: u64 = shape.iter().product();
    let start = (expert * slots + slot) * len;
    let cut = |piece: &Piece| {
        let (from, to) = (start.max(piece.start), (start + len).min(piece.start + piece.len));
        (from < to).then(|| Piece {
            offset: piece.offset + (from - piece.start) * tensor.dtype.size_bytes(),
            start: from - start,
            len: to - from,
            ..piece.clone()
        })
    };
    let pieces = tensor.pieces.iter().filter_map(cut).collect();
    Some(TensorEntry { name: name.to_owned(), shape, pieces, ..tensor.clone() })
}
