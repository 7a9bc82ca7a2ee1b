//! [`Engine::load_checkpoint`].

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use ferrospeed_checkpoint::deepspeed::check_files;
use ferrospeed_checkpoint::{
    Checkpoint, CheckpointError, Dtype, Kind, Manifest, Readers, TensorEntry, TrainingState, Wanted, agree,
    all_or_none, resolve_any, resolve_universal,
};
use ferrospeed_comm::Group;
use ferrospeed_optim::loss_scale::LossScalerState;
use ferrospeed_optim::one_bit::{OneBit, Ratio};
use ferrospeed_optim::schedule::SchedulerState;
use ferrospeed_optim::{GroupOptions, Optimizer};
use ferrospeed_tensor::Param;
use ferrospeed_zero::{OwnNumbers, Saved, SavedPiece};
use serde_json::Value;

use super::{part_of, stored_type};
use crate::engine::Engine;
use crate::error::Result;
use crate::kernels::other_kernels;

/// Finds a parameter of the model in the checkpoint: its name here to its name there, `None` to leave it as it is.
pub type FindParameter<'a> = &'a (dyn Fn(&str) -> Option<String> + Sync);

/// What helps where a checkpoint's optimizer states are of no use.
const BEGIN_ANEW: &str = "to begin the optimizer's states anew, load without them (train --resume --fresh_optimizer, LoadOptions::load_optimizer_states)";

/// What to load.
#[derive(Clone, Copy)]
pub struct LoadOptions<'a> {
    /// Which checkpoint. Default: the one that `latest` names, or the newest.
    pub tag: Option<&'a str>,
    /// Whether every parameter must be in the checkpoint and every tensor of it in the model. A parameter of another
    /// shape is always refused.
    pub load_module_strict: bool,
    /// Whether parameters that are not trained may be missing, strict or not, and stay as they are: a save may leave them out
    /// (`exclude_frozen_parameters`), and where they began they can be had again.
    pub frozen_may_be_missing: bool,
    /// Whether the optimizer goes on where it was. Without, its states stay as they are.
    pub load_optimizer_states: bool,
    /// Whether the schedule goes on where it was.
    pub load_lr_scheduler_states: bool,
    /// Whether only weights are loaded: no optimizer, no schedule, no counter.
    pub load_module_only: bool,
    /// Where parameters are found under other names. Default: under their own.
    pub custom_load_fn: Option<FindParameter<'a>>,
}

impl Default for LoadOptions<'_> {
    fn default() -> Self {
        LoadOptions {
            tag: None,
            load_module_strict: true,
            frozen_may_be_missing: false,
            load_optimizer_states: true,
            load_lr_scheduler_states: true,
            load_module_only: false,
            custom_load_fn: None,
        }
    }
}

/// What was loaded.
#[derive(Debug, Clone, PartialEq)]
pub struct Loaded {
    /// The checkpoint's folder.
    pub path: PathBuf,
    /// Its name.
    pub tag: String,
    /// What the caller of the save wanted back.
    pub client_state: Value,
    /// Samples that the data loader had given out.
    pub data_position: u64,
    /// Parameters that are not in the checkpoint; empty when strict.
    pub missing: Vec<String>,
    /// Tensors of the checkpoint that are not in the model; empty when strict.
    pub unexpected: Vec<String>,
    /// In what this run differs from the one that was saved: ranks, stage, precision, batch, rates.
    pub changes: Vec<String>,
}

