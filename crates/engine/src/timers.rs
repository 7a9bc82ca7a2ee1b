//! Where the time of a step goes, and how many samples pass in it.
//!
//! The clock is read a few times per micro-batch whatever the configuration says; only with `wall_clock_breakdown` does
//! the engine wait for the device at the end of each phase, so that the phases are told apart.

use std::time::{Duration, Instant};

/// Steps that a throughput leaves out: first ones allocate, record and warm up.
const WARM_UP_STEPS: u64 = 2;

/// Where the time of a step went. A GPU works behind the host's back, and each phase then has the waits that fell into it;
/// with `wall_clock_breakdown` the engine waits at the end of each.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StepTimes {
    /// Forward passes.
    pub forward: Duration,
    /// Backward passes, with the wait for reductions.
    pub backward: Duration,
    /// Of these, the passes themselves.
    pub backward_inner: Duration,
    /// And what was left to wait for when they were over: reductions go on beside them.
    pub backward_allreduce: Duration,
    /// The optimizer, with the wait for gathers.
    pub step: Duration,
}

impl StepTimes {
    /// What was added since.
    pub(crate) fn since(self, earlier: StepTimes) -> StepTimes {
        StepTimes {
            forward: self.forward.saturating_sub(earlier.forward),
            backward: self.backward.saturating_sub(earlier.backward),
            backward_inner: self.backward_inner.saturating_sub(earlier.backward_inner),
            backward_allreduce: self.backward_allreduce.saturating_sub(earlier.backward_allreduce),
            step: self.step.saturating_sub(earlier.step),
        }
    }

    /// DeepSpeed's line, whose names of the timers of a micro-batch end in `_microstep`.
    pub(crate) fn line(self, suffix: &str) -> String {
        let timers = [
            ("fwd", self.forward),
            ("bwd", self.backward),
            ("bwd_inner", self.backward_inner),
            ("bwd_allreduce", self.backward_allreduce),
            ("step", self.step),
        ];
        let timer =
            |(name, time): (&str, Duration)| format!(" | {name}{suffix}: {:.2}", time.as_secs_f64() * 1e3);
        std::iter::once("time (ms)".to_owned()).chain(timers.map(timer)).collect()
    }
}

/// Samples per second, from the first forward pass of each micro-batch to its end.
#[derive(Debug, Default)]
pub(crate) struct Throughput {
    begun: Option<Instant>,
    steps: u64,
    in_step: Duration,
    total: Duration,
}

/// Of one step and of all since the warm-up.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct StepTime {
    /// The step's.
    pub(crate) current: Duration,
    /// The mean.
    pub(crate) average: Duration,
}

impl Throughput {
    /// A micro-batch begins, unless it has.
    pub(crate) fn begin(&mut self) {
        self.begun.get_or_insert_with(Instant::now);
    }

    /// A micro-batch ends, and with the last of a step, the step; tells its time once the warm-up is over.
    pub(crate) fn end(&mut self, ends_step: bool) -> Option<StepTime> {
        self.in_step += self.begun.take()?.elapsed();
        if !ends_step {
            return None;
        }
        self.steps += 1;
        let current = std::mem::take(&mut self.in_step);
        let measured = self.steps.checked_sub(WARM_UP_STEPS).filter(|measured| *measured > 0)?;
        self.total += current;
        Some(StepTime { current, average: self.total.div_f64(measured as f64) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timers_have_deepspeeds_names() {
        let ms = Duration::from_millis;
        let times = StepTimes {
            forward: ms(1),
            backward: ms(5),
            backward_inner: ms(3),
            backward_allreduce: ms(2),
            step: Duration::from_micros(4567),
        };
        assert_eq!(
            times.line(""),
            "time (ms) | fwd: 1.00 | bwd: 5.00 | bwd_inner: 3.00 | bwd_allreduce: 2.00 | step: 4.57"
        );
        assert!(
            times.since(StepTimes { forward: ms(1), ..Default::default() }).line("_microstep").starts_with(
                "time (ms) | fwd_microstep: 0.00 | bwd_microstep: 5.00 | bwd_inner_microstep: 3.00"
            )
        );
    }

    #[test]
    fn the_first_two_steps_are_no_part_of_a_throughput() {
        let mut throughput = Throughput::default();
        let mut told = Vec::new();
        for micro in 0..8 {
            throughput.begin();
            throughput.begin();
            told.push(throughput.end(micro % 2 == 1).is_some());
        }
        assert_eq!(told, [false, false, false, false, false, true, false, true]);
        // A step whose forward never ran has no time.
        assert_eq!(throughput.end(true), None);
    }
}
