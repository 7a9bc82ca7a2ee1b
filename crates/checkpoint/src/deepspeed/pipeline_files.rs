//! A checkpoint of ours in the layout of DeepSpeed's pipelines: a file per layer and slice with its weights, and for every stage
//! and slice a module file beside the optimizer files of its data-parallel ranks.
//!
//! A model whose names begin with the numbers of layers is cut into stages; others have no such layout. A weight that several
//! layers share is in the file of each of them, and every stage that uses it has its states, before those of its own layers and
//! in the order in which its layers use them: DeepSpeed keeps tied modules so.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::export::{ExportOptions, Exporter};
use super::exported::exported;
use super::pipeline::{TIED, layer_of};
use super::slices::Slices;
use super::spelling::Spelling;
use crate::directory::LATEST_FILE;
use crate::error::{CheckpointError, Result};
use crate::load::Checkpoint;
use crate::manifest::Dtype;

/// A pipeline whose files are written.
#[derive(Debug, Clone, Copy)]
pub struct PipelineFiles<'a> {
    /// Stage `s` has the layers from `boundaries[s]` up to `boundaries[s + 1]`. A parameter's name begins with its layer's
    /// number.
    pub boundaries: &'a [u64],
    /// Data-parallel ranks of a stage.
    pub ranks: u64,
    /// Slices of each layer: ranks that hold parts of its weights, cut as they were when they were saved.
    pub slices: u64,
    /// Layers that share their parameters with the first one of them, besides those that the checkpoint knows of.
    pub tied: &'a [Vec<u64>],
    /// The ZeRO stage: 1, or 0, which DeepSpeed writes so for f32 alone.
    pub zero_stage: u8,
}

/// Writes a checkpoint as DeepSpeed writes that of a pipeline. Returns how many layers without parameters are at its end.
pub fn export_pipeline(checkpoint: &Checkpoint, dir: &Path, files: PipelineFiles<'_>) -> Result<u64> {
    files.check(checkpoint)?;
    let PipelineFiles { boundaries, ranks, slices: count, zero_stage, .. } = files;
    let users = files.users(checkpoint);
    let slices = Slices::of(checkpoint, count)?;
    let (stages, end) = (boundaries.len() as u64 - 1, boundaries[boundaries.len() - 1]);
    let options = ExportOptions { stage: zero_stage, ranks, expert_ranks: 1, spelling: Spelling::Files };
    let everything = || Exporter::new(checkpoint, options, Default::default());
    let written = |folder: &Path| {
        for slice in 0..count {
            let whole = everything()?.changed(|tensor| Some((0, slices.cut(tensor, slice))));
            let of = if count > 1 { format!("model_{slice:02}-") } else { String::new() };
            for layer in 0..end {
                let path = folder.join(format!("layer_{layer:02}-{of}model_states.pt"));
                whole.write_weights(&path, |tensor| {
                    let (own, rest) = tensor.name.split_once('.')?;
                    let is_tied = users.get(&tensor.name).is_some_and(|users| users.contains(&layer));
                    (own.parse() == Ok(layer) || is_tied).then(|| rest.to_owned())
                })?;
            }
            for (stage, ends) in boundaries.windows(2).enumerate() {
                let is_here = |layer: u64| (ends[0]..ends[1]).contains(&layer);
                let own = everything()?.changed(|tensor| {
                    let Some(users) = users.get(&tensor.name) else {
                        return layer_of(&tensor.name)
                            .is_some_and(is_here)
                            .then(|| (end, slices.cut(tensor, slice)));
                    };
                    let name = format!("{TIED}{}", tensor.name);
                    let first_use = users.iter().copied().find(|layer| is_here(*layer))?;
                    Some((first_use, slices.cut(tensor, slice).called(name)))
                });
                let information = slices.information(checkpoint);
                own.of_pipeline(stages * count, information)
                    .write_ranks(folder, stage * count as usize + slice as usize)?;
            }
        }
        Ok(())
    };
    exported(dir, &checkpoint.manifest().tag, LATEST_FILE, written)?;
    Ok(end.saturating_sub(files.layers_with_parameters(checkpoint)))
}

/// Layers without parameters that may follow the last one with some: activations, a softmax. More are a slip of the finger.
const MOST_AT_THE_END: u64 = 8;

