//! From the gradients of one rank to this rank's share of everybody's average.
//!
//! Backward hands gradients over one by one. Each is copied into its bucket's buffer and freed, unless it was written there
//! in the first place ([`Reducer::lend_place`]). When a bucket is full the ranks reduce it: on the progress thread, while
//! backward goes on, if `overlap_comm` says so; else at once if others need its buffer, and at the end if none does, since
//! each exchange makes the ranks wait for the slower one. What this rank owns is kept or added to what earlier
//! micro-batches left. Stages 2 and 3 reduce every micro-batch, since no rank keeps whole gradients; stages 0 and 1 add
//! micro-batches up and reduce once (see `sums`), unless told to do as the others, which makes all four equal to the last
//! bit. Rows of tables go their own way: see `rows`.
//!
//! A rank without peers that adds nothing up keeps gradients where backward made them: there are no buffers then, and
//! gradients take the room that activations leave.
//!
//! `buffers` is the memory of all this, `road` what happens between ranks, `sums` the micro-batches of stages 0 and 1,
//! `rows` the tables, `leaving` what goes to the host while backward goes on.

mod buffers;
mod leaving;
mod measures;
mod road;
mod rows;
mod sums;
#[cfg(test)]
mod tests;

use std::ops::Range;

use ferrospeed_config::DataType;
use ferrospeed_optim::norm::Magnitude;
use ferrospeed_placement::buckets::{Bucket, Kind, Owned};
use ferrospeed_placement::{Departure, Gradients, Kept};
use ferrospeed_tensor::backend::{Binary, Unary};
use ferrospeed_tensor::{Category, DType, Device, Lent, Loan, Out, Returned, RowGradient, Shape, Tensor};

use crate::error::{Result, ZeroError};
use crate::memory::part;
use crate::quantized_gradients::parcels;
use ferrospeed_collective::exchange::Pending;
use ferrospeed_collective::hops::Parcels;
use leaving::Leaving;
pub(crate) use measures::Measured;
pub(crate) use road::Road;

/// A reduced gradient: elements `in_part..` of a group's part.
#[derive(Debug, Clone)]
pub(crate) struct Segment {
    pub(crate) group: usize,
    pub(crate) in_part: usize,
    pub(crate) values: Tensor,
}

impl Segment {
    /// What a stretch of the part has of it: where that starts in the part, and its length.
    pub(crate) fn within(&self, stretch: &Range<usize>) -> Option<(usize, usize)> {
        let start = stretch.start.max(self.in_part);
        let end = stretch.end.min(self.in_part + self.values.numel());
        (start < end).then(|| (start, end - start))
    }
}

/// A gradient on its way into its bucket.
pub(crate) enum Arrived {
    /// All of it.
    Whole(Tensor),
    /// The rows that are not zero.
    Rows(RowGradient),
    /// All of it, in the place that was lent for it.
    Lent(Lent),
    /// It is where it belongs already.
    Placed,
}

impl Arrived {
    /// A gradient of parameter `param` as backward hands it over.
    pub(crate) fn of(param: usize, gradient: Tensor) -> Result<Arrived> {
        Ok(match gradient.into_returned()? {
            Returned::Own(gradient) => Arrived::Whole(gradient),
            Returned::Lent(lent) if lent.param() == param => Arrived::Lent(lent),
            Returned::Lent(lent) => Arrived::Whole(copied(&lent.into_tensor())?),
        })
    }

    /// The whole gradient; `None` when it is not here any more.
    pub(crate) fn whole(self) -> Result<Option<Tensor>> {
        Ok(match self {
            Arrived::Whole(gradient) => Some(gradient),
            Arrived::Rows(rows) => Some(rows.to_dense()?),
            Arrived::Lent(lent) => Some(copied(&lent.into_tensor())?),
            Arrived::Placed => None,
        })
    }
}

/// The same in memory of its own.
fn copied(gradient: &Tensor) -> Result<Tensor> {
    let mut copy =
        Tensor::empty_in(*gradient.shape(), gradient.dtype(), gradient.device(), Category::Gradients)?;
    gradient.device().backend().copy(gradient, copy.out()?)?;
    Ok(copy)
}

/// A bucket on its way.
pub(crate) struct InFlight {
    pub(crate) bucket: usize,
    pub(crate) work: Option<Pending>,
    /// What this rank owns of it.
    pub(crate) own: Tensor,
}

/// The type of the tensors that hold a configured type.
fn dtype(data_type: DataType) -> DType {
    match data_type {
        DataType::Fp32 => DType::F32,
        DataType::Fp16 => DType::F16,
        DataType::Bf16 => DType::BF16,
    }
}

