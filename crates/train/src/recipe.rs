//! Recipes: what to train, on what, for how long.
//!
//! ```toml
//! name = "mine"            # the run's folder is runs/mine
//! steps = 200              # or epochs = 3: so many passes over the data
//! ranks = 2                # default 1
//! seed = 42
//! trace = "trace.json"     # a timeline of all ranks; default: none
//! objective = "dpo"        # learn which of two answers is preferred; default: next_token; a table [objective] has options
//! gradient_norms_every = 10 # steps between those in which the norm of each layer's gradient is taken; default: never
//!
//! [model]
//! preset = "gpt2"          # or "llama"; or path = "a Hugging Face directory, or a name on the Hub"; or config = "a config.json"
//! layers = 4
//! width = 256
//! heads = 4
//! activation_checkpointing = true       # blocks are computed again in backward instead of kept
//! mlp_chunk = 8192                      # tokens that feed-forward layers take at a time; 0: all; default: by their number
//!
//! # frozen = ["model.embed_tokens*"]    # parameters that stay as they are
//!
//! [adapter]                # in place of the model's weights, which stay as they are, adapters of its layers are trained
//! rank = 16
//! target_modules = "all-linear"         # or ["q_proj", "v_proj"]
//!
//! [data]                   # exactly one kind of data:
//! text = ["README.md", "crates"]        # files, or folders with…
//! extensions = ["md", "rs"]             # …these files
//! # jsonl = ["a.jsonl"]                 # one object per line, the text in…
//! # field = "text"                      # …this field
//! # parquet = ["a.parquet"]             # the text in…
//! # column = "text"                     # …this column
//! # samples = ["chats.jsonl"]           # conversations, of which what the assistant says is learnt
//! # hub = "org/name"                    # data of the Hugging Face Hub, like samples; with column or field like parquet or jsonl
//! # tokens = ["train.bin"]              # nanoGPT's token files, as…
//! # token_type = "u16"                  # …u16 or u32
//! # megatron = ["data/my_text_document"] # prefixes of Megatron-LM's .bin and .idx
//! # synthetic = 1000000                 # so many made-up tokens
//! tokenizer = "tokenizer.json"          # or "bytes"; default: the model's own, or bytes
//! sequence = 256                        # tokens per sequence
//! documents = "apart"                   # tokens see their own document alone; default: "together"
//! # end_token = 50256                   # of tokens and megatron: the token that a document ends with
//! validation = 0.05                     # a share, or files of the same kind: ["val.bin"]
//!
//! [training]               # fills the "auto"s of a ds_config; keys and defaults of Hugging Face's training arguments
//! learning_rate = 3e-4
//! warmup_steps = 20
//!
//! [pipeline]               # the same keys as the ds_config's section
//! stages = 2               # layers lie on so many ranks, one after the other; ranks is a multiple of it
//! schedule = "zb-h1"       # the order of a step's work: 1f1b, interleaved:CHUNKS, zb-h1 or zb-v
//! partition = "uniform"    # or "parameters", or "type:REGEX"
//!
//! [tensor_parallel]        # the same keys as the ds_config's section
//! autotp_size = 2          # so many ranks hold slices of each layer; ranks is a multiple of it
//! sequence_parallel = true # between layers each has a part of the tokens; data.sequence is a multiple of them
//!
//! [expert_parallel]        # the same keys as the ds_config's section
//! autoep_size = 2          # so many ranks share the experts of each layer; ranks is a multiple of it
//!
//! [eval]
//! every = 50
//! sequences = 64
//! at_start = true          # before the first step, too
//! keep_best = true         # the weights of the best one stay in model-best/
//! patience = 5             # the run ends after so many in a row that were no better
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
//! optimizer = { type = "AdamW" }
//! ```
//!
//! Paths are relative to the folder the command is run in. Everything that is wrong is reported together, before any
//! rank starts. `docs/recipes.md` says more.

mod adapter;
mod elsewhere;
mod objective;
mod problems;
mod schema;
mod trainer;
mod training;

use std::num::{NonZeroU64, NonZeroUsize};
use std::path::{Path, PathBuf};

use ferrospeed_comm::layout::ExpertOrder;
use ferrospeed_config::{Config, ConfigError};
use ferrospeed_nn::SequenceMethod;
use ferrospeed_nn::tensor_parallel::Between;
use ferrospeed_optim::compression::Compression;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::{Result, TrainError};
use crate::hub;
use crate::mesh::MeshSizes;

