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

use ferrospeed_comm::World;
use ferrospeed_config::{Stage, Zero};
use ferrospeed_optim::{GroupOptions, Optimizer};
use ferrospeed_tensor::store::ParamSource;
use ferrospeed_tensor::{Category, DType, Device, Param, Tensor, Unit};

use crate::attached::{Attached, State};
use crate::buckets::{self, Kind};
use crate::error::{Result, ZeroError};
use crate::fill;
use crate::hold::Holds;
use crate::memory::{common, part, reachable};
use crate::partition::{Layout, persistent};
use crate::reducer::{ReduceOptions, Reducer};
use crate::residency::{Limits, Pass, Residency, Sharded};
use crate::sharding::Sharding;

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
    /// Parameters that stage 3 gathers and releases together, by leaf module: parts that ranks read unlike each other.
    pub leaf_modules: &'a [Vec<Param>],
    /// The update rule; `None` when nothing is trained.
    pub optimizer: Option<Optimizer>,
}

/// One group's share on this rank.
pub(crate) struct Share {
    pub(crate) options: GroupOptions,
    /// Indices among all parameters, in the order of the layout's indices.
    pub(crate) params: Vec<usize>,
    pub(crate) layout: Layout,
    /// What kernels read: everything below stage 3, this rank's part in stage 3.
    pub(crate) values: Tensor,
    /// Where this rank's part starts in `values`.
    pub(crate) own_start: usize,
    /// f32 weights of this rank's part; `None` when `values` are f32 themselves.
    pub(crate) master: Option<Tensor>,
    /// The optimizer's states for this rank's part.
    pub(crate) states: Vec<Tensor>,
    /// Steps taken.
    pub(crate) steps: u64,
    pub(crate) trained: bool,
}

impl Share {
    /// This rank's part of the values.
    pub(crate) fn own_values(&self) -> Result<Tensor> {
        part(&self.values, self.own_start, self.layout.part_numel)
    }

