//! The best validation of a run: which weights are kept beside the last ones, and when nothing better is to be expected.

use ferrospeed_observe::EvalRecord;
use serde::{Deserialize, Serialize};

use crate::recipe::EvalRecipe;

/// What a validation is to the ones before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Standing {
    /// None was better.
    Best,
    /// One was, and it is not too long ago.
    Worse,
    /// So many in a row were no better that the run may end.
    Enough,
}

/// The best one so far, as checkpoints remember it.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub(crate) struct Best {
    /// After which step, and what was measured.
    pub(crate) found: Option<(u64, f64)>,
    /// How many validations there were since that were no better.
    since: u64,
}

/// Measures that are to be small; of all others more is better.
const SMALL: [&str; 3] = ["loss", "kl", "nll_loss"];

impl Best {
    /// What a validation is to those before it. One without the measure, or with one that is no number, is no better.
    pub(crate) fn judge(&mut self, recipe: &EvalRecipe, record: &EvalRecord) -> Standing {
        let measure = recipe.measure.as_deref().unwrap_or("loss");
        let value = match measure {
            "loss" => Some(f64::from(record.loss)),
            name => record.measures.get(name).copied(),
        };
        let side = if SMALL.contains(&measure) { -1.0 } else { 1.0 };
        let gain = recipe.min_gain.unwrap_or(0.0);
        let is_better = |value: f64| {
            !value.is_nan() && self.found.is_none_or(|(_, before)| side * (value - before) > gain)
        };
        match value.filter(|&value| is_better(value)) {
            Some(value) => {
                *self = Best { found: Some((record.step, value)), since: 0 };
                Standing::Best
            }
            None => {
                self.since += 1;
                let is_enough = recipe.patience.is_some_and(|patience| self.since >= patience);
                if is_enough { Standing::Enough } else { Standing::Worse }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(step: u64, loss: f32, accuracy: f64) -> EvalRecord {
        let measures = [("rewards/accuracies".to_owned(), accuracy)].into();
        EvalRecord { step, loss, tokens: 1, measures }
    }

    #[test]
    fn the_best_is_kept_and_patience_ends() {
        let recipe = EvalRecipe { patience: Some(2), min_gain: Some(0.1), ..EvalRecipe::default() };
        let (mut best, mut judged) = (Best::default(), Vec::new());
        for (step, loss) in [(0, 3.0), (1, 2.0), (2, 1.95), (3, 1.5), (4, f32::NAN), (5, 1.45)] {
            judged.push(best.judge(&recipe, &record(step, loss, 0.0)));
        }
        use Standing::{Best as First, Enough, Worse};
        assert_eq!(judged, [First, First, Worse, First, Worse, Enough]);
        assert_eq!(best.found, Some((3, 1.5)));
        let recipe = EvalRecipe { measure: Some("rewards/accuracies".into()), ..EvalRecipe::default() };
        let mut best = Best::default();
        let judged = [0.5, 0.7, 0.7, 0.6].map(|accuracy| best.judge(&recipe, &record(1, 9.0, accuracy)));
        assert_eq!(judged, [First, First, Worse, Worse]);
    }
}
