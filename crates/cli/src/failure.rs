//! Why a command did not do its work, and which exit code that is.

use std::fmt;

use ferrospeed_launch::LaunchError;

/// A command that did not do its work.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The command line, or a file it names, is wrong: exit code 2.
    Usage(String),
    /// The command was right but could not be carried out: exit code 1.
    Run(String),
}

impl Failure {
    /// The failure whose exit code this is.
    pub(crate) fn with_code(code: u8, text: String) -> Failure {
        match code {
            2 => Failure::Usage(text),
            _ => Failure::Run(text),
        }
    }

    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Failure::Usage(_) => 2,
            Failure::Run(_) => 1,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Usage(text) | Failure::Run(text) => out.write_str(text),
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
