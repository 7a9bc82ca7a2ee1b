//! One of our checkpoints in DeepSpeed's layout, for its loader and its `zero_to_fp32`.
//!
//! ZeRO 1 and 2: one module file and an optimizer file per rank, groups laid end to end and cut into equal parts.
//! ZeRO 3: a module file per rank with placeholders, every parameter cut by itself. The number of ranks is free.
//! Experts under DeepSpeed's names have a file each, and groups of their own that are cut among the ranks that hold the same ones.

mod states;

use std::collections::HashMap;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;

use super::experts::{EXPERTS, Mixtures};
use super::exported::exported;
use super::slices::INFORMATION;
use crate::deepspeed::spelling::{Spelling, Whole, respelled, spelled};
use crate::directory::LATEST_FILE;
use crate::error::{CheckpointError, Result};
use crate::load::{Checkpoint, Wanted};
use crate::manifest::{Dtype, GroupState, Kind, TensorEntry};
use crate::pt::{TensorTable, Value, write_pt};

/// How to export.
#[derive(Debug, Clone, Copy)]
pub struct ExportOptions {
    /// The ZeRO stage of the files: 1, 2 or 3; 0 for a mixture of experts in f32.
    pub stage: u8,
    /// For how many ranks.
    pub ranks: u64,
    /// Over how many of these ranks the experts of a mixture are spread; 1 where each holds all.
    pub expert_ranks: u64,
    /// By which names parameters are called.
    pub spelling: Spelling,
}

/// The version whose files these are.
pub(crate) const VERSION: &str = "0.14.1";

/// A part of a tensor, shared by all stretches of it.
pub(crate) type Cut = Arc<crate::part::Part>;

/// Where the elements of an array come from: stretches of our tensors, and zeros that pad.
pub(crate) enum Part<'c> {
    /// Elements of a tensor, or of a part of it.
    Of {
        entry: &'c TensorEntry,
        of: Option<Cut>,
        start: u64,
        len: u64,
    },
    Zeros(u64),
    Number(f32),
}

/// A file's arrays, put together while its value is.
#[derive(Default)]
pub(crate) struct Arrays<'c> {
    table: TensorTable,
    parts: Vec<Vec<Part<'c>>>,
}

impl<'c> Arrays<'c> {
    pub(crate) fn add(&mut self, dtype: Dtype, shape: &[u64], parts: Vec<Part<'c>>) -> Value {
        self.parts.push(parts);
        self.table.tensor(dtype, shape)
    }

    pub(crate) fn write(&self, checkpoint: &Checkpoint, path: &Path, value: &Value) -> Result<()> {
        write_pt(path, value, &self.table.storages, &mut |storage, range, out| {
            let target = self.table.storages[storage].dtype;
            let mut at = 0;
            for part in &self.parts[storage] {
                let len = match part {
                    Part::Of { len, .. } | Part::Zeros(len) => *len,
                    Part::Number(_) => 1,
                };
                let (from, to) = (range.start.max(at), range.end.min(at + len));
                if from < to {
                    append(checkpoint, part, from - at..to - at, target, out)?;
                }
                at += len;
            }
            Ok(())
        })
    }
}

fn append(
    checkpoint: &Checkpoint,
    part: &Part<'_>,
    range: std::ops::Range<u64>,
    target: Dtype,
    out: &mut Vec<u8>,
) -> Result<()> {
    match part {
        Part::Zeros(_) => {
            out.resize(out.len() + ((range.end - range.start) * target.size_bytes()) as usize, 0)
        }
        Part::Number(value) => out.extend_from_slice(&value.to_le_bytes()),
        Part::Of { entry, of, start, .. } => {
            let part = of.as_deref().cloned();
            let elements = start + range.start..start + range.end;
            let wanted = [Wanted { part, ..Wanted::of(entry, elements) }];
            if entry.dtype == target {
                return checkpoint.stream(&wanted, &mut |_, bytes| {
                    out.extend_from_slice(bytes);
                    Ok(())
                });
            }
            checkpoint.each_f32(&wanted, &mut |_, values| {
                target.append_f32(values, out).ok_or_else(|| {
                    let why = format!("'{}' cannot become {target:?}", entry.name);
                    CheckpointError::file(checkpoint.path(), why)
                })
            })?;
        }
    }
    Ok(())
}

