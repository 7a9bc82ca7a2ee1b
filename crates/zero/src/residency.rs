//! Stage 3: which parameters are whole right now.
//!
//! A read gathers a parameter, the last release lets it go. The order of reads is recorded on the first pass; later
//! passes gather ahead by it, several parameters in one collective, within `prefetch_bucket_size` and
//! `max_live_parameters`. A pass that leaves the recorded order is recorded anew next time.
//!
//! The parameters of a *leaf module* are one unit: whichever is read first brings all of them, in one collective, and
//! all stay until a parameter outside the unit is read. So ranks that read different parts of such a module (experts
//! that a router chooses, say) still take part in the same collectives, in the same order.
//!
//! A parameter may travel in one of three ways: as it is, quantised (see `quantized`), or among neighbours alone. For the
//! last, each rank keeps a part of what it gathered once, as its neighbours do; until weights change they have it all
//! among themselves, so that backward's gathers stay within a host (Wang et al.: "ZeRO++", 2023: hpZ).

mod gather;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use ferrospeed_comm::Group;
use ferrospeed_tensor::beside::Beside;
use ferrospeed_tensor::{Category, DType, Device, Shape, Tensor};

use crate::error::Result;
use crate::home::Flat;
use crate::memory::part;
use crate::quantized;
use crate::trace::ReadOrder;
use crate::updates::Tile;
use ferrospeed_collective::exchange::Pending;

/// The limits of stage 3: elements, and how many parameters are read from a disk at once.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub(crate) prefetch: u64,
    pub(crate) live: u64,
    pub(crate) reuse_distance: u64,
    pub(crate) reads: usize,
    /// Whether weights wait in page-locked memory, from which a device copies by itself.
    pub(crate) beside: bool,
}

/// One parameter's place.
pub(crate) struct Sharded {
    pub(crate) shape: Shape,
    /// Where its share starts in this rank's flat values.
    pub(crate) start: usize,
    /// Elements of the share, padding included.
    pub(crate) share: usize,
    /// Which flat tensor.
    pub(crate) flat: usize,
    /// Whether it stays whole between passes.
    pub(crate) persistent: bool,
    /// Whether it travels as int8.
    pub(crate) quantized: bool,
    /// Whether neighbours keep it among themselves once it was gathered.
    pub(crate) kept_near: bool,
}

#[derive(Default)]
struct Whole {
    borrows: usize,
    value: Option<Tensor>,
    work: Option<Pending>,
    /// What brings it from this host to the device of a rank that has all of it.
    copying: Option<Beside>,
    /// What arrives of it quantised.
    arriving: Option<Tensor>,
    /// This rank's part of what its neighbours hold together.
    near: Option<Tensor>,
    /// Where it stands in [`Residency::absent`].
    absent_at: Option<usize>,
}

/// Which order of reads a pass follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Pass {
    /// Forward and backward.
    Train,
    /// Forward alone.
    Evaluate,
    /// The next tokens of texts, whose keys and values are kept.
    Generate,
}

enum Order {
    Recording(Vec<usize>),
    Following {
        order: Arc<ReadOrder>,
        at: usize,
    },
    /// The pass has left the order.
    Lost,
}

/// The parameters of stage 3 that are whole.
pub(crate) struct Residency {
    limits: Limits,
    params: Vec<Sharded>,
    /// This rank's flat values, and the ranks that have the other parts.
    flats: Vec<(Group, Flat)>,
    /// The ranks that hold everything once more among themselves.
    neighbours: Option<Group>,
    whole: Vec<Whole>,
    /// The parameters that come and go together with each one: itself, or its leaf module's. Its first stands for all.
    units: Vec<Arc<[usize]>>,
    /// The leaf module that the pass is in, by the parameter that stands for it.
    inside: Option<usize>,
    /// Elements of each unit's first parameter's unit, padding included.
    unit_numels: Vec<u64>,
    live_numel: u64,
    peak_live_numel: u64,
    /// Elements whose gathering has begun and was not waited for.
    under_way_numel: u64,
    /// Where in the order each parameter that is not whole is read next; kept while an order is followed.
    absent: BTreeSet<usize>,
    /// What is whole, not borrowed, and may be let go.
    idle: BTreeSet<usize>,
    /// Whether what comes next is gathered ahead: not in a forward that runs beside the update of what it reads.
    pub(crate) fetches_ahead: bool,
    pass: Pass,
    order: Order,
    known: HashMap<Pass, Arc<ReadOrder>>,
    dtype: DType,
    device: Device,
}

