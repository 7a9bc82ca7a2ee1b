//! What loops over the host's memory are made of: threads, instruction sets, and ways to and past the cache.
//!
//! The kernels of the CPU, the optimizers' passes and what packs messages all stand on them. They know slices and no tensors.

pub mod ahead;
mod crew;
pub mod past_cache;
pub mod simd;
pub mod threads;
