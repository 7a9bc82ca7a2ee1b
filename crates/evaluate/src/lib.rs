//! What a model knows: the loss of texts, answers to questions with choices, exact answers, and one model against another.
//!
//! All of it is asked of the engine that serves ([`ferrospeed_serve::Engine`]), whose likelihoods of a text depend on that text alone:
//! what is found does not depend on what is asked beside it, or in which order.
//!
//! [`Model`] opens a model, [`Material`] says what a file holds, [`evaluate`] asks, and [`changes`] holds two reports against each
//! other.

mod ask;
mod case;
mod changes;
mod error;
mod likelihood;
mod material;
mod report;
mod task;

pub use ask::Model;
pub use case::{Case, Prompt, Question, read_cases};
pub use changes::{Change, changes};
pub use error::{EvaluateError, Result};
pub use likelihood::Totals;
pub use material::{Material, Reading};
pub use report::{Outcome, PairShares, Part, TaskShares, Verdict};

use std::path::Path;

/// Measures a model on what a file or folder holds. Text becomes tokens in `cache`.
pub fn evaluate(model: &Model, path: &Path, reading: &Reading, cache: &Path) -> Result<Part> {
    match Material::of(path, model, reading)? {
        Material::Tasks(files, template) => task::run(model, path, &files, &template),
        Material::Samples(samples) => likelihood::of_samples(model, path, &samples),
        Material::Tokens(source) => likelihood::of_tokens(model, path, &source, reading, cache),
    }
}
