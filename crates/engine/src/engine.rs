//! The training engine: micro-batches, accumulation, steps, counters.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use ferrospeed_comm::{Group, ReduceOp, World};
use ferrospeed_config::{Config, Stage};
use ferrospeed_nn::activation_bits::with_activation_bits;
use ferrospeed_nn::layer_drop::with_layer_drop;
use ferrospeed_nn::token_drop::with_token_drop;
use ferrospeed_nn::{LayerState, Mode};
use ferrospeed_observe::trace::{Activity, Timeline};
use ferrospeed_optim::GroupOptions;
use ferrospeed_optim::loss_scale::LossScaler;
use ferrospeed_optim::schedule::Scheduler;
use ferrospeed_tensor::autograd::{InPlace, Shelf};
use ferrospeed_tensor::random::{self, RandomState};
use ferrospeed_tensor::{Device, Tensor, TensorError, autograd};
use ferrospeed_zero::{Pass, StepOptions, StepOutcome, ZeroStore};

use crate::checkpoint::Background;
use crate::checkpointing;
use crate::communication;
use crate::compression::Compressing;
use crate::eigenvalues::Eigenvalues;
use crate::error::{EngineError, Result};
use crate::features::Features;
use crate::layer_norms::LayerNorms;
use crate::monitors::Monitoring;
use crate::parts::Parts;
use crate::pipeline;
use crate::pipeline::Pipeline;
use crate::profiler::{Phase, StepProfiler};
use crate::setup::{Setup, kept_type};
use crate::timers::{StepTimes, Throughput};

mod facts;
mod outside;

pub use outside::OutsideBackward;

/// What a call of [`Engine::step`] did.
#[derive(Debug, Clone, PartialEq)]
pub enum StepReport {
    /// The accumulation goes on: nothing was updated.
    Accumulating,
    /// Weights were updated.
    Applied {
        /// The norm of the averaged gradient before clipping.
        grad_norm: f64,
    },
    /// A gradient was not a number: nothing was updated, on any rank.
    Skipped {
        /// The first parameter with a bad gradient.
        param: String,
        /// The first rank whose loss was not a number; where all losses were numbers, the first that holds a bad part
        /// of the gradient.
        rank: usize,
    },
}

/// How [`Engine::backward_with`] differs from [`Engine::backward`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BackwardOptions {
    /// Whether the loss is divided by the number of micro-batches of a step.
    pub scale_wrt_gas: bool,
    /// Whether the graph stays for another backward of the same micro-batch, whose gradients are added to these. The last
    /// one does without, and averages the sum over ranks where stage and accumulation have it so.
    pub retain_graph: bool,
    /// Whether the loss counts in the mean of its step, for monitors and schedules: not where a micro-batch has nothing to
    /// predict.
    pub counts_in_mean: bool,
}

impl Default for BackwardOptions {
    fn default() -> Self {
        BackwardOptions { scale_wrt_gas: true, retain_graph: false, counts_in_mean: true }
    }
}

