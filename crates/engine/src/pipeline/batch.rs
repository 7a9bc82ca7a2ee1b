//! A whole step, or a whole evaluation, of a model in stages.

use ferrospeed_comm::ReduceOp;
use ferrospeed_nn::{Carried, Stages};
use ferrospeed_pipeline::PipelineError;
use ferrospeed_pipeline::schedule::{Kind, Schedule};
use ferrospeed_pipeline::validate::{Sends, validate};

use super::StageTimes;
use super::follow::{Asked, Given};
use crate::engine::{Engine, StepReport};
use crate::error::{EngineError, Result};

/// What becomes of the losses of an evaluation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Reduce {
    /// Their mean over micro-batches and ranks.
    #[default]
    Average,
    /// Each micro-batch's own, of this rank's data.
    Nothing,
}

/// What an evaluation is asked for: the arguments of DeepSpeed's `eval_batch`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EvalOptions {
    /// How many micro-batches of each rank's data.
    pub num_micro_batches: usize,
    /// Whether the last layer's loss is wanted.
    pub compute_loss: bool,
    /// What becomes of losses.
    pub reduce_output: Reduce,
    /// Whether all stages know losses; else the last one alone.
    pub bcast_loss: bool,
    /// Whether the last stage gives what the model says of each micro-batch; with the loss as well, each is asked for twice.
    pub return_logits: bool,
}

impl EvalOptions {
    /// The mean loss of so many micro-batches, on every rank.
    pub fn of(num_micro_batches: usize) -> EvalOptions {
        EvalOptions {
            num_micro_batches,
            compute_loss: true,
            reduce_output: Reduce::Average,
            bcast_loss: true,
            return_logits: false,
        }
    }
}

/// What an evaluation has found.
#[derive(Debug, Clone, Default)]
pub struct Evaluation {
    /// One number where losses are averaged, else one for each micro-batch; none where nobody asked, or another stage knows.
    pub losses: Vec<f32>,
    /// What the model says of each micro-batch, on its last stage.
    pub logits: Vec<Carried>,
}

impl Engine {
    /// Evaluates as the options say. All ranks call it together; `batch` is asked for each micro-batch in order.
    pub fn eval_batch_with<M: Stages, E: From<EngineError>>(
        &mut self,
        model: &M,
        options: EvalOptions,
        mut batch: impl FnMut(usize) -> Result<M::Batch, E>,
    ) -> Result<Evaluation, E> {
        let mut found = Evaluation::default();
        let count = options.num_micro_batches;
        if options.return_logits {
            found.logits = self.inference(model, count, &mut batch)?;
        }
        if options.compute_loss {
            let losses = self.eval_losses(model, count, &mut batch)?;
            found.losses = match options.reduce_output {
                Reduce::Nothing => losses,
                Reduce::Average => {
                    let counts = vec![true; losses.len()];
                    self.mean_loss(&losses, &counts)?.into_iter().collect()
                }
            };
        }
        let (stage, stages) = self.stage();
        if !options.bcast_loss && stage + 1 != stages {
            found.losses.clear();
        }
        Ok(found)
    }

    /// [`Engine::train_batch`] of what an iterator gives: DeepSpeed's `set_dataiterator`. `make` turns what it gives into a
    /// micro-batch (`set_batch_fn`). Every rank of a pipeline has an iterator over the same data.
    pub fn train_batch_from<M: Stages, T, E: From<EngineError>>(
        &mut self,
        model: &M,
        iterator: &mut impl Iterator<Item = T>,
        mut make: impl FnMut(T) -> Result<M::Batch, E>,
    ) -> Result<(f32, StepReport), E> {
        self.train_batch(model, |_| {
            let item = iterator.next().ok_or(EngineError::Argument {
                what: "data iterator",
                why: "it has nothing more to give; wrap it in a RepeatingLoader to begin it again".into(),
            });
            make(item?)
        })
    }

    /// One step: as many micro-batches as a step accumulates go through all stages and back, and the weights are updated.
    /// Returns the mean loss over ranks and over micro-batches that have something to predict ([`Stages::has_targets`]; 0
    /// where none has), which is the same on all, and what became of the step. All ranks call it together; `batch` is asked for each micro-batch of this rank's data once, in order, on every stage
    /// alike.
    pub fn train_batch<M: Stages, E: From<EngineError>>(
        &mut self,
        model: &M,
        batch: impl FnMut(usize) -> Result<M::Batch, E>,
    ) -> Result<(f32, StepReport), E> {
        let schedule = |kind, stages, micro| Ok(Schedule::new(kind, stages, micro)?.sending_at_once());
        self.train_following(schedule, model, batch)
    }

    /// [`Engine::train_batch`] by a schedule of the program's own, the same on all stages: a [`Schedule`] is a value, which is
    /// checked before anything is computed ([`validate`]). Its chunks must lie where the model's layers do.
    pub fn train_batch_by<M: Stages, E: From<EngineError>>(
        &mut self,
        schedule: &Schedule,
        model: &M,
        batch: impl FnMut(usize) -> Result<M::Batch, E>,
    ) -> Result<(f32, StepReport), E> {
        self.check_schedule(schedule)?;
        self.train_following(|_, _, _| Ok(schedule.clone()), model, batch)
    }

    fn check_schedule(&self, schedule: &Schedule) -> Result<()> {
        validate(schedule, Sends::Buffered)?;
        let Some(pipeline) = &self.pipeline else { return Ok(()) };
        let (asked, given) = (self.gradient_accumulation_steps(), schedule.micro_batches as u64);
        let why = match () {
            () if asked != given => format!("it has {given} micro-batches, and a step {asked}"),
            () if schedule.stage_of_chunk != pipeline.division.stage_of_chunk => format!(
                "its chunks lie on the stages {:?}, and the model's layers on {:?}",
                schedule.stage_of_chunk, pipeline.division.stage_of_chunk
            ),
            () => return Ok(()),
        };
        Err(EngineError::Argument { what: "schedule", why })
    }

    fn train_following<M: Stages, E: From<EngineError>>(
        &mut self,
        schedule: impl FnOnce(Kind, usize, usize) -> Result<Schedule, PipelineError>,
        model: &M,
        mut batch: impl FnMut(usize) -> Result<M::Batch, E>,
    ) -> Result<(f32, StepReport), E> {
        self.check_whole("train_batch")?;
        self.train();
        let micro_batches = self.gradient_accumulation_steps() as usize;
        let first = self.micro_steps();
        self.throughput.begin();
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
        make: impl FnOnce(Kind, usize, usize) -> Result<Schedule, PipelineError>,
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
