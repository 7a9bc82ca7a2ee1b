//! `ferrospeed trace`: reads what the ranks of a failed job left behind.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use ferrospeed_comm::trace;
use ferrospeed_command::{Failure, terminal};

#[derive(Debug, Args)]
pub(crate) struct TraceArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Say in one sentence which rank never entered which operation
    Diff(DiffArgs),
}

#[derive(Debug, Args)]
struct DiffArgs {
    /// The folder with the ranks' flight recorders (rank-*.jsonl)
    #[arg(value_name = "DIR")]
    folder: PathBuf,
}

pub(crate) fn run(args: &TraceArgs) -> Result<ExitCode, Failure> {
    let Action::Diff(DiffArgs { folder }) = &args.action;
    let refuse = |error: ferrospeed_comm::Error| Failure::Usage(error.to_string());
    if trace::read(folder).map_err(refuse)?.is_empty() {
        let why = "holds no flight recorder (rank-*.jsonl); a job writes them to FERROSPEED_TRACE_DIR when it fails, and on SIGUSR1";
        return Err(Failure::Usage(format!("{}: {why}", folder.display())));
    }
    terminal::print_output(&trace::diff(folder).map_err(refuse)?)?;
    Ok(ExitCode::SUCCESS)
}
