//! `ferrospeed completions SHELL`: a completion script on standard output.

use std::process::ExitCode;

use clap::CommandFactory;
use clap_complete::Shell;
use ferrospeed_command::{Failure, terminal};

#[derive(Debug, clap::Args)]
pub(crate) struct CompletionsArgs {
    /// The shell
    shell: Shell,
}

pub(crate) fn run(args: &CompletionsArgs) -> Result<ExitCode, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut super::Cli::command(), "ferrospeed", &mut script);
    terminal::print_output(&String::from_utf8_lossy(&script))?;
    Ok(ExitCode::SUCCESS)
}