pub use adapter::{AdapterRecipe, TargetsRecipe};
pub use objective::ObjectiveRecipe;
pub use trainer::trainer_defaults;
pub use training::TrainingRecipe;

/// A recipe as it is written.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// Names the run's folder.
    pub name: String,
    /// Optimizer steps.
    pub steps: u64,
    /// How often all sequences are seen, in place of `steps`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epochs: Option<f64>,
    /// Ranks on this host.
    #[serde(default = "one")]
    pub ranks: u32,
    /// Where random numbers start.
    #[serde(default = "default_seed")]
    pub seed: u64,
    /// The run has diverged, and ends, after this many steps in a row whose loss or gradient is not a number.
    #[serde(default = "default_max_bad_steps")]
    pub max_bad_steps: u64,
    /// What is minimised; default: how unlikely each next token is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub objective: Option<ObjectiveRecipe>,
    /// What is trained.
    pub model: ModelRecipe,
    /// What is trained in place of its weights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adapter: Option<AdapterRecipe>,
    /// What it is trained on.
    pub data: DataRecipe,
    /// What fills the `"auto"`s of the ds_config.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub training: Option<TrainingRecipe>,
    /// How it is measured.
    #[serde(default)]
    pub eval: EvalRecipe,
    /// When it is saved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub save: Option<SaveRecipe>,
    /// Text to write at the end.
    #[serde(default)]
    pub sample: Option<SampleRecipe>,
    /// The norm of each layer's gradient is taken in every so many steps; 0: never.
    #[serde(default, skip_serializing_if = "is_never")]
    pub gradient_norms_every: u64,
    /// Where a timeline of all ranks is written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trace: Option<PathBuf>,
    /// The DeepSpeed configuration, or the path of one.
    pub ds_config: Value,
    /// What could not be read as it was written.
    #[serde(skip)]
    misread: Vec<String>,
}

/// What is trained.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelRecipe {
    /// A new model of this family: `gpt2` or `llama`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preset: Option<String>,
    /// A Hugging Face directory whose weights are trained further, or the name of one on the Hub.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "hub::write_path")]
    pub path: Option<PathBuf>,
    /// A new model by a Hugging Face `config.json`.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "hub::write_path")]
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
    /// Dropout, of a preset; of others in place of what their `config.json` says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dropout: Option<f64>,
    /// Recompute blocks in backward instead of keeping them.
    #[serde(default)]
    pub activation_checkpointing: bool,
    /// How many tokens feed-forward layers take at a time; 0: all. Default: some of very long inputs, where blocks are
    /// recomputed anyway.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mlp_chunk: Option<u64>,
    /// Parameters that are not trained, by their names, in which `*` stands for anything.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub frozen: Vec<String>,
}

/// What it is trained on: exactly one kind of data, and how it is cut.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataRecipe {
    /// Plain files, or folders of them.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "hub::write_paths")]
    pub text: Option<Vec<PathBuf>>,
    /// Which files of `text` folders.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub extensions: Vec<String>,
    /// JSON lines.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "hub::write_paths")]
    pub jsonl: Option<Vec<PathBuf>>,
    /// The field of `jsonl` that holds the text; default `text`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub field: Option<String>,
    /// Parquet files.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "hub::write_paths")]
    pub parquet: Option<Vec<PathBuf>>,
    /// The column of `parquet` that holds the text; default `text`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub column: Option<String>,
    /// Files of conversations, instructions, completions or texts, of which a part is learnt.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "hub::write_paths")]
    pub samples: Option<Vec<PathBuf>>,
    /// Data of the Hub by its name, in place of one of these lists.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hub: Option<String>,
    /// What `samples` hold: `messages`, `sharegpt`, `alpaca`, `completion`, `text`, `preference` or `unpaired`; default: told by
    /// the first one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// How conversations of `samples` become text: a name or a file; default: the model's own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chat_template: Option<String>,
    /// What of `samples` is learnt: what the `assistant` says (the default), the `last` of it, or `all`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub train_on: Option<String>,
    /// What becomes of `samples` that are longer than a sequence: `cut` (the default), `drop` or `split`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub too_long: Option<String>,
    /// Token files as nanoGPT writes them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens: Option<Vec<PathBuf>>,
    /// How `tokens` are written: `u16` (the default) or `u32`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_type: Option<String>,
    /// Prefixes of Megatron-LM's token files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub megatron: Option<Vec<PathBuf>>,
    /// So many made-up tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub synthetic: Option<u64>,
    /// How text becomes tokens: a `tokenizer.json`, or `bytes`. Default: the `tokenizer.json` beside the model, or bytes.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "hub::write_text")]
    pub tokenizer: Option<String>,
    /// Where text is kept as tokens, for other runs to share; default: the run's own folder.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache: Option<PathBuf>,
    /// Tokens per sequence.
    pub sequence: u64,
    /// Whether tokens of a sequence see all documents before them (`together`, the default) or their own alone (`apart`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub documents: Option<String>,
    /// The token that documents of `tokens` and `megatron` end with; default: the tokenizer's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub end_token: Option<u64>,
    /// What is only measured.
    #[serde(default)]
    pub validation: ValidationRecipe,
}

