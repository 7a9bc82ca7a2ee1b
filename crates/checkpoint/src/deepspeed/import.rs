//! A DeepSpeed checkpoint as one of ours: weights, optimizer states, counters, schedule, loss scale, client state.
//!
//! Any number of ranks, ZeRO 1 to 3, the BF16 optimizer, and no ZeRO at all. What cannot be placed is an error.
//! Of pipelines and of mixtures of experts, weights and the optimizer states of ZeRO are imported too, by `split`.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value as Json, json};

use crate::deepspeed::foreign::{Foreign, Tensor, Understood};
use crate::deepspeed::fp32::{self, Placed, flat_groups, per_parameter, stage_of};
use crate::deepspeed::source::{DeepSpeedFiles, Stretch, common_type, find, whole};
use crate::deepspeed::{plain, split};
use crate::error::{CheckpointError, Result};
use crate::manifest::{Dtype, GroupState, Kind, Origin, TrainingState};
use crate::pt::{Unknown, Value};
use crate::save::{Contents, Target};
use crate::shard::PieceSpec;

/// Keys of a module file that DeepSpeed itself writes; all others are the client's.
const OWN_KEYS: [&str; 21] = [
    "module",
    "buffer_names",
    "optimizer",
    "param_shapes",
    "frozen_param_shapes",
    "shared_params",
    "frozen_param_fragments",
    "lr_scheduler",
    "data_sampler",
    "random_ltd",
    "sparse_tensor_module_names",
    "skipped_steps",
    "global_steps",
    "global_samples",
    "dp_world_size",
    "mp_world_size",
    "ds_config",
    "ds_version",
    "num_experts",
    "checkpoint_parallel_dimensions",
    "ds_autoep_layers",
];

/// Converts the checkpoint `tag` (or the one `latest` names) of the folder `source` and saves it as `target` says.
pub fn import_deepspeed(
    source: &Path,
    tag: Option<&str>,
    unknown: Unknown,
    target: &Target<'_>,
) -> Result<PathBuf> {
    Foreign::open(&find(source, tag)?, unknown)?.save(target)
}

/// What the checkpoint in the folder `path` holds, and where.
pub(super) fn understand(path: &Path, unknown: Unknown) -> Result<Understood> {
    if let Some(understood) = split::understand(path, unknown)? {
        return Ok(understood);
    }
    let files = DeepSpeedFiles::open(path, unknown)?;
    let stage = match files.optimizers().first() {
        None => 0,
        Some(_) => files.optimizer(0, "zero_stage").ok().and_then(stage_of).unwrap_or(1),
    };
    let (tensors, steps) =
        if files.optimizers().is_empty() { without_zero(&files)? } else { with_zero(&files, stage)? };
    let per_parameter = if files.optimizers().is_empty() { ratios(&files)? } else { BTreeMap::new() };
    let optimizer = files.optimizers().first().and_then(|file| file.value().get("optimizer_state_dict"));
    let module = files.files[0].value();
    let mut contents = contents(module, optimizer, steps, stage as u8);
    contents.training.per_parameter = per_parameter;
    let trained: Vec<&PieceSpec> =
        tensors.iter().map(|tensor| &tensor.spec).filter(|spec| spec.kind == Kind::Master).collect();
    fill_groups(&mut contents.training, module, optimizer, &trained);
    Ok((contents, tensors, files.paths()))
}

fn imported(kind: Kind, place: usize, (name, shape, stretches): Placed, fallback: Dtype) -> Result<Tensor> {
    let dtype = if stretches.is_empty() { Some(fallback) } else { common_type(&stretches) };
    let dtype =
        dtype.ok_or_else(|| CheckpointError::Request(format!("'{name}' has parts of several types")))?;
    let len = shape.iter().product();
    let spec = PieceSpec { name, kind, shape, dtype, place: place as u64, part: None, start: 0, len };
    Ok(Tensor { spec, stretches })
}

