//! Dividing layers over pipeline stages, and elements over ranks.
//!
//! A result is a list of boundaries: part `i` holds the items from `boundaries[i]` up to `boundaries[i + 1]`.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::str::FromStr;

use regex::Regex;

use crate::error::{PipelineError, Result};

/// How layers are divided over stages.
#[derive(Debug, Clone)]
pub enum Method {
    /// The same number of layers on each stage.
    Uniform,
    /// About the same number of trained parameters.
    Parameters,
    /// About the same number of layers whose names match.
    Type(Regex),
}

impl FromStr for Method {
    type Err = PipelineError;

    /// Letters' case does not matter, as in DeepSpeed. What follows a second colon is left out there and here.
    fn from_str(text: &str) -> Result<Method> {
        let lower = text.to_lowercase();
        match lower.split(':').collect::<Vec<_>>()[..] {
            ["uniform"] => Ok(Method::Uniform),
            ["parameters"] => Ok(Method::Parameters),
            ["type", pattern, ..] => {
                Regex::new(&format!("(?i){pattern}")).map(Method::Type).map_err(|error| {
                    PipelineError::BadPattern { pattern: pattern.to_owned(), why: error.to_string() }
                })
            }
            _ => Err(PipelineError::UnknownMethod(text.to_owned())),
        }
    }
}

/// What a partition must know of a layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerSize {
    /// The name of its kind.
    pub class: String,
    /// Trained parameters.
    pub parameters: usize,
}

impl Method {
    /// The boundaries of `stages` parts of some layers.
    pub fn divide(&self, layers: &[LayerSize], stages: NonZeroUsize) -> Result<Vec<usize>> {
        let weights: Vec<f64> = match self {
            Method::Uniform => return Ok(partition_uniform(layers.len(), stages)),
            Method::Parameters => layers.iter().map(|layer| layer.parameters as f64).collect(),
            Method::Type(pattern) => {
                layers.iter().map(|layer| f64::from(u8::from(pattern.is_match(&layer.class)))).collect()
            }
        };
        if let (Method::Type(pattern), true) = (self, weights.iter().all(|weight| *weight == 0.0)) {
            let layers: Vec<&str> = layers.iter().map(|layer| layer.class.as_str()).collect();
            let pattern = pattern.as_str().trim_start_matches("(?i)").to_owned();
            return Err(PipelineError::NoMatch { pattern, layers: layers.join(", ") });
        }
        Ok(partition_balanced(&weights, stages))
    }
}

/// The items of one part.
pub fn part(boundaries: &[usize], part: usize) -> Range<usize> {
    boundaries[part]..boundaries[part + 1]
}

/// The first part that holds an item.
pub fn owner(boundaries: &[usize], item: usize) -> Option<usize> {
    boundaries.windows(2).position(|ends| (ends[0]..ends[1]).contains(&item))
}

/// Inclusive prefix sums.
pub fn prefix_sum(weights: &[f64]) -> Vec<f64> {
    weights
        .iter()
        .scan(0.0, |sum, weight| {
            *sum += weight;
            Some(*sum)
        })
        .collect()
}

/// Parts of equal length; where that does not come out even, the first parts hold one more.
pub fn partition_uniform(items: usize, parts: NonZeroUsize) -> Vec<usize> {
    let (chunk, longer) = (items / parts, items % parts);
    (0..=parts.get()).map(|part| part * chunk + part.min(longer)).collect()
}

/// Parts whose heaviest and lightest differ as little as a dynamic programme over prefixes finds.
///
/// A state is a prefix cut into a number of parts; it keeps the heaviest and the lightest part of its best cut, so the
/// result is greedy on prefixes and may miss the true optimum. Ties go to the longest prefix, as in DeepSpeed, so that
/// both place layers alike.
pub fn partition_balanced(weights: &[f64], parts: NonZeroUsize) -> Vec<usize> {
    let (items, parts) = (weights.len(), parts.get());
    if items <= parts {
        return (0..=parts).map(|part| part.min(items)).collect();
    }
    let mut sums = vec![0.0];
    sums.extend(prefix_sum(weights));

    let unreached = State { spread: f64::INFINITY, heaviest: f64::INFINITY, lightest: f64::INFINITY, cut: 0 };
    let mut states = vec![vec![unreached; parts + 1]; items + 1];
    states[0][0] = State { spread: 0.0, heaviest: 0.0, ..unreached };
    for end in 1..=items {
        for count in 1..=parts.min(end) {
            for cut in 0..end {
                let before = states[cut][count - 1];
                let part = sums[end] - sums[cut];
                let heaviest = before.heaviest.max(part);
                let lightest = before.lightest.min(part);
                let spread = heaviest - lightest;
                if states[end][count].spread >= spread {
                    states[end][count] = State { spread, heaviest, lightest, cut };
                }
            }
        }
    }

    let mut boundaries = vec![items];
    let mut end = items;
    for count in (1..=parts).rev() {
        end = states[end][count].cut;
        boundaries.push(end);
    }
    boundaries.reverse();
    boundaries
}

/// The best cut of a prefix into some number of parts.
#[derive(Debug, Clone, Copy)]
struct State {
    spread: f64,
    heaviest: f64,
    lightest: f64,
    /// Where the last part starts.
    cut: usize,
}