/// Writes the files of a checkpoint into the folder `dir`, under its own tag, and `latest` beside.
pub fn export_deepspeed(checkpoint: &Checkpoint, dir: &Path, options: ExportOptions) -> Result<()> {
    let mixtures = Mixtures::of(checkpoint, options)?;
    let of_zero = (1..=3).contains(&options.stage);
    let is_plain =
        options.stage == 0 && !mixtures.layers.is_empty() && checkpoint.manifest().origin.dtype == Dtype::F32;
    if !(of_zero || is_plain) || options.ranks == 0 {
        let why = format!(
            "stage {} on {} ranks cannot be exported: stages are 1, 2, 3, and 0 for mixtures of experts in f32",
            options.stage, options.ranks
        );
        return Err(CheckpointError::Export(why));
    }
    let write = |folder: &Path| Exporter::new(checkpoint, options, mixtures)?.write(folder);
    exported(dir, &checkpoint.manifest().tag, LATEST_FILE, write)?;
    if of_zero { write_script(dir) } else { Ok(()) }
}

/// What makes one file of f32 weights of those of all ranks, where there is Python: DeepSpeed puts its own there.
const SCRIPT: &str = include_str!("zero_to_fp32.py");
/// Its name.
const SCRIPT_FILE: &str = "zero_to_fp32.py";

fn write_script(dir: &Path) -> Result<()> {
    let path = dir.join(SCRIPT_FILE);
    let runs = std::fs::Permissions::from_mode(0o755);
    let written = ferrospeed_files::write(&path, SCRIPT).and_then(|()| std::fs::set_permissions(&path, runs));
    written.map_err(CheckpointError::io("write", &path))
}

/// A group's trained parameters with their states.
struct Group<'c> {
    state: &'c GroupState,
    params: Vec<Whole<'c>>,
    /// Whether these are experts, which ranks hold different ones of.
    is_moe: bool,
}

pub(crate) struct Exporter<'c> {
    checkpoint: &'c Checkpoint,
    options: ExportOptions,
    /// All tensors, in their order.
    tensors: Vec<Whole<'c>>,
    /// Where each is among them.
    index: HashMap<(Kind, String), usize>,
    groups: Vec<Group<'c>>,
    state_names: Vec<String>,
    mixtures: Mixtures,
    /// Where this is a part of a pipeline.
    pipeline: Option<Divided>,
}

/// What a part of a pipeline says of the whole.
struct Divided {
    /// How many ranks have different parts.
    ranks: u64,
    /// `universal_checkpoint_info`.
    information: Option<Value>,
}