/// The engine. See the crate's documentation.
pub struct Engine {
    pub(crate) store: Arc<ZeroStore>,
    pub(crate) config: Config,
    pub(crate) world: World,
    /// How many ranks see samples of their own.
    pub(crate) data_parallel_size: usize,
    /// This rank's number among them.
    pub(crate) data_rank: usize,
    pub(crate) seed: u64,
    mode: Mode,
    pub(crate) scheduler: Option<Scheduler>,
    pub(crate) scaler: LossScaler,
    pub(crate) accumulation_steps: u64,
    pub(crate) micro_steps: u64,
    pub(crate) global_steps: u64,
    pub(crate) global_samples: u64,
    pub(crate) skipped_steps: u64,
    pub(crate) skipped_in_a_row: u64,
    max_skipped_in_a_row: u64,
    boundary_override: Option<bool>,
    pub(crate) last_grad_norm: Option<f64>,
    last_step_applied: bool,
    /// Whether a loss since the last step was not a number on this rank.
    pub(crate) bad_loss: bool,
    /// Losses since the last step, and how many.
    pub(crate) losses: (f64, u64),
    /// What the caller set in place of the scaler's scale.
    pub(crate) loss_scale_override: Option<f64>,
    /// Whether a schedule that follows a metric is told the training loss.
    pub(crate) follows_training_loss: bool,
    pub(crate) times: StepTimes,
    /// What they were when the micro-batch began.
    pub(crate) times_before: StepTimes,
    last_times: StepTimes,
    pub(crate) throughput: Throughput,
    pub(crate) monitoring: Monitoring,
    /// Where the run is traced.
    pub(crate) timeline: Option<Timeline>,
    pub(crate) background: Background,
    pub(crate) features: Features,
    /// Where the model is trained to be compressed.
    pub(crate) compressing: Option<Compressing>,
    pub(crate) eigenvalues: Option<Eigenvalues>,
    pub(crate) profiler: Option<StepProfiler>,
    pub(crate) layer_norms: LayerNorms,
    /// The other names of tied parameters: those the model was built with, and those a checkpoint had.
    pub(crate) aliases: BTreeMap<String, String>,
    /// What the model's layers keep besides parameters, by name.
    pub(crate) states: BTreeMap<String, Arc<dyn LayerState>>,
    /// Where this rank trains one stage of a model.
    pub(crate) pipeline: Option<Pipeline>,
    /// The whole model, where this rank holds a part of it.
    pub(crate) parts: Option<Parts>,
    /// Over how many ranks experts are spread at most.
    pub(crate) expert_ranks: usize,
    /// The ranks that hold slices of the same layers.
    pub(crate) slices: Option<Group>,
    /// Where the inputs of a program's own checkpointed segments wait.
    pub(crate) shelf: Arc<dyn Shelf>,
    /// Whether gradients are only added up until the step.
    pub(crate) reduces_at_step: bool,
    /// Why the state cannot be trained on: a load that failed when part of it was replaced.
    pub(crate) half_loaded: Option<PathBuf>,
}

impl Engine {
    pub(crate) fn new(
        setup: &Setup,
        store: Arc<ZeroStore>,
        scheduler: Option<Scheduler>,
        aliases: BTreeMap<String, String>,
        data_parallel_size: usize,
    ) -> Result<Engine> {
        let config = setup.config.clone();
        let scheduler = match (scheduler, &config.scheduler, store.optimizer()) {
            (Some(given), _, _) => Some(given),
            (None, Some(configured), Some(optimizer)) => {
                Some(Scheduler::from_config(configured, &optimizer, &store.group_options())?)
            }
            _ => None,
        };
        if let Some(note) = scheduler.as_ref().and_then(Scheduler::note) {
            tracing::warn!("{note}");
        }
        communication::start(&config, &setup.world)?;
        let features = Features::of_engine(setup)?;
        let eigenvalues = Eigenvalues::of_run(&config, store.dtype(), store.params())?;
        let compressing = Compressing::of_engine(&config, &store, setup.seed)?;
        let profiler = StepProfiler::of_run(&config, &setup.world);
        let monitoring = Monitoring::of_run(&config, &setup.world)?;
        let mut engine = Engine {
            data_rank: store.sharding().rank(),
            store,
            scheduler,
            // One machine for all stages, so that they agree on what is skipped.
            scaler: LossScaler::from_config(config.precision),
            accumulation_steps: config.batch.gradient_accumulation_steps.get(),
            world: setup.world.clone(),
            data_parallel_size,
            seed: setup.seed,
            mode: Mode::Train,
            config,
            micro_steps: 0,
            global_steps: 0,
            global_samples: 0,
            skipped_steps: 0,
            skipped_in_a_row: 0,
            max_skipped_in_a_row: setup.max_skipped_in_a_row,
            boundary_override: None,
            last_grad_norm: None,
            last_step_applied: false,
            bad_loss: false,
            losses: (0.0, 0),
            loss_scale_override: None,
            follows_training_loss: true,
            times: StepTimes::default(),
            times_before: StepTimes::default(),
            last_times: StepTimes::default(),
            throughput: Throughput::default(),
            monitoring,
            timeline: None,
            background: Background::default(),
            features,
            compressing,
            eigenvalues,
            profiler,
            layer_norms: LayerNorms::default(),
            aliases,
            states: BTreeMap::new(),
            pipeline: None,
            parts: None,
            expert_ranks: 1,
            slices: None,
            shelf: Arc::new(InPlace),
            reduces_at_step: false,
            half_loaded: None,
        };
        engine.apply_schedule();
        engine.dump_state();
        Ok(engine)
    }

