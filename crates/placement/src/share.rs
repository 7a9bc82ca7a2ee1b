//! This rank's share of some parameters: what it owns, and the tiles that hold it.

use std::ops::Range;

use ferrospeed_config::{DataType, ParameterTier, Stage};

use crate::facts::{DeviceKind, Ranks, Request, Spread, UpdateRule};
use crate::layout::{Layout, persistent};
use crate::stage::{Cut, Extent, rules};

/// The most elements that are updated at a time where state is not with the device, whatever `sub_group_size` says: more are
/// not faster, and take memory.
pub const LARGEST_UPDATE: u64 = 4 << 20;
/// Where values are in two homes the first part has a multiple of so many elements, so that both begin at pages, in f32 and
/// in 16 bits.
pub const PAGE_ELEMENTS: usize = 2048;
/// Elements of packed values that share a step, at most.
pub const PACKED_GROUP: usize = 2048;

/// Where a tile is while nobody works on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Home {
    /// In the memory of the device that computes, which may be the host's.
    Device,
    /// In the memory of the device's host.
    Host,
    /// The same, page-locked for copies beside the work of the device.
    LockedHost,
    /// On a disk of the host.
    Disk,
}

/// Who else knows a tile's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memory {
    /// Nobody.
    Own,
    /// The other ranks of its group read it in place.
    Reached,
    /// It exists once for all ranks of a host.
    Common,
}

/// What a tile is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Purpose {
    /// What kernels read.
    Values,
    /// Weights in f32, where those are others.
    Master,
    /// An optimizer state.
    State,
    /// Gradients that wait for a step.
    Gradients,
    /// Gradients on their way between ranks.
    Buckets,
}

/// A run of one rank's bytes with one purpose, type and home.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tile {
    /// What it is for.
    pub purpose: Purpose,
    /// The type of its elements, as they are worked on.
    pub dtype: DataType,
    /// Elements.
    pub numel: usize,
    /// Bytes.
    pub bytes: u64,
    /// Where it is.
    pub home: Home,
    /// Who else knows it.
    pub memory: Memory,
}

/// Values of one type that lie end to end, in one home or in two.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Flat {
    /// The type of the values.
    pub dtype: DataType,
    /// Elements, home and memory of what lies in one home each.
    pub runs: Vec<(usize, Home, Memory)>,
    /// Where it is kept as small integers: elements of each parameter's run, and whether it stays exact.
    pub packed: Option<Vec<(usize, bool)>>,
}

impl Flat {
    fn one(dtype: DataType, numel: usize, home: Home, memory: Memory) -> Flat {
        Flat { dtype, runs: vec![(numel, home, memory)], packed: None }
    }

    /// The first `at` elements in one home and the others in another; nothing where one of them has none.
    fn split(dtype: DataType, numel: usize, at: usize, first: (Home, Memory), rest: (Home, Memory)) -> Flat {
        let runs = [(at, first.0, first.1), (numel - at, rest.0, rest.1)];
        match (at, numel - at) {
            (0, _) => Flat { dtype, runs: vec![runs[1]], packed: None },
            (_, 0) => Flat { dtype, runs: vec![runs[0]], packed: None },
            _ => Flat { dtype, runs: runs.to_vec(), packed: None },
        }
    }

    /// Whether kernels of the device can use all of it where it is.
    pub fn is_here(&self) -> bool {
        self.packed.is_none() && matches!(self.runs[..], [(_, Home::Device, _)])
    }

    /// Whether loops of the host can.
    fn is_with_host(&self, device: DeviceKind) -> bool {
        match (&self.runs[..], device) {
            ([(_, home, _)], DeviceKind::Beside) => matches!(home, Home::Host | Home::LockedHost),
            _ => self.is_here(),
        }
    }

    /// Its elements.
    pub fn numel(&self) -> usize {
        self.runs.iter().map(|run| run.0).sum()
    }

    fn tiles(&self, purpose: Purpose) -> impl Iterator<Item = Tile> + '_ {
        self.runs.iter().map(move |&(numel, home, memory)| {
            let bytes = match &self.packed {
                Some(runs) => runs.iter().map(|&(numel, is_exact)| packed_bytes(numel, is_exact)).sum(),
                None => numel as u64 * self.dtype.bytes(),
            };
            Tile { purpose, dtype: self.dtype, numel, bytes, home, memory }
        })
    }
}

