//! Mixtures of experts: whose names are experts', and their optimizer states under ZeRO 1 and 2.
//!
//! Each rank's optimizer file holds its part of every parameter group: of dense ones among all ranks, of groups marked `moe`
//! among the ranks that hold the same experts. Which parameters lie in a part, and in which order, its slice mappings say;
//! experts have the number there that they have on their rank. Where mappings lack parameters (version 0.14 cuts experts' among
//! too many ranks) they lie as the model lists them: layer by layer, expert by expert, as in their files. Without ZeRO the
//! states are in files of the expert groups' ranks (`expp_rank_…`), by number in the same order. What does not come out even with
//! the weights has no states, and so has stage 3, which DeepSpeed does not have for experts.

use std::collections::{BTreeMap, BTreeSet};

use super::export::ExportOptions;
use super::foreign::Tensor;
use super::fp32::{Placed, flat_groups};
use super::import::{counter_of_steps, states_by_name, states_of};
use super::plain;
use super::source::{DeepSpeedFiles, Stretch, whole};
use crate::error::{CheckpointError, Result};
use crate::load::Checkpoint;
use crate::manifest::{Dtype, GroupState, Kind};
use crate::pt::Value;
use crate::shard::PieceSpec;

/// What stands before an expert's number in the names of its parameters.
pub(super) const EXPERTS: &str = ".deepspeed_experts.";

/// The mixtures of a checkpoint whose experts have DeepSpeed's names, in the order of its parameters.
#[derive(Default)]
pub(crate) struct Mixtures {
    pub(super) layers: Vec<Mixture>,
    pub(super) order: Order,
}

/// Whether neighbouring ranks hold different experts, or the same ones (`use_data_before_expert_parallelism`).
#[derive(Debug, Clone, Copy, Default)]
pub(super) enum Order {
    #[default]
    ExpertBeforeData,
    DataBeforeExpert,
}

impl Order {
    /// As a configuration says.
    fn of(config: &serde_json::Value) -> Order {
        match config["use_data_before_expert_parallelism"].as_bool() {
            Some(true) => Order::DataBeforeExpert,
            _ => Order::ExpertBeforeData,
        }
    }

    /// Which experts a rank holds of those spread over `expert_ranks`, and its number among the ranks that hold the same.
    pub(super) fn place(self, rank: u64, ranks: u64, expert_ranks: u64) -> (u64, u64) {
        let replicas = ranks / expert_ranks;
        match self {
            Order::ExpertBeforeData => (rank % expert_ranks, rank / expert_ranks),
            Order::DataBeforeExpert => (rank / replicas, rank % replicas),
        }
    }
}

/// One of them.
pub(super) struct Mixture {
    /// What stands before [`EXPERTS`] in its names.
    pub(super) path: String,
    pub(super) experts: u64,
}

impl Mixtures {
    /// Finds them, and refuses those that cannot be spread as asked.
    pub(super) fn of(checkpoint: &Checkpoint, options: ExportOptions) -> Result<Mixtures> {
        let mut found: Vec<(&str, BTreeSet<u64>)> = Vec::new();
        for entry in &checkpoint.manifest().tensors {
            let Some((path, id, _)) = parted(&entry.name) else { continue };
            match found.iter_mut().find(|(known, _)| *known == path) {
                Some((_, numbers)) => drop(numbers.insert(id)),
                None => found.push((path, BTreeSet::from([id]))),
            }
        }
        // A file is written for each number, so a number that some file made up must not stand for those before it.
        let gap = found
            .iter()
            .find(|(_, numbers)| numbers.last().is_none_or(|last| *last != numbers.len() as u64 - 1));
        if let Some((path, numbers)) = gap {
            let why = format!(
                "the experts of '{path}' are not numbered from 0 on: {} of them end with {:?}",
                numbers.len(),
                numbers.last()
            );
            return Err(CheckpointError::file(checkpoint.path(), why));
        }
        let layers: Vec<Mixture> = found
            .into_iter()
            .map(|(path, numbers)| Mixture { path: path.to_owned(), experts: numbers.len() as u64 })
            .collect();
        let (ranks, spread) = (options.ranks, options.expert_ranks);
        let refuse = |why: String| Err(CheckpointError::Export(why));
        if spread == 0 || !ranks.is_multiple_of(spread) {
            return refuse(format!(
                "experts on {spread} ranks need a multiple of as many, and there are {ranks}"
            ));
        }
        if let Some(layer) = layers.iter().find(|layer| !layer.experts.is_multiple_of(spread)) {
            let (experts, path) = (layer.experts, &layer.path);
            return refuse(format!(
                "the {experts} experts of '{path}' cannot be shared by {spread} ranks alike"
            ));
        }
        if options.stage == 3 && !layers.is_empty() {
            return refuse("DeepSpeed has no mixtures of experts in stage 3; export stage 1 or 2".to_owned());
        }
        Ok(Mixtures { layers, order: Order::of(&checkpoint.manifest().config) })
    }