    /// Gives every group the rates that the schedule has for the next step.
    pub(crate) fn apply_schedule(&mut self) {
        let Some(scheduler) = &self.scheduler else { return };
        for (group, options) in scheduler.options().into_iter().enumerate() {
            self.store.set_group_options(group, options);
        }
    }

    /// Runs the model. In training mode everything it does is recorded for [`Engine::backward`].
    pub fn forward<E: From<TensorError>>(
        &mut self,
        model: impl FnOnce(Mode) -> Result<Tensor, E>,
    ) -> Result<Tensor, E> {
        if let Some(from) = &self.half_loaded {
            let why = EngineError::half_loaded("forward", from).to_string();
            return Err(TensorError::argument("forward", why).into());
        }
        if self.pipeline.is_some() {
            return Err(TensorError::argument("forward", pipeline::REFUSAL.to_owned()).into());
        }
        if let Err(error) = self.prepare_weights() {
            return Err(TensorError::argument("forward", error.to_string()).into());
        }
        self.log_memory("Engine before forward");
        let start = Instant::now();
        // An evaluation between two steps is no part of either.
        let is_training = !self.is_evaluating();
        if is_training {
            self.throughput.begin();
        }
        let result = self.traced(|engine| engine.profiled(Phase::Forward, |engine| engine.run(model)));
        self.end_timed_phase()?;
        if is_training {
            self.times.forward += start.elapsed();
        }
        self.trace(Activity::Compute, if is_training { "forward" } else { "evaluate" }, start);
        self.log_memory("Engine after forward");
        result
    }

    /// Runs the model as a pass of its own.
    pub(crate) fn run<E>(&self, model: impl FnOnce(Mode) -> Result<Tensor, E>) -> Result<Tensor, E> {
        random::set_state(self.random_state());
        self.run_from_here(model)
    }

    /// The same, where random numbers go on from where they are.
    pub(crate) fn run_from_here<R, E>(&self, model: impl FnOnce(Mode) -> Result<R, E>) -> Result<R, E> {
        self.store.begin_pass(match self.mode {
            Mode::Train => Pass::Train,
            Mode::Evaluate => Pass::Evaluate,
        });
        let pass = || {
            with_activation_bits(self.activation_bits(), || match self.mode {
                Mode::Train => with_layer_drop(self.layer_drop(), || {
                    with_token_drop(self.token_drop(), || model(Mode::Train))
                }),
                Mode::Evaluate => autograd::no_grad(|| model(Mode::Evaluate)),
            })
        };
        checkpointing::within(&self.shelf, pass)
    }

    /// Random numbers of a micro-batch depend on the seed, the rank among those that see different data and its number
    /// alone.
    pub(crate) fn random_state(&self) -> RandomState {
        let rank = self.data_rank() as u64;
        let seed = self.seed ^ rank.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        RandomState { seed, step: self.micro_steps as u32, next_stream: 0 }
    }

    /// Computes gradients, averages them over ranks and adds them to those of earlier micro-batches. Returns the loss
    /// divided by the number of micro-batches of a step.
    pub fn backward(&mut self, loss: &Tensor) -> Result<f32> {
        self.backward_with(loss, BackwardOptions::default())
    }

    /// [`Engine::backward`] with other options. Returns the loss as it went backward.
    pub fn backward_with(&mut self, loss: &Tensor, options: BackwardOptions) -> Result<f32> {
        self.refuse_in_pipeline("backward")?;
        self.backward_from(loss, options)
    }

    fn backward_from(&mut self, loss: &Tensor, options: BackwardOptions) -> Result<f32> {
        let pass = if options.retain_graph { autograd::backward_retaining } else { autograd::backward_with };
        Ok(self.backward_by(loss, options, pass)?.0)
    }

