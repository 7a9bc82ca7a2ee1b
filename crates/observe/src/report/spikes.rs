//! Where a loss jumps: far above what it was just before, by what it varied then.

use crate::record::StepRecord;

/// Steps that a loss is compared with.
const BEFORE: usize = 20;
/// So many deviations above their mean is a spike, and at least this share of it.
const DEVIATIONS: f64 = 6.0;
const LEAST_SHARE: f64 = 0.1;

/// The steps whose loss is a spike, or no number.
pub(crate) fn of(steps: &[&StepRecord]) -> Vec<u64> {
    let mut found = Vec::new();
    // Sums over the window: it moves on by one number a step, however long the run is.
    let mut window = std::collections::VecDeque::with_capacity(BEFORE);
    let (mut sum, mut squares) = (0.0, 0.0);
    for record in steps {
        let loss = f64::from(record.loss);
        if !loss.is_finite() {
            continue;
        }
        if window.len() == BEFORE {
            let mean = sum / BEFORE as f64;
            let deviation = (squares / BEFORE as f64 - mean * mean).max(0.0).sqrt();
            if loss - mean > (DEVIATIONS * deviation).max(LEAST_SHARE * mean.abs()) {
                found.push(record.step);
                continue;
            }
            let oldest: f64 = window.pop_front().unwrap_or_default();
            sum -= oldest;
            squares -= oldest * oldest;
        }
        window.push_back(loss);
        sum += loss;
        squares += loss * loss;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_jump_is_a_spike_and_a_noisy_or_falling_loss_is_none() {
        let record = |step: u64, loss: f32| StepRecord { step, loss, ..StepRecord::default() };
        let noisy = |step: u64| 4.0 - step as f32 * 0.005 + (step * 7 % 5) as f32 * 0.05;
        let mut records: Vec<StepRecord> = (1..=200).map(|step| record(step, noisy(step))).collect();
        assert_eq!(of(&records.iter().collect::<Vec<_>>()), Vec::<u64>::new());
        records[99].loss = 7.0;
        records[149].loss = f32::NAN;
        assert_eq!(of(&records.iter().collect::<Vec<_>>()), [100]);
        // A few bad steps in a row are each one: they are no measure for the next.
        records[100].loss = 6.5;
        assert_eq!(of(&records.iter().collect::<Vec<_>>()), [100, 101]);
    }
}
