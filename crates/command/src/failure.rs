//! Why a command did not do its work, and which exit code that is.

use std::fmt;

use ferrospeed_checkpoint::CheckpointError;
use ferrospeed_launch::LaunchError;

/// A command that did not do its work.
#[derive(Debug)]
pub enum Failure {
    /// The command line, or a file it names, is wrong: exit code 2.
    Usage(String),
    /// The command was right but could not be carried out: exit code 1.
    Run(String),
    /// The command ended as it was told to, before it had done anything: an exit code of its own.
    Stopped(u8, String),
}

impl Failure {
    /// The failure whose exit code this is.
    pub fn with_code(code: u8, text: String) -> Failure {
        match code {
            1 => Failure::Run(text),
            2 => Failure::Usage(text),
            code => Failure::Stopped(code, text),
        }
    }

    /// What the process ends with.
    pub fn exit_code(&self) -> u8 {
        match self {
            Failure::Usage(_) => 2,
            Failure::Run(_) => 1,
            Failure::Stopped(code, _) => *code,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Usage(text) | Failure::Run(text) | Failure::Stopped(_, text) => out.write_str(text),
        }
    }
}

impl From<LaunchError> for Failure {
    fn from(error: LaunchError) -> Self {
        let text = error.to_string();
        match error {
            LaunchError::Spawn { .. }
            | LaunchError::File { .. }
            | LaunchError::System { .. }
            | LaunchError::SignalsTaken
            | LaunchError::SshFailed { .. }
            | LaunchError::BackendMissing { .. } => Failure::Run(text),
            _ => Failure::Usage(text),
        }
    }
}

impl From<CheckpointError> for Failure {
    fn from(error: CheckpointError) -> Failure {
        match error {
            CheckpointError::NotFound { .. } | CheckpointError::Tag { .. } | CheckpointError::Export(_) => {
                Failure::Usage(error.to_string())
            }
            other => Failure::Run(other.to_string()),
        }
    }
}
