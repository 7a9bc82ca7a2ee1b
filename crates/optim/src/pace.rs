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

    /// The first step, from 1, at which this value is reached; `None` where it never is.
    pub fn first_step(&self, value: u64) -> Option<u64> {
        if value > self.max {
            return None;
        }
        // Behind the last step whose value is too small; the end comes later than `steps` where `max` is no multiple.
        let (mut low, mut high) = (1, self.steps);
        while self.at(high) < value {
            (low, high) = (high, high.checked_mul(2)?);
        }
        while low < high {
            let middle = low + (high - low) / 2;
            if self.at(middle) < value {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        Some(low)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_step_of_a_value_is_where_it_is_reached() {
        for (min, max, steps, multiple, root_degree) in [
            (8, 64, 20, 8, 1.0),
            (80, 2048, 1000, 8, 3.0),
            (3, 100, 50, 7, 2.0),
            (5, 5, 10, 1, 1.0),
            (0, 9, 1, 1, 1.0),
        ] {
            let growth = Growth { min, max, steps, multiple, root_degree };
            for value in 0..=max {
                let first = growth.first_step(value).unwrap();
                assert!(growth.at(first) >= value, "{growth:?}: {value} at {first}");
                assert!(first == 1 || growth.at(first - 1) < value, "{growth:?}: {value} before {first}");
            }
            assert_eq!(growth.first_step(max + 1), None);
        }
    }
}
