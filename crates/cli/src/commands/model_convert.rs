//! `ferrospeed model convert`: the same model with another element type or other shards.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use ferrospeed_models::directory::convert;

use super::model_directory::{WriteArgs, refusal, summary};
use crate::failure::Failure;
use crate::terminal;

#[derive(Debug, Args)]
pub(super) struct ConvertArgs {
    /// The model: a directory with config.json and safetensors weights
    #[arg(value_name = "DIR")]
    source: PathBuf,
    /// The new directory
    #[arg(value_name = "OUT")]
    target: PathBuf,
    #[command(flatten)]
    write: WriteArgs,
}

pub(super) fn run(args: &ConvertArgs) -> Result<ExitCode, Failure> {
    let written = convert(&args.source, &args.target, &args.write.options()).map_err(refusal)?;
    terminal::print_output(&summary(&written, &args.target))?;
    Ok(ExitCode::SUCCESS)
}
