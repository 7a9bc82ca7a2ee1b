//! From the records of a run to the events of its monitors.

use crate::error::Result;
use crate::monitor::Monitor;
use crate::record::{EvalRecord, StepRecord};

/// Training samples seen by all ranks around one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Samples {
    /// Before the step: where DeepSpeed places `train_loss`.
    pub before: u64,
    /// After the step: where it places everything else.
    pub after: u64,
}

/// Events that only some runs have.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OptionalEvents {
    /// `Train/Samples/loss_scale`: for runs that scale the loss (fp16).
    pub loss_scale: bool,
    /// `Train/Samples/elapsed_time_ms_*`: with `wall_clock_breakdown` or the profiler.
    pub times: bool,
}

/// All monitors of a run.
#[derive(Default)]
pub struct Monitors {
    monitors: Vec<Box<dyn Monitor>>,
    optional: OptionalEvents,
}

impl Monitors {
    /// No monitor yet. Without one, every call here does nothing.
    pub fn new(optional: OptionalEvents) -> Monitors {
        Monitors { monitors: Vec::new(), optional }
    }

    /// Adds a monitor.
    pub fn add(&mut self, monitor: impl Monitor + 'static) {
        self.monitors.push(Box::new(monitor));
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.monitors.is_empty()
    }

    /// Emits the events of one step.
    ///
    /// A failing monitor does not keep the others from their events; the first failure is returned.
    pub fn step(&mut self, record: &StepRecord, samples: Samples) -> Result<()> {
        let mut outcome = self.emit("Train/Samples/train_loss", record.loss.into(), samples.before);
        let mut after = vec![("Train/Samples/lr", record.lr)];
        if self.optional.loss_scale {
            after.push(("Train/Samples/loss_scale", record.loss_scale));
        }
        if self.optional.times {
            after.push(("Train/Samples/elapsed_time_ms_forward", record.forward_ms));
            after.push(("Train/Samples/elapsed_time_ms_backward", record.backward_ms));
            after.push(("Train/Samples/elapsed_time_ms_step", record.optimizer_ms));
        }
        for (tag, value) in after {
            outcome = outcome.and(self.emit(tag, value, samples.after));
        }
        outcome.and(self.flush())
    }

    /// Emits `Validation/Samples/loss`, after `samples` training samples. DeepSpeed has no event for this.
    pub fn validation(&mut self, record: &EvalRecord, samples: u64) -> Result<()> {
        self.emit("Validation/Samples/loss", record.loss.into(), samples).and(self.flush())
    }

    /// Writes one scalar of the caller's own to every monitor.
    pub fn emit(&mut self, tag: &str, value: f64, step: u64) -> Result<()> {
        self.each(|monitor| monitor.write(tag, value, step))
    }

    /// Flushes every monitor.
    pub fn flush(&mut self) -> Result<()> {
        self.each(|monitor| monitor.flush())
    }

    fn each(&mut self, mut act: impl FnMut(&mut dyn Monitor) -> Result<()>) -> Result<()> {
        let mut outcome = Ok(());
        for monitor in &mut self.monitors {
            outcome = outcome.and(act(monitor.as_mut()));
        }
        outcome
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::error::ObserveError;

    type Written = Arc<Mutex<Vec<(String, f64, u64)>>>;

    struct Notes(Written);

    impl Monitor for Notes {
        fn write(&mut self, tag: &str, value: f64, step: u64) -> Result<()> {
            self.0.lock().unwrap().push((tag.to_owned(), value, step));
            Ok(())
        }
        fn flush(&mut self) -> Result<()> {
            Ok(())
        }
    }

    struct Full;

    impl Monitor for Full {
        fn write(&mut self, tag: &str, _: f64, _: u64) -> Result<()> {
            Err(ObserveError::Io { path: PathBuf::from(tag), source: std::io::ErrorKind::StorageFull.into() })
        }
        fn flush(&mut self) -> Result<()> {
            Ok(())
        }
    }

    fn record() -> StepRecord {
        StepRecord {
            step: 3,
            loss: 1.5,
            lr: 0.1,
            grad_norm: None,
            tokens: 10,
            tokens_per_s: 5.0,
            step_ms: 10.0,
            forward_ms: 1.0,
            backward_ms: 2.0,
            optimizer_ms: 3.0,
            flops_per_s: 0.0,
            memory_bytes: Default::default(),
            skipped: false,
            loss_scale: 65536.0,
        }
    }

    fn events_of(optional: OptionalEvents) -> Vec<(String, f64, u64)> {
        let written = Written::default();
        let mut monitors = Monitors::new(optional);
        monitors.add(Notes(written.clone()));
        monitors.step(&record(), Samples { before: 16, after: 24 }).unwrap();
        let written = written.lock().unwrap();
        written.clone()
    }

    fn expected(events: &[(&str, f64, u64)]) -> Vec<(String, f64, u64)> {
        events.iter().map(|&(tag, value, step)| (tag.to_owned(), value, step)).collect()
    }

    #[test]
    fn a_plain_run_has_a_loss_before_the_step_and_a_learning_rate_after_it() {
        let plain = [("Train/Samples/train_loss", 1.5, 16), ("Train/Samples/lr", 0.1, 24)];
        assert_eq!(events_of(OptionalEvents::default()), expected(&plain));
    }

    #[test]
    fn fp16_and_breakdown_add_their_events() {
        let all = [
            ("Train/Samples/train_loss", 1.5, 16),
            ("Train/Samples/lr", 0.1, 24),
            ("Train/Samples/loss_scale", 65536.0, 24),
            ("Train/Samples/elapsed_time_ms_forward", 1.0, 24),
            ("Train/Samples/elapsed_time_ms_backward", 2.0, 24),
            ("Train/Samples/elapsed_time_ms_step", 3.0, 24),
        ];
        assert_eq!(events_of(OptionalEvents { loss_scale: true, times: true }), expected(&all));
    }

    #[test]
    fn a_failing_monitor_is_reported_and_does_not_silence_the_next() {
        let written = Written::default();
        let mut monitors = Monitors::new(OptionalEvents::default());
        monitors.add(Full);
        monitors.add(Notes(written.clone()));
        let error = monitors.step(&record(), Samples { before: 0, after: 8 }).unwrap_err();
        assert!(error.to_string().starts_with("Train/Samples/train_loss: "), "{error}");
        assert_eq!(written.lock().unwrap().len(), 2);
    }
}
