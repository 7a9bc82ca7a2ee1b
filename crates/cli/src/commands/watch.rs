//! `ferrospeed watch`: a page in the browser that shows runs as they go.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use ferrospeed_command::Failure;
use ferrospeed_command::terminal::print_output;
use ferrospeed_observe::watch::Server;

/// Arguments of `watch`.
#[derive(Debug, Args)]
pub(crate) struct WatchArgs {
    /// Runs' folders, or folders that hold them, where runs may still be to come
    #[arg(value_name = "RUN_DIR", default_value = "runs")]
    folders: Vec<PathBuf>,
    /// The port on this machine; 0 takes one that is free
    #[arg(long, default_value_t = 7878)]
    port: u16,
}

pub(crate) fn run(args: &WatchArgs) -> Result<ExitCode, Failure> {
    if let Some(missing) = args.folders.iter().find(|folder| !folder.is_dir()) {
        let what = if missing.exists() { "is no folder" } else { "is not there" };
        return Err(Failure::Usage(format!(
            "{} {what}; name the folder of a run, or one that holds runs or will (`train` makes `runs`, or what --out says)",
            missing.display()
        )));
    }
    let server = Server::bind(&args.folders, args.port).map_err(|error| {
        Failure::Run(format!(
            "cannot listen on port {}: {error}; try another --port, or 0 for any",
            args.port
        ))
    })?;
    print_output(&format!("http://{}  (this machine only; Ctrl-C ends it)", server.address()))?;
    server.run();
    Ok(ExitCode::SUCCESS)
}
