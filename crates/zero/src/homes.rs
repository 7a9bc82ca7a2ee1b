//! What the homes of a model's state are made of: devices, their hosts, disks. Which tile has which is placed before
//! ([`ferrospeed_placement::share`]).

use std::sync::{Arc, Mutex, PoisonError};

use ferrospeed_config::{AsyncIo, OptimizerTier, ParameterTier, Stage, Zero};
use ferrospeed_io::{Buffer, IoSpan, Queue, QueueOptions, Traffic};
use ferrospeed_placement::{self as placement, Home, Memory};
use ferrospeed_tensor::{Category, DType, Device, Out, Tensor};

use crate::error::{Result, ZeroError};
use crate::home::{Disk, Flat, Split};
use crate::landing::Rooms;

/// Tiles in memory at once, unless told.
const TILE_BUFFERS: usize = 4;

/// What the homes of a model's state need: disks with their queues, buffers, room for what goes between a GPU and its host.
#[derive(Clone, Default)]
pub struct Homes {
    /// The disk of masters and optimizer states.
    states: Option<Disk>,
    /// The disk of what kernels read.
    values: Option<Disk>,
    buffers: Option<usize>,
    reads: Option<usize>,
    /// Page-locked buffers for stretches that wait for the next step, where such are wanted.
    locked: Option<Arc<Mutex<Vec<Buffer>>>>,
    /// Room for what goes between a GPU and its host.
    rooms: Rooms,
}

impl Homes {
    /// All states on a disk, so many stretches at a time in memory.
    pub(crate) fn on(disk: Disk, buffers: usize) -> Homes {
        Homes { states: Some(disk), buffers: Some(buffers), ..Homes::default() }
    }

    /// As the configuration says, for a rank that computes on this device.
    pub fn from_config(zero: &Zero, aio: &AsyncIo, device: &Device) -> Homes {
        let queue = queue_options(aio);
        let mut homes = Homes::default();
        if let OptimizerTier::Nvme { buffers, .. } = &zero.offload_optimizer.tier {
            homes.buffers = Some(clamped(buffers.count));
            homes.locked = buffers.pinned.then(Arc::default);
            homes.states = Some(Disk::new("offload_optimizer", &buffers.path, queue, device));
        }
        if let ParameterTier::Nvme { buffers, .. } = &zero.offload_param.tier {
            homes.reads = Some(clamped(buffers.count).max(1));
            homes.values = Some(Disk::new("offload_param", &buffers.path, queue, device));
        }
        homes
    }

    /// Zeros for masters or states, as they are placed.
    pub(crate) fn states(&self, placed: &placement::Flat, device: &Device) -> Result<Flat> {
        let near = |numel, _| Ok(Tensor::zeros_in([numel], DType::F32, device, Category::Optimizer)?);
        zeros(placed, DType::F32, device, Category::Optimizer, self.states.as_ref(), near)
    }

    /// Zeros for what kernels read, as they are placed; `near` makes those that are with the device.
    pub(crate) fn values(
        &self,
        placed: &placement::Flat,
        dtype: DType,
        device: &Device,
        near: impl Fn(usize, Memory) -> Result<Tensor>,
    ) -> Result<Flat> {
        zeros(placed, dtype, device, Category::Parameters, self.values.as_ref(), near)
    }

    pub(crate) fn rooms(&self) -> &Rooms {
        &self.rooms
    }

    /// Parameters that are read from a disk at once.
    pub(crate) fn reads(&self) -> usize {
        self.reads.unwrap_or(1)
    }

    /// How many tiles may be in memory.
    pub(crate) fn tile_buffers(&self) -> usize {
        self.buffers.unwrap_or(TILE_BUFFERS).max(1)
    }

    /// A buffer for a column of a tile.
    pub(crate) fn tile_buffer(&self, bytes: usize) -> Buffer {
        match &self.locked {
            Some(kept) => {
                let kept = kept.lock().unwrap_or_else(PoisonError::into_inner).pop();
                kept.unwrap_or_else(|| Buffer::locked(bytes))
            }
            None => Buffer::new(bytes),
        }
    }

    /// Keeps page-locked buffers for the next step; others go.
    pub(crate) fn keep_buffers(&self, buffers: Vec<Buffer>) {
        if let Some(kept) = &self.locked {
            kept.lock().unwrap_or_else(PoisonError::into_inner).extend(buffers);
        }
    }

    /// The disks.
    fn disks(&self) -> impl Iterator<Item = &Disk> {
        self.states.iter().chain(&self.values)
    }

