//! Pipelines and mixtures of experts: weights that lie in a file per layer, or per expert.
//!
//! Weights are imported, and counters and schedule with them, and under ZeRO 1 and 2 the optimizer states too (`experts`,
//! `pipeline`); those of a pipeline also without ZeRO (`numbered`). Without these a checkpoint loads with `load_module_only`, or without optimizer states. Layers cut over
//! tensor-parallel ranks are put together (`slices`); experts that are numbered without their layer are refused by name.

use std::collections::BTreeSet;
use std::path::Path;

use super::foreign::{Tensor, Understood};
use super::fp32::stage_of;
use super::import::{contents, fill_groups};
use super::numbered::numbered;
use super::source::{DeepSpeedFiles, names_in, whole};
use super::{experts, pipeline, slices};
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

/// What a file holds and its rank: among the slices of a layer or an expert, or among all that have different parts of the
/// model. Or why such files are not read.
fn held(name: &str) -> Result<Option<(Held, u64)>, &'static str> {
    let Some(stem) = name.strip_suffix(ENDING) else { return Ok(None) };
    let number = |text: &str| text.trim_end_matches(['_', '-']).parse::<u64>().ok();
    if let Some(rest) = stem.strip_prefix("layer_") {
        if let Some((layer, rank)) = rest.split_once('-') {
            let Ok(layer) = layer.parse() else { return Ok(None) };
            let slice = if rank.is_empty() { Some(0) } else { rank.strip_prefix("model_").and_then(number) };
            let slice = slice.ok_or("layers cut along another axis than 'model'")?;
            return Ok(Some((Held::Layer(layer), slice)));
        }
        if let Some((expert, rank)) = rest.split_once("_mp_rank_")
            && expert.contains("_expert_")
        {
            return Ok(number(rank).map(|slice| (Held::Expert, slice)));
        }
    }
    if stem.starts_with("expert_") {
        return Err("experts that are numbered without their layer, as old versions wrote them");
    }
    Ok(stem.strip_prefix("mp_rank_").and_then(number).map(|rank| (Held::Module, rank)))
}

/// The rank at the end of the name of a module's or a rank's own file.
pub(super) fn rank_in(name: &str) -> Option<u64> {
    let (_, rest) = name.rsplit_once("mp_rank_")?;
    rest.split_once('_')?.0.parse().ok()
}

/// Understands a checkpoint of a pipeline or a mixture of experts; `None` when it is neither.
pub(super) fn understand(path: &Path, unknown: Unknown) -> Result<Option<Understood>> {
    let mut parts = Vec::new();
    for name in names_in(path)? {
        match held(&name) {
            Ok(held) => parts.extend(held.map(|(held, rank)| (name, held, rank))),
            Err(what) => {
                let why = format!("holds {what}; these are not imported");
                return Err(CheckpointError::file(&path.join(&name), why));
            }
        }
    }
    let slices: BTreeSet<u64> =
        parts.iter().filter(|(_, held, _)| *held != Held::Module).map(|(.., slice)| *slice).collect();
    let count = slices.len() as u64;
    if count == 0 {
        return Ok(None);
    }
    if !slices.iter().copied().eq(0..count) {
        let why = format!("holds the slices {slices:?} of its layers: some are missing");
        return Err(CheckpointError::file(path, why));
    }
    let understood = (0..count).map(|slice| {
        // Ranks count slices first, and then stages.
        let own = parts.iter().filter(|(.., rank)| rank % count == slice);
        let own: Vec<(&String, &Held)> = own.map(|(name, held, _)| (name, held)).collect();
        of_slice(path, unknown, &own, &|name| rank_in(name).is_some_and(|rank| rank % count == slice))
    });
    slices::join(path, unknown, understood.collect::<Result<_>>()?).map(Some)
}