    /// Which layer's expert a parameter is of, its number there, and the rest of the name; `None` of a dense one.
    pub(super) fn expert<'n>(&self, name: &'n str) -> Option<(usize, u64, &'n str)> {
        let (path, id, rest) = parted(name)?;
        Some((self.layers.iter().position(|layer| layer.path == path)?, id, rest))
    }

    /// How many of a layer's experts each of some ranks holds.
    pub(super) fn held(&self, layer: usize, ranks: u64) -> u64 {
        (self.layers[layer].experts / ranks).max(1)
    }
}

/// Layer, number and rest of an expert's name.
fn parted(name: &str) -> Option<(&str, u64, &str)> {
    let (path, expert) = name.split_once(EXPERTS)?;
    let (id, rest) = expert.split_once('.')?;
    Some((path, id.parse().ok()?, rest))
}

/// The states that were found, and what belongs to them.
pub(super) struct MixtureStates {
    /// f32 weights and states, to stand in for 16-bit weights of the same names.
    pub(super) tensors: Vec<Tensor>,
    pub(super) groups: Vec<GroupState>,
    pub(super) steps: u64,
}

/// The states in the optimizer files, where they say whose they are. `weights` are all of the model, under global names.
pub(super) fn states(files: &DeepSpeedFiles, weights: &[Tensor]) -> Result<Option<MixtureStates>> {
    let ranks = files.optimizers().len();
    if ranks == 0 || files.optimizer(0, "param_slice_mappings").is_err() {
        return numbered(files, weights);
    }
    let shapes: BTreeMap<&str, (usize, &[u64])> = weights
        .iter()
        .enumerate()
        .map(|(place, tensor)| (tensor.spec.name.as_str(), (place, tensor.spec.shape.as_slice())))
        .collect();
    let masters: Vec<Vec<Stretch>> = (0..ranks)
        .map(|rank| files.tensors(rank, "single_partition_of_fp32_groups"))
        .collect::<Result<_>>()?;
    let states: Vec<_> =
        (0..ranks).map(|rank| states_of(files, rank, "base_optimizer_state")).collect::<Result<_>>()?;
    let mut found =
        MixtureStates { tensors: Vec::new(), groups: Vec::new(), steps: counter_of_steps(&states) };
    let options = files.optimizer(0, "base_optimizer_state")?.get("param_groups").and_then(Value::items);
    let mut order = ListOrder::new(weights);
    for (group, options) in options.unwrap_or_default().iter().enumerate() {
        let mut members = Vec::new();
        for sharers in sharers(files, group, options, ranks)? {
            let mut listed = listed(files, group, &sharers, &shapes)?;
            let named: u64 = listed.iter().map(numel).sum();
            let held = sharers.ranks.iter().filter_map(|&rank| masters[rank].get(group));
            let held: u64 = held.map(|stretch| stretch.len).sum();
            let next = order.next(sharers.expert_rank, held);
            if named != held {
                let Some(next) = next else { return Ok(None) };
                listed = next;
            }
            let place = |parts: &[Vec<Stretch>]| -> Result<Vec<Placed>> {
                let own: Option<Vec<Vec<Stretch>>> =
                    sharers.ranks.iter().map(|&rank| Some(vec![parts[rank].get(group)?.clone()])).collect();
                let own = own.ok_or_else(|| {
                    files.fail(files.model_files, format!("a rank has no part of parameter group {group}"))
                })?;
                flat_groups(files, std::slice::from_ref(&listed), &own, own.len() as u64)
            };
            let mut keep = |kind: &Kind, placed: Vec<Placed>| {
                for (name, shape, stretches) in placed {
                    let spec = PieceSpec {
                        place: shapes[name.as_str()].0 as u64,
                        kind: kind.clone(),
                        len: shape.iter().product(),
                        dtype: Dtype::F32,
                        part: None,
                        start: 0,
                        shape,
                        name,
                    };
                    found.tensors.push(Tensor { spec, stretches });
                }
            };
            keep(&Kind::Master, place(&masters)?);
            for (name, parts) in states_by_name(files, &states)? {
                keep(&Kind::State(name.to_owned()), place(&parts)?);
            }
            members.extend(listed.into_iter().map(|(name, _)| name));
        }
        join_group(&mut found.groups, options, members);
    }
    Ok(Some(found))
}

