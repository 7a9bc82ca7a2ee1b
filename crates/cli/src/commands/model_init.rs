//! `ferrospeed model init`: a new model directory with random weights, from a `config.json` or a recipe's preset.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{ArgGroup, Args};
use ferrospeed_command::{Failure, terminal};
use ferrospeed_models::directory::create;
use ferrospeed_models::presets::{Preset, PresetSizes};
use serde_json::Value;

use super::model::{parse_count, read_config};
use super::model_directory::{WriteArgs, refusal, summary};

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("origin").required(true).args(["config", "preset"]))]
pub(super) struct InitArgs {
    /// The new directory
    #[arg(value_name = "OUT")]
    target: PathBuf,
    /// A Hugging Face config.json, or the directory of one
    #[arg(long, value_name = "PATH")]
    config: Option<PathBuf>,
    /// A family, as recipes name them
    #[arg(long, value_parser = ["gpt2", "llama"])]
    preset: Option<String>,
    /// Blocks of the preset [default: 4]
    #[arg(long, value_name = "COUNT", value_parser = parse_count, conflicts_with = "config")]
    layers: Option<u64>,
    /// Channels of the preset [default: 256]
    #[arg(long, value_name = "COUNT", value_parser = parse_count, conflicts_with = "config")]
    width: Option<u64>,
    /// Heads of the preset [default: one for each 64 channels]
    #[arg(long, value_name = "COUNT", value_parser = parse_count, conflicts_with = "config")]
    heads: Option<u64>,
    /// Tokens of the preset [default: 256, a model of bytes]
    #[arg(long, value_name = "COUNT", value_parser = parse_count, conflicts_with = "config")]
    vocabulary: Option<u64>,
    /// The longest sequence of the preset [default: 1024]
    #[arg(long, value_name = "TOKENS", value_parser = parse_count, conflicts_with = "config")]
    sequence: Option<u64>,
    /// Dropout of the preset [default: 0]
    #[arg(long, value_name = "PROBABILITY", conflicts_with = "config")]
    dropout: Option<f64>,
    /// The same seed gives the same weights, and those that a recipe of that seed starts with
    #[arg(long, default_value_t = 42)]
    seed: u64,
    #[command(flatten)]
    write: WriteArgs,
}

pub(super) fn run(args: &InitArgs) -> Result<ExitCode, Failure> {
    let written = create(&args.target, &args.config()?, args.seed, &args.write.options()).map_err(refusal)?;
    terminal::print_output(&summary(&written, &args.target))?;
    Ok(ExitCode::SUCCESS)
}

impl InitArgs {
    fn config(&self) -> Result<Value, Failure> {
        if let Some(path) = &self.config {
            return read_config(path).map(|(_, config)| config);
        }
        let name = self.preset.as_deref().unwrap_or_default();
        let preset = Preset::of_name(name).map_err(refusal)?;
        let dropout = self.dropout.unwrap_or(0.0);
        if !(0.0..1.0).contains(&dropout) {
            return Err(Failure::Usage(format!("--dropout {dropout} is no probability below 1")));
        }
        Ok(preset.config(&PresetSizes {
            layers: self.layers,
            width: self.width,
            heads: self.heads,
            vocabulary: self.vocabulary.unwrap_or(256),
            sequence: self.sequence.unwrap_or(1024),
            dropout,
        }))
    }
}