/// The gradients of all groups on their way.
pub(crate) struct Reducer {
    /// Over which ranks gradients are reduced, by group.
    pub(crate) roads: Vec<Road>,
    /// Where gradients are between backward and step.
    pub(crate) placed: Gradients,
    /// The types in which they travel, and in which they are kept.
    pub(crate) wire: DType,
    pub(crate) kept_type: DType,
    pub(crate) buckets: Vec<Bucket>,
    /// What of each bucket goes to whom, where it travels as small integers.
    parcels: Vec<Parcels>,
    /// (bucket, place among its parameters) of every parameter that is trained.
    pub(crate) seats: Vec<Option<(usize, usize)>>,
    /// Empty where gradients stay as they come.
    buffers: Vec<Tensor>,
    pub(crate) arrived: Vec<Option<Arrived>>,
    /// Of each parameter, its place in a buffer as it was last lent to backward.
    pub(crate) loans: Vec<Loan>,
    pub(crate) missing: Vec<usize>,
    /// The next bucket to leave.
    next: usize,
    in_flight: Vec<InFlight>,
    /// What this rank keeps, by group; empty where the buffers themselves are kept.
    kept: Vec<Tensor>,
    /// The same where it leaves the device.
    leaving: Option<Leaving>,
    /// Where one reduction ends an accumulation: the sums of this rank's micro-batches, by bucket, and what they become.
    pub(crate) sums: Vec<Tensor>,
    /// Which parameters have brought something to them.
    pub(crate) summed: Vec<bool>,
    /// Whether those are reduced.
    pub(crate) settled: bool,
    /// Whether the micro-batch under way ends an accumulation.
    pub(crate) is_last: bool,
    /// Whether this rank's gradients stay its own: nothing is exchanged, and nothing is averaged.
    pub(crate) is_local: bool,
    /// Where gradients stay as they come: those of the last micro-batch, and of the one that is under way.
    whole: Vec<Segment>,
    coming: Vec<Segment>,
    part_numels: Vec<usize>,
    micro_steps: usize,
    pub(crate) device: Device,
    pub(crate) shapes: Vec<(Shape, DType)>,
    /// Which rows of a table's buffer are not zero; `None` when any may be.
    pub(crate) touched: Vec<Option<Vec<i64>>>,
    /// Whether nobody takes gradients any more.
    retired: bool,
}

impl Reducer {
    pub(crate) fn new(
        roads: Vec<Road>,
        placed: Gradients,
        buckets: Vec<Bucket>,
        part_numels: &[usize],
        shapes: Vec<(Shape, DType)>,
        device: &Device,
    ) -> Result<Reducer> {
        let mut seats = vec![None; shapes.len()];
        for (index, bucket) in buckets.iter().enumerate() {
            bucket.params.iter().enumerate().for_each(|(seat, &param)| seats[param] = Some((index, seat)));
        }
        let is_exact = |param: usize| shapes[param].0.dims() < 2;
        let parcels = buckets.iter().map(|bucket| parcels(bucket, is_exact)).collect();
        let mut reducer = Reducer {
            roads,
            parcels,
            wire: dtype(placed.facts.wire),
            kept_type: dtype(placed.facts.kept),
            placed,
            missing: buckets.iter().map(|bucket| bucket.params.len()).collect(),
            touched: vec![None; buckets.len()],
            buckets,
            seats,
            buffers: Vec::new(),
            arrived: shapes.iter().map(|_| None).collect(),
            loans: vec![Loan::default(); shapes.len()],
            next: 0,
            in_flight: Vec::new(),
            kept: Vec::new(),
            leaving: None,
            sums: Vec::new(),
            summed: vec![false; shapes.len()],
            settled: false,
            is_last: true,
            is_local: false,
            whole: Vec::new(),
            coming: Vec::new(),
            part_numels: part_numels.to_vec(),
            micro_steps: 0,
            device: device.clone(),
            shapes,
            retired: false,
        };
        reducer.allocate()?;
        Ok(reducer)
    }

    /// Whether gradients stay as they come.
    fn stay(&self) -> bool {
        self.placed.kept == Kept::AsMade
    }

    /// The buffer that a bucket uses, where buckets have any.
    fn slot(&self, bucket: usize) -> Option<usize> {
        self.placed.slots.get(bucket).copied()
    }

