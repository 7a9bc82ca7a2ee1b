//! One model against another: which tasks one does and the other does not.

use serde::Serialize;

use crate::report::{Outcome, Part};

/// A task that two models do differently.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Change {
    /// Its file and line.
    pub place: String,
    /// What its author calls it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// What was asked for.
    pub expected: String,
    /// What the first model gives.
    pub given: String,
    /// What the other one gives.
    pub against: String,
    /// Whether the first is right, and the other was not.
    pub is_gain: bool,
}

/// Where two reports on the same data differ in what is right.
pub fn changes(parts: &[Part], against: &[Part]) -> Vec<Change> {
    let pairs = parts.iter().zip(against).flat_map(|(own, other)| own.outcomes.iter().zip(&other.outcomes));
    let differ = |(own, other): (&Outcome, &Outcome)| {
        (own.is_right != other.is_right).then(|| Change {
            place: own.place.clone(),
            id: own.id.clone(),
            expected: own.expected.clone(),
            given: own.given.clone(),
            against: other.given.clone(),
            is_gain: own.is_right,
        })
    };
    pairs.filter_map(differ).collect()
}