impl<'c> Exporter<'c> {
    /// Of a checkpoint whose `mixtures` have files of their own.
    pub(crate) fn new(
        checkpoint: &'c Checkpoint,
        options: ExportOptions,
        mixtures: Mixtures,
    ) -> Result<Exporter<'c>> {
        let manifest = checkpoint.manifest();
        let (mut groups, mut of_experts) = (Vec::new(), Vec::new());
        for state in &manifest.training.groups {
            let find = |name: &String| {
                checkpoint.entry(&Kind::Master, name).ok_or_else(|| {
                    CheckpointError::file(
                        checkpoint.path(),
                        format!("'{name}' is in a group but has no weights"),
                    )
                })
            };
            let params: Vec<&TensorEntry> = state.params.iter().map(find).collect::<Result<_>>()?;
            let (mut experts, dense): (Vec<_>, Vec<_>) =
                params.into_iter().partition(|entry| mixtures.expert(&entry.name).is_some());
            // As the model lists them: what was imported lists those of one rank behind those of the other.
            experts.sort_by_key(|entry| mixtures.expert(&entry.name).map(|(layer, id, _)| (layer, id)));
            // Experts come behind all others, as DeepSpeed splits groups; none is empty but one that was given so.
            if !dense.is_empty() || experts.is_empty() {
                let params = spelled(checkpoint, dense, options.spelling)?;
                groups.push(Group { state, params, is_moe: false });
            }
            if !experts.is_empty() {
                let params = spelled(checkpoint, experts, options.spelling)?;
                of_experts.push(Group { state, params, is_moe: true });
            }
        }
        groups.extend(of_experts);
        let mut state_names: Vec<String> = Vec::new();
        for tensor in &manifest.tensors {
            if let Kind::State(name) = &tensor.kind
                && !state_names.contains(name)
            {
                state_names.push(name.clone());
            }
        }
        let tensors = spelled(checkpoint, &manifest.tensors, options.spelling)?;
        let keys = tensors.iter().map(|tensor| (tensor.kind.clone(), tensor.name.clone()));
        let index = keys.zip(0..).collect();
        Ok(Exporter { checkpoint, options, tensors, index, groups, state_names, mixtures, pipeline: None })
    }

    /// The same of other tensors: what `change` makes of each, where it makes anything; those with the lesser number come first.
    pub(super) fn changed(mut self, change: impl Fn(Whole<'c>) -> Option<(u64, Whole<'c>)>) -> Exporter<'c> {
        let all = |tensors: Vec<Whole<'c>>| {
            let mut kept: Vec<_> = tensors.into_iter().filter_map(&change).collect();
            kept.sort_by_key(|(number, _)| *number);
            kept.into_iter().map(|(_, tensor)| tensor).collect::<Vec<_>>()
        };
        self.tensors = all(self.tensors);
        self.groups.iter_mut().for_each(|group| group.params = all(std::mem::take(&mut group.params)));
        let keys = self.tensors.iter().map(|tensor| (tensor.kind.clone(), tensor.name.clone()));
        self.index = keys.zip(0..).collect();
        self
    }

    /// As one of `ranks` ranks that have different parts of a pipeline, whose weights lie in files of layers. `information` says
    /// how slices make wholes, where there are any.
    pub(super) fn of_pipeline(mut self, ranks: u64, information: Option<Value>) -> Exporter<'c> {
        self.pipeline = Some(Divided { ranks, information });
        self
    }

    /// Weights under other names in a file: those that `name` gives one; no file where there are none.
    pub(super) fn write_weights(
        &self,
        path: &Path,
        name: impl Fn(&Whole<'c>) -> Option<String>,
    ) -> Result<()> {
        let mut arrays = Arrays::default();
        let mut pairs = Vec::new();
        for entry in &self.tensors {
            let dtype = match entry.kind {
                Kind::Master | Kind::Weight => self.checkpoint.manifest().origin.dtype,
                Kind::Buffer => entry.dtype,
                Kind::State(_) | Kind::Rank(_) => continue,
            };
            if let Some(name) = name(entry) {
                pairs.push((Value::str(&name), arrays.add(dtype, &entry.shape, entry.all())));
            }
        }
        if pairs.is_empty() {
            return Ok(());
        }
        arrays.write(self.checkpoint, path, &Value::OrderedDict(pairs))
    }

    fn write(&self, folder: &Path) -> Result<()> {
        self.write_experts(folder)?;
        self.write_ranks(folder, 0)
    }

    /// The module and optimizer files of all ranks that have stage `place` of the model, or all of it.
    pub(super) fn write_ranks(&self, folder: &Path, place: usize) -> Result<()> {
        for rank in 0..self.options.ranks {
            if self.options.stage == 3 || rank == 0 {
                let name = match self.options.stage {
                    3 => format!("zero_pp_rank_{rank}_mp_rank_{place:02}_model_states.pt"),
                    _ => format!("mp_rank_{place:02}_model_states.pt"),
                };
                let mut arrays = Arrays::default();
                let value = self.module(rank, &mut arrays)?;
                arrays.write(self.checkpoint, &folder.join(name), &value)?;
            }
            if self.options.stage == 0 {
                continue;
            }
            let prefix = if self.checkpoint.manifest().origin.dtype == Dtype::BF16 { "bf16_" } else { "" };
            let name = format!("{prefix}zero_pp_rank_{rank}_mp_rank_{place:02}_optim_states.pt");
            let mut arrays = Arrays::default();
            let state = if self.options.stage == 3 {
                self.per_parameter(rank, &mut arrays)?
            } else {
                self.flat(rank, &mut arrays)?
            };
            let value = Value::dict([
                ("optimizer_state_dict", state),
                ("ds_config", self.config()),
                ("ds_version", Value::str(VERSION)),
            ]);
            arrays.write(self.checkpoint, &folder.join(name), &value)?;
        }
        Ok(())
    }

    /// A file per expert, and the optimizer files that DeepSpeed has beside them, which are empty with ZeRO.
    fn write_experts(&self, folder: &Path) -> Result<()> {
        let manifest = self.checkpoint.manifest();
        for (layer, mixture) in self.mixtures.layers.iter().enumerate() {
            for expert in 0..mixture.experts {
                let mut arrays = Arrays::default();
                let own = self.tensors.iter().filter(|entry| {
                    matches!(entry.kind, Kind::Master | Kind::Weight)
                        && self
                            .mixtures
                            .expert(&entry.name)
                            .is_some_and(|(of, id, _)| (of, id) == (layer, expert))
                });
                let pairs = own.map(|entry| {
                    let weight = arrays.add(manifest.origin.dtype, &entry.shape, entry.all());
                    (Value::str(&entry.name), weight)
                });
                let value = Value::OrderedDict(pairs.collect());
                let name = format!("layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt");
                arrays.write(self.checkpoint, &folder.join(name), &value)?;
            }
        }
        let ranks = if self.mixtures.layers.is_empty() { 0 } else { self.options.expert_ranks };
        for place in 0..ranks {
            let mut arrays = Arrays::default();
            let holds = |rank: &u64| self.mixtures.order.place(*rank, self.options.ranks, ranks).0 == place;
            let states = match (0..self.options.ranks).find(holds) {
                Some(rank) if self.options.stage == 0 => self.whole_states(rank, &mut arrays)?,
                _ => Value::None,
            };
            let name = format!("expp_rank_{place}_mp_rank_00_optim_states.pt");
            arrays.write(self.checkpoint, &folder.join(name), &Value::dict([("optimizer", states)]))?;
        }
        Ok(())
    }

    /// What a rank has of a group: among how many it is cut, the rank's number among them, and the parameters.
    fn shared<'g>(&self, group: &'g Group<'c>, rank: u64) -> (u64, u64, Vec<&'g Whole<'c>>) {
        if !group.is_moe {
            return (self.options.ranks, rank, group.params.iter().collect());
        }
        let ExportOptions { ranks, expert_ranks, .. } = self.options;
        let (place, member) = self.mixtures.order.place(rank, ranks, expert_ranks);
        let is_own = |entry: &&Whole<'c>| {
            let expert = self.mixtures.expert(&entry.name);
            expert.is_some_and(|(layer, id, _)| id / self.mixtures.held(layer, expert_ranks) == place)
        };
        (ranks / expert_ranks, member, group.params.iter().filter(is_own).collect())
    }

    fn config(&self) -> Value {
        Value::from_json(&self.checkpoint.manifest().config)
    }

    /// All tensors as they are exported.
    pub(crate) fn tensors(&self) -> &[Whole<'c>] {
        &self.tensors
    }

    fn of_kind(&self, kind: Kind) -> impl Iterator<Item = &Whole<'c>> {
        self.tensors.iter().filter(move |tensor| tensor.kind == kind)
    }

    /// Other names of tied parameters, with their own.
    pub(crate) fn aliases(&self) -> Vec<(String, String)> {
        let spelled = |name: &String| respelled(name, self.options.spelling);
        let aliases = self.checkpoint.manifest().aliases.iter();
        aliases.map(|(alias, name)| (spelled(alias), spelled(name))).collect()
    }

    pub(crate) fn module(&self, rank: u64, arrays: &mut Arrays<'c>) -> Result<Value> {
        let manifest = self.checkpoint.manifest();
        let mut module = Vec::new();
        let has_weights =
            |entry: &&Whole<'c>| self.pipeline.is_none() && self.mixtures.expert(&entry.name).is_none();
        for entry in self.tensors.iter().filter(has_weights) {
            let weight = match entry.kind {
                Kind::Buffer => arrays.add(entry.dtype, &entry.shape, entry.all()),
                Kind::Master | Kind::Weight if self.options.stage == 3 => {
                    arrays.add(manifest.origin.dtype, &[0], Vec::new())
                }
                Kind::Master | Kind::Weight => arrays.add(manifest.origin.dtype, &entry.shape, entry.all()),
                Kind::State(_) | Kind::Rank(_) => continue,
            };
            module.push((Value::str(&entry.name), weight));
        }
        // A tied parameter is one storage under several names.
        let aliases = self.aliases();
        for (alias, name) in &aliases {
            let tied =
                module.iter().find(|(known, _)| known.as_str() == Some(name)).map(|(_, value)| value.clone());
            module.extend(tied.map(|value| (Value::str(alias), value)));
        }
        let aliases = aliases.iter().filter(|_| rank == 0);
        let aliases = aliases.map(|(alias, name)| (Value::str(alias), Value::str(name))).collect();
        let shapes = |entries: &[&Whole<'c>]| {
            let pairs = entries
                .iter()
                .map(|entry| (Value::str(&self.local_name(entry)), Value::Size(entry.shape.clone())));
            Value::OrderedDict(pairs.collect())
        };
        let frozen: Vec<&Whole<'c>> = self.of_kind(Kind::Weight).collect();
        let fragments = frozen.iter().map(|entry| {
            let (shape, parts) = if self.options.stage == 3 {
                let share = entry.numel().div_ceil(self.options.ranks);
                (vec![share], entry.cut(rank * share, share))
            } else {
                (entry.shape.clone(), entry.all())
            };
            (Value::str(&entry.name), arrays.add(entry.dtype, &shape, parts))
        });
        let fragments = Value::OrderedDict(fragments.collect());
        let frozen_is_listed = self.options.stage >= 2;
        let training = &manifest.training;
        let integer = |value: u64| Value::Int(value.into());
        let scheduler = training.scheduler.as_ref().map_or(Value::None, Value::from_json);
        let buffers = self.of_kind(Kind::Buffer).map(|entry| Value::str(&entry.name)).collect();
        let with_zero = self.options.stage > 0;
        // Those of a mixture lie in files of their own.
        let holds_states = !with_zero && self.mixtures.layers.is_empty();
        let groups = self.groups.iter().map(|group| shapes(&self.shared(group, rank).2)).collect();
        let mut pairs = vec![
            ("module", if self.pipeline.is_some() { Value::None } else { Value::OrderedDict(module) }),
            ("buffer_names", Value::List(buffers)),
            ("optimizer", if holds_states { self.whole_states(rank, arrays)? } else { Value::None }),
            ("param_shapes", if with_zero { Value::List(groups) } else { Value::None }),
            ("frozen_param_shapes", if frozen_is_listed { shapes(&frozen) } else { Value::None }),
            ("shared_params", Value::Dict(aliases)),
            ("frozen_param_fragments", if frozen_is_listed { fragments } else { Value::None }),
            ("lr_scheduler", scheduler),
            ("data_sampler", Value::None),
            ("random_ltd", Value::None),
            ("sparse_tensor_module_names", Value::Set(Vec::new())),
            ("skipped_steps", integer(training.skipped_steps)),
            ("global_steps", integer(training.global_steps)),
            ("global_samples", integer(training.global_samples)),
            ("dp_world_size", integer(self.options.ranks)),
            ("mp_world_size", integer(self.pipeline.as_ref().map_or(1, |pipeline| pipeline.ranks))),
            ("ds_config", self.config()),
            ("ds_version", Value::str(VERSION)),
        ];
        if !self.mixtures.layers.is_empty() {
            let counts = self.mixtures.layers.iter().map(|layer| integer(layer.experts)).collect();
            pairs.push(("num_experts", Value::List(counts)));
        }
        let information = self.pipeline.as_ref().and_then(|pipeline| pipeline.information.clone());
        let told = information.is_some();
        pairs.extend(information.map(|information| (INFORMATION, information)));
        if let Some(client) = manifest.client_state.as_object() {
            let client = client.iter().filter(|(key, _)| !(told && *key == INFORMATION));
            pairs.extend(client.map(|(key, value)| (key.as_str(), Value::from_json(value))));
        }
        Ok(Value::dict(pairs))
    }
}
