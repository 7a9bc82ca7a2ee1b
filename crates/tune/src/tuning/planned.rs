//! Our own search: begin where a model of costs says it is best, and let a handful of measurements correct it.
//!
//! A candidate is a [`Layout`]; those that the memory plan says do not fit are not among them. The model's favourite is measured,
//! then what lies one choice beside the best so far: another stage, mesh, way of keeping activations or place for state, each at
//! the size that is expected to suit it, and the sizes next to its own. What was measured corrects what is expected of the rest,
//! the more the more they have in common, so that the model need only be right about direction. A run that fails by memory rules
//! out all that are planned to need as much.

use std::collections::BTreeSet;

use crate::layout::{Layout, Offload};

/// All but the sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Lane {
    stage: u8,
    recompute: bool,
    mesh: (u64, u64),
    offload: Offload,
}

impl Lane {
    fn of(layout: &Layout) -> Lane {
        Lane {
            stage: layout.stage,
            recompute: layout.recompute,
            mesh: (layout.tensor, layout.sequence),
            offload: layout.offload,
        }
    }

    /// In how many choices two differ.
    fn distance(&self, other: &Lane) -> u32 {
        let differ = [
            self.stage != other.stage,
            self.recompute != other.recompute,
            self.mesh != other.mesh,
            self.offload != other.offload,
        ];
        differ.into_iter().map(u32::from).sum()
    }
}

/// What a choice more in common weighs.
const IN_COMMON: f64 = 8.0;
/// Nothing is tried of which the model expects less than this share of what it expects of the best: more than measurements
/// err by.
const HOPELESS: f64 = 0.25;

/// How a measurement ended.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Outcome {
    /// More is better.
    Measured(f64),
    /// Whatever needs as much memory fails, too.
    OutOfMemory,
    /// For any other reason.
    Failed,
}

impl Outcome {
    /// What was measured, if anything.
    pub fn value(self) -> Option<f64> {
        match self {
            Outcome::Measured(value) => Some(value),
            Outcome::OutOfMemory | Outcome::Failed => None,
        }
    }
}

/// What may be tried.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    /// How it is laid out.
    pub layout: Layout,
    /// What the model expects of it; more is better.
    pub expected: f64,
    /// What a rank is planned to need.
    pub bytes: u64,
}

/// A candidate, what was expected of it and what it measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tried {
    /// Which.
    pub candidate: Layout,
    /// What the model expected.
    pub expected: f64,
    /// What became of it.
    pub outcome: Outcome,
}

/// Measures at most `runs` of the candidates. Returns them in the order they ran.
pub fn search<E>(
    candidates: &[Candidate],
    runs: usize,
    mut measure: impl FnMut(&Layout) -> Result<Outcome, E>,
) -> Result<Vec<Tried>, E> {
    let mut left: Vec<Candidate> = candidates.to_vec();
    left.sort_by(|one, other| other.expected.total_cmp(&one.expected).then(one.layout.cmp(&other.layout)));
    let sizes: BTreeSet<u64> = candidates.iter().map(|candidate| candidate.layout.micro_batch).collect();
    let mut tried: Vec<Tried> = Vec::new();
    while tried.len() < runs {
        let Some(place) = next(&left, &tried, &sizes) else { break };
        let Candidate { layout, expected, bytes } = left.remove(place);
        let outcome = measure(&layout)?;
        if outcome == Outcome::OutOfMemory {
            left.retain(|next| next.bytes < bytes);
        }
        tried.push(Tried { candidate: layout, expected, outcome });
    }
    Ok(tried)
}

/// Which of those left is tried next.
fn next(left: &[Candidate], tried: &[Tried], sizes: &BTreeSet<u64>) -> Option<usize> {
    let mut best: Option<(&Tried, f64)> = None;
    for tried in tried {
        let Some(value) = tried.outcome.value() else { continue };
        if best.is_none_or(|(_, found)| value > found) {
            best = Some((tried, value));
        }
    }
    // Without a measurement the model is all there is.
    let Some((best, _)) = best else { return (!left.is_empty()).then_some(0) };
    let is_known = |lane: Lane| {
        tried.iter().any(|tried| Lane::of(&tried.candidate) == lane && tried.outcome != Outcome::OutOfMemory)
    };
    let mut found: Option<(usize, f64)> = None;
    for (place, Candidate { layout, expected, .. }) in left.iter().enumerate() {
        let (lane, best_lane) = (Lane::of(layout), Lane::of(&best.candidate));
        let is_near = match lane.distance(&best_lane) {
            0 => are_beside(sizes, layout.micro_batch, best.candidate.micro_batch),
            1 => !is_known(lane),
            _ => false,
        };
        if !is_near || *expected < HOPELESS * best.expected {
            continue;
        }
        let corrected = corrected(layout, *expected, tried);
        if found.is_none_or(|(_, most)| corrected > most) {
            found = Some((place, corrected));
        }
    }
    found.map(|(place, _)| place)
}

/// What is expected of a candidate after what was measured of others: the model's word, corrected by how far it was off there.
fn corrected(candidate: &Layout, expected: f64, tried: &[Tried]) -> f64 {
    let (mut sum, mut weights) = (0.0, 0.0);
    for tried in tried {
        let Some(measured) = tried.outcome.value().filter(|value| *value > 0.0) else { continue };
        let octaves = (candidate.micro_batch as f64 / tried.candidate.micro_batch as f64).log2().abs();
        let distance = f64::from(Lane::of(candidate).distance(&Lane::of(&tried.candidate))) + octaves / 2.0;
        let weight = IN_COMMON.powf(-distance);
        sum += weight * (measured / tried.expected).ln();
        weights += weight;
    }
    if weights > 0.0 { expected * (sum / weights).exp() } else { expected }
}

/// Whether no other size lies between two.
fn are_beside(sizes: &BTreeSet<u64>, one: u64, other: u64) -> bool {
    let (smaller, larger) = (one.min(other), one.max(other));
    smaller < larger && sizes.range(smaller + 1..larger).next().is_none()
}
