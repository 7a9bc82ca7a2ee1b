//! A stage follows its list of instructions: it computes chunks, and talks with the stages of their neighbours.
//!
//! Where two neighbouring chunks lie on one stage, what passes between them stays where it is. With
//! `activation_checkpoint_interval` so many layers at a time keep their inputs alone, and are computed again in backward.

use std::collections::HashMap;
use std::ops::Range;
use std::time::{Duration, Instant};

use ferrospeed_nn::{Carried, Mode, Stages};
use ferrospeed_observe::trace::Activity;
use ferrospeed_pipeline::schedule::{Instruction, Item, Schedule};
use ferrospeed_pipeline::simulate::Span;
use ferrospeed_tensor::autograd::{self, WeightGradients};
use ferrospeed_tensor::random::{self, RandomState};
use ferrospeed_tensor::{Tensor, TensorError};

use super::Pipeline;
use super::messages::Received;
use crate::engine::{BackwardOptions, Engine};
use crate::error::{EngineError, Result};
use crate::profiler::Phase;

/// When a stage computed what in a batch, and what it held.
#[derive(Debug, Clone, Default)]
pub struct StageTimes {
    /// What it computed, in order, in seconds since the batch began.
    pub spans: Vec<Span>,
    /// Forwards whose gradients were not all done, at most, counted in chunks.
    pub held_chunks: usize,
}

/// A micro-batch between its forward and its backward in a chunk.
struct Flight {
    segments: Vec<Segment>,
    outputs: Carried,
    next_stream: u32,
}

/// Some of the layers of a chunk, in one piece.
struct Segment {
    layers: Range<usize>,
    /// What came in; floats among it collect gradients.
    inputs: Carried,
    random: RandomState,
    /// What came out, where that was recorded; else it is computed again.
    recorded: Option<Carried>,
}

/// What is asked of the last layer.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Asked {
    Loss,
    Output,
}

/// What it gave: losses on every stage, outputs on its own.
pub(super) struct Given {
    pub(super) losses: Vec<f32>,
    pub(super) outputs: Vec<Carried>,
}

/// Everything of one batch that is on this stage.
struct Underway<B> {
    batches: HashMap<usize, B>,
    /// How many micro-batches were asked for.
    asked: usize,
    received: HashMap<Item, Received>,
    flights: HashMap<Item, Flight>,
    /// Gradients of outputs, and of inputs.
    arrived: HashMap<Item, Vec<Tensor>>,
    leaving: HashMap<Item, Vec<Tensor>>,
    /// Gradients of weights that were put off.
    left: HashMap<Item, Vec<WeightGradients>>,
    losses: Vec<f32>,
    outputs: Vec<Carried>,
}

impl<B> Default for Underway<B> {
    fn default() -> Self {
        Underway {
            batches: HashMap::new(),
            asked: 0,
            received: HashMap::new(),
            flights: HashMap::new(),
            arrived: HashMap::new(),
            leaving: HashMap::new(),
            left: HashMap::new(),
            losses: Vec::new(),
            outputs: Vec::new(),
        }
    }
}

impl<B> Underway<B> {
    fn flight(&self, item: Item) -> Result<&Flight> {
        self.flights.get(&item).ok_or_else(|| bug("a micro-batch was not computed"))
    }

    /// What holds activations: forwards whose gradients are not all done.
    fn held(&self) -> usize {
        self.flights.len() + self.left.len()
    }
}

fn bug(what: &str) -> EngineError {
    EngineError::Pipeline(ferrospeed_pipeline::PipelineError::Invalid(what.to_owned()))
}

fn tracked(carried: Carried) -> Carried {
    let tracked = |tensor: Tensor| if tensor.dtype().is_float() { tensor.tracked() } else { tensor };
    carried.into_iter().map(tracked).collect()
}

fn floats(carried: &[Tensor]) -> Vec<Tensor> {
    carried.iter().filter(|tensor| tensor.dtype().is_float()).cloned().collect()
}

