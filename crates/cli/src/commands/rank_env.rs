//! `ferrospeed rank-env`: gives a rank that MPICH started the variables every rank has, then becomes it.
//!
//! It replaces itself with the program, so the program's exit code and signals are what MPICH sees.

use std::os::unix::process::CommandExt;
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use ferrospeed_comm::discover;
use ferrospeed_command::Failure;
use ferrospeed_launch::{Interpreter, surroundings};
use nix::sys::signal::{SigHandler, Signal, signal};

#[derive(Debug, Args)]
pub(crate) struct RankEnvArgs {
    /// Whose variables to translate
    #[arg(long, value_enum, ignore_case = true)]
    launcher: RankSource,
    /// The program is a Python module
    #[arg(long)]
    module: bool,
    /// The program is an executable
    #[arg(long = "no_python", conflicts_with = "module")]
    no_python: bool,
    /// The program and its arguments
    #[arg(trailing_var_arg = true, required = true)]
    program: Vec<String>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum RankSource {
    Mpich,
}

pub(crate) fn run(args: &RankEnvArgs) -> Result<ExitCode, Failure> {
    let RankSource::Mpich = args.launcher;
    let (rank, local_rank) = discover::mpich_ranks(&|name: &str| std::env::var(name).ok())
        .map_err(|error| Failure::Usage(error.to_string()))?;
    let interpreter = match (args.module, args.no_python) {
        (true, _) => Interpreter::PythonModule,
        (false, true) => Interpreter::Direct,
        (false, false) => Interpreter::PythonScript,
    };
    let mut words = interpreter.prefix(&surroundings::python());
    words.extend(args.program.iter().cloned());
    let Some((program, arguments)) = words.split_first() else {
        return Err(Failure::Usage("no program was given".to_owned()));
    };
    let mut command = std::process::Command::new(program);
    command.args(arguments).env("RANK", rank.to_string()).env("LOCAL_RANK", local_rank.to_string());
    if let Ok(local_size) = std::env::var("LOCAL_SIZE") {
        command.env("LOCAL_WORLD_SIZE", local_size);
    }
    // This program ignores it for itself, and what is ignored stays so across exec.
    // SAFETY: no handler of ours is replaced.
    let _ = unsafe { signal(Signal::SIGXFSZ, SigHandler::SigDfl) };
    let error = command.exec();
    Err(Failure::Run(format!("rank {rank}: cannot start {program:?}: {error}")))
}
