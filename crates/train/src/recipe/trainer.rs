//! What Hugging Face's Trainer does where a ds_config leaves it to it: its optimizer, and its defaults.

use std::num::NonZeroU64;

use ferrospeed_config::{AutoValues, Unresolved};
use serde_json::{Value, json};

use super::{Recipe, TrainingRecipe};

/// The Trainer's optimizer, whose numbers `[training]` says.
pub(super) fn optimizer() -> Value {
    let params = ["lr", "betas", "eps", "weight_decay"].map(|key| (key.to_owned(), json!("auto")));
    json!({ "type": "AdamW", "params": Value::Object(params.into_iter().collect()) })
}

impl Recipe {
    /// Whether the optimizer is the Trainer's: the ds_config has none, and was written for the Trainer, or the recipe speaks its
    /// language.
    pub(super) fn leaves_optimizer_to_trainer(&self, read: &Unresolved) -> bool {
        let has_none = self.ds_config.is_object() && self.ds_config["optimizer"].is_null();
        has_none && (self.training.is_some() || read.autos().next().is_some())
    }

    /// Whether weight decay spares biases and norms, as that of the Trainer's own optimizer does.
    pub fn spares_vectors(&self) -> bool {
        let read = ferrospeed_config::Config::from_value("ds_config", &self.ds_config);
        read.is_ok_and(|read| self.leaves_optimizer_to_trainer(&read))
    }
}

/// The Trainer's defaults for the `"auto"`s of a ds_config without a recipe, on so many data-parallel ranks. What depends on the
/// model or on the number of steps is not among them.
pub fn trainer_defaults(read: &Unresolved, ranks: NonZeroU64, known: AutoValues) -> AutoValues {
    let training = TrainingRecipe::default();
    let answers = training.values(1, read).into_iter().chain(training.precision(read, None));
    let auto = answers.fold(known, |auto, answer| {
        let (value, from) = answer.otherwise;
        auto.with_source(answer.path, value, from)
    });
    let auto = auto.with_source("scheduler.params.warmup_min_lr", 0.0, "the Trainer: a warm-up starts at 0");
    training.batch_sizes(read, ranks, auto)
}
