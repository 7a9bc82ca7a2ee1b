//! Compression training (`compression_training`): which weights are read in how few bits, and which of their parts as zeros, at
//! which step. A model that learns with them loses less than one that is compressed when it has learnt.
//!
//! [`Compression`] is the section, [`Compression::plan`] what it means for the parameters of a model: a pure function, so that
//! mistakes are told before anything runs. [`BitSchedule`] says how bits become fewer, [`Mask`] what is pruned; the levels of few
//! bits are those of [`ferrospeed_tensor::fake_quantize`].
//!
//! Refused, each with its reason: scores that are learnt (`topk`), `snip_momentum`, ranges that follow earlier batches
//! (`range_calibration` `"static"`), and modules that are not there or are named twice.

mod mask;
mod plan;
mod precision;
mod section;

pub use mask::{Mask, Units};
pub use plan::{ActivationBits, Module, Plan, Pruning, WeightBits};
pub use precision::{BitSchedule, Precision};

use std::fmt;

use ferrospeed_tensor::fake_quantize::Levels;
use regex::Regex;
use serde_json::Value;

use crate::error::Result;
use section::{
    ActivationParams, ActivationShared, Group, Modules, PruningParams, PruningShared, Technique,
    WeightParams, WeightShared, fault, technique,
};

/// The step at which techniques start when the section does not say, but for weights in few bits.
const USUAL_OFFSET: u64 = 1000;
const WEIGHTS: &str = "weight_quantization";
const ACTIVATIONS: &str = "activation_quantization";

/// What is pruned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PruningKind {
    /// Single elements.
    Sparse,
    /// Outputs of linear layers, with their biases.
    Row,
    /// Heads, at the input of the layer behind attention.
    Head,
    /// Output channels of convolutions, with their biases.
    Channel,
}

impl PruningKind {
    /// All, in the order in which they are applied.
    pub const ALL: [PruningKind; 4] =
        [PruningKind::Sparse, PruningKind::Row, PruningKind::Head, PruningKind::Channel];

    /// Whether an output that goes takes its bias along.
    pub fn takes_bias(self) -> bool {
        matches!(self, PruningKind::Row | PruningKind::Channel)
    }

    /// Its technique in the section.
    pub fn technique(self) -> &'static str {
        match self {
            PruningKind::Sparse => "sparse_pruning",
            PruningKind::Row => "row_pruning",
            PruningKind::Head => "head_pruning",
            PruningKind::Channel => "channel_pruning",
        }
    }
}

impl fmt::Display for PruningKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.technique())
    }
}

/// The section, with all that is on.
#[derive(Debug, Clone)]
pub struct Compression {
    weights: Option<Weights>,
    activations: Option<Activations>,
    pruning: Vec<PruningTechnique>,
}

#[derive(Debug, Clone)]
struct Weights {
    offset: u64,
    groups: usize,
    symmetric: bool,
    stochastic: bool,
    /// Whether bits are `target_bits` from the start.
    in_forward: bool,
    bits: Vec<(Patterns, BitSchedule)>,
}

#[derive(Debug, Clone)]
struct Activations {
    offset: u64,
    bits: Vec<(Patterns, Levels)>,
}

#[derive(Debug, Clone)]
struct PruningTechnique {
    kind: PruningKind,
    offset: u64,
    heads: Option<usize>,
    ratios: Vec<(Patterns, f64)>,
}

/// The patterns of a group's modules.
#[derive(Debug, Clone)]
struct Patterns {
    group: String,
    patterns: Vec<(String, Regex)>,
}

impl Compression {
    /// From the section of the configuration; `None` where nothing of it is on.
    pub fn from_section(section: &Value) -> Result<Option<Compression>> {
        let weights = technique(section, WEIGHTS)?.map(Weights::new).transpose()?;
        let activations = technique(section, ACTIVATIONS)?.map(Activations::new).transpose()?;
        let mut pruning = Vec::new();
        for kind in PruningKind::ALL {
            let read = technique(section, kind.technique())?;
            pruning.extend(read.map(|read| PruningTechnique::new(kind, read)).transpose()?);
        }
        let is_on = weights.is_some() || activations.is_some() || !pruning.is_empty();
        Ok(is_on.then_some(Compression { weights, activations, pruning }))
    }

    /// After how many optimizer steps each technique that is on begins.
    pub fn beginnings(&self) -> Vec<(&'static str, u64)> {
        let weights = self.weights.as_ref().map(|weights| (WEIGHTS, weights.offset));
        let activations = self.activations.as_ref().map(|activations| (ACTIVATIONS, activations.offset));
        let pruning = self.pruning.iter().map(|pruning| (pruning.kind.technique(), pruning.offset));
        weights.into_iter().chain(activations).chain(pruning).collect()
    }
}