/// Refuses a path at which ranks find different checkpoints, as on disks of their own. All ranks call it together.
fn is_one_checkpoint(group: &Group, checkpoint: &Checkpoint) -> Result<(), CheckpointError> {
    let manifest = checkpoint.manifest();
    let content = serde_json::to_vec(manifest).map(|bytes| crc32fast::hash(&bytes));
    let content = content.map_err(|error| CheckpointError::Request(error.to_string()))?;
    let all = agree(group, Ok((manifest.tag.clone(), content)))?;
    let Some(rank) = all.iter().position(|theirs| *theirs != all[0]) else { return Ok(()) };
    let why = format!(
        "rank {rank} finds another checkpoint here than rank 0 ('{}' with manifest {:08x} there, '{}' with {:08x} on rank 0); put one and the same on every host, or in a place that they share",
        all[rank].0, all[rank].1, all[0].0, all[0].1
    );
    Err(CheckpointError::File { path: checkpoint.path().to_path_buf(), why })
}

/// A piece of this rank and where it is in the checkpoint.
struct Match<'c> {
    piece: SavedPiece,
    entry: &'c TensorEntry,
}

#[derive(Default)]
struct Plan<'c> {
    matches: Vec<Match<'c>>,
    missing: Vec<String>,
    unexpected: Vec<String>,
}

impl Engine {
    /// Loads a checkpoint from the folder `dir`. All ranks call it together.
    ///
    /// One that DeepSpeed wrote is read where it lies, on any number of ranks; with `checkpoint.load_universal` it is a
    /// universal one.
    ///
    /// Nothing is changed before every rank has found all it needs. When reading fails after that (a damaged file), the
    /// error says where, and the engine refuses to train or save until another load has succeeded.
    pub fn load_checkpoint(&mut self, dir: impl AsRef<Path>, options: &LoadOptions<'_>) -> Result<Loaded> {
        let dir = dir.as_ref();
        self.finish_checkpoint()?;
        let group = self.world.group();
        let leads = self.world.rank() == 0;
        let resolve = if self.config.checkpoint.load_universal { resolve_universal } else { resolve_any };
        let resolved = if leads { resolve(dir, options.tag) } else { Ok(PathBuf::new()) };
        let path = agree(&group, resolved)?.swap_remove(0);
        let mut checkpoint = all_or_none(&group, Checkpoint::open_any(&path))?;
        is_one_checkpoint(&group, &checkpoint)?;
        if checkpoint.is_foreign() {
            let names: Vec<&str> = self.store.params().iter().map(Param::name).collect();
            checkpoint = checkpoint.spelled_as(&names);
            all_or_none(&group, check_files(&checkpoint, self.world.rank(), self.world.size()))?;
        }
        let plan = all_or_none(&group, self.plan(&checkpoint, options))?;
        let state = all_or_none(&group, self.check_state(&checkpoint))?;
        let with_states = options.load_optimizer_states && !options.load_module_only;
        if with_states {
            all_or_none(&group, self.check_ratios(&checkpoint.manifest().training))?;
        }
        self.half_loaded = Some(path.clone());
        all_or_none(&group, self.read_all(&checkpoint, &plan))?;
        let own = all_or_none(&group, self.read_own(&checkpoint))?;
        self.store.finish_restore()?;
        for (name, values) in &checkpoint.manifest().training.layer_states {
            self.states.get(name).map_or(Ok(()), |state| state.set(values))?;
        }

        let manifest = checkpoint.manifest();
        let training = &manifest.training;
        if !options.load_module_only {
            self.restore_counters(training);
            if options.load_optimizer_states {
                self.restore_optimizer(manifest, state.scaler)?;
                self.store.set_own_numbers(&own)?;
            }
            if let (Some(scheduler), Some(saved), true) =
                (&mut self.scheduler, state.scheduler, options.load_lr_scheduler_states)
            {
                scheduler.load(saved)?;
            }
            self.apply_schedule();
        }
        if let Some(compressing) = &self.compressing {
            let none = BTreeMap::new();
            let masks = if options.load_module_only { &none } else { &training.masks };
            compressing.restore(self.applied_steps(), self.seed, masks)?;
        }
        self.half_loaded = None;
        let is_own = |name: &String| self.store.params().iter().any(|param| param.name() == name);
        let aliases = manifest.aliases.iter().filter(|(_, name)| is_own(name));
        let aliases: Vec<_> = aliases.map(|(alias, name)| (alias.clone(), name.clone())).collect();
        self.aliases.extend(aliases);
        let changes = self.changes(&checkpoint, with_states);
        if leads {
            changes.iter().for_each(|change| tracing::info!("since the checkpoint: {change}"));
        }
        Ok(Loaded {
            tag: manifest.tag.clone(),
            client_state: manifest.client_state.clone(),
            data_position: training.data_position,
            missing: plan.missing,
            unexpected: plan.unexpected,
            changes,
            path,
        })
    }

