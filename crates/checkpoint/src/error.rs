//! The one error of this crate.

use std::path::{Path, PathBuf};

/// What can go wrong with a checkpoint. Every variant names the file, and the tensor and offset where there is one.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The system refused a file operation.
    #[error("{}: cannot {what}: {source}", path.display())]
    Io {
        /// The operation.
        what: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// Ranks could not talk.
    #[error(transparent)]
    Comm(#[from] ferrospeed_comm::Error),
    /// A file is not what it should be.
    #[error("{}: {why}", path.display())]
    File {
        /// The file or folder.
        path: PathBuf,
        /// What is wrong with it, and where.
        why: String,
    },
    /// Stored bytes are not those that were written.
    #[error(
        "{}: '{tensor}' is damaged between bytes {start} and {end} (checksum {found:08x}, expected {expected:08x}); load an older checkpoint",
        path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Where the damaged block starts in the file.
        start: u64,
        /// Where it ends.
        end: u64,
        /// The checksum of what is there.
        found: u32,
        /// The checksum of what was written.
        expected: u32,
    },
    /// There is no such checkpoint.
    #[error("{}: {why}", dir.display())]
    NotFound {
        /// Where it was looked for.
        dir: PathBuf,
        /// What was looked for, and what is there.
        why: String,
    },
    /// The checkpoint does not hold what the model has.
    #[error("{} does not fit this model:\n{table}", path.display())]
    Mismatch {
        /// The checkpoint.
        path: PathBuf,
        /// One line per difference.
        table: String,
    },
    /// The disk cannot hold the checkpoint.
    #[error(
        "{}: the checkpoint has {needed_bytes} bytes and needs {} KiB beside them, {available_bytes} bytes are free; free some space or keep fewer checkpoints",
        dir.display(), crate::save::SPARE_BYTES >> 10
    )]
    NoSpace {
        /// The folder.
        dir: PathBuf,
        /// What all ranks write.
        needed_bytes: u64,
        /// What the file system has left.
        available_bytes: u64,
    },
    /// Another job writes here now.
    #[error(
        "{}: another job is writing a checkpoint here (it holds {}); give each job a folder of its own",
        dir.display(), crate::directory::LOCK_FILE
    )]
    Busy {
        /// The folder.
        dir: PathBuf,
    },
    /// A save or a load failed on some rank, so that all ranks left it.
    #[error("the checkpoint was neither saved nor loaded: rank {rank} failed: {why}")]
    Peer {
        /// The lowest rank that failed.
        rank: usize,
        /// Its message.
        why: String,
    },
    /// A name for a checkpoint that cannot be the name of a folder.
    #[error("'{tag}' cannot name a checkpoint: {why}")]
    Tag {
        /// The name.
        tag: String,
        /// Why not.
        why: &'static str,
    },
    /// What was asked of an export cannot be written, or not to where it was asked.
    #[error("{0}")]
    Export(String),
    /// A caller asked for something that makes no sense.
    #[error("{0}")]
    Request(String),
}

impl CheckpointError {
    /// Whether the checkpoint itself is at fault, so that an older one may do. What does not fit the model will not fit
    /// from an older one either.
    pub fn is_damage(&self) -> bool {
        matches!(
            self,
            CheckpointError::Io { .. } | CheckpointError::File { .. } | CheckpointError::Damaged { .. }
        )
    }

    /// A file that is not what it should be.
    pub fn file(path: &Path, why: impl ToString) -> CheckpointError {
        CheckpointError::File { path: path.to_path_buf(), why: why.to_string() }
    }

    pub(crate) fn io(what: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> CheckpointError {
        let path = path.to_path_buf();
        move |source| CheckpointError::Io { what, path, source }
    }
}

/// The result of everything here.
pub type Result<T, E = CheckpointError> = std::result::Result<T, E>;
