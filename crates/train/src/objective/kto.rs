//! Kahneman-Tversky Optimization (Ethayarajh et al., 2024, arXiv:2402.01306, eq. 7): answers that are wanted should gain on the
//! reference by more than the model has drifted from it, others by less.
//!
//! The drift z is estimated from answers to other prompts, over the batch of all ranks, and not learnt through. With r the gain of an
//! answer, its loss is λ_D (1 − σ(β(r − z))) if it is wanted, else λ_U (1 − σ(β(z − r))).

use super::{Judgement, Measured, Row, Slope, sigmoid};

/// Its options.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Kto {
    /// How much the reference holds the model back.
    pub beta: f64,
    /// How much answers count that are wanted.
    pub desirable_weight: f64,
    /// How much the others do.
    pub undesirable_weight: f64,
}

pub(super) const MEASURES: [&str; 5] =
    ["rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected", "kl"];

/// How far the model has gone from its reference on answers to other prompts.
pub(super) fn drift(rows: &[Row]) -> Measured {
    [rows.iter().map(|row| row.documents[1].log_ratio()).sum(), rows.len() as f64]
}

impl Kto {
    pub(super) fn judge(&self, rows: &[Row], [drifted, of]: Measured) -> Judgement {
        let count = rows.len().max(1) as f64;
        let drift = (drifted / of.max(1.0)).max(0.0);
        let (mut loss, mut slopes, mut measures) = (0.0, Vec::with_capacity(rows.len()), vec![[0.0; 2]; 5]);
        for row in rows {
            let [own, _] = &row.documents;
            let (side, weight) = match row.is_wanted {
                true => (1.0, self.desirable_weight),
                false => (-1.0, self.undesirable_weight),
            };
            let value = sigmoid(side * self.beta * (own.log_ratio() - drift));
            loss += weight * (1.0 - value) / count;
            let answer = -weight * side * self.beta * value * (1.0 - value) / count;
            slopes.push([Slope { answer, whole: 0.0 }, Slope::default()]);
            let kind = usize::from(!row.is_wanted);
            for (measure, value) in [(kind, self.beta * own.log_ratio()), (2 + kind, own.answer.logprob)] {
                measures[measure][0] += value;
                measures[measure][1] += 1.0;
            }
        }
        measures[4] = [drift * count, count];
        Judgement { loss, slopes, measures }
    }
}
