//! Why something of the Hub is not here, and what to do about it.

use std::path::{Path, PathBuf};

use crate::name::HubName;

/// What a function of this crate gives.
pub type Result<T, E = HubError> = std::result::Result<T, E>;

/// Why something of the Hub is not here.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// A name is none.
    #[error(
        "'{text}' {why}; a repository of the Hub is named org/name, org/name@revision, or hf://datasets/org/name"
    )]
    Name {
        /// What was given.
        text: String,
        /// What is wrong with it.
        why: String,
    },
    /// A variable of the environment says what cannot be.
    #[error("{why}")]
    Setting {
        /// Which, and why.
        why: String,
    },
    /// It is not in the cache, and no server may be asked or none answers.
    #[error(
        "{name}: is not in the cache ({}), and {why}; on a machine that reaches the Hub run `{command}` and copy {} to the same \
         place here, or name a folder that is here",
        cache.display(),
        folder.display()
    )]
    Absent {
        /// What was asked for.
        name: String,
        /// Where it was looked for.
        cache: PathBuf,
        /// Why nobody was asked.
        why: String,
        /// What brings it.
        command: String,
        /// Where it would lie.
        folder: PathBuf,
    },
    /// The server says no.
    #[error("{name}: {why}")]
    Refused {
        /// What was asked for.
        name: String,
        /// What it said, and what to do.
        why: String,
    },
    /// No server answers.
    #[error("{endpoint} cannot be reached: {why} (behind a proxy set HTTPS_PROXY, for a mirror HF_ENDPOINT)")]
    Unreachable {
        /// Who was asked.
        endpoint: String,
        /// What happened.
        why: String,
    },
    /// A file did not come whole, again and again.
    #[error(
        "{name}: {file} did not come whole: {why}; {bytes} bytes of it are kept, and the next attempt goes on from there"
    )]
    CutOff {
        /// Whose file.
        name: String,
        /// Which file.
        file: String,
        /// What happened last.
        why: String,
        /// How much of it is here.
        bytes: u64,
    },
    /// A file came, and is not what the server's list says.
    #[error("{name}: {file} is not what the Hub's list says: {why}; nothing of it was kept")]
    Damaged {
        /// Whose file.
        name: String,
        /// Which file.
        file: String,
        /// What differs.
        why: String,
    },
    /// A repository holds nothing of what is wanted.
    #[error("{name}: {why}")]
    Unsuitable {
        /// Which repository.
        name: String,
        /// What it holds, and what to do.
        why: String,
    },
    /// The disk has no room for it.
    #[error(
        "{name}: needs {needed} bytes in {}, and {free} are free there; make room, or let HF_HUB_CACHE name a folder on another disk",
        folder.display()
    )]
    NoRoom {
        /// What was asked for.
        name: String,
        /// Where it would lie.
        folder: PathBuf,
        /// Bytes that are not there yet.
        needed: u64,
        /// Bytes that are free.
        free: u64,
    },
    /// A file of this machine.
    #[error("{}: {source}", path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// What happened.
        source: std::io::Error,
    },
    /// Another process has a file, and nothing comes of it.
    #[error(
        "{name}: {holder} has had the lock of {file} ({}) and brought nothing of it for {seconds} s; end that process, or ask again \
         when it is done", lock.display()
    )]
    Occupied {
        /// Whose file.
        name: String,
        /// Which file.
        file: String,
        /// Which process.
        holder: String,
        /// What it has locked.
        lock: PathBuf,
        /// How long nothing has come.
        seconds: u64,
    },
    /// Whoever listened has ended it.
    #[error(
        "{name}: stopped while it was downloaded; what is here is kept, and the next attempt goes on from there"
    )]
    Stopped {
        /// What was being brought.
        name: String,
    },
}

impl HubError {
    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> HubError {
        let path = path.to_path_buf();
        move |source| HubError::Io { path, source }
    }

    pub(crate) fn absent(
        name: &HubName,
        cache: &Path,
        folder: &Path,
        unreachable: Option<HubError>,
    ) -> HubError {
        let why = match unreachable {
            Some(error) => error.to_string(),
            None => "HF_HUB_OFFLINE keeps it from being asked for".to_owned(),
        };
        let command = match name.kind() {
            crate::RepoKind::Model => format!("ferrospeed model fetch {name}"),
            crate::RepoKind::Dataset => format!("ferrospeed data fetch {name}"),
        };
        HubError::Absent {
            name: name.to_string(),
            cache: cache.to_path_buf(),
            why,
            command,
            folder: folder.to_path_buf(),
        }
    }
}
