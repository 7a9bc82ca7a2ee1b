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

use std::collections::BTreeMap;

use ferrospeed_comm::ReduceOp;
use ferrospeed_tensor::backend::{Binary, Unary};
use ferrospeed_tensor::{Category, DType, Device, RowGradient, Shape, Tensor, ops};

use crate::buckets::{Bucket, Kind};
use crate::error::{Result, ZeroError};
use crate::memory::{part, reachable};
use crate::sharding::Sharding;
use ferrospeed_collective::exchange::{self, Pending};

/// Places are lent only where kernels write as fast as to memory of their own.
const PLACE_ALIGNMENT_BYTES: usize = 64;

/// How gradients are averaged and kept.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ReduceOptions {
    /// Everybody keeps everything (stage 0), or each rank its own.
    pub(crate) whole: bool,
    /// One buffer for every bucket (stages 0 and 1), or a few that are used in turn.
    pub(crate) keep_buffers: bool,
    /// Whether reduction runs beside backward.
    pub(crate) overlap: bool,
    /// The type in which gradients travel.
    pub(crate) wire: DType,
    /// The type in which they are kept.
    pub(crate) kept: DType,
    /// Whether micro-batches are added up.
    pub(crate) accumulates: bool,
    /// Whether each of them is reduced before that, where one reduction of the sum would do.
    pub(crate) each_micro_batch: bool,
}

/// The way of a share's gradients from the ranks to their average.
#[derive(Debug, Clone)]
pub(crate) struct Road {
    pub(crate) sharding: Sharding,
    /// Multiplies gradients before the sum, and after it; `None` after it means the plain average.
    pub(crate) before: f32,
    pub(crate) after: Option<f32>,
}

impl Road {
    /// What ranks do with gradients.
    pub(crate) fn operation(&self) -> ReduceOp {
        if self.after.is_some() { ReduceOp::Sum } else { ReduceOp::Avg }
    }

    /// Whether this rank's gradients are all there are, as they are.
    fn is_short(&self) -> bool {
        self.sharding.ranks() == 1 && self.before == 1.0 && self.after.is_none_or(|after| after == 1.0)
    }
}

/// A reduced gradient: elements `in_part..` of a group's part.
#[derive(Debug, Clone)]
pub(crate) struct Segment {
    pub(crate) group: usize,
    pub(crate) in_part: usize,
    pub(crate) values: Tensor,
}

/// A gradient on its way into its bucket.
pub(crate) enum Arrived {
    /// All of it.
    Whole(Tensor),
    /// The rows that are not zero.
    Rows(RowGradient),
    /// It is where it belongs already.
    Placed,
}

impl Arrived {
    /// The whole gradient; `None` when it is not here any more.
    pub(crate) fn whole(self) -> Result<Option<Tensor>> {
        Ok(match self {
            Arrived::Whole(gradient) => Some(gradient),
            Arrived::Rows(rows) => Some(rows.to_dense()?),
            Arrived::Placed => None,
        })
    }
}

/// A bucket on its way.
pub(crate) struct InFlight {
    pub(crate) bucket: usize,
    pub(crate) work: Option<Pending>,
    /// What this rank owns of it.
    pub(crate) own: Tensor,
}

