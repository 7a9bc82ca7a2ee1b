//! Stage 3: which parameters are whole right now.
//!
//! A read gathers a parameter, the last release lets it go. The order of reads is recorded on the first pass; later
//! passes gather ahead by it, several parameters in one collective, within `prefetch_bucket_size` and
//! `max_live_parameters`. A pass that leaves the recorded order is recorded anew next time.

use std::collections::HashMap;

use ferrospeed_comm::Group;
use ferrospeed_tensor::{Category, DType, Device, Shape, Tensor};

use crate::error::Result;
use crate::exchange::{self, Pending};
use crate::memory::part;

/// The limits of stage 3, in elements.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub(crate) prefetch: u64,
    pub(crate) live: u64,
    pub(crate) reuse_distance: u64,
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
}

#[derive(Default)]
struct Whole {
    borrows: usize,
    value: Option<Tensor>,
    work: Option<Pending>,
}

/// Which order of reads a pass follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Pass {
    /// Forward and backward.
    Train,
    /// Forward alone.
    Evaluate,
}

enum Order {
    Recording(Vec<usize>),
    Following {
        order: Vec<usize>,
        at: usize,
    },
    /// The pass has left the order.
    Lost,
}

/// The parameters of stage 3 that are whole.
pub(crate) struct Residency {
    group: Group,
    limits: Limits,
    params: Vec<Sharded>,
    flats: Vec<Tensor>,
    whole: Vec<Whole>,
    live_numel: u64,
    peak_live_numel: u64,
    pass: Pass,
    order: Order,
    known: HashMap<Pass, Vec<usize>>,
    dtype: DType,
    device: Device,
}

