//! Where the parts of a model's state are at home, by the configuration.
//!
//! `offload_optimizer` moves f32 weights and optimizer states, `offload_param` (stage 3) what kernels read. Host memory is
//! another home only for a rank that computes on a GPU; a disk is one for all.

use ferrospeed_config::{AsyncIo, OptimizerTier, ParameterTier, Stage, Zero};
use ferrospeed_io::{QueueOptions, Traffic};
use ferrospeed_tensor::{Category, DType, Device, Tensor};

use crate::error::Result;
use crate::home::{Disk, Flat};

/// The most elements of a tile, whatever `sub_group_size` says: larger ones are not faster, and take memory.
const LARGEST_TILE: u64 = 4 << 20;
/// Tiles begin at pages, in f32 and in 16 bits.
const TILE_UNIT: usize = 2048;
/// Tiles in memory at once, unless told.
const TILE_BUFFERS: usize = 4;

/// A home away from the device that computes.
#[derive(Clone)]
pub(crate) enum Home {
    Host,
    Disk(Disk),
}

impl Home {
    pub(crate) fn zeros(&self, numel: usize, dtype: DType, category: Category) -> Result<Flat> {
        match self {
            Home::Host => Ok(Flat::Memory(Tensor::zeros_in([numel], dtype, &Device::cpu(), category)?)),
            Home::Disk(disk) => disk.zeros(numel, dtype),
        }
    }
}

/// Where state is at home.
#[derive(Clone, Default)]
pub struct Homes {
    states: Option<Home>,
    values: Option<Home>,
    buffers: Option<usize>,
}

impl Homes {
    /// As the configuration says, for a rank that computes on this device.
    pub fn from_config(zero: &Zero, aio: &AsyncIo, device: &Device) -> Homes {
        let clamped = |value: u64| usize::try_from(value).unwrap_or(usize::MAX);
        let queue = QueueOptions {
            block_bytes: clamped(aio.block_size),
            depth: clamped(aio.queue_depth),
            threads: clamped(aio.thread_count),
            ..QueueOptions::default()
        };
        let on_host = || (!device.backend().is_host()).then_some(Home::Host);
        let mut homes = Homes::default();
        homes.states = match &zero.offload_optimizer.tier {
            OptimizerTier::Device => None,
            OptimizerTier::Host(_) => on_host(),
            OptimizerTier::Nvme { buffers, .. } => {
                homes.buffers = Some(clamped(buffers.count));
                Some(Home::Disk(Disk::new(&buffers.path, queue)))
            }
        };
        homes.values = match &zero.offload_param.tier {
            ParameterTier::Device => None,
            ParameterTier::Host(_) => on_host(),
            ParameterTier::Nvme { buffers, .. } => Some(Home::Disk(Disk::new(&buffers.path, queue))),
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

    /// The home of what kernels read: only stage 3 brings it to them when they need it.
    pub(crate) fn values(&self, stage: Stage) -> Option<&Home> {
        self.values.as_ref().filter(|_| stage == Stage::Parameters)
    }

    /// Elements that are updated at a time.
    pub(crate) fn tile_numel(&self, sub_group_size: u64) -> usize {
        (sub_group_size.clamp(1, LARGEST_TILE) as usize).next_multiple_of(TILE_UNIT)
    }

    /// How many tiles may be in memory.
    pub(crate) fn tile_buffers(&self) -> usize {
        self.buffers.unwrap_or(TILE_BUFFERS).max(1)
    }

    /// What has gone to and from disks.
    pub(crate) fn traffic(&self) -> Traffic {
        let mut sum = Traffic::default();
        for home in self.states.iter().chain(&self.values) {
            if let Home::Disk(disk) = home {
                let traffic = disk.queue().traffic();
                sum.read += traffic.read;
                sum.written += traffic.written;
                sum.waited += traffic.waited;
            }
        }
        sum
    }
}