impl DataRecipe {
    /// Whether tokens see their own document alone.
    pub fn documents_are_apart(&self) -> bool {
        // Samples have nothing to do with each other, unless it is said.
        self.documents.as_deref().map_or(self.samples.is_some(), |documents| documents == "apart")
    }
}

/// What is only measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum ValidationRecipe {
    /// This share of the sequences.
    Share(f64),
    /// Files of their own, of the same kind as those to train on.
    Files(#[serde(serialize_with = "hub::write_list")] Vec<PathBuf>),
}

impl Default for ValidationRecipe {
    fn default() -> Self {
        ValidationRecipe::Share(0.0)
    }
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
    /// Before the first step, too.
    #[serde(default, skip_serializing_if = "is_not")]
    pub at_start: bool,
    /// Whether the weights of the best validation are kept in `model-best/`.
    #[serde(default, skip_serializing_if = "is_not")]
    pub keep_best: bool,
    /// The run ends after so many validations in a row that were no better than the best.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub patience: Option<u64>,
    /// By how much one has to be better to count as such; default 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_gain: Option<f64>,
    /// What is compared: `loss` (the default), or a measure of the objective.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measure: Option<String>,
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

/// Text to write at the end, and on the way.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SampleRecipe {
    /// How it starts.
    pub prompt: String,
    /// How others start that are written too.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub prompts: Vec<String>,
    /// Every this many steps; 0 only at the end.
    #[serde(default, skip_serializing_if = "is_never")]
    pub every: u64,
    /// How long it is.
    pub tokens: u64,
    /// How freely it is drawn; 0 takes the likeliest.
    #[serde(default)]
    pub temperature: f32,
}

fn is_not(said: &bool) -> bool {
    !said
}

fn is_never(every: &u64) -> bool {
    *every == 0
}

fn one() -> u32 {
    1
}

fn default_max_bad_steps() -> u64 {
    20
}

fn default_seed() -> u64 {
    42
}

fn yes() -> bool {
    true
}

/// A recipe may hold a whole ds_config.
const MAX_RECIPE_BYTES: u64 = 4 << 20;

/// Sections of the ds_config that a recipe may have itself.
const OWN_SECTIONS: [&str; 3] = ["pipeline", "tensor_parallel", "expert_parallel"];

/// `[pipeline]`, `[tensor_parallel]` and `[expert_parallel]` are the ds_config's sections of that name in a place where they are seen. Tells what
/// contradicts them.
fn move_section(recipe: &mut serde_json::Map<String, Value>, name: &str) -> Vec<String> {
    let Some(Value::Object(own)) = recipe.remove(name) else { return Vec::new() };
    let mut problems = Vec::new();
    // What cannot have a section is told by its own checks.
    let can_have_keys = |value: &Value| value.is_object() || value.is_null();
    if !can_have_keys(&recipe["ds_config"]) || !can_have_keys(&recipe["ds_config"][name]) {
        return problems;
    }
    for (key, value) in own {
        let section = &mut recipe["ds_config"][name];
        match section.get(&key) {
            Some(written) if *written != value => problems.push(format!(
                "{name}.{key}: {value} contradicts ds_config's {name}.{key} {written}; take one of the two away"
            )),
            _ => section[key] = value,
        }
    }
    problems
}

/// Takes out of a ds_config what an override of one of the recipe's own sections says anew.
fn make_room(ds_config: &mut Value, assignment: &str) {
    let mut path = assignment.split('=').next().unwrap_or_default().split('.');
    let Some(name) = path.next().filter(|name| OWN_SECTIONS.contains(name)) else { return };
    match (path.next(), ds_config.get_mut(name)) {
        (Some(key), Some(Value::Object(section))) => drop(section.remove(key)),
        (None, Some(section @ Value::Object(_))) => *section = Value::Null,
        _ => {}
    }
}

