//! Where a device's memory comes from, and how much of it is taken.

use std::ptr::NonNull;

use crate::backend::Device;
use crate::error::{Result, TensorError};
use crate::memory::{Category, MemoryUsage};

/// Raw device memory.
#[derive(Debug, Clone, Copy)]
pub struct RawBlock {
    /// Its address on the device.
    pub address: NonNull<u8>,
    /// How many bytes there are.
    pub capacity_bytes: usize,
}

// SAFETY: a block is an owned range of memory; access is governed by the buffer that holds it.
unsafe impl Send for RawBlock {}
// SAFETY: as above.
unsafe impl Sync for RawBlock {}

/// A device's name and memory.
pub trait Memory: Send + Sync {
    /// What it calls itself in messages.
    fn name(&self) -> String;
    /// The kind of its kernels, for whoever wants the same bits again: the word of `FERROSPEED_CPU_KERNELS` for a processor's, or
    /// `amx`; the name of a GPU.
    fn kernels(&self) -> String;
    /// The device of the host that it works with; `None` where its own memory is the host's.
    fn host(&self) -> Option<&Device>;
    /// Whether its memory is the host's.
    fn is_host(&self) -> bool {
        self.host().is_none()
    }
    /// Takes memory; content undefined.
    fn allocate(&self, bytes: usize, category: Category) -> Result<RawBlock>;
    /// Gives memory back.
    fn free(&self, block: RawBlock, category: Category);
    /// Counts memory that somebody else allocated.
    fn count_external(&self, bytes: usize, category: Category);
    /// Ends that.
    fn uncount_external(&self, bytes: usize, category: Category);
    /// What is held.
    fn memory_usage(&self) -> MemoryUsage;
    /// Starts the peaks anew from what is held now.
    fn reset_peak_memory(&self);
    /// The error of [`Updates::update`](crate::backend::Updates::update) and of what measures gradients on a host device.
    fn left_to_the_host(&self, op: &'static str) -> TensorError {
        TensorError::Unsupported { op, device: self.name(), why: "the host's own loops do it".into() }
    }
}
