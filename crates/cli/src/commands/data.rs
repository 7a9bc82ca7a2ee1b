//! `ferrospeed data analyze`: measures how hard sequences are, for a curriculum that draws the easy ones first; `data inspect`
//! shows samples as the model sees them ([`super::data_inspect`]).

use std::path::PathBuf;
use std::process::ExitCode;

use clap::builder::PossibleValue;
use clap::{ArgGroup, Args, Subcommand, ValueEnum};
use ferrospeed_command::Failure;
use ferrospeed_command::terminal::{print_note, print_output};
use ferrospeed_command::writable::impossible;
use ferrospeed_train::{Analysis, FromHub, Metric, Recipe, StopRequests, analyze, recipe_of_files};
use serde_json::{Value, json};

use super::data_inspect::{self, InspectArgs};
use super::model::parse_count;
use super::train_start::{failure, tell_preparing};
use super::{fetch, from_hub};
use crate::progress::grouped;

#[derive(Debug, Args)]
pub(crate) struct DataArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Measure how hard each sequence to train on is, and write the indexes that curriculum_metrics name
    Analyze(AnalyzeArgs),
    /// Show samples as the model sees them, with what is learnt marked, and how long they are
    Inspect(InspectArgs),
    /// Bring data from the Hugging Face Hub into its cache here, or what is new of it
    Fetch(fetch::FetchArgs),
}

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("origin").required(true).args(["recipe", "data"]))]
struct AnalyzeArgs {
    /// The recipe (TOML) whose data is meant: an index is of its sequences alone
    recipe: Option<PathBuf>,
    /// Files instead of a recipe, all text, .jsonl, .parquet, .bin or Megatron's .idx; --set data.KEY=VALUE says more of them
    #[arg(long, value_name = "FILE", num_args = 1.., requires = "sequence")]
    data: Vec<PathBuf>,
    /// Tokens per sequence, as data.sequence
    #[arg(long, value_name = "TOKENS", value_parser = parse_count, conflicts_with = "recipe")]
    sequence: Option<u64>,
    /// How text becomes tokens: a tokenizer.json, or bytes
    #[arg(long, value_name = "FILE", conflicts_with = "recipe")]
    tokenizer: Option<String>,
    /// What to measure
    #[arg(long, value_name = "METRIC", required = true, value_delimiter = ',')]
    metric: Vec<Measure>,
    /// The folder for the indexes, two files for each metric; those of the same names are replaced
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Change a key of the recipe, as `train` does; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// A metric as an argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Measure(Metric);

impl ValueEnum for Measure {
    fn value_variants<'a>() -> &'a [Self] {
        const ALL: [Measure; Metric::ALL.len()] =
            [Measure(Metric::SequenceLength), Measure(Metric::VocabularyRarity)];
        &ALL
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(self.0.name()).help(match self.0 {
            Metric::SequenceLength => "tokens of the longest document in a sequence",
            Metric::VocabularyRarity => {
                "how rare its tokens are in the data: 1000 times the mean of -ln(share)"
            }
        }))
    }
}

pub(crate) fn run(args: &DataArgs) -> Result<ExitCode, Failure> {
    let args = match &args.action {
        Action::Inspect(args) => return data_inspect::run(args),
        Action::Fetch(args) => return fetch::data(args),
        Action::Analyze(args) => args,
    };
    let (recipe, path) = match &args.recipe {
        Some(path) => (Recipe::load(path, &args.overrides), path.clone()),
        None => {
            let tokenizer = args.tokenizer.as_deref();
            let recipe = recipe_of_files(&args.data, args.sequence.unwrap_or(0), tokenizer, &args.overrides);
            (recipe, PathBuf::from("--data"))
        }
    };
    let mut recipe = recipe.map_err(failure)?;
    from_hub::bring(&mut recipe, &path, FromHub::Everything)?;
    if let Some(why) = impossible(&args.out) {
        return Err(Failure::Usage(format!("--out: {why}")));
    }
    let mut metrics: Vec<Metric> = Vec::new();
    for Measure(metric) in &args.metric {
        if !metrics.contains(metric) {
            metrics.push(*metric);
        }
    }
    // A signal ends the command at once; what is half done has no name yet.
    let requests = StopRequests::default();
    let mut tell_text = tell_preparing(&requests);
    let mut tenths_told = 0;
    let mut tell = |done: u64, all: u64| {
        const WORTH_TELLING: u64 = 1 << 20;
        let tenths = done.saturating_mul(10) / all.max(1);
        if all >= WORTH_TELLING && tenths > tenths_told {
            tenths_told = tenths;
            print_note(&format!("{} % of {} sequences", tenths * 10, grouped(all)));
        }
    };
    let written = analyze(&recipe, &path, &metrics, &args.out, &mut tell_text, &mut tell).map_err(failure)?;
    print_output(&if args.json { as_json(&written) } else { as_text(&written) })?;
    Ok(ExitCode::SUCCESS)
}

fn as_text(written: &[Analysis]) -> String {
    let metric = |found: &Analysis| {
        let [least, tenth, half, most, greatest] = found.quantiles;
        format!(
            "{}: {} sequences, {} difficulties from {least} to {greatest}; a tenth up to {tenth}, half up to {half}, nine tenths up to {most}\n  index_to_sample_path  {}\n  index_to_metric_path  {}\n",
            found.metric.name(),
            grouped(found.samples),
            grouped(found.distinct),
            found.files[0].display(),
            found.files[1].display()
        )
    };
    written.iter().map(metric).collect()
}

fn as_json(written: &[Analysis]) -> String {
    let metric = |found: &Analysis| {
        let [least, tenth, half, most, greatest] = found.quantiles;
        json!({
            "metric": found.metric.name(),
            "sequences": found.samples,
            "difficulties": found.distinct,
            "quantiles": { "0": least, "10": tenth, "50": half, "90": most, "100": greatest },
            "index_to_sample_path": found.files[0],
            "index_to_metric_path": found.files[1],
        })
    };
    let written: Vec<Value> = written.iter().map(metric).collect();
    serde_json::to_string_pretty(&written).unwrap_or_default()
}
