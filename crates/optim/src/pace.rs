//! How a difficulty grows with the steps.

/// Growth from `min` to `max` over `steps`, in multiples of `multiple`, along the `root_degree`-th root of the time
/// that has passed (1: a line).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Growth {
    /// At the start.
    pub min: u64,
    /// At the end.
    pub max: u64,
    /// Steps until the end; not zero.
    pub steps: u64,
    /// Values are multiples of this, but for `min` and `max`; not zero.
    pub multiple: u64,
    /// Degree of the root; positive.
    pub root_degree: f64,
}

impl Growth {
    /// The value at a step. Never below `min`, which need not be a multiple, and never above `max`.
    pub fn at(&self, step: u64) -> u64 {
        let passed = (step as f64 / self.steps as f64).powf(1.0 / self.root_degree);
        let reached = passed * (self.max - self.min) as f64 + self.min as f64;
        // The cast saturates: far beyond the end, `max` it is.
        let reached = reached.floor() as u64;
        (reached - reached % self.multiple).clamp(self.min, self.max)
    }

    /// What is wrong with these numbers, if anything: the name of the number and why.
    pub(crate) fn flaw(&self) -> Option<(&'static str, &'static str)> {
        if self.min > self.max {
            Some(("the start", "it lies above the end"))
        } else if self.steps == 0 {
            Some(("the number of steps", "it is at least 1"))
        } else if self.multiple == 0 {
            Some(("the step size", "it is at least 1"))
        } else if !(self.root_degree.is_finite() && self.root_degree > 0.0) {
            Some(("root_degree", "it is a positive number"))
        } else {
            None
        }
    }
}
