//! This rank's share of some parameters: how it is laid out, where it lies, and how it is made.

use std::ops::Range;

use ferrospeed_collective::hops::Run;
use ferrospeed_collective::packing::Packing;
use ferrospeed_comm::Group;
use ferrospeed_config::Zero;
use ferrospeed_optim::GroupOptions;
use ferrospeed_placement as placement;
use ferrospeed_placement::layout::persistent;
use ferrospeed_placement::stage::{Extent, rules};
use ferrospeed_tensor::store::ParamSource;
use ferrospeed_tensor::{Category, Device, Param, Tensor};

use super::StoreOptions;
use crate::error::Result;
use crate::fill;
use crate::home::Flat;
use crate::memory::{part, zeros};
use crate::packed::Packed;
use crate::sharding::Sharding;

/// Parameters of one group that are spread in one way: this rank's share of them.
pub(crate) struct Share {
    /// What it is, and where its tiles are.
    pub(crate) placed: placement::Share,
    pub(crate) options: GroupOptions,
    pub(crate) sharding: Sharding,
    /// What kernels read: everything below stage 3, this rank's part in stage 3.
    pub(crate) values: Flat,
    /// f32 weights of this rank's part; `None` when `values` are f32 themselves.
    pub(crate) master: Option<Flat>,
    /// The optimizer's states for this rank's part.
    pub(crate) states: Vec<Flat>,
    /// How many stretches of what is updated where it is may be in memory.
    pub(crate) tile_buffers: usize,
    /// Steps taken.
    pub(crate) steps: u64,
}

impl Share {
    /// This rank's part of the values, where they are in memory.
    pub(crate) fn own_values(&self) -> Result<Tensor> {
        part(self.values.memory()?, self.placed.own_start, self.placed.layout.part_numel)
    }

    /// What of this rank's part is updated where kernels work.
    pub(crate) fn kept(&self) -> Range<usize> {
        self.placed.stays_updated()
    }

    /// The optimizer's states of that.
    pub(crate) fn kept_states(&self) -> Result<Vec<Tensor>> {
        if self.kept().is_empty() {
            return Ok(Vec::new());
        }
        self.states.iter().map(|state| state.rest().memory().cloned()).collect()
    }

    /// Its f32 weights, from an element of the part on.
    pub(crate) fn kept_weights(&self, start: usize, len: usize, device: &Device) -> Result<Tensor> {
        match &self.master {
            Some(master) => part(master.rest().memory()?, start - self.kept().start, len),
            None => self.values.read(self.placed.own_start + start, len, device),
        }
    }

    /// Where this rank's f32 weights are, and from where on.
    pub(crate) fn weights(&self) -> (&Flat, usize) {
        match &self.master {
            Some(master) => (master, 0),
            None => (&self.values, self.placed.own_start),
        }
    }

    /// The ranks that own a part each; `None` where every rank owns everything.
    pub(crate) fn owners(&self) -> Option<&Group> {
        self.sharding.owners(self.placed.owners)
    }

    /// This rank's f32 weights.
    pub(crate) fn own_master(&self) -> Result<Tensor> {
        match &self.master {
            Some(master) => Ok(master.memory()?.clone()),
            None => self.own_values(),
        }
    }
}

/// Makes and fills what is placed.
pub(super) fn build_share(
    device: &Device,
    params: &[Param],
    placed: &placement::Share,
    group_options: GroupOptions,
    sharding: &Sharding,
    options: &StoreOptions<'_>,
    source: &dyn ParamSource,
) -> Result<Share> {
    let (homes, dtype) = (&options.homes, options.dtype);
    // Below stage 3 all owners read the same weights and each updates its own part of them.
    let is_whole = rules(options.zero.stage).values == Extent::Whole;
    let among = sharding.owners(placed.owners).filter(|_| is_whole).unwrap_or(&sharding.shard);
    let near = |numel, memory| zeros(memory, among, numel, dtype, device, Category::Parameters);
    let exact = placement::Flat { packed: None, ..placed.values.clone() };
    let mut share = Share {
        sharding: sharding.clone(),
        options: group_options,
        values: homes.values(&exact, dtype, device, near)?,
        master: placed.master.as_ref().map(|master| homes.states(master, device)).transpose()?,
        states: placed.states.iter().map(|state| homes.states(state, device)).collect::<Result<_>>()?,
        tile_buffers: homes.tile_buffers(),
        steps: 0,
        placed: placed.clone(),
    };
    fill::fill(&share, params, options.zero.stage, source, device.host())?;
    if let Some(runs) = &placed.values.packed {
        let packing = |is_exact| if is_exact { Packing::Exact } else { Packing::Eight };
        let run = |&(numel, is_exact): &(usize, bool)| Run { numel, packing: packing(is_exact) };
        let runs: Vec<Run> = runs.iter().map(run).collect();
        share.values = Flat::Packed(Packed::new(Flat::memory(&share.values)?, &runs)?);
    }
    Ok(share)
}

/// Which parameters stay whole between passes.
pub(super) fn stays_whole(params: &[Param], zero: &Zero) -> Vec<bool> {
    let numels: Vec<usize> = params.iter().map(Param::numel).collect();
    persistent(&numels, zero.param_persistence_threshold, zero.model_persistence_threshold)
}

/// Whether a parameter of a share is kept as integers.
pub(super) fn is_packed(share: &Share, param: &Param, stays_whole: bool) -> bool {
    matches!(share.values, Flat::Packed(_)) && !stays_whole && param.shape().dims() > 1
}
