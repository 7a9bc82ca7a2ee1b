//! Tables of tensors that one launch goes over, cut into chunks: see `piece_of` in `kernels/common.cuh`.

use ferrospeed_tensor::Result;

use crate::compile::Shared;
use crate::{CudaBackend, Scratch};

/// Elements of a chunk, which one block works on at a time.
const CHUNK: u64 = 16384;
/// What kernels that go over tables are told of it.
pub(super) const SHARED: Shared = &[("CHUNK", CHUNK as usize)];

/// An entry of a table as kernels know it: it begins with the number of its first chunk, then its elements.
pub(super) trait Entry: bytemuck::Pod {
    /// How many elements it has.
    fn count(&self) -> u64;
    /// Takes the number of its first chunk.
    fn set_first(&mut self, first: u64);
}

/// Entries on the device, numbered through by chunks.
pub(super) struct Table<'a> {
    pub(super) memory: Scratch<'a>,
    pub(super) number: u32,
    pub(super) chunks: u64,
}

impl<'a> Table<'a> {
    pub(super) fn new<E: Entry>(backend: &'a CudaBackend, mut entries: Vec<E>) -> Result<Table<'a>> {
        let mut chunks = 0;
        for entry in &mut entries {
            entry.set_first(chunks);
            chunks += entry.count().div_ceil(CHUNK);
        }
        let memory = backend.scratch(size_of::<E>() * entries.len())?;
        backend.write(bytemuck::cast_slice(&entries), memory.address())?;
        Ok(Table { memory, number: entries.len() as u32, chunks })
    }

    pub(super) fn grid(&self, backend: &CudaBackend) -> [u32; 3] {
        [self.chunks.clamp(1, u64::from(backend.driver.multiprocessors) * 16) as u32, 1, 1]
    }
}