/// Adds buffers and frozen parameters behind what is trained.
fn add_rest(files: &DeepSpeedFiles, stage: u64, tensors: &mut Vec<Tensor>) -> Result<()> {
    for frozen in fp32::frozen(files, stage)? {
        let (placed, dtype) = frozen.into_placed();
        tensors.push(imported(Kind::Weight, tensors.len(), placed, dtype)?);
    }
    for buffer in fp32::buffers(files)? {
        let (placed, dtype) = buffer.into_placed();
        tensors.push(imported(Kind::Buffer, tensors.len(), placed, dtype)?);
    }
    // Below stage 2 frozen parameters are listed nowhere else.
    let known: Vec<String> = tensors.iter().map(|tensor| tensor.spec.name.clone()).collect();
    let aliases = aliases(files.files[0].value());
    for (name, tensor) in module_tensors(files)? {
        if stage < 3 && !aliases.contains_key(name) && !known.iter().any(|known| known == name) {
            let placed = (name.to_owned(), tensor.shape.clone(), vec![whole(0, tensor)]);
            tensors.push(imported(Kind::Weight, tensors.len(), placed, tensor.dtype)?);
        }
    }
    Ok(())
}

fn module_tensors(files: &DeepSpeedFiles) -> Result<Vec<(&str, &crate::pt::StoredTensor)>> {
    let pairs = files.at(0, &["module"])?.pairs().unwrap_or_default();
    Ok(pairs.iter().filter_map(|(name, value)| Some((name.as_str()?, value.as_tensor()?))).collect())
}

pub(super) fn with_zero(files: &DeepSpeedFiles, stage: u64) -> Result<(Vec<Tensor>, u64)> {
    let groups = files.param_shapes()?;
    let ranks = files.optimizers().len();
    let mut tensors = Vec::new();
    for (place, placed) in fp32::trained(files, stage)?.into_iter().enumerate() {
        tensors.push(imported(Kind::Master, place, placed, Dtype::F32)?);
    }
    let key = if stage == 3 { "optimizer_state_dict" } else { "base_optimizer_state" };
    let states: Vec<States> = (0..ranks).map(|rank| states_of(files, rank, key)).collect::<Result<_>>()?;
    let steps = counter_of_steps(&states);
    if let Some(rank) = states.iter().position(|other| other.steps != steps) {
        let why = format!("its optimizer made {} steps, that of rank 0 {steps}", states[rank].steps);
        return Err(files.fail(files.model_files + rank, why));
    }
    for (name, parts) in states_by_name(files, &states)? {
        let placed = if stage == 3 {
            per_parameter(files, &groups, &parts, false)?
        } else {
            flat_groups(files, &groups, &parts, ranks as u64)?
        };
        for (place, placed) in placed.into_iter().enumerate() {
            tensors.push(imported(Kind::State(name.to_owned()), place, placed, Dtype::F32)?);
        }
    }
    add_rest(files, stage, &mut tensors)?;
    Ok((tensors, steps))
}

/// The states of one rank.
pub(super) struct States {
    /// By name, one stretch per group or sub-group.
    parts: BTreeMap<String, Vec<Stretch>>,
    steps: u64,
}

/// For every state its stretches by rank. In which order a rank has written its states says nothing: a DeepSpeed that has read a
/// universal checkpoint writes them as its file system listed them.
pub(super) fn states_by_name<'a>(
    files: &DeepSpeedFiles,
    states: &'a [States],
) -> Result<Vec<(&'a str, Vec<Vec<Stretch>>)>> {
    let mut names: Vec<&str> =
        states.iter().flat_map(|states| states.parts.keys().map(String::as_str)).collect();
    names.sort_unstable();
    names.dedup();
    let by_rank = |name: &'a str| {
        let parts = states.iter().enumerate().map(|(rank, states)| match states.parts.get(name) {
            Some(parts) => Ok(parts.clone()),
            None => Err(files.fail(files.model_files + rank, format!("state '{name}' is not on every rank"))),
        });
        Ok((name, parts.collect::<Result<_>>()?))
    };
    names.into_iter().map(by_rank).collect()
}

/// How many updates the optimizer made, by the first rank.
pub(super) fn counter_of_steps(states: &[States]) -> u64 {
    states.first().map_or(0, |states| states.steps)
}