    /// Finds every piece that this rank needs, or lists all that does not fit.
    fn plan<'c>(
        &self,
        checkpoint: &'c Checkpoint,
        options: &LoadOptions<'_>,
    ) -> Result<Plan<'c>, CheckpointError> {
        let with_states = options.load_optimizer_states && !options.load_module_only;
        let mut plan = Plan::default();
        let mut wrong = Vec::new();
        let mut names = Vec::with_capacity(self.store.params().len());
        for param in self.store.params() {
            let name =
                options.custom_load_fn.map_or(Some(param.name().to_owned()), |find| find(param.name()));
            // Another program may have kept a tied parameter at one of its other places alone.
            let tied = || self.aliases.iter().filter(|(_, tied)| tied.as_str() == param.name());
            let found = |name: &str| checkpoint.weights(name).is_some();
            let name = name.map(|name| match tied().map(|(alias, _)| alias).find(|alias| found(alias)) {
                Some(alias) if !found(&name) => alias.clone(),
                _ => name,
            });
            let entry = name.as_deref().and_then(|name| checkpoint.weights(name));
            let shape: Vec<u64> = param.whole_shape().sizes().iter().map(|size| *size as u64).collect();
            match entry {
                Some(entry) if entry.shape != shape => {
                    wrong.push(format!(
                        "  wrong shape {} is {:?}, expected {shape:?}",
                        param.name(),
                        entry.shape
                    ));
                }
                None if options.frozen_may_be_missing && !param.is_trainable() => {}
                None if name.is_some() && param.numel() > 0 => plan.missing.push(param.name().to_owned()),
                _ => {}
            }
            names.push(name.filter(|_| entry.is_some()));
        }
        let mut known: std::collections::HashSet<&str> = names.iter().flatten().map(String::as_str).collect();
        if let Some(parts) = &self.parts {
            known.extend(parts.names());
        }
        let weights = checkpoint.manifest().tensors.iter();
        let weights = weights.filter(|tensor| matches!(tensor.kind, Kind::Master | Kind::Weight));
        plan.unexpected =
            weights.filter(|t| !known.contains(t.name.as_str())).map(|t| t.name.clone()).collect();
        let saved = &checkpoint.manifest().training.layer_states;
        for (name, state) in &self.states {
            match saved.get(name) {
                Some(values) if values.len() != state.values().len() => wrong.push(format!(
                    "  wrong shape {name} is [{}], expected [{}]",
                    values.len(),
                    state.values().len()
                )),
                Some(_) => {}
                None => plan.missing.push(name.clone()),
            }
        }
        plan.unexpected.extend(saved.keys().filter(|name| !self.states.contains_key(*name)).cloned());
        if options.load_module_strict {
            wrong.extend(plan.missing.iter().map(|name| format!("  missing     {name}")));
            wrong.extend(plan.unexpected.iter().map(|name| format!("  unknown     {name}")));
        }
        if with_states {
            self.check_optimizer(checkpoint, &mut wrong);
        }
        for piece in self.store.pieces_to_read() {
            let Some(name) = &names[piece.param] else { continue };
            let entry = match piece.value {
                Saved::Weight => checkpoint.weights(name),
                Saved::State(..) if !with_states => continue,
                Saved::State(_, state) => checkpoint.entry(&Kind::State(state.to_owned()), name),
            };
            match (entry, piece.value) {
                (Some(entry), _) => plan.matches.push(Match { piece, entry }),
                (None, Saved::State(_, state)) => {
                    wrong.push(format!("  missing     {state} of {name}: it was not trained; {BEGIN_ANEW}"))
                }
                (None, Saved::Weight) => {}
            }
        }
        if wrong.is_empty() {
            return Ok(plan);
        }
        Err(CheckpointError::Mismatch { path: checkpoint.path().to_path_buf(), table: wrong.join("\n") })
    }

    fn check_optimizer(&self, checkpoint: &Checkpoint, wrong: &mut Vec<String>) {
        let Some(own) = self.store.optimizer() else { return };
        let (own, saved) = (own.name(), checkpoint.manifest().origin.optimizer.as_deref());
        if saved != Some(own) {
            let saved = saved.unwrap_or("no optimizer");
            wrong
                .push(format!("  optimizer   it holds states of {saved}, this run uses {own}; {BEGIN_ANEW}"));
        }
    }

    /// Reads what the manifest says of scheduler and scaler, before anything is changed.
    fn check_state(&self, checkpoint: &Checkpoint) -> Result<SavedState, CheckpointError> {
        let training = &checkpoint.manifest().training;
        let bad = |what: &str, error: serde_json::Error| {
            CheckpointError::file(checkpoint.path(), format!("the saved {what} cannot be read: {error}"))
        };
        let scheduler = training.scheduler.clone().map(serde_json::from_value).transpose();
        let scaler = training.loss_scaler.clone().map(serde_json::from_value).transpose();
        Ok(SavedState {
            scheduler: scheduler.map_err(|error| bad("schedule", error))?,
            scaler: scaler.map_err(|error| bad("loss scaler", error))?,
        })
    }

    fn read_all(&self, checkpoint: &Checkpoint, plan: &Plan<'_>) -> Result<(), CheckpointError> {
        // `load_from_fp32_weights: false` asks for the weights as kernels read them.
        let dtype = checkpoint.manifest().origin.dtype;
        let rounds = !self.config.zero.load_from_fp32_weights;
        let wanted = plan.matches.iter().map(|Match { piece, entry }| {
            let part = part_of(&self.store.params()[piece.param]);
            // What lies in other parts than this rank's own is read by its neighbours too.
            let shared = piece.replicated || entry.pieces.iter().all(|piece| piece.part != part);
            Wanted {
                tensor: entry,
                part,
                elements: piece.start as u64..(piece.start + piece.len) as u64,
                readers: if shared && self.world.size() > 1 { Readers::Several } else { Readers::This },
            }
        });
        let wanted: Vec<Wanted<'_>> = wanted.collect();
        let mut done = vec![0; wanted.len()];
        checkpoint.each_f32(&wanted, &mut |index, values| {
            let Match { piece, entry } = &plan.matches[index];
            if rounds && piece.value == Saved::Weight {
                values.iter_mut().for_each(|value| *value = rounded(dtype, *value));
            }
            let written = self.store.write_piece(piece, done[index], values);
            done[index] += values.len();
            written.map_err(|error| CheckpointError::Request(format!("'{}': {error}", entry.name)))
        })
    }

    /// What a rank of this number had alone, among as many ranks.
    fn read_own(&self, checkpoint: &Checkpoint) -> Result<OwnNumbers, CheckpointError> {
        let manifest = checkpoint.manifest();
        let of_this = |entry: &&TensorEntry| entry.kind == Kind::Rank(self.world.rank());
        let entries = manifest.tensors.iter().filter(of_this);
        let entries = entries.filter(|_| manifest.origin.ranks == self.world.size());
        let read = |entry: &TensorEntry| {
            let mut values = vec![0.0; entry.numel() as usize];
            checkpoint.read_f32(entry, 0..entry.numel(), &mut values)?;
            Ok((entry.name.clone(), values))
        };
        entries.map(read).collect()
    }

    /// What is to be said where the numbers that each rank had alone are of no use.
    fn begins_without_loss(&self, checkpoint: &Checkpoint) -> Option<String> {
        let Some(Optimizer::OneBit(rule)) = self.store.optimizer() else { return None };
        let (manifest, ranks) = (checkpoint.manifest(), self.world.size());
        let is_held = manifest.tensors.iter().any(|entry| matches!(entry.kind, Kind::Rank(_)));
        let was_compressed = rule.takes_local_gradients(manifest.training.optimizer_steps);
        let lost = match manifest.origin.ranks {
            saved if is_held && saved == ranks => return None,
            saved if is_held => format!("that is of use to {saved} ranks alone"),
            2.. if was_compressed => "the checkpoint does not hold it".to_owned(),
            _ => return None,
        };
        let parted = match rule {
            OneBit::ZeroOne(_) => ", and what ranks have walked apart since they last met",
            OneBit::Adam(_) | OneBit::Lamb(_) => "",
        };
        Some(format!(
            "what {} has lost by compression begins with nothing ({lost}): the first steps differ by what one step loses{parted}",
            rule.name()
        ))
    }

    fn restore_counters(&mut self, saved: &TrainingState) {
        self.global_steps = saved.global_steps;
        self.global_samples = saved.global_samples;
        self.skipped_steps = saved.skipped_steps;
        // Whoever goes on has changed something, and is given as many tries as at the start.
        self.skipped_in_a_row = 0;
        self.last_grad_norm = saved.last_grad_norm;
        // A step of another length must still end where its micro-batches do.
        self.micro_steps = saved.micro_steps.next_multiple_of(self.accumulation_steps);
        if let Some(seed) = saved.seed.filter(|seed| *seed != self.seed) {
            tracing::warn!("the run goes on with the checkpoint's seed {seed}, not {}", self.seed);
            self.seed = seed;
        }
    }

    /// 1-bit LAMB steps by ratios of its own once second moments are frozen: with none a step would change nothing.
    fn check_ratios(&self, saved: &TrainingState) -> Result<(), CheckpointError> {
        let Some(Optimizer::OneBit(rule @ OneBit::Lamb(_))) = self.store.optimizer() else { return Ok(()) };
        if !rule.takes_local_gradients(saved.optimizer_steps.saturating_add(1)) {
            return Ok(());
        }
        let is_held = |name: &&str| {
            saved.per_parameter.get(*name).is_some_and(|numbers| Ratio::from_numbers(numbers).is_some())
        };
        let mut trained = self.store.params().iter().filter(|param| param.is_trainable()).map(Param::name);
        match trained.find(|name| !is_held(name)) {
            None => Ok(()),
            Some(name) => {
                let why = format!(
                    "this checkpoint holds no ratios of 1-bit LAMB for {name} (DeepSpeed's form has none), by which it steps \
                     once second moments are frozen; load without optimizer states (train --resume --fresh_optimizer)"
                );
                Err(CheckpointError::Request(why))
            }
        }
    }

    fn restore_optimizer(&mut self, manifest: &Manifest, scaler: Option<LossScalerState>) -> Result<()> {
        let saved = &manifest.training;
        self.store.set_optimizer_steps(saved.optimizer_steps);
        self.store.set_per_parameter(&saved.per_parameter);
        let configured = self.store.group_options();
        if configured.len() == saved.groups.len() {
            let own = self.config.to_json();
            // Who changes an option and goes on means it: the first remedy of a run that diverged is a lower rate.
            let is_changed = |key: &str| {
                let [before, now] =
                    [&manifest.config, &own].map(|config| &config["optimizer"]["params"][key]);
                !before.is_null() && !now.is_null() && before != now
            };
            let [lr, weight_decay, betas] = ["lr", "weight_decay", "betas"].map(is_changed);
            for (group, (saved, own)) in saved.groups.iter().zip(configured).enumerate() {
                let options = GroupOptions {
                    lr: if lr { own.lr } else { saved.lr },
                    weight_decay: if weight_decay { own.weight_decay } else { saved.weight_decay },
                    betas: if betas { own.betas } else { saved.betas },
                };
                self.store.set_group_options(group, options);
            }
        } else {
            tracing::warn!(
                "the checkpoint has {} parameter groups: rates stay as configured",
                saved.groups.len()
            );
        }
        if scaler.map(|state| self.scaler.load(state)).transpose()? == Some(false) {
            tracing::warn!("the loss scale stays as configured: the checkpoint has one of another kind");
        }
        Ok(())
    }

    /// What differs from the run that was saved; `with_states` where the optimizer goes on, too.
    fn changes(&self, checkpoint: &Checkpoint, with_states: bool) -> Vec<String> {
        let manifest = checkpoint.manifest();
        let (origin, config) = (&manifest.origin, &manifest.config);
        let own = self.config.to_json();
        let mut changes = Vec::new();
        let mut note = |what: &str, before: String, now: String| {
            if before != now {
                changes.push(format!("{what}: {before} -> {now}"));
            }
        };
        note("ranks", origin.ranks.to_string(), self.world.size().to_string());
        note("ZeRO stage", origin.stage.to_string(), (self.store.stage() as u8).to_string());
        let dtype = stored_type(self.store.dtype());
        note("weights", format!("{:?}", origin.dtype), format!("{dtype:?}"));
        for key in ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"] {
            note(key, config[key].to_string(), own[key].to_string());
        }
        let rates: Vec<f64> = manifest.training.groups.iter().map(|group| group.lr).collect();
        note("learning rates", format!("{rates:?}"), format!("{:?}", self.get_lr()));
        changes.extend(other_kernels(origin, self.device()));
        note_options("", config, &own, &mut changes);
        changes.extend(with_states.then(|| self.begins_without_loss(checkpoint)).flatten());
        changes
    }
}

