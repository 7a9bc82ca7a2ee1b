//! Dividing layers over pipeline stages, and elements over ranks.
//!
//! A result is a list of boundaries: part `i` holds the items from `boundaries[i]` up to `boundaries[i + 1]`.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::str::FromStr;

use regex::Regex;

use crate::error::{PipelineError, Result, nearest};

/// How layers are divided over stages.
#[derive(Debug, Clone)]
pub enum Method {
    /// The same number of layers on each stage.
    Uniform,
    /// About the same number of trained parameters.
    Parameters,
    /// About the same number of layers whose names match.
    Type(Regex),
    /// About the same measured time.
    Profile,
    /// As little memory on the fullest stage as can be.
    Memory,
}

impl FromStr for Method {
    type Err = PipelineError;

    /// Letters' case does not matter, as in DeepSpeed. What follows a second colon is left out there and here.
    fn from_str(text: &str) -> Result<Method> {
        let lower = text.to_lowercase();
        match lower.split(':').collect::<Vec<_>>()[..] {
            ["uniform"] => Ok(Method::Uniform),
            ["parameters"] => Ok(Method::Parameters),
            ["profile"] => Ok(Method::Profile),
            ["memory"] => Ok(Method::Memory),
            ["type", pattern, ..] => {
                Regex::new(&format!("(?i){pattern}")).map(Method::Type).map_err(|error| {
                    PipelineError::BadPattern { pattern: pattern.to_owned(), why: error.to_string() }
                })
            }
            [word, ..] => {
                let names = ["uniform", "parameters", "type:REGEX", "profile", "memory"];
                let words = names.map(|name| name.split(':').next().unwrap_or(name));
                let near = nearest(word, &words)
                    .and_then(|near| names.into_iter().find(|name| name.starts_with(near)));
                Err(PipelineError::UnknownMethod { method: text.to_owned(), nearest: near })
            }
            [] => Err(PipelineError::UnknownMethod { method: text.to_owned(), nearest: None }),
        }
    }
}

/// What a partition must know of a layer.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerSize {
    /// The name of its kind.
    pub class: String,
    /// Trained parameters.
    pub parameters: usize,
    /// What was measured of it.
    pub measured: Option<Measured>,
}

/// What one micro-batch takes in a layer.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Measured {
    /// Forward and backward.
    pub seconds: f64,
    /// What a rank keeps of the layer, whatever it does: weights, gradients, states.
    pub state_bytes: f64,
    /// What forward leaves for backward.
    pub activation_bytes: f64,
}

impl Method {
    /// Whether layers must have been measured.
    pub fn needs_measuring(&self) -> bool {
        matches!(self, Method::Profile | Method::Memory)
    }

    /// The boundaries of parts of some layers, of which part `i` holds the activations of `held[i]` micro-batches at a time.
    pub fn divide(&self, layers: &[LayerSize], held: &[f64]) -> Result<Vec<usize>> {
        let stages = NonZeroUsize::new(held.len()).unwrap_or(NonZeroUsize::MIN);
        if let (true, Some(layer)) =
            (self.needs_measuring(), layers.iter().find(|layer| layer.measured.is_none()))
        {
            return Err(PipelineError::NotMeasured(layer.class.clone()));
        }
        let measured = || layers.iter().map(|layer| layer.measured.unwrap_or_default());
        let weights: Vec<f64> = match self {
            Method::Uniform => return Ok(partition_uniform(layers.len(), stages)),
            Method::Parameters => layers.iter().map(|layer| layer.parameters as f64).collect(),
            Method::Type(pattern) => {
                layers.iter().map(|layer| f64::from(u8::from(pattern.is_match(&layer.class)))).collect()
            }
            Method::Profile => measured().map(|measured| measured.seconds).collect(),
            Method::Memory => {
                let [state, activations] = [0, 1].map(|which| {
                    let of = |layer: Measured| [layer.state_bytes, layer.activation_bytes][which];
                    [0.0]
                        .into_iter()
                        .chain(prefix_sum(&measured().map(of).collect::<Vec<_>>()))
                        .collect::<Vec<f64>>()
                });
                let bytes = |part: usize, layers: Range<usize>| {
                    let of = |sums: &[f64]| sums[layers.end] - sums[layers.start];
                    of(&state) + held[part] * of(&activations)
                };
                return Ok(partition_lightest(layers.len(), stages, bytes));
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

/// Parts whose heaviest is as light as can be, where an item's weight depends on the part that has it. Each has an item,
/// while there are any; among equals, the first parts have more.
pub fn partition_lightest(
    items: usize,
    parts: NonZeroUsize,
    weight: impl Fn(usize, Range<usize>) -> f64,
) -> Vec<usize> {
    let parts = parts.get();
    if items <= parts {
        return (0..=parts).map(|part| part.min(items)).collect();
    }
    // best[count][end]: the heaviest of `count` parts of the first `end` items, and where the last of them starts.
    let mut best = vec![vec![(f64::INFINITY, 0); items + 1]; parts + 1];
    best[0][0].0 = f64::NEG_INFINITY;
    for count in 1..=parts {
        for end in count..=items {
            for start in count - 1..end {
                let heaviest = best[count - 1][start].0.max(weight(count - 1, start..end));
                if heaviest <= best[count][end].0 {
                    best[count][end] = (heaviest, start);
                }
            }
        }
    }
    let mut boundaries = vec![items];
    for count in (1..=parts).rev() {
        boundaries.push(best[count][boundaries[boundaries.len() - 1]].1);
    }
    boundaries.reverse();
    boundaries
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(seconds: f64, state_bytes: f64, activation_bytes: f64) -> LayerSize {
        let measured = Some(Measured { seconds, state_bytes, activation_bytes });
        LayerSize { class: "Block".to_owned(), parameters: 1, measured }
    }

    #[test]
    fn measured_times_are_evened_out() {
        let layers: Vec<_> = [1.0, 1.0, 1.0, 1.0, 4.0].map(|seconds| layer(seconds, 1.0, 1.0)).to_vec();
        assert_eq!(Method::Profile.divide(&layers, &[1.0; 2]).unwrap(), [0, 4, 5]);
    }

    #[test]
    fn the_fullest_stage_is_as_empty_as_can_be() {
        // The first stage holds four micro-batches of its layers' activations, the last one.
        let layers = vec![layer(1.0, 10.0, 5.0); 8];
        let boundaries = Method::Memory.divide(&layers, &[4.0, 3.0, 2.0, 1.0]).unwrap();
        assert_eq!(boundaries, [0, 1, 3, 5, 8]);
        let weight =
            |part: usize, layers: Range<usize>| layers.len() as f64 * (10.0 + 5.0 * (4.0 - part as f64));
        let fullest =
            |boundaries: &[usize]| (0..4).map(|at| weight(at, part(boundaries, at))).fold(0.0, f64::max);
        let mut least = f64::INFINITY;
        for a in 1..6 {
            for b in a + 1..7 {
                for c in b + 1..8 {
                    least = f64::min(least, fullest(&[0, a, b, c, 8]));
                }
            }
        }
        assert_eq!(fullest(&boundaries), least);
    }

    #[test]
    fn layers_that_nobody_measured_are_told() {
        let layers = vec![LayerSize { measured: None, ..layer(1.0, 1.0, 1.0) }; 3];
        let told = "profile".parse::<Method>().unwrap().divide(&layers, &[1.0; 2]).unwrap_err();
        assert_eq!(told, PipelineError::NotMeasured("Block".to_owned()));
    }
}
