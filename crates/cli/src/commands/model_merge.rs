//! `ferrospeed model merge`: a model and an adapter of it become one model.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use ferrospeed_command::hub::model_at;
use ferrospeed_command::{Failure, terminal};
use ferrospeed_models::directory::merge;

use super::model_directory::{WriteArgs, refusal, summary};

#[derive(Debug, Args)]
pub(super) struct MergeArgs {
    /// The model that the adapter is of: a directory with config.json and weights, or a name on the Hub
    #[arg(value_name = "BASE")]
    base: PathBuf,
    /// The directory with adapter_config.json, as a run with [adapter] or PEFT writes it
    #[arg(value_name = "ADAPTER")]
    adapter: PathBuf,
    /// The new directory
    #[arg(value_name = "OUT")]
    target: PathBuf,
    #[command(flatten)]
    write: WriteArgs,
}

pub(super) fn run(args: &MergeArgs) -> Result<ExitCode, Failure> {
    let [base, adapter] = [model_at(&args.base)?, model_at(&args.adapter)?];
    let written = merge(&base, &adapter, &args.target, &args.write.options()).map_err(refusal)?;
    terminal::print_output(&summary(&written, &args.target))?;
    Ok(ExitCode::SUCCESS)
}