/// Keys of a configuration that are told in other words, and those that change nothing of what is learnt.
const TOLD_ELSEWHERE: [&str; 5] = [
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "zero_optimization.stage",
    "optimizer.params.lr",
];
const OBSERVING: [&str; 12] = [
    "steps_per_print",
    "wall_clock_breakdown",
    "memory_breakdown",
    "dump_state",
    "flops_profiler",
    "comms_logger",
    "tensorboard",
    "csv_monitor",
    "wandb",
    "comet",
    "autotuning",
    "checkpoint",
];

/// A line for each option that is another now.
fn note_options(at: &str, before: &Value, now: &Value, changes: &mut Vec<String>) {
    if TOLD_ELSEWHERE.contains(&at) || OBSERVING.contains(&at) {
        return;
    }
    if let (Some(befores), Some(nows)) = (before.as_object(), now.as_object()) {
        let keys: BTreeSet<&String> = befores.keys().chain(nows.keys()).collect();
        for key in keys {
            let below = if at.is_empty() { key.clone() } else { format!("{at}.{key}") };
            note_options(&below, &before[key], &now[key], changes);
        }
        return;
    }
    // A checkpoint of another program holds no configuration; 1 and 1.0 say the same.
    let is_same = before == now || before.as_f64().is_some_and(|before| now.as_f64() == Some(before));
    if !at.is_empty() && !is_same {
        let words = |value: &Value| if value.is_null() { "not given".to_owned() } else { value.to_string() };
        changes.push(format!("{at}: {} -> {}", words(before), words(now)));
    }
}

/// Scheduler and scaler as they were saved.
struct SavedState {
    scheduler: Option<SchedulerState>,
    scaler: Option<LossScalerState>,
}

/// A value as a 16-bit kernel reads it.
fn rounded(dtype: Dtype, value: f32) -> f32 {
    match dtype {
        Dtype::BF16 => half::bf16::from_f32(value).to_f32(),
        Dtype::F16 => half::f16::from_f32(value).to_f32(),
        _ => value,
    }
}