impl Residency {
    pub(crate) fn new(
        group: Group,
        limits: Limits,
        params: Vec<Sharded>,
        flats: Vec<Tensor>,
        dtype: DType,
        device: &Device,
    ) -> Residency {
        Residency {
            group,
            limits,
            whole: params.iter().map(|_| Whole::default()).collect(),
            params,
            flats,
            live_numel: 0,
            peak_live_numel: 0,
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
        self.pass = pass;
        self.order = match self.known.get(&pass) {
            Some(order) => Order::Following { order: order.clone(), at: 0 },
            None => Order::Recording(Vec::new()),
        };
    }

    /// Keeps what was recorded; an order that was left is forgotten.
    fn remember(&mut self) {
        match std::mem::replace(&mut self.order, Order::Lost) {
            Order::Recording(order) if !order.is_empty() => {
                self.known.insert(self.pass, order);
            }
            Order::Lost => {
                self.known.remove(&self.pass);
            }
            _ => {}
        }
    }

    pub(crate) fn acquire(&mut self, param: usize) -> Result<Tensor> {
        self.advance(param);
        if self.group.size() == 1 {
            let sharded = &self.params[param];
            self.whole[param].borrows += 1;
            return Ok(self.flats[sharded.flat].slice(sharded.start, sharded.shape)?);
        }
        if self.whole[param].value.is_none() {
            self.make_room(self.numel(param));
            self.gather(&[param])?;
        }
        self.prefetch()?;
        let whole = &mut self.whole[param];
        whole.borrows += 1;
        if let Some(work) = whole.work.take() {
            work.wait()?;
        }
        let value = whole.value.as_ref().expect("it was just gathered");
        Ok(value.slice(0, self.params[param].shape)?)
    }

    fn numel(&self, param: usize) -> u64 {
        (self.params[param].share * self.group.size()) as u64
    }

    /// Notes a read.
    fn advance(&mut self, param: usize) {
        match &mut self.order {
            Order::Recording(order) => order.push(param),
            Order::Following { order, at } if order.get(*at) == Some(&param) => *at += 1,
            Order::Following { .. } => self.order = Order::Lost,
            Order::Lost => {}
        }
    }

    /// Gathers what comes next, unless enough is under way already.
    fn prefetch(&mut self) -> Result<()> {
        let Order::Following { order, at } = &self.order else { return Ok(()) };
        let under_way: u64 = (0..self.whole.len())
            .filter(|&param| self.whole[param].work.is_some() && self.whole[param].borrows == 0)
            .map(|param| self.numel(param))
            .sum();
        if under_way * 2 > self.limits.prefetch {
            return Ok(());
        }
        let mut chosen: Vec<usize> = Vec::new();
        let mut total = 0;
        for &param in &order[*at..] {
            let numel = self.numel(param);
            if self.whole[param].value.is_some() || chosen.contains(&param) {
                continue;
            }
            if total + numel > self.limits.prefetch || self.live_numel + total + numel > self.limits.live {
                break;
            }
            chosen.push(param);
            total += numel;
        }
        self.gather(&chosen)
    }

    /// One collective for several parameters.
    fn gather(&mut self, params: &[usize]) -> Result<()> {
        if params.is_empty() {
            return Ok(());
        }
        let ranks = self.group.size();
        let mut pairs = Vec::with_capacity(params.len());
        for &param in params {
            let sharded = &self.params[param];
            let value =
                Tensor::empty_in([sharded.share * ranks], self.dtype, &self.device, Category::Parameters)?;
            let own = part(&self.flats[sharded.flat], sharded.start, sharded.share)?;
            pairs.push((own, value.clone()));
            self.whole[param].value = Some(value);
            self.live_numel += self.numel(param);
        }
        self.peak_live_numel = self.peak_live_numel.max(self.live_numel);
        let pending = exchange::all_gather(&self.group, &pairs)?;
        params.iter().zip(pending).for_each(|(&param, work)| self.whole[param].work = Some(work));
        Ok(())
    }

    pub(crate) fn release(&mut self, param: usize) {
        self.whole[param].borrows -= 1;
        if self.group.size() == 1 || self.whole[param].borrows > 0 || self.params[param].persistent {
            return;
        }
        if self.live_numel > self.limits.live || !self.used_soon(param) {
            self.drop_value(param);
        }
    }

    /// Whether the recorded order reads it again within the reuse distance.
    fn used_soon(&self, param: usize) -> bool {
        let Order::Following { order, at } = &self.order else { return false };
        let mut distance = 0;
        for &next in &order[*at..] {
            if next == param {
                return true;
            }
            distance += self.numel(next);
            if distance >= self.limits.reuse_distance {
                return false;
            }
        }
        false
    }

    /// Lets go of what nobody borrows until `numel` more fit under the limit, or nothing is left to let go.
    fn make_room(&mut self, numel: u64) {
        let mut param = 0;
        while self.live_numel + numel > self.limits.live && param < self.whole.len() {
            let whole = &self.whole[param];
            if whole.borrows == 0
                && whole.work.is_none()
                && whole.value.is_some()
                && !self.params[param].persistent
            {
                self.drop_value(param);
            }
            param += 1;
        }
    }

    fn drop_value(&mut self, param: usize) {
        if self.whole[param].value.take().is_some() {
            self.live_numel -= self.numel(param);
        }
    }

    /// Lets go of everything: values have changed, or the caller wants the memory. Waits for what is under way.
    pub(crate) fn clear(&mut self) -> Result<()> {
        for param in 0..self.whole.len() {
            if let Some(work) = self.whole[param].work.take() {
                work.wait()?;
            }
            if self.whole[param].borrows == 0 {
                self.drop_value(param);
            }
        }
        Ok(())
    }

    /// The order of reads that a pass follows, or is recording now.
    pub(crate) fn order(&self, pass: Pass) -> &[usize] {
        match &self.order {
            Order::Recording(order) if self.pass == pass => order,
            Order::Lost if self.pass == pass => &[],
            _ => self.known.get(&pass).map_or(&[], Vec::as_slice),
        }
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
