//! Lines for the log, as DeepSpeed writes them: progress, throughput, where the time of a step went, where memory is, what
//! the engine is.

use std::fmt::Write;

use ferrospeed_comm::tell;
use ferrospeed_config::print::as_deepspeed;
use ferrospeed_tensor::Category;

use crate::engine::Engine;
use crate::timers::{StepTime, StepTimes};

/// Names are filled up with dots to this column.
const NAME_WIDTH: usize = 29;

impl Engine {
    /// What the device holds now and held at most, by kind, and what the system gave this process. Costs nothing; every
    /// rank may ask for its own.
    pub fn memory_report(&self) -> String {
        let usage = self.device().memory_usage();
        let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
        let mut text = String::new();
        for category in Category::ALL {
            // Writing to a string does not fail.
            let _ = write!(
                text,
                "{} {:.1}/{:.1} | ",
                category.name(),
                mib(usage.current(category)),
                mib(usage.peak(category))
            );
        }
        let _ = write!(
            text,
            "total {:.1}/{:.1} MiB (now/peak)",
            mib(usage.current_total()),
            mib(usage.peak_total())
        );
        if let Some((now, peak)) = process_memory_kib() {
            let mib = |kib: u64| kib as f64 / 1024.0;
            let _ = write!(text, " | process {:.1}/{:.1} MiB", mib(now), mib(peak));
        }
        text
    }

    /// Logs memory on rank 0, after a word on when: DeepSpeed's `see_memory_usage`, and [`Engine::memory_report`]. What
    /// was held at most is left as it is.
    pub fn see_memory_usage(&self, when: &str) {
        if self.world.rank() != 0 {
            return;
        }
        let usage = self.device().memory_usage();
        let (now, most) = (gib(usage.current_total()), gib(usage.peak_total()));
        tell(&format!(
            "{when}\nMA {now:?} GB         Max_MA {most:?} GB         CA {now:?} GB         Max_CA {} GB \n{}{}",
            most.round_ties_even(),
            host_memory_line().unwrap_or_default(),
            self.memory_report()
        ));
    }

    /// With `memory_breakdown`, the memory around a part of a step.
    pub(crate) fn log_memory(&self, when: &str) {
        if self.config.memory_breakdown {
            self.see_memory_usage(when);
        }
    }

    /// With `wall_clock_breakdown`, at the end of a micro-batch: where its time went.
    pub(crate) fn log_micro_batch(&mut self) {
        let times = self.times.since(self.times_before);
        self.times_before = self.times;
        self.log_times(times, "_microstep");
    }

    fn log_times(&self, times: StepTimes, suffix: &str) {
        if self.config.wall_clock_breakdown && self.world.rank() == 0 {
            tell(&times.line(suffix));
        }
    }

    /// At the end of a step, what the configuration wants to be told.
    pub(crate) fn log_step(&self, time: Option<StepTime>) {
        self.log_times(self.last_step_times(), "");
        let steps = self.global_steps;
        let due = self.config.steps_per_print.is_some_and(|every| every > 0 && steps.is_multiple_of(every));
        if self.world.rank() != 0 || !due {
            return;
        }
        tracing::info!(
            "step={steps}, skipped={}, lr={:?}, mom=[{}]",
            self.skipped_steps,
            self.get_lr(),
            self.momenta().join(", ")
        );
        if let Some(time) = time {
            let per_second = |time: std::time::Duration| self.train_batch_size() as f64 / time.as_secs_f64();
            let usage = self.device().memory_usage();
            tracing::info!(
                "epoch=0/micro_step={}/global_step={steps}, RunningAvgSamplesPerSec={:?}, CurrSamplesPerSec={:?}, MemAllocated={:?}GB, MaxMemAllocated={:?}GB",
                self.micro_steps,
                per_second(time.average),
                per_second(time.current),
                gib(usage.current_total()),
                gib(usage.peak_total())
            );
        }
    }