impl Residency {
    /// `leaves` are the leaf modules, as parameters of each.
    pub(crate) fn new(
        limits: Limits,
        params: Vec<Sharded>,
        leaves: &[Vec<usize>],
        flats: Vec<(Group, Flat)>,
        neighbours: Option<Group>,
        dtype: DType,
        device: &Device,
    ) -> Residency {
        let mut units: Vec<Arc<[usize]>> = (0..params.len()).map(|param| Arc::from([param])).collect();
        for leaf in leaves {
            let unit: Arc<[usize]> = Arc::from(leaf.as_slice());
            leaf.iter().for_each(|&param| units[param] = unit.clone());
        }
        let numel = |param: &usize| (params[*param].share * flats[params[*param].flat].0.size()) as u64;
        let unit_numels = units.iter().map(|unit| unit.iter().map(numel).sum()).collect();
        Residency {
            limits,
            whole: params.iter().map(|_| Whole::default()).collect(),
            params,
            flats,
            neighbours,
            units,
            inside: None,
            unit_numels,
            live_numel: 0,
            peak_live_numel: 0,
            under_way_numel: 0,
            absent: BTreeSet::new(),
            idle: BTreeSet::new(),
            fetches_ahead: true,
            pass: Pass::Train,
            order: Order::Recording(Vec::new()),
            known: HashMap::new(),
            dtype,
            device: device.clone(),
        }
    }

    /// Starts a pass.
    pub(crate) fn begin(&mut self, pass: Pass) {
        self.remember();
        self.leave();
        self.pass = pass;
        self.order = match self.known.get(&pass) {
            Some(order) => Order::Following { order: order.clone(), at: 0 },
            None => Order::Recording(Vec::new()),
        };
        self.absent.clear();
        for param in 0..self.whole.len() {
            self.whole[param].absent_at = None;
            self.expect(param);
        }
    }

    /// Keeps what was recorded; an order that was left is forgotten.
    fn remember(&mut self) {
        match std::mem::replace(&mut self.order, Order::Lost) {
            Order::Recording(reads) if !reads.is_empty() => {
                self.known.insert(self.pass, Arc::new(ReadOrder::new(reads, &self.unit_numels)));
            }
            Order::Lost => {
                self.known.remove(&self.pass);
            }
            _ => {}
        }
    }

    /// The parameter that stands for the unit of this one.
    fn first(&self, param: usize) -> usize {
        self.units[param][0]
    }

    pub(crate) fn acquire(&mut self, param: usize) -> Result<Tensor> {
        let first = self.first(param);
        // How often a leaf module is read while the pass is in it differs between ranks; only entering it counts.
        let enters = self.inside != Some(first);
        if enters {
            self.leave();
            self.inside = (self.units[param].len() > 1).then_some(first);
            self.advance(first);
        }
        if self.is_alone(param) {
            let sharded = &self.params[param];
            self.whole[param].borrows += 1;
            return Ok(self.flats[sharded.flat].1.memory()?.slice(sharded.start, sharded.shape)?);
        }
        if self.whole[param].value.is_none() {
            let missing = self.missing(param);
            self.make_room(missing.iter().map(|&param| self.numel(param)).sum());
            self.gather(&missing)?;
        }
        if enters {
            self.prefetch()?;
        }
        self.idle.remove(&param);
        self.whole[param].borrows += 1;
        for &member in self.units[param].clone().iter() {
            self.land(member)?;
        }
        let value = self.whole[param].value.as_ref().expect("it was just gathered");
        Ok(value.slice(0, self.params[param].shape)?)
    }

    fn numel(&self, param: usize) -> u64 {
        let sharded = &self.params[param];
        (sharded.share * self.flats[sharded.flat].0.size()) as u64
    }

    /// Whether this rank has all of a parameter where kernels work.
    fn is_alone(&self, param: usize) -> bool {
        let (group, flat) = &self.flats[self.params[param].flat];
        group.size() == 1 && flat.is_here(&self.device)
    }

    /// What is not whole of a parameter's unit.
    fn missing(&self, param: usize) -> Vec<usize> {
        let absent = |&member: &usize| self.whole[member].value.is_none() && !self.is_alone(member);
        self.units[param].iter().copied().filter(absent).collect()
    }

    /// Waits for a parameter that is under way.
    fn land(&mut self, param: usize) -> Result<()> {
        if let Some(copying) = self.whole[param].copying.take() {
            self.under_way_numel -= self.numel(param);
            return Ok(copying.follow()?);
        }
        let Some(work) = self.whole[param].work.take() else { return Ok(()) };
        self.under_way_numel -= self.numel(param);
        work.wait()?;
        let (whole, sharded) = (&mut self.whole[param], &self.params[param]);
        let Some(value) = &whole.value else { return Ok(()) };
        if let Some(arrived) = whole.arriving.take() {
            quantized::dequantize(&arrived, sharded.share, value)?;
        }
        if let Some(group) = self.neighbours.as_ref().filter(|_| sharded.kept_near && whole.near.is_none()) {
            let numel = value.numel() / group.size();
            let mut near = Tensor::empty_in([numel], self.dtype, &self.device, Category::Parameters)?;
            self.device.backend().cast(&part(value, group.rank() * numel, numel)?, near.out()?)?;
            whole.near = Some(near);
        }
        Ok(())
    }

    /// Notes a read.
    fn advance(&mut self, param: usize) {
        match &mut self.order {
            Order::Recording(reads) => reads.push(param),
            Order::Following { order, at } if order.at(*at) == Some(param) => *at += 1,
            Order::Following { .. } => self.order = Order::Lost,
            Order::Lost => {}
        }
    }

