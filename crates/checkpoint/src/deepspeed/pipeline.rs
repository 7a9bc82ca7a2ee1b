//! A pipeline's files: a file per layer with its weights, and for every stage a module file that names its parameters beside
//! ZeRO's optimizer files of its data-parallel ranks.
//!
//! Read, the stages become one model: a parameter of layer 3 is `3.weight`. A tied module is listed by its key
//! (`tied_modules.embed.weight`) on every stage that uses it; it is called after the first layer whose file has its values.
//! States that were written without ZeRO are found by `numbered`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::foreign::Tensor;
use super::fp32::stage_of;
use super::import::{fill_groups, with_zero};
use super::source::{DeepSpeedFiles, names_in};
use crate::error::{CheckpointError, Result};
use crate::manifest::{GroupState, Kind, TrainingState};
use crate::pt::{Unknown, Value};

/// What stands before the key of a tied module.
pub(super) const TIED: &str = "tied_modules.";

/// What all stages' optimizer files hold.
pub(super) struct PipelineStates {
    /// f32 weights and states; their stretches count files from that of the first stage.
    pub(super) tensors: Vec<Tensor>,
    pub(super) groups: Vec<GroupState>,
    pub(super) steps: u64,
    pub(super) zero_stage: u64,
    /// Names of layers that share a tied module, with the name it goes by.
    pub(super) aliases: BTreeMap<String, String>,
    /// The files, stage by stage.
    pub(super) files: Vec<PathBuf>,
    /// The first optimizer file's own value.
    pub(super) optimizer: Option<Value>,
}

/// The states of a pipeline in the folder `path`, if it was written with ZeRO. `weights` are those of the layers' files.
pub(super) fn states(
    path: &Path,
    unknown: Unknown,
    layers: &DeepSpeedFiles,
    weights: &[Tensor],
    training: &TrainingState,
    is_own: &dyn Fn(&str) -> bool,
) -> Result<Option<PipelineStates>> {
    let names: Vec<String> = names_in(path)?.into_iter().filter(|name| is_own(name)).collect();
    let rank_of = |name: &str| {
        name.strip_prefix("mp_rank_")
            .and_then(|rest| rest.strip_suffix("_model_states.pt"))
            .map(str::to_owned)
    };
    let mut found = PipelineStates {
        tensors: Vec::new(),
        groups: Vec::new(),
        steps: 0,
        zero_stage: 1,
        aliases: BTreeMap::new(),
        files: Vec::new(),
        optimizer: None,
    };
    for (module, rank) in names.iter().filter_map(|name| Some((name, rank_of(name)?))) {
        let ending = format!("_mp_rank_{rank}_optim_states.pt");
        let is_own = |name: &&String| name.contains("zero_pp_rank_") && name.ends_with(&ending);
        let optimizers: Vec<&String> = names.iter().filter(is_own).collect();
        if optimizers.is_empty() {
            if found.files.is_empty() {
                return Ok(None);
            }
            let why = "has no optimizer files, and another stage has: some are missing";
            return Err(CheckpointError::file(&path.join(module), why));
        }
        let files = DeepSpeedFiles::open_named(path, &[module], &optimizers, unknown)?;
        found.add_stage(&files, training)?;
    }
    if found.files.is_empty() {
        return Ok(None);
    }
    found.name_tied(path, unknown, layers, weights)?;
    Ok(Some(found))
}

impl PipelineStates {
    fn add_stage(&mut self, files: &DeepSpeedFiles, training: &TrainingState) -> Result<()> {
        let stage = files.optimizer(0, "zero_stage").ok().and_then(stage_of).unwrap_or(1);
        let (tensors, steps) = with_zero(files, stage)?;
        let is_first = self.files.is_empty();
        if !is_first && steps != self.steps {
            let why = format!("its optimizer made {steps} steps, that of the first stage {}", self.steps);
            return Err(files.fail(files.model_files, why));
        }
        (self.steps, self.zero_stage) = (steps, stage);
        let optimizer = files.optimizers().first().and_then(|file| file.value().get("optimizer_state_dict"));
        if is_first {
            self.optimizer = optimizer.cloned();
        }
        let trained: Vec<_> =
            tensors.iter().map(|tensor| &tensor.spec).filter(|spec| spec.kind == Kind::Master).collect();
        let mut own = TrainingState { groups: Vec::new(), ..training.clone() };
        fill_groups(&mut own, files.files[0].value(), optimizer, &trained);
        let before = self.files.len();
        for mut tensor in tensors {
            tensor.stretches.iter_mut().for_each(|stretch| stretch.file += before);
            let is_known = |known: &Tensor| {
                (&known.spec.name, &known.spec.kind) == (&tensor.spec.name, &tensor.spec.kind)
            };
            // Every stage that uses a tied module has it, with the same values.
            if !self.tensors.iter().any(is_known) {
                self.tensors.push(tensor);
            }
        }
        for (index, group) in own.groups.into_iter().enumerate() {
            match self.groups.get_mut(index) {
                None => self.groups.push(group),
                Some(known) => {
                    let new = group.params.into_iter().filter(|name| !known.params.contains(name));
                    let new: Vec<String> = new.collect();
                    known.params.extend(new);
                }
            }
        }
        self.files.extend(files.paths());
        Ok(())
    }

    /// Calls tied modules after the first layer that has their values.
    fn name_tied(
        &mut self,
        path: &Path,
        unknown: Unknown,
        layers: &DeepSpeedFiles,
        weights: &[Tensor],
    ) -> Result<()> {
        let own: BTreeSet<String> = self.tensors.iter().map(|tensor| tensor.spec.name.clone()).collect();
        let open = |file: &PathBuf| crate::pt::PtFile::open_with(file, unknown);
        let files = self.files.iter().map(open).collect::<Result<Vec<_>>>()?;
        let stages = DeepSpeedFiles { path: path.to_path_buf(), files, model_files: 0 };
        let mut names = BTreeMap::new();
        for tied in self.tensors.iter().filter(|tensor| tensor.spec.kind == Kind::Master) {
            let Some((_, rest)) = tied.spec.name.strip_prefix(TIED).and_then(|rest| rest.split_once('.'))
            else {
                continue;
            };
            let values = stages.read_f32(&tied.stretches)?;
            let mut alike = Vec::new();
            for weight in weights {
                let is_layer = weight.spec.name.split_once('.').is_some_and(|(_, of)| of == rest);
                if !is_layer || own.contains(&weight.spec.name) || weight.spec.shape != tied.spec.shape {
                    continue;
                }
                // A layer's file may have 16 bits of them.
                let close = |(one, other): (&f32, &f32)| (one - other).abs() <= 0.01 * other.abs();
                if layers.read_f32(&weight.stretches)?.iter().zip(&values).all(close) {
                    alike.push(weight.spec.name.clone());
                }
            }
            alike.sort_by(|one, other| super::source::natural(one, other));
            let mut alike = alike.into_iter();
            if let Some(name) = alike.next() {
                self.aliases.extend(alike.map(|alias| (alias, name.clone())));
                names.insert(tied.spec.name.clone(), name);
            }
        }
        let rename = |name: &mut String| {
            if let Some(new) = names.get(name) {
                name.clone_from(new);
            }
        };
        self.tensors.iter_mut().for_each(|tensor| rename(&mut tensor.spec.name));
        self.groups.iter_mut().flat_map(|group| &mut group.params).for_each(rename);
        Ok(())
    }
}

/// The layer that a name begins with.
pub(super) fn layer_of(name: &str) -> Option<u64> {
    name.split_once('.')?.0.parse().ok()
}
