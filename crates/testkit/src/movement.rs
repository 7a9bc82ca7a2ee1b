//! Comparison of what moved: how far a tensor went from where it began, against how far it should have gone.
//!
//! Values that a few steps of training hardly change agree with a recording whatever the steps did, unless the
//! tolerance is measured by the change. So a weight is compared by its movement, ‖ours − theirs‖ ≤ tolerance ×
//! ‖theirs − start‖, and a state that begins at zero by its own size.

/// How the last values of a tensor should have come out of its first.
#[derive(Debug, Clone, Copy)]
pub struct Movement<'a> {
    /// Where it began; `None` for what begins at zero.
    pub start: Option<&'a [f32]>,
    /// Where it should have ended.
    pub expected: &'a [f32],
    /// What is lost where values are stored, in units of each expected value: half a unit in the last place of a
    /// 16-bit type, 0 for f32.
    pub rounding: f32,
}

impl Movement<'_> {
    /// The distance of `actual` from the expected end, in units of the expected movement. What storing in 16 bits may
    /// account for is taken off first. Zero for a tensor that should not and did not move.
    ///
    /// # Panics
    /// When lengths differ.
    pub fn error(&self, actual: &[f32]) -> f64 {
        assert_eq!(actual.len(), self.expected.len(), "lengths differ");
        let (mut apart, mut moved) = (0.0, 0.0);
        for (index, (&actual, &expected)) in actual.iter().zip(self.expected).enumerate() {
            let start = self.start.map_or(0.0, |start| f64::from(start[index]));
            let (actual, expected) = (f64::from(actual), f64::from(expected));
            let stored = f64::from(self.rounding) * expected.abs().max(actual.abs());
            let distance = (actual - expected).abs();
            apart += if distance.is_nan() { f64::INFINITY } else { (distance - stored).max(0.0).powi(2) };
            moved += (expected - start).powi(2);
        }
        if apart == 0.0 { 0.0 } else { (apart / moved).sqrt() }
    }

    /// How much of the first values is left over, as a factor of them: the difference from the expected end, projected on
    /// the start. Rounding averages out of it; weights that decayed too little or too much do not.
    pub fn along_start(&self, actual: &[f32]) -> f64 {
        let start = self.start.unwrap_or_default();
        let (mut along, mut size) = (0.0, 0.0);
        for ((&start, &expected), &actual) in start.iter().zip(self.expected).zip(actual) {
            along += (f64::from(actual) - f64::from(expected)) * f64::from(start);
            size += f64::from(start).powi(2);
        }
        if size == 0.0 { 0.0 } else { along / size }
    }

    /// Asserts that the error is at most `tolerance`.
    ///
    /// # Panics
    /// With the error, when it is larger or not a number.
    #[track_caller]
    pub fn assert(&self, what: &str, actual: &[f32], tolerance: f64) {
        let error = self.error(actual);
        assert!(
            error <= tolerance,
            "{what}: off by {error:.2e} of what it should have moved, of {tolerance:.0e} allowed"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: [f32; 3] = [1.0, -2.0, 0.5];
    const END: [f32; 3] = [1.01, -2.02, 0.5];

    fn movement() -> Movement<'static> {
        Movement { start: Some(&START), expected: &END, rounding: 0.0 }
    }

    #[test]
    fn what_never_moved_is_off_by_the_whole_movement() {
        assert!((movement().error(&START) - 1.0).abs() < 1e-6);
        assert_eq!(movement().error(&END), 0.0);
        let half: Vec<f32> = START.iter().zip(END).map(|(start, end)| (start + end) / 2.0).collect();
        assert!((movement().error(&half) - 0.5).abs() < 1e-4);
    }

    #[test]
    fn weights_that_did_not_decay_stand_out_along_the_start() {
        let decayed = START.map(|value| value * 0.99);
        let movement = Movement { start: Some(&START), expected: &decayed, rounding: 0.0 };
        assert!((movement.along_start(&START) - 0.01).abs() < 1e-6);
    }

    #[test]
    fn what_should_stand_still_may_not_move() {
        let still = Movement { start: Some(&START), expected: &START, rounding: 0.0 };
        assert_eq!(still.error(&START), 0.0);
        assert_eq!(still.error(&END), f64::INFINITY);
    }

    #[test]
    fn a_value_that_is_no_number_is_never_near() {
        assert_eq!(movement().error(&[f32::NAN, -2.02, 0.5]), f64::INFINITY);
    }

    #[test]
    fn only_the_rounding_of_storage_is_forgiven() {
        let stored = Movement { rounding: 0.004, ..movement() };
        assert_eq!(stored.error(&[1.013, -2.02, 0.5]), 0.0);
        assert!(stored.error(&[1.03, -2.02, 0.5]) > 0.5);
    }
}
