//! `ferrospeed take-token`: the receiving end of a token's way to another host.
//!
//! The token comes by standard input and waits in a file that only this user can read, until the node launcher of the
//! same job picks it up. Neither command line holds it.

use std::io::Read;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use ferrospeed_comm::private;
use ferrospeed_command::Failure;

/// No token is longer.
const MAX_TOKEN_BYTES: u64 = 4096;

#[derive(Debug, Args)]
pub(crate) struct TakeTokenArgs {
    /// The job's name
    #[arg(long = "job_id")]
    job_id: String,
    /// Which host of the job this is
    #[arg(long = "node_rank")]
    node_rank: usize,
}

pub(crate) fn run(args: &TakeTokenArgs) -> Result<ExitCode, Failure> {
    let mut token = String::new();
    std::io::stdin().take(MAX_TOKEN_BYTES).read_to_string(&mut token).map_err(failed)?;
    if token.trim().is_empty() {
        return Err(Failure::Usage("no token on standard input".to_owned()));
    }
    private::write(&path_of(&args.job_id, args.node_rank)?, token.as_bytes()).map_err(failed)?;
    Ok(ExitCode::SUCCESS)
}

/// The token that was left for a node launcher, which is the only one to get it.
pub(super) fn redeem(job_id: &str, node_rank: usize) -> Result<Option<String>, Failure> {
    let path = path_of(job_id, node_rank)?;
    match private::read_line(&path) {
        Ok(token) => {
            std::fs::remove_file(&path).map_err(failed)?;
            Ok(Some(token))
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed(error)),
    }
}

fn failed(error: std::io::Error) -> Failure {
    Failure::Run(format!("the job's token: {error}"))
}

fn path_of(job_id: &str, node_rank: usize) -> Result<PathBuf, Failure> {
    if job_id.is_empty() || !job_id.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
        return Err(Failure::Usage(format!("--job_id {job_id:?} is not made of letters and digits")));
    }
    Ok(private::folder().map_err(failed)?.join(format!("token-{job_id}-{node_rank}")))
}