impl Engine {
    /// Follows this stage's part of a schedule; returns the losses of micro-batches, on every stage.
    pub(super) fn follow<M: Stages, E: From<EngineError>>(
        &mut self,
        pipeline: &mut Pipeline,
        schedule: &Schedule,
        model: &M,
        asked: Asked,
        batch: &mut impl FnMut(usize) -> Result<M::Batch, E>,
    ) -> Result<Given, E> {
        let stage = pipeline.stages.rank();
        let (first, begun) = (self.micro_steps(), Instant::now());
        let mut own = schedule.stage_of_chunk.iter().enumerate().filter(|(_, of)| **of == stage);
        let first_own = own.next().map(|(chunk, _)| chunk);
        let last_own = own.next_back().map(|(chunk, _)| chunk).or(first_own);
        let recomputes = self.recomputes(pipeline);
        let mut underway = Underway::default();
        pipeline.times = StageTimes::default();
        for instruction in schedule.instructions(stage) {
            let Some(item) = instruction.item() else { continue };
            // Random numbers and dropped layers follow the micro-batch.
            self.micro_steps = first + item.micro as u64;
            let mut start = begun.elapsed();
            match instruction {
                Instruction::Forward(_) => {
                    while underway.asked <= item.micro {
                        underway.batches.insert(underway.asked, batch(underway.asked)?);
                        underway.asked += 1;
                    }
                    start = begun.elapsed();
                    self.profiled_in_stage(Phase::Forward, item.micro, |engine| {
                        engine.forward_chunk(pipeline, schedule, model, asked, item, &mut underway)
                    })?;
                    if last_own == Some(item.chunk) && !recomputes {
                        underway.batches.remove(&item.micro);
                    }
                }
                Instruction::Backward(_) | Instruction::BackwardInput(_) => {
                    self.profiled_in_stage(Phase::Backward, item.micro, |engine| {
                        engine.backward_chunk(schedule, model, instruction, item, &mut underway)
                    })?;
                    if first_own == Some(item.chunk) {
                        underway.batches.remove(&item.micro);
                    }
                }
                Instruction::BackwardWeight(_) => {
                    self.profiled_in_stage(Phase::Backward, item.micro, |engine| {
                        engine.backward_weights(item, &mut underway)
                    })?;
                }
                _ => self.exchange(pipeline, instruction, item, &mut underway)?,
            }
            pipeline.times.note(instruction, [start, begun.elapsed()], underway.held());
        }
        self.micro_steps = first;
        pipeline.messenger.finish()?;
        let Underway { mut losses, outputs, .. } = underway;
        if asked == Asked::Loss {
            losses.resize(schedule.micro_batches, 0.0);
            let of_loss = schedule.stage_of_chunk.last().copied().unwrap_or_default();
            let last = first + schedule.micro_batches.saturating_sub(1) as u64;
            pipeline.messenger.share_losses(&mut losses, of_loss, last)?;
        }
        Ok(Given { losses, outputs })
    }

    /// Whether forward keeps less than backward needs.
    fn recomputes(&self, pipeline: &Pipeline) -> bool {
        pipeline.recomputed_layers > 0 && !self.is_evaluating()
    }

    fn exchange<B>(
        &mut self,
        pipeline: &mut Pipeline,
        instruction: Instruction,
        item: Item,
        underway: &mut Underway<B>,
    ) -> Result<()> {
        let (messenger, number) = (&mut pipeline.messenger, self.micro_steps);
        match instruction {
            Instruction::ReceiveActivation(_) => {
                let received = messenger.receive_activation(item.chunk, number, self.device())?;
                underway.received.insert(item, received);
            }
            Instruction::SendActivation(_) => {
                let Flight { outputs, next_stream, .. } = underway.flight(item)?;
                messenger.send_activation(item.chunk, number, outputs, *next_stream)?;
                if self.is_evaluating() {
                    underway.flights.remove(&item);
                }
            }
            Instruction::ReceiveGradient(_) => {
                let of = floats(&underway.flight(item)?.outputs);
                let gradients = messenger.receive_gradients(item.chunk, number, &of)?;
                underway.arrived.insert(item, gradients);
            }
            Instruction::SendGradient(_) => {
                let gradients = underway.leaving.remove(&item).unwrap_or_default();
                messenger.send_gradients(item.chunk, number, &gradients)?;
            }
            _ => {}
        }
        Ok(())
    }

    fn forward_chunk<M: Stages>(
        &mut self,
        pipeline: &Pipeline,
        schedule: &Schedule,
        model: &M,
        asked: Asked,
        item: Item,
        underway: &mut Underway<M::Batch>,
    ) -> Result<()> {
        let start = Instant::now();
        let received = match item.chunk.checked_sub(1) {
            Some(before) if !schedule.crosses_behind(before) => {
                let before = Item { chunk: before, ..item };
                let flight = underway.flight(before)?;
                let tensors = flight.outputs.iter().map(Tensor::detach).collect();
                let next_stream = flight.next_stream;
                if self.is_evaluating() {
                    underway.flights.remove(&before);
                }
                Some(Received { tensors, next_stream })
            }
            _ => underway.received.remove(&item),
        };
        let Received { tensors, next_stream } =
            received.unwrap_or(Received { tensors: Carried::new(), next_stream: 0 });
        let batch = underway.batches.get(&item.micro).ok_or_else(|| bug("a micro-batch is gone"))?;
        random::set_state(RandomState { next_stream, ..self.random_state() });
        let layers = pipeline.division.layers_of_chunk(item.chunk);
        let recomputes = self.recomputes(pipeline);
        let at_once = if recomputes { pipeline.recomputed_layers } else { layers.len() };
        let (mut segments, mut outputs) = (Vec::new(), tensors);
        for first in layers.clone().step_by(at_once.max(1)) {
            let layers = first..first.saturating_add(at_once).min(layers.end);
            let (random, inputs) = (random::state(), tracked(outputs));
            let run = |mode: Mode| match asked {
                Asked::Loss => model.forward_range(layers.clone(), batch, inputs.clone(), mode),
                Asked::Output => model.output_range(layers.clone(), batch, inputs.clone(), mode),
            };
            let result: Carried = match recomputes {
                true => autograd::no_grad(|| self.run_from_here::<_, TensorError>(run))?,
                false => self.run_from_here::<_, TensorError>(run)?,
            };
            outputs = result.iter().map(Tensor::detach).collect();
            segments.push(Segment { layers, inputs, random, recorded: (!recomputes).then_some(result) });
        }
        let is_last = item.chunk + 1 == schedule.chunks();
        match (asked, &outputs[..]) {
            (Asked::Loss, [loss]) if is_last => underway.losses.push(loss.item()?),
            (Asked::Loss, _) if is_last => {
                return Err(bug("the last layer of the model must give the loss alone"));
            }
            (Asked::Output, outputs) if is_last => underway.outputs.push(outputs.to_vec()),
            _ => {}
        }
        if !(is_last && self.is_evaluating()) {
            let next_stream = random::state().next_stream;
            underway.flights.insert(item, Flight { segments, outputs, next_stream });
        }
        self.times.forward += start.elapsed();
        self.trace(Activity::Compute, &format!("forward of {}", item.micro), start);
        Ok(())
    }

