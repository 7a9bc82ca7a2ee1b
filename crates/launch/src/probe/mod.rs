//! What this host can do, found out by trying: libraries by `dlopen`, files by writing one.
//!
//! Nothing here is an error: what is missing is an answer, with the reason.

mod files;
mod libraries;

pub use files::{DiskProbe, free_disk_bytes, io_uring, probe_disk};
pub use libraries::{CudaDriver, cuda_driver, nccl_version, open_library};
