//! A stage follows its list of instructions: it computes chunks, and talks with the stages of their neighbours.
//!
//! Where two neighbouring chunks lie on one stage, what passes between them stays where it is.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use ferrospeed_nn::{Carried, Mode, Stages};
use ferrospeed_observe::trace::Activity;
use ferrospeed_pipeline::partition::part;
use ferrospeed_pipeline::schedule::{Instruction, Item, Schedule};
use ferrospeed_pipeline::simulate::Span;
use ferrospeed_tensor::autograd::{self, WeightGradients};
use ferrospeed_tensor::random::{self, RandomState};
use ferrospeed_tensor::{Tensor, TensorError};

use super::Pipeline;
use super::messages::Received;
use crate::engine::{BackwardOptions, Engine};
use crate::error::{EngineError, Result};

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
    /// What came in; floats among it collect gradients.
    inputs: Carried,
    outputs: Carried,
    next_stream: u32,
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
    left: HashMap<Item, WeightGradients>,
    losses: Vec<f32>,
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
        batch: &mut impl FnMut(usize) -> Result<M::Batch, E>,
    ) -> Result<Vec<f32>, E> {
        let stage = pipeline.stages.rank();
        let (first, begun) = (self.micro_steps(), Instant::now());
        let last_own = schedule.stage_of_chunk.iter().rposition(|of| *of == stage);
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
                    self.forward_chunk(pipeline, schedule, model, item, &mut underway)?;
                    if last_own == Some(item.chunk) {
                        underway.batches.remove(&item.micro);
                    }
                }
                Instruction::Backward(_) | Instruction::BackwardInput(_) => {
                    self.backward_chunk(schedule, instruction, item, &mut underway)?;
                }
                Instruction::BackwardWeight(_) => {
                    self.backward_weights(item, &mut underway)?;
                }
                _ => self.exchange(pipeline, instruction, item, &mut underway)?,
            }
            pipeline.times.note(instruction, [start, begun.elapsed()], underway.held());
        }
        self.micro_steps = first;
        pipeline.messenger.finish()?;
        let mut losses = underway.losses;
        losses.resize(schedule.micro_batches, 0.0);
        let of_loss = schedule.stage_of_chunk.last().copied().unwrap_or_default();
        pipeline.stages.broadcast(&mut losses, of_loss).map_err(EngineError::from)?;
        Ok(losses)
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
        item: Item,
        underway: &mut Underway<M::Batch>,
    ) -> Result<()> {
        let start = Instant::now();
        let received = match item.chunk.checked_sub(1) {
            Some(before) if !schedule.crosses_behind(before) => {
                let flight = underway.flight(Item { chunk: before, ..item })?;
                let tensors = flight.outputs.iter().map(Tensor::detach).collect();
                Some(Received { tensors, next_stream: flight.next_stream })
            }
            _ => underway.received.remove(&item),
        };
        let next_stream = received.as_ref().map_or(0, |received| received.next_stream);
        let tracked =
            |tensor: &Tensor| if tensor.dtype().is_float() { tensor.tracked() } else { tensor.clone() };
        let inputs: Carried =
            received.map(|received| received.tensors.iter().map(tracked).collect()).unwrap_or_default();
        let batch = underway.batches.get(&item.micro).ok_or_else(|| bug("a micro-batch is gone"))?;
        random::set_state(RandomState { next_stream, ..self.random_state() });
        let layers = part(&pipeline.boundaries, item.chunk);
        let run = |mode: Mode| model.forward_range(layers, batch, inputs.clone(), mode);
        let outputs: Carried = self.run_from_here::<_, TensorError>(run)?;
        if item.chunk + 1 == schedule.chunks() {
            let [loss] = &outputs[..] else {
                return Err(bug("the last layer of the model must give the loss alone"));
            };
            underway.losses.push(loss.item()?);
        }
        underway.flights.insert(item, Flight { inputs, outputs, next_stream: random::state().next_stream });
        self.times.forward += start.elapsed();
        self.trace(Activity::Compute, &format!("forward of {}", item.micro), start);
        Ok(())
    }

    fn backward_chunk<B>(
        &mut self,
        schedule: &Schedule,
        instruction: Instruction,
        item: Item,
        underway: &mut Underway<B>,
    ) -> Result<()> {
        let flight = underway.flights.remove(&item).ok_or_else(|| bug("backward before forward"))?;
        let next = Item { chunk: item.chunk + 1, ..item };
        let is_last = next.chunk == schedule.chunks();
        let gradients = if is_last || schedule.crosses_behind(item.chunk) {
            underway.arrived.remove(&item)
        } else {
            underway.leaving.remove(&next)
        };
        let in_halves = matches!(instruction, Instruction::BackwardInput(_));
        let pass = |roots: &[(Tensor, Tensor)]| match in_halves {
            true => autograd::backward_inputs(roots).map(Some),
            false => autograd::backward_with(roots).map(|()| None),
        };
        let left = match gradients {
            None => self.backward_by(&flight.outputs[0], BackwardOptions::default(), pass)?.1,
            Some(gradients) => {
                let start = Instant::now();
                let roots: Vec<(Tensor, Tensor)> = floats(&flight.outputs)
                    .into_iter()
                    .zip(gradients)
                    .filter(|(output, _)| output.requires_grad())
                    .collect();
                self.begin_backward(false)?;
                let left = pass(&roots)?;
                self.end_backward(start)?;
                self.times.backward += start.elapsed();
                self.trace(Activity::Compute, &format!("backward of {}", item.micro), start);
                left
            }
        };
        underway.left.extend(left.map(|left| (item, left)));
        let gradient = |input: &Tensor| match input.grad() {
            Some(gradient) => Ok(gradient),
            // Nothing that follows depends on it.
            None => Tensor::zeros(*input.shape(), input.dtype(), input.device()),
        };
        let gradients = floats(&flight.inputs).iter().map(gradient).collect::<Result<_, _>>()?;
        underway.leaving.insert(item, gradients);
        Ok(())
    }

    fn backward_weights<B>(&mut self, item: Item, underway: &mut Underway<B>) -> Result<()> {
        let left = underway.left.remove(&item).ok_or_else(|| bug("weights before inputs"))?;
        let start = Instant::now();
        self.begin_backward(false)?;
        left.finish()?;
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
