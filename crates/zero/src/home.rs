//! Where flat values are at home: in the memory of a device, on a disk, packed as integers, or their beginning in one place
//! and the rest in another.
//!
//! Kernels work on tensors, so what is on a disk is read into memory of the host first, in stretches, and written back.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use ferrospeed_io::{ALIGNMENT, Buffer, Operation, Queue, QueueOptions, SwapFile};
use ferrospeed_tensor::{Category, DType, Device, Out, Tensor};

use crate::error::{Result, ZeroError};
use crate::memory::part;
use crate::packed::Packed;

/// A disk that takes what memory does not hold.
#[derive(Clone)]
pub(crate) struct Disk {
    queue: Queue,
    folder: Arc<Path>,
    tier: &'static str,
    host: Device,
}

impl Disk {
    /// A disk for what a section of the configuration moves away from a device.
    pub(crate) fn new(tier: &'static str, folder: &Path, options: QueueOptions, device: &Device) -> Disk {
        Disk { queue: Queue::new(options), folder: folder.into(), tier, host: device.host().clone() }
    }

    /// A disk behind a queue that a test has made.
    #[cfg(test)]
    pub(crate) fn over(queue: Queue, folder: &Path) -> Disk {
        let (tier, host) = ("offload_optimizer", ferrospeed_cpu::device());
        Disk { queue, folder: folder.into(), tier, host }
    }

    /// Zeros on the disk, as many as told.
    pub(crate) fn zeros(&self, numel: usize, dtype: DType) -> Result<Flat> {
        let tier = self.tier;
        let file = SwapFile::create(&self.folder, (numel * dtype.size_bytes()) as u64)
            .map_err(|error| ZeroError::Disk { tier, error })?;
        Ok(Flat::Disk(OnDisk {
            file,
            queue: self.queue.clone(),
            numel,
            dtype,
            tier,
            host: self.host.clone(),
        }))
    }

    pub(crate) fn queue(&self) -> &Queue {
        &self.queue
    }

    /// The section of the configuration.
    pub(crate) fn tier(&self) -> &'static str {
        self.tier
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
    /// In two places.
    Split(Box<Split>),
}

/// Flat values whose first elements are in one place and whose others are in another.
#[derive(Clone)]
pub(crate) struct Split {
    pub(crate) first: Flat,
    pub(crate) rest: Flat,
    /// How many the first are.
    pub(crate) at: usize,
}

impl Flat {
    /// Where its first elements are.
    pub(crate) fn first(&self) -> &Flat {
        if let Flat::Split(split) = self { &split.first } else { self }
    }

    /// Where its last elements are.
    pub(crate) fn rest(&self) -> &Flat {
        if let Flat::Split(split) = self { &split.rest } else { self }
    }

    /// How many bytes of it are on a disk.
    pub(crate) fn disk_bytes(&self) -> u64 {
        match self {
            Flat::Disk(disk) => (disk.numel * disk.dtype.size_bytes()) as u64,
            Flat::Split(split) => split.first.disk_bytes() + split.rest.disk_bytes(),
            Flat::Memory(_) | Flat::Packed(_) => 0,
        }
    }

    /// Whether kernels of this device can use it where it is.
    pub(crate) fn is_here(&self, device: &Device) -> bool {
        matches!(self, Flat::Memory(tensor) if tensor.device().backend().is_host() == device.backend().is_host())
    }

    /// All of it, which must be in memory.
    pub(crate) fn memory(&self) -> Result<&Tensor> {
        match self {
            Flat::Memory(tensor) => Ok(tensor),
            Flat::Disk(_) | Flat::Packed(_) | Flat::Split(_) => {
                let why = "values that are elsewhere are needed in memory: a fault of the store";
                Err(ZeroError::Request(why.into()))
            }
        }
    }

    /// A stretch of it for kernels of this device: itself, or a copy.
    pub(crate) fn read(&self, start: usize, len: usize, device: &Device) -> Result<Tensor> {
        self.start_read(start, len)?.wait(device)
    }