/// A parameter's name and whole shape.
type Named = (String, Vec<u64>);

fn numel((_, shape): &Named) -> u64 {
    shape.iter().product()
}

/// Parameters as a model lists them: groups hold one stretch of this list after the other, dense ones and those of each place
/// among experts by themselves.
struct ListOrder<'w> {
    weights: &'w [Tensor],
    /// How many have been given out, by place.
    given: BTreeMap<Option<usize>, usize>,
}

impl<'w> ListOrder<'w> {
    fn new(weights: &'w [Tensor]) -> ListOrder<'w> {
        ListOrder { weights, given: BTreeMap::new() }
    }

    /// All that a place has.
    fn all(&self, place: Option<(usize, usize)>) -> Vec<Named> {
        let named = |tensor: &Tensor| (tensor.spec.name.clone(), tensor.spec.shape.clone());
        let parts = |tensor: &'w Tensor| parted(&tensor.spec.name);
        let experts = |layer: &str| {
            let own = self.weights.iter().filter_map(parts).filter(|(path, ..)| *path == layer);
            own.map(|(_, id, _)| id).max().map_or(0, |last| last.saturating_add(1))
        };
        let is_own = |tensor: &&'w Tensor| match (parts(tensor), place) {
            (None, None) => true,
            (Some((layer, id, _)), Some((place, ranks))) => {
                id / (experts(layer) / ranks as u64).max(1) == place as u64
            }
            _ => false,
        };
        self.weights.iter().filter(is_own).map(named).collect()
    }

    /// The next parameters of a place that have so many elements; `None` where none end there.
    fn next(&mut self, place: Option<(usize, usize)>, elements: u64) -> Option<Vec<Named>> {
        let all = self.all(place);
        let given = self.given.entry(place.map(|(place, _)| place)).or_default();
        let (mut listed, mut left) = (Vec::new(), elements);
        for named in all.into_iter().skip(*given) {
            if left == 0 {
                break;
            }
            left = left.checked_sub(numel(&named))?;
            listed.push(named);
        }
        *given += listed.len();
        (left == 0).then_some(listed)
    }
}

/// The states in the files of the ranks of an expert group, without ZeRO: every file has those of the dense parameters, and of
/// its own experts.
fn numbered(files: &DeepSpeedFiles, weights: &[Tensor]) -> Result<Option<MixtureStates>> {
    let ranks = files.optimizers().len();
    let by_name: BTreeMap<&str, &Tensor> =
        weights.iter().map(|tensor| (tensor.spec.name.as_str(), tensor)).collect();
    let mut found = MixtureStates { tensors: Vec::new(), groups: Vec::new(), steps: 0 };
    let order = ListOrder::new(weights);
    for place in 0..ranks {
        let file = files.model_files + place;
        let Some(optimizer) = files.files[file].value().get("optimizer") else { return Ok(None) };
        let state = optimizer.get("state").and_then(Value::pairs).unwrap_or_default();
        let mut lists = [order.all(None).into_iter(), order.all(Some((place, ranks))).into_iter()];
        let groups = optimizer.get("param_groups").and_then(Value::items).unwrap_or_default();
        for options in groups {
            let of_experts = options.get("moe") == Some(&Value::Bool(true));
            let mut members = Vec::new();
            for number in options.get("params").and_then(Value::items).unwrap_or_default() {
                let entry = state.iter().find(|(known, _)| known.as_u64() == number.as_u64());
                let entry = entry.and_then(|(_, entry)| entry.pairs());
                let next = lists[usize::from(of_experts)].next();
                let (Some((name, shape)), Some(entry)) = (next, entry) else { return Ok(None) };
                // Dense parameters have the same states in every file.
                if of_experts || place == 0 {
                    let weight = by_name[name.as_str()];
                    let spec = PieceSpec { kind: Kind::Master, ..weight.spec.clone() };
                    found.tensors.push(Tensor { spec, stretches: weight.stretches.clone() });
                    for (state, value) in entry {
                        match (state.as_str(), value.as_tensor()) {
                            (Some("step"), _) => found.steps = files.files[file].read_count(value)?,
                            (Some(_), Some(tensor)) if tensor.shape != shape => return Ok(None),
                            (Some(state), Some(tensor)) => {
                                let kind = Kind::State(state.to_owned());
                                let spec = PieceSpec { kind, dtype: tensor.dtype, ..weight.spec.clone() };
                                found.tensors.push(Tensor { spec, stretches: vec![whole(file, tensor)] });
                            }
                            _ => {}
                        }
                    }
                    members.push(name);
                }
            }
            join_group(&mut found.groups, options, members);
        }
        if lists.iter().any(|list| list.len() > 0) {
            return Ok(None);
        }
    }
    Ok((!found.tensors.is_empty()).then_some(found))
}