/// The gradients of all groups on their way.
pub(crate) struct Reducer {
    /// Over which ranks gradients are reduced, by group.
    pub(crate) roads: Vec<Road>,
    pub(crate) options: ReduceOptions,
    pub(crate) buckets: Vec<Bucket>,
    /// (bucket, place among its parameters) of every parameter that is trained.
    pub(crate) seats: Vec<Option<(usize, usize)>>,
    /// Empty where gradients stay as they come.
    buffers: Vec<Tensor>,
    /// Which buffer each bucket uses.
    slots: Vec<usize>,
    pub(crate) arrived: Vec<Option<Arrived>>,
    /// Parameters whose places in a buffer were lent to backward and have not come back as a gradient.
    pub(crate) lent: Vec<bool>,
    pub(crate) missing: Vec<usize>,
    /// The next bucket to leave.
    next: usize,
    in_flight: Vec<InFlight>,
    /// What this rank keeps, by group; empty where the buffers themselves are kept.
    kept: Vec<Tensor>,
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
        options: ReduceOptions,
        buckets: Vec<Bucket>,
        part_numels: &[usize],
        shapes: Vec<(Shape, DType)>,
        device: &Device,
    ) -> Result<Reducer> {
        let mut seats = vec![None; shapes.len()];
        for (index, bucket) in buckets.iter().enumerate() {
            bucket.params.iter().enumerate().for_each(|(seat, &param)| seats[param] = Some((index, seat)));
        }
        let mut reducer = Reducer {
            roads,
            options,
            missing: buckets.iter().map(|bucket| bucket.params.len()).collect(),
            touched: vec![None; buckets.len()],
            buckets,
            seats,
            buffers: Vec::new(),
            slots: Vec::new(),
            arrived: shapes.iter().map(|_| None).collect(),
            lent: vec![false; shapes.len()],
            next: 0,
            in_flight: Vec::new(),
            kept: Vec::new(),
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
        let options = &self.options;
        !options.accumulates && options.wire == options.kept && self.roads.iter().all(Road::is_short)
    }

    /// The way of a bucket's gradients.
    pub(crate) fn road(&self, bucket: usize) -> &Road {
        &self.roads[self.buckets[bucket].group]
    }

    /// Whether a bucket's gradients have to be exchanged.
    pub(crate) fn travels(&self, bucket: usize) -> bool {
        !self.is_local && self.road(bucket).sharding.ranks() > 1
    }

    /// What multiplies a bucket's gradients before their sum.
    pub(crate) fn before(&self, bucket: usize) -> f32 {
        if self.is_local { 1.0 } else { self.road(bucket).before }
    }

    /// What multiplies them after it, where that is anything.
    pub(crate) fn after(&self, bucket: usize) -> Option<f32> {
        self.road(bucket).after.filter(|&after| after != 1.0 && !self.is_local)
    }

    /// Memory for the buckets, and for what is kept beside them, where they are used again or hold another type.
    fn allocate(&mut self) -> Result<()> {
        if self.stay() {
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
        // Peers write there what they reduce of this rank's part.
        let keep = |(&numel, road): (&usize, &Road)| match options.wire == options.kept && !options.whole {
            true => reachable(road.sharding.reach(), numel, options.kept, &self.device, Category::Gradients),
            false => Ok(Tensor::zeros_in([numel], options.kept, &self.device, Category::Gradients)?),
        };
        self.kept = self.part_numels.iter().zip(&self.roads).map(keep).collect::<Result<_>>()?;
        Ok(())
    }

    /// Whether every bucket has a buffer of its own.
    fn keeps_buffers(&self) -> bool {
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
        (self.buffers, self.kept, self.sums) = (Vec::new(), Vec::new(), Vec::new());
        self.allocate()
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
        self.lent[param] = false;
        let gradient = match self.arrived[param].take() {
            None => gradient,
            Some(held) => Arrived::Whole(self.sum(held, gradient)?),
        };
        if !synchronize {
            self.arrived[param] = Some(gradient);
            return Ok(());
        }
        let placed = match gradient {
            Arrived::Whole(gradient) if self.can_place(bucket)? => {
                self.place(bucket, seat, Some(gradient))?;
                Arrived::Placed
            }
            gradient => gradient,
        };
        self.arrived[param] = Some(placed);
        // One held back by an earlier, unsynchronised micro-batch counts when its successor comes.
        self.missing[bucket] = self.missing[bucket].saturating_sub(1);
        if self.options.keep_buffers && !self.options.overlap {
            return Ok(());
        }
        self.launch_full()
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

    /// Where the gradient of a parameter may be written before it is pushed, so that it need not be copied: its place in
    /// its bucket, if that is in one stretch, free and of its type. Lent once, until the gradient is pushed.
    pub(crate) fn lend_place(&mut self, param: usize) -> Result<Option<Tensor>> {
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
        let taken = self.lent[param] || self.arrived[param].is_some() || self.retired;
        if !fits || !aligned || taken || self.stay() || !(sums || self.can_place(bucket)?) {
            return Ok(None);
        }
        self.lent[param] = true;
        let place = if sums { self.sums[bucket].clone() } else { self.buffer(bucket)? };
        Ok(Some(place.slice(start, shape)?))
    }

    /// Whether a gradient lies in the place that was lent for it.
    pub(crate) fn is_lent(&self, param: usize, gradient: &Tensor) -> bool {
        let place = |(bucket, seat): (usize, usize)| {
            let start = self.buckets[bucket].whole_place(seat)?;
            let whole = if self.sums_up() { self.sums[bucket].clone() } else { self.buffer(bucket).ok()? };
            Some(part(&whole, start, gradient.numel()).ok()?.address())
        };
        self.lent[param] && self.seats[param].and_then(place) == Some(gradient.address())
    }

    fn sum(&self, held: Arrived, more: Arrived) -> Result<Tensor> {
        let (Some(held), Some(more)) = (held.whole()?, more.whole()?) else {
            let why = "a parameter got a second gradient in one backward";
            return Err(ZeroError::Request(why.into()));
        };
        let sum = Tensor::empty_in(*held.shape(), held.dtype(), &self.device, Category::Gradients)?;
        self.device.backend().binary(Binary::Add, &held, &more, &sum)?;
        Ok(sum)
    }

    /// Ends a micro-batch: everything that is still here leaves, and everything that left comes back.
    pub(crate) fn finish(&mut self) -> Result<()> {
        match self.sums_up() {
            true if self.is_last => self.settle()?,
            true => {}
            false => self.launch_rest()?,
        }
        self.whole = std::mem::take(&mut self.coming);
        self.next = 0;
        self.lent.fill(false);
        self.missing = self.buckets.iter().map(|bucket| bucket.params.len()).collect();
        self.micro_steps += 1;
        Ok(())
    }

    pub(crate) fn buffer(&self, bucket: usize) -> Result<Tensor> {
        part(&self.buffers[self.slots[bucket]], 0, self.buckets[bucket].numel())
    }

    /// Whether a bucket's buffer can be written now. Buckets that have come back make room.
    fn can_place(&mut self, bucket: usize) -> Result<bool> {
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

    fn launch(&mut self, index: usize) -> Result<()> {
        // The buffer may still be under way with an earlier bucket.
        let slot = self.slots.get(index).copied();
        while self
            .in_flight
            .iter()
            .any(|other| self.slots.get(other.bucket).copied() == slot && slot.is_some())
        {
            let earliest = self.in_flight.remove(0);
            self.land(earliest)?;
        }
        if self.sums_up() {
            return match self.reduce_sum(index)? {
                None => Ok(()),
                Some(in_flight) if self.options.overlap => {
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
            Some(in_flight) if self.options.overlap && in_flight.work.is_some() => {
                self.in_flight.push(in_flight);
                Ok(())
            }
            Some(in_flight) => self.land(in_flight),
        }
    }

    /// Copies what is not in the bucket's buffer yet; a parameter without a gradient gives zeros.
    fn fill(&mut self, index: usize) -> Result<()> {
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

    /// Copies one gradient to its places in a bucket's buffer; without one, zeros.
    fn place(&mut self, bucket: usize, seat: usize, gradient: Option<Tensor>) -> Result<()> {
        let gradient = gradient.map(|gradient| self.prepared(bucket, gradient)).transpose()?;
        if self.stay() {
            return self.keep_whole(bucket, seat, gradient);
        }
        let buffer = self.buffer(bucket)?;
        let backend = self.device.backend();
        for place in &self.buckets[bucket].places[seat] {
            match &gradient {
                Some(gradient)
                    if part(gradient, place.in_param, place.len)?.address()
                        == part(&buffer, place.in_bucket, place.len)?.address() => {}
                Some(gradient) => backend.copy_blocks(
                    gradient,
                    place.in_param,
                    place.len,
                    &buffer,
                    place.in_bucket,
                    place.len,
                    1,
                    place.len,
                )?,
                None => backend.fill(&part(&buffer, place.in_bucket, place.len)?, 0.0)?,
            }
        }
        Ok(())
    }

    /// Keeps one gradient where it is; without one, zeros.
    fn keep_whole(&mut self, bucket: usize, seat: usize, gradient: Option<Tensor>) -> Result<()> {
        let bucket = &self.buckets[bucket];
        for place in &bucket.places[seat] {
            let values = match &gradient {
                Some(gradient) => part(gradient, place.in_param, place.len)?,
                None => Tensor::zeros_in([place.len], self.options.wire, &self.device, Category::Gradients)?,
            };
            let in_part = bucket.in_part(place.in_bucket);
            self.coming.push(Segment { group: bucket.group, in_part, values });
        }
        Ok(())
    }

    /// In the type of the wire, and multiplied by what comes before the sum.
    pub(crate) fn prepared(&self, bucket: usize, gradient: Tensor) -> Result<Tensor> {
        let before = self.before(bucket);
        let gradient = if before == 1.0 {
            gradient
        } else {
            let scaled = Tensor::empty(*gradient.shape(), gradient.dtype(), &self.device)?;
            self.device.backend().unary(Unary::Affine { scale: before, shift: 0.0 }, &gradient, &scaled)?;
            scaled
        };
        Ok(ops::cast(&gradient, self.options.wire)?)
    }

    /// Starts the reduction of a bucket, where it is not reduced already.
    fn reduce(&self, index: usize, travels: bool) -> Result<Option<InFlight>> {
        if self.stay() {
            return Ok(None);
        }
        let (bucket, buffer) = (&self.buckets[index], self.buffer(index)?);
        let mut own = part(&buffer, bucket.own_start, bucket.own_numel())?;
        if travels && !self.options.whole {
            own = self.place_of_first(bucket)?.unwrap_or(own);
        }
        let work = travels.then(|| self.exchange(index, &buffer, &own)).transpose()?;
        Ok(Some(InFlight { bucket: index, work, own }))
    }

    /// Starts the exchange of a bucket that lies in `data`; this rank's part arrives in `own`.
    pub(crate) fn exchange(&self, index: usize, data: &Tensor, own: &Tensor) -> Result<Pending> {
        let (bucket, road) = (&self.buckets[index], self.road(index));
        let (levels, op) = (road.sharding.levels(), road.operation());
        Ok(match self.options.whole {
            true => exchange::all_reduce(levels, data, op)?,
            false => exchange::reduce_scatter(levels, data, own, &bucket.counts, op)?,
        })
    }

    /// Where the first micro-batch's reduction of a bucket goes without a copy: where it is kept.
    fn place_of_first(&self, bucket: &Bucket) -> Result<Option<Tensor>> {
        match (self.kept.get(bucket.group), &bucket.owned[..]) {
            (Some(kept), [owned]) if self.micro_steps == 0 && self.options.wire == self.options.kept => {
                part(kept, owned.in_part, owned.len).map(Some)
            }
            _ => Ok(None),
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
            backend.unary(Unary::Affine { scale: after, shift: 0.0 }, &own, &own)?;
        }
        if self.sums_up() {
            return self.land_sum(bucket, &own);
        }
        let bucket = &self.buckets[bucket];
        let Some(kept) = self.kept.get(bucket.group) else { return Ok(()) };
        for owned in &bucket.owned {
            let from = part(&own, owned.in_bucket - bucket.own_start, owned.len)?;
            let to = part(kept, owned.in_part, owned.len)?;
            match self.micro_steps {
                0 if from.address() == to.address() => {}
                0 => backend.cast(&from, &to)?,
                _ => backend.add_assign(&to, &from)?,
            }
        }
        Ok(())
    }

    /// The reduced gradients of the micro-batches so far.
    pub(crate) fn segments(&self) -> Result<Vec<Segment>> {
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
        self.lent.fill(false);
        self.summed.fill(false);
        (self.settled, self.is_last) = (false, true);
    }

    /// Gives back all memory: no gradient is taken after this. What is under way keeps what it needs until it is done.
    pub(crate) fn retire(&mut self) {
        self.retired = true;
        self.clear();
        self.in_flight = Vec::new();
        self.buffers = Vec::new();
        (self.kept, self.sums) = (Vec::new(), Vec::new());
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buckets;
    use crate::partition::Layout;

    /// A rank of its own with parameters of so many elements.
    fn reducer(numels: &[usize], accumulates: bool) -> Reducer {
        let layout = Layout::flat(numels, 1, false);
        let group: Vec<(usize, usize)> = numels.iter().copied().enumerate().collect();
        let plan = buckets::plan(&[group], std::slice::from_ref(&layout), |_| Kind::Ordinary, &[0], &[100]);
        let options = ReduceOptions {
            whole: true,
            keep_buffers: true,
            overlap: false,
            wire: DType::F32,
            kept: DType::F32,
            accumulates,
            each_micro_batch: true,
        };
        let shapes = numels.iter().map(|&numel| (Shape::from([numel]), DType::F32)).collect();
        let numel = layout.part_numel;
        let sharding = Sharding::over_world(&ferrospeed_comm::World::solo());
        let road = Road { sharding, before: 1.0, after: None };
        Reducer::new(vec![road], options, plan, &[numel], shapes, &Device::cpu()).unwrap()
    }

    fn gradient(value: f32, numel: usize) -> Arrived {
        Arrived::Whole(Tensor::full([numel], value, DType::F32, &Device::cpu()).unwrap())
    }

    #[test]
    fn a_gradient_is_written_where_it_goes_by_one_at_a_time() {
        let mut reducer = reducer(&[16, 16, 3, 5], true);
        for turn in 1..3 {
            let place = reducer.lend_place(1).unwrap().expect("its place is free");
            assert!(reducer.lend_place(1).unwrap().is_none(), "another use of the parameter");
            assert!(reducer.is_lent(1, &place) && !reducer.is_lent(0, &place));
            assert!(reducer.lend_place(3).unwrap().is_none(), "not aligned");
            place.device().backend().fill(&place, 4.0).unwrap();
            reducer.push(1, Arrived::Whole(place.clone()), true).unwrap();
            assert!(!reducer.is_lent(1, &place), "it came back");
            for (param, numel) in [(0, 16), (2, 3), (3, 5)] {
                reducer.push(param, gradient(1.0, numel), true).unwrap();
            }
            reducer.finish().unwrap();
            let kept = reducer.segments().unwrap()[0].values.to_vec::<f32>().unwrap();
            let expected =
                [1.0; 16].iter().chain(&[4.0; 16]).chain(&[1.0; 8]).map(|value| value * turn as f32);
            assert_eq!(kept, expected.collect::<Vec<f32>>());
        }
        reducer.push(1, gradient(1.0, 16), false).unwrap();
        assert!(reducer.lend_place(1).unwrap().is_none(), "one waits already");
    }

    #[test]
    fn a_backward_that_failed_leaves_nothing_behind() {
        let mut reducer = reducer(&[3, 2], false);
        // One gradient comes, then backward fails and its gradients are dropped.
        reducer.push(1, gradient(9.0, 2), true).unwrap();
        reducer.clear();
        reducer.push(1, gradient(1.0, 2), true).unwrap();
        reducer.push(0, gradient(2.0, 3), true).unwrap();
        reducer.finish().unwrap();
        let mut found: Vec<(usize, Vec<f32>)> = reducer
            .segments()
            .unwrap()
            .iter()
            .map(|segment| (segment.in_part, segment.values.to_vec::<f32>().unwrap()))
            .collect();
        found.sort_by_key(|(in_part, _)| *in_part);
        assert_eq!(found, [(0, vec![2.0; 3]), (3, vec![1.0; 2])]);
    }
}
