//! What this host can do, found out by trying: libraries by `dlopen`, files by writing one; and what the system says of memory.
//!
//! Nothing here is an error: what is missing is an answer, with the reason.

mod files;
mod libraries;
mod memory;

pub use files::{DiskProbe, free_disk_bytes, io_uring, probe_disk};
pub use libraries::{CudaDriver, cuda_driver, nccl_version, open_library};
pub use memory::{HostMemory, available_memory_bytes, container_limit_bytes, host_memory};
