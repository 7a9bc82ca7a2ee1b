//! One reduction per step: stages 0 and 1 add micro-batches up on each rank, and reduce the sums of the last.
//!
//! Every rank holds whole gradients there, so nothing has to leave it before the accumulation ends: sixteen micro-batches
//! cost the traffic of one. Sums are kept by bucket. Where they have the type of the wire they are reduced in place, else
//! through a buffer of that type; what comes back takes their place.

use ferrospeed_placement::{Departure, Kept};
use ferrospeed_tensor::backend::Unary;
use ferrospeed_tensor::{Out, Tensor, ops};

use super::{Arrived, InFlight, Reducer, Segment};
use crate::error::{Result, ZeroError};
use crate::memory::part;

impl Reducer {
    /// Whether micro-batches are added up before they are reduced.
    pub(crate) fn sums_up(&self) -> bool {
        matches!(self.placed.kept, Kept::InSums { .. })
    }

    /// Whether sums are reduced where they are.
    pub(crate) fn sums_in_place(&self) -> bool {
        self.placed.kept == Kept::InSums { in_place: true }
    }

    /// Begins a micro-batch, after which a step follows or does not.
    pub(crate) fn begin(&mut self, last: bool) -> Result<()> {
        self.is_last = last;
        self.check_open()
    }

    fn check_open(&self) -> Result<()> {
        if !self.settled {
            return Ok(());
        }
        let why = "the gradients of this step are averaged over ranks already: call step, or zero_grad, before another backward; if the accumulation was to go on, say so before backward (set_gradient_accumulation_boundary)";
        Err(ZeroError::Request(why.into()))
    }

    /// Whether what is here is everybody's average; else it is what this rank has added up so far.
    pub(crate) fn is_averaged(&self) -> bool {
        !self.sums_up() || self.settled || self.placed.facts.alone
    }

    /// Adds a parameter's gradient to what earlier micro-batches brought.
    pub(crate) fn push_to_sum(&mut self, param: usize, gradient: Arrived, counts: bool) -> Result<()> {
        self.check_open()?;
        let Some((bucket, seat)) = self.seats[param] else { return Ok(()) };
        let gradient = match gradient {
            // It was written where the sum is; nothing was there before, or it would not have been lent.
            Arrived::Lent(lent) if !self.summed[param] => {
                drop(lent);
                None
            }
            gradient => gradient.whole()?,
        };
        let backend = self.device.backend();
        let places = &self.buckets[bucket].places[seat];
        for (gradient, place) in gradient.iter().flat_map(|all| places.iter().map(move |place| (all, place)))
        {
            let from = part(&ops::reshape(gradient, [gradient.numel()])?, place.in_param, place.len)?;
            let to = part(&self.sums[bucket], place.in_bucket, place.len)?;
            // SAFETY: the sums are this reducer's own, none of them is being exchanged, and this place is not lent.
            let to = unsafe { Out::vouched(&to) };
            match self.summed[param] {
                true => backend.add_assign(to, &from)?,
                false => backend.cast(&from, to)?,
            }
        }
        self.summed[param] = true;
        if counts {
            self.missing[bucket] = self.missing[bucket].saturating_sub(1);
        }
        if self.is_last && self.placed.departure == Departure::Beside {
            self.launch_full()?;
        }
        Ok(())
    }

    /// Averages what was added up, if that has not been done.
    pub(crate) fn settle(&mut self) -> Result<()> {
        if !self.sums_up() || self.settled {
            return Ok(());
        }
        self.launch_rest()?;
        self.settled = true;
        Ok(())
    }

    /// Starts the reduction of a bucket's sum; `None` where there is nothing to wait for.
    pub(crate) fn reduce_sum(&mut self, index: usize) -> Result<Option<InFlight>> {
        let (bucket, sum, backend) = (&self.buckets[index], &self.sums[index], self.device.backend());
        for (seat, places) in bucket.places.iter().enumerate() {
            if !self.summed[bucket.params[seat]] {
                for place in places {
                    let place = part(sum, place.in_bucket, place.len)?;
                    // SAFETY: as in `push_to_sum`; `launch` has seen that nothing of the bucket is lent.
                    backend.fill(unsafe { Out::vouched(&place) }, 0.0)?;
                }
            }
        }
        let before = self.before(index);
        let scale = |factor: f32, sum: &Tensor| {
            // SAFETY: as above.
            backend.unary_in_place(Unary::Affine { scale: factor, shift: 0.0 }, unsafe { Out::vouched(sum) })
        };
        if before != 1.0 {
            scale(before, sum)?;
        }
        if !self.travels(index) {
            if let Some(after) = self.after(index) {
                scale(after, sum)?;
            }
            return Ok(None);
        }
        let data = if self.sums_in_place() {
            sum.clone()
        } else {
            let buffer = self.buffer(index)?;
            // SAFETY: as above; the buffer is not under way with another bucket.
            backend.cast(sum, unsafe { Out::vouched(&buffer) })?;
            buffer
        };
        let own = part(&data, bucket.own_start, bucket.own_numel())?;
        let work = self.exchange(index, &data, &own)?;
        Ok(Some(InFlight { bucket: index, work: Some(work), own }))
    }

    /// Puts what this rank owns of a reduced bucket in the place of its sum.
    pub(crate) fn land_sum(&mut self, bucket: usize, own: &Tensor) -> Result<()> {
        if self.sums_in_place() {
            return Ok(());
        }
        let place = part(&self.sums[bucket], self.buckets[bucket].own_start, own.numel())?;
        // SAFETY: as in `push_to_sum`.
        Ok(self.device.backend().cast(own, unsafe { Out::vouched(&place) })?)
    }

    /// What this rank owns of the sums.
    pub(crate) fn summed_segments(&self) -> Result<Vec<Segment>> {
        let mut segments = Vec::new();
        for (bucket, sum) in self.buckets.iter().zip(&self.sums) {
            for owned in &bucket.owned {
                let values = part(sum, owned.in_bucket, owned.len)?;
                segments.push(Segment { group: bucket.group, in_part: owned.in_part, values });
            }
        }
        Ok(segments)
    }
}