impl Weights {
    fn new(read: Technique<WeightShared, WeightParams>) -> Result<Weights> {
        let name = WEIGHTS;
        let shared = &read.shared_parameters;
        let symmetric = shared.quantization_type.as_deref() != Some("asymmetric");
        let mixed = &shared.fp16_mixed_quantize;
        let change_ratio = mixed.enabled.then(|| mixed.quantize_change_ratio.unwrap_or(0.001));
        if mixed.enabled && shared.quantize_weight_in_forward {
            return Err(fault(format!(
                "{name}.shared_parameters: fp16_mixed_quantize mixes exact weights in as bits become fewer, and \
                 quantize_weight_in_forward takes target_bits at once; leave out one of the two"
            )));
        }
        let stochastic = shared.rounding.as_deref() == Some("stochastic");
        let bits = each_group(name, &read.different_groups, |group, params| {
            let schedule = BitSchedule {
                start_bits: params.start_bits,
                target_bits: params.target_bits,
                period: params.quantization_period.unwrap_or(1),
                factor: 1,
                change_ratio,
            };
            let coarse = stochastic && params.target_bits <= 2;
            let coarse = coarse.then(|| {
                "rounding \"stochastic\" needs at least 3 bits: one or two are not rounded".to_owned()
            });
            match schedule.flaw(symmetric).or(coarse) {
                Some(flaw) => Err(fault(format!("{name}.different_groups.{group}: {flaw}"))),
                None => Ok(schedule),
            }
        })?;
        Ok(Weights {
            offset: shared.schedule_offset,
            groups: shared.quantize_groups.unwrap_or(1).max(1),
            symmetric,
            stochastic,
            in_forward: shared.quantize_weight_in_forward,
            bits,
        })
    }
}

impl Activations {
    fn new(read: Technique<ActivationShared, ActivationParams>) -> Result<Activations> {
        let name = ACTIVATIONS;
        let shared = &read.shared_parameters;
        if shared.range_calibration.as_deref() == Some("static") {
            return Err(fault(format!(
                "{name}.shared_parameters.range_calibration \"static\": a range that follows the batches of one rank would \
                 make ranks compute different models; use \"dynamic\", which takes the range of each token"
            )));
        }
        let symmetric = shared.quantization_type.as_deref() != Some("asymmetric");
        let bits = each_group(name, &read.different_groups, |group, params| match params.bits {
            4 | 8 => Levels::of(params.bits, symmetric).map_err(fault),
            bits => {
                Err(fault(format!("{name}.different_groups.{group}: bits {bits}: only 4 and 8 are known")))
            }
        })?;
        Ok(Activations { offset: shared.schedule_offset.unwrap_or(USUAL_OFFSET), bits })
    }
}

impl PruningTechnique {
    fn new(kind: PruningKind, read: Technique<PruningShared, PruningParams>) -> Result<PruningTechnique> {
        let shared = &read.shared_parameters;
        // DeepSpeed knows heads by learnt scores alone.
        let usual = if kind == PruningKind::Head { "topk" } else { "l1" };
        let why = match shared.method.as_deref().unwrap_or(usual) {
            "topk" => Some(
                "its scores would be parameters to learn, which a model that is read from its folder has none of",
            ),
            "snip_momentum" => {
                Some("it ranks weights by the optimizer's momentum, which ranks hold in parts")
            }
            _ => None,
        };
        if let Some(why) = why {
            let method = shared.method.as_deref().unwrap_or(usual);
            return Err(fault(format!("{kind}.shared_parameters.method {method:?}: {why}; use \"l1\"")));
        }
        if kind == PruningKind::Head && shared.num_heads.is_none_or(|heads| heads == 0) {
            return Err(fault(format!(
                "{kind}.shared_parameters.num_heads is missing: how many heads a layer has"
            )));
        }
        let ratios = each_group(kind.technique(), &read.different_groups, |group, params| {
            let ratio = params.dense_ratio;
            match (0.0..=1.0).contains(&ratio) {
                true => Ok(ratio),
                false => Err(fault(format!(
                    "{kind}.different_groups.{group}: dense_ratio {ratio} is no share; write one from 0 to 1"
                ))),
            }
        })?;
        Ok(PruningTechnique {
            kind,
            offset: shared.schedule_offset.unwrap_or(USUAL_OFFSET),
            heads: shared.num_heads,
            ratios,
        })
    }
}

