//! The store behind every ZeRO stage.
//!
//! [`ZeroStore::attach`] decides where each parameter of a model lives and fills it; afterwards the model runs on its
//! handles, gradients flow into the reducer, and [`ZeroStore::step`](crate::step) updates this rank's share.
//!
//! Parameters hold what they are attached to, so that must not hold them: a circle is never freed. Hence two parts. The
//! store knows the handles and is held by whoever trains; [`Attached`] knows places and shapes and is held by both. With
//! the store go gradients and optimizer states; weights stay readable until the last handle goes.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};

use ferrospeed_collective::hops::{Hops, Run};
use ferrospeed_collective::packing::Packing;
use ferrospeed_comm::{Group, World};
use ferrospeed_config::{Stage, Zero};
use ferrospeed_optim::{GroupOptions, Optimizer};
use ferrospeed_tensor::store::ParamSource;
use ferrospeed_tensor::{Category, DType, Device, Param, Tensor, Unit};

use crate::attached::{Attached, State};
use crate::buckets::{self, Kind};
use crate::error::{Result, ZeroError};
use crate::fill;
use crate::hold::Holds;
use crate::home::Flat;
use crate::homes::{Home, Homes};
use crate::memory::{common, part, reachable};
use crate::one_bit::Compressing;
use crate::packed::Packed;
use crate::partition::{Fragment, Layout, persistent};
use crate::quantized_gradients;
use crate::reducer::{ReduceOptions, Reducer, Road};
use crate::residency::{Limits, Pass, Residency, Sharded};
use crate::sharding::{Elsewhere, Sharding};
use crate::updates::Tile;

/// What a common disk may be written in its life.
const DISK_LIFE_BYTES: u64 = 600_000_000_000_000;

/// Parameters that share optimizer options.
#[derive(Debug, Clone)]
pub struct ParamGroup {
    /// The parameters, in order. Frozen ones are left alone.
    pub params: Vec<Param>,
    /// Their options.
    pub options: GroupOptions,
}

/// Everything a store must know.
pub struct StoreOptions<'a> {
    /// The `zero_optimization` section.
    pub zero: &'a Zero,
    /// The type kernels read weights in.
    pub dtype: DType,
    /// The type gradients travel in.
    pub wire: DType,
    /// The type reduced gradients are kept in.
    pub kept: DType,
    /// Whether micro-batches are added up before a step.
    pub accumulates: bool,
    /// `gradient_predivide_factor`.
    pub predivide: f64,
    /// `prescale_gradients`.
    pub prescale: bool,
    /// `sparse_gradients`: below stage 1, gradients of tables travel as rows.
    pub sparse_gradients: bool,
    /// Over which ranks state is spread.
    pub sharding: Sharding,
    /// What is spread in another way.
    pub elsewhere: &'a [Elsewhere],
    /// The ranks that hold different parts of one model (stages, slices, experts) and must come to one norm, and to one
    /// decision to step: all of them. `None` where every shard holds the whole model.
    pub agreement: Option<Group>,
    /// Whether every micro-batch is reduced when it ends, in stages 0 and 1 too, where once per step is enough.
    pub reduces_each_micro_batch: bool,
    /// Parameters that stage 3 gathers and releases together, by leaf module: parts that ranks read unlike each other.
    pub leaf_modules: &'a [Vec<Param>],
    /// The update rule; `None` when nothing is trained.
    pub optimizer: Option<Optimizer>,
    /// Where state is at home.
    pub homes: Homes,
}

/// Parameters of one group that are spread in one way: this rank's share of them.
pub(crate) struct Share {
    /// Which group; the one after the last is what nobody trains.
    pub(crate) group: usize,
    pub(crate) options: GroupOptions,
    pub(crate) sharding: Sharding,
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

    /// The optimizer's states, where they are in memory.
    pub(crate) fn in_memory(&self) -> Result<Vec<Tensor>> {
        self.states.iter().map(|state| state.memory().cloned()).collect()
    }

