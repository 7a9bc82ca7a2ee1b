//! The `flops_profiler` section: one micro-batch of one step is counted, and rank 0 reports it when the step is done.
//!
//! Steps are numbered as `global_steps` is: from 0. Nothing here changes a number of the run, and a report that cannot be
//! written is a warning.

use std::path::Path;
use std::time::{Duration, Instant};

use ferrospeed_comm::World;
use ferrospeed_config::{Config, FlopsProfiler};
use ferrospeed_observe::flops::{Phases, Ranks, ReportOptions, Summary, report, write_report};
use ferrospeed_tensor::profile::{self, Profile};

use crate::engine::Engine;
use crate::model_profile::ModelProfile;

/// What of a micro-batch is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    Forward,
    Backward,
}

/// How far the profile is.
#[derive(Debug)]
enum Progress {
    /// The step has not come.
    Waiting,
    /// A micro-batch went forward.
    Forward(Profile, Duration),
    /// And backward.
    Whole(Profile, Duration, Duration),
    /// It was reported.
    Reported(Box<ModelProfile>),
}

/// The profiler of a run, on the rank that reports.
#[derive(Debug)]
pub(crate) struct StepProfiler {
    config: FlopsProfiler,
    progress: Progress,
}

impl StepProfiler {
    pub(crate) fn of_run(config: &Config, world: &World) -> Option<StepProfiler> {
        let config = config.flops_profiler.clone().filter(|_| world.rank() == 0)?;
        Some(StepProfiler { config, progress: Progress::Waiting })
    }

    fn wants(&self, phase: Phase, step: u64) -> bool {
        let is_next = match phase {
            Phase::Forward => matches!(self.progress, Progress::Waiting),
            Phase::Backward => matches!(self.progress, Progress::Forward(..)),
        };
        is_next && step == self.config.profile_step
    }

    fn take(&mut self, phase: Phase, counted: Profile, spent: Duration) {
        let before = std::mem::replace(&mut self.progress, Progress::Waiting);
        self.progress = match (phase, before) {
            (Phase::Backward, Progress::Forward(mut profile, forward)) => {
                profile.merge(counted);
                Progress::Whole(profile, forward, spent)
            }
            _ => Progress::Forward(counted, spent),
        };
    }
}

impl Engine {
    /// Runs a phase of a micro-batch, and counts what it does where its step is to be profiled.
    pub(crate) fn profiled<R>(&mut self, phase: Phase, work: impl FnOnce(&Engine) -> R) -> R {
        let step = self.global_steps;
        let is_due = self.profiler.as_ref().is_some_and(|profiler| profiler.wants(phase, step));
        if !is_due || self.is_evaluating() {
            return work(self);
        }
        let start = Instant::now();
        let (result, counted) = profile::collect(self.device(), || work(self));
        let spent = start.elapsed();
        if let Some(profiler) = &mut self.profiler {
            profiler.take(phase, counted, spent);
        }
        result
    }

    /// After a step: reports what was counted in it.
    pub(crate) fn report_profile(&mut self) {
        let Some(profiler) = &mut self.profiler else { return };
        let (profile, forward, backward) = match &mut profiler.progress {
            Progress::Whole(profile, forward, backward) => (std::mem::take(profile), *forward, *backward),
            _ => return,
        };
        let config = profiler.config.clone();
        let model = ModelProfile::new(profile, self.store.params(), &self.aliases);
        let text = self.profile_text(&config, &model, forward, backward);
        if let Some(profiler) = &mut self.profiler {
            profiler.progress = Progress::Reported(Box::new(model));
        }
        let Some(file) = config.output_file.as_deref().filter(|file| !file.is_empty()) else {
            tracing::info!("{text}");
            return;
        };
        if let Err(error) = write_report(Path::new(file), &text) {
            tracing::warn!("flops_profiler.output_file: {error}; the report follows here instead\n{text}");
        }
    }

    fn profile_text(
        &self,
        config: &FlopsProfiler,
        model: &ModelProfile,
        forward: Duration,
        backward: Duration,
    ) -> String {
        let ranks = self.world.size() as u64;
        let summary = Summary {
            step: config.profile_step,
            ranks: Some(Ranks {
                world_size: ranks,
                data_parallel_size: ranks,
                model_parallel_size: 1,
                micro_batch: self.train_micro_batch_size_per_gpu(),
                expert_tensor_parallelism: None,
            }),
            model_params: model.params(),
            experts: None,
            forward_s: forward.as_secs_f64(),
            phases: Some(Phases {
                backward_s: backward.as_secs_f64(),
                step_s: self.last_step_times().step.as_secs_f64(),
                recompute_fwd_factor: config.recompute_fwd_factor,
            }),
        };
        let options = ReportOptions {
            module_depth: config.module_depth,
            top_modules: config.top_modules,
            detailed: config.detailed,
        };
        report(&summary, model.model(), &options)
    }

    /// What the `flops_profiler` counted, on rank 0, once its step is over: also what backward did and what it recomputed,
    /// of which the report only says a multiple of forward.
    pub fn model_profile(&self) -> Option<&ModelProfile> {
        match &self.profiler.as_ref()?.progress {
            Progress::Reported(model) => Some(model),
            _ => None,
        }
    }
}
