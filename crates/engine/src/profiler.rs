//! The `flops_profiler` section: one micro-batch of one step is counted, and rank 0 reports it when the step is done.
//!
//! Of a model in stages, the stages through which rank 0's first micro-batch goes count what each does for it, between what
//! they do for others, and rank 0 reports them all: the sum, and the modules of each.
//!
//! Steps are numbered as `global_steps` is: from 0. Nothing here changes a number of the run, and a report that cannot be
//! written is a warning.

use std::path::Path;
use std::time::{Duration, Instant};

use ferrospeed_checkpoint::agree;
use ferrospeed_comm::{World, tell};
use ferrospeed_config::{Config, FlopsProfiler};
use ferrospeed_observe::flops::{Phases, Ranks, ReportOptions, Summary, report, write_report};
use ferrospeed_tensor::profile::{self, Profile};
use serde::{Deserialize, Serialize};

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
    /// It went through some of this stage's chunks, forward and backward.
    Stage(Profile, Duration, Duration),
    /// It was reported.
    Reported(Box<ModelProfile>),
}

/// The profiler of a run, on the rank that reports.
#[derive(Debug)]
pub(crate) struct StepProfiler {
    config: FlopsProfiler,
    progress: Progress,
    /// Operations that a stage did again for backward, and those of gradients that the loss takes meanwhile.
    again_flops: [u64; 2],
}

impl StepProfiler {
    pub(crate) fn of_run(config: &Config, world: &World) -> Option<StepProfiler> {
        if world.rank() == 0 { StepProfiler::of_stage(config) } else { None }
    }

    /// On a rank whose stage works on what rank 0 begins with.
    pub(crate) fn of_stage(config: &Config) -> Option<StepProfiler> {
        let config = config.flops_profiler.clone()?;
        Some(StepProfiler { config, progress: Progress::Waiting, again_flops: [0; 2] })
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

/// What all ranks of one stage counted together; operations of forward but for the last two.
#[derive(Debug, Serialize, Deserialize)]
struct StageCounts {
    macs: u64,
    flops: u64,
    backward_flops: u64,
    again_flops: u64,
}

/// The same of all stages.
struct ModelCounts {
    stages: Vec<StageCounts>,
}

impl ModelCounts {
    fn sum(&self, count: impl Fn(&StageCounts) -> u64) -> u64 {
        self.stages.iter().map(count).sum()
    }

    /// What a report of all stages of a model with so many parameters begins with.
    fn heading(&self, params: u64) -> String {
        let mut text = format!(
            "{} stages, of which each counted what it did for one micro-batch. Together:\n\
             params: {params}\nfwd MACs: {}\nfwd flops: {}\nbwd flops: {}\n",
            self.stages.len(),
            self.sum(|stage| stage.macs),
            self.sum(|stage| stage.flops),
            self.sum(|stage| stage.backward_flops),
        );
        let again = self.sum(|stage| stage.again_flops);
        if again > 0 {
            text.push_str(&format!(
                "flops of what forward did not keep (attention's scores, activations, checkpointed layers): {again}\n"
            ));
        }
        text
    }
}

impl Engine {
    /// As [`Engine::profiled`], for a part of what a stage does for a micro-batch of the step.
    pub(crate) fn profiled_in_stage<R>(
        &mut self,
        phase: Phase,
        micro: usize,
        work: impl FnOnce(&mut Engine) -> R,
    ) -> R {
        if !self.counts_in_stage(micro) {
            return work(self);
        }
        let (start, device) = (Instant::now(), self.device().clone());
        let (result, counted) = profile::collect(&device, || work(self));
        let spent = start.elapsed();
        if let Some(profiler) = &mut self.profiler {
            let before = std::mem::replace(&mut profiler.progress, Progress::Waiting);
            let (mut profile, mut forward, mut backward) = match before {
                Progress::Stage(profile, forward, backward) => (profile, forward, backward),
                _ => Default::default(),
            };
            profile.merge(counted);
            match phase {
                Phase::Forward => forward += spent,
                Phase::Backward => backward += spent,
            }
            profiler.progress = Progress::Stage(profile, forward, backward);
        }
        result
    }

    fn counts_in_stage(&self, micro: usize) -> bool {
        let step = self.global_steps;
        let is_due = self.profiler.as_ref().is_some_and(|profiler| {
            let is_open = matches!(profiler.progress, Progress::Waiting | Progress::Stage(..));
            is_open && micro == 0 && step == profiler.config.profile_step
        });
        is_due && !self.is_evaluating()
    }

    /// Runs what a stage computes again for backward, and counts it apart from what it computed first.
    pub(crate) fn recomputed_in_stage<R>(&mut self, micro: usize, work: impl FnOnce(&mut Engine) -> R) -> R {
        if !self.counts_in_stage(micro) {
            return work(self);
        }
        let device = self.device().clone();
        let (result, counted) = profile::collect(&device, || work(self));
        if let Some(profiler) = &mut self.profiler {
            let total = counted.total();
            profiler.again_flops[0] += total.forward.flops + total.recomputation.flops;
            profiler.again_flops[1] += total.backward.flops;
        }
        result
    }

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
            Progress::Whole(profile, forward, backward) | Progress::Stage(profile, forward, backward) => {
                (std::mem::take(profile), *forward, *backward)
            }
            _ => return,
        };
        let config = profiler.config.clone();
        let model = ModelProfile::new(profile, self.store.params(), &self.aliases);
        let text = self.whole_text(&config, &model, forward, backward).unwrap_or_else(|error| {
            tracing::warn!("flops_profiler: the stages could not tell what they counted: {error}");
            None
        });
        if let Some(profiler) = &mut self.profiler {
            profiler.progress = Progress::Reported(Box::new(model));
        }
        let Some(text) = text else { return };
        let Some(file) = config.output_file.as_deref().filter(|file| !file.is_empty()) else {
            tell(&text);
            return;
        };
        if let Err(error) = write_report(Path::new(file), &text) {
            tracing::warn!("flops_profiler.output_file: {error}; the report follows here instead");
            tell(&text);
        }
    }