    /// Takes a parameter's gradient. With `synchronize` off it only waits to be added to the next one.
    pub(crate) fn push(&mut self, param: usize, gradient: Arrived, synchronize: bool) -> Result<()> {
        if self.retired {
            let why = "the engine that trained it is gone, so nobody takes its gradient";
            return Err(ZeroError::Request(why.into()));
        }
        if self.sums_up() {
            return self.push_to_sum(param, gradient, synchronize);
        }
        let Some((bucket, seat)) = self.seats[param] else { return Ok(()) };
        let gradient = match self.arrived[param].take() {
            None => gradient,
            Some(held) => Arrived::Whole(self.sum(held, gradient)?),
        };
        if !synchronize {
            let gradient = match gradient {
                Arrived::Lent(lent) => Arrived::Whole(copied(&lent.into_tensor())?),
                gradient => gradient,
            };
            self.arrived[param] = Some(gradient);
            return Ok(());
        }
        let placed = match gradient {
            Arrived::Whole(gradient) if self.can_place(bucket)? => {
                self.place(bucket, seat, Some(gradient))?;
                Arrived::Placed
            }
            Arrived::Lent(lent) => {
                drop(lent);
                Arrived::Placed
            }
            gradient => gradient,
        };
        self.arrived[param] = Some(placed);
        // One held back by an earlier, unsynchronised micro-batch counts when its successor comes.
        self.missing[bucket] = self.missing[bucket].saturating_sub(1);
        match self.placed.departure {
            Departure::AtTheEnd => Ok(()),
            Departure::WhenFull | Departure::Beside => self.launch_full(),
        }
    }

    /// Sends the buckets off that are full, in their order.
    pub(crate) fn launch_full(&mut self) -> Result<()> {
        while self.next < self.buckets.len()
            && self.missing[self.next] == 0
            && self.buckets[self.next].kind != Kind::Leaf
        {
            self.launch(self.next)?;
            self.next += 1;
        }
        Ok(())
    }

    /// Sends off what is still here, and takes back what left.
    pub(crate) fn launch_rest(&mut self) -> Result<()> {
        while self.next < self.buckets.len() {
            self.launch(self.next)?;
            self.next += 1;
        }
        for in_flight in std::mem::take(&mut self.in_flight) {
            self.land(in_flight)?;
        }
        Ok(())
    }

    fn sum(&self, held: Arrived, more: Arrived) -> Result<Tensor> {
        let (Some(held), Some(more)) = (held.whole()?, more.whole()?) else {
            let why = "a parameter got a second gradient in one backward";
            return Err(ZeroError::Request(why.into()));
        };
        let mut sum = Tensor::empty_in(*held.shape(), held.dtype(), &self.device, Category::Gradients)?;
        self.device.backend().binary(Binary::Add, &held, &more, sum.out()?)?;
        Ok(sum)
    }

    /// Ends a micro-batch: everything that is still here leaves, and everything that left comes back.
    pub(crate) fn finish(&mut self) -> Result<()> {
        match self.sums_up() {
            true if self.is_last => self.settle()?,
            true => {}
            false => self.launch_rest()?,
        }
        self.leaving.as_mut().map_or(Ok(()), Leaving::end)?;
        self.whole = std::mem::take(&mut self.coming);
        self.next = 0;
        self.missing = self.buckets.iter().map(|bucket| bucket.params.len()).collect();
        self.micro_steps += 1;
        Ok(())
    }

    fn launch(&mut self, index: usize) -> Result<()> {
        if let Some(param) = self.buckets[index].params.iter().find(|&&param| self.loans[param].is_out()) {
            let why =
                format!("the gradient of parameter {param} is still being written where it is to be reduced");
            return Err(ZeroError::Request(why));
        }
        // The buffer may still be under way with an earlier bucket.
        let slot = self.slot(index);
        while slot.is_some() && self.in_flight.iter().any(|other| self.slot(other.bucket) == slot) {
            let earliest = self.in_flight.remove(0);
            self.land(earliest)?;
        }
        if self.sums_up() {
            return match self.reduce_sum(index)? {
                None => Ok(()),
                Some(in_flight) if self.placed.departure == Departure::Beside => {
                    self.in_flight.push(in_flight);
                    Ok(())
                }
                Some(in_flight) => self.land(in_flight),
            };
        }
        let in_rows = self.buckets[index].kind == Kind::Rows && self.reduce_rows(index)?;
        if !in_rows {
            self.fill(index)?;
        }
        let in_flight = self.reduce(index, !in_rows && self.travels(index))?;
        match in_flight {
            None => Ok(()),
            Some(in_flight) if self.placed.departure == Departure::Beside && in_flight.work.is_some() => {
                self.in_flight.push(in_flight);
                Ok(())
            }
            Some(in_flight) => self.land(in_flight),
        }
    }

