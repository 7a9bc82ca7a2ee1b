//! When a run saves, and how it is loaded again.
//!
//! A run saves as its recipe says, and always before it stops for a signal. Where it goes on from is in `resume.rs`.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ferrospeed_checkpoint::{CheckpointError, Retention, agree};
use ferrospeed_comm::ReduceOp;
use ferrospeed_data::Pass;
use ferrospeed_engine::{Engine, EngineError, LoadOptions, Loaded, SaveOptions};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::best::Best;
use crate::data_state::DataState;
use crate::error::{Result, TrainError};
use crate::folder::RunFolder;
use crate::health::Trail;
use crate::recipe::{Recipe, SaveRecipe};
use crate::resume::{Resume, Starts};
use crate::run::Progress;

/// What signals ask of a run. Ranks agree at the end of each step, and on the way through what takes long without one.
#[derive(Debug, Clone, Default)]
pub struct StopRequests {
    /// End after this step: save, measure, write weights and report.
    pub finish: Arc<AtomicBool>,
    /// Leave after this step: save, and be gone.
    pub leave: Arc<AtomicBool>,
}

impl StopRequests {
    /// How a run that has not begun ends, where it was told to.
    pub fn ending(&self) -> Option<Ending> {
        Ending::asked(self.asked())
    }

    /// Whether to finish early, and whether to leave at once.
    pub(crate) fn asked(&self) -> [bool; 2] {
        [&self.finish, &self.leave].map(|flag| flag.load(Ordering::Relaxed))
    }
}

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// After its last step.
    Finished,
    /// Before it, as [`StopRequests::finish`] asked.
    Stopped,
    /// Before it, as [`StopRequests::leave`] asked: only its checkpoint is new.
    Left,
}

impl Ending {
    /// What was asked for, if anything: to finish early, to leave at once.
    pub(crate) fn asked(requests: [bool; 2]) -> Option<Ending> {
        match requests {
            [_, true] => Some(Ending::Left),
            [true, false] => Some(Ending::Stopped),
            [false, false] => None,
        }
    }
}

/// What a run keeps in a checkpoint besides the engine's state.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct RunState {
    /// Tokens that all ranks trained on.
    pub(crate) tokens: u64,
    /// Sequences to train on: the order of samples depends on it.
    pub(crate) train_sequences: u64,
    /// Tokens of each.
    pub(crate) sequence: u64,
    /// The model's Hugging Face `config.json`, for exports.
    pub(crate) model_config: Value,
    /// What it was trained on; earlier checkpoints do not say it.
    #[serde(default)]
    pub(crate) data: Option<DataState>,
    /// Whether it still learnt.
    #[serde(default)]
    pub(crate) trail: Trail,
    /// How far it is through the sequences that a curriculum has let in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) pass: Option<Pass>,
    /// Its best validation.
    #[serde(default)]
    pub(crate) best: Best,
    /// Whether the validation of this step was dropped, for the run was told to stop: the one that goes on makes it first.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) owes_validation: bool,
    /// Where adapters are trained: how, and on which weights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) adapter: Option<AdapterState>,
}

/// What the trained parameters of a run with adapters mean something beside: its checkpoints hold no others.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct AdapterState {
    /// As PEFT would be told.
    pub(crate) config: Value,
    /// What tells the model's weights from others.
    pub(crate) weights: u32,
}

/// Where a run went on.
#[derive(Debug, Clone, PartialEq)]
pub struct Resumed {
    /// The checkpoint.
    pub path: PathBuf,
    /// Steps that were done.
    pub step: u64,
    /// In what this run differs from the saved one.
    pub changes: Vec<String>,
}

/// Saves a run and loads it.
pub(crate) struct Checkpoints {
    dir: PathBuf,
    /// The run's name.
    name: String,
    recipe: Option<SaveRecipe>,
    in_background: bool,
    /// Whether optimizer states of what is loaded are left where they are.
    fresh_optimizer: bool,
    /// Whether only what is trained is saved: the rest is in the directory of the model.
    without_frozen: bool,
}

impl Checkpoints {
    pub(crate) fn new(recipe: &Recipe, folder: &RunFolder, fresh_optimizer: bool) -> Checkpoints {
        Checkpoints {
            dir: folder.checkpoints(),
            name: recipe.name.clone(),
            recipe: recipe.save.clone(),
            in_background: false,
            fresh_optimizer,
            without_frozen: recipe.adapter.is_some(),
        }
    }