pub(super) fn states_of(files: &DeepSpeedFiles, rank: usize, key: &str) -> Result<States> {
    let file = files.model_files + rank;
    let state = files.optimizer(rank, key)?.get("state").and_then(Value::pairs);
    let state = state.ok_or_else(|| {
        files.fail(file, format!("'{key}' holds no states (elastic checkpoints are not imported)"))
    })?;
    let mut entries: Vec<(u64, &Value)> =
        state.iter().filter_map(|(id, value)| Some((id.as_u64()?, value))).collect();
    entries.sort_by_key(|(id, _)| *id);
    let mut states = States { parts: BTreeMap::new(), steps: 0 };
    for (index, (_, entry)) in entries.iter().enumerate() {
        for (name, value) in entry.pairs().unwrap_or_default() {
            let Some(name) = name.as_str() else { continue };
            if name == "step" {
                let steps = files.files[file].read_count(value)?;
                if index > 0 && steps != states.steps {
                    let why =
                        format!("parameter groups made {} and {steps} steps; they must agree", states.steps);
                    return Err(files.fail(file, why));
                }
                states.steps = steps;
            } else if let Some(tensor) = value.as_tensor() {
                states.parts.entry(name.to_owned()).or_default().push(whole(file, tensor));
            } else if let Some(number) = value.as_f64() {
                check_number(files, file, &format!("group {index}"), name, number)?;
            }
        }
    }
    Ok(states)
}

/// Plain numbers among a parameter's states that follow from the number of its step, or from its size.
const FOLLOWING: [&str; 7] = [
    "var_interval",
    "var_counter",
    "local_step_interval",
    "local_step_counter",
    "tensor_size",
    "corrected_tensor_size",
    "server_chunk_size",
];

/// The numbers by which 1-bit LAMB steps a parameter, in the order in which our checkpoints have them.
const RATIOS: [&str; 3] = ["lamb_coeff_freeze", "last_factor", "scaling_coeff"];

/// What 0/1 Adam adds up between two meetings of its ranks.
const RATES: &str = "lrs";

/// Refuses a plain number among the states of a parameter that a run could not go on without.
fn check_number(files: &DeepSpeedFiles, file: usize, of: &str, state: &str, number: f64) -> Result<()> {
    let why = match state {
        _ if FOLLOWING.contains(&state) || RATIOS.contains(&state) => return Ok(()),
        RATES if number == 0.0 => return Ok(()),
        RATES => format!(
            "was saved between two meetings of 0/1 Adam's ranks ('{RATES}' of {of} is {number}), each of which had other \
             weights, and it holds those of one: go on from a checkpoint that was saved when they had met"
        ),
        _ => format!(
            "has the number '{state}' among the optimizer's states of {of}, which nothing here goes on with"
        ),
    };
    Err(files.fail(file, why))
}

/// 1-bit LAMB's ratios of each parameter.
fn ratios(files: &DeepSpeedFiles) -> Result<BTreeMap<String, Vec<f64>>> {
    let state = files.at(0, &["optimizer"])?.get("state").and_then(Value::pairs).unwrap_or_default();
    let names = trained_names(files)?;
    let mut ratios = BTreeMap::new();
    for (id, entry) in state {
        let name = id.as_u64().and_then(|id| names.get(usize::try_from(id).ok()?));
        let (Some(name), Some(_)) = (name, entry.get(RATIOS[0])) else { continue };
        let number = |key: &&str| match entry.get(key) {
            None => Ok(1.0),
            Some(value) => match (value.as_tensor(), value.as_f64()) {
                (Some(tensor), _) => {
                    Ok(files.files[0].read_f32(tensor, 0..1)?.first().map_or(1.0, |number| (*number).into()))
                }
                (None, Some(number)) => Ok(number),
                (None, None) => {
                    Err(files.fail(0, format!("'{key}' of {name} is {} and no number", value.kind())))
                }
            },
        };
        ratios.insert(name.clone(), RATIOS.iter().map(number).collect::<Result<_>>()?);
    }
    Ok(ratios)
}

/// The parameters of the module, in the order in which an optimizer without ZeRO numbers them.
fn trained_names(files: &DeepSpeedFiles) -> Result<Vec<String>> {
    let buffer_names = files.at(0, &["buffer_names"])?.items().unwrap_or_default();
    let aliases = aliases(files.files[0].value());
    let is_param = |name: &str| {
        !aliases.contains_key(name) && !buffer_names.iter().any(|buffer| buffer.as_str() == Some(name))
    };
    let tensors = module_tensors(files)?.into_iter();
    Ok(tensors.filter(|(name, _)| is_param(name)).map(|(name, _)| name.to_owned()).collect())
}

