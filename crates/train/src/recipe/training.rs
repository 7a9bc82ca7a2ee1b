//! `[training]`: what fills the `"auto"`s of a ds_config, under the names of Hugging Face's training arguments.
//!
//! A ds_config that was written for the Trainer leaves to it what it knows from elsewhere. Here the recipe, the model and
//! the rest of the file know it; formulas and defaults are the Trainer's. A value of the ds_config that differs from what the
//! recipe says is refused, and so is a key of the recipe that nothing in the ds_config takes.

use std::num::NonZeroU64;

use ferrospeed_config::batch::{self, GivenBatchSizes};
use ferrospeed_config::table::{self, Kind, Tag};
use ferrospeed_config::{AutoValues, Config, ConfigError, Unresolved};
use ferrospeed_tensor::ops::CrossEntropyOptions;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{Recipe, trainer};
use crate::model::ModelPlan;

/// What fills `"auto"`s.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainingRecipe {
    /// Samples per rank in one pass; default 8.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub per_device_train_batch_size: Option<u64>,
    /// Passes per optimizer step; default 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gradient_accumulation_steps: Option<u64>,
    /// Learning rate; default 5e-5.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub learning_rate: Option<f64>,
    /// Decay of the first moment; default 0.9.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adam_beta1: Option<f64>,
    /// Decay of the second moment; default 0.999.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adam_beta2: Option<f64>,
    /// Added to the denominator; default 1e-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adam_epsilon: Option<f64>,
    /// Weight decay; default 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f64>,
    /// Largest gradient norm; default 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_grad_norm: Option<f64>,
    /// Steps of warm-up, or below 1 their share of all; default 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warmup_steps: Option<f64>,
    /// The share of all steps, where `warmup_steps` is not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warmup_ratio: Option<f64>,
    /// Whether to train in bfloat16; default: whether the model's weights are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bf16: Option<bool>,
    /// Whether to train in half precision; default: whether the model's weights are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fp16: Option<bool>,
    /// The share of each target that is spread over all tokens; default 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub label_smoothing_factor: Option<f64>,
    /// How much the squared logarithm of the sum over all tokens counts; default 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub z_loss: Option<f64>,
    /// How loud the noise on embeddings is; default: there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub neftune_noise_alpha: Option<f64>,
}

impl TrainingRecipe {
    /// What the loss of training has that the one of validation has not.
    pub(crate) fn loss_options(&self) -> CrossEntropyOptions {
        let number = |value: Option<f64>| value.unwrap_or(0.0) as f32;
        CrossEntropyOptions {
            label_smoothing: number(self.label_smoothing_factor),
            z_loss: number(self.z_loss),
            ..CrossEntropyOptions::default()
        }
    }

    /// How loud the noise on embeddings is.
    pub(crate) fn embedding_noise(&self) -> Option<f32> {
        self.neftune_noise_alpha.filter(|&alpha| alpha > 0.0).map(|alpha| alpha as f32)
    }
}

/// The value of one option of the ds_config.
pub(super) struct Answer {
    /// The keys of `[training]` that it belongs to, as messages name them.
    key: &'static str,
    /// The option.
    pub(super) path: &'static str,
    /// What the recipe says.
    given: Option<Value>,
    /// What holds where it does not, and why.
    pub(super) otherwise: (Value, String),
}

/// What holds where the recipe says nothing.
fn default(value: impl Into<Value>, key: &str) -> (Value, String) {
    (value.into(), format!("the default of training.{key}"))
}

