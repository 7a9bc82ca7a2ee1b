//! The store behind every ZeRO stage.
//!
//! [`ZeroStore::attach`] decides where each parameter of a model lives and fills it; afterwards the model runs on its
//! handles, gradients flow into the reducer, and [`ZeroStore::step`](crate::step) updates this rank's share.
//!
//! Parameters hold what they are attached to, so that must not hold them: a circle is never freed. Hence two parts. The
//! store knows the handles and is held by whoever trains; [`Attached`] knows places and shapes and is held by both. With
//! the store go gradients and optimizer states; weights stay readable until the last handle goes.

mod gathered;
mod members;
mod options;
mod share;

pub use options::{ParamGroup, StoreOptions, data_type, group_facts};
pub(crate) use share::Share;

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};

use ferrospeed_collective::hops::Hops;
use ferrospeed_comm::{Group, World};
use ferrospeed_config::Stage;
use ferrospeed_optim::{GroupOptions, Optimizer};
use ferrospeed_placement::{Placement, Publish};
use ferrospeed_tensor::store::ParamSource;
use ferrospeed_tensor::{DType, Device, Param, Tensor};

use crate::attached::{Attached, State};
use crate::error::{Result, ZeroError};
use crate::hold::Holds;
use crate::home::Flat;
use crate::homes::Homes;
use crate::one_bit::Compressing;
use crate::publish::Publishing;
use crate::quantized_gradients;
use crate::reducer::{Reducer, Road};
use crate::residency::{Pass, Residency};
use crate::sharding::Sharding;
use gathered::{awaited, residency};
use members::{agree, kinds, leaves, places, spreads};
use options::{Known, placement, road};
use share::build_share;

/// What a common disk may be written in its life.
const DISK_LIFE_BYTES: u64 = 600_000_000_000_000;

/// The store. See the module's documentation.
pub struct ZeroStore {
    pub(crate) world: World,
    pub(crate) sharding: Sharding,
    pub(crate) device: Device,
    pub(crate) stage: Stage,
    pub(crate) dtype: DType,
    pub(crate) optimizer: Option<Optimizer>,
    pub(crate) params: Vec<Param>,
    /// The parameters of every trained group.
    pub(crate) groups: Vec<Vec<usize>>,
    /// The ranks that decide together whether and how to step, where each holds a part.
    pub(crate) agreement: Option<Group>,
    /// Whether those hold parts of different models, so that a parameter's number means nothing to the others.
    pub(crate) parts_differ: bool,
    /// Where each parameter is among `params`, by its number.
    indices: HashMap<u64, usize>,
    /// What the parameters hold as well.
    attached: Arc<Attached>,
    homes: Homes,
    /// Who holds what, where, and what a step does.
    pub(crate) placement: Placement,
    /// How new values reach all ranks beside the next forward.
    pub(crate) publishing: Option<Publishing>,
    /// Whether what kernels read may be less exact than what ranks keep.
    pub(crate) gathers_quantized: bool,
    /// Who copies weights and states, which therefore must not change.
    pub(crate) holds: Holds,
}

