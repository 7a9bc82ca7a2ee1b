//! The memory that gradients pass through: buckets' buffers, and the places in them that backward writes to.
//!
//! Where reduced gradients are whole each bucket has a buffer of its own, which is kept; else the buckets that the same
//! ranks reach take turns with one or two. A gradient may be written to its place in the first place
//! ([`Reducer::lend_place`]), so that it is never copied.

use std::collections::BTreeMap;

use ferrospeed_tensor::{Category, DType, Lent, Out, Tensor};

use super::leaving::Leaving;
use super::{Arrived, ReduceOptions, Reducer, Road, Segment};
use crate::buckets::{Bucket, Kind};
use crate::error::{Result, ZeroError};
use crate::memory::{part, reachable};
use ferrospeed_collective::exchange::Pending;

/// Places are lent only where kernels write as fast as to memory of their own.
const PLACE_ALIGNMENT_BYTES: usize = 64;

impl Reducer {
    /// Memory for the buckets, and for what is kept beside them, where they are used again or hold another type.
    pub(super) fn allocate(&mut self) -> Result<()> {
        if self.stay() {
            self.leaving = self.leave()?;
            return Ok(());
        }
        let options = &self.options;
        let reach = |bucket: &Bucket| self.roads[bucket.group].sharding.reach();
        if self.sums_up() {
            let in_place = options.wire == options.kept;
            let sum = |bucket: &Bucket| match in_place {
                true => {
                    reachable(reach(bucket), bucket.numel(), options.kept, &self.device, Category::Gradients)
                }
                false => {
                    Ok(Tensor::zeros_in([bucket.numel()], options.kept, &self.device, Category::Gradients)?)
                }
            };
            self.sums = self.buckets.iter().map(sum).collect::<Result<_>>()?;
            if in_place {
                return Ok(());
            }
        }
        self.buffers = if self.keeps_buffers() {
            let whole = |bucket: &Bucket| {
                reachable(reach(bucket), bucket.numel(), options.wire, &self.device, Category::Gradients)
            };
            self.slots = (0..self.buckets.len()).collect();
            self.buckets.iter().map(whole).collect::<Result<_>>()?
        } else {
            // Buckets that the same ranks reach take turns.
            let name = |bucket: &usize| reach(&self.buckets[*bucket]).name();
            let mut ways: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
            (0..self.buckets.len()).for_each(|bucket| ways.entry(name(&bucket)).or_default().push(bucket));
            let mut buffers = Vec::new();
            self.slots = vec![0; self.buckets.len()];
            for members in ways.values() {
                let largest = members.iter().map(|&bucket| self.buckets[bucket].numel()).max().unwrap_or(0);
                let count = members.len().min(if options.overlap { 2 } else { 1 });
                for (turn, &bucket) in members.iter().enumerate() {
                    self.slots[bucket] = buffers.len() + turn % count;
                }
                for _ in 0..count {
                    let reach = reach(&self.buckets[members[0]]);
                    buffers.push(reachable(reach, largest, options.wire, &self.device, Category::Buffers)?);
                }
            }
            buffers
        };
        if self.sums_up() || (options.keep_buffers && !options.accumulates && options.wire == options.kept) {
            return Ok(());
        }
        self.leaving = self.leave()?;
        if self.leaving.is_some() {
            return Ok(());
        }
        let options = &self.options;
        // Peers write there what they reduce of this rank's part.
        let keep = |(&numel, road): (&usize, &Road)| match options.wire == options.kept && !options.whole {
            true => reachable(road.sharding.reach(), numel, options.kept, &self.device, Category::Gradients),
            false => Ok(Tensor::zeros_in([numel], options.kept, &self.device, Category::Gradients)?),
        };
        self.kept = self.part_numels.iter().zip(&self.roads).map(keep).collect::<Result<_>>()?;
        Ok(())
    }

    /// Room on the host for what this rank keeps, where it goes there.
    fn leave(&self) -> Result<Option<Leaving>> {
        let open = || Leaving::open(&self.device, &self.part_numels, self.options.kept);
        if self.options.leaves { open() } else { Ok(None) }
    }

    /// Whether every bucket has a buffer of its own.
    pub(super) fn keeps_buffers(&self) -> bool {
        self.options.keep_buffers && !self.sums_up()
    }

    /// From now on micro-batches are added up, in this type.
    pub(crate) fn accumulate_in(&mut self, kept: DType) -> Result<()> {
        if self.options.accumulates {
            return Ok(());
        }
        if self.has_gradients() || self.arrived.iter().any(Option::is_some) {
            let why = "gradients wait for a step: accumulation can only begin between steps";
            return Err(ZeroError::Request(why.into()));
        }
        self.options = ReduceOptions { accumulates: true, kept, ..self.options };
        (self.buffers, self.kept, self.sums, self.leaving) = (Vec::new(), Vec::new(), Vec::new(), None);
        self.allocate()
    }

