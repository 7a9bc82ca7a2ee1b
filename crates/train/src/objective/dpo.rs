//! Direct Preference Optimization (Rafailov et al., 2023, arXiv:2305.18290), and what was made of it: the chosen answer should gain
//! on the rejected one, as measured against the reference.
//!
//! With Δ the gain in log-probability, chosen less rejected:
//! - sigmoid: −ln σ(βΔ); with labels of which a share ε is wrong, −(1−ε) ln σ(βΔ) − ε ln σ(−βΔ) (conservative DPO, Mitchell 2023);
//! - robust: (−(1−ε) ln σ(βΔ) + ε ln σ(−βΔ)) / (1−2ε) (Chowdhury et al., 2024, arXiv:2403.00409, eq. 12);
//! - hinge: max(0, 1 − βΔ) (SLiC, Zhao et al., 2023, arXiv:2305.10425);
//! - ipo: (Δ − 1/2β)², with Δ of means over the tokens of each answer (Azar et al., 2023, arXiv:2310.12036, eq. 17).

use super::{Document, Judgement, Row, Slope, log_sigmoid, pair_measures, sigmoid};

/// Which loss it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DpoLoss {
    /// Of the logistic model.
    #[default]
    Sigmoid,
    /// The same, unbiased where labels are wrong.
    Robust,
    /// Of a margin.
    Hinge,
    /// Of a squared distance.
    Ipo,
}

impl DpoLoss {
    /// All of them.
    pub const ALL: [DpoLoss; 4] = [DpoLoss::Sigmoid, DpoLoss::Robust, DpoLoss::Hinge, DpoLoss::Ipo];

    /// As it is written in recipes.
    pub fn name(self) -> &'static str {
        match self {
            DpoLoss::Sigmoid => "sigmoid",
            DpoLoss::Robust => "robust",
            DpoLoss::Hinge => "hinge",
            DpoLoss::Ipo => "ipo",
        }
    }

    /// Of a word.
    pub fn of_name(name: &str) -> Option<DpoLoss> {
        DpoLoss::ALL.into_iter().find(|loss| loss.name() == name)
    }
}

/// Its options.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dpo {
    /// How much the reference holds the model back; for [`DpoLoss::Ipo`], τ.
    pub beta: f64,
    /// Which loss.
    pub loss: DpoLoss,
    /// The share ε of labels that are taken to be wrong.
    pub label_smoothing: f64,
    /// Whether all answers are alike to the reference.
    pub reference_free: bool,
}

impl Dpo {
    pub(super) fn judge(&self, rows: &[Row]) -> Judgement {
        let count = rows.len().max(1) as f64;
        let (mut loss, mut slopes) = (0.0, Vec::with_capacity(rows.len()));
        for row in rows {
            let (own, slope) = self.of_pair(&row.documents);
            loss += own / count;
            slopes.push(slope.map(|answer| Slope { answer: answer / count, whole: 0.0 }));
        }
        let reward = |document: &Document| self.beta * document.log_ratio();
        let measures = pair_measures(rows, reward, |document| document.answer.logprob);
        Judgement { loss, slopes, measures }
    }

    /// The loss of a pair, and how it grows with the log-probability of each answer.
    fn of_pair(&self, [chosen, rejected]: &[Document; 2]) -> (f64, [f64; 2]) {
        let (beta, smoothing) = (self.beta, self.label_smoothing);
        if self.loss == DpoLoss::Ipo {
            let mean = |document: &Document| 1.0 / document.answer.tokens.max(1) as f64;
            let [first, second] = [mean(chosen), mean(rejected)];
            let away = chosen.log_ratio() * first - rejected.log_ratio() * second - 1.0 / (2.0 * beta);
            return (away * away, [2.0 * away * first, -2.0 * away * second]);
        }
        let gain = beta * (chosen.log_ratio() - rejected.log_ratio());
        // Of the loss that takes the label for right, and of the one that does not: the values and their slopes.
        let [right, wrong] = [-log_sigmoid(gain), -log_sigmoid(-gain)];
        let [right_slope, wrong_slope] = [-sigmoid(-gain), sigmoid(gain)];
        let (loss, slope) = match self.loss {
            DpoLoss::Robust => {
                let share = 1.0 - 2.0 * smoothing;
                let mix = |right: f64, wrong: f64| ((1.0 - smoothing) * right - smoothing * wrong) / share;
                (mix(right, wrong), mix(right_slope, wrong_slope))
            }
            DpoLoss::Hinge => ((1.0 - gain).max(0.0), if gain < 1.0 { -1.0 } else { 0.0 }),
            DpoLoss::Sigmoid | DpoLoss::Ipo => {
                let mix = |right: f64, wrong: f64| (1.0 - smoothing) * right + smoothing * wrong;
                (mix(right, wrong), mix(right_slope, wrong_slope))
            }
        };
        (loss, [beta * slope, -beta * slope])
    }
}