/// No ZeRO: whole tensors in the module file, states by the number of the parameter.
fn without_zero(files: &DeepSpeedFiles) -> Result<(Vec<Tensor>, u64)> {
    let optimizer = files.at(0, &["optimizer"])?;
    let state = optimizer.get("state").and_then(Value::pairs).unwrap_or_default();
    let names = trained_names(files)?;
    let is_param = |name: &str| names.iter().any(|known| known == name);
    let params: Vec<_> = module_tensors(files)?.into_iter().filter(|(name, _)| is_param(name)).collect();
    let groups = optimizer.get("param_groups").and_then(Value::items).unwrap_or_default();
    let numbered: usize =
        groups.iter().filter_map(|group| group.get("params")?.items()).map(<[Value]>::len).sum();
    if !state.is_empty() && (groups.len() != 1 || numbered != params.len()) {
        let why = format!(
            "its optimizer has {} groups with {numbered} parameters, the module {}: which is which is not recorded without ZeRO",
            groups.len(),
            params.len()
        );
        return Err(files.fail(0, why));
    }
    let mut tensors = Vec::new();
    let mut steps = 0;
    for (place, (name, tensor)) in params.iter().enumerate() {
        let placed = |tensor: &crate::pt::StoredTensor| {
            ((*name).to_owned(), tensor.shape.clone(), vec![whole(0, tensor)])
        };
        let entry = state.iter().find(|(id, _)| id.as_u64() == Some(place as u64)).map(|(_, entry)| entry);
        let kind = if entry.is_some() { Kind::Master } else { Kind::Weight };
        tensors.push(imported(kind, place, placed(tensor), tensor.dtype)?);
        for (state_name, value) in entry.and_then(Value::pairs).unwrap_or_default() {
            match (state_name.as_str(), value.as_tensor()) {
                (Some("step"), _) => steps = files.files[0].read_count(value)?,
                (Some(state_name), _) if RATIOS.contains(&state_name) => {}
                (Some(state_name), None) => {
                    if let Some(number) = value.as_f64() {
                        check_number(files, 0, name, state_name, number)?;
                    }
                }
                (Some(state_name), Some(value)) => {
                    tensors.push(imported(
                        Kind::State(state_name.to_owned()),
                        place,
                        placed(value),
                        value.dtype,
                    )?);
                }
                _ => {}
            }
        }
    }
    for buffer in fp32::buffers(files)? {
        let (placed, dtype) = buffer.into_placed();
        tensors.push(imported(Kind::Buffer, tensors.len(), placed, dtype)?);
    }
    Ok((tensors, steps))
}

/// Everything of a DeepSpeed checkpoint that is no tensor.
pub(crate) fn contents(module: &Value, optimizer: Option<&Value>, steps: u64, stage: u8) -> Contents {
    let count = |key: &str| module.get(key).and_then(Value::as_u64).unwrap_or(0);
    let config = plain::configuration(module);
    let accumulation = config["gradient_accumulation_steps"].as_u64().unwrap_or(1);
    let mut client = Map::new();
    for (key, value) in module.pairs().unwrap_or_default() {
        let Some(key) = key.as_str().filter(|key| !OWN_KEYS.contains(key)) else { continue };
        match value.to_json() {
            Some(value) => {
                client.insert(key.to_owned(), value);
            }
            None => tracing::warn!("client state '{key}' is no plain data and is left out"),
        }
    }
    let dtype = module.get("module").and_then(Value::pairs).unwrap_or_default();
    let dtype = dtype.iter().filter_map(|(_, value)| value.as_tensor()).map(|tensor| tensor.dtype);
    let dtype =
        dtype.into_iter().find(|dtype| matches!(dtype, Dtype::F16 | Dtype::BF16)).unwrap_or(Dtype::F32);
    let aliases = aliases(module);
    let samples = module.get("global_samples").and_then(Value::as_u64);
    let batch = config["train_batch_size"].as_u64().unwrap_or(0);
    let samples = samples.unwrap_or(count("global_steps") * batch);
    Contents {
        origin: Origin {
            ranks: module.get("dp_world_size").and_then(Value::as_u64).unwrap_or(1) as usize,
            stage,
            dtype,
            optimizer: config["optimizer"]["type"].as_str().map(plain::optimizer_name),
            kernels: None,
        },
        training: TrainingState {
            global_steps: count("global_steps"),
            global_samples: samples,
            skipped_steps: count("skipped_steps"),
            skipped_in_a_row: 0,
            micro_steps: count("global_steps") * accumulation,
            optimizer_steps: steps,
            last_grad_norm: None,
            seed: None,
            data_position: samples,
            groups: Vec::new(),
            scheduler: plain::schedule(module),
            loss_scaler: optimizer.and_then(|optimizer| loss_scaler(optimizer.get("loss_scaler")?)),
            per_parameter: BTreeMap::new(),
            layer_states: BTreeMap::new(),
            masks: BTreeMap::new(),
        },
        client_state: Json::Object(client),
        config,
        aliases,
    }
}