impl ZeroStore {
    /// Lays out, allocates, fills and attaches. All ranks call it together, with the same parameters in the same order.
    ///
    /// `params` are all parameters of the model; those that are in no group are kept but not trained.
    pub fn attach(
        world: &World,
        device: &Device,
        params: &[Param],
        groups: &[ParamGroup],
        options: &StoreOptions<'_>,
        source: &dyn ParamSource,
    ) -> Result<Arc<ZeroStore>> {
        let compressing = Compressing::new(options, device)?;
        let indices: HashMap<u64, usize> =
            params.iter().enumerate().map(|(index, param)| (param.id(), index)).collect();
        let places = places(&indices, params.len(), groups)?;
        let leaves = leaves(params, &indices, options.leaf_modules)?;
        let stage = options.zero.stage;
        let spreads = spreads(params, &indices, options)?;
        let shardings: Vec<&Sharding> =
            std::iter::once(&options.sharding).chain(options.elsewhere.iter().map(|e| &e.sharding)).collect();
        for (spread, sharding) in shardings.iter().enumerate() {
            agree(sharding, params.iter().zip(&spreads).filter(|(_, of)| **of == spread).map(|(p, _)| p))?;
        }

        let (in_rows, kinds) = kinds(params, &leaves, options);
        let known = Known { params, places: &places, spreads: &spreads, kinds: &kinds };
        let placement = placement(options, &known, groups, &shardings, device, world.size());
        tracing::debug!("placement of rank {}:\n{placement}", world.rank());

        let mut shares = Vec::with_capacity(placement.shares.len());
        for placed in &placement.shares {
            // What nobody trains has no options.
            let untrained = GroupOptions { lr: 0.0, weight_decay: 0.0, betas: [0.0; 2] };
            let group_options = groups.get(placed.group).map_or(untrained, |group| group.options);
            let sharding = shardings[placed.spread];
            shares.push(build_share(device, params, placed, group_options, sharding, options, source)?);
        }
        let mut group_members: Vec<Vec<usize>> = vec![Vec::new(); groups.len()];
        for (group, members) in group_members.iter_mut().enumerate() {
            let of_group = shares.iter().filter(|share| share.placed.group == group);
            members.extend(of_group.flat_map(|share| share.placed.params.iter().copied()));
            members.sort_by_key(|&param| places[param].1);
        }
        let sharding = &options.sharding;
        let shapes = params.iter().map(|param| (*param.shape(), options.dtype)).collect();
        let quantized = stage == Stage::Parameters && options.zero.quantized_gradients;
        // Once for each way of being spread, since ranks may have to make groups for it.
        let hops = |sharding: &&Sharding| match quantized {
            true => quantized_gradients::hops(world, sharding),
            false => Ok(None),
        };
        let hops: Vec<Option<Hops>> = shardings.iter().map(hops).collect::<Result<_>>()?;
        let trained = || shares.iter().filter(|share| share.placed.trained);
        let roads: Vec<Road> = trained()
            .map(|share| road(options, &share.sharding, hops[share.placed.spread].clone()))
            .collect();
        let part_numels: Vec<usize> = trained().map(|share| share.placed.layout.part_numel).collect();
        let (gradients, buckets) = (placement.gradients.clone(), placement.buckets.clone());
        let reducer = Reducer::new(roads, gradients, buckets, &part_numels, shapes, device)?;
        let positions = placement.seats.clone();
        let residency = if stage == Stage::Parameters {
            Some(residency(world, device, params, &positions, &shares, &leaves, options)?)
        } else {
            None
        };

        let publishing = match placement.program.publish() {
            Publish::Stretches => Some(Publishing::open(world, sharding, device)?),
            Publish::Nothing | Publish::Gather | Publish::DropCopies => None,
        };
        let shapes = params.iter().map(|param| *param.shape()).collect();
        let mut state = State { shares, reducer, residency, compressing };
        state.expect_step();
        let awaited = awaited(&state, &positions);
        let attached = Arc::new(Attached::new(shapes, positions, in_rows, awaited, state));
        for (index, param) in params.iter().enumerate() {
            param.attach(attached.clone(), index, options.dtype)?;
        }
        let split = (stage != Stage::Off).then(|| sharding.shard.clone());
        let store = Arc::new(ZeroStore {
            world: world.clone(),
            sharding: sharding.clone(),
            groups: group_members,
            agreement: options.agreement.clone().or(split).filter(|group| group.size() > 1),
            parts_differ: options.agreement.is_some(),
            device: device.clone(),
            stage,
            dtype: options.dtype,
            optimizer: options.optimizer.clone(),
            params: params.to_vec(),
            indices,
            attached,
            homes: options.homes.clone(),
            publishing,
            placement,
            gathers_quantized: stage == Stage::Parameters && options.zero.quantized_weights,
            holds: Holds::default(),
        });
        store.tell_wear();
        Ok(store)
    }

