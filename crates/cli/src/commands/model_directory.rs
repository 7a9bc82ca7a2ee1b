//! `ferrospeed model`: looks at model directories, converts them, and makes new ones. Everything streams: no command
//! holds more than a few tensors.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use ferrospeed_command::{Failure, parse_size};
use ferrospeed_models::ModelError;
use ferrospeed_models::decoder::dtype_of_name;
use ferrospeed_models::directory::{DEFAULT_SHARD_BYTES, WriteOptions};
use ferrospeed_models::weights::Written;
use ferrospeed_tune::plan::human;

use super::{fetch, model_convert, model_init, model_inspect, model_merge};

#[derive(Debug, Args)]
pub(crate) struct ModelDirectoryArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Architecture, parameters, types, sizes, and the memory to train and to serve
    Inspect(model_inspect::InspectArgs),
    /// Copy a model with another element type or other shards
    Convert(model_convert::ConvertArgs),
    /// Work an adapter into the weights of its model
    Merge(model_merge::MergeArgs),
    /// Make a new model with random weights
    Init(model_init::InitArgs),
    /// Bring a model from the Hugging Face Hub into its cache here, or what is new of it
    Fetch(fetch::FetchArgs),
}

pub(crate) fn run(args: &ModelDirectoryArgs) -> Result<ExitCode, Failure> {
    match &args.action {
        Action::Inspect(args) => model_inspect::run(args),
        Action::Convert(args) => model_convert::run(args),
        Action::Merge(args) => model_merge::run(args),
        Action::Init(args) => model_init::run(args),
        Action::Fetch(args) => fetch::model(args),
    }
}

/// How weights are written.
#[derive(Debug, Args)]
pub(super) struct WriteArgs {
    /// The type of the weights
    #[arg(long, value_parser = ["float32", "bfloat16", "float16"])]
    dtype: Option<String>,
    /// Start another file before one grows beyond this, such as 2GB or 500MB
    #[arg(long = "max_shard_size", alias = "max-shard-size", value_name = "SIZE", value_parser = parse_size, default_value_t = DEFAULT_SHARD_BYTES)]
    max_shard_bytes: usize,
}

impl WriteArgs {
    pub(super) fn options(&self) -> WriteOptions {
        WriteOptions {
            dtype: self.dtype.as_deref().and_then(dtype_of_name),
            max_shard_bytes: self.max_shard_bytes,
        }
    }
}

/// A model that is not what it should be is bad input; a disk that fails is a failed run.
pub(super) fn refusal(error: ModelError) -> Failure {
    match error {
        ModelError::Io { ref source, .. } if source.kind() != std::io::ErrorKind::NotFound => {
            Failure::Run(error.to_string())
        }
        other => Failure::Usage(other.to_string()),
    }
}

pub(super) fn summary(written: &Written, target: &std::path::Path) -> String {
    let Written { tensors, bytes, files } = *written;
    format!("{}: {tensors} tensors, {} in {files} file(s)\n", target.display(), human(bytes as u64))
}