    /// Where this rank's f32 weights are, and from where on.
    pub(crate) fn weights(&self) -> (&Flat, usize) {
        match &self.master {
            Some(master) => (master, 0),
            None => (&self.values, self.own_start),
        }
    }

    /// This rank's number among those that hold the same part, and how many there are.
    pub(crate) fn holders(&self) -> (usize, usize) {
        let sharding = &self.sharding;
        if self.layout.ranks > 1 {
            return (sharding.copy(), sharding.copies());
        }
        (sharding.copy() * sharding.shard.size() + sharding.shard.rank(), sharding.ranks())
    }

    /// This rank's f32 weights.
    pub(crate) fn own_master(&self) -> Result<Tensor> {
        match &self.master {
            Some(master) => Ok(master.memory()?.clone()),
            None => self.own_values(),
        }
    }
}

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

        // The last group is what nobody trains.
        let mut group_members: Vec<Vec<usize>> = vec![Vec::new(); groups.len() + 1];
        places.iter().enumerate().for_each(|(param, &(group, _))| group_members[group].push(param));
        let mut shares = Vec::with_capacity(group_members.len());
        let mut positions = vec![(0, 0); params.len()];
        for (group, list) in group_members.iter_mut().enumerate() {
            list.sort_by_key(|&param| if group < groups.len() { places[param].1 } else { param });
            for (spread, sharding) in shardings.iter().enumerate() {
                let members: Vec<usize> =
                    list.iter().copied().filter(|&param| spreads[param] == spread).collect();
                // Every group has a share of the common kind, be it empty.
                if members.is_empty() && spread > 0 {
                    continue;
                }
                for (index, &param) in members.iter().enumerate() {
                    positions[param] = (shares.len(), index);
                }
                let group_options = groups
                    .get(group)
                    .map_or(GroupOptions { lr: 0.0, weight_decay: 0.0, betas: [0.0; 2] }, |g| g.options);
                let trained = group < groups.len();
                let share = build_share(
                    device,
                    params,
                    members,
                    group,
                    group_options,
                    trained,
                    sharding,
                    options,
                    source,
                )?;
                shares.push(share);
            }
        }
        group_members.truncate(groups.len());

        let trained: Vec<&Share> = shares.iter().filter(|share| share.trained).collect();
        let grouped: Vec<Vec<(usize, usize)>> = trained
            .iter()
            .map(|share| share.params.iter().map(|&param| (param, params[param].numel())).collect())
            .collect();
        let layouts: Vec<Layout> = trained.iter().map(|share| share.layout.clone()).collect();
        let owners: Vec<usize> = trained.iter().map(|share| owner_in(share)).collect();
        let sharding = &options.sharding;
        let rows = options.sparse_gradients
            && stage == Stage::Off
            && options.elsewhere.is_empty()
            && sharding.replicas.is_none()
            && sharding.ranks() > 1;
        let in_rows: Vec<bool> =
            params.iter().map(|param| rows && param.is_table() && param.shape().dims() == 2).collect();
        let mut kinds = vec![Kind::Ordinary; params.len()];
        leaves.iter().flatten().for_each(|&param| kinds[param] = Kind::Leaf);
        in_rows.iter().zip(&mut kinds).filter(|(rows, _)| **rows).for_each(|(_, kind)| *kind = Kind::Rows);
        // Ranks that share one way of being spread cut it into the same buckets, whatever else each of them holds.
        let common = |share: &&Share| spreads.get(share.params[0]) == Some(&0);
        let numel =
            |share: &Share| share.params.iter().map(|&param| params[param].numel() as u64).sum::<u64>();
        let filled = || trained.iter().copied().filter(|share| !share.params.is_empty());
        let common_numel: u64 = filled().filter(common).map(numel).sum();
        let limit_of = |share: &&Share| match share.params.first() {
            Some(_) if !common(share) => options.zero.bucket_numel(numel(share)),
            _ => options.zero.bucket_numel(common_numel),
        };
        let limits: Vec<u64> = trained.iter().map(limit_of).collect();
        let plan = buckets::plan(&grouped, &layouts, |param| kinds[param], &owners, &limits);
        let part_numels: Vec<usize> = layouts.iter().map(|layout| layout.part_numel).collect();
        let shapes = params.iter().map(|param| (*param.shape(), options.dtype)).collect();
        let quantized = stage == Stage::Parameters && options.zero.quantized_gradients;
        // Once for each way of being spread, since ranks may have to make groups for it.
        let ways =
            shardings.iter().map(|sharding| quantized.then(|| quantized_gradients::hops(world, sharding)));
        let ways: Vec<Option<Hops>> =
            ways.map(|hops| Ok(hops.transpose()?.flatten())).collect::<Result<_>>()?;
        let way = |share: &Share| share.params.first().and_then(|&param| ways[spreads[param]].clone());
        let roads: Vec<Road> =
            trained.iter().map(|share| road(options, &share.sharding, way(share))).collect();
        let reducer = Reducer::new(roads, reduce_options(options), plan, &part_numels, shapes, device)?;
        let residency = if stage == Stage::Parameters {
            Some(residency(world, device, params, &positions, &shares, &leaves, options)?)
        } else {
            None
        };

        let shapes = params.iter().map(|param| *param.shape()).collect();
        let mut state = State { shares, reducer, residency, compressing };
        state.expect_step();
        let awaited = awaited(&state, &positions);
        let attached = Arc::new(Attached::new(shapes, positions, in_rows, awaited, state));
        for (index, param) in params.iter().enumerate() {
            param.attach(attached.clone(), index, options.dtype)?;
        }
        let lamb = matches!(options.optimizer, Some(Optimizer::Lamb(_)));
        if let Some(share) = attached.lock().shares.iter().find(|share| share.is_away && lamb) {
            let name = share.params.first().map_or("", |&param| params[param].name());
            let why = "Lamb scales by the norms of whole parameters and does not work on state that is offloaded; use AdamW, Adam, Lion, Adagrad or SGD, or remove offload_optimizer and offload_param".to_owned();
            return Err(ZeroError::Parameter { name: name.into(), why });
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
    pub(crate) fn settle(&self, call: &'static str) -> Result<()> {
        self.attached.updates.settle(call)
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

    /// The type kernels read weights in.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Tells the store that a pass begins, so that stage 3 can follow the right order of reads.
    pub fn begin_pass(&self, pass: Pass) {
        if pass == Pass::Evaluate {
            // It may be one of many, which are better off gathering ahead.
            self.attached.updates.wait_for_end();
        }
        if let Some(residency) = &mut self.attached.lock().residency {
            residency.fetches_ahead |= pass == Pass::Evaluate;
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
            |group| state.shares.iter().find(|share| share.group == group).map(|share| share.options);
        (0..self.groups.len()).filter_map(of_group).collect()
    }

    /// Changes the options of a trained group, as schedules do.
    pub fn set_group_options(&self, group: usize, options: GroupOptions) {
        if group < self.groups.len() {
            let mut state = self.attached.lock();
            state.shares.iter_mut().filter(|share| share.group == group).for_each(|s| s.options = options);
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
        let trained = state.shares.iter().filter(|share| share.trained);
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

fn reduce_options(options: &StoreOptions<'_>) -> ReduceOptions {
    let stage = options.zero.stage;
    ReduceOptions {
        whole: stage == Stage::Off,
        keep_buffers: stage <= Stage::OptimizerStates,
        overlap: options.zero.overlap_comm,
        wire: options.wire,
        kept: options.kept,
        accumulates: options.accumulates,
        each_micro_batch: options.reduces_each_micro_batch,
    }
}

/// How the gradients of one way of being spread become their average.
fn road(options: &StoreOptions<'_>, sharding: &Sharding, hops: Option<Hops>) -> Road {
    let n = sharding.divisor as f64;
    // The plain average rounds once. A predivide factor f multiplies by 1/f before and f/n after; prescaling
    // multiplies by 1/n before.
    let (before, after) = if options.prescale {
        (1.0 / n, Some(1.0))
    } else if options.predivide != 1.0 {
        (1.0 / options.predivide, Some(options.predivide / n))
    } else if sharding.divisor != sharding.ranks() {
        (1.0, Some(1.0 / n))
    } else {
        (1.0, None)
    };
    Road { sharding: sharding.clone(), before: before as f32, after: after.map(|after| after as f32), hops }
}

/// Which part of a share this rank owns.
pub(crate) fn owner_in(share: &Share) -> usize {
    if share.layout.ranks > 1 { share.sharding.shard.rank() } else { 0 }
}

fn build_share(
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
    let (ranks, rank) = (sharding.shard.size(), sharding.shard.rank());
    let numels: Vec<usize> = list.iter().map(|&param| params[param].numel()).collect();
    let layout = match stage {
        Stage::Parameters => Layout::per_parameter(&numels, ranks),
        Stage::Off => Layout::whole(&numels),
        _ if trained => Layout::flat(&numels, ranks, options.zero.round_robin_gradients),
        _ => Layout::whole(&numels),
    };
    let (values_numel, own_start) = match stage {
        Stage::Parameters => (layout.part_numel, 0),
        _ => (layout.part_numel * layout.ranks, if layout.ranks > 1 { rank * layout.part_numel } else { 0 }),
    };
    // In stages 1 and 2 all ranks of a shard read the same weights and each updates its own part of them.
    let has_common = layout.ranks > 1 && stage != Stage::Parameters;
    let place = if has_common { common } else { reachable };
    let homes = &options.homes;
    let (dtype, category) = (options.dtype, Category::Parameters);
    let near = |numel| Ok(Flat::Memory(place(&sharding.shard, numel, dtype, device, category)?));
    let values = match homes.values() {
        Some(home @ Home::Disk(_)) => {
            let in_host = homes.host_numel(values_numel);
            let host = |numel| match device.backend().is_host() {
                true if numel == values_numel => near(numel),
                true => Ok(Flat::Memory(Tensor::zeros_in([numel], dtype, device, category)?)),
                false => Home::Host.zeros(numel, dtype, category),
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
    let apart = dtype != DType::F32 || !values.is_here(&Device::cpu()) && updates_elsewhere;
    let master = (trained && (apart || !values.is_here(device))).then(state).transpose()?;
    let states = names.iter().map(|_| state()).collect::<Result<Vec<_>>>()?;
    let is_away = !values.is_here(device) || master.iter().chain(&states).any(|flat| !flat.is_here(device));
    // With several kinds of shares in one norm, one holder of each part counts it.
    let first = sharding.copy() == 0 && (layout.ranks > 1 || sharding.shard.rank() == 0);
    let mut share = Share {
        group,
        counted: options.agreement.is_none() || (sharding.counted && first),
        sharding: sharding.clone(),
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
    fill::fill(&share, params, stage, source)?;
    let freezes = stage == Stage::Parameters && options.zero.quantized_nontrainable_weights;
    if freezes && !trained && matches!(share.values, Flat::Memory(_)) {
        pack(&mut share, params, &stays_whole(params, options.zero))?;
    }
    Ok(share)
}

/// What must be updated before each parameter is read, where updates may be queued.
fn awaited(state: &State, positions: &[(usize, usize)]) -> Vec<Vec<Tile>> {
    if !state.shares.iter().any(|share| share.is_away) {
        return Vec::new();
    }
    if let Some(residency) = &state.residency {
        return (0..positions.len()).map(|param| residency.stretches(param)).collect();
    }
    let own = |&(group, in_group): &(usize, usize)| {
        let share = &state.shares[group];
        let fragment = share.layout.fragment(in_group, owner_in(share));
        let stretch = |f: &Fragment| Tile { share: group, range: f.in_part..f.in_part + f.len };
        fragment.map(stretch).into_iter().collect()
    };
    positions.iter().map(own).collect()
}

/// Which parameters stay whole between passes.
fn stays_whole(params: &[Param], zero: &Zero) -> Vec<bool> {
    let numels: Vec<usize> = params.iter().map(Param::numel).collect();
    persistent(&numels, zero.param_persistence_threshold, zero.model_persistence_threshold)
}

/// Whether a parameter of a share is kept as integers.
fn is_packed(share: &Share, param: &Param, stays_whole: bool) -> bool {
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

fn residency(
    world: &World,
    device: &Device,
    params: &[Param],
    positions: &[(usize, usize)],
    shares: &[Share],
    leaves: &[Vec<usize>],
    options: &StoreOptions<'_>,
) -> Result<Residency> {
    let numels: Vec<usize> = params.iter().map(Param::numel).collect();
    let zero = options.zero;
    let stays = stays_whole(params, zero);
    // Parameters of one share lie end to end.
    let mut sharded: Vec<Sharded> = Vec::with_capacity(params.len());
    let mut filled = vec![0; shares.len()];
    let mut starts = vec![0; params.len()];
    for (share, filled) in shares.iter().zip(&mut filled) {
        for &param in &share.params {
            starts[param] = *filled;
            *filled += numels[param].div_ceil(share.sharding.shard.size());
        }
    }
    for (index, param) in params.iter().enumerate() {
        let flat = positions[index].0;
        sharded.push(Sharded {
            shape: *param.shape(),
            start: starts[index],
            share: param.numel().div_ceil(shares[flat].sharding.shard.size()),
            flat,
            persistent: stays[index],
            // What stays whole is small, and gathered once a step.
            quantized: is_packed(&shares[flat], param, stays[index])
                || zero.quantized_weights && !stays[index] && shares[flat].sharding.shard.size() > 1,
            kept_near: !stays[index] && shares[flat].sharding.shard.name() == options.sharding.shard.name(),
        });
    }
    for leaf in leaves {
        let group = |param: &usize| shares[positions[*param].0].sharding.shard.name().to_owned();
        if let Some(other) = leaf.iter().find(|param| group(param) != group(&leaf[0])) {
            return Err(ZeroError::Parameter {
                name: params[*other].name().into(),
                why: format!(
                    "is spread over {}, and '{}' of the same leaf module over {}: a leaf module is gathered at once",
                    group(other),
                    params[leaf[0]].name(),
                    group(&leaf[0])
                ),
            });
        }
    }
    let limits = Limits {
        prefetch: zero.prefetch_bucket_size,
        live: zero.max_live_parameters,
        reuse_distance: zero.max_reuse_distance,
        reads: options.homes.reads(),
        beside: matches!(options.homes.values(), Some(Home::Locked(_))),
    };
    let flats = shares.iter().map(|share| (share.sharding.shard.clone(), share.values.clone())).collect();
    let neighbours = options.sharding.neighbours(world, zero.hpz_partition_size)?;
    Ok(Residency::new(limits, sharded, leaves, flats, neighbours, options.dtype, device))
}

/// Which way every parameter is spread: 0 for the common one, then by `elsewhere`.
fn spreads(
    params: &[Param],
    indices: &HashMap<u64, usize>,
    options: &StoreOptions<'_>,
) -> Result<Vec<usize>> {
    let mut spreads = vec![0; params.len()];
    for (way, elsewhere) in options.elsewhere.iter().enumerate() {
        for member in &elsewhere.params {
            let fail = |why: &str| ZeroError::Parameter { name: member.name().into(), why: why.into() };
            let param = indices.get(&member.id()).copied();
            let param = param.ok_or_else(|| fail("is to be spread but is not in the model"))?;
            if spreads[param] != 0 {
                return Err(fail("is to be spread in more than one way"));
            }
            spreads[param] = way + 1;
        }
    }
    Ok(spreads)
}

/// (group, index in it) of every parameter; the group after the last is what nobody trains.
fn places(
    indices: &HashMap<u64, usize>,
    params: usize,
    groups: &[ParamGroup],
) -> Result<Vec<(usize, usize)>> {
    let mut places = vec![None; params];
    for (group, members) in groups.iter().enumerate() {
        for (index, member) in members.params.iter().enumerate() {
            let fail = |why: &str| ZeroError::Parameter { name: member.name().into(), why: why.into() };
            let param = indices.get(&member.id()).copied();
            let param = param.ok_or_else(|| fail("is in a group but not in the model"))?;
            if places[param].is_some() {
                return Err(fail("is in more than one group; give each parameter to one"));
            }
            if member.is_trainable() {
                places[param] = Some((group, index));
            }
        }
    }
    Ok(places.into_iter().map(|place| place.unwrap_or((groups.len(), 0))).collect())
}

/// The parameters of each leaf module by index, ascending: the units that the model was built with, and the modules that
/// were named. A unit within a named module becomes part of it.
fn leaves(
    params: &[Param],
    indices: &HashMap<u64, usize>,
    modules: &[Vec<Param>],
) -> Result<Vec<Vec<usize>>> {
    let mut units: BTreeMap<Unit, Vec<usize>> = BTreeMap::new();
    for (index, unit) in params.iter().enumerate().filter_map(|(index, param)| Some((index, param.unit()?))) {
        units.entry(unit).or_default().push(index);
    }
    let mut taken = HashSet::new();
    let mut leaves = Vec::with_capacity(modules.len());
    for module in modules.iter().filter(|module| !module.is_empty()) {
        let mut leaf = Vec::with_capacity(module.len());
        for member in module {
            let fail = |why: &str| ZeroError::Parameter { name: member.name().into(), why: why.into() };
            let param = indices.get(&member.id()).copied();
            let param = param.ok_or_else(|| fail("is in a leaf module but not in the model"))?;
            if !taken.insert(param) {
                return Err(fail("is in more than one leaf module; one must not lie in another"));
            }
            leaf.push(param);
            let unit = member.unit().and_then(|unit| units.remove(&unit)).unwrap_or_default();
            leaf.extend(unit);
        }
        leaf.sort_unstable();
        leaf.dedup();
        taken.extend(leaf.iter().copied());
        leaves.push(leaf);
    }
    leaves.extend(units.into_values());
    Ok(leaves)
}

/// Every rank that holds a share of these must have the same parameters in the same order.
fn agree<'a>(sharding: &Sharding, params: impl Iterator<Item = &'a Param>) -> Result<()> {
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    let mut mix = |bytes: &[u8]| {
        bytes.iter().for_each(|&byte| hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
    };
    let mut count = 0;
    for param in params {
        mix(param.name().as_bytes());
        param.shape().sizes().iter().for_each(|size| mix(&(*size as u64).to_le_bytes()));
        mix(&[u8::from(param.is_trainable())]);
        count += 1;
    }
    let own = [hash as i64, count];
    for group in std::iter::once(&sharding.shard).chain(&sharding.replicas).filter(|group| group.size() > 1) {
        let mut all = vec![0i64; 2 * group.size()];
        group.all_gather(&own, &mut all)?;
        for (theirs, &rank) in all.chunks(2).zip(group.ranks()) {
            if theirs[1] != all[1] {
                let what = format!("{} parameters, not {}", theirs[1], all[1]);
                return Err(ZeroError::Disagreement { rank, what });
            }
            if theirs[0] != all[0] {
                let what = "names, shapes or which are frozen".to_owned();
                return Err(ZeroError::Disagreement { rank, what });
            }
        }
    }
    Ok(())
}

impl Drop for ZeroStore {
    fn drop(&mut self) {
        self.lock().retire();
    }
}