impl Recipe {
    /// Reads a recipe and applies `--set` overrides: keys of the recipe by their name, all others to the ds_config.
    ///
    /// Keys that are unknown, missing or of another type do not end it here: [`Recipe::problems`] tells them together
    /// with everything else.
    pub fn load(path: &Path, overrides: &[String]) -> Result<Recipe> {
        let text = ferrospeed_files::read_text(path, MAX_RECIPE_BYTES).map_err(TrainError::io(path))?;
        let refuse =
            |problem: String| TrainError::Recipe { path: path.to_path_buf(), problems: vec![problem] };
        let table: toml::Table = toml::from_str(&text).map_err(|error| refuse(error.to_string()))?;
        let value = serde_json::to_value(table).map_err(|error| refuse(error.to_string()))?;
        Recipe::from_value(path, value, overrides)
    }

    /// The same of a recipe that is no file; `path` is what messages call it.
    pub(crate) fn from_value(path: &Path, mut value: Value, overrides: &[String]) -> Result<Recipe> {
        let refuse =
            |problem: String| TrainError::Recipe { path: path.to_path_buf(), problems: vec![problem] };
        let mut misread = Vec::new();
        // What changes keys of the ds_config comes after what names another one.
        let (whole, single): (Vec<&String>, Vec<&String>) =
            overrides.iter().partition(|assignment| assignment.starts_with("ds_config="));
        for assignment in whole {
            if let Err(error) = ferrospeed_config::set(&mut value, assignment) {
                misread.push(format!("--set {assignment}: {error}"));
            }
        }
        if let Some(file) = value["ds_config"].as_str() {
            match Config::from_path(file) {
                Ok(config) => value["ds_config"] = config.source().clone(),
                Err(error) => {
                    misread.push(format!("ds_config: {error}").replace('\n', "\n  "));
                    value["ds_config"] = schema::stand_in_ds_config();
                }
            }
        }
        schema::spell_out(&mut value);
        for assignment in single {
            let first = assignment.split(['.', '=']).next().unwrap_or_default();
            let (target, assignment) = match assignment.strip_prefix("ds_config.") {
                Some(rest) => (&mut value["ds_config"], rest),
                None if schema::is_recipe_key(first) => {
                    make_room(&mut value["ds_config"], assignment);
                    (&mut value, assignment.as_str())
                }
                None if let Some(own) = schema::of_other_programs(assignment) => {
                    misread.push(format!(
                        "--set {assignment}: is a key neither of recipes nor of ds_config; here it is {own}"
                    ));
                    continue;
                }
                None if let Some(near) = schema::misspelt_recipe_key(first) => {
                    misread.push(format!(
                        "--set {assignment}: '{first}' is a key neither of recipes nor of ds_config; did you mean '{near}'?"
                    ));
                    continue;
                }
                None => (&mut value["ds_config"], assignment.as_str()),
            };
            if let Err(error) = ferrospeed_config::set(target, assignment) {
                misread.push(format!("--set {assignment}: {error}"));
            }
            schema::spell_out(&mut value);
        }
        if let Some(table) = value.as_object_mut() {
            misread.extend(schema::check(table));
            misread.extend(OWN_SECTIONS.iter().flat_map(|section| move_section(table, section)));
        }
        let recipe: Recipe = serde_json::from_value(value).map_err(|error| refuse(error.to_string()))?;
        Ok(Recipe { misread, ..recipe })
    }

    /// The resolved configuration for the recipe's ranks.
    pub fn config(&self) -> Result<(Config, Vec<String>), ConfigError> {
        let (unresolved, auto, _) = self.unresolved()?;
        let (config, report) = unresolved.resolve(self.data_ranks(), &auto)?;
        let warnings = report.warnings().map(|warning| warning.to_string()).chain(self.too_late(&config));
        let warnings = warnings.chain(self.schedule_of_another_run()).collect();
        Ok((config, warnings))
    }

    /// The same recipe with the number of steps that its epochs are, of so many sequences to train on.
    pub(crate) fn with_steps_of(&self, sequences: u64) -> Result<Recipe, ConfigError> {
        let Some(epochs) = self.epochs else { return Ok(self.clone()) };
        let batch = self.config()?.0.batch.train_batch_size.get();
        let steps = (epochs * sequences as f64 / batch as f64).ceil().max(1.0);
        Ok(Recipe { steps: steps as u64, epochs: None, ..self.clone() })
    }