    /// Ends the stay in a leaf module.
    fn leave(&mut self) {
        let Some(first) = self.inside.take() else { return };
        for &member in self.units[first].clone().iter() {
            if self.whole[member].borrows == 0 {
                self.let_go(member);
            }
        }
    }

    /// Notes where a parameter that is not whole is read next. A unit waits under its first.
    fn expect(&mut self, param: usize) {
        let Order::Following { order, at } = &self.order else { return };
        let whole = &self.whole[param];
        if whole.value.is_some() || whole.absent_at.is_some() || self.is_alone(param) {
            return;
        }
        let next = order.next_read(self.first(param), *at);
        self.whole[param].absent_at = next;
        self.absent.extend(next);
    }

    /// Gathers what comes next, unless enough is under way already.
    fn prefetch(&mut self) -> Result<()> {
        let Order::Following { order, .. } = &self.order else { return Ok(()) };
        if !self.fetches_ahead || self.under_way_numel * 2 > self.limits.prefetch {
            return Ok(());
        }
        let mut chosen: Vec<usize> = Vec::new();
        let mut total = 0;
        for param in self.absent.iter().filter_map(|&place| order.at(place)) {
            let missing = self.missing(param);
            let numel: u64 = missing.iter().map(|&param| self.numel(param)).sum();
            if total + numel > self.limits.prefetch || self.live_numel + total + numel > self.limits.live {
                break;
            }
            chosen.extend(missing);
            total += numel;
        }
        self.gather(&chosen)
    }

    /// Notes that a parameter is whole, or soon will be.
    fn is_whole(&mut self, param: usize, value: Tensor) {
        self.whole[param].value = Some(value);
        if let Some(place) = self.whole[param].absent_at.take() {
            self.absent.remove(&place);
        }
        self.live_numel += self.numel(param);
        self.peak_live_numel = self.peak_live_numel.max(self.live_numel);
    }

    pub(crate) fn release(&mut self, param: usize) {
        self.whole[param].borrows -= 1;
        // A leaf module goes as one, when the pass has left it.
        if self.whole[param].borrows > 0 || self.inside == Some(self.first(param)) {
            return;
        }
        self.let_go(param);
    }

    /// Drops what nobody borrows, or keeps it until room is needed.
    fn let_go(&mut self, param: usize) {
        if self.is_alone(param) || self.params[param].persistent || self.whole[param].value.is_none() {
            return;
        }
        if self.live_numel > self.limits.live || !self.used_soon(param) {
            self.drop_value(param);
        } else {
            self.idle.insert(param);
        }
    }

    /// Whether the recorded order reads it again within the reuse distance.
    fn used_soon(&self, param: usize) -> bool {
        let Order::Following { order, at } = &self.order else { return false };
        order
            .next_read(self.first(param), *at)
            .is_some_and(|next| next == *at || order.numel_between(*at, next) < self.limits.reuse_distance)
    }

    /// Lets go of what nobody borrows until `numel` more fit under the limit, or nothing is left to let go.
    fn make_room(&mut self, numel: u64) {
        while self.live_numel + numel > self.limits.live
            && let Some(param) = self.idle.pop_first()
        {
            self.drop_value(param);
        }
    }

    fn drop_value(&mut self, param: usize) {
        if self.whole[param].value.take().is_some() {
            self.live_numel -= self.numel(param);
            self.idle.remove(&param);
            self.expect(param);
        }
    }

    /// Lets go of everything: values have changed, or the caller wants the memory. Waits for what is under way.
    pub(crate) fn clear(&mut self) -> Result<()> {
        self.inside = None;
        for param in 0..self.whole.len() {
            self.land(param)?;
            self.whole[param].near = None;
            if self.whole[param].borrows == 0 {
                self.drop_value(param);
            }
        }
        Ok(())
    }

    /// The order of reads that a pass follows, or is recording now.
    pub(crate) fn order(&self, pass: Pass) -> &[usize] {
        match &self.order {
            Order::Recording(reads) if self.pass == pass => reads,
            Order::Lost if self.pass == pass => &[],
            _ => self.known.get(&pass).map_or(&[], |order| order.as_slice()),
        }
    }

    /// What is read of this rank's flat values when a parameter is: its own stretch, and those of its leaf module.
    pub(crate) fn stretches(&self, param: usize) -> Vec<Tile> {
        let stretch = |&member: &usize| {
            let Sharded { flat, start, share, .. } = self.params[member];
            Tile { share: flat, range: start..start + share }
        };
        self.units[param].iter().map(stretch).collect()
    }

    /// Where in the order of training each parameter is read first; last of all what is never read.
    pub(crate) fn first_reads(&self) -> Vec<usize> {
        let mut first = vec![usize::MAX; self.params.len()];
        for (place, &param) in self.order(Pass::Train).iter().enumerate() {
            for &member in self.units[param].iter() {
                first[member] = first[member].min(place);
            }
        }
        first
    }

    /// Whether a parameter stays whole between passes.
    pub(crate) fn is_persistent(&self, param: usize) -> bool {
        self.params[param].persistent
    }

    /// The most elements that were whole at once.
    pub(crate) fn peak_live_numel(&self) -> u64 {
        self.peak_live_numel
    }
}
