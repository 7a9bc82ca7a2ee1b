//! Pipelines and mixtures of experts: weights that lie in a file per layer, or per expert.
//!
//! Weights are imported, and counters and schedule with them, and under ZeRO 1 and 2 the optimizer states too (`experts`,
//! `pipeline`); those of a pipeline also without ZeRO, where no module is tied. Without these a checkpoint loads with `load_module_only`, or without optimizer states. Layers cut over
//! tensor-parallel ranks, and experts that are numbered without their layer, are refused by name.

use std::collections::BTreeSet;
use std::path::Path;

use super::foreign::{Tensor, Understood};
use super::fp32::stage_of;
use super::import::{contents, fill_groups};
use super::source::{DeepSpeedFiles, names_in, whole};
use super::{experts, pipeline};
use crate::error::{CheckpointError, Result};
use crate::manifest::{Dtype, GroupState, Kind};
use crate::pt::{Unknown, Value};
use crate::save::Contents;
use crate::shard::PieceSpec;

const ENDING: &str = "model_states.pt";

/// What a file of such a checkpoint holds.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Held {
    /// Counters, and in a mixture all that is no expert.
    Module,
    /// A layer of a pipeline, whose parameters are named after its number.
    Layer(u64),
    /// An expert, whose parameters have their full names.
    Expert,
}

/// What a file holds, or why such files are not read.
fn held(name: &str) -> Result<Option<Held>, &'static str> {
    let Some(stem) = name.strip_suffix(ENDING) else { return Ok(None) };
    if let Some(rest) = stem.strip_prefix("layer_") {
        if let Some((layer, rank)) = rest.split_once('-') {
            let Ok(layer) = layer.parse() else { return Ok(None) };
            let whole = rank.is_empty();
            return if whole {
                Ok(Some(Held::Layer(layer)))
            } else {
                Err("layers cut over tensor-parallel ranks")
            };
        }
        if let Some((_, rank)) =
            rest.split_once("_mp_rank_").filter(|(expert, _)| expert.contains("_expert_"))
        {
            let first = rank.trim_end_matches('_') == "00";
            return if first {
                Ok(Some(Held::Expert))
            } else {
                Err("experts cut over tensor-parallel ranks")
            };
        }
    }
    if stem.starts_with("expert_") {
        return Err("experts that are numbered without their layer, as old versions wrote them");
    }
    Ok(stem.starts_with("mp_rank_").then_some(Held::Module))
}

/// Understands a checkpoint of a pipeline or a mixture of experts; `None` when it is neither.
pub(super) fn understand(path: &Path, unknown: Unknown) -> Result<Option<Understood>> {
    let mut parts = Vec::new();
    for name in names_in(path)? {
        match held(&name) {
            Ok(held) => parts.extend(held.map(|held| (name, held))),
            Err(what) => {
                let why = format!("holds {what}; these are not imported");
                return Err(CheckpointError::file(&path.join(&name), why));
            }
        }
    }
    if parts.iter().all(|(_, held)| *held == Held::Module) {
        return Ok(None);
    }
    let is_mixture = parts.iter().any(|(_, held)| *held == Held::Expert);
    let names: Vec<&String> = parts.iter().map(|(name, _)| name).collect();
    let all = names_in(path)?;
    let of_zero = |name: &&String| name.contains("zero_pp_rank_") && name.ends_with("optim_states.pt");
    let optimizers: Vec<&String> = all.iter().filter(|_| is_mixture).filter(of_zero).collect();
    let files = DeepSpeedFiles::open_named(path, &names, &optimizers, unknown)?;
    let module = parts.iter().position(|(_, held)| *held == Held::Module);
    let module = module.ok_or_else(|| CheckpointError::file(path, "holds no mp_rank_00_model_states.pt"))?;

    let mut found = Vec::new();
    for (file, (_, held)) in parts.iter().enumerate() {
        let value = files.files[file].value();
        let (tensors, prefix) = match held {
            Held::Module => (value.get("module").unwrap_or(&Value::None), String::new()),
            Held::Layer(layer) => (value, format!("{layer}.")),
            Held::Expert => (value, String::new()),
        };
        for (name, value) in tensors.pairs().unwrap_or_default() {
            let (Some(name), Some(tensor)) = (name.as_str(), value.as_tensor()) else { continue };
            let spec = PieceSpec {
                name: format!("{prefix}{name}"),
                kind: Kind::Weight,
                shape: tensor.shape.clone(),
                dtype: tensor.dtype,
                place: found.len() as u64,
                part: None,
                start: 0,
                len: tensor.numel(),
            };
            found.push(Tensor { spec, stretches: vec![whole(file, tensor)] });
        }
    }
    if !is_mixture {
        let modules = (0..parts.len()).filter(|file| parts[*file].1 == Held::Module).collect::<Vec<_>>();
        return Ok(Some(of_pipeline(path, unknown, &files, &modules, found)?));
    }
    let states = experts::states(&files, &found)?;
    let (mut stage, mut optimizer) = (0, None);
    if states.is_some() {
        optimizer = files.optimizers().first().and_then(|file| file.value().get("optimizer_state_dict"));
        stage = files.optimizer(0, "zero_stage").ok().and_then(stage_of).unwrap_or(1);
    }
    let steps = states.as_ref().map_or(0, |states| states.steps);
    let mut contents = contents(files.files[module].value(), optimizer, steps, stage as u8);
    match states {
        Some(states) => put_in(&mut contents, &mut found, states.tensors, states.groups),
        None => without_states(&mut contents, &found, path),
    }
    Ok(Some((contents, found, files.paths())))
}