impl TrainingRecipe {
    /// What is wrong with the values by themselves.
    pub(super) fn problems(&self, refuse: &mut impl FnMut(bool, String)) {
        for (key, value) in [
            ("per_device_train_batch_size", self.per_device_train_batch_size),
            ("gradient_accumulation_steps", self.gradient_accumulation_steps),
        ] {
            refuse(value == Some(0), format!("training.{key}: must be at least 1"));
        }
        for (key, value) in [("warmup_steps", self.warmup_steps), ("warmup_ratio", self.warmup_ratio)] {
            let sensible = value.is_none_or(|value| (0.0..=9e15).contains(&value));
            refuse(!sensible, format!("training.{key}: must be 0 or more"));
        }
        refuse(
            self.warmup_ratio.is_some_and(|ratio| ratio > 1.0),
            "training.warmup_ratio: must be a share in 0..=1".into(),
        );
        refuse(
            self.warmup_steps.is_some() && self.warmup_ratio.is_some(),
            "training.warmup_ratio: means nothing beside training.warmup_steps; keep one of the two".into(),
        );
        refuse(
            self.label_smoothing_factor.is_some_and(|share| !(0.0..1.0).contains(&share)),
            "training.label_smoothing_factor: must be a share, 0 or more and less than 1".into(),
        );
        for (key, value) in [("z_loss", self.z_loss), ("neftune_noise_alpha", self.neftune_noise_alpha)] {
            let sensible = value.is_none_or(|value| (0.0..=1e3).contains(&value));
            refuse(!sensible, format!("training.{key}: must be 0 or more, and at most 1000"));
        }
    }

    /// Steps of warm-up of a run of so many steps.
    fn warmup(&self, steps: u64) -> Option<u64> {
        let share = |share: f64| (steps as f64 * share).ceil() as u64;
        match (self.warmup_steps, self.warmup_ratio) {
            (Some(count), _) if count >= 1.0 => Some(count as u64),
            // A warm-up has at least one step.
            (Some(part), _) | (None, Some(part)) => Some(share(part).max(1)),
            (None, None) => None,
        }
    }

    /// Every option that follows from the table alone, or from the options beside it.
    pub(super) fn values(&self, steps: u64, config: &Unresolved) -> Vec<Answer> {
        let betas = match (self.adam_beta1, self.adam_beta2) {
            (None, None) => None,
            (first, second) => Some(json!([first.unwrap_or(0.9), second.unwrap_or(0.999)])),
        };
        // A rate that stands in one of two places holds for the other.
        let rate = |other: &str| match config.given(other) {
            Some(rate) if rate.is_number() => (rate.clone(), format!("ds_config's {other}")),
            _ => default(5e-5, "learning_rate"),
        };
        let value = |key, path, given: Option<Value>, otherwise| Answer { key, path, given, otherwise };
        let number = |number: Option<f64>| number.map(Value::from);
        vec![
            value(
                "learning_rate",
                "optimizer.params.lr",
                number(self.learning_rate),
                rate("scheduler.params.warmup_max_lr"),
            ),
            value(
                "adam_beta1 and adam_beta2",
                "optimizer.params.betas",
                betas,
                default(json!([0.9, 0.999]), "adam_beta1 and adam_beta2"),
            ),
            value(
                "adam_epsilon",
                "optimizer.params.eps",
                number(self.adam_epsilon),
                default(1e-8, "adam_epsilon"),
            ),
            value(
                "weight_decay",
                "optimizer.params.weight_decay",
                number(self.weight_decay),
                default(0.0, "weight_decay"),
            ),
            value(
                "learning_rate",
                "scheduler.params.warmup_max_lr",
                number(self.learning_rate),
                rate("optimizer.params.lr"),
            ),
            value(
                "warmup_steps",
                "scheduler.params.warmup_num_steps",
                self.warmup(steps).map(Value::from),
                default(1, "warmup_steps"),
            ),
            value(
                "max_grad_norm",
                "gradient_clipping",
                number(self.max_grad_norm),
                default(1.0, "max_grad_norm"),
            ),
        ]
    }
}

/// What the model says about the run.
pub(super) struct ModelFacts {
    width: u64,
    /// `dtype` of its `config.json`.
    dtype: Option<String>,
}

impl ModelFacts {
    /// `None` where the model cannot be read; whoever prepares it says why.
    fn of(recipe: &Recipe) -> Option<ModelFacts> {
        let plan = recipe.model.is_clear().then(|| ModelPlan::read(recipe, None).ok()).flatten()?;
        Some(ModelFacts { width: plan.width(), dtype: plan.dtype() })
    }
}

