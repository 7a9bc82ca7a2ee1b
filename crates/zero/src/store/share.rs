//! This rank's share of some parameters: how it is laid out, where it lies, and how it is made.

use std::ops::Range;

use ferrospeed_collective::hops::Run;
use ferrospeed_collective::packing::Packing;
use ferrospeed_comm::Group;
use ferrospeed_config::{Stage, Zero};
use ferrospeed_optim::{GroupOptions, Optimizer};
use ferrospeed_tensor::store::ParamSource;
use ferrospeed_tensor::{Category, DType, Device, Param, Tensor};

use super::StoreOptions;
use crate::error::Result;
use crate::fill;
use crate::home::Flat;
use crate::homes::Home;
use crate::memory::{common, part, reachable};
use crate::packed::Packed;
use crate::partition::{Layout, persistent};
use crate::sharding::{Ownership, Sharding};

/// Parameters of one group that are spread in one way: this rank's share of them.
pub(crate) struct Share {
    /// Which group; the one after the last is what nobody trains.
    pub(crate) group: usize,
    pub(crate) options: GroupOptions,
    pub(crate) sharding: Sharding,
    /// Who owns which part.
    pub(crate) ownership: Ownership,
    /// Whether norms count this rank's part.
    pub(crate) counted: bool,
    /// Indices among all parameters, in the order of the layout's indices.
    pub(crate) params: Vec<usize>,
    pub(crate) layout: Layout,
    /// What kernels read: everything below stage 3, this rank's part in stage 3.
    pub(crate) values: Flat,
    /// Where this rank's part starts in `values`.
    pub(crate) own_start: usize,
    /// f32 weights of this rank's part; `None` when `values` are f32 themselves.
    pub(crate) master: Option<Flat>,
    /// The optimizer's states for this rank's part.
    pub(crate) states: Vec<Flat>,
    /// Whether any of these are elsewhere than where kernels work.
    pub(crate) is_away: bool,
    /// How many elements, from the first on, are updated by the host tile by tile; the others stay with the device.
    pub(crate) moved: usize,
    /// Elements that are updated at a time where they are, and how many such tiles may be in memory.
    pub(crate) tile: usize,
    pub(crate) tile_buffers: usize,
    /// Steps taken.
    pub(crate) steps: u64,
    pub(crate) trained: bool,
}

impl Share {
    /// This rank's part of the values, where they are in memory.
    pub(crate) fn own_values(&self) -> Result<Tensor> {
        part(self.values.memory()?, self.own_start, self.layout.part_numel)
    }

    /// What of this rank's part is updated where kernels work.
    pub(crate) fn kept(&self) -> Range<usize> {
        if self.is_away { self.moved..self.layout.part_numel } else { 0..self.layout.part_numel }
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
            None => self.values.read(self.own_start + start, len, device),
        }
    }

    /// Where this rank's f32 weights are, and from where on.
    pub(crate) fn weights(&self) -> (&Flat, usize) {
        match &self.master {
            Some(master) => (master, 0),
            None => (&self.values, self.own_start),
        }
    }

    /// The ranks that own a part each; `None` where every rank owns everything.
    pub(crate) fn owners(&self) -> Option<&Group> {
        self.ownership.owners.as_ref()
    }

    /// This rank's f32 weights.
    pub(crate) fn own_master(&self) -> Result<Tensor> {
        match &self.master {
            Some(master) => Ok(master.memory()?.clone()),
            None => self.own_values(),
        }
    }
}

/// Which part of a share this rank owns.
pub(crate) fn owner_in(share: &Share) -> usize {
    share.owners().map_or(0, Group::rank)
}

