//! The `ferrospeed` binary: parses the command line, runs one command, maps its result to an exit code.
//!
//! 0 is good, 1 is a run that failed, 2 is bad usage or a bad configuration. `launch` gives the code of the
//! first rank that failed.

mod commands;
mod progress;

use std::process::ExitCode;

use ferrospeed_command::terminal;
use nix::sys::signal::{SigHandler, Signal, signal};

fn main() -> ExitCode {
    // A file that grows beyond the limit of a shell (`ulimit -f`) is then an error like that of a full disk, and no death.
    // SAFETY: no other thread is there yet, and no handler of ours is replaced.
    let _ = unsafe { signal(Signal::SIGXFSZ, SigHandler::SigIgn) };
    let cli = match commands::grammar::parse() {
        Ok(cli) => cli,
        // Clap's own code for help and version is 0, for bad usage 2.
        Err(error) => {
            // A reader that went away, as in `ferrospeed --help | head -1`, is no failure.
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
        }
    };
    match commands::run(cli) {
        Ok(code) => code,
        Err(failure) => {
            terminal::print_error(&failure.to_string());
            ExitCode::from(failure.exit_code())
        }
    }
}