    /// Where the gradient of a parameter may be written before it is pushed, so that it need not be copied: its place in
    /// its bucket, if that is in one stretch, free and of its type. Lent to one at a time.
    pub(crate) fn lend_place(&mut self, param: usize) -> Result<Option<Lent>> {
        let Some((bucket, seat)) = self.seats[param] else { return Ok(None) };
        let (shape, dtype) = self.shapes[param];
        let sums = self.sums_up();
        if sums && (!self.sums_in_place() || self.summed[param]) {
            return Ok(None);
        }
        let fits =
            self.device.backend().is_host() && dtype == self.options.wire && self.before(bucket) == 1.0;
        let Some(start) = self.buckets[bucket].whole_place(seat) else { return Ok(None) };
        let aligned = (start * dtype.size_bytes()).is_multiple_of(PLACE_ALIGNMENT_BYTES);
        let taken = self.loans[param].is_out() || self.arrived[param].is_some() || self.retired;
        if !fits || !aligned || taken || self.stay() || !(sums || self.can_place(bucket)?) {
            return Ok(None);
        }
        let place = if sums { self.sums[bucket].clone() } else { self.buffer(bucket)? };
        // SAFETY: a bucket leaves, and its places are written here, only when nothing of it is lent.
        let (lent, loan) = unsafe { Lent::new(&place.slice(start, shape)?, param) };
        self.loans[param] = loan;
        Ok(Some(lent))
    }

    pub(crate) fn buffer(&self, bucket: usize) -> Result<Tensor> {
        part(&self.buffers[self.slots[bucket]], 0, self.buckets[bucket].numel())
    }

    /// Whether a bucket's buffer can be written now. Buckets that have come back make room.
    pub(super) fn can_place(&mut self, bucket: usize) -> Result<bool> {
        if self.buckets[bucket].kind == Kind::Rows {
            return Ok(false);
        }
        if self.options.keep_buffers || self.stay() {
            return Ok(true);
        }
        while self
            .in_flight
            .first()
            .is_some_and(|earliest| earliest.work.as_ref().is_none_or(Pending::is_done))
        {
            let earliest = self.in_flight.remove(0);
            self.land(earliest)?;
        }
        let has_slot = |other: usize| self.slots[other] == self.slots[bucket];
        let busy = self.in_flight.iter().any(|other| has_slot(other.bucket));
        Ok(!busy && !(self.next..bucket).any(has_slot))
    }

    /// Copies one gradient to its places in a bucket's buffer; without one, zeros.
    pub(super) fn place(&mut self, bucket: usize, seat: usize, gradient: Option<Tensor>) -> Result<()> {
        let gradient = gradient.map(|gradient| self.prepared(bucket, gradient)).transpose()?;
        if self.stay() {
            return self.keep_whole(bucket, seat, gradient);
        }
        let buffer = self.buffer(bucket)?;
        let backend = self.device.backend();
        for place in &self.buckets[bucket].places[seat] {
            let to = part(&buffer, place.in_bucket, place.len)?;
            // SAFETY: the buffer is not under way with another bucket, and this place is not lent.
            let to = unsafe { Out::vouched(&to) };
            match &gradient {
                Some(gradient) => backend.copy(&part(gradient, place.in_param, place.len)?, to)?,
                None => backend.fill(to, 0.0)?,
            }
        }
        Ok(())
    }

    /// Keeps one gradient where it is; without one, zeros.
    pub(super) fn keep_whole(&mut self, bucket: usize, seat: usize, gradient: Option<Tensor>) -> Result<()> {
        let bucket = &self.buckets[bucket];
        for place in &bucket.places[seat] {
            let values = match &gradient {
                Some(gradient) => part(gradient, place.in_param, place.len)?,
                None => Tensor::zeros_in([place.len], self.options.wire, &self.device, Category::Gradients)?,
            };
            let in_part = bucket.in_part(place.in_bucket);
            match &mut self.leaving {
                Some(leaving) => leaving.give(bucket.group, in_part, values)?,
                None => self.coming.push(Segment { group: bucket.group, in_part, values }),
            }
        }
        Ok(())
    }

    /// Copies what is not in the bucket's buffer yet; a parameter without a gradient gives zeros.
    pub(super) fn fill(&mut self, index: usize) -> Result<()> {
        self.touched[index] = None;
        for seat in 0..self.buckets[index].params.len() {
            let param = self.buckets[index].params[seat];
            match self.arrived[param].take() {
                Some(Arrived::Placed) => {}
                Some(gradient) => self.place(index, seat, gradient.whole()?)?,
                None => self.place(index, seat, None)?,
            }
        }
        Ok(())
    }
}