/// Ranks that share a group's state among themselves, and the place among experts that they have.
struct Sharers {
    ranks: Vec<usize>,
    /// Of the ranks that hold different experts: which, and how many there are. `None` for a dense group.
    expert_rank: Option<(usize, usize)>,
}

fn sharers(files: &DeepSpeedFiles, group: usize, options: &Value, ranks: usize) -> Result<Vec<Sharers>> {
    if options.get("moe") != Some(&Value::Bool(true)) {
        return Ok(vec![Sharers { ranks: (0..ranks).collect(), expert_rank: None }]);
    }
    let count = files.optimizer(0, "partition_count")?.items().and_then(|counts| counts.get(group)?.as_u64());
    let count = count.and_then(|count| usize::try_from(count).ok());
    let replicas = count.filter(|count| *count > 0 && ranks.is_multiple_of(*count)).ok_or_else(|| {
        let why =
            format!("does not say over how many of {ranks} ranks the experts of group {group} are divided");
        files.fail(files.model_files, why)
    })?;
    let expert_ranks = ranks / replicas;
    let order = Order::of(&plain::configuration(files.files[files.model_files].value()));
    let holds = |rank: usize| order.place(rank as u64, ranks as u64, expert_ranks as u64).0 as usize;
    let of = |place: usize| (0..ranks).filter(|&rank| holds(rank) == place).collect();
    Ok((0..expert_ranks)
        .map(|place| Sharers { ranks: of(place), expert_rank: Some((place, expert_ranks)) })
        .collect())
}

/// The parameters of a group that some ranks share, in order, under their global names.
fn listed(
    files: &DeepSpeedFiles,
    group: usize,
    sharers: &Sharers,
    shapes: &BTreeMap<&str, (usize, &[u64])>,
) -> Result<Vec<(String, Vec<u64>)>> {
    let mut listed: Vec<(String, Vec<u64>)> = Vec::new();
    for &rank in &sharers.ranks {
        let mapping = files.optimizer(rank, "param_slice_mappings")?.items();
        let mapping = mapping.and_then(|groups| groups.get(group)?.pairs()).unwrap_or_default();
        for name in mapping.iter().filter_map(|(name, _)| name.as_str()) {
            let name = match sharers.expert_rank {
                Some(place) => global_name(name, place, shapes).unwrap_or_else(|| name.to_owned()),
                None => name.to_owned(),
            };
            let Some((_, shape)) = shapes.get(name.as_str()) else {
                let why = format!("holds states of '{name}', of which there are no weights");
                return Err(files.fail(files.model_files + rank, why));
            };
            // A parameter that ends on one rank and goes on on the next is listed by both.
            if listed.last().is_none_or(|(last, _)| *last != name) {
                listed.push((name, shape.to_vec()));
            }
        }
    }
    Ok(listed)
}

/// An expert's name in the whole layer, from that on the rank at `place` of `ranks`.
fn global_name(
    name: &str,
    (place, ranks): (usize, usize),
    shapes: &BTreeMap<&str, (usize, &[u64])>,
) -> Option<String> {
    let (layer, local, rest) = parted(name)?;
    let numbers = shapes.keys().filter_map(|name| parted(name)).filter(|(path, ..)| *path == layer);
    let experts = numbers.map(|(_, number, _)| number).max()?.checked_add(1)?;
    let global = (place as u64).checked_mul(experts / ranks as u64)?.checked_add(local)?;
    Some(format!("{layer}{EXPERTS}{global}.{rest}"))
}

/// DeepSpeed splits experts off the group they were given in; those with the same options are one group again.
fn join_group(groups: &mut Vec<GroupState>, options: &Value, params: Vec<String>) {
    let number = |key: &str| options.get(key).and_then(Value::as_f64);
    let betas = options.get("betas").and_then(Value::items).unwrap_or_default();
    let beta = |index: usize| betas.get(index).and_then(Value::as_f64);
    let new = GroupState {
        params,
        lr: number("lr").unwrap_or(0.0),
        weight_decay: number("weight_decay").unwrap_or(0.0),
        betas: [beta(0).or(number("momentum")).unwrap_or(0.0), beta(1).unwrap_or(0.0)],
    };
    let alike = |known: &&mut GroupState| {
        known.lr == new.lr && known.weight_decay == new.weight_decay && known.betas == new.betas
    };
    match groups.iter_mut().find(alike) {
        Some(known) => known.params.extend(new.params),
        None => groups.push(new),
    }
}
