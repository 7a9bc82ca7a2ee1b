//! A whole step, or a whole evaluation, of a model in stages.

use ferrospeed_comm::ReduceOp;
use ferrospeed_nn::{Carried, Stages};
use ferrospeed_pipeline::PipelineError;
use ferrospeed_pipeline::schedule::{Kind, Schedule};

use super::StageTimes;
use super::follow::{Asked, Given};
use crate::engine::{Engine, StepReport};
use crate::error::{EngineError, Result};

/// Makes a schedule of a kind for so many stages and micro-batches.
type MakeSchedule = fn(Kind, usize, usize) -> Result<Schedule, PipelineError>;

impl Engine {
    /// One step: as many micro-batches as a step accumulates go through all stages and back, and the weights are updated.
    /// Returns the mean loss over ranks and over micro-batches that have something to predict ([`Stages::has_targets`]; 0
    /// where none has), which is the same on all, and what became of the step. All ranks call it together; `batch` is asked for each micro-batch of this rank's data once, in order, on every stage
    /// alike.
    pub fn train_batch<M: Stages, E: From<EngineError>>(
        &mut self,
        model: &M,
        mut batch: impl FnMut(usize) -> Result<M::Batch, E>,
    ) -> Result<(f32, StepReport), E> {
        self.check_whole("train_batch")?;
        self.train();
        let micro_batches = self.gradient_accumulation_steps() as usize;
        let first = self.micro_steps();
        self.throughput.begin();
        let schedule: MakeSchedule =
            |kind, stages, micro| Ok(Schedule::new(kind, stages, micro)?.sending_at_once());
        let mut counts = Vec::with_capacity(micro_batches);
        let noting = |micro: usize| {
            let batch = batch(micro)?;
            counts.push(model.has_targets(&batch));
            Ok::<_, E>(batch)
        };
        let losses = self.run_batch(schedule, model, Asked::Loss, micro_batches, noting)?.losses;
        let loss = self.mean_loss(&losses, &counts)?;
        // A schedule that follows the loss follows that of all ranks.
        self.losses =
            loss.map_or((0.0, 0), |loss| (f64::from(loss) * micro_batches as f64, micro_batches as u64));
        self.micro_steps = first + micro_batches as u64 - 1;
        let report = self.end_micro_batch()?;
        Ok((loss.unwrap_or(0.0), report))
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
        let counts = vec![true; losses.len()];
        Ok(self.mean_loss(&losses, &counts)?.unwrap_or(0.0))
    }

    /// The loss of each micro-batch of this rank's data, known on all of its stages. All ranks call it together.
    pub fn eval_losses<M: Stages, E: From<EngineError>>(
        &mut self,
        model: &M,
        micro_batches: usize,
        batch: impl FnMut(usize) -> Result<M::Batch, E>,
    ) -> Result<Vec<f32>, E> {
        Ok(self.evaluate(model, Asked::Loss, micro_batches, batch)?.losses)
    }

    /// What the model says of each micro-batch of this rank's data, on the stage that has its last layers; nothing on the
    /// others. Micro-batches need no labels. All ranks call it together.
    pub fn inference<M: Stages, E: From<EngineError>>(
        &mut self,
        model: &M,
        micro_batches: usize,
        batch: impl FnMut(usize) -> Result<M::Batch, E>,
    ) -> Result<Vec<Carried>, E> {
        Ok(self.evaluate(model, Asked::Output, micro_batches, batch)?.outputs)
    }

    fn evaluate<M: Stages, E: From<EngineError>>(
        &mut self,
        model: &M,
        asked: Asked,
        micro_batches: usize,
        batch: impl FnMut(usize) -> Result<M::Batch, E>,
    ) -> Result<Given, E> {
        self.check_whole("eval_batch")?;
        let was_evaluating = self.is_evaluating();
        self.eval();
        let first = self.micro_steps();
        let run = self.run_batch(Schedule::forward_of, model, asked, micro_batches, batch);
        self.micro_steps = first;
        if !was_evaluating {
            self.train();
        }
        run
    }

    /// What this stage did when in the last batch.
    pub fn stage_times(&self) -> Option<&StageTimes> {
        self.pipeline.as_ref().map(|pipeline| &pipeline.times)
    }

    /// The mean over the micro-batches that count, of all ranks that see different data; none where none counts.
    fn mean_loss(&self, losses: &[f32], counts: &[bool]) -> Result<Option<f32>> {
        let counted: Vec<f32> =
            losses.iter().zip(counts).filter(|(_, counts)| **counts).map(|(loss, _)| *loss).collect();
        let share = counted.len() as f32 / losses.len().max(1) as f32;
        let mean = counted.iter().sum::<f32>() / counted.len().max(1) as f32;
        // Where every micro-batch counts, shares are 1 and leave the bits of losses as they are.
        let mut weighted = [mean * share, share];
        self.store.sharding().shard.all_reduce(&mut weighted, ReduceOp::Avg)?;
        let [sum, share] = weighted;
        Ok((share > 0.0).then(|| sum / share))
    }

    /// Follows the schedule that `make` gives.
    fn run_batch<M: Stages, E: From<EngineError>>(
        &mut self,
        make: MakeSchedule,
        model: &M,
        asked: Asked,
        micro_batches: usize,
        mut batch: impl FnMut(usize) -> Result<M::Batch, E>,
    ) -> Result<Given, E> {
        let Some(mut pipeline) = self.pipeline.take() else {
            return Err(EngineError::Order {
                call: "train_batch",
                why: "the model is not in stages; call forward, backward and step, or initialize_pipeline",
            }
            .into());
        };
        let result = make(pipeline.division.kind, pipeline.stages.size(), micro_batches)
            .map_err(|error| EngineError::from(error).into())
            .and_then(|schedule| self.follow(&mut pipeline, &schedule, model, asked, &mut batch));
        self.pipeline = Some(pipeline);
        result
    }
}