    /// Backward from a loss by a pass of the caller's, with what that returns.
    pub(crate) fn backward_by<R>(
        &mut self,
        loss: &Tensor,
        options: BackwardOptions,
        pass: impl FnOnce(&[(Tensor, Tensor)]) -> Result<R, TensorError>,
    ) -> Result<(f32, R)> {
        self.check_whole("backward")?;
        self.check_trains()?;
        self.log_memory("Engine before backward");
        let start = Instant::now();
        // Asked for before backward is submitted, so that a device never waits for the host to look at it.
        let value = loss.item_later()?;
        let scaled = if options.scale_wrt_gas { 1.0 / self.accumulation_steps as f32 } else { 1.0 };
        let seed =
            Tensor::full(*loss.shape(), self.loss_scale() as f32 * scaled, loss.dtype(), loss.device())?;
        let roots = [(loss.clone(), seed)];
        if options.retain_graph {
            // Two gradients are added up where one would do without the memory for it.
            self.store.accumulate_in(kept_type(&self.config, self.store.dtype(), true))?;
        }
        self.begin_backward(options.retain_graph)?;
        // What is computed again must see what forward saw.
        let bits = self.activation_bits();
        let shelf = Arc::clone(&self.shelf);
        let pass = || checkpointing::within(&shelf, || with_activation_bits(bits, || pass(&roots)));
        let passed = self.traced(|engine| engine.profiled(Phase::Backward, |_| pass()))?;
        self.end_backward(start)?;
        let loss = value()?;
        self.end_timed_phase()?;
        self.times.backward += start.elapsed();
        self.trace(Activity::Compute, "backward", start);
        self.log_memory("Engine after backward");
        self.bad_loss |= !loss.is_finite();
        if options.counts_in_mean {
            self.losses = (self.losses.0 + f64::from(loss), self.losses.1 + 1);
        }
        Ok((loss * scaled, passed))
    }

    /// Tells the store whether a step follows, and gradients are to be reduced before it: not so if another backward does.
    pub(crate) fn begin_backward(&self, another_follows: bool) -> Result<()> {
        let last = !self.reduces_at_step && !another_follows && self.is_gradient_accumulation_boundary();
        Ok(self.store.begin_backward(last)?)
    }

    /// Waits for what is left of the reductions, and counts the time since `start` as the pass itself.
    pub(crate) fn end_backward(&mut self, start: Instant) -> Result<()> {
        self.end_timed_phase()?;
        self.times.backward_inner += start.elapsed();
        let reducing = Instant::now();
        self.store.finish_backward()?;
        self.times.backward_allreduce += reducing.elapsed();
        Ok(())
    }

    /// Ends a micro-batch; at the end of an accumulation, updates the weights. All ranks call it together.
    pub fn step(&mut self) -> Result<StepReport> {
        self.refuse_in_pipeline("step")?;
        self.end_micro_batch()
    }

    pub(crate) fn end_micro_batch(&mut self) -> Result<StepReport> {
        self.check_whole("step")?;
        if !self.is_gradient_accumulation_boundary() {
            self.micro_steps += 1;
            self.last_step_applied = false;
            self.throughput.end(false);
            self.log_micro_batch();
            return Ok(StepReport::Accumulating);
        }
        self.note_missed_eigenvalues();
        self.log_memory("Engine before step");
        let start = Instant::now();
        // Gradients are divided by the scale they were made with; only then does it move.
        let options = StepOptions { loss_scale: self.loss_scale(), clip: self.config.gradient_clipping };
        self.measure_layer_norms()?;
        let mut outcome = self.store.step(options)?;
        if let StepOutcome::Skipped { rank, .. } = &mut outcome {
            *rank = self.first_bad_rank(*rank)?;
        }
        self.bad_loss = false;
        if self.loss_scale_override.is_none() {
            self.scaler.update(matches!(outcome, StepOutcome::Skipped { .. }))?;
        }
        let is_applied = matches!(outcome, StepOutcome::Applied { .. });
        let loss = self.training_loss(is_applied)?;
        self.losses = (0.0, 0);
        self.micro_steps += 1;
        self.global_steps += 1;
        self.global_samples += self.train_batch_size();
        self.end_timed_phase()?;
        self.times.step += start.elapsed();
        self.trace(Activity::Compute, "step", start);
        self.log_micro_batch();
        self.last_times = std::mem::take(&mut self.times);
        self.times_before = StepTimes::default();
        let time = self.throughput.end(true);
        let report = self.account(outcome);
        self.log_step(time);
        self.report_profile();
        self.log_memory("Engine after step");
        if let Some(loss) = loss {
            self.monitor_step(loss);
        }
        report
    }

