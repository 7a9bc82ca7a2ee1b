//! What can go wrong with files.

use std::path::PathBuf;

/// A read, a write or a file that failed, and where.
#[derive(Debug, thiserror::Error)]
pub enum IoError {
    /// A transfer that failed.
    #[error("cannot {what} {length} bytes at {offset} of {}: {why}", file.display())]
    Transfer {
        /// `read` or `write`.
        what: &'static str,
        /// The file, or the folder of one without a name.
        file: PathBuf,
        /// From where.
        offset: u64,
        /// How many.
        length: usize,
        /// What the system said.
        why: std::io::Error,
    },
    /// What came back is not what was written.
    #[error(
        "{length} bytes at {offset} of the swap file in {} are not what was written there: its disk, or what connects it, \
         changes data; look at it (dmesg, smartctl), and go on from the last checkpoint",
        folder.display()
    )]
    Damaged {
        /// The folder of the file, which has no name.
        folder: PathBuf,
        /// From where.
        offset: u64,
        /// How many.
        length: usize,
    },
    /// A file that cannot be made.
    #[error("cannot make a swap file of {bytes} bytes in {}: {why}", folder.display())]
    Swap {
        /// Where.
        folder: PathBuf,
        /// How large.
        bytes: u64,
        /// What the system said.
        why: std::io::Error,
    },
    /// Not enough room, known before anything is written.
    #[error("{} has {free} bytes free, and {needed} are needed there: free some, or offload less", folder.display())]
    Room {
        /// Where.
        folder: PathBuf,
        /// What is needed.
        needed: u64,
        /// What there is.
        free: u64,
    },
    /// A file larger than this process may make.
    #[error(
        "{needed} bytes are needed in {}, and a file of this process may have {longest}: raise `ulimit -f`, or offload less",
        folder.display()
    )]
    TooLong {
        /// Where.
        folder: PathBuf,
        /// What is needed.
        needed: u64,
        /// The limit.
        longest: u64,
    },
    /// A request that cannot be right.
    #[error("{0}")]
    Request(String),
}

/// A result with an [`IoError`].
pub type Result<T> = std::result::Result<T, IoError>;