    fn backward_chunk<M: Stages>(
        &mut self,
        schedule: &Schedule,
        model: &M,
        instruction: Instruction,
        item: Item,
        underway: &mut Underway<M::Batch>,
    ) -> Result<()> {
        let flight = underway.flights.remove(&item).ok_or_else(|| bug("backward before forward"))?;
        let next = Item { chunk: item.chunk + 1, ..item };
        let is_last = next.chunk == schedule.chunks();
        let mut gradients = if is_last || schedule.crosses_behind(item.chunk) {
            underway.arrived.remove(&item)
        } else {
            underway.leaving.remove(&next)
        };
        let in_halves = matches!(instruction, Instruction::BackwardInput(_));
        let mut left = Vec::new();
        for Segment { layers, inputs, random, recorded } in flight.segments.into_iter().rev() {
            let outputs = match recorded {
                Some(outputs) => outputs,
                None => {
                    let batch = underway.batches.get(&item.micro);
                    let batch = batch.ok_or_else(|| bug("a micro-batch is gone before it was recomputed"))?;
                    random::set_state(random);
                    let run = |mode: Mode| model.forward_range(layers, batch, inputs.clone(), mode);
                    self.recomputed_in_stage(item.micro, |engine| {
                        engine.run_from_here::<_, TensorError>(run)
                    })?
                }
            };
            left.extend(self.backward_segment(&outputs, gradients, in_halves, item.micro)?);
            let gradient = |input: &Tensor| match input.grad() {
                Some(gradient) => Ok(gradient),
                // Nothing that follows depends on it.
                None => Tensor::zeros(*input.shape(), input.dtype(), input.device()),
            };
            gradients = Some(floats(&inputs).iter().map(gradient).collect::<Result<_, _>>()?);
        }
        if in_halves {
            underway.left.insert(item, left);
        }
        underway.leaving.insert(item, gradients.unwrap_or_default());
        Ok(())
    }

    /// Backward from a loss, or from results whose gradients came from behind.
    fn backward_segment(
        &mut self,
        outputs: &[Tensor],
        gradients: Option<Vec<Tensor>>,
        in_halves: bool,
        micro: usize,
    ) -> Result<Option<WeightGradients>> {
        let pass = |roots: &[(Tensor, Tensor)]| match in_halves {
            true => autograd::backward_inputs(roots).map(Some),
            false => autograd::backward_with(roots).map(|()| None),
        };
        let Some(gradients) = gradients else {
            let loss = outputs.first().ok_or_else(|| bug("there is no loss"))?;
            return Ok(self.backward_by(loss, BackwardOptions::default(), pass)?.1);
        };
        let start = Instant::now();
        let roots: Vec<(Tensor, Tensor)> =
            floats(outputs).into_iter().zip(gradients).filter(|(output, _)| output.requires_grad()).collect();
        self.begin_backward(false)?;
        let left = pass(&roots)?;
        self.end_backward(start)?;
        self.times.backward += start.elapsed();
        self.trace(Activity::Compute, &format!("backward of {micro}"), start);
        Ok(left)
    }

    fn backward_weights<B>(&mut self, item: Item, underway: &mut Underway<B>) -> Result<()> {
        let left = underway.left.remove(&item).ok_or_else(|| bug("weights before inputs"))?;
        let start = Instant::now();
        self.begin_backward(false)?;
        left.into_iter().try_for_each(WeightGradients::finish)?;
        self.end_backward(start)?;
        self.times.backward += start.elapsed();
        self.trace(Activity::Compute, &format!("weights of {}", item.micro), start);
        Ok(())
    }
}

impl StageTimes {
    fn note(&mut self, work: Instruction, times: [Duration; 2], held_chunks: usize) {
        self.held_chunks = self.held_chunks.max(held_chunks);
        let computes = matches!(
            work,
            Instruction::Forward(_)
                | Instruction::Backward(_)
                | Instruction::BackwardInput(_)
                | Instruction::BackwardWeight(_)
        );
        if computes {
            let [start, end] = times.map(|time| time.as_secs_f64());
            self.spans.push(Span { work, start, end });
        }
    }
}