fn of_pipeline(
    path: &Path,
    unknown: Unknown,
    files: &DeepSpeedFiles,
    modules: &[usize],
    mut found: Vec<Tensor>,
) -> Result<Understood> {
    let module = files.files[modules[0]].value();
    let plain = contents(module, None, 0, 0);
    let mut paths = files.paths();
    let Some(mut states) = pipeline::states(path, unknown, files, &found, &plain.training)? else {
        let Some((states, steps)) = pipeline::numbered(files, modules, &found)? else {
            let mut contents = plain;
            without_states(&mut contents, &found, path);
            return Ok((contents, found, paths));
        };
        let mut contents = contents(module, None, steps, 0);
        let trained: Vec<_> =
            states.iter().map(|tensor| &tensor.spec).filter(|spec| spec.kind == Kind::Master).collect();
        fill_groups(&mut contents.training, module, None, &trained);
        let groups = std::mem::take(&mut contents.training.groups);
        put_in(&mut contents, &mut found, states, groups);
        return Ok((contents, found, paths));
    };
    let mut contents = contents(module, states.optimizer.as_ref(), states.steps, states.zero_stage as u8);
    let stretches = states.tensors.iter_mut().flat_map(|tensor| &mut tensor.stretches);
    stretches.for_each(|stretch| stretch.file += paths.len());
    paths.append(&mut states.files);
    found.retain(|tensor| !states.aliases.contains_key(&tensor.spec.name));
    contents.aliases.append(&mut states.aliases);
    put_in(&mut contents, &mut found, states.tensors, states.groups);
    Ok((contents, found, paths))
}

/// The type of the weights.
fn weight_type(found: &[Tensor]) -> Dtype {
    let mut types = found.iter().map(|tensor| tensor.spec.dtype);
    types.find(|dtype| matches!(dtype, Dtype::F16 | Dtype::BF16)).unwrap_or(Dtype::F32)
}

fn without_states(contents: &mut Contents, found: &[Tensor], path: &Path) {
    contents.origin.dtype = weight_type(found);
    contents.origin.optimizer = None;
    tracing::warn!(
        "{}: weights, counters and schedule are imported; optimizer states of pipelines without ZeRO whose parameters cannot be told apart, and of mixtures of experts whose files do not say whose they are, are not",
        path.display()
    );
}

/// Puts wide weights and states in the place of weights of the same names.
fn put_in(contents: &mut Contents, found: &mut Vec<Tensor>, states: Vec<Tensor>, groups: Vec<GroupState>) {
    contents.origin.dtype = weight_type(found);
    let has = |name: &str| states.iter().any(|tensor| tensor.spec.kind == Kind::State(name.to_owned()));
    let is_adam = has("exp_avg") && has("exp_avg_sq");
    // A client's own optimizer is not in the configuration.
    let optimizer = contents.origin.optimizer.take();
    contents.origin.optimizer = optimizer.or_else(|| is_adam.then(|| "adam".to_owned()));
    contents.training.groups = groups;
    let wide: BTreeSet<String> = states.iter().map(|tensor| tensor.spec.name.clone()).collect();
    found.retain(|tensor| !wide.contains(&tensor.spec.name));
    found.extend(states);
}