    /// Begins to read a stretch of it.
    pub(crate) fn start_read(&self, start: usize, len: usize) -> Result<Coming> {
        Ok(match self {
            Flat::Memory(tensor) => Coming::Here(part(tensor, start, len)?),
            Flat::Disk(disk) => Coming::Reading(disk.start_read(start..start + len)?),
            Flat::Packed(packed) => Coming::Here(packed.read(start, len)?),
            Flat::Split(split) => {
                let first = split.at.saturating_sub(start).min(len);
                match (first, len - first) {
                    (_, 0) => split.first.start_read(start, len)?,
                    (0, _) => split.rest.start_read(start - split.at, len)?,
                    (_, rest) => {
                        let both = [split.first.start_read(start, first)?, split.rest.start_read(0, rest)?];
                        Coming::Both(Box::new(both))
                    }
                }
            }
        })
    }

    /// Replaces a stretch of it, in whatever type and place the new values are.
    pub(crate) fn write(&self, start: usize, values: &Tensor) -> Result<()> {
        match self {
            Flat::Memory(tensor) => {
                let target = part(tensor, start, values.numel())?;
                let device = target.device().clone();
                // SAFETY: whoever has a store's flat values replaces them while nobody borrows what they are a part of.
                let target = unsafe { Out::vouched(&target) };
                Ok(device.backend().cast(&moved_to(values.clone(), &device)?, target)?)
            }
            Flat::Disk(disk) => {
                let host = moved_to(values.clone(), &disk.host)?;
                let host = ferrospeed_tensor::ops::cast(&host, disk.dtype)?;
                disk.write(start, &host)
            }
            Flat::Packed(packed) => packed.write(start, values),
            Flat::Split(split) => {
                let (len, first) = (values.numel(), split.at.saturating_sub(start).min(values.numel()));
                if first > 0 {
                    split.first.write(start, &part(values, 0, first)?)?;
                }
                if first < len {
                    split.rest.write(start + first - split.at, &part(values, first, len - first)?)?;
                }
                Ok(())
            }
        }
    }
}

/// Values on their way to where they are read.
pub(crate) enum Coming {
    Here(Tensor),
    Reading(Reading),
    /// In two stretches.
    Both(Box<[Coming; 2]>),
}

impl Coming {
    /// Waits, and gives the values to kernels of this device.
    pub(crate) fn wait(self, device: &Device) -> Result<Tensor> {
        match self {
            Coming::Here(tensor) => moved_to(tensor, device),
            Coming::Reading(reading) => moved_to(reading.wait()?, device),
            Coming::Both(both) => {
                let [first, rest] = *both;
                let (first, rest) = (first.wait(device)?, rest.wait(device)?);
                let (at, len) = (first.numel(), first.numel() + rest.numel());
                let mut whole = Tensor::empty_in([len], first.dtype(), device, Category::Buffers)?;
                device.backend().cast(&first, whole.out()?.part(0, [at])?.out())?;
                device.backend().cast(&rest, whole.out()?.part(at, [len - at])?.out())?;
                Ok(whole)
            }
        }
    }
}

