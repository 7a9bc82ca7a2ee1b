//! A whole step, or a whole evaluation, of a model in stages.

use std::collections::HashMap;

use ferrospeed_comm::ReduceOp;
use ferrospeed_nn::{Carried, Mode, Stages};
use ferrospeed_observe::trace::Activity;
use ferrospeed_pipeline::schedule::{Instruction, Kind, Schedule};
use ferrospeed_tensor::random::{self, RandomState};
use ferrospeed_tensor::{Tensor, TensorError, autograd};

use super::messages::Received;
use super::{Messenger, Pipeline};
use crate::engine::{BackwardOptions, Engine, StepReport};
use crate::error::{EngineError, Result};

/// A micro-batch between its forward and its backward on this stage.
struct Flight {
    /// What came in; floats among it collect gradients.
    inputs: Carried,
    outputs: Carried,
    next_stream: u32,
}

/// Everything of one batch that is on this stage.
#[derive(Default)]
struct Underway {
    received: HashMap<usize, Received>,
    flights: HashMap<usize, Flight>,
    /// Gradients of outputs, and of inputs.
    arrived: HashMap<usize, Vec<Tensor>>,
    leaving: HashMap<usize, Vec<Tensor>>,
    losses: Vec<f32>,
}

fn bug(what: &str) -> EngineError {
    EngineError::Pipeline(ferrospeed_pipeline::PipelineError::Invalid(what.to_owned()))
}

fn floats(carried: &[Tensor]) -> Vec<Tensor> {
    carried.iter().filter(|tensor| tensor.dtype().is_float()).cloned().collect()
}

impl Engine {
    /// One step: as many micro-batches as a step accumulates go through all stages and back, and the weights are updated.
    /// Returns the mean loss over micro-batches and ranks, which is the same on all, and what became of the step. All
    /// ranks call it together; `batch` is asked for each micro-batch of this rank's data, on every stage alike.
    pub fn train_batch<M: Stages, E: From<EngineError>>(
        &mut self,
        model: &M,
        batch: impl FnMut(usize) -> Result<M::Batch, E>,
    ) -> Result<(f32, StepReport), E> {
        self.check_whole("train_batch")?;
        self.train();
        let micro_batches = self.gradient_accumulation_steps() as usize;
        let first = self.micro_steps();
        self.throughput.begin();
        let losses = self.run_batch(Kind::OneForwardOneBackward, model, micro_batches, batch)?;
        let loss = self.mean_loss(&losses)?;
        // A schedule that follows the loss follows that of all ranks.
        self.losses = (f64::from(loss) * micro_batches as f64, micro_batches as u64);
        self.micro_steps = first + micro_batches as u64 - 1;
        let report = self.end_micro_batch()?;
        Ok((loss, report))
    }

    /// The mean loss of some micro-batches over them and over ranks, without gradients, on every rank. All ranks call it
    /// together.
    pub fn eval_batch<M: Stages, E: From<EngineError>>(
        &mut self,
        model: &M,
        micro_batches: usize,
        batch: impl FnMut(usize) -> Result<M::Batch, E>,
    ) -> Result<f32, E> {
        let losses = self.eval_losses(model, micro_batches, batch)?;
        Ok(self.mean_loss(&losses)?)
    }

    /// The loss of each micro-batch of this rank's data, known on all of its stages. All ranks call it together.
    pub fn eval_losses<M: Stages, E: From<EngineError>>(
        &mut self,
        model: &M,
        micro_batches: usize,
        batch: impl FnMut(usize) -> Result<M::Batch, E>,
    ) -> Result<Vec<f32>, E> {
        self.check_whole("eval_batch")?;
        let was_evaluating = self.is_evaluating();
        self.eval();
        let first = self.micro_steps();
        let run = self.run_batch(Kind::Inference, model, micro_batches, batch);
        self.micro_steps = first;
        if !was_evaluating {
            self.train();
        }
        run
    }

    /// The mean over micro-batches and over the ranks that see different data.
    fn mean_loss(&self, losses: &[f32]) -> Result<f32> {
        let mut mean = [losses.iter().sum::<f32>() / losses.len().max(1) as f32];
        self.store.sharding().shard.all_reduce(&mut mean, ReduceOp::Avg)?;
        Ok(mean[0])
    }

    /// Follows a schedule; returns the losses of micro-batches.
    fn run_batch<M: Stages, E: From<EngineError>>(
        &mut self,
        kind: Kind,
        model: &M,
        micro_batches: usize,
        mut batch: impl FnMut(usize) -> Result<M::Batch, E>,
    ) -> Result<Vec<f32>, E> {
        let Some(mut pipeline) = self.pipeline.take() else {
            return Err(EngineError::Order {
                call: "train_batch",
                why: "the model is not in stages; call forward, backward and step, or initialize_pipeline",
            }
            .into());
        };
        let result = self.follow(&mut pipeline, kind, model, micro_batches, &mut batch);
        self.pipeline = Some(pipeline);
        result
    }