    /// Waits for a bucket and keeps what this rank owns of it.
    fn land(&mut self, in_flight: InFlight) -> Result<()> {
        let InFlight { bucket, work, own } = in_flight;
        if let Some(work) = work {
            work.wait()?;
        }
        let backend = self.device.backend();
        if let Some(after) = self.after(bucket) {
            // SAFETY: the exchange that wrote it is over, and nobody else knows this part.
            let own = unsafe { Out::vouched(&own) };
            backend.unary_in_place(Unary::Affine { scale: after, shift: 0.0 }, own)?;
        }
        if self.sums_up() {
            return self.land_sum(bucket, &own);
        }
        let bucket = &self.buckets[bucket];
        let from = |owned: &Owned| part(&own, owned.in_bucket - bucket.own_start, owned.len);
        if let Some(leaving) = &mut self.leaving {
            let is_first = self.micro_steps == 0;
            let send = |owned: &Owned| leaving.send(bucket.group, owned.in_part, &from(owned)?, is_first);
            return bucket.owned.iter().try_for_each(send);
        }
        let Some(kept) = self.kept.get(bucket.group) else { return Ok(()) };
        for owned in &bucket.owned {
            let from = from(owned)?;
            let to = part(kept, owned.in_part, owned.len)?;
            match self.micro_steps {
                0 if from.address() == to.address() => {}
                // SAFETY: what is kept is this reducer's own, and another buffer than the bucket's.
                0 => backend.cast(&from, unsafe { Out::vouched(&to) })?,
                // SAFETY: as above.
                _ => backend.add_assign(unsafe { Out::vouched(&to) }, &from)?,
            }
        }
        Ok(())
    }

    /// The reduced gradients of the micro-batches so far.
    pub(crate) fn segments(&self) -> Result<Vec<Segment>> {
        if let Some(leaving) = &self.leaving {
            return leaving.segments();
        }
        if self.stay() {
            return Ok(self.whole.clone());
        }
        if self.sums_up() {
            return self.summed_segments();
        }
        if !self.kept.is_empty() {
            let segment =
                |(group, values): (usize, &Tensor)| Segment { group, in_part: 0, values: values.clone() };
            return Ok(self.kept.iter().enumerate().map(segment).collect());
        }
        let mut segments = Vec::new();
        for (index, bucket) in self.buckets.iter().enumerate() {
            let buffer = self.buffer(index)?;
            for owned in &bucket.owned {
                let values = part(&buffer, owned.in_bucket, owned.len)?;
                segments.push(Segment { group: bucket.group, in_part: owned.in_part, values });
            }
        }
        Ok(segments)
    }

    /// What the device knows of gradients that have left it.
    pub(crate) fn measured(&self) -> Result<Option<Measured>> {
        self.leaving.as_ref().map(|leaving| leaving.measures.take()).transpose()
    }

    /// Notes the largest magnitude of a step: the next one's is likely to be close.
    pub(crate) fn expect(&mut self, magnitude: Magnitude) {
        if let Some(leaving) = &mut self.leaving {
            leaving.measures.expect(magnitude);
        }
    }

    /// Whether a micro-batch has been reduced since the last step.
    pub(crate) fn has_gradients(&self) -> bool {
        self.micro_steps > 0
    }

    /// Forgets everything, for the next step.
    pub(crate) fn clear(&mut self) {
        self.micro_steps = 0;
        (self.whole, self.coming) = (Vec::new(), Vec::new());
        // A backward that failed half-way has left its count behind.
        if self.in_flight.is_empty() {
            self.next = 0;
            self.missing = self.buckets.iter().map(|bucket| bucket.params.len()).collect();
        }
        self.arrived.iter_mut().for_each(|arrived| *arrived = None);
        self.summed.fill(false);
        (self.settled, self.is_last) = (false, true);
    }

    /// Gives back all memory: no gradient is taken after this. What is under way keeps what it needs until it is done.
    pub(crate) fn retire(&mut self) {
        self.retired = true;
        self.clear();
        self.in_flight = Vec::new();
        self.buffers = Vec::new();
        (self.kept, self.sums, self.leaving) = (Vec::new(), Vec::new(), None);
    }

    /// Checks a gradient's shape before it is taken.
    pub(crate) fn check(&self, param: usize, gradient: &Tensor) -> Result<()> {
        let (shape, dtype) = &self.shapes[param];
        if gradient.shape() == shape && gradient.dtype() == *dtype {
            return Ok(());
        }
        Err(ZeroError::Request(format!("a gradient of {gradient:?} came for a parameter of {dtype}{shape}")))
    }
}