    /// This rank's f32 weights.
    pub(crate) fn own_master(&self) -> Result<Tensor> {
        match &self.master {
            Some(master) => Ok(master.clone()),
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
    /// Where each parameter is among `params`, by its number.
    indices: HashMap<u64, usize>,
    /// What the parameters hold as well.
    attached: Arc<Attached>,
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
        agree(world, params)?;
        let indices: HashMap<u64, usize> =
            params.iter().enumerate().map(|(index, param)| (param.id(), index)).collect();
        let places = places(&indices, params.len(), groups)?;
        let leaves = leaves(params, &indices, options.leaf_modules)?;
        let stage = options.zero.stage;
        let sharding = &options.sharding;

        // The last group is what nobody trains.
        let mut members: Vec<Vec<usize>> = vec![Vec::new(); groups.len() + 1];
        places.iter().enumerate().for_each(|(param, &(group, _))| members[group].push(param));
        for (group, list) in members.iter_mut().enumerate() {
            list.sort_by_key(|&param| if group < groups.len() { places[param].1 } else { param });
        }
        let mut positions = vec![(0, 0); params.len()];
        for (group, list) in members.iter().enumerate() {
            list.iter().enumerate().for_each(|(index, &param)| positions[param] = (group, index));
        }

        let mut shares = Vec::with_capacity(members.len());
        for (group, list) in members.into_iter().enumerate() {
            let group_options = groups
                .get(group)
                .map_or(GroupOptions { lr: 0.0, weight_decay: 0.0, betas: [0.0; 2] }, |g| g.options);
            let trained = group < groups.len();
            shares.push(build_share(world, device, params, list, group_options, trained, options, source)?);
        }

        let trained: Vec<&Share> = shares.iter().filter(|share| share.trained).collect();
        let grouped: Vec<Vec<(usize, usize)>> = trained
            .iter()
            .map(|share| share.params.iter().map(|&param| (param, params[param].numel())).collect())
            .collect();
        let layouts: Vec<Layout> = trained.iter().map(|share| share.layout.clone()).collect();
        let plan_rank = if stage == Stage::Off { 0 } else { sharding.shard.rank() };
        let rows = options.sparse_gradients
            && stage == Stage::Off
            && sharding.replicas.is_none()
            && sharding.ranks() > 1;
        let in_rows: Vec<bool> =
            params.iter().map(|param| rows && param.is_table() && param.shape().dims() == 2).collect();
        let mut kinds = vec![Kind::Ordinary; params.len()];
        leaves.iter().flatten().for_each(|&param| kinds[param] = Kind::Leaf);
        in_rows.iter().zip(&mut kinds).filter(|(rows, _)| **rows).for_each(|(_, kind)| *kind = Kind::Rows);
        let trained_numel: usize = grouped.iter().flatten().map(|&(_, numel)| numel).sum();
        let limit = options.zero.bucket_numel(trained_numel as u64);
        let plan = buckets::plan(&grouped, &layouts, |param| kinds[param], plan_rank, limit);
        let part_numels: Vec<usize> = layouts.iter().map(|layout| layout.part_numel).collect();
        let shapes = params.iter().map(|param| (*param.shape(), options.dtype)).collect();
        let reduce = reduce_options(options, sharding.ranks());
        let reducer = Reducer::new(world, sharding, reduce, plan, &part_numels, shapes, device)?;
        let residency = if stage == Stage::Parameters {
            Some(residency(device, params, &positions, &shares, &leaves, options))
        } else {
            None
        };

        let shapes = params.iter().map(|param| *param.shape()).collect();
        let state = State { shares, reducer, residency };
        let attached = Arc::new(Attached::new(shapes, positions, in_rows, state));
        for (index, param) in params.iter().enumerate() {
            param.attach(attached.clone(), index, options.dtype)?;
        }
        Ok(Arc::new(ZeroStore {
            world: world.clone(),
            sharding: sharding.clone(),
            device: device.clone(),
            stage,
            dtype: options.dtype,
            optimizer: options.optimizer.clone(),
            params: params.to_vec(),
            indices,
            attached,
            holds: Holds::default(),
        }))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.attached.lock()
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
        self.lock().reducer.accumulate_in(&self.world, kept)
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
        if let Some(residency) = &mut self.lock().residency {
            residency.begin(pass);
        }
    }

    /// With `false`, gradients of the following backward wait for the next synchronised one instead of being reduced.
    pub fn set_synchronize(&self, synchronize: bool) {
        self.attached.synchronize.store(synchronize, Ordering::Relaxed);
    }

    /// Ends a backward: all gradients are reduced when it returns (unless synchronisation is off).
    pub fn finish_backward(&self) -> Result<()> {
        if !self.attached.synchronize.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.lock().reducer.finish()
    }

    /// The options of every trained group.
    pub fn group_options(&self) -> Vec<GroupOptions> {
        self.lock().shares.iter().filter(|share| share.trained).map(|share| share.options).collect()
    }

    /// Changes the options of a trained group, as schedules do.
    pub fn set_group_options(&self, group: usize, options: GroupOptions) {
        if let Some(share) = self.lock().shares.iter_mut().filter(|share| share.trained).nth(group) {
            share.options = options;
        }
    }

    /// Lets go of every parameter that stage 3 holds whole.
    pub fn empty_partition_cache(&self) -> Result<()> {
        match &mut self.lock().residency {
            Some(residency) => residency.clear(),
            None => Ok(()),
        }
    }

    /// The most elements stage 3 ever held whole at once; 0 in other stages.
    pub fn peak_live_numel(&self) -> u64 {
        self.lock().residency.as_ref().map_or(0, Residency::peak_live_numel)
    }
}

fn reduce_options(options: &StoreOptions<'_>, ranks: usize) -> ReduceOptions {
    let stage = options.zero.stage;
    let n = ranks as f64;
    // The plain average rounds once. A predivide factor f multiplies by 1/f before and f/n after; prescaling
    // multiplies by 1/n before.
    let (before, after) = if options.prescale {
        (1.0 / n, Some(1.0))
    } else if options.predivide != 1.0 {
        (1.0 / options.predivide, Some(options.predivide / n))
    } else {
        (1.0, None)
    };
    ReduceOptions {
        whole: stage == Stage::Off,
        keep_buffers: stage <= Stage::OptimizerStates,
        overlap: options.zero.overlap_comm,
        wire: options.wire,
        kept: options.kept,
        accumulates: options.accumulates,
        before: before as f32,
        after: after.map(|after| after as f32),
    }
}

fn build_share(
    world: &World,
    device: &Device,
    params: &[Param],
    list: Vec<usize>,
    group_options: GroupOptions,
    trained: bool,
    options: &StoreOptions<'_>,
    source: &dyn ParamSource,
) -> Result<Share> {
    let stage = options.zero.stage;
    let (ranks, rank) = (options.sharding.shard.size(), options.sharding.shard.rank());
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
    // In stages 1 and 2 all ranks read the same weights and each updates its own part of them; of replicas each has its own.
    let has_common = layout.ranks > 1 && stage != Stage::Parameters && options.sharding.replicas.is_none();
    let place = if has_common { common } else { reachable };
    let values = place(world, values_numel, options.dtype, device, Category::Parameters)?;
    let master = if trained && options.dtype != DType::F32 {
        Some(Tensor::zeros_in([layout.part_numel], DType::F32, device, Category::Optimizer)?)
    } else {
        None
    };
    let names = options
        .optimizer
        .as_ref()
        .filter(|_| trained)
        .map_or(&[][..], |optimizer| optimizer.state_names(&group_options));
    let state = |_: &&str| Tensor::zeros_in([layout.part_numel], DType::F32, device, Category::Optimizer);
    let states = names.iter().map(state).collect::<Result<Vec<_>, _>>()?;
    let share = Share {
        options: group_options,
        params: list,
        layout,
        values,
        own_start,
        master,
        states,
        steps: 0,
        trained,
    };
    fill::fill(&share, params, world, &options.sharding, stage, source)?;
    Ok(share)
}

fn residency(
    device: &Device,
    params: &[Param],
    positions: &[(usize, usize)],
    shares: &[Share],
    leaves: &[Vec<usize>],
    options: &StoreOptions<'_>,
) -> Residency {
    let numels: Vec<usize> = params.iter().map(Param::numel).collect();
    let (zero, shard) = (options.zero, &options.sharding.shard);
    let stays = persistent(&numels, zero.param_persistence_threshold, zero.model_persistence_threshold);
    // Shares of one group lie end to end.
    let mut starts = vec![0; params.len()];
    for share in shares {
        let mut start = 0;
        for &param in &share.params {
            starts[param] = start;
            start += numels[param].div_ceil(shard.size());
        }
    }
    let sharded = params
        .iter()
        .enumerate()
        .map(|(index, param)| Sharded {
            shape: *param.shape(),
            start: starts[index],
            share: param.numel().div_ceil(shard.size()),
            flat: positions[index].0,
            persistent: stays[index],
        })
        .collect();
    let limits = Limits {
        prefetch: zero.prefetch_bucket_size,
        live: zero.max_live_parameters,
        reuse_distance: zero.max_reuse_distance,
    };
    let flats: Vec<Tensor> = shares.iter().map(|share| share.values.clone()).collect();
    Residency::new(shard.clone(), limits, sharded, leaves, flats, options.dtype, device)
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

/// Every rank must have the same parameters in the same order.
fn agree(world: &World, params: &[Param]) -> Result<()> {
    if world.size() == 1 {
        return Ok(());
    }
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    let mut mix = |bytes: &[u8]| {
        bytes.iter().for_each(|&byte| hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
    };
    for param in params {
        mix(param.name().as_bytes());
        param.shape().sizes().iter().for_each(|size| mix(&(*size as u64).to_le_bytes()));
        mix(&[u8::from(param.is_trainable())]);
    }
    let own = [hash as i64, params.len() as i64];
    let mut all = vec![0i64; 2 * world.size()];
    world.group().all_gather(&own, &mut all)?;
    for (rank, theirs) in all.chunks(2).enumerate() {
        if theirs[1] != all[1] {
            let what = format!("{} parameters, not {}", theirs[1], all[1]);
            return Err(ZeroError::Disagreement { rank, what });
        }
        if theirs[0] != all[0] {
            let what = "names, shapes or which are frozen".to_owned();
            return Err(ZeroError::Disagreement { rank, what });
        }
    }
    Ok(())
}

impl Drop for ZeroStore {
    fn drop(&mut self) {
        self.lock().retire();
    }
}