/// Reads the groups of a technique, of which there must be one.
fn each_group<P, T>(
    name: &str,
    groups: &std::collections::BTreeMap<String, Group<P>>,
    read: impl Fn(&str, &P) -> Result<T>,
) -> Result<Vec<(Patterns, T)>> {
    if groups.is_empty() {
        return Err(fault(format!(
            "{name}.different_groups is missing: a technique that is enabled needs a group with params and modules"
        )));
    }
    let group = |(group, section): (&String, &Group<P>)| {
        let patterns = match &section.modules {
            None => vec!["*".to_owned()],
            Some(Modules::One(pattern)) => vec![pattern.clone()],
            Some(Modules::Several(patterns)) if patterns.is_empty() => {
                return Err(fault(format!(
                    "{name}.different_groups.{group}.modules is empty, so the group compresses nothing; name patterns, or leave \
                     modules out for all"
                )));
            }
            Some(Modules::Several(patterns)) => patterns.clone(),
        };
        let compiled = patterns.into_iter().map(|pattern| {
            // As DeepSpeed's default is written; as a regular expression it is none.
            let meant = if pattern == "*" { "" } else { &pattern };
            let regex = Regex::new(meant).map_err(|error| {
                fault(format!("{name}.different_groups.{group}.modules: {pattern:?} is no pattern: {error}"))
            })?;
            Ok((pattern, regex))
        });
        let patterns = Patterns { group: group.clone(), patterns: compiled.collect::<Result<_>>()? };
        Ok((patterns, read(group, &section.params)?))
    };
    groups.iter().map(group).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn enabled(technique: &str, shared: Value, params: Value) -> Value {
        let mut shared = shared;
        shared["enabled"] = true.into();
        json!({technique: {"shared_parameters": shared, "different_groups": {"all": {"params": params}}}})
    }

    #[test]
    fn what_is_off_needs_nothing() {
        let section =
            json!({"weight_quantization": {"shared_parameters": {"enabled": false}}, "sparse_pruning": {}});
        assert!(Compression::from_section(&section).unwrap().is_none());
        let section = enabled("sparse_pruning", json!({}), json!({"dense_ratio": 0.5}));
        assert_eq!(Compression::from_section(&section).unwrap().unwrap().pruning.len(), 1);
    }

    #[test]
    fn what_cannot_be_is_refused_with_its_reason() {
        let bits = json!({"start_bits": 8, "target_bits": 4});
        let ratio = json!({"dense_ratio": 0.5});
        for (technique, shared, params, expected) in [
            (
                "weight_quantization",
                json!({}),
                json!({"start_bits": 4, "target_bits": 8}),
                "only become fewer",
            ),
            ("weight_quantization", json!({}), json!({"start_bits": 4}), "target_bits"),
            (
                "weight_quantization",
                json!({"quantization_type": "asymmetric"}),
                json!({"start_bits": 4, "target_bits": 2}),
                "symmetric only",
            ),
            (
                "weight_quantization",
                json!({"rounding": "stochastic"}),
                json!({"start_bits": 4, "target_bits": 1}),
                "at least 3 bits",
            ),
            (
                "weight_quantization",
                json!({"quantize_weight_in_forward": true, "fp16_mixed_quantize": {"enabled": true}}),
                bits,
                "leave out one",
            ),
            (
                "activation_quantization",
                json!({"range_calibration": "static"}),
                json!({"bits": 8}),
                "use \"dynamic\"",
            ),
            ("activation_quantization", json!({}), json!({"bits": 5}), "only 4 and 8"),
            ("sparse_pruning", json!({"method": "topk"}), ratio.clone(), "use \"l1\""),
            ("sparse_pruning", json!({"method": "snip_momentum"}), ratio.clone(), "momentum"),
            ("head_pruning", json!({"num_heads": 2}), ratio.clone(), "use \"l1\""),
            ("head_pruning", json!({"method": "l1"}), ratio, "num_heads is missing"),
            ("row_pruning", json!({}), json!({"dense_ratio": 1.5}), "is no share"),
        ] {
            let section = enabled(technique, shared, params);
            let said = Compression::from_section(&section).expect_err(&section.to_string()).to_string();
            assert!(said.starts_with("compression_training: ") && said.contains(expected), "{said}");
        }
        let mut section = enabled("row_pruning", json!({}), json!({"dense_ratio": 0.5}));
        section["row_pruning"]["different_groups"]["all"]["modules"] = json!(["("]);
        assert!(Compression::from_section(&section).unwrap_err().to_string().contains("is no pattern"));
        section["row_pruning"]["different_groups"]["all"]["modules"] = json!([]);
        assert!(
            Compression::from_section(&section).unwrap_err().to_string().contains("all.modules is empty")
        );
        section["row_pruning"]["different_groups"] = json!({});
        assert!(Compression::from_section(&section).unwrap_err().to_string().contains("needs a group"));
    }
}
