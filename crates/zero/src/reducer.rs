//! From the gradients of one rank to this rank's share of everybody's average.
//!
//! Backward hands gradients over one by one. When all of a bucket are there, they are copied into its buffer, the
//! ranks reduce it (on the progress thread, while backward goes on, if `overlap_comm` says so), and what this rank
//! owns is kept or added to what earlier micro-batches left. Every micro-batch is reduced before it is added, in all
//! stages: that is what makes their results equal to the last bit.

use ferrospeed_comm::{Group, ReduceOp, World};
use ferrospeed_tensor::backend::Unary;
use ferrospeed_tensor::{Category, DType, Device, Tensor, ops};

use crate::buckets::Bucket;
use crate::error::{Result, ZeroError};
use crate::exchange::{self, Pending};
use crate::memory::{part, reachable};

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
    /// Multiplies gradients before the sum, and after it; `None` after it means the plain average.
    pub(crate) before: f32,
    pub(crate) after: Option<f32>,
}

/// A reduced gradient: elements `in_part..` of a group's part.
#[derive(Debug, Clone)]
pub(crate) struct Segment {
    pub(crate) group: usize,
    pub(crate) in_part: usize,
    pub(crate) values: Tensor,
}

struct InFlight {
    bucket: usize,
    work: Option<Pending>,
}

/// The gradients of all groups on their way.
pub(crate) struct Reducer {
    group: Group,
    options: ReduceOptions,
    buckets: Vec<Bucket>,
    bucket_of_param: Vec<Option<usize>>,
    buffers: Vec<Tensor>,
    arrived: Vec<Option<Tensor>>,
    missing: Vec<usize>,
    /// The next bucket to leave.
    next: usize,
    in_flight: Vec<InFlight>,
    /// What this rank keeps, by group; empty where the buffers themselves are kept.
    kept: Vec<Tensor>,
    micro_steps: usize,
    device: Device,
    shapes: Vec<(ferrospeed_tensor::Shape, DType)>,
}

impl Reducer {
    pub(crate) fn new(
        world: &World,
        options: ReduceOptions,
        buckets: Vec<Bucket>,
        part_numels: &[usize],
        shapes: Vec<(ferrospeed_tensor::Shape, DType)>,
        device: &Device,
    ) -> Result<Reducer> {
        let mut bucket_of_param = vec![None; shapes.len()];
        for (index, bucket) in buckets.iter().enumerate() {
            bucket.params.iter().for_each(|&param| bucket_of_param[param] = Some(index));
        }
        let buffer = |numel, category| reachable(world, numel, options.wire, device, category);
        let buffers = if options.keep_buffers {
            buckets.iter().map(|bucket| buffer(bucket.numel(), Category::Gradients)).collect::<Result<_>>()?
        } else {
            let largest = buckets.iter().map(Bucket::numel).max().unwrap_or(0);
            let count = if options.overlap { 2 } else { 1 };
            (0..count).map(|_| buffer(largest, Category::Buffers)).collect::<Result<_>>()?
        };
        let kept = if options.keep_buffers && !options.accumulates && options.wire == options.kept {
            Vec::new()
        } else {
            let keep = |&numel: &usize| Tensor::zeros_in([numel], options.kept, device, Category::Gradients);
            part_numels.iter().map(keep).collect::<Result<_, _>>()?
        };
        Ok(Reducer {
            group: world.group(),
            options,
            missing: buckets.iter().map(|bucket| bucket.params.len()).collect(),
            buckets,
            bucket_of_param,
            buffers,
            arrived: vec![None; shapes.len()],
            next: 0,
            in_flight: Vec::new(),
            kept,
            micro_steps: 0,
            device: device.clone(),
            shapes,
        })
    }

    /// Takes a parameter's gradient. With `synchronize` off it only waits to be added to the next one.
    pub(crate) fn push(&mut self, param: usize, gradient: Tensor, synchronize: bool) -> Result<()> {
        let Some(bucket) = self.bucket_of_param[param] else { return Ok(()) };
        match &self.arrived[param] {
            None => self.arrived[param] = Some(gradient),
            Some(held) => {
                let sum = Tensor::empty_in(*held.shape(), held.dtype(), &self.device, Category::Gradients)?;
                self.device.backend().binary(
                    ferrospeed_tensor::backend::Binary::Add,
                    held,
                    &gradient,
                    &sum,
                )?;
                self.arrived[param] = Some(sum);
            }
        }
        if !synchronize {
            return Ok(());
        }
        // One held back by an earlier, unsynchronised micro-batch counts when its successor comes.
        self.missing[bucket] = self.missing[bucket].saturating_sub(1);
        while self.next < self.buckets.len() && self.missing[self.next] == 0 {
            self.launch(self.next)?;
            self.next += 1;
        }
        Ok(())
    }