pub(super) fn build_share(
    device: &Device,
    params: &[Param],
    list: Vec<usize>,
    group: usize,
    group_options: GroupOptions,
    trained: bool,
    sharding: &Sharding,
    options: &StoreOptions<'_>,
    source: &dyn ParamSource,
) -> Result<Share> {
    let stage = options.zero.stage;
    let ownership = sharding.ownership(stage, trained);
    let (ranks, rank) = ownership.owners.as_ref().map_or((1, 0), |owners| (owners.size(), owners.rank()));
    let numels: Vec<usize> = list.iter().map(|&param| params[param].numel()).collect();
    let layout = match stage {
        Stage::Parameters => Layout::per_parameter(&numels, ranks),
        _ => Layout::flat(&numels, ranks, options.zero.round_robin_gradients),
    };
    let (values_numel, own_start) = match stage {
        Stage::Parameters => (layout.part_numel, 0),
        _ => (layout.part_numel * layout.ranks, rank * layout.part_numel),
    };
    // Below stage 3 all owners read the same weights and each updates its own part of them.
    let (place, among): (fn(&Group, _, _, &_, _) -> _, _) = match &ownership.owners {
        Some(owners) if stage != Stage::Parameters => (common, owners),
        // What nobody trains is written here, and never again.
        None if !trained && stage != Stage::Parameters => (common, &sharding.shard),
        _ => (reachable, &sharding.shard),
    };
    let homes = &options.homes;
    let (dtype, category) = (options.dtype, Category::Parameters);
    let near = |numel| Ok(Flat::Memory(place(among, numel, dtype, device, category)?));
    let values = match homes.values() {
        Some(home @ Home::Disk(_)) => {
            let in_host = homes.host_numel(values_numel);
            let host = |numel| match device.backend().is_host() {
                true if numel == values_numel => near(numel),
                true => Ok(Flat::Memory(Tensor::zeros_in([numel], dtype, device, category)?)),
                false => Home::Host(device.host().clone()).zeros(numel, dtype, category),
            };
            Flat::split(values_numel, in_host, host, |numel| home.zeros(numel, dtype, category))?
        }
        Some(home) => home.zeros(values_numel, dtype, category)?,
        None => near(values_numel)?,
    };
    let names = options
        .optimizer
        .as_ref()
        .filter(|_| trained)
        .map_or(&[][..], |optimizer| optimizer.state_names(&group_options));
    // A rule that only the host knows needs all of its states there.
    let rule_is_the_hosts = options.optimizer.as_ref().is_some_and(Optimizer::is_of_the_host);
    let moved = match homes.states() {
        Some(_) if device.backend().is_host() || !rule_is_the_hosts => homes.moved_numel(layout.part_numel),
        _ => layout.part_numel,
    };
    let kept = |numel| Ok(Flat::Memory(Tensor::zeros_in([numel], DType::F32, device, Category::Optimizer)?));
    let state = || match homes.states() {
        Some(home) => {
            let away = |numel| home.zeros(numel, DType::F32, Category::Optimizer);
            Flat::split(layout.part_numel, moved, away, kept)
        }
        None => kept(layout.part_numel),
    };
    // Weights that kernels do not read where the update works have a copy there.
    let updates_elsewhere = homes.states().is_some() && moved > 0;
    let apart = dtype != DType::F32 || !values.is_here(device.host()) && updates_elsewhere;
    let master = (trained && (apart || !values.is_here(device))).then(state).transpose()?;
    let states = names.iter().map(|_| state()).collect::<Result<Vec<_>>>()?;
    let is_away = !values.is_here(device) || master.iter().chain(&states).any(|flat| !flat.is_here(device));
    // With several kinds of shares in one norm, one holder of each part counts it.
    let first = ownership.holder == 0;
    let mut share = Share {
        group,
        counted: options.agreement.is_none() || (sharding.counted && first),
        sharding: sharding.clone(),
        ownership,
        options: group_options,
        params: list,
        layout,
        values,
        own_start,
        master,
        states,
        is_away,
        moved,
        tile: homes.tile_numel(options.zero.sub_group_size),
        tile_buffers: homes.tile_buffers(),
        steps: 0,
        trained,
    };
    fill::fill(&share, params, stage, source, device.host())?;
    let freezes = stage == Stage::Parameters && options.zero.quantized_nontrainable_weights;
    if freezes && !trained && matches!(share.values, Flat::Memory(_)) {
        pack(&mut share, params, &stays_whole(params, options.zero))?;
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

/// Keeps a share's values as integers, where they are large.
fn pack(share: &mut Share, params: &[Param], stays: &[bool]) -> Result<()> {
    let values = Flat::memory(&share.values)?.clone();
    let ranks = share.sharding.shard.size();
    let run = |&param: &usize| {
        let small = stays[param] || params[param].shape().dims() < 2;
        let packing = if small { Packing::Exact } else { Packing::Eight };
        Run { numel: params[param].numel().div_ceil(ranks), packing }
    };
    let runs: Vec<Run> = share.params.iter().map(run).collect();
    share.values = Flat::Packed(Packed::new(&values, &runs)?);
    Ok(())
}