    /// What has gone to and from disks.
    pub(crate) fn traffic(&self) -> Traffic {
        let mut sum = Traffic::default();
        for traffic in self.disks().map(|disk| disk.queue().traffic()) {
            sum.read += traffic.read;
            sum.written += traffic.written;
            sum.waited += traffic.waited;
        }
        sum
    }

    /// Notes when transfers run, so many of each disk at most.
    pub(crate) fn keep_spans(&self, most: usize) {
        self.disks().for_each(|disk| disk.queue().keep_spans(most));
    }

    /// What was noted, with the key of the configuration that put it there.
    pub(crate) fn take_spans(&self) -> Vec<(&'static str, IoSpan)> {
        let of_disk = |disk: &Disk| {
            let tier = disk.tier();
            disk.queue().take_spans().into_iter().map(move |span| (tier, span)).collect::<Vec<_>>()
        };
        self.disks().flat_map(of_disk).collect()
    }

    /// What of a configuration is not taken as it is written, where a disk is used at all: a sentence each.
    pub fn clamped(zero: &Zero, aio: &AsyncIo) -> Vec<String> {
        let states = match &zero.offload_optimizer.tier {
            OptimizerTier::Nvme { buffers, .. } => Some(("offload_optimizer", buffers.count)),
            OptimizerTier::Device | OptimizerTier::Host(_) => None,
        };
        let values = match &zero.offload_param.tier {
            ParameterTier::Nvme { buffers, .. } if zero.stage == Stage::Parameters => {
                Some(("offload_param", buffers.count))
            }
            _ => None,
        };
        let on_disk: Vec<(&str, u64)> = states.into_iter().chain(values).collect();
        if on_disk.is_empty() {
            return Vec::new();
        }
        let asked = queue_options(aio);
        let taken = Queue::possible(asked);
        let pairs = [
            ("aio.block_size", asked.block_bytes, taken.block_bytes),
            ("aio.queue_depth", asked.depth, taken.depth),
            ("aio.thread_count", asked.threads, taken.threads),
        ];
        let said = |key: &str, asked: usize, taken: usize| format!("{key}: {taken} is used, not {asked}");
        let of_queue = pairs.iter().filter(|(_, asked, taken)| asked != taken);
        let buffers = on_disk.iter().filter(|(_, count)| *count == 0);
        of_queue
            .map(|(key, asked, taken)| said(key, *asked, *taken))
            .chain(buffers.map(|(section, _)| said(&format!("{section}.buffer_count"), 0, 1)))
            .collect()
    }
}

/// Zeros, as they are placed.
fn zeros(
    placed: &placement::Flat,
    dtype: DType,
    device: &Device,
    category: Category,
    disk: Option<&Disk>,
    near: impl Fn(usize, Memory) -> Result<Tensor>,
) -> Result<Flat> {
    let run = |&(numel, home, memory): &(usize, Home, Memory)| match home {
        Home::Device => Ok(Flat::Memory(near(numel, memory)?)),
        Home::Host => Ok(Flat::Memory(Tensor::zeros_in([numel], dtype, device.host(), category)?)),
        Home::LockedHost => locked(numel, dtype, device, category),
        Home::Disk => {
            let why = "values are placed on a disk that the store was not given: a fault of the store";
            disk.ok_or_else(|| ZeroError::Request(why.into()))?.zeros(numel, dtype)
        }
    };
    match &placed.runs[..] {
        [first, rest] => {
            let (at, first, rest) = (first.0, run(first)?, run(rest)?);
            Ok(Flat::Split(Box::new(Split { first, rest, at })))
        }
        runs => runs.first().map_or_else(|| Ok(Flat::Memory(near(0, Memory::Own)?)), run),
    }
}

/// Zeros in page-locked memory of a device's host; in ordinary memory where none can be locked.
fn locked(numel: usize, dtype: DType, device: &Device, category: Category) -> Result<Flat> {
    match device.locked(numel, dtype, category) {
        Ok(tensor) => {
            // SAFETY: the memory was just taken, and nobody else knows it.
            device.host().backend().fill(unsafe { Out::vouched(&tensor) }, 0.0)?;
            Ok(Flat::Memory(tensor))
        }
        Err(why) => {
            tracing::warn!("offload_param: {numel} weights are in ordinary memory, not page-locked: {why}");
            Ok(Flat::Memory(Tensor::zeros_in([numel], dtype, device.host(), category)?))
        }
    }
}

/// A number of the configuration, as large as this machine can count.
fn clamped(value: u64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

fn queue_options(aio: &AsyncIo) -> QueueOptions {
    QueueOptions {
        block_bytes: clamped(aio.block_size),
        depth: clamped(aio.queue_depth),
        threads: clamped(aio.thread_count),
        single_submit: aio.single_submit,
        ..QueueOptions::default()
    }
}