/// Bytes of a run of values that is kept as integers of eight bits, each group of which has a step.
fn packed_bytes(numel: usize, is_exact: bool) -> u64 {
    match is_exact {
        true => 4 * numel as u64,
        false => (numel + 4 * numel.div_ceil(PACKED_GROUP)) as u64,
    }
}

/// By which ranks a share is divided among owners.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owners {
    /// Every rank owns everything.
    Everybody,
    /// Each rank of the shard owns a part.
    Shard,
    /// Each of the stages that use a weight owns a part.
    Stages,
}

/// Parameters of one group that are spread in one way: this rank's share of them.
#[derive(Debug, Clone, PartialEq)]
pub struct Share {
    /// Which group; the one after the last is what nobody trains.
    pub group: usize,
    /// Which way it is spread.
    pub spread: usize,
    /// Whether it is trained.
    pub trained: bool,
    /// Its parameters among all, in the order of the layout's.
    pub params: Vec<usize>,
    /// Who owns which elements.
    pub layout: Layout,
    /// By whom it is divided.
    pub owners: Owners,
    /// Which part this rank owns.
    pub own: usize,
    /// This rank's number among those that own the same.
    pub holder: usize,
    /// How many those are.
    pub holders: usize,
    /// Ranks that bring gradients of their own.
    pub ranks: usize,
    /// The ranks that reach each other's gradients in place.
    pub reach: Ranks,
    /// Who else knows memory that those reach.
    pub reached: Memory,
    /// Whether norms count this rank's part.
    pub counted: bool,
    /// What kernels read: all of it, or this rank's part.
    pub values: Flat,
    /// Where this rank's part starts in `values`.
    pub own_start: usize,
    /// f32 weights of this rank's part; `None` when `values` are f32 themselves.
    pub master: Option<Flat>,
    /// The optimizer's states for this rank's part.
    pub states: Vec<Flat>,
    /// How many elements, from the first on, are updated by the host a stretch at a time; the others stay with the device.
    pub moved: usize,
    /// Elements that are updated at a time where they are.
    pub update_numel: usize,
}

impl Share {
    /// Whether any of it is elsewhere than where kernels work.
    pub fn is_away(&self) -> bool {
        // What is packed is gathered as any other: its home is nobody's business.
        let values = Some(&self.values).filter(|values| values.packed.is_none());
        values.into_iter().chain(&self.master).chain(&self.states).any(|flat| !flat.is_here())
    }

    /// What of this rank's part is updated where kernels work.
    pub fn stays_updated(&self) -> Range<usize> {
        if self.is_away() { self.moved..self.layout.part_numel } else { 0..self.layout.part_numel }
    }

    /// Its tiles.
    pub fn tiles(&self) -> impl Iterator<Item = Tile> + '_ {
        let values = self.values.tiles(Purpose::Values);
        let masters = self.master.iter().flat_map(|flat| flat.tiles(Purpose::Master));
        values.chain(masters).chain(self.states.iter().flat_map(|flat| flat.tiles(Purpose::State)))
    }

    /// Whether ranks that own parts of it send each other what a step made of them, so that all have all.
    pub fn is_published(&self) -> bool {
        self.trained && self.owners != Owners::Everybody && self.layout.part_numel > 0
    }
}

/// Who owns what of a share.
struct Ownership {
    owners: Owners,
    /// The owners of a part each; this rank alone where every rank owns everything.
    ranks: Ranks,
    /// This rank's number among those that own the same, and how many those are.
    holder: usize,
    holders: usize,
}

fn ownership(spread: &Spread, stage: Stage, trained: bool) -> Ownership {
    let rules = rules(stage);
    let is_cut = rules.values == Extent::Part || trained && rules.states == Extent::Part;
    let (owners, ranks, holder, holders) = match &spread.tie {
        _ if is_cut => (Owners::Shard, &spread.shard, spread.replicas.own, spread.replicas.count),
        Some(tie) if trained => (Owners::Stages, &tie.stages, tie.peers.own, tie.peers.count),
        _ => {
            let own = spread.replicas.own * spread.shard.count + spread.shard.own;
            (Owners::Everybody, &Ranks::alone(), own, spread.ranks())
        }
    };
    match ranks.count {
        // One owner of everything is none.
        1 => Ownership { owners: Owners::Everybody, ranks: Ranks::alone(), holder, holders },
        _ => Ownership { owners, ranks: ranks.clone(), holder, holders },
    }
}

