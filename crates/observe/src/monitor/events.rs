//! From what a run tells to the events of its monitors.

use crate::error::{ObserveError, Result};
use crate::monitor::Monitor;

/// The one curve whose points lie before their steps.
pub(super) const TRAIN_LOSS: &str = "Train/Samples/train_loss";

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
///
/// One that cannot be written keeps neither the run nor the others from going on. That it cannot is noted once, that it
/// can again too, with the steps that it lacks.
#[derive(Default)]
pub struct Monitors {
    monitors: Vec<Watched>,
    /// Steps so far.
    steps: u64,
    notes: Vec<String>,
}

struct Watched {
    monitor: Box<dyn Monitor>,
    /// Since a write failed, and until a step passes in which none does.
    fails: bool,
    /// The first failure of all.
    why: Option<ObserveError>,
    /// Steps of which something is missing.
    missing: u64,
    /// The last of them.
    last_missing: Option<u64>,
}

impl Watched {
    /// Takes down how a write in a step went, and what is to be said of it.
    fn judge(&mut self, written: Result<()>, step: u64) -> Option<String> {
        let error = written.err()?;
        self.missing += u64::from(self.last_missing.replace(step) != Some(step));
        let said = (!std::mem::replace(&mut self.fails, true))
            .then(|| format!("{error}; training goes on, and the curves lack what cannot be written"));
        self.why.get_or_insert(error);
        said
    }

    /// After a step: whether it can be written again.
    fn recover(&mut self, step: u64) -> Option<String> {
        let recovers = self.fails && self.last_missing != Some(step);
        self.fails &= !recovers;
        let path = self.why.as_ref().filter(|_| recovers)?.path();
        Some(format!("{}: can be written again; the curves lack {} so far", path.display(), self.lacks()))
    }

    fn lacks(&self) -> String {
        format!("{} step{}", self.missing, if self.missing == 1 { "" } else { "s" })
    }
}

impl Monitors {
    /// Adds a monitor.
    pub fn add(&mut self, monitor: impl Monitor + 'static) {
        let monitor = Box::new(monitor);
        self.monitors.push(Watched { monitor, fails: false, why: None, missing: 0, last_missing: None });
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.monitors.is_empty()
    }

    /// Emits the events of one step; what is emitted from here to the next belongs to it.
    pub fn step(&mut self, step: &StepEvents) {
        self.notes.extend(self.monitors.iter_mut().filter_map(|watched| watched.recover(self.steps)));
        self.steps += 1;
        self.emit(TRAIN_LOSS, step.loss, step.samples.before);
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
            self.emit(tag, value, step.samples.after);
        }
        self.flush();
    }

    /// Writes one scalar of the caller's own to every monitor.
    pub fn emit(&mut self, tag: &str, value: f64, step: u64) {
        self.each(|monitor| monitor.write(tag, value, step));
    }

    /// Flushes every monitor.
    pub fn flush(&mut self) {
        self.each(|monitor| monitor.flush());
    }

    /// What is to be said since the last call: monitors that cannot be written, or can again.
    pub fn take_notes(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notes)
    }

    /// Ends every monitor, and gives what is missing in those that are not complete.
    pub fn finish(mut self) -> Vec<String> {
        self.each(|monitor| monitor.finish());
        let incomplete = |watched: Watched| {
            let lacks = watched.lacks();
            watched.why.map(|error| format!("{error} ({lacks} missing)"))
        };
        self.monitors.into_iter().filter_map(incomplete).collect()
    }

    fn each(&mut self, mut act: impl FnMut(&mut dyn Monitor) -> Result<()>) {
        for watched in &mut self.monitors {
            let written = act(watched.monitor.as_mut());
            self.notes.extend(watched.judge(written, self.steps));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::sync::{Arc, Mutex};

    use super::*;

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

    /// A disk that is full until there is room at some position.
    struct Full(u64);

    impl Monitor for Full {
        fn write(&mut self, tag: &str, _: f64, step: u64) -> Result<()> {
            if step >= self.0 {
                return Ok(());
            }
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
        monitors.step(&step);
        assert!(monitors.take_notes().is_empty() && monitors.finish().is_empty());
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
        monitors.add(Full(u64::MAX));
        monitors.add(Notes(written.clone()));
        monitors.step(&plain());
        let notes = monitors.take_notes();
        assert!(notes[0].starts_with("Train/Samples/train_loss: ") && notes.len() == 1, "{notes:?}");
        assert_eq!(written.lock().unwrap().len(), 2);
    }

    #[test]
    fn a_failure_is_told_when_it_begins_when_it_is_over_and_at_the_end() {
        let mut monitors = Monitors::default();
        monitors.add(Full(32));
        monitors.add(Full(0));
        let mut notes = Vec::new();
        for before in [0, 8, 16, 24, 32, 40, 48] {
            let samples = Samples { before, after: before + 8 };
            monitors.step(&StepEvents { samples, ..plain() });
            monitors.emit("mine", 1.0, before + 8);
            notes.push(monitors.take_notes());
        }
        assert!(notes[0].len() == 1 && notes[0][0].contains("training goes on"), "{notes:?}");
        // The fourth step has a loss at 24 that is missing, the fifth is whole, the sixth tells.
        assert!(notes[1..5].iter().all(Vec::is_empty) && notes[6].is_empty(), "{notes:?}");
        let again = "Train/Samples/train_loss: can be written again; the curves lack 4 steps so far";
        assert_eq!(notes[5], [again]);
        let incomplete = monitors.finish();
        assert!(incomplete.len() == 1 && incomplete[0].ends_with(" (4 steps missing)"), "{incomplete:?}");
    }
}