impl Recipe {
    /// The ds_config as it is to be resolved, the values for its `"auto"`s, and where recipe and ds_config contradict
    /// each other.
    pub fn unresolved(&self) -> Result<(Unresolved, AutoValues, Vec<String>), ConfigError> {
        let training = self.training.clone().unwrap_or_default();
        let (mut config, mut problems) = (self.ds_config.clone(), Vec::new());
        let mut read = Config::from_value("ds_config", &config)?;
        if self.leaves_optimizer_to_trainer(&read) {
            config["optimizer"] = trainer::optimizer();
            read = Config::from_value("ds_config", &config)?;
        }
        let facts = ModelFacts::of(self);
        let mut values = training.values(self.steps, &read);
        values.extend(training.precision(&read, facts.as_ref()));
        let mut auto = AutoValues::new()
            .with_source("scheduler.params.warmup_min_lr", 0.0, "the Trainer: a warm-up starts at 0")
            .with_source("scheduler.params.total_num_steps", self.steps, "the recipe's steps");
        if let Some(facts) = &facts {
            auto = auto.with_hidden_size(facts.width);
        }
        let mut taken = Vec::new();
        for value in values {
            let Some(given) = &value.given else {
                let (value_otherwise, from) = value.otherwise;
                auto = auto.with_source(value.path, value_otherwise, from);
                continue;
            };
            match read.given(value.path) {
                Some(written) if written == "auto" || same(written, given) => taken.push(value.key),
                Some(written) => {
                    taken.push(value.key);
                    problems.push(contradiction(value.key, given, value.path, written));
                }
                None if takes(&config, value.path) => {
                    taken.push(value.key);
                    write_auto(&mut config, value.path);
                }
                None => problems.push(format!(
                    "training.{}: nothing takes it: ds_config has no {} and no place for it; add one, or take the key away",
                    value.key, value.path
                )),
            }
            auto =
                auto.with_source(value.path, given.clone(), format!("the recipe's training.{}", value.key));
        }
        // A rate that has one of its two places is not without a place.
        problems.retain(|problem| {
            !taken.iter().any(|key| problem.starts_with(&format!("training.{key}: nothing")))
        });
        training.check_batch_sizes(&read, &mut config, &mut problems);
        let auto = training.batch_sizes(&read, self.data_ranks(), auto);
        Ok((Config::from_value("ds_config", &config)?, auto, problems))
    }
}

const BATCH_SIZES: [&str; 3] =
    ["train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"];

impl TrainingRecipe {
    /// Where batch sizes of the recipe and the ds_config contradict each other; those of the recipe alone get their place.
    fn check_batch_sizes(&self, read: &Unresolved, config: &mut Value, problems: &mut Vec<String>) {
        let [micro_path, steps_path, _] = BATCH_SIZES;
        for (key, path, given) in [
            ("per_device_train_batch_size", micro_path, self.per_device_train_batch_size),
            ("gradient_accumulation_steps", steps_path, self.gradient_accumulation_steps),
        ] {
            match (given, read.given(path).and_then(Value::as_u64)) {
                (Some(given), Some(written)) if given != written => {
                    problems.push(contradiction(key, &given.into(), path, &written.into()));
                }
                (Some(_), None) => write_auto(config, path),
                _ => {}
            }
        }
    }