    fn follow<M: Stages, E: From<EngineError>>(
        &mut self,
        pipeline: &mut Pipeline,
        kind: Kind,
        model: &M,
        micro_batches: usize,
        batch: &mut impl FnMut(usize) -> Result<M::Batch, E>,
    ) -> Result<Vec<f32>, E> {
        let (stage, stages) = (pipeline.stages.rank(), pipeline.stages.size());
        let schedule = Schedule::new(kind, stages, micro_batches).map_err(EngineError::from)?;
        let first = self.micro_steps();
        let mut underway = Underway::default();
        for instruction in schedule.instructions(stage) {
            let Some(item) = instruction.item() else { continue };
            let number = first + item.micro as u64;
            // Random numbers and dropped layers follow the micro-batch.
            self.micro_steps = number;
            if let Instruction::Forward(_) = instruction {
                let batch = batch(item.micro)?;
                self.forward_stage(pipeline, model, &batch, item.micro, &mut underway)?;
            } else {
                self.exchange_or_go_back(pipeline, instruction, number, &mut underway)?;
            }
        }
        self.micro_steps = first;
        pipeline.messenger.finish()?;
        let mut losses = underway.losses;
        losses.resize(micro_batches, 0.0);
        pipeline.stages.broadcast(&mut losses, stages - 1).map_err(EngineError::from)?;
        Ok(losses)
    }

    fn exchange_or_go_back(
        &mut self,
        pipeline: &mut Pipeline,
        instruction: Instruction,
        number: u64,
        underway: &mut Underway,
    ) -> Result<()> {
        let Some(micro) = instruction.item().map(|item| item.micro) else { return Ok(()) };
        let messenger: &mut Messenger = &mut pipeline.messenger;
        let flight = || underway.flights.get(&micro).ok_or_else(|| bug("a micro-batch was not computed"));
        match instruction {
            Instruction::ReceiveActivation(_) => {
                let received = messenger.receive_activation(number, self.device())?;
                underway.received.insert(micro, received);
            }
            Instruction::SendActivation(_) => {
                let Flight { outputs, next_stream, .. } = flight()?;
                messenger.send_activation(number, outputs, *next_stream)?;
            }
            Instruction::ReceiveGradient(_) => {
                let gradients = messenger.receive_gradients(number, &floats(&flight()?.outputs))?;
                underway.arrived.insert(micro, gradients);
            }
            Instruction::SendGradient(_) => {
                let gradients = underway.leaving.remove(&micro);
                messenger.send_gradients(number, &gradients.unwrap_or_default())?;
            }
            Instruction::Backward(_) => self.backward_stage(micro, underway)?,
            _ => {}
        }
        Ok(())
    }

    fn forward_stage<M: Stages>(
        &mut self,
        pipeline: &Pipeline,
        model: &M,
        batch: &M::Batch,
        micro: usize,
        underway: &mut Underway,
    ) -> Result<()> {
        let start = std::time::Instant::now();
        let (stage, stages) = (pipeline.stages.rank(), pipeline.stages.size());
        let received = underway.received.remove(&micro);
        let next_stream = received.as_ref().map_or(0, |received| received.next_stream);
        let tracked =
            |tensor: &Tensor| if tensor.dtype().is_float() { tensor.tracked() } else { tensor.clone() };
        let inputs: Carried =
            received.map(|received| received.tensors.iter().map(tracked).collect()).unwrap_or_default();
        random::set_state(RandomState { next_stream, ..self.random_state() });
        let run = |mode: Mode| model.forward_range(pipeline.layers.clone(), batch, inputs.clone(), mode);
        let outputs: Carried = self.run_from_here::<_, TensorError>(run)?;
        if stage + 1 == stages {
            let [loss] = &outputs[..] else {
                return Err(bug("the last layer of the model must give the loss alone"));
            };
            underway.losses.push(loss.item()?);
        }
        underway.flights.insert(micro, Flight { inputs, outputs, next_stream: random::state().next_stream });
        self.times.forward += start.elapsed();
        self.trace(Activity::Compute, &format!("forward of {micro}"), start);
        Ok(())
    }

    fn backward_stage(&mut self, micro: usize, underway: &mut Underway) -> Result<()> {
        let flight = underway.flights.remove(&micro).ok_or_else(|| bug("backward before forward"))?;
        match underway.arrived.remove(&micro) {
            None => {
                self.backward_from(&flight.outputs[0], BackwardOptions::default())?;
            }
            Some(gradients) => {
                let start = std::time::Instant::now();
                let roots: Vec<(Tensor, Tensor)> = floats(&flight.outputs)
                    .into_iter()
                    .zip(gradients)
                    .filter(|(output, _)| output.requires_grad())
                    .collect();
                self.begin_backward(false)?;
                autograd::backward_with(&roots)?;
                self.end_backward(start)?;
                self.times.backward += start.elapsed();
                self.trace(Activity::Compute, &format!("backward of {micro}"), start);
            }
        }
        let gradient = |input: &Tensor| match input.grad() {
            Some(gradient) => Ok(gradient),
            // Nothing that follows depends on it.
            None => Tensor::zeros(*input.shape(), input.dtype(), input.device()),
        };
        let gradients = floats(&flight.inputs).iter().map(gradient).collect::<Result<_, _>>()?;
        underway.leaving.insert(micro, gradients);
        Ok(())
    }
}