    /// The state, when nothing works on it beside the caller. What neither reads nor changes weights, states or gradients
    /// takes the lock of [`Attached`] and waits for nobody.
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.attached.updates.wait_for_end();
        self.attached.lock()
    }

    /// Waits until all that a step has queued is done, and tells how it ended.
    pub fn settle(&self, call: &'static str) -> Result<()> {
        self.attached.updates.settle(call)
    }

    /// Refuses to write values that a tensor of the program still looks at.
    pub(crate) fn refuse_while_borrowed(&self, call: &'static str) -> Result<()> {
        match self.attached.first_borrowed() {
            None => Ok(()),
            Some((index, read_at)) => {
                Err(ZeroError::Borrowed { call, name: self.params[index].name().into(), read_at })
            }
        }
    }

    /// The value of a parameter for an owner who looks at it all the time, as the tensors of another framework do: no borrow, which
    /// every step would refuse. `None` where values come and go (stage 3), or kernels see something else in their place.
    ///
    /// # Safety
    /// While a call of this store that changes weights runs (a step until it is settled, a load, a set), nobody reads or writes the
    /// tensor; and nobody writes it otherwise, since ranks of a host may have it in common.
    pub unsafe fn unguarded(&self, param: &Param) -> Result<Option<Tensor>> {
        let index = self.index_of(param)?;
        self.settle("reading a parameter")?;
        self.attached.unguarded(index)
    }

    pub(crate) fn homes(&self) -> &Homes {
        &self.homes
    }

    pub(crate) fn attached(&self) -> &Attached {
        &self.attached
    }

    /// (group, index in the group) of every parameter.
    pub(crate) fn places(&self) -> &[(usize, usize)] {
        &self.attached.places
    }

    pub(crate) fn index_of(&self, param: &Param) -> Result<usize> {
        self.indices.get(&param.id()).copied().ok_or_else(|| ZeroError::Parameter {
            name: param.name().into(),
            why: "does not belong to this model".into(),
        })
    }

    /// From now on micro-batches are added up before a step, in this type. Not while gradients wait for one.
    pub fn accumulate_in(&self, kept: DType) -> Result<()> {
        self.lock().reducer.accumulate_in(kept)
    }

    /// Who holds what of the model's state, where, and what a step does to it.
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// All parameters.
    pub fn params(&self) -> &[Param] {
        &self.params
    }

    /// The ranks that share the model's state.
    pub fn world(&self) -> &World {
        &self.world
    }

    /// Over which of them it is spread.
    pub fn sharding(&self) -> &Sharding {
        &self.sharding
    }

    /// Where this rank computes.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The update rule.
    pub fn optimizer(&self) -> Option<Optimizer> {
        self.optimizer.clone()
    }

    /// The trained group that a parameter is in.
    pub fn group_of(&self, param: &Param) -> Option<usize> {
        let index = self.indices.get(&param.id())?;
        self.groups.iter().position(|members| members.contains(index))
    }

    /// The type kernels read weights in.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Tells the store that a pass begins, so that stage 3 can follow the right order of reads.
    pub fn begin_pass(&self, pass: Pass) {
        if pass != Pass::Train {
            // It may be one of many, which are better off gathering ahead.
            self.attached.updates.wait_for_end();
        }
        if let Some(residency) = &mut self.attached.lock().residency {
            residency.fetches_ahead |= pass != Pass::Train;
            residency.begin(pass);
        }
    }

    /// With `false`, gradients of the following backward wait for the next synchronised one instead of being reduced.
    pub fn set_synchronize(&self, synchronize: bool) {
        self.attached.synchronize.store(synchronize, Ordering::Relaxed);
    }

    /// Begins a backward; `last` says whether a step comes after it. In stages 0 and 1 the gradients of the others are
    /// only added up.
    pub fn begin_backward(&self, last: bool) -> Result<()> {
        self.settle("backward")?;
        let mut state = self.lock();
        if let Some(residency) = &mut state.residency {
            residency.fetches_ahead = true;
        }
        state.reducer.begin(last)
    }

    /// Ends a backward: all gradients are reduced when it returns, or added up where that is left to the last
    /// micro-batch, or kept apart where synchronisation is off.
    pub fn finish_backward(&self) -> Result<()> {
        if !self.attached.synchronize.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.lock().reducer.finish()
    }

    /// The options of every trained group.
    pub fn group_options(&self) -> Vec<GroupOptions> {
        let state = self.attached.lock();
        let of_group =
            |group| state.shares.iter().find(|share| share.placed.group == group).map(|share| share.options);
        (0..self.groups.len()).filter_map(of_group).collect()
    }

    /// Changes the options of a trained group, as schedules do.
    pub fn set_group_options(&self, group: usize, options: GroupOptions) {
        if group < self.groups.len() {
            let mut state = self.attached.lock();
            state
                .shares
                .iter_mut()
                .filter(|share| share.placed.group == group)
                .for_each(|s| s.options = options);
        }
    }

    /// Lets go of every parameter that stage 3 holds whole.
    pub fn empty_partition_cache(&self) -> Result<()> {
        match &mut self.lock().residency {
            Some(residency) => residency.clear(),
            None => Ok(()),
        }
    }

    /// Refuses to work with weights of which a step has changed only a part, because a disk failed.
    pub fn check_stepped(&self, call: &'static str) -> Result<()> {
        self.attached.updates.check(call)
    }

    /// What each step writes to the disks that hold this rank's state.
    pub fn disk_bytes_per_step(&self) -> u64 {
        let state = self.attached.lock();
        let trained = state.shares.iter().filter(|share| share.placed.trained);
        trained
            .flat_map(|share| share.master.iter().chain(&share.states).chain(std::iter::once(&share.values)))
            .map(Flat::disk_bytes)
            .sum()
    }

    /// Says what each step writes to disks, and how long one lasts that way.
    fn tell_wear(&self) {
        let bytes = self.disk_bytes_per_step();
        if bytes > 0 && self.world.rank() == 0 {
            let gigabytes = bytes as f64 / 1e9;
            let steps = DISK_LIFE_BYTES / bytes;
            tracing::info!(
                "each step of a rank writes {gigabytes:.3} GB of offloaded state to its disk: one that may be written 600 TB in its life takes {steps} steps"
            );
        }
    }

    /// What has gone to and from the disks that hold state.
    pub fn disk_traffic(&self) -> ferrospeed_io::Traffic {
        self.homes.traffic()
    }

    /// Notes when each transfer from and to these disks runs: so many of each at most.
    pub fn keep_disk_spans(&self, most: usize) {
        self.homes.keep_spans(most);
    }

    /// What was noted, with the section of the configuration that put the state there; nothing more is.
    pub fn take_disk_spans(&self) -> Vec<(&'static str, ferrospeed_io::IoSpan)> {
        self.homes.take_spans()
    }

    /// The most elements stage 3 ever held whole at once; 0 in other stages.
    pub fn peak_live_numel(&self) -> u64 {
        self.attached.lock().residency.as_ref().map_or(0, Residency::peak_live_numel)
    }
}

impl Drop for ZeroStore {
    fn drop(&mut self) {
        self.lock().retire();
    }
}
