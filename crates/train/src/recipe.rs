//! Recipes: what to train, on what, for how long.
//!
//! ```toml
//! name = "mine"            # the run's folder is runs/mine
//! steps = 200
//! ranks = 2                # default 1
//! seed = 42
//!
//! [model]
//! preset = "gpt2"          # or "llama"; or path = "a Hugging Face directory"; or config = "a config.json"
//! layers = 4
//! width = 256
//! heads = 4
//!
//! [data]
//! text = ["README.md", "crates"]
//! extensions = ["md", "rs"]
//! sequence = 256
//! validation = 0.05
//!
//! [eval]
//! every = 50
//! sequences = 64
//!
//! [save]                   # default: only when the run is stopped by a signal
//! every = 100              # steps; 0 saves at the end alone
//! keep_last = 3            # default: all stay
//! keep_every = 1000        # these stay for good
//! background = true        # training goes on while files are written
//!
//! [sample]
//! prompt = "fn "
//! tokens = 200
//!
//! [ds_config]              # or ds_config = "ds_config.json"
//! train_micro_batch_size_per_gpu = 8
//! ```
//!
//! Paths are relative to the folder the command is run in. Everything that is wrong is reported together, before any
//! rank starts.

use std::num::NonZeroU64;
use std::path::{Path, PathBuf};

use ferrospeed_config::{AutoValues, Config, ConfigError};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::{Result, TrainError};

/// A recipe as it is written.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// Names the run's folder.
    pub name: String,
    /// Optimizer steps.
    pub steps: u64,
    /// Ranks on this host.
    #[serde(default = "one")]
    pub ranks: u32,
    /// Where random numbers start.
    #[serde(default = "default_seed")]
    pub seed: u64,
    /// What is trained.
    pub model: ModelRecipe,
    /// What it is trained on.
    pub data: DataRecipe,
    /// How it is measured.
    #[serde(default)]
    pub eval: EvalRecipe,
    /// When it is saved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub save: Option<SaveRecipe>,
    /// Text to write at the end.
    #[serde(default)]
    pub sample: Option<SampleRecipe>,
    /// The DeepSpeed configuration, or the path of one.
    pub ds_config: Value,
}

/// What is trained.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelRecipe {
    /// A new model of this family: `gpt2` or `llama`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preset: Option<String>,
    /// A Hugging Face directory whose weights are trained further.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
    /// A new model by a Hugging Face `config.json`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config: Option<PathBuf>,
    /// Blocks of a preset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layers: Option<u64>,
    /// Channels of a preset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub width: Option<u64>,
    /// Heads of a preset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub heads: Option<u64>,
    /// Tokens of a preset; default: the data's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vocabulary: Option<u64>,
    /// Dropout of a preset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dropout: Option<f64>,
    /// Recompute blocks in backward instead of keeping them.
    #[serde(default)]
    pub activation_checkpointing: bool,
}

/// What it is trained on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataRecipe {
    /// Files, or folders of files, read as bytes.
    pub text: Vec<PathBuf>,
    /// Which files of folders.
    #[serde(default)]
    pub extensions: Vec<String>,
    /// Tokens per sequence.
    pub sequence: u64,
    /// The share of sequences that is only measured.
    #[serde(default)]
    pub validation: f64,
}

/// How it is measured.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EvalRecipe {
    /// Every this many steps; 0 only at the end.
    #[serde(default)]
    pub every: u64,
    /// On this many sequences; 0 takes all.
    #[serde(default)]
    pub sequences: u64,
}

/// When it is saved.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SaveRecipe {
    /// Every this many steps, and at the end; 0 only at the end.
    #[serde(default)]
    pub every: u64,
    /// How many of the newest checkpoints stay; default: all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keep_last: Option<u64>,
    /// Checkpoints of steps that are a multiple of this stay for good.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keep_every: Option<u64>,
    /// Whether training goes on while files are written: costs one copy of the state in memory.
    #[serde(default = "yes")]
    pub background: bool,
}

/// Text to write at the end.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SampleRecipe {
    /// How it starts.
    pub prompt: String,
    /// How long it is.
    pub tokens: u64,
    /// How freely it is drawn; 0 takes the likeliest.
    #[serde(default)]
    pub temperature: f32,
}

fn one() -> u32 {
    1
}

fn default_seed() -> u64 {
    42
}

fn yes() -> bool {
    true
}

const RECIPE_KEYS: [&str; 9] = ["name", "steps", "ranks", "seed", "model", "data", "eval", "save", "sample"];