impl PipelineFiles<'_> {
    fn check(&self, checkpoint: &Checkpoint) -> Result<()> {
        let PipelineFiles { boundaries, ranks, slices, tied, zero_stage } = *self;
        let refuse = |why: String| Err(CheckpointError::Export(why));
        let rises = boundaries.windows(2).all(|pair| pair[0] < pair[1]);
        if ranks == 0 || slices == 0 || boundaries.len() < 2 || boundaries[0] != 0 || !rises {
            return refuse(format!(
                "boundaries {boundaries:?} on {ranks} ranks in {slices} slices make no pipeline: they begin with 0 and rise"
            ));
        }
        if zero_stage > 1 {
            return refuse(format!(
                "ZeRO stage {zero_stage} cannot be combined with pipelines; write 1 or 0"
            ));
        }
        if zero_stage == 0 && checkpoint.manifest().origin.dtype != Dtype::F32 {
            return refuse(
                "DeepSpeed keeps 16-bit weights without ZeRO in another way, which is not written; use stage 1"
                    .into(),
            );
        }
        let end = boundaries[boundaries.len() - 1];
        let all = &checkpoint.manifest().tensors;
        if let Some(entry) = all.iter().find(|entry| layer_of(&entry.name).is_none_or(|layer| layer >= end)) {
            return refuse(format!(
                "'{}' is in none of {end} layers: DeepSpeed's pipelines are lists of layers, whose numbers begin the names",
                entry.name
            ));
        }
        let known = self.layers_with_parameters(checkpoint);
        if end > known + MOST_AT_THE_END {
            return refuse(format!(
                "boundaries {boundaries:?} end with {end}, and the checkpoint's last layer with parameters is {}: end with {known}, or with at most {MOST_AT_THE_END} more for layers without parameters",
                known.saturating_sub(1)
            ));
        }
        let mut tied_before = BTreeSet::new();
        for layers in tied {
            let first_of = |layer: u64| {
                all.iter().find(|entry| layer_of(&entry.name) == Some(layer)).map(|entry| entry.name.as_str())
            };
            let shared = |why: String| refuse(format!("layers {layers:?} cannot be tied: {why}"));
            let [first, others @ ..] = layers.as_slice() else { return shared("none is named".into()) };
            if others.is_empty() {
                return shared("a layer shares with another; name at least two".into());
            }
            if let Some(beyond) = layers.iter().find(|layer| **layer >= end) {
                return shared(format!("there is no layer {beyond}; the pipeline ends with {}", end - 1));
            }
            if let Some(again) = layers.iter().find(|layer| !tied_before.insert(**layer)) {
                return shared(format!("layer {again} is named twice; a layer is in one group, once"));
            }
            if first_of(*first).is_none() {
                return shared("the first of them has no parameters to share".into());
            }
            if let Some(own) = others.iter().find_map(|layer| first_of(*layer)) {
                return shared(format!("the checkpoint has a '{own}', which is not the first layer's"));
            }
        }
        Ok(())
    }

    /// Behind the last layer that has or shares a parameter.
    fn layers_with_parameters(&self, checkpoint: &Checkpoint) -> u64 {
        let own = checkpoint.manifest().tensors.iter().filter_map(|entry| layer_of(&entry.name));
        let shared = self.users(checkpoint).into_values().flatten();
        own.chain(shared).max().map_or(0, |last| last.saturating_add(1))
    }

    /// The layers that use a parameter, where these are several.
    fn users(&self, checkpoint: &Checkpoint) -> BTreeMap<String, BTreeSet<u64>> {
        let mut users: BTreeMap<String, BTreeSet<u64>> = BTreeMap::new();
        let mut add = |name: &str, layer: u64| {
            let of = users.entry(name.to_owned()).or_default();
            of.extend(layer_of(name));
            of.insert(layer);
        };
        for (alias, name) in &checkpoint.manifest().aliases {
            if let Some(layer) = layer_of(alias) {
                add(name, layer);
            }
        }
        for layers in self.tied.iter().filter(|layers| layers.len() > 1) {
            let shared = checkpoint.manifest().tensors.iter().map(|entry| entry.name.as_str());
            for name in shared.filter(|name| layer_of(name) == Some(layers[0])) {
                layers.iter().for_each(|layer| add(name, *layer));
            }
        }
        users
    }
}