    /// One number for an optimizer with momentum, two for one with decay rates.
    fn momenta(&self) -> Vec<String> {
        let is_plain = self.store.optimizer().is_some_and(|rule| rule.name() == "sgd");
        let of_group = |betas: [f64; 2]| match is_plain {
            true => format!("{:?}", betas[0]),
            false => format!("({:?}, {:?})", betas[0], betas[1]),
        };
        self.get_mom().into_iter().map(of_group).collect()
    }

    /// With `dump_state`, what the engine is when it was made: its values by name, then the configuration.
    pub(crate) fn dump_state(&self) {
        if !self.config.dump_state || self.world.rank() != 0 {
            return;
        }
        let mut text = String::from("Engine:\n");
        for (name, value) in self.state_by_name() {
            let dots = ".".repeat(NAME_WIDTH.saturating_sub(name.len()));
            let _ = writeln!(text, "  {name} {dots} {value}");
        }
        let _ = write!(text, "  json = {}", as_deepspeed(&self.config.to_json()));
        tell(&text);
    }

    /// In the order of names.
    fn state_by_name(&self) -> Vec<(&'static str, String)> {
        let params = self.store.params();
        let scheduler =
            self.scheduler.as_ref().map_or_else(|| "None".to_owned(), |found| found.name().to_owned());
        let (stage, stages) = self.stage();
        let mut state = vec![
            ("data_parallel_size", self.data_parallel_size.to_string()),
            ("data_rank", self.data_rank().to_string()),
            ("device", self.device().backend().name()),
            ("dtype", self.store.dtype().to_string()),
            ("global_samples", self.global_samples.to_string()),
            ("global_steps", self.global_steps.to_string()),
            ("gradient_accumulation_steps", self.accumulation_steps.to_string()),
            ("loss_scale", format!("{:?}", self.loss_scale())),
            ("lr", format!("{:?}", self.get_lr())),
            ("lr_scheduler", scheduler),
            ("micro_batch_size", self.train_micro_batch_size_per_gpu().to_string()),
            ("micro_steps", self.micro_steps.to_string()),
            ("mom", format!("[{}]", self.momenta().join(", "))),
            ("optimizer", self.store.optimizer().map_or("None", |rule| rule.name()).to_owned()),
            ("parameters", params.iter().map(|param| param.shape().numel()).sum::<usize>().to_string()),
            ("rank", self.world.rank().to_string()),
            ("seed", self.seed.to_string()),
            ("skipped_steps", self.skipped_steps.to_string()),
            ("stage", format!("{stage} of {stages}")),
            ("tensors", params.len().to_string()),
            ("train_batch_size", self.train_batch_size().to_string()),
            ("world_size", self.world.size().to_string()),
            ("zero_stage", self.config.zero.stage.number().to_string()),
        ];
        state.sort_unstable();
        state
    }
}

/// GiB to two decimals.
fn gib(bytes: usize) -> f64 {
    (bytes as f64 / f64::from(1 << 30) * 100.0).round_ties_even() / 100.0
}

/// The host's memory in use and its share, where the system says.
fn host_memory_line() -> Option<String> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let (total, available) = (kib(&text, "MemTotal:")?, kib(&text, "MemAvailable:")?);
    let used = total.saturating_sub(available);
    let percent = (used as f64 / total.max(1) as f64 * 1000.0).round_ties_even() / 10.0;
    Some(format!("CPU Virtual Memory:  used = {:?} GB, percent = {percent:?}%\n", gib(used as usize * 1024)))
}

/// Resident memory of this process now and at most, where the system says.
fn process_memory_kib() -> Option<(u64, u64)> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    Some((kib(&status, "VmRSS:")?, kib(&status, "VmHWM:")?))
}

/// A value of one of the system's lists of `name: number kB`.
fn kib(list: &str, name: &str) -> Option<u64> {
    let line = list.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix(" kB")?.trim().parse().ok()
}
