//! The section `compression_training` as it is written.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

use crate::error::{OptimError, Result};

pub(super) const SECTION: &str = "compression_training";

pub(super) fn fault(why: impl Into<String>) -> OptimError {
    OptimError::Section { section: SECTION, why: why.into() }
}

/// A technique.
#[derive(Deserialize)]
#[serde(bound(deserialize = "S: Deserialize<'de> + Default, P: Deserialize<'de>"))]
pub(super) struct Technique<S, P> {
    #[serde(default)]
    pub(super) shared_parameters: S,
    #[serde(default = "BTreeMap::new")]
    pub(super) different_groups: BTreeMap<String, Group<P>>,
}

/// Modules with parameters of their own.
#[derive(Deserialize)]
pub(super) struct Group<P> {
    pub(super) params: P,
    pub(super) modules: Option<Modules>,
}

#[derive(Deserialize)]
#[serde(untagged)]
pub(super) enum Modules {
    One(String),
    Several(Vec<String>),
}

#[derive(Deserialize, Default)]
#[serde(default)]
pub(super) struct WeightShared {
    pub(super) enabled: bool,
    pub(super) schedule_offset: u64,
    pub(super) quantize_groups: Option<usize>,
    pub(super) quantization_type: Option<String>,
    pub(super) quantize_weight_in_forward: bool,
    pub(super) rounding: Option<String>,
    pub(super) fp16_mixed_quantize: Mixed,
}

#[derive(Deserialize, Default)]
#[serde(default)]
pub(super) struct Mixed {
    pub(super) enabled: bool,
    pub(super) quantize_change_ratio: Option<f64>,
}

#[derive(Deserialize)]
pub(super) struct WeightParams {
    pub(super) start_bits: u64,
    pub(super) target_bits: u64,
    pub(super) quantization_period: Option<u64>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
pub(super) struct ActivationShared {
    pub(super) enabled: bool,
    pub(super) quantization_type: Option<String>,
    pub(super) range_calibration: Option<String>,
    pub(super) schedule_offset: Option<u64>,
}

#[derive(Deserialize)]
pub(super) struct ActivationParams {
    pub(super) bits: u64,
}

#[derive(Deserialize, Default)]
#[serde(default)]
pub(super) struct PruningShared {
    pub(super) enabled: bool,
    pub(super) method: Option<String>,
    pub(super) schedule_offset: Option<u64>,
    pub(super) num_heads: Option<usize>,
}

#[derive(Deserialize)]
pub(super) struct PruningParams {
    pub(super) dense_ratio: f64,
}

/// One technique of the section, where it is there.
pub(super) fn technique<S, P>(section: &Value, name: &str) -> Result<Option<Technique<S, P>>>
where
    S: for<'de> Deserialize<'de> + Default,
    P: for<'de> Deserialize<'de>,
{
    let Some(value) = section.get(name).filter(|value| !value.is_null()) else { return Ok(None) };
    // Groups may lack what only a technique that is on needs.
    if value["shared_parameters"]["enabled"] != true {
        return Ok(None);
    }
    let read = serde_json::from_value(value.clone()).map_err(|error| fault(format!("{name}: {error}")))?;
    Ok(Some(read))
}