    /// What to say of a learning rate whose schedule was written for another number of steps: `--set steps=40` does not change it.
    pub fn schedule_of_another_run(&self) -> Option<String> {
        let scheduler = &self.ds_config["scheduler"];
        let written = scheduler["params"]["total_num_steps"].as_f64().map(|steps| steps as u64)?;
        // How many steps epochs are is not known yet.
        if written == self.steps || self.epochs.is_some() {
            return None;
        }
        let what = match written > self.steps {
            true => "the run ends before its schedule does",
            false => "behind the end of its schedule the rate stays as it is",
        };
        Some(format!(
            "scheduler.params.total_num_steps: {written}, and the run has {} steps: {what}; write \"auto\" and it follows the run's \
             (--set scheduler.params.total_num_steps={})",
            self.steps, self.steps
        ))
    }

    /// What a configuration would begin when the run's last step is done.
    pub fn too_late(&self, config: &Config) -> Vec<String> {
        let section = config.section("compression_training").map(Compression::from_section);
        // What is wrong with the section is an error, and told elsewhere.
        let beginnings = section.and_then(Result::ok).flatten().map(|on| on.beginnings()).unwrap_or_default();
        let late = beginnings.into_iter().filter(|(_, offset)| *offset >= self.steps);
        late.map(|(technique, offset)| {
            format!(
                "compression_training.{technique}.shared_parameters.schedule_offset: it begins after {offset} steps, and the run has \
                 {}: no step learns with it; write a smaller one, or more steps",
                self.steps
            )
        })
        .collect()
    }

    /// Whether an override changes a key of recipes, and not one of the ds_config.
    pub fn is_own_key(assignment: &str) -> bool {
        let first = assignment.split(['.', '=']).next().unwrap_or_default();
        first != "ds_config" && schema::is_recipe_key(first)
    }

    /// The recipe as a file that [`Recipe::load`] reads; an error where its ds_config holds what TOML cannot say.
    pub fn to_toml(&self) -> Result<String, toml::ser::Error> {
        toml::to_string_pretty(self)
    }

    /// Into how many stages the model is cut.
    pub fn stages(&self) -> NonZeroUsize {
        self.mesh().pipe
    }

    /// What the ds_config says for some options, as its checks read it: 2.0 is 2. What they refuse is nothing here.
    pub(crate) fn given<const N: usize>(&self, paths: [&str; N]) -> [Option<Value>; N] {
        let read = Config::from_value("ds_config", &self.ds_config).ok();
        paths.map(|path| read.as_ref().and_then(|read| read.given(path)).cloned())
    }

    /// How ranks are laid out.
    pub fn mesh(&self) -> MeshSizes {
        let size = |value: Option<Value>| {
            let size = value.and_then(|value| usize::try_from(value.as_u64()?).ok());
            size.and_then(NonZeroUsize::new).unwrap_or(NonZeroUsize::MIN)
        };
        let [pipe, sequence, tensor, expert] = self.given([
            "pipeline.stages",
            "sequence_parallel_size",
            "tensor_parallel.autotp_size",
            "expert_parallel.autoep_size",
        ]);
        MeshSizes { pipe: size(pipe), sequence: size(sequence), tensor: size(tensor), expert: size(expert) }
    }

    /// Whether neighbouring ranks hold different experts or the same ones.
    pub(crate) fn expert_order(&self) -> ExpertOrder {
        match self.given(["use_data_before_expert_parallelism"]) {
            [Some(Value::Bool(true))] => ExpertOrder::DataBeforeExpert,
            _ => ExpertOrder::ExpertBeforeData,
        }
    }

    /// What ranks have between layers whose slices they hold.
    pub(crate) fn between_slices(&self) -> Between {
        match self.given(["tensor_parallel.sequence_parallel"]) {
            [Some(Value::Bool(true))] => Between::OwnTokens,
            _ => Between::AllTokens,
        }
    }

    /// How ranks that share a sequence attend over all of it; the configuration's own checks refuse other words.
    pub fn sequence_method(&self) -> SequenceMethod {
        match self.given(["sequence_parallel_method"]) {
            [Some(Value::String(method))] if method == "ring" => SequenceMethod::Ring,
            _ => SequenceMethod::Ulysses,
        }
    }

    /// How many ranks see data of their own.
    pub fn data_ranks(&self) -> NonZeroU64 {
        let others = self.mesh().ranks_of_a_sample() as u64;
        NonZeroU64::new(u64::from(self.ranks) / others.max(1)).unwrap_or(NonZeroU64::MIN)
    }
}
