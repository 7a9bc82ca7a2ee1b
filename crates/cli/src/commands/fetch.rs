//! `ferrospeed model fetch` and `ferrospeed data fetch`: what the Hugging Face Hub has now, into its cache on this machine.

use std::process::ExitCode;

use clap::Args;
use ferrospeed_command::Failure;
use ferrospeed_command::hub::{Freshness, RepoKind, Wanted, bring, parse};
use ferrospeed_command::terminal::print_output;

#[derive(Debug, Args)]
pub(super) struct FetchArgs {
    /// Its name: org/name, org/name@REVISION (a branch, a tag, a commit), or with the path of files behind it: org/name/FILE.gguf,
    /// org/name/FOLDER, org/name/data/train-*.parquet
    #[arg(value_name = "NAME")]
    name: String,
}

/// Brings a model, and prints where it lies.
pub(super) fn model(args: &FetchArgs) -> Result<ExitCode, Failure> {
    let name = parse(&args.name, RepoKind::Model)?;
    let found = bring(&name, &Wanted::Model, Freshness::AsOnServer)?;
    let place = name.path().and(found.files.first()).unwrap_or(&found.root);
    print_output(&place.display().to_string())?;
    Ok(ExitCode::SUCCESS)
}

/// Brings data, and prints its files.
pub(super) fn data(args: &FetchArgs) -> Result<ExitCode, Failure> {
    let found = bring(&parse(&args.name, RepoKind::Dataset)?, &Wanted::Data, Freshness::AsOnServer)?;
    let files: Vec<String> = found.files.iter().map(|file| file.display().to_string()).collect();
    print_output(&files.join("\n"))?;
    Ok(ExitCode::SUCCESS)
}