    /// The text on rank 0, with what the other stages say; nothing on theirs.
    fn whole_text(
        &self,
        config: &FlopsProfiler,
        model: &ModelProfile,
        forward: Duration,
        backward: Duration,
    ) -> ferrospeed_checkpoint::Result<Option<String>> {
        let Some(pipeline) = &self.pipeline else {
            return Ok(Some(self.profile_text(config, model, forward, backward, None)));
        };
        let counts = ModelCounts { stages: agree(&pipeline.stages, Ok(self.stage_counts(model)))? };
        let own = self.profile_text(config, model, forward, backward, Some(&counts));
        let said: Vec<String> = agree(&pipeline.stages, Ok(own))?;
        if self.world.rank() != 0 {
            return Ok(None);
        }
        let mut text = counts.heading(self.whole_params());
        for (stage, said_there) in said.iter().enumerate() {
            text.push_str(&format!("\nstage {stage} of {}\n{said_there}\n", said.len()));
        }
        Ok(Some(text))
    }

    fn stage_counts(&self, model: &ModelProfile) -> StageCounts {
        let total = model.total();
        let [recomputed, taken] = self.profiler.as_ref().map_or([0; 2], |profiler| profiler.again_flops);
        let of_all = |count: u64| count * self.ranks_of_a_stage();
        StageCounts {
            macs: of_all(model.macs()),
            flops: of_all(model.flops()),
            backward_flops: of_all(total.backward.flops + taken),
            again_flops: of_all(total.recomputation.flops + recomputed),
        }
    }

    /// Ranks that have a sample in common on this one's stage: those with other slices of its layers, or other parts of the
    /// sample's sequence.
    fn ranks_of_a_stage(&self) -> u64 {
        let stages = self.pipeline.as_ref().map_or(1, |pipeline| pipeline.stages.size());
        (self.world.size() / (self.data_parallel_size * stages).max(1)).max(1) as u64
    }

    /// Parameters of the whole model, of which this rank may have slices, a stage, or some of the experts.
    fn whole_params(&self) -> u64 {
        let own = || self.store.params().iter().map(|param| param.whole_shape().numel() as u64).sum();
        self.parts.as_ref().map_or_else(own, |parts| parts.numel)
    }

    fn profile_text(
        &self,
        config: &FlopsProfiler,
        model: &ModelProfile,
        forward: Duration,
        backward: Duration,
        stages: Option<&ModelCounts>,
    ) -> String {
        let ranks = self.world.size() as u64;
        let summary = Summary {
            step: config.profile_step,
            ranks: Some(Ranks {
                world_size: ranks,
                data_parallel_size: self.data_parallel_size as u64,
                model_parallel_size: self.ranks_of_a_stage(),
                micro_batch: self.train_micro_batch_size_per_gpu(),
                expert_tensor_parallelism: None,
            }),
            // What ranks hold alike, such as norms, counts once: a product would not.
            model_params: self.whole_params(),
            flops_of_stages: stages.map(|counts| counts.sum(|stage| stage.flops)),
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
    /// of which the report only says a multiple of forward. Of a model in stages, what this rank's stage did.
    pub fn model_profile(&self) -> Option<&ModelProfile> {
        match &self.profiler.as_ref()?.progress {
            Progress::Reported(model) => Some(model),
            _ => None,
        }
    }
}