/// A tensor on a device: itself where it is there already.
pub(crate) fn moved_to(tensor: Tensor, device: &Device) -> Result<Tensor> {
    if tensor.device().backend().is_host() == device.backend().is_host() {
        return Ok(tensor);
    }
    let mut copy = Tensor::empty_in(*tensor.shape(), tensor.dtype(), device, Category::Buffers)?;
    if device.backend().is_host() {
        // SAFETY: the copy was just made, and nobody else knows it.
        let bytes: &mut [u8] =
            unsafe { std::slice::from_raw_parts_mut(copy.address().as_ptr(), copy.size_bytes()) };
        tensor.device().backend().copy_to_host(&tensor, bytes)?;
    } else {
        // SAFETY: a whole tensor of the host, which nobody writes while it is read here.
        let bytes = unsafe { std::slice::from_raw_parts(tensor.address().as_ptr(), tensor.size_bytes()) };
        device.backend().copy_from_host(bytes, copy.out()?)?;
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
    tier: &'static str,
    /// Where values are that have been read.
    host: Device,
}

/// A read or a write under way.
pub(crate) struct Transfer {
    operation: Operation,
    tier: &'static str,
}

impl Transfer {
    /// Waits for its end, and gives the buffer back.
    pub(crate) fn wait(self) -> Result<Buffer> {
        self.operation.wait().map_err(|error| ZeroError::Disk { tier: self.tier, error })
    }
}

/// A read of some values under way.
pub(crate) struct Reading {
    transfer: Transfer,
    /// Where in the buffer the wanted values begin, in bytes.
    skip: usize,
    len: usize,
    dtype: DType,
    host: Device,
}

impl OnDisk {
    /// The pages that hold these elements: where they begin, and their bytes; and the bytes before the first element.
    fn pages(&self, range: &Range<usize>) -> (u64, usize, usize) {
        let size = self.dtype.size_bytes();
        let (start, end) = (range.start * size, range.end * size);
        let first = start - start % ALIGNMENT;
        (first as u64, end.next_multiple_of(ALIGNMENT) - first, start - first)
    }

    /// Whether an element is the first of a page.
    pub(crate) fn begins_a_page(&self, element: usize) -> bool {
        (element * self.dtype.size_bytes()).is_multiple_of(ALIGNMENT)
    }

    fn read_pages(&self, offset: u64, bytes: usize, buffer: Buffer) -> Result<Transfer> {
        let operation = self.queue.read(&self.file, offset, buffer, bytes);
        self.transfer(operation)
    }

    fn write_pages(&self, offset: u64, bytes: usize, buffer: Buffer) -> Result<Transfer> {
        let operation = self.queue.write(&self.file, offset, buffer, bytes);
        self.transfer(operation)
    }

    fn transfer(&self, operation: ferrospeed_io::Result<Operation>) -> Result<Transfer> {
        let tier = self.tier;
        let operation = operation.map_err(|error| ZeroError::Disk { tier, error })?;
        Ok(Transfer { operation, tier })
    }

    pub(crate) fn start_read(&self, range: Range<usize>) -> Result<Reading> {
        debug_assert!(range.end <= self.numel);
        let (offset, bytes, skip) = self.pages(&range);
        let transfer = self.read_pages(offset, bytes, Buffer::new(bytes))?;
        Ok(Reading { transfer, skip, len: range.len(), dtype: self.dtype, host: self.host.clone() })
    }

    /// Begins to read whole pages into a buffer.
    pub(crate) fn start_read_tile(&self, range: Range<usize>, buffer: Buffer) -> Result<Transfer> {
        let (offset, bytes, _) = self.pages(&range);
        self.read_pages(offset, bytes, buffer)
    }

    /// Begins to write what [`OnDisk::start_read_tile`] read.
    pub(crate) fn start_write_tile(&self, range: Range<usize>, buffer: Buffer) -> Result<Transfer> {
        let (offset, bytes, _) = self.pages(&range);
        self.write_pages(offset, bytes, buffer)
    }

    fn write(&self, start: usize, values: &Tensor) -> Result<()> {
        let range = start..start + values.numel();
        let (offset, bytes, skip) = self.pages(&range);
        // A checkpoint is loaded over state that a failing disk has lost, page by page.
        self.file.expect_anything(offset, bytes);
        // What shares the first and the last page stays as it is.
        let mut buffer = self.read_pages(offset, bytes, Buffer::new(bytes))?.wait()?;
        let backend = values.device().backend();
        backend.copy_to_host(values, &mut buffer.bytes_mut()[skip..skip + values.size_bytes()])?;
        self.write_pages(offset, bytes, buffer)?.wait().map(drop)
    }
}

impl Reading {
    /// Waits, and gives the values as a tensor of the host.
    pub(crate) fn wait(self) -> Result<Tensor> {
        let Reading { transfer, skip, len, dtype, host } = self;
        let buffer = Arc::new(transfer.wait()?);
        // SAFETY: inside the buffer, which holds at least this much from there and lives as long as the tensor.
        let address = unsafe { buffer.address().add(skip) };
        // SAFETY: as above; a place in a file is a multiple of the element's size, and the buffer is nobody else's.
        Ok(unsafe { Tensor::from_uncounted(address, [len], dtype, &host, buffer) })
    }
}
