//! Large transfers past the system's cache, beside the caller's own work.
//!
//! State is written once and read once. Through the cache every byte is copied once more by the processor and takes the
//! place of something that training needs, so whole pages go straight between the disk and the buffers here, through a
//! queue of [`ferrospeed_io`], while the caller fills or checks others. A file system that cannot do this is
//! used in the ordinary way. Memory is bounded: three or four buffers of [`BUFFER_BYTES`] per stream.

mod input;
mod output;

pub(crate) use input::{Stretch, Window, open, read};
pub(crate) use output::write;

use ferrospeed_io::{ALIGNMENT as PAGE, IoError};

use crate::manifest::BLOCK_BYTES;

/// Room for two blocks, and what alignment costs.
const BUFFER_BYTES: usize = 2 * BLOCK_BYTES as usize + 2 * PAGE;

/// What the system said of a transfer that failed: whoever asked for it knows which one it was.
fn cause(error: IoError) -> std::io::Error {
    match error {
        IoError::Transfer { why, .. } => why,
        other => std::io::Error::other(other.to_string()),
    }
}
