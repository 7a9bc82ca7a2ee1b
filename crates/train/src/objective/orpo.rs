//! Odds Ratio Preference Optimization (Hong et al., 2024, arXiv:2403.07691, eqs. 6 and 7): imitate the chosen answer, and let its
//! odds outgrow those of the rejected one. There is no reference.
//!
//! With ℓ the mean log-probability of an answer's tokens, its log-odds are ℓ − ln(1 − eˡ). The loss is the mean cross-entropy of all
//! tokens of chosen conversations, prompts included, and −β ln σ of the difference in log-odds, meaned over pairs.

use super::{Document, Judgement, Likelihood, Row, Slope, log_sigmoid, pair_measures, sigmoid};

/// Its options.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Orpo {
    /// How much odds count beside imitation: λ of the paper.
    pub beta: f64,
}

pub(super) const MEASURES: [&str; 9] = [
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
    "nll_loss",
    "log_odds_ratio",
    "log_odds_chosen",
];

/// The least distance of a mean log-probability from 0: an answer that is certain has no odds.
const LEAST: f64 = 1e-7;

/// The log-odds of an answer, and how they grow with its mean log-probability.
fn log_odds(answer: &Likelihood) -> (f64, f64) {
    let mean = answer.mean().min(-LEAST);
    // ln(1 − eˡ) by the form that loses no digits there.
    let rest = if mean > -std::f64::consts::LN_2 { (-mean.exp_m1()).ln() } else { (-mean.exp()).ln_1p() };
    (mean - rest, 1.0 / -mean.exp_m1())
}

impl Orpo {
    pub(super) fn judge(&self, rows: &[Row]) -> Judgement {
        let count = rows.len().max(1) as f64;
        let imitated = rows.iter().map(|row| row.documents[0].whole.tokens).sum::<usize>().max(1) as f64;
        let nll = -rows.iter().map(|row| row.documents[0].whole.logprob).sum::<f64>() / imitated;
        let (mut odds, mut ratios, mut slopes) = (0.0, 0.0, Vec::with_capacity(rows.len()));
        for row in rows {
            let [(chosen, chosen_slope), (rejected, rejected_slope)] =
                row.documents.each_ref().map(|document| log_odds(&document.answer));
            let difference = chosen - rejected;
            odds += difference;
            ratios += log_sigmoid(difference);
            let slope = -self.beta * sigmoid(-difference) / count;
            let of_token = |slope: f64, answer: &Likelihood| slope / answer.tokens.max(1) as f64;
            let [first, second] = row.documents.each_ref().map(|document| &document.answer);
            slopes.push([
                Slope { answer: of_token(slope * chosen_slope, first), whole: -1.0 / imitated },
                Slope { answer: of_token(-slope * rejected_slope, second), whole: 0.0 },
            ]);
        }
        let mean = |document: &Document| document.answer.mean();
        let mut measures = pair_measures(rows, |document| self.beta * mean(document), mean);
        measures.extend([[nll * count, count], [ratios, count], [odds, count]]);
        Judgement { loss: nll - self.beta * ratios / count, slopes, measures }
    }
}