    /// Ends a micro-batch: everything that is still here leaves, and everything that left comes back.
    pub(crate) fn finish(&mut self) -> Result<()> {
        while self.next < self.buckets.len() {
            self.launch(self.next)?;
            self.next += 1;
        }
        for in_flight in std::mem::take(&mut self.in_flight) {
            self.land(in_flight)?;
        }
        self.next = 0;
        self.missing = self.buckets.iter().map(|bucket| bucket.params.len()).collect();
        self.micro_steps += 1;
        Ok(())
    }

    fn buffer(&self, bucket: usize) -> Result<Tensor> {
        let slot = if self.options.keep_buffers { bucket } else { bucket % self.buffers.len() };
        part(&self.buffers[slot], 0, self.buckets[bucket].numel())
    }

    fn launch(&mut self, index: usize) -> Result<()> {
        // The buffer may still be under way with an earlier bucket.
        if !self.options.keep_buffers && self.in_flight.len() == self.buffers.len() {
            let earliest = self.in_flight.remove(0);
            self.land(earliest)?;
        }
        let buffer = self.buffer(index)?;
        self.fill(index, &buffer)?;
        let work = if self.group.size() == 1 { None } else { Some(self.reduce(index, &buffer)?) };
        let in_flight = InFlight { bucket: index, work };
        if self.options.overlap && in_flight.work.is_some() {
            self.in_flight.push(in_flight);
            return Ok(());
        }
        self.land(in_flight)
    }

    /// Copies the bucket's gradients to their places; a parameter without one gives zeros.
    fn fill(&mut self, index: usize, buffer: &Tensor) -> Result<()> {
        let backend = self.device.backend();
        let bucket = &self.buckets[index];
        for &param in &bucket.params {
            let gradient = self.arrived[param].take();
            let gradient = match gradient {
                Some(gradient) => Some(self.prepared(gradient)?),
                None => None,
            };
            for place in bucket.places.iter().filter(|place| place.param == param) {
                match &gradient {
                    Some(gradient) => backend.copy_blocks(
                        gradient,
                        place.in_param,
                        place.len,
                        buffer,
                        place.in_bucket,
                        place.len,
                        1,
                        place.len,
                    )?,
                    None => backend.fill(&part(buffer, place.in_bucket, place.len)?, 0.0)?,
                }
            }
        }
        Ok(())
    }

    /// In the type of the wire, and multiplied by what comes before the sum.
    fn prepared(&self, gradient: Tensor) -> Result<Tensor> {
        let gradient = if self.options.before == 1.0 {
            gradient
        } else {
            let scaled = Tensor::empty(*gradient.shape(), gradient.dtype(), &self.device)?;
            self.device.backend().unary(
                Unary::Affine { scale: self.options.before, shift: 0.0 },
                &gradient,
                &scaled,
            )?;
            scaled
        };
        Ok(ops::cast(&gradient, self.options.wire)?)
    }

    fn reduce(&self, index: usize, buffer: &Tensor) -> Result<Pending> {
        let op = if self.options.after.is_some() { ReduceOp::Sum } else { ReduceOp::Avg };
        if self.options.whole {
            return exchange::all_reduce(&self.group, buffer, op);
        }
        let bucket = &self.buckets[index];
        let own = bucket.own_start..bucket.own_start + bucket.own_numel();
        exchange::reduce_scatter(&self.group, buffer, own, &bucket.counts, op)
    }

    /// Waits for a bucket and keeps what this rank owns of it.
    fn land(&mut self, in_flight: InFlight) -> Result<()> {
        if let Some(work) = in_flight.work {
            work.wait()?;
        }
        let buffer = self.buffer(in_flight.bucket)?;
        let backend = self.device.backend();
        let bucket = &self.buckets[in_flight.bucket];
        if let Some(after) = self.options.after.filter(|&after| after != 1.0) {
            let own = part(&buffer, bucket.own_start, bucket.own_numel())?;
            backend.unary(Unary::Affine { scale: after, shift: 0.0 }, &own, &own)?;
        }
        let Some(kept) = self.kept.get(bucket.group) else { return Ok(()) };
        for owned in &bucket.owned {
            let (from, to) =
                (part(&buffer, owned.in_bucket, owned.len)?, part(kept, owned.in_part, owned.len)?);
            match self.micro_steps {
                0 => backend.cast(&from, &to)?,
                _ => backend.add_assign(&to, &from)?,
            }
        }
        Ok(())
    }

    /// The reduced gradients of the micro-batches so far.
    pub(crate) fn segments(&self) -> Result<Vec<Segment>> {
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
        self.arrived.fill(None);
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
