//! What an evaluation found.

use std::path::PathBuf;

use serde::Serialize;

use crate::likelihood::Totals;

/// What was found with one file or folder.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct Part {
    /// Which.
    pub path: PathBuf,
    /// What it holds: a kind of samples, `text`, `tokens` or `tasks`.
    pub kind: &'static str,
    /// How likely its texts are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub totals: Option<Totals>,
    /// Of pairs, which answers the model prefers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pairs: Option<PairShares>,
    /// Of tasks, how many were done.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tasks: Option<TaskShares>,
    /// Of tasks, each of them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub outcomes: Vec<Outcome>,
}

/// Of pairs, in what share the model holds the preferred answer for the likelier one.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct PairShares {
    /// How many pairs.
    pub pairs: u64,
    /// As a whole.
    pub preferred: f64,
    /// By the mean over its tokens.
    pub preferred_per_token: f64,
}

impl PairShares {
    pub(crate) fn add(&mut self, chosen: (f64, usize), rejected: (f64, usize)) {
        let mean = |(sum, count): (f64, usize)| sum / count.max(1) as f64;
        let share = |before: f64, is_so: bool, pairs: u64| {
            before + (f64::from(u8::from(is_so)) - before) / pairs as f64
        };
        self.pairs += 1;
        self.preferred = share(self.preferred, chosen.0 > rejected.0, self.pairs);
        self.preferred_per_token = share(self.preferred_per_token, mean(chosen) > mean(rejected), self.pairs);
    }

    /// Nothing where there were no pairs.
    pub(crate) fn given(self) -> Option<PairShares> {
        (self.pairs > 0).then_some(self)
    }
}

/// What share of tasks was done.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct TaskShares {
    /// Questions with choices.
    pub choices: u64,
    /// Of these, the right choice is the likeliest.
    pub accuracy: f64,
    /// The same by the mean over the tokens of each choice.
    pub accuracy_per_token: f64,
    /// The same by the mean over its bytes.
    pub accuracy_per_byte: f64,
    /// Questions with one answer.
    pub exact: u64,
    /// Of these, the model writes that answer.
    pub exact_match: f64,
}

/// What became of one task.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Outcome {
    /// Its file and line.
    pub place: String,
    /// What its author calls it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// What was asked for.
    pub expected: String,
    /// What the model gave.
    pub given: String,
    /// Whether they are the same.
    pub is_right: bool,
    /// Of choices, each one's.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub choices: Vec<Verdict>,
}

/// How likely a choice is.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Verdict {
    /// Its log-probability.
    pub logprob: f64,
    /// Its tokens.
    pub tokens: usize,
    /// Its bytes.
    pub bytes: usize,
}
