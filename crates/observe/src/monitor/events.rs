//! From what a run tells to the events of its monitors.

use crate::error::Result;
use crate::monitor::Monitor;

/// Training samples seen by all ranks around one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Samples {
    /// Before the step: where DeepSpeed places `train_loss`.
    pub before: u64,
    /// After the step: where it places everything else.
    pub after: u64,
}

/// What one step tells the monitors.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepEvents {
    /// Around the step.
    pub samples: Samples,
    /// The mean loss of its micro-batches.
    pub loss: f64,
    /// The learning rate of the first group, after the step.
    pub lr: f64,
    /// For runs that scale the loss (fp16).
    pub loss_scale: Option<f64>,
    /// With `wall_clock_breakdown` or the profiler.
    pub times: Option<TimesMs>,
}

/// Where the milliseconds of a step went.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct TimesMs {
    /// Forward passes.
    pub forward: f64,
    /// Backward passes, with reductions.
    pub backward: f64,
    /// Of these, the passes themselves.
    pub backward_inner: f64,
    /// And the wait for reductions.
    pub backward_allreduce: f64,
    /// The optimizer.
    pub step: f64,
}

/// All monitors of a run. Without one, every call does nothing.
#[derive(Default)]
pub struct Monitors {
    monitors: Vec<Box<dyn Monitor>>,
}

impl Monitors {
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
    pub fn step(&mut self, step: &StepEvents) -> Result<()> {
        let mut outcome = self.emit("Train/Samples/train_loss", step.loss, step.samples.before);
        let mut after = vec![("Train/Samples/lr", step.lr)];
        after.extend(step.loss_scale.map(|scale| ("Train/Samples/loss_scale", scale)));
        if let Some(times) = step.times {
            after.extend([
                ("Train/Samples/elapsed_time_ms_forward", times.forward),
                ("Train/Samples/elapsed_time_ms_backward", times.backward),
                ("Train/Samples/elapsed_time_ms_backward_inner", times.backward_inner),
                ("Train/Samples/elapsed_time_ms_backward_allreduce", times.backward_allreduce),
                ("Train/Samples/elapsed_time_ms_step", times.step),
            ]);
        }
        for (tag, value) in after {
            outcome = outcome.and(self.emit(tag, value, step.samples.after));
        }
        outcome.and(self.flush())
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

    fn plain() -> StepEvents {
        StepEvents {
            samples: Samples { before: 16, after: 24 },
            loss: 1.5,
            lr: 0.1,
            loss_scale: None,
            times: None,
        }
    }

    fn events_of(step: StepEvents) -> Vec<(String, f64, u64)> {
        let written = Written::default();
        let mut monitors = Monitors::default();
        monitors.add(Notes(written.clone()));
        monitors.step(&step).unwrap();
        let written = written.lock().unwrap();
        written.clone()
    }

    fn expected(events: &[(&str, f64, u64)]) -> Vec<(String, f64, u64)> {
        events.iter().map(|&(tag, value, step)| (tag.to_owned(), value, step)).collect()
    }

    #[test]
    fn a_plain_run_has_a_loss_before_the_step_and_a_learning_rate_after_it() {
        let events = [("Train/Samples/train_loss", 1.5, 16), ("Train/Samples/lr", 0.1, 24)];
        assert_eq!(events_of(plain()), expected(&events));
    }

    #[test]
    fn fp16_and_breakdown_add_their_events() {
        let all = [
            ("Train/Samples/train_loss", 1.5, 16),
            ("Train/Samples/lr", 0.1, 24),
            ("Train/Samples/loss_scale", 65536.0, 24),
            ("Train/Samples/elapsed_time_ms_forward", 1.0, 24),
            ("Train/Samples/elapsed_time_ms_backward", 2.0, 24),
            ("Train/Samples/elapsed_time_ms_backward_inner", 1.25, 24),
            ("Train/Samples/elapsed_time_ms_backward_allreduce", 0.5, 24),
            ("Train/Samples/elapsed_time_ms_step", 3.0, 24),
        ];
        let times =
            TimesMs { forward: 1.0, backward: 2.0, backward_inner: 1.25, backward_allreduce: 0.5, step: 3.0 };
        let step = StepEvents { loss_scale: Some(65536.0), times: Some(times), ..plain() };
        assert_eq!(events_of(step), expected(&all));
    }

    #[test]
    fn a_failing_monitor_is_reported_and_does_not_silence_the_next() {
        let written = Written::default();
        let mut monitors = Monitors::default();
        monitors.add(Full);
        monitors.add(Notes(written.clone()));
        let error = monitors.step(&plain()).unwrap_err();
        assert!(error.to_string().starts_with("Train/Samples/train_loss: "), "{error}");
        assert_eq!(written.lock().unwrap().len(), 2);
    }
}