/// What the files of one slice hold, of which `is_own` are a rank's own.
fn of_slice(
    path: &Path,
    unknown: Unknown,
    parts: &[(&String, &Held)],
    is_own: &dyn Fn(&str) -> bool,
) -> Result<Understood> {
    let is_mixture = parts.iter().any(|(_, held)| **held == Held::Expert);
    let names: Vec<&String> = parts.iter().map(|(name, _)| *name).collect();
    let all = names_in(path)?;
    let of_zero =
        |name: &&String| name.contains("zero_pp_rank_") && name.ends_with("optim_states.pt") && is_own(name);
    let mut optimizers: Vec<&String> = all.iter().filter(|_| is_mixture).filter(of_zero).collect();
    if is_mixture && optimizers.is_empty() {
        optimizers.extend(all.iter().filter(|name| name.starts_with("expp_rank_") && is_own(name)));
    }
    let files = DeepSpeedFiles::open_named(path, &names, &optimizers, unknown)?;
    let module = parts.iter().position(|(_, held)| **held == Held::Module);
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
        let modules = (0..parts.len()).filter(|file| *parts[*file].1 == Held::Module).collect::<Vec<_>>();
        return of_pipeline(path, unknown, &files, &modules, found, is_own);
    }
    let states = experts::states(&files, &found)?;
    let (mut stage, mut optimizer) = (0, None);
    if states.is_some() {
        optimizer = files.optimizers().first().and_then(|file| file.value().get("optimizer_state_dict"));
        let of_zero = files.optimizer(0, "zero_stage").ok().and_then(stage_of);
        stage = of_zero.unwrap_or(u64::from(optimizer.is_some()));
    }
    let steps = states.as_ref().map_or(0, |states| states.steps);
    let mut contents = contents(files.files[module].value(), optimizer, steps, stage as u8);
    match states {
        Some(states) => put_in(&mut contents, &mut found, states.tensors, states.groups),
        None => without_states(&mut contents, &found, path),
    }
    Ok((contents, found, files.paths()))
}

fn of_pipeline(
    path: &Path,
    unknown: Unknown,
    files: &DeepSpeedFiles,
    modules: &[usize],
    mut found: Vec<Tensor>,
    is_own: &dyn Fn(&str) -> bool,
) -> Result<Understood> {
    let module = files.files[modules[0]].value();
    let plain = contents(module, None, 0, 0);
    let mut paths = files.paths();
    let Some(mut states) = pipeline::states(path, unknown, files, &found, &plain.training, is_own)? else {
        let Some(states) = numbered(files, modules, &found, &plain.aliases)? else {
            let mut contents = plain;
            found.retain(|tensor| !contents.aliases.contains_key(&tensor.spec.name));
            without_states(&mut contents, &found, path);
            return Ok((contents, found, paths));
        };
        let mut contents = contents(module, None, states.steps, 0);
        contents.aliases.extend(states.aliases);
        found.retain(|tensor| !contents.aliases.contains_key(&tensor.spec.name));
        let trained: Vec<_> = states
            .tensors
            .iter()
            .map(|tensor| &tensor.spec)
            .filter(|spec| spec.kind == Kind::Master)
            .collect();
        fill_groups(&mut contents.training, module, None, &trained);
        let groups = std::mem::take(&mut contents.training.groups);
        put_in(&mut contents, &mut found, states.tensors, groups);
        return Ok((contents, found, paths));
    };
    let mut contents = contents(module, states.optimizer.as_ref(), states.steps, states.zero_stage as u8);
    let stretches = states.tensors.iter_mut().flat_map(|tensor| &mut tensor.stretches);
    stretches.for_each(|stretch| stretch.file += paths.len());
    paths.append(&mut states.files);
    contents.aliases.append(&mut states.aliases);
    found.retain(|tensor| !contents.aliases.contains_key(&tensor.spec.name));
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
    contents.training.groups = groups;
    let wide: BTreeSet<String> = states.iter().map(|tensor| tensor.spec.name.clone()).collect();
    found.retain(|tensor| !wide.contains(&tensor.spec.name));
    found.extend(states);
}
