//! The recorded configurations of DeepSpeed, and the one table of cases in which we deliberately differ.

mod attributes;
mod batch_size;
mod elasticity;
mod exceptions;
mod parse;
mod print;
mod zero;

use ferrospeed_config::{AutoValues, Code, Config, ConfigError, Unresolved};
use serde_json::Value;

/// What we made of a recorded input.
pub(crate) enum Outcome {
    Accepted(Box<Config>),
    Refused(ConfigError),
}

impl Outcome {
    /// Resolves what was read for a number of ranks.
    pub(crate) fn of(read: Result<Unresolved, ConfigError>, world_size: &Value) -> Outcome {
        let ranks = world_size.as_u64().expect("a world size").try_into().expect("a positive world size");
        match read.and_then(|unresolved| unresolved.resolve(ranks, &AutoValues::new())) {
            Ok((config, _)) => Outcome::Accepted(Box::new(config)),
            Err(error) => Outcome::Refused(error),
        }
    }

    /// The path and kind of each of our errors; empty where we accept, or where the text could not even be decoded.
    pub(crate) fn error_paths(&self) -> Vec<(String, Code)> {
        match self {
            Outcome::Refused(ConfigError::Invalid(report)) => {
                report.errors().map(|error| (error.path.clone(), error.code)).collect()
            }
            _ => Vec::new(),
        }
    }

    pub(crate) fn describe(&self) -> String {
        match self {
            Outcome::Accepted(_) => "accepted".to_owned(),
            Outcome::Refused(error) => format!("refused: {error}"),
        }
    }
}

/// Equality in which 1 and 1.0 are the same number.
pub(crate) fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => a.as_f64() == b.as_f64(),
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b)),
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len() && a.iter().all(|(key, a)| b.get(key).is_some_and(|b| same(a, b)))
        }
        _ => a == b,
    }
}