/// This rank's shares, and (share, place in it) of every parameter.
pub(crate) fn shares(request: &Request<'_>) -> (Vec<Share>, Vec<(usize, usize)>) {
    let groups = request.groups.len();
    let mut members: Vec<Vec<usize>> = vec![Vec::new(); groups + 1];
    for (param, facts) in request.params.iter().enumerate() {
        members[facts.group.map_or(groups, |(group, _)| group)].push(param);
    }
    let numels: Vec<usize> = request.params.iter().map(|param| param.numel).collect();
    let stays = stays_whole(request, &numels);
    let mut host_elements = match request.zero.offload_param.tier {
        ParameterTier::Nvme { max_in_cpu, .. } => max_in_cpu,
        _ => 0,
    };
    let mut shares: Vec<Share> = Vec::with_capacity(members.len());
    let mut seats = vec![(0, 0); request.params.len()];
    for (group, mut list) in members.into_iter().enumerate() {
        list.sort_by_key(|&param| request.params[param].group.map_or(param, |(_, place)| place));
        for spread in 0..request.spreads.len() {
            let params: Vec<usize> =
                list.iter().copied().filter(|&param| request.params[param].spread == spread).collect();
            // Every group has a share of the common kind, be it empty.
            if params.is_empty() && spread > 0 {
                continue;
            }
            for (place, &param) in params.iter().enumerate() {
                seats[param] = (shares.len(), place);
            }
            shares.push(share(request, params, group, spread, &stays, &mut host_elements));
        }
    }
    (shares, seats)
}

/// Which parameters stay whole between passes where ranks have parts of values.
pub(crate) fn stays_whole(request: &Request<'_>, numels: &[usize]) -> Vec<bool> {
    persistent(numels, request.zero.param_persistence_threshold, request.zero.model_persistence_threshold)
}

fn share(
    request: &Request<'_>,
    params: Vec<usize>,
    group: usize,
    spread_index: usize,
    stays: &[bool],
    host_elements: &mut u64,
) -> Share {
    let (spread, rules) = (&request.spreads[spread_index], rules(request.stage()));
    let trained = group < request.groups.len();
    let Ownership { owners, ranks, holder, holders } = ownership(spread, request.stage(), trained);
    let numels: Vec<usize> = params.iter().map(|&param| request.params[param].numel).collect();
    let layout = match rules.cut {
        Cut::EachParameter => Layout::per_parameter(&numels, ranks.count),
        Cut::EndToEnd => Layout::flat(&numels, ranks.count, request.zero.round_robin_gradients),
    };
    let (numel, own_start) = match rules.values {
        Extent::Part => (layout.part_numel, 0),
        Extent::Whole => (layout.part_numel * layout.ranks, ranks.own * layout.part_numel),
    };
    let near = near(request, spread, owners, &ranks, trained);
    let mut values = request.values_flat(numel, near, host_elements);
    let moved = request.moved(layout.part_numel);
    let state = |home: Option<Home>| match home {
        Some(home) => {
            let (away, kept) = ((home, Memory::Own), (Home::Device, Memory::Own));
            Flat::split(DataType::Fp32, layout.part_numel, moved, away, kept)
        }
        None => Flat::one(DataType::Fp32, layout.part_numel, Home::Device, Memory::Own),
    };
    let home = request.states_home();
    // Weights that kernels do not read where the update works have a copy there.
    let updates_elsewhere = home.is_some() && moved > 0;
    let apart = request.values != DataType::Fp32
        || !values.is_with_host(request.device) && updates_elsewhere
        || !values.is_here();
    let master = (trained && apart).then(|| state(home));
    let states = request.groups.get(group).map_or(0, |group| group.states);
    let is_in_memory = matches!(values.runs[..], [(_, home, _)] if home != Home::Disk);
    if rules.values == Extent::Part && request.zero.quantized_nontrainable_weights && !trained && is_in_memory
    {
        values = request.packed(&values, &params, spread, stays);
    }
    Share {
        group,
        spread: spread_index,
        trained,
        params,
        owners,
        own: ranks.own,
        holder,
        holders,
        ranks: spread.ranks(),
        reach: spread.reach.clone(),
        reached: match request.device {
            DeviceKind::Host if spread.reach.count > 1 => Memory::Reached,
            DeviceKind::Host | DeviceKind::Beside => Memory::Own,
        },
        // With several kinds of shares in one norm, one holder of each part counts it.
        counted: !request.parts_differ || (spread.counted && holder == 0),
        values,
        own_start,
        master,
        states: (0..states).map(|_| state(home)).collect(),
        moved,
        update_numel: (request.zero.sub_group_size.clamp(1, LARGEST_UPDATE) as usize)
            .next_multiple_of(PAGE_ELEMENTS),
        layout,
    }
}

