//! The model that `plan` and `estimate` speak of: a Hugging Face `config.json`, or counts.

use std::path::{Path, PathBuf};

use clap::Args;
use ferrospeed_command::Failure;
use ferrospeed_command::hub::config_at;
use ferrospeed_models::config::config_file;
use ferrospeed_models::{DecoderConfig, ModelConfig, ModelError, WindowRule};
use ferrospeed_nn::Parameters;
use ferrospeed_train::shape_of;
use ferrospeed_tune::estimate::ModelSize;
use ferrospeed_tune::model::Model;
use serde_json::Value;

#[derive(Debug, Args)]
pub(super) struct ModelArgs {
    /// A model: its Hugging Face folder, its config.json, its GGUF file or its name on the Hub
    #[arg(long, value_name = "PATH", conflicts_with = "params")]
    model: Option<PathBuf>,
    /// The number of parameters, such as 7e9
    #[arg(long, value_name = "COUNT", value_parser = parse_count)]
    params: Option<u64>,
    /// The parameters of the largest layer; all of them when absent
    #[arg(long = "largest_layer_params", alias = "largest-layer-params", value_name = "COUNT", value_parser = parse_count, requires = "params")]
    largest_layer_params: Option<u64>,
}

/// Reads `7000000000`, `7_000_000_000` and `7e9`.
pub(super) fn parse_count(text: &str) -> Result<u64, String> {
    let plain = text.replace('_', "");
    if let Ok(count) = plain.parse::<u64>() {
        return if count > 0 { Ok(count) } else { Err("must be at least 1".to_owned()) };
    }
    let count: f64 = plain.parse().map_err(|_| "not a number".to_owned())?;
    // 2^53: every whole number up to here is exact in an f64.
    if (1.0..=9_007_199_254_740_992.0).contains(&count) && count.fract() == 0.0 {
        return Ok(count as u64);
    }
    Err("not a whole number that can be counted".to_owned())
}

impl ModelArgs {
    /// Whether a model is named.
    pub(super) fn is_given(&self) -> bool {
        self.model.is_some() || self.params.is_some()
    }

    pub(super) fn read(&self) -> Result<Model, Failure> {
        Ok(self.read_all()?.0)
    }

    /// The handles of its parameters, without values; `None` where only counts are given, or nothing here trains it.
    pub(super) fn parameters(&self) -> Option<Parameters> {
        let (_, config) = read_config(self.model.as_deref()?).ok()?;
        Some(ModelConfig::from_value(&config, WindowRule::default()).ok()?.parameters())
    }

    /// The model, and what trains it, where that is known here.
    pub(super) fn read_all(&self) -> Result<(Model, Option<DecoderConfig>), Failure> {
        if let Some(total_params) = self.params {
            let largest_layer_params = self.largest_layer_params.unwrap_or(total_params);
            return Ok((Model::Counts(ModelSize { total_params, largest_layer_params }), None));
        }
        let Some(path) = &self.model else {
            return Err(Failure::Usage("give --model PATH or --params COUNT".to_owned()));
        };
        let (path, config) = read_config(path)?;
        let refuse = |why: String| Failure::Usage(format!("{}: {why}", path.display()));
        let transformer = shape_of(&config).map_err(|error| refuse(error.to_string()))?;
        let decoder = match ModelConfig::from_value(&config, WindowRule::default()) {
            Ok(ModelConfig::Decoder(decoder)) => Some(*decoder),
            Err(error @ ModelError::Config { .. }) => return Err(refuse(error.to_string())),
            // Others train it, whose plan this may be.
            Ok(_) | Err(_) => None,
        };
        Ok((Model::Transformer(transformer), decoder))
    }
}

/// The configuration of a model, given as its directory, its `config.json` or its GGUF file; says which file it was.
pub(super) fn read_config(path: &Path) -> Result<(PathBuf, Value), Failure> {
    let path = config_at(path)?;
    let read = ferrospeed_models::config::read_config(&path);
    Ok((config_file(&path), read.map_err(|error| Failure::Usage(error.to_string()))?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_read_in_every_usual_form() {
        assert_eq!(parse_count("7e9"), Ok(7_000_000_000));
        assert_eq!(parse_count("1_500"), Ok(1_500));
        for bad in ["0", "-1", "x", "1.5", "1e300", "inf", "NaN", ""] {
            assert!(parse_count(bad).is_err(), "{bad}");
        }
    }
}