    /// Loads what `resume` names, if anything; rank 0 looks, all load the same. Returns the run's own state too.
    pub(crate) fn load(
        &self,
        engine: &mut Engine,
        resume: &Resume,
        folder: &RunFolder,
        progress: &mut dyn Progress,
    ) -> Result<Option<(Loaded, Option<RunState>)>> {
        let group = engine.world().group();
        let mut own_error = None;
        let found = if group.rank() == 0 {
            resume.find(folder, &self.name).map_err(|error| {
                let said = CheckpointError::Request(error.to_string());
                own_error = Some(error);
                said
            })
        } else {
            Ok(Starts::default())
        };
        let found = agree(&group, found).map_err(|said| own_error.unwrap_or(TrainError::Checkpoint(said)))?;
        let Starts { candidates, passed_over, notes, withheld } =
            found.into_iter().next().unwrap_or_default();
        tell(engine, progress, |progress| {
            passed_over.iter().chain(&notes).for_each(|text| progress.warning(text));
        });
        let count = candidates.len();
        for (index, (dir, tag)) in candidates.into_iter().enumerate() {
            let load_optimizer_states = !self.fresh_optimizer;
            let options = LoadOptions {
                tag: Some(&tag),
                load_optimizer_states,
                frozen_may_be_missing: self.without_frozen,
                ..Default::default()
            };
            let error = match engine.load_checkpoint(&dir, &options) {
                Ok(loaded) => {
                    let state = serde_json::from_value(loaded.client_state.clone()).ok();
                    return Ok(Some((loaded, state)));
                }
                Err(error) => error,
            };
            // All ranks have failed together, each with what it saw: one that saw more than damage ends the search.
            let other = match &error {
                EngineError::Checkpoint(error) => {
                    !error.is_damage() && !matches!(error, CheckpointError::Peer { .. })
                }
                _ => true,
            };
            let mut others = [f32::from(u8::from(other))];
            group.all_reduce(&mut others, ReduceOp::Max)?;
            if others[0] > 0.0 || index + 1 == count {
                if others[0] == 0.0 {
                    let why = withheld.iter();
                    tell(engine, progress, |progress| why.for_each(|why| progress.warning(why)));
                }
                return Err(error.into());
            }
            tell(engine, progress, |progress| {
                progress.warning(&format!("checkpoint '{tag}' is passed over: {error}"));
            });
        }
        Ok(None)
    }

    /// Whether what is loaded is without optimizer states.
    pub(crate) fn begins_optimizer_anew(&self) -> bool {
        self.fresh_optimizer
    }

    /// Whether the recipe wants a checkpoint after this step, which is not the last.
    pub(crate) fn is_due(&self, step: u64) -> bool {
        self.recipe.as_ref().is_some_and(|save| save.every > 0 && step.is_multiple_of(save.every))
    }

    /// Whether the recipe wants one at the end.
    pub(crate) fn is_due_at_end(&self) -> bool {
        self.recipe.is_some()
    }

    fn options(&self, position: u64, state: &RunState) -> SaveOptions {
        let recipe = self.recipe.as_ref();
        let keep_last = recipe.and_then(|save| save.keep_last);
        SaveOptions {
            client_state: serde_json::to_value(state).unwrap_or(Value::Null),
            data_position: Some(position),
            exclude_frozen_parameters: self.without_frozen,
            retention: Retention {
                keep_last: keep_last.map(|count| usize::try_from(count).unwrap_or(usize::MAX)),
                keep_every_steps: recipe.and_then(|save| save.keep_every),
            },
            ..Default::default()
        }
    }

    /// Saves as the recipe says. A checkpoint that cannot be written costs a warning: training has not suffered, and
    /// the one before is whole.
    pub(crate) fn save(
        &mut self,
        engine: &mut Engine,
        position: u64,
        state: &RunState,
        progress: &mut dyn Progress,
    ) -> Result<()> {
        self.wait(engine, progress)?;
        let options = self.options(position, state);
        if self.recipe.as_ref().is_some_and(|save| save.background) {
            self.in_background = true;
            return report(engine.save_checkpoint_in_background(&self.dir, &options), engine, progress);
        }
        match engine.save_checkpoint(&self.dir, &options) {
            Ok(path) => {
                tell(engine, progress, |progress| progress.saved(&path));
                Ok(())
            }
            Err(error) => report(Err(error), engine, progress),
        }
    }

    /// Saves and waits; a failure is an error, for there will be no other chance.
    pub(crate) fn save_now(
        &mut self,
        engine: &mut Engine,
        position: u64,
        state: &RunState,
        progress: &mut dyn Progress,
    ) -> Result<PathBuf> {
        self.wait(engine, progress)?;
        let path = engine.save_checkpoint(&self.dir, &self.options(position, state))?;
        tell(engine, progress, |progress| progress.saved(&path));
        Ok(path)
    }

    /// Says so when the save in the background is done.
    pub(crate) fn look(&mut self, engine: &mut Engine, progress: &mut dyn Progress) -> Result<()> {
        if self.in_background && !engine.is_saving() { self.wait(engine, progress) } else { Ok(()) }
    }

    /// Waits for the save in the background.
    pub(crate) fn wait(&mut self, engine: &mut Engine, progress: &mut dyn Progress) -> Result<()> {
        self.in_background = false;
        match engine.finish_checkpoint() {
            Ok(Some(path)) => {
                tell(engine, progress, |progress| progress.saved(&path));
                Ok(())
            }
            Ok(None) => Ok(()),
            Err(error) => report(Err(error), engine, progress),
        }
    }
}

fn tell(engine: &Engine, progress: &mut dyn Progress, say: impl FnOnce(&mut dyn Progress)) {
    if engine.world().rank() == 0 {
        say(progress);
    }
}

/// A checkpoint that all ranks failed to write together is a warning; ranks that cannot talk end the run.
fn report(
    outcome: std::result::Result<(), EngineError>,
    engine: &Engine,
    progress: &mut dyn Progress,
) -> Result<()> {
    match outcome {
        Err(EngineError::Checkpoint(CheckpointError::Comm(error))) => Err(error.into()),
        Err(EngineError::Checkpoint(error)) => {
            tell(engine, progress, |progress| {
                progress.warning(&format!("training goes on without a new checkpoint: {error}"));
            });
            Ok(())
        }
        Err(error) => Err(error.into()),
        Ok(()) => Ok(()),
    }
}