impl Recipe {
    /// Reads a recipe and applies `--set` overrides: keys of the recipe by their name, all others to the ds_config.
    pub fn load(path: &Path, overrides: &[String]) -> Result<Recipe> {
        let text = std::fs::read_to_string(path).map_err(TrainError::io(path))?;
        let refuse =
            |problem: String| TrainError::Recipe { path: path.to_path_buf(), problems: vec![problem] };
        let table: toml::Table = toml::from_str(&text).map_err(|error| refuse(error.to_string()))?;
        let mut value = serde_json::to_value(table).map_err(|error| refuse(error.to_string()))?;
        if let Some(file) = value["ds_config"].as_str() {
            let config = Config::from_path(file).map_err(|error| refuse(error.to_string()))?;
            value["ds_config"] = config.source().clone();
        }
        for assignment in overrides {
            let first = assignment.split(['.', '=']).next().unwrap_or_default();
            let target = if RECIPE_KEYS.contains(&first) { &mut value } else { &mut value["ds_config"] };
            ferrospeed_config::set(target, assignment).map_err(|error| refuse(error.to_string()))?;
        }
        serde_json::from_value(value).map_err(|error| refuse(error.to_string()))
    }

    /// The resolved configuration for the recipe's ranks.
    pub fn config(&self) -> Result<(Config, Vec<String>), ConfigError> {
        let ranks = NonZeroU64::new(u64::from(self.ranks)).unwrap_or(NonZeroU64::MIN);
        let (config, report) =
            Config::from_value("ds_config", &self.ds_config)?.resolve(ranks, &AutoValues::new())?;
        Ok((config, report.warnings().map(|warning| warning.to_string()).collect()))
    }

    /// Everything that is wrong with the recipe itself, before data and model are looked at.
    pub fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        let mut refuse = |wrong: bool, problem: String| {
            if wrong {
                problems.push(problem);
            }
        };
        let name_is_plain = !self.name.is_empty()
            && self.name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c));
        refuse(
            !name_is_plain || self.name.starts_with('.'),
            format!("name: '{}' must be letters, digits, '-', '_' and '.'", self.name),
        );
        refuse(self.steps == 0, "steps: must be at least 1".into());
        refuse(self.ranks == 0, "ranks: must be at least 1".into());
        refuse(
            self.data.sequence < 2,
            format!("data.sequence: {} is too short to predict a next token", self.data.sequence),
        );
        refuse(
            !(0.0..1.0).contains(&self.data.validation),
            format!("data.validation: {} is not a share in 0..1", self.data.validation),
        );
        refuse(self.data.text.is_empty(), "data.text: names no file or folder".into());
        for path in &self.data.text {
            refuse(!path.exists(), format!("data.text: {} does not exist", path.display()));
        }
        let model = &self.model;
        let sources = [model.preset.is_some(), model.path.is_some(), model.config.is_some()];
        let given = sources.iter().filter(|&&given| given).count();
        refuse(given != 1, "model: give one of preset, path and config".into());
        for (key, path) in [("model.path", &model.path), ("model.config", &model.config)] {
            if let Some(path) = path {
                refuse(!path.exists(), format!("{key}: {} does not exist", path.display()));
            }
        }
        if let Some(preset) = &model.preset {
            let known = ["gpt2", "llama"].contains(&preset.as_str());
            refuse(!known, format!("model.preset: '{preset}' is not known; use gpt2 or llama"));
        } else {
            let sizes = [model.layers, model.width, model.heads, model.vocabulary];
            let sized = sizes.iter().any(Option::is_some) || model.dropout.is_some();
            refuse(sized, "model: layers, width, heads, vocabulary and dropout belong to a preset".into());
        }
        if let Some(save) = &self.save {
            let no_rotation = save.keep_every.is_some() && save.keep_last.is_none();
            refuse(no_rotation, "save.keep_every: means nothing without save.keep_last: all stay".into());
            for (key, value) in [("save.keep_last", save.keep_last), ("save.keep_every", save.keep_every)] {
                refuse(value == Some(0), format!("{key}: must be at least 1; leave it out to keep all"));
            }
        }
        if let Some(sample) = &self.sample {
            refuse(sample.prompt.is_empty(), "sample.prompt: must not be empty".into());
            refuse(
                sample.temperature < 0.0,
                format!("sample.temperature: {} is negative", sample.temperature),
            );
        }
        if let Err(error) = self.config() {
            problems.push(error.to_string().replace('\n', "\n  "));
        }
        problems
    }
}
