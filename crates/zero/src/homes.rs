//! Where the parts of a model's state are at home, by the configuration.
//!
//! `offload_optimizer` moves f32 weights and optimizer states, `offload_param` (stage 3) what kernels read. Host memory is
//! another home only for a rank that computes on a GPU; a disk is one for all. Of either a part may stay: of the states all
//! but the `ratio` that is moved, of what kernels read as many elements as `max_in_cpu` grants the host's memory.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use ferrospeed_config::{AsyncIo, OptimizerTier, ParameterTier, Stage, Zero};
use ferrospeed_io::{Buffer, IoSpan, Queue, QueueOptions, Traffic};
use ferrospeed_tensor::{Category, DType, Device, Out, Tensor};

use crate::error::Result;
use crate::home::{Disk, Flat};
use crate::landing::Rooms;

/// The most elements of a tile, whatever `sub_group_size` says: larger ones are not faster, and take memory.
const LARGEST_TILE: u64 = 4 << 20;
/// Tiles begin at pages, in f32 and in 16 bits.
const TILE_UNIT: usize = 2048;
/// Tiles in memory at once, unless told.
const TILE_BUFFERS: usize = 4;

/// A home away from the device that computes.
#[derive(Clone)]
pub(crate) enum Home {
    Host(Device),
    /// Page-locked, for copies beside the work of a device.
    Locked(Device),
    Disk(Disk),
}

impl Home {
    pub(crate) fn zeros(&self, numel: usize, dtype: DType, category: Category) -> Result<Flat> {
        match self {
            Home::Host(host) => Ok(Flat::Memory(Tensor::zeros_in([numel], dtype, host, category)?)),
            Home::Locked(device) => match device.locked(numel, dtype, category) {
                Ok(tensor) => {
                    // SAFETY: the memory was just taken, and nobody else knows it.
                    device.host().backend().fill(unsafe { Out::vouched(&tensor) }, 0.0)?;
                    Ok(Flat::Memory(tensor))
                }
                Err(why) => {
                    tracing::warn!(
                        "offload_param: {numel} weights are in ordinary memory, not page-locked: {why}"
                    );
                    Home::Host(device.host().clone()).zeros(numel, dtype, category)
                }
            },
            Home::Disk(disk) => disk.zeros(numel, dtype),
        }
    }
}

/// Where state is at home.
#[derive(Clone)]
pub struct Homes {
    states: Option<Home>,
    values: Option<Home>,
    /// The share of the states that is moved.
    ratio: f64,
    /// Elements of what kernels read that the host's memory still takes before a disk does.
    left_in_host: Arc<AtomicU64>,
    buffers: Option<usize>,
    reads: usize,
    /// Page-locked buffers for tiles that wait for the next step, where such are wanted.
    locked: Option<Arc<Mutex<Vec<Buffer>>>>,
    /// Room for what goes between a GPU and its host.
    rooms: Rooms,
    /// Whether gradients go to the host while backward goes on.
    gradients_leave: bool,
}

impl Default for Homes {
    fn default() -> Homes {
        Homes {
            states: None,
            values: None,
            ratio: 1.0,
            left_in_host: Arc::default(),
            buffers: None,
            reads: 1,
            locked: None,
            rooms: Rooms::default(),
            gradients_leave: false,
        }
    }
}

impl Homes {
    /// All states on a disk, so many tiles at a time in memory.
    pub(crate) fn on(disk: Disk, buffers: usize) -> Homes {
        Homes { states: Some(Home::Disk(disk)), buffers: Some(buffers), ..Homes::default() }
    }

    /// As the configuration says, for a rank that computes on this device.
    pub fn from_config(zero: &Zero, aio: &AsyncIo, device: &Device) -> Homes {
        let queue = queue_options(aio);
        let on_host = || (!device.backend().is_host()).then(|| Home::Host(device.host().clone()));
        let mut homes = Homes { ratio: zero.offload_optimizer.ratio, ..Homes::default() };
        homes.states = match &zero.offload_optimizer.tier {
            OptimizerTier::Device => None,
            OptimizerTier::Host(_) => on_host(),
            OptimizerTier::Nvme { buffers, .. } => {
                homes.buffers = Some(clamped(buffers.count));
                homes.locked = buffers.pinned.then(Arc::default);
                Some(Home::Disk(Disk::new("offload_optimizer", &buffers.path, queue, device)))
            }
        };
        homes.gradients_leave = zero.offload_optimizer.tier.is_pinned();
        // Only stage 3 brings kernels what they read when they need it.
        homes.values = match &zero.offload_param.tier {
            _ if zero.stage != Stage::Parameters => None,
            ParameterTier::Device => None,
            ParameterTier::Host(buffers) if buffers.pinned => on_host().map(|_| Home::Locked(device.clone())),
            ParameterTier::Host(_) => on_host(),
            ParameterTier::Nvme { buffers, max_in_cpu, .. } => {
                homes.left_in_host = Arc::new(AtomicU64::new(*max_in_cpu));
                homes.reads = clamped(buffers.count).max(1);
                Some(Home::Disk(Disk::new("offload_param", &buffers.path, queue, device)))
            }
        };
        // Weights that are not on the GPU are updated by the host.
        if homes.values.is_some() && homes.states.is_none() {
            homes.states = on_host();
        }
        homes
    }

    /// The home of f32 weights and optimizer states, where it is not the device.
    pub(crate) fn states(&self) -> Option<&Home> {
        self.states.as_ref()
    }

    /// How many of a share's states are moved: the first ones, in whole tiles of the smallest size.
    pub(crate) fn moved_numel(&self, numel: usize) -> usize {
        let moved = (numel as f64 * self.ratio) as usize;
        if moved >= numel { numel } else { moved - moved % TILE_UNIT }
    }

    /// How many of a share's values the host's memory takes before the disk does. Each one is granted once.
    pub(crate) fn host_numel(&self, numel: usize) -> usize {
        let taken = |left: u64| {
            let taken = usize::try_from(left).unwrap_or(usize::MAX).min(numel);
            if taken == numel { numel } else { taken - taken % TILE_UNIT }
        };
        let update = |left| Some(left - taken(left) as u64);
        let left = self.left_in_host.fetch_update(Ordering::Relaxed, Ordering::Relaxed, update);
        left.map_or(0, taken)
    }

    /// Whether gradients go to the host while backward goes on, where it updates all of them.
    pub(crate) fn gradients_leave(&self) -> bool {
        self.gradients_leave
    }

    pub(crate) fn rooms(&self) -> &Rooms {
        &self.rooms
    }

    /// Parameters that are read from a disk at once.
    pub(crate) fn reads(&self) -> usize {
        self.reads
    }

    /// The home of what kernels read, where it is not the device.
    pub(crate) fn values(&self) -> Option<&Home> {
        self.values.as_ref()
    }

    /// Elements that are updated at a time.
    pub(crate) fn tile_numel(&self, sub_group_size: u64) -> usize {
        (sub_group_size.clamp(1, LARGEST_TILE) as usize).next_multiple_of(TILE_UNIT)
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
        self.states.iter().chain(&self.values).filter_map(|home| match home {
            Home::Disk(disk) => Some(disk),
            Home::Host(_) | Home::Locked(_) => None,
        })
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
