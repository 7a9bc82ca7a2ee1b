//! What a run minimises: the next token, or a preference between answers.
//!
//! An objective is a function of log-probabilities and masks. It is given, of each row of a batch, how likely the model and the
//! reference hold its two documents, and says the loss, and how the loss grows with each of those likelihoods; what makes tokens of
//! records ([`ferrospeed_data`]) and what makes gradients of weights ([`ferrospeed_models::Decoder`]) know nothing of it.
//!
//! - [`Dpo`]: Direct Preference Optimization (Rafailov et al., 2023), with conservative and robust label smoothing, and IPO.
//! - [`Kto`]: Kahneman-Tversky Optimization (Ethayarajh et al., 2024).
//! - [`Orpo`]: Odds Ratio Preference Optimization (Hong et al., 2024).

mod dpo;
mod kto;
mod orpo;

use ferrospeed_data::Layout;

pub use dpo::{Dpo, DpoLoss};
pub use kto::Kto;
pub use orpo::Orpo;

/// What a run minimises.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Objective {
    /// How unlikely each next token is.
    NextToken,
    /// Of pairs.
    Dpo(Dpo),
    /// Of answers with a verdict.
    Kto(Kto),
    /// Of pairs, without a reference.
    Orpo(Orpo),
}

/// How likely some tokens are together, and how many they are.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Likelihood {
    /// The sum of their log-probabilities.
    pub logprob: f64,
    /// How many.
    pub tokens: usize,
}

impl Likelihood {
    /// Adds a token.
    pub fn add(&mut self, logprob: f64) {
        self.logprob += logprob;
        self.tokens += 1;
    }

    /// Of a token.
    fn mean(&self) -> f64 {
        self.logprob / self.tokens.max(1) as f64
    }
}

/// One document of a row.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Document {
    /// Its answer.
    pub answer: Likelihood,
    /// The answer and its prompt, where the objective asks for them ([`Objective::learns_prompts`]).
    pub whole: Likelihood,
    /// How likely the reference holds the answer; 0 where there is none.
    pub reference: f64,
}

impl Document {
    fn log_ratio(&self) -> f64 {
        self.answer.logprob - self.reference
    }
}

/// What is compared: two answers to a prompt, the preferred one first; or an answer, and another prompt's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Row {
    /// Both.
    pub documents: [Document; 2],
    /// Whether the first is wanted.
    pub is_wanted: bool,
}

/// Which documents of a row a pass has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Documents {
    /// Both, side by side.
    Both,
    /// The answer that is learnt.
    Learnt,
    /// The one to another prompt.
    Stranger,
}

/// How the loss grows with the log-probability of each token of a document.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Slope {
    /// Of each token of the answer.
    pub answer: f64,
    /// Of each token of prompt and answer.
    pub whole: f64,
}

/// A number to watch: its sum, and of how many.
pub type Measured = [f64; 2];

/// What an objective says of a batch.
#[derive(Debug, Clone, PartialEq)]
pub struct Judgement {
    /// The mean over its rows.
    pub loss: f64,
    /// Of both documents of each row.
    pub slopes: Vec<[Slope; 2]>,
    /// In the order of [`Objective::measures`].
    pub measures: Vec<Measured>,
}

impl Objective {
    /// As it is written in recipes.
    pub fn name(&self) -> &'static str {
        match self {
            Objective::NextToken => "next_token",
            Objective::Dpo(_) => "dpo",
            Objective::Kto(_) => "kto",
            Objective::Orpo(_) => "orpo",
        }
    }

    /// How samples lie in sequences.
    pub fn layout(&self) -> Layout {
        match self {
            Objective::NextToken => Layout::Packed,
            Objective::Dpo(_) | Objective::Orpo(_) => Layout::Pairs,
            Objective::Kto(_) => Layout::Judged,
        }
    }

    /// Whether it asks how likely the model held answers before it was trained.
    pub fn has_reference(&self) -> bool {
        match self {
            Objective::NextToken | Objective::Orpo(_) => false,
            Objective::Dpo(dpo) => !dpo.reference_free,
            Objective::Kto(_) => true,
        }
    }

    /// Whether prompts are learnt too.
    pub fn learns_prompts(&self) -> bool {
        matches!(self, Objective::Orpo(_))
    }

    /// Which documents its loss is made of.
    pub fn learnt_documents(&self) -> Documents {
        match self {
            Objective::Kto(_) => Documents::Learnt,
            _ => Documents::Both,
        }
    }

    /// What it says besides the loss.
    pub fn measures(&self) -> &'static [&'static str] {
        match self {
            Objective::NextToken => &[],
            Objective::Dpo(_) => &PAIR_MEASURES,
            Objective::Kto(_) => &kto::MEASURES,
            Objective::Orpo(_) => &orpo::MEASURES,
        }
    }

    /// What is added up over the rows of all ranks before any of them is judged, and of how many: for [`Kto`], how far the model
    /// has gone from its reference.
    pub fn drift(&self, rows: &[Row]) -> Measured {
        match self {
            Objective::Kto(_) => kto::drift(rows),
            _ => [0.0; 2],
        }
    }

    /// The loss of some rows, its slopes, and what is to be watched; `drift` is that of all ranks.
    pub fn judge(&self, rows: &[Row], drift: Measured) -> Judgement {
        match self {
            Objective::NextToken => Judgement { loss: 0.0, slopes: Vec::new(), measures: Vec::new() },
            Objective::Dpo(dpo) => dpo.judge(rows),
            Objective::Kto(kto) => kto.judge(rows, drift),
            Objective::Orpo(orpo) => orpo.judge(rows),
        }
    }
}

/// What is watched of pairs: TRL's names.
const PAIR_MEASURES: [&str; 6] = [
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
];

/// The measures of pairs, of which `reward` says how good each answer is.
fn pair_measures(
    rows: &[Row],
    reward: impl Fn(&Document) -> f64,
    logp: impl Fn(&Document) -> f64,
) -> Vec<Measured> {
    let count = rows.len() as f64;
    let sum = |of: &dyn Fn(&Row) -> f64| [rows.iter().map(of).sum::<f64>(), count];
    let rewards = |row: &Row| row.documents.each_ref().map(&reward);
    vec![
        sum(&|row| rewards(row)[0]),
        sum(&|row| rewards(row)[1]),
        sum(&|row| rewards(row)[0] - rewards(row)[1]),
        sum(&|row| f64::from(u8::from(rewards(row)[0] > rewards(row)[1]))),
        sum(&|row| logp(&row.documents[0])),
        sum(&|row| logp(&row.documents[1])),
    ]
}

/// ln σ(x), without overflow.
fn log_sigmoid(x: f64) -> f64 {
    x.min(0.0) - (-x.abs()).exp().ln_1p()
}

fn sigmoid(x: f64) -> f64 {
    log_sigmoid(x).exp()
}
