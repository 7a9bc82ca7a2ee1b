//! `ferrospeed model convert`: the same model with another element type, fewer bits or other shards.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use ferrospeed_command::hub::model_at;
use ferrospeed_command::{Failure, terminal};
use ferrospeed_models::directory::convert;
use ferrospeed_models::pack::pack;
use ferrospeed_tensor::PackedBits;

use super::model_directory::{WriteArgs, refusal, summary};

#[derive(Debug, Args)]
pub(super) struct ConvertArgs {
    /// The model: a directory with config.json and weights, a GGUF file, or a name on the Hub
    #[arg(value_name = "DIR")]
    source: PathBuf,
    /// The new directory
    #[arg(value_name = "OUT")]
    target: PathBuf,
    /// Round the weights of linear layers to 8 or 4 bits, for `serve`; other programs do not read the result
    #[arg(long, value_name = "BITS", value_parser = ["int8", "int4", "fp8"])]
    quantize: Option<String>,
    #[command(flatten)]
    write: WriteArgs,
}

pub(super) fn run(args: &ConvertArgs) -> Result<ExitCode, Failure> {
    let options = args.write.options();
    let source = model_at(&args.source)?;
    let written = match args.quantize.as_deref().and_then(PackedBits::by_name) {
        Some(bits) => pack(&source, &args.target, bits, &options),
        None => convert(&source, &args.target, &options),
    };
    let written = written.map_err(refusal)?;
    terminal::print_output(&summary(&written, &args.target))?;
    Ok(ExitCode::SUCCESS)
}
