//! Lines for the log: progress, where the time of a step went, where memory is.

use std::fmt::Write;

use ferrospeed_tensor::Category;

use crate::engine::Engine;

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

    /// Logs [`Engine::memory_report`] on rank 0, with a word on when: DeepSpeed's `see_memory_usage`.
    pub fn see_memory_usage(&self, when: &str) {
        if self.world.rank() == 0 {
            tracing::info!("memory {when}: {}", self.memory_report());
        }
    }

    /// With `memory_breakdown`, the memory after a part of a step.
    pub(crate) fn log_memory(&self, when: &str) {
        if self.config.memory_breakdown {
            self.see_memory_usage(when);
        }
    }

    /// At the end of a step, what the configuration wants to be told.
    pub(crate) fn log_step(&self) {
        let steps = self.global_steps;
        let due = self.config.steps_per_print.is_some_and(|every| every > 0 && steps.is_multiple_of(every));
        if self.world.rank() != 0 || !due {
            return;
        }
        tracing::info!(
            "step={steps}, skipped={}, lr={:?}, mom={:?}",
            self.skipped_steps,
            self.get_lr(),
            self.get_mom()
        );
        let times = self.last_step_times();
        if self.config.wall_clock_breakdown {
            let ms = |time: std::time::Duration| time.as_secs_f64() * 1e3;
            tracing::info!(
                "time (ms) | fwd: {:.2} | bwd: {:.2} | step: {:.2}",
                ms(times.forward),
                ms(times.backward),
                ms(times.step)
            );
        }
        let seconds = (times.forward + times.backward + times.step).as_secs_f64();
        if seconds > 0.0 {
            tracing::info!("{:.2} samples/s", self.train_batch_size() as f64 / seconds);
        }
    }
}

/// Resident memory of this process now and at most, where the system says.
fn process_memory_kib() -> Option<(u64, u64)> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().strip_suffix(" kB")?.trim().parse().ok()
    };
    Some((field("VmRSS:")?, field("VmHWM:")?))
}
