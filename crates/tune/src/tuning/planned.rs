//! Our own search: begin where a model of costs says it is best, and let a handful of measurements correct it.
//!
//! A candidate is a [`Layout`]; those that the memory plan says do not fit are not among them. The model's favourite is measured.
//! What was measured says how the machine differs from what the model takes it to be ([`machine`](super::machine)), and by how
//! much layouts like it lie beside that; then the candidate is next of which the most is to be expected beyond the best so far,
//! until none is worth a run. One that fails by memory rules out all that are planned to need as much, and makes those doubtful
//! that need little less; one that fails otherwise rules out its like.

use super::machine::{Machine, Parts, Prediction};
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

    /// Whether what fails in one for another reason than memory would fail in the other.
    fn is_like(&self, other: &Lane) -> bool {
        Lane { recompute: other.recompute, ..*self } == *other
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
/// What a run must be expected to bring, as a share of the best.
const WORTH_A_RUN: f64 = 0.0005;
/// A first measurement that is off by more than this, as a logarithm, has another unit than samples per second.
const OTHER_UNIT: f64 = 5.0;
/// What needs less than this share of what was too much is taken to fit.
const SURE_ROOM: f64 = 0.85;

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
    /// What a rank is planned to need of its device, or of memory where it has none, and of its host besides.
    pub bytes: [u64; 2],
    /// What a step is made of.
    pub parts: Parts,
    /// Samples of a step.
    pub samples: f64,
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
    let mut seen = Seen::default();
    while seen.tried.len() < runs {
        let Some(place) = seen.next(&left) else { break };
        let candidate = left.remove(place);
        let outcome = measure(&candidate.layout)?;
        seen.note(&candidate, outcome);
    }
    Ok(seen.tried)
}

/// What has been measured so far.
#[derive(Default)]
struct Seen {
    tried: Vec<Tried>,
    /// Parts and the logarithm of seconds of each that was measured, and its layout.
    steps: Vec<(Parts, f64)>,
    layouts: Vec<Layout>,
    /// The best so far, as the logarithm of what it measured.
    best: Option<f64>,
    /// Whether more is measured by less time per step, and not by more samples per second.
    is_latency: bool,
    /// The logarithm of what seconds are multiplied by where something else is measured.
    unit: f64,
    failed: Vec<Lane>,
    /// What runs needed that had memory enough, and what those needed that had not.
    fitted: Vec<[u64; 2]>,
    short: Vec<[u64; 2]>,
}

impl Seen {
    fn note(&mut self, candidate: &Candidate, outcome: Outcome) {
        let Candidate { layout, expected, bytes, parts, samples } = *candidate;
        self.tried.push(Tried { candidate: layout, expected, outcome });
        match outcome {
            Outcome::OutOfMemory => self.short.push(bytes),
            Outcome::Failed => self.failed.push(Lane::of(&layout)),
            Outcome::Measured(value) => {
                self.fitted.push(bytes);
                self.is_latency = value < 0.0;
                let value = value.abs().max(f64::MIN_POSITIVE);
                let log_s = if self.is_latency { value.ln() } else { (samples / value).ln() };
                if self.steps.is_empty() {
                    let off = log_s - (samples / expected).ln();
                    self.unit = if off.abs() > OTHER_UNIT { off } else { 0.0 };
                }
                let log_s = log_s - self.unit;
                self.steps.push((parts, log_s));
                self.layouts.push(layout);
                let log = self.value_of(samples, log_s);
                self.best = Some(self.best.map_or(log, |best| best.max(log)));
            }
        }
    }

    /// The logarithm of what is measured of a step of so many seconds; more is better.
    fn value_of(&self, samples: f64, log_s: f64) -> f64 {
        if self.is_latency { -log_s } else { samples.ln() - log_s }
    }

    /// Which of those left is tried next.
    fn next(&self, left: &[Candidate]) -> Option<usize> {
        let possible = left.iter().enumerate().filter(|(_, candidate)| {
            let lane = Lane::of(&candidate.layout);
            self.chance_of_room(candidate.bytes) > 0.0
                && !self.failed.iter().any(|failed| failed.is_like(&lane))
        });
        // Without a measurement the model is all there is.
        let Some(best) = self.best else {
            let score = |candidate: &Candidate| candidate.expected * self.chance_of_room(candidate.bytes);
            return most(possible.map(|(place, candidate)| (place, score(candidate))))
                .map(|(place, _)| place);
        };
        let machine = Machine::after(&self.steps);
        let off: Vec<f64> =
            self.steps.iter().map(|(parts, seen)| seen - machine.predict(parts).log_s).collect();
        let gain = |candidate: &Candidate| {
            let Prediction { log_s, deviation } = machine.predict(&candidate.parts);
            let value = self.value_of(candidate.samples, log_s + self.beside(&candidate.layout, &off));
            self.chance_of_room(candidate.bytes) * expected_gain(value - best, deviation)
        };
        let found = most(possible.map(|(place, candidate)| (place, gain(candidate))))?;
        (found.1 >= WORTH_A_RUN).then_some(found.0)
    }

    /// By how much layouts like this one lie beside what the machine's factors say.
    fn beside(&self, layout: &Layout, off: &[f64]) -> f64 {
        let (mut sum, mut weights) = (0.0, 1.0);
        for (tried, off) in self.layouts.iter().zip(off) {
            let octaves = (layout.micro_batch as f64 / tried.micro_batch as f64).log2().abs();
            let distance = f64::from(Lane::of(layout).distance(&Lane::of(tried))) + octaves / 2.0;
            let weight = IN_COMMON.powf(-distance);
            sum += weight * off;
            weights += weight;
        }
        sum / weights
    }

    /// How likely memory will do, for what is planned to need so much.
    fn chance_of_room(&self, bytes: [u64; 2]) -> f64 {
        let is_within = |most: &[u64; 2]| bytes[0] <= most[0] && bytes[1] <= most[1];
        if self.fitted.iter().any(is_within) {
            return 1.0;
        }
        let chances = self.short.iter().map(|short| {
            // Which of the two was short is not known: what needs less of the first is judged by that.
            let of = usize::from(bytes[0] >= short[0]);
            if bytes[of] >= short[of] {
                return 0.0;
            }
            let share = bytes[of] as f64 / short[of] as f64;
            ((1.0 - share) / (1.0 - SURE_ROOM)).min(1.0)
        });
        chances.fold(1.0, f64::min)
    }
}

fn most(scores: impl Iterator<Item = (usize, f64)>) -> Option<(usize, f64)> {
    scores.fold(None, |most: Option<(usize, f64)>, next| match most {
        Some(most) if most.1 >= next.1 => Some(most),
        _ => Some(next),
    })
}

/// How much better than the best something is expected to be, counting only where it is, that is `above` it on average
/// and may lie by `deviation` beside that: as logarithms (Jones, Schonlau and Welch, "Efficient global optimization of expensive
/// black-box functions", 1998).
fn expected_gain(above: f64, deviation: f64) -> f64 {
    let z = above / deviation;
    let density = (-0.5 * z * z).exp() / (2.0 * std::f64::consts::PI).sqrt();
    // The normal distribution, near enough, by the logistic one.
    let below = 1.0 / (1.0 + (-1.702 * z).exp());
    above * below + deviation * density
}
