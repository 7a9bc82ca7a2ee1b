//! Our own search: begin where a model of costs says it is best, and let a handful of measurements correct it.
//!
//! A [`Candidate`] is a point on a small grid (stage, micro-batch, recomputation). Those that the memory plan says do not fit
//! are not tried. The model's favourite is measured, then, the most promising first, the favourites of the other stages and
//! ways to keep activations and the sizes beside the best so far, until none is better or the runs are used up: the model need
//! only be right about direction. A run that fails by memory rules out all that need more of it.

use std::collections::BTreeSet;

/// One point.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Candidate {
    /// ZeRO stage.
    pub stage: u8,
    /// Samples of a rank in a micro-batch.
    pub micro_batch: u64,
    /// Micro-batches of a step.
    pub accumulation: u64,
    /// Whether layers are computed again in backward.
    pub recompute: bool,
}

/// All but the sizes.
type Lane = (u8, bool);

impl Candidate {
    fn lane(&self) -> Lane {
        (self.stage, self.recompute)
    }
}

/// What a machine does, roughly.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Machine {
    /// Floating-point operations per second of one rank.
    pub flops_per_s: f64,
    /// Bytes per second between memory and cores.
    pub memory_bytes_per_s: f64,
    /// Bytes per second between ranks.
    pub link_bytes_per_s: f64,
    /// Tokens at which half of the speed is reached.
    pub half_speed_tokens: f64,
}

/// What a step is about.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Work {
    /// Parameters.
    pub parameters: f64,
    /// Bytes of a weight.
    pub bytes_per_weight: f64,
    /// Tokens of a sample.
    pub tokens_per_sample: f64,
    /// Ranks.
    pub ranks: f64,
}

/// Bytes that an update of one weight reads and writes: gradient, master and two moments.
const UPDATE_BYTES: f64 = 28.0;

impl Machine {
    /// Samples per second of all ranks that a candidate is expected to reach.
    pub fn samples_per_s(&self, work: &Work, candidate: &Candidate) -> f64 {
        let tokens = candidate.micro_batch as f64 * work.tokens_per_sample;
        let efficiency = tokens / (tokens + self.half_speed_tokens);
        // Six operations per weight and token, eight where forward runs twice.
        let operations = if candidate.recompute { 8.0 } else { 6.0 } * work.parameters * tokens;
        let compute_s = operations / (self.flops_per_s * efficiency);
        let others = work.ranks - 1.0;
        let weights_s = work.parameters * work.bytes_per_weight * others / work.ranks / self.link_bytes_per_s;
        let accumulation = candidate.accumulation as f64;
        // Gathers and reductions: two and one of all weights per micro-batch in stage 3, one per micro-batch and a gather
        // per step in stage 2, both once per step below.
        let passes = match candidate.stage {
            0 | 1 => 2.0,
            2 => accumulation + 1.0,
            _ => 3.0 * accumulation,
        };
        let updated = if candidate.stage == 0 { work.parameters } else { work.parameters / work.ranks };
        let update_s = updated * UPDATE_BYTES / self.memory_bytes_per_s;
        let samples = candidate.micro_batch as f64 * accumulation * work.ranks;
        samples / (compute_s * accumulation + passes * weights_s + update_s)
    }
}

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

/// A candidate, what was expected of it and what it measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tried {
    /// Which.
    pub candidate: Candidate,
    /// What the model expected.
    pub expected: f64,
    /// What became of it.
    pub outcome: Outcome,
}

/// Measures at most `runs` of the candidates, each with what is expected of it; more is better. Returns them in the order
/// they ran.
pub fn search<E>(
    candidates: &[(Candidate, f64)],
    runs: usize,
    mut measure: impl FnMut(&Candidate) -> Result<Outcome, E>,
) -> Result<Vec<Tried>, E> {
    let mut left: Vec<(Candidate, f64)> = candidates.to_vec();
    left.sort_by(|one, other| other.1.total_cmp(&one.1).then(one.0.cmp(&other.0)));
    let sizes: BTreeSet<u64> = candidates.iter().map(|(candidate, _)| candidate.micro_batch).collect();
    let mut tried: Vec<Tried> = Vec::new();
    while tried.len() < runs {
        let mut best: Option<(&Candidate, f64)> = None;
        for Tried { candidate, outcome, .. } in &tried {
            let Some(value) = outcome.value() else { continue };
            if best.is_none_or(|(_, found)| value > found) {
                best = Some((candidate, value));
            }
        }
        let is_known = |lane: Lane| {
            tried.iter().any(|tried| tried.candidate.lane() == lane && tried.outcome != Outcome::OutOfMemory)
        };
        let place = left.iter().position(|(next, _)| match best {
            Some((best, _)) => !is_known(next.lane()) || are_beside(&sizes, next, best),
            None => true,
        });
        let Some(place) = place else { break };
        let (candidate, expected) = left.remove(place);
        let outcome = measure(&candidate)?;
        if outcome == Outcome::OutOfMemory {
            left.retain(|(next, _)| !needs_as_much(next, &candidate));
        }
        tried.push(Tried { candidate, expected, outcome });
    }
    Ok(tried)
}

/// Whether one needs at least the memory of another.
fn needs_as_much(one: &Candidate, other: &Candidate) -> bool {
    one.micro_batch >= other.micro_batch && one.stage <= other.stage && one.recompute <= other.recompute
}

/// Whether two differ in the micro-batch alone, with no other size between theirs.
fn are_beside(sizes: &BTreeSet<u64>, one: &Candidate, other: &Candidate) -> bool {
    let (smaller, larger) = (one.micro_batch.min(other.micro_batch), one.micro_batch.max(other.micro_batch));
    one.lane() == other.lane() && smaller < larger && sizes.range(smaller + 1..larger).next().is_none()
}