    /// The three batch sizes, of which two say the third.
    pub(super) fn batch_sizes(
        &self,
        read: &Unresolved,
        ranks: NonZeroU64,
        mut auto: AutoValues,
    ) -> AutoValues {
        let [micro_path, steps_path, train_path] = BATCH_SIZES;
        let written = |path: &str| read.given(path).and_then(Value::as_u64);
        let train = written(train_path);
        // Where both say something the contradiction is told; one of them is enough to go on.
        let micro = written(micro_path).or(self.per_device_train_batch_size);
        let steps = written(steps_path).or(self.gradient_accumulation_steps);
        let size = |size: Option<u64>| size.and_then(NonZeroU64::new);
        let given = GivenBatchSizes {
            train: size(train),
            // The whole batch, where it is written, says the size of its parts.
            micro: size(micro.or_else(|| train.is_none().then_some(8))),
            accumulation: size(steps),
        };
        let Ok(sizes) = batch::complete(given, ranks) else {
            // The resolution says what does not agree.
            for (path, value) in [(micro_path, micro.unwrap_or(8)), (steps_path, steps.unwrap_or(1))] {
                auto = auto.with(path, value);
            }
            return auto.with(train_path, train.unwrap_or(1));
        };
        let from = |given: bool, key: &str| match (given, train) {
            (true, _) => format!("the recipe's training.{key}"),
            (false, Some(_)) => format!("ds_config's {train_path}, divided"),
            (false, None) => format!("the default of training.{key}"),
        };
        auto.with_source(
            micro_path,
            sizes.train_micro_batch_size_per_gpu.get(),
            from(self.per_device_train_batch_size.is_some(), "per_device_train_batch_size"),
        )
        .with_source(
            steps_path,
            sizes.gradient_accumulation_steps.get(),
            from(self.gradient_accumulation_steps.is_some(), "gradient_accumulation_steps"),
        )
        .with_source(
            train_path,
            sizes.train_batch_size.get(),
            "micro-batch size × accumulation steps × ranks",
        )
    }

    /// `fp16.enabled` and `bf16.enabled`: the recipe's, or the type of the model's weights unless the other is on.
    pub(super) fn precision(&self, read: &Unresolved, facts: Option<&ModelFacts>) -> Vec<Answer> {
        let of_model = |dtype: &str| facts.and_then(|facts| facts.dtype.as_deref()) == Some(dtype);
        let is_on =
            |own: Option<bool>, path: &str| own.unwrap_or(read.given(path) == Some(&Value::Bool(true)));
        let one = |key, path, own: Option<bool>, dtype: &str, other_is_on: bool| Answer {
            key,
            path,
            given: own.map(Value::from),
            otherwise: if of_model(dtype) && !other_is_on {
                (true.into(), format!("the model's dtype {dtype}"))
            } else {
                default(false, key)
            },
        };
        vec![
            one("fp16", "fp16.enabled", self.fp16, "float16", is_on(self.bf16, "bf16.enabled")),
            one("bf16", "bf16.enabled", self.bf16, "bfloat16", is_on(self.fp16, "fp16.enabled")),
        ]
    }
}

fn contradiction(key: &str, given: &Value, path: &str, written: &Value) -> String {
    format!(
        "training.{key}: {given} contradicts ds_config's {path} {written}; write \"auto\" there, or take one of the two away"
    )
}

/// Equality in which 1 and 1.0 are the same number.
fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b)),
        (Value::Number(a), Value::Number(b)) => a.as_f64() == b.as_f64(),
        _ => a == b,
    }
}

/// Whether a ds_config may have this option: a section of its own, or one whose kind the ds_config names.
fn takes(config: &Value, path: &str) -> bool {
    let mut segments = path.split('.');
    let section = segments.next().unwrap_or_default();
    let Some(root) = table::ROOT.iter().find(|key| key.name == section) else { return false };
    let Some((keys, _)) = root.children() else { return segments.next().is_none() };
    let [inner, name] = [segments.next(), segments.next()];
    let Some(key) = keys.iter().find(|key| Some(key.name) == inner) else { return false };
    match key.kind {
        Kind::Variants { tag: Tag::Beside(tag), variants } => {
            let variant = config[section][tag].as_str().and_then(|tag| table::find_variant(variants, tag));
            let keys = variant.and_then(|variant| variant.keys).unwrap_or_default();
            keys.iter().any(|key| Some(key.name) == name)
        }
        _ => name.is_none(),
    }
}

/// Writes `"auto"` for an option, with the sections above it.
fn write_auto(config: &mut Value, path: &str) {
    let mut place = config;
    for segment in path.split('.') {
        if !place.is_object() {
            *place = json!({});
        }
        place = &mut place[segment];
    }
    *place = "auto".into();
}
