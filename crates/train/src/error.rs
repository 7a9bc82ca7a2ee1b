//! The one error of this crate.

use std::path::PathBuf;

use crate::checkpoint::Ending;

/// What can go wrong between a recipe and its run.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The recipe cannot be run; everything that is wrong with it, one line each.
    #[error("{path} cannot be run:\n{}", .problems.iter().map(|problem| format!("  {problem}")).collect::<Vec<_>>().join("\n"))]
    Recipe {
        /// The recipe.
        path: PathBuf,
        /// What is wrong, where, and what to write instead.
        problems: Vec<String>,
    },
    /// What the recipe names of the Hub could not be brought.
    #[error("{path} cannot be run yet:\n  {key}: {source}")]
    Hub {
        /// The recipe.
        path: PathBuf,
        /// Where the name stands.
        key: String,
        /// Why.
        source: ferrospeed_hub::HubError,
    },
    /// A file could not be read or written.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The model could not be built, read or written.
    #[error(transparent)]
    Model(#[from] ferrospeed_models::ModelError),
    /// The trained model could not write.
    #[error("sample: {0}")]
    Sample(#[from] ferrospeed_serve::inference::InferenceError),
    /// The data could not be read.
    #[error(transparent)]
    Data(#[from] ferrospeed_data::DataError),
    /// A text that could not become tokens, or be made of them.
    #[error(transparent)]
    Text(#[from] ferrospeed_text::TextError),
    /// The run's folder holds checkpoints, and the run was to start anew.
    #[error(
        "{}: there are checkpoints of an earlier run; go on from them with --resume, or choose another --out",
        dir.display()
    )]
    Occupied {
        /// Where they are.
        dir: PathBuf,
    },
    /// The run's folder holds what an earlier run has left, and the run was to start anew.
    #[error(
        "{}: an earlier run has left its {left} here; go on with it (--resume {0}), choose another --out, or replace it with --overwrite",
        dir.display()
    )]
    Used {
        /// The folder.
        dir: PathBuf,
        /// What is there.
        left: String,
    },
    /// The run's folder holds a run, and the checkpoint to begin with lies elsewhere.
    #[error(
        "{}: a run is here already, and {} is none of its checkpoints: what begins with it needs a folder of its own; choose another --out, or go on with the run that is here (--resume without a folder)",
        dir.display(), checkpoint.display()
    )]
    NoFolderOfItsOwn {
        /// The run's folder.
        dir: PathBuf,
        /// The checkpoint.
        checkpoint: PathBuf,
    },
    /// The folder holds a run of another name.
    #[error(
        "{dir}: holds the run '{found}', and the recipe is that of '{name}': to go on with '{found}' take its recipe ({dir}/config/recipe.toml) or --set name={found}; for a run of its own that begins with a checkpoint of '{found}', --resume {dir} with another --out",
        dir = dir.display()
    )]
    AnotherRun {
        /// The folder.
        dir: PathBuf,
        /// The name of the run in it.
        found: String,
        /// The recipe's.
        name: String,
    },
    /// Going on would lose what a finished run has learned since.
    #[error(
        "{}: this run is finished, after step {finished}; to go on after step {step} here would write over its log and its weights. To begin another run there: --resume {} with another --out{}",
        dir.display(), checkpoint.display(), damaged.iter().map(|line| format!("\n{line}")).collect::<String>()
    )]
    Undoes {
        /// The run's folder.
        dir: PathBuf,
        /// Its last step.
        finished: u64,
        /// The newest that can be gone on from.
        checkpoint: PathBuf,
        /// Its step.
        step: u64,
        /// What is wrong with later ones.
        damaged: Vec<String>,
    },
    /// A run was told to stop before its first step had begun; one that was to replace another, before it was done.
    #[error("told to stop before its first step was done; nothing was trained")]
    StoppedAtOnce(Ending),
    /// Another run writes into the folder now.
    #[error(
        "{}: another run is writing here ({holder}); wait for it, have it save and leave (SIGTERM) to go on with --resume, or choose another --out",
        dir.display()
    )]
    Busy {
        /// The folder.
        dir: PathBuf,
        /// Who.
        holder: String,
    },
    /// The loss stopped being a number.
    #[error(
        "the run has diverged: {why}. Lower the learning rate, lengthen the warm-up, clip gradients (gradient_clipping) or use bf16 instead of fp16; weights were not exported, and {way_back}"
    )]
    Diverged {
        /// Since when, and what was the last good loss.
        why: String,
        /// The checkpoint to go on from.
        way_back: String,
    },
    /// A checkpoint is of another model, whose weights may have the same shapes.
    #[error(
        "{}: this checkpoint is of another model than the recipe's (before -> now):\n  {}\ngo on with the model that it is of (config/recipe.toml of its run), or train its weights as another one: model.path names an export of them, with a config.json of your own",
        checkpoint.display(), differences.join("\n  ")
    )]
    AnotherModel {
        /// Which.
        checkpoint: PathBuf,
        /// Each key, with both values.
        differences: Vec<String>,
    },
    /// The loss scale cannot fall any further.
    #[error("{floor}; weights were not exported, and {way_back}")]
    ScaleFloor {
        /// The step and the scale.
        floor: ferrospeed_optim::OptimError,
        /// The checkpoint to go on from.
        way_back: String,
    },
    /// The run is over, and something of it could not be written.
    #[error("the run came to its end, but {0}")]
    Unsaved(String),
    /// A checkpoint could not be found.
    #[error(transparent)]
    Checkpoint(#[from] ferrospeed_checkpoint::CheckpointError),
    /// Training failed.
    #[error(transparent)]
    Engine(#[from] ferrospeed_engine::EngineError),
    /// Model state could not be read.
    #[error(transparent)]
    Zero(#[from] ferrospeed_zero::ZeroError),
    /// Ranks could not talk.
    #[error(transparent)]
    Comm(#[from] ferrospeed_comm::Error),
    /// A log could not be written.
    #[error(transparent)]
    Observe(#[from] ferrospeed_observe::ObserveError),
    /// A kernel failed.
    #[error(transparent)]
    Tensor(#[from] ferrospeed_tensor::TensorError),
}

/// The result of everything here.
pub type Result<T, E = TrainError> = std::result::Result<T, E>;

impl TrainError {
    pub(crate) fn io(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> TrainError {
        let path = path.into();
        move |source| TrainError::Io { path, source }
    }
}
