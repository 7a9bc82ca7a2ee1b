//! The memory that gradients pass through: buckets' buffers, and the places in them that backward writes to.
//!
//! Where reduced gradients are whole each bucket has a buffer of its own, which is kept; else the buckets that the same
//! ranks reach take turns with one or two. A gradient may be written to its place in the first place
//! ([`Reducer::lend_place`]), so that it is never copied.

use ferrospeed_placement::buckets::{Bucket, Kind};
use ferrospeed_placement::gradients::Buffer;
use ferrospeed_placement::share::Purpose;
use ferrospeed_placement::stage::Extent;
use ferrospeed_placement::{Kept, Memory};
use ferrospeed_tensor::{Category, DType, Lent, Out, Tensor};

use super::leaving::Leaving;
use super::{Arrived, Reducer, Segment};
use crate::error::{Result, ZeroError};
use crate::memory::{part, zeros};
use crate::store::data_type;
use ferrospeed_collective::exchange::Pending;

/// Places are lent only where kernels write as fast as to memory of their own.
const PLACE_ALIGNMENT_BYTES: usize = 64;

impl Reducer {
    /// Memory for the buckets, and for what is kept beside them, as they are placed.
    pub(super) fn allocate(&mut self) -> Result<()> {
        let (wire, kept) = (self.wire, self.kept_type);
        self.sums = match self.placed.kept {
            Kept::InSums { in_place } => {
                let of = |bucket: &Bucket| {
                    self.known(bucket.group, in_place, bucket.numel(), kept, Category::Gradients)
                };
                self.buckets.iter().map(of).collect::<Result<_>>()?
            }
            Kept::AsMade | Kept::InBuckets | Kept::Apart => Vec::new(),
        };
        let category = match self.placed.buffers_purpose() {
            Purpose::Gradients => Category::Gradients,
            _ => Category::Buffers,
        };
        let buffer = |buffer: &Buffer| self.known(buffer.share, true, buffer.numel, wire, category);
        self.buffers = self.placed.buffers.iter().map(buffer).collect::<Result<_>>()?;
        self.leaving = match self.placed.leave {
            true => Leaving::open(&self.device, &self.part_numels, kept)?,
            false => None,
        };
        if self.placed.kept != Kept::Apart || self.leaving.is_some() {
            return Ok(());
        }
        let in_reach = self.placed.is_kept_in_reach();
        let part = |(share, &numel)| self.known(share, in_reach, numel, kept, Category::Gradients);
        self.kept = self.part_numels.iter().enumerate().map(part).collect::<Result<_>>()?;
        Ok(())
    }

    /// Zeros that the ranks which reach each other's gradients of a share know, or this one alone.
    fn known(
        &self,
        share: usize,
        in_reach: bool,
        numel: usize,
        dtype: DType,
        category: Category,
    ) -> Result<Tensor> {
        let reach = self.roads[share].sharding.reach();
        let memory = if in_reach && reach.size() > 1 { Memory::Reached } else { Memory::Own };
        zeros(memory, reach, numel, dtype, &self.device, category)
    }

    /// From now on micro-batches are added up, in this type.
    pub(crate) fn accumulate_in(&mut self, kept: DType) -> Result<()> {
        if self.placed.facts.accumulates {
            return Ok(());
        }
        if self.has_gradients() || self.arrived.iter().any(Option::is_some) {
            let why = "gradients wait for a step: accumulation can only begin between steps";
            return Err(ZeroError::Request(why.into()));
        }
        let reach: Vec<&str> = self.roads.iter().map(|road| road.sharding.reach().name()).collect();
        self.placed = self.placed.accumulating_in(data_type(kept), &reach, &self.buckets);
        self.kept_type = kept;
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
        let fits = self.device.backend().is_host() && dtype == self.wire && self.before(bucket) == 1.0;
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
        part(&self.buffers[self.placed.slots[bucket]], 0, self.buckets[bucket].numel())
    }

    /// Whether a bucket's buffer can be written now. Buckets that have come back make room.
    pub(super) fn can_place(&mut self, bucket: usize) -> Result<bool> {
        if self.buckets[bucket].kind == Kind::Rows {
            return Ok(false);
        }
        if self.placed.facts.extent == Extent::Whole || self.stay() {
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
        let has_slot = |other: usize| self.slot(other) == self.slot(bucket);
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
                None => Tensor::zeros_in([place.len], self.wire, &self.device, Category::Gradients)?,
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