    /// Waits for the device where somebody wants to know how long a phase takes.
    fn end_timed_phase(&self) -> Result<(), TensorError> {
        if self.config.wall_clock_breakdown { self.device().backend().synchronize() } else { Ok(()) }
    }

    /// Where a bad gradient came from: the first rank whose loss was bad, or `holder`. All ranks ask together.
    fn first_bad_rank(&self, holder: usize) -> Result<usize> {
        let (rank, ranks) = (self.world.rank() as i64, self.world.size() as i64);
        let mut first = [if self.bad_loss { rank } else { ranks }];
        self.world.group().all_reduce(&mut first, ReduceOp::Min)?;
        Ok(if first[0] < ranks { first[0] as usize } else { holder })
    }

    /// Counts what a step did, and moves on the schedule.
    fn account(&mut self, outcome: StepOutcome) -> Result<StepReport> {
        match outcome {
            StepOutcome::Applied { norm } => {
                self.last_grad_norm = Some(norm);
                self.last_step_applied = true;
                self.skipped_in_a_row = 0;
                if let Some(scheduler) = &mut self.scheduler {
                    scheduler.step();
                }
                self.apply_schedule();
                if let Some(compressing) = &self.compressing {
                    compressing.after(self.applied_steps());
                }
                Ok(StepReport::Applied { grad_norm: norm })
            }
            StepOutcome::Skipped { param, rank } => {
                self.last_step_applied = false;
                self.skipped_steps += 1;
                self.skipped_in_a_row += 1;
                let (step, scale) = (self.global_steps, self.loss_scale());
                tracing::warn!(step, %param, rank, scale, "step skipped: the gradient is not a number");
                // A dynamic loss scale falls until it works, and explains itself at its floor.
                if !self.scaler.is_dynamic() && self.skipped_in_a_row >= self.max_skipped_in_a_row {
                    return Err(EngineError::Diverged { skipped: self.skipped_in_a_row, param, rank });
                }
                Ok(StepReport::Skipped { param, rank })
            }
        }
    }

    /// Refuses to work with state of which a load or a step has replaced only a part.
    pub(crate) fn check_whole(&self, call: &'static str) -> Result<()> {
        self.store.check_stepped(call)?;
        self.half_loaded.as_ref().map_or(Ok(()), |from| Err(EngineError::half_loaded(call, from)))
    }

    fn refuse_in_pipeline(&self, call: &'static str) -> Result<()> {
        match &self.pipeline {
            Some(_) => Err(EngineError::Order { call, why: pipeline::REFUSAL }),
            None => Ok(()),
        }
    }

    /// Whether the next [`Engine::step`] updates weights.
    pub fn is_gradient_accumulation_boundary(&self) -> bool {
        self.boundary_override.unwrap_or((self.micro_steps + 1).is_multiple_of(self.accumulation_steps))
    }

    /// Says by hand whether the next step updates; stays until it is said again, `None` counts again.
    pub fn set_gradient_accumulation_boundary(&mut self, boundary: Option<bool>) {
        self.boundary_override = boundary;
    }

    /// Runs micro-batches whose gradients are not averaged over ranks yet: they join the next that is.
    pub fn no_sync<R>(&mut self, work: impl FnOnce(&mut Engine) -> R) -> R {
        self.store.set_synchronize(false);
        let result = work(self);
        self.store.set_synchronize(true);
        result
    }

    /// Switches dropout on and recording on.
    pub fn train(&mut self) {
        self.mode = Mode::Train;
    }

    /// Switches both off.
    pub fn eval(&mut self) {
        self.mode = Mode::Evaluate;
    }

    pub(crate) fn is_evaluating(&self) -> bool {
        self.mode == Mode::Evaluate
    }

    /// Drops gradients without a step.
    pub fn zero_grad(&mut self) {
        self.store.zero_grad();
        self.losses = (0.0, 0);
    }
}