/// Who else knows the memory of values that are with the device.
fn near(request: &Request<'_>, spread: &Spread, owners: Owners, ranks: &Ranks, trained: bool) -> Memory {
    let whole = rules(request.stage()).values == Extent::Whole;
    // Below stage 3 all owners read the same weights and each updates its own part of them; what nobody trains is written
    // once, and never again.
    let (among, may_be_common) = match owners {
        Owners::Shard | Owners::Stages if whole => (ranks, true),
        Owners::Everybody if whole && !trained => (&spread.shard, true),
        _ => (&spread.shard, false),
    };
    match request.device {
        DeviceKind::Beside => Memory::Own,
        DeviceKind::Host if among.count == 1 => Memory::Own,
        DeviceKind::Host if may_be_common && among.on_one_host => Memory::Common,
        DeviceKind::Host => Memory::Reached,
    }
}

impl Request<'_> {
    /// Where values are in stage 3 while nobody reads them, where that is not with the device.
    pub(crate) fn values_home(&self) -> Option<Home> {
        let beside = |home| (self.device == DeviceKind::Beside).then_some(home);
        match &self.zero.offload_param.tier {
            // Only stage 3 brings kernels what they read when they need it.
            _ if rules(self.stage()).values == Extent::Whole => None,
            ParameterTier::Device => None,
            ParameterTier::Host(buffers) if buffers.pinned => beside(Home::LockedHost),
            ParameterTier::Host(_) => beside(Home::Host),
            ParameterTier::Nvme { .. } => Some(Home::Disk),
        }
    }

    /// Each element that the host's memory may keep is granted once.
    fn values_flat(&self, numel: usize, near: Memory, host_elements: &mut u64) -> Flat {
        match self.values_home() {
            Some(Home::Disk) => {
                let granted = usize::try_from(*host_elements).unwrap_or(usize::MAX).min(numel);
                let granted = if granted == numel { numel } else { granted - granted % PAGE_ELEMENTS };
                *host_elements -= granted as u64;
                let in_memory = match self.device {
                    DeviceKind::Host if granted == numel => (Home::Device, near),
                    DeviceKind::Host => (Home::Device, Memory::Own),
                    DeviceKind::Beside => (Home::Host, Memory::Own),
                };
                Flat::split(self.values, numel, granted, in_memory, (Home::Disk, Memory::Own))
            }
            Some(home) => Flat::one(self.values, numel, home, Memory::Own),
            None => Flat::one(self.values, numel, Home::Device, near),
        }
    }

    /// How many states of a part are moved to their home: the first ones, the share that `ratio` says.
    fn moved(&self, numel: usize) -> usize {
        // A rule that only the host knows needs all of its states there.
        let may_stay = self.device == DeviceKind::Host || !self.has(UpdateRule::EachElementOnHost);
        if self.states_home().is_none() || !may_stay {
            return numel;
        }
        let moved = (numel as f64 * self.zero.offload_optimizer.ratio) as usize;
        if moved >= numel { numel } else { moved - moved % PAGE_ELEMENTS }
    }

    /// Values of frozen parameters as integers, where they are large; the host keeps them.
    fn packed(&self, values: &Flat, params: &[usize], spread: &Spread, stays: &[bool]) -> Flat {
        let run = |&param: &usize| {
            let is_exact = stays[param] || self.params[param].dims < 2;
            (self.params[param].numel.div_ceil(spread.shard.count), is_exact)
        };
        let home = if self.device == DeviceKind::Host { Home::Device } else { Home::Host };
        Flat {
            packed: Some(params.iter().map(run).collect()),
            ..Flat::one(values.dtype, values.numel(), home, Memory::Own)
        }
    }
}
