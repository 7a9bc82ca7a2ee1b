//! What one rank of a run does: `build` makes an engine of a recipe, `course` takes the steps (`steps` is one of them, `compare`
//! and `reference` what preferences ask of it), `end` writes what is left; `listening` hears what signals ask meanwhile; `said`
//! is what a run says of itself.

mod build;
mod compare;
mod course;
mod end;
mod listening;
mod reference;
mod said;
mod steps;

pub use said::{Observing, ObservingCost, Progress, RunInfo, Summary};

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use ferrospeed_checkpoint::{CheckpointError, agree};
use ferrospeed_comm::World;
use ferrospeed_data::{Position, Sequences, Split, unheard};
use ferrospeed_engine::Engine;
use ferrospeed_models::Decoder;
use ferrospeed_models::decoder::CheckpointTimes;
use ferrospeed_tensor::Device;
use ferrospeed_text::Codec;
use ferrospeed_tune::plan::Operands;
use serde_json::Value;

use crate::best::Best;
use crate::checkpoint::{AdapterState, StopRequests};
use crate::curriculum::Order;
use crate::data_state::DataState;
use crate::error::{Result, TrainError};
use crate::folder::{FolderLock, RunFolder};
use crate::health::Health;
use crate::objective::Objective;
use crate::prepare::prepare;
use crate::recipe::Recipe;
use crate::resume::Resume;
use build::build;
use course::Course;
use reference::Reference;

/// One rank's part of a run.
pub struct Job<'a> {
    /// What to train.
    pub recipe: &'a Recipe,
    /// Where the recipe was read, for messages.
    pub path: &'a Path,
    /// The ranks.
    pub world: World,
    /// Where this rank computes.
    pub device: Device,
    /// Where files go.
    pub folder: &'a RunFolder,
    /// Whether whoever started this rank holds the folder's lock; else rank 0 takes it.
    pub folder_is_held: bool,
    /// Where it starts.
    pub resume: Resume,
    /// Whether the optimizer's states begin anew where it goes on from a checkpoint.
    pub fresh_optimizer: bool,
    /// What signals ask for.
    pub requests: StopRequests,
    /// When it is observed.
    pub observing: Observing,
    /// Whether only its speed is asked for: nothing is validated, sampled or exported.
    pub is_experiment: bool,
    /// What products of this host copy first, for the plan of its memory.
    pub operands: Operands,
}

struct Run<'a> {
    recipe: &'a Recipe,
    engine: Engine,
    model: Arc<Decoder>,
    /// Its Hugging Face `config.json`.
    model_config: Value,
    objective: Objective,
    /// How likely the model held answers before it was trained, where the objective asks for that.
    reference: Option<Reference>,
    sequences: Sequences,
    /// What rank 0 tells of them in checkpoints.
    data: Option<DataState>,
    codec: Option<Codec>,
    order: Order,
    position: Position,
    flops_per_token: f64,
    tokens: u64,
    health: Health,
    /// Its best validation so far.
    best: Best,
    /// Whether the validation of the last step was dropped, for the run was told to stop.
    owes_validation: bool,
    /// With `activation_checkpointing.profile`.
    checkpoint_times: Option<Arc<CheckpointTimes>>,
    /// What checkpoints of a run with adapters say of them.
    adapter: Option<AdapterState>,
}

/// Runs a recipe on this rank; all ranks call it together.
pub fn run(job: &Job<'_>, progress: &mut dyn Progress) -> Result<Summary> {
    let start = Instant::now();
    let _lock = if job.folder_is_held { None } else { take_folder(job)? };
    let mesh = job.recipe.mesh().over(&job.world)?;
    let prepared = prepare(job.recipe, job.path, job.folder, Some(&mesh), &mut unheard)?;
    let sequences = prepared.sequences.count(Split::Train);
    let recipe = &job.recipe.with_steps_of(sequences).map_err(|error| TrainError::Recipe {
        path: job.path.to_path_buf(),
        problems: vec![error.to_string()],
    })?;
    let built = build(job, recipe, &mesh, prepared)?;
    let mut course = Course::begin(job, built, progress)?;
    course.stop_at_once()?;
    course.walk()?;
    course.end(start)
}

/// Rank 0 takes the folder where nobody did before; all ranks hear whether it could.
fn take_folder(job: &Job<'_>) -> Result<Option<FolderLock>> {
    let leads = job.world.rank() == 0;
    let taken = if !leads {
        Ok(None)
    } else {
        let unused = if job.resume == Resume::No { job.folder.check_unused() } else { Ok(()) };
        unused.and_then(|()| job.folder.lock().map(Some))
    };
    let said = taken.as_ref().map(|_| ()).map_err(|error| CheckpointError::Request(error.to_string()));
    match (agree(&job.world.group(), said), taken) {
        (Ok(_), Ok(lock)) => Ok(lock),
        (_, Err(error)) => Err(error),
        (Err(error), _) => Err(error.into()),
    }
}
