//! Fast files: reads and writes beside compute, and memory that lies on a disk.
//!
//! A [`Queue`] moves [`Buffer`]s to and from places in files while its caller computes: by `io_uring` where the kernel
//! permits it, by threads elsewhere ([`Queue::why_threads`] says why). An operation takes its buffer and gives it back when
//! it is waited for, so nobody can touch memory that the disk is using. An [`OpenFile`] is any file; a [`SwapFile`] is room on a disk for state that
//! does not fit memory; it has no name, so nothing of it stays, however the process ends.
//!
//! It knows files and bytes, and nothing of tensors.

pub mod bench;
mod buffer;
mod error;
mod file;
mod layer;
mod queue;
mod spans;
mod sums;
mod swap;
mod threads;
mod uring;

pub use buffer::{ALIGNMENT, Buffer};
pub use error::{IoError, Result};
pub use file::{OpenFile, refuses_direct};
pub use layer::{Layer, System};
pub use queue::{Operation, Queue, QueueOptions, Traffic};
pub use spans::IoSpan;
pub use swap::{SwapFile, free_bytes};

#[cfg(test)]
extern crate self as ferrospeed_io;
#[cfg(test)]
#[path = "../tests/it/main.rs"]
mod it;
