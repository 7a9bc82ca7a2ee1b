//! Where flat values are at home: in the memory of a device, on a disk, or packed as integers.
//!
//! Kernels work on tensors, so what is on a disk is read into memory of the host first, in stretches, and written back.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use ferrospeed_io::{ALIGNMENT, Buffer, Operation, Queue, QueueOptions, SwapFile};
use ferrospeed_tensor::{Category, DType, Device, Tensor};

use crate::error::{Result, ZeroError};
use crate::memory::part;
use crate::packed::Packed;

/// A disk that takes what memory does not hold.
#[derive(Clone)]
pub(crate) struct Disk {
    queue: Queue,
    folder: Arc<Path>,
}

impl Disk {
    pub(crate) fn new(folder: &Path, options: QueueOptions) -> Disk {
        Disk { queue: Queue::new(options), folder: folder.into() }
    }

    /// Zeros on the disk, as many as told.
    pub(crate) fn zeros(&self, numel: usize, dtype: DType) -> Result<Flat> {
        let file = SwapFile::create(&self.folder, (numel * dtype.size_bytes()) as u64)?;
        Ok(Flat::Disk(OnDisk { file, queue: self.queue.clone(), numel, dtype }))
    }

    pub(crate) fn queue(&self) -> &Queue {
        &self.queue
    }
}

/// Flat values of one type.
#[derive(Clone)]
pub(crate) enum Flat {
    /// In the memory of some device.
    Memory(Tensor),
    /// On a disk.
    Disk(OnDisk),
    /// As small integers.
    Packed(Packed),
}

impl Flat {
    /// Whether kernels of this device can use it where it is.
    pub(crate) fn is_here(&self, device: &Device) -> bool {
        matches!(self, Flat::Memory(tensor) if tensor.device().backend().is_host() == device.backend().is_host())
    }

    /// All of it, which must be in memory.
    pub(crate) fn memory(&self) -> Result<&Tensor> {
        match self {
            Flat::Memory(tensor) => Ok(tensor),
            Flat::Disk(_) | Flat::Packed(_) => {
                let why = "values on a disk or in integers are needed in memory: a fault of the store";
                Err(ZeroError::Request(why.into()))
            }
        }
    }

    /// A stretch of it for kernels of this device: itself, or a copy.
    pub(crate) fn read(&self, start: usize, len: usize, device: &Device) -> Result<Tensor> {
        let found = match self {
            Flat::Memory(tensor) => part(tensor, start, len)?,
            Flat::Disk(disk) => disk.start_read(start..start + len)?.wait()?,
            Flat::Packed(packed) => packed.read(start, len)?,
        };
        moved_to(found, device)
    }

    /// Replaces a stretch of it, in whatever type and place the new values are.
    pub(crate) fn write(&self, start: usize, values: &Tensor) -> Result<()> {
        match self {
            Flat::Memory(tensor) => {
                let target = part(tensor, start, values.numel())?;
                let device = target.device().clone();
                Ok(device.backend().cast(&moved_to(values.clone(), &device)?, &target)?)
            }
            Flat::Disk(disk) => {
                let host = moved_to(values.clone(), &Device::cpu())?;
                let host = ferrospeed_tensor::ops::cast(&host, disk.dtype)?;
                disk.write(start, &host)
            }
            Flat::Packed(packed) => packed.write(start, values),
        }
    }
}

/// A tensor on a device: itself where it is there already.
pub(crate) fn moved_to(tensor: Tensor, device: &Device) -> Result<Tensor> {
    if tensor.device().backend().is_host() == device.backend().is_host() {
        return Ok(tensor);
    }
    let copy = Tensor::empty_in(*tensor.shape(), tensor.dtype(), device, Category::Buffers)?;
    if device.backend().is_host() {
        // SAFETY: the copy was just made, and nobody else knows it.
        let bytes: &mut [u8] =
            unsafe { std::slice::from_raw_parts_mut(copy.address().as_ptr(), copy.size_bytes()) };
        tensor.device().backend().copy_to_host(&tensor, bytes)?;
    } else {
        // SAFETY: a whole tensor of the host, which nobody writes while it is read here.
        let bytes = unsafe { std::slice::from_raw_parts(tensor.address().as_ptr(), tensor.size_bytes()) };
        device.backend().copy_from_host(bytes, &copy)?;
    }
    Ok(copy)
}

/// Flat values on a disk.
#[derive(Clone)]
pub(crate) struct OnDisk {
    file: SwapFile,
    queue: Queue,
    numel: usize,
    dtype: DType,
}

/// A read under way.
pub(crate) struct Reading {
    operation: Operation,
    /// Where in the buffer the wanted values begin, in bytes.
    skip: usize,
    len: usize,
    dtype: DType,
}

impl OnDisk {
    /// The pages that hold these elements: where they begin, and their bytes; and the bytes before the first element.
    fn pages(&self, range: &Range<usize>) -> (u64, usize, usize) {
        let size = self.dtype.size_bytes();
        let (start, end) = (range.start * size, range.end * size);
        let first = start - start % ALIGNMENT;
        (first as u64, end.next_multiple_of(ALIGNMENT) - first, start - first)
    }

    pub(crate) fn start_read(&self, range: Range<usize>) -> Result<Reading> {
        debug_assert!(range.end <= self.numel);
        let (offset, bytes, skip) = self.pages(&range);
        self.start_read_into(range.len(), offset, bytes, skip, Buffer::new(bytes))
    }

    fn start_read_into(
        &self,
        len: usize,
        offset: u64,
        bytes: usize,
        skip: usize,
        buffer: Buffer,
    ) -> Result<Reading> {
        let operation = self.queue.read(&self.file, offset, buffer, bytes)?;
        Ok(Reading { operation, skip, len, dtype: self.dtype })
    }

    /// Begins to read whole pages into a buffer.
    pub(crate) fn start_read_tile(&self, range: Range<usize>, buffer: Buffer) -> Result<Operation> {
        let (offset, bytes, _) = self.pages(&range);
        Ok(self.queue.read(&self.file, offset, buffer, bytes)?)
    }

    /// Begins to write what [`OnDisk::start_read_tile`] read.
    pub(crate) fn start_write_tile(&self, range: Range<usize>, buffer: Buffer) -> Result<Operation> {
        let (offset, bytes, _) = self.pages(&range);
        Ok(self.queue.write(&self.file, offset, buffer, bytes)?)
    }

    fn write(&self, start: usize, values: &Tensor) -> Result<()> {
        let range = start..start + values.numel();
        let (offset, bytes, skip) = self.pages(&range);
        // What shares the first and the last page stays as it is.
        let mut buffer = self.queue.read(&self.file, offset, Buffer::new(bytes), bytes)?.wait()?;
        let backend = values.device().backend();
        backend.copy_to_host(values, &mut buffer.bytes_mut()[skip..skip + values.size_bytes()])?;
        self.queue.write(&self.file, offset, buffer, bytes)?.wait()?;
        Ok(())
    }
}

impl Reading {
    /// Waits, and gives the values as a tensor of the host.
    pub(crate) fn wait(self) -> Result<Tensor> {
        let Reading { operation, skip, len, dtype } = self;
        let buffer = Arc::new(operation.wait()?);
        // SAFETY: inside the buffer, which holds at least this much from there and lives as long as the tensor.
        let address = unsafe { buffer.address().add(skip) };
        // SAFETY: as above; a place in a file is a multiple of the element's size, and the buffer is nobody else's.
        Ok(unsafe { Tensor::from_external(address, [len], dtype, &Device::cpu(), Category::Buffers, buffer) })
    }
}