/// The other names of tied parameters: those that DeepSpeed lists, and those that lie in the same place of the same array.
fn aliases(module: &Value) -> BTreeMap<String, String> {
    let listed = module.get("shared_params").and_then(Value::pairs).unwrap_or_default().iter();
    let listed =
        listed.filter_map(|(alias, name)| Some((alias.as_str()?.to_owned(), name.as_str()?.to_owned())));
    let mut aliases: BTreeMap<String, String> = listed.collect();
    let mut seen = HashMap::new();
    for (name, value) in module.get("module").and_then(Value::pairs).unwrap_or_default() {
        let (Some(name), Some(tensor)) = (name.as_str(), value.as_tensor()) else { continue };
        if tensor.numel() == 0 {
            continue;
        }
        let first = *seen.entry((&tensor.storage, tensor.offset, &tensor.shape)).or_insert(name);
        if first != name && !aliases.contains_key(first) {
            aliases.entry(name.to_owned()).or_insert_with(|| first.to_owned());
        }
    }
    aliases
}

fn loss_scaler(object: &Value) -> Option<Json> {
    let Value::Object { name, state, .. } = object else { return None };
    let state = state.as_deref()?;
    let scale = state.get("cur_scale")?.as_f64()?;
    if name != "DynamicLossScaler" {
        return Some(json!({"kind": "static", "scale": scale}));
    }
    let last = match state.get("last_overflow_iter")? {
        Value::Int(last) => i64::try_from(*last).ok()?,
        _ => return None,
    };
    Some(json!({
        "kind": "dynamic",
        "scale": scale,
        "iteration": state.get("cur_iter")?.as_u64()?,
        "last_overflow_iteration": last,
        "hysteresis_left": state.get("cur_hysteresis").and_then(Value::as_u64).unwrap_or(1),
    }))
}

/// Groups with the rates of DeepSpeed's `param_groups` and the names of `param_shapes`.
pub(crate) fn fill_groups(
    training: &mut TrainingState,
    module: &Value,
    optimizer: Option<&Value>,
    trained: &[&PieceSpec],
) {
    let base = match optimizer {
        Some(state) => {
            state.get("base_optimizer_state").or_else(|| state.get("optimizer_state_dict")).or(Some(state))
        }
        None => module.get("optimizer"),
    };
    let groups = base.and_then(|base| base.get("param_groups")).and_then(Value::items).unwrap_or_default();
    let listed = module.get("param_shapes").and_then(Value::items).unwrap_or_default();
    let names = |shapes: &Value| -> Vec<String> {
        let pairs = shapes.pairs().unwrap_or_default();
        pairs.iter().filter_map(|(name, _)| name.as_str().map(str::to_owned)).collect()
    };
    let mut sub_groups = listed.iter();
    for group in groups {
        let number = |key: &str| group.get(key).and_then(Value::as_f64);
        let betas = group.get("betas").and_then(Value::items).unwrap_or_default();
        let beta = |index: usize| betas.get(index).and_then(Value::as_f64);
        // Stage 3 lists sub-groups: a group has as many as it has flat tensors.
        let parts = group.get("params").and_then(Value::items).map_or(1, <[Value]>::len);
        let params = if listed.is_empty() {
            trained.iter().map(|spec| spec.name.clone()).collect()
        } else {
            sub_groups.by_ref().take(parts).flat_map(names).collect()
        };
        training.groups.push(GroupState {
            params,
            lr: number("lr").unwrap_or(0.0),
            weight_decay: number("weight_decay").unwrap_or(0.0),
            betas: [beta(0).or(number("momentum")).unwrap_or(0.0), beta(1).unwrap_or(0.0)],
        });
    }
}
