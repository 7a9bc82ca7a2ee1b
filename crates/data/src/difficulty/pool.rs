//! Draws sequences from those that have come in, each once per pass.
//!
//! A pass draws every sequence that is in, or comes in before it is over, once; then the next begins. The n-th sample of a run is
//! drawn by a random number of (seed, n) from all that the pass has left, each alike likely. Those that came in together are
//! a stretch of the admission's order, and lie in an order of (seed, pass, stretch) that a keyed permutation gives, so what
//! has to be kept of a pass is how many of each stretch were drawn: the whole state of the sampler.

use serde::{Deserialize, Serialize};

use super::admission::{Admission, Digest};
use super::weights::Weights;
use crate::sampler::{Position, Sampler, mix};

/// Sets the numbers that choose stretches apart from those that order them.
const CHOICES: u64 = 0x6375_7272_6963_756c;

/// How far a pass is: what a checkpoint keeps.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pass {
    /// The admission it is of.
    of: Digest,
    /// Where its order starts.
    seed: u64,
    /// How many passes came before.
    number: u64,
    /// Where each stretch of the order ends, and how many of it were drawn.
    stretches: Vec<(u64, u64)>,
}

impl Pass {
    fn begin(of: Digest, seed: u64, number: u64) -> Pass {
        Pass { of, seed, number, stretches: Vec::new() }
    }

    fn end(&self) -> u64 {
        self.stretches.last().map_or(0, |stretch| stretch.0)
    }

    /// Where each stretch begins, how long it is, and how many of it were drawn.
    fn lengths(&self) -> impl Iterator<Item = (u64, u64, u64)> {
        let starts = std::iter::once(0).chain(self.stretches.iter().map(|stretch| stretch.0));
        starts.zip(&self.stretches).map(|(start, (end, drawn))| (start, end - start, *drawn))
    }

    /// Whether it can be of a pool of this size.
    fn makes_sense(&self, pool: u64) -> bool {
        let rises = self.stretches.is_sorted_by(|one, next| one.0 < next.0);
        rises && self.end() <= pool && self.lengths().all(|(_, length, drawn)| length > 0 && drawn <= length)
    }
}

/// The order of a run whose sequences come in by difficulty.
#[derive(Debug, Clone)]
pub struct PoolSampler {
    admission: Admission,
    pass: Pass,
    left: Weights,
}

impl PoolSampler {
    /// At the start of the first pass.
    pub fn new(admission: Admission, seed: u64) -> PoolSampler {
        let pass = Pass::begin(admission.digest(), seed, 0);
        PoolSampler { admission, pass, left: Weights::new(std::iter::empty()) }
    }

    /// The sequences of the samples `position..position + count` of the run, which are those of `step`, from 1.
    pub fn draw(&mut self, step: u64, position: Position, count: u64) -> Vec<u64> {
        self.grow(step);
        (0..count).map(|n| self.next(step, position.samples.wrapping_add(n))).collect()
    }

    /// Lets those in that come in by now.
    fn grow(&mut self, step: u64) {
        let pool = self.admission.pool(step);
        if pool > self.pass.end() {
            self.pass.stretches.push((pool, 0));
            self.left = Weights::new(self.pass.lengths().map(|(_, length, drawn)| length - drawn));
        }
    }

    fn next(&mut self, step: u64, n: u64) -> u64 {
        if self.left.total() == 0 {
            self.pass = Pass::begin(self.pass.of, self.pass.seed, self.pass.number.wrapping_add(1));
            self.grow(step);
        }
        let seed = self.pass.seed;
        let random = mix(mix(seed ^ CHOICES) ^ mix(n));
        let nth = (u128::from(random) * u128::from(self.left.total())) >> 64;
        let chosen = self.left.take(nth as u64);
        let start = chosen.checked_sub(1).map_or(0, |before| self.pass.stretches[before].0);
        let (end, drawn) = &mut self.pass.stretches[chosen];
        let order = Sampler::new(*end - start, mix(seed ^ mix(start)));
        let place = start + order.within_epoch(self.pass.number, *drawn);
        *drawn += 1;
        self.admission.sequence(place)
    }

    /// How far the pass is, for a checkpoint.
    pub fn pass(&self) -> &Pass {
        &self.pass
    }

    /// Goes on with a saved pass after `step`. False where it is of another admission or seed: then a first one begins.
    pub fn restore(&mut self, saved: &Pass, step: u64) -> bool {
        let own = Pass::begin(self.admission.digest(), self.pass.seed, 0);
        let goes_on = (saved.of, saved.seed) == (own.of, own.seed);
        let goes_on = goes_on && saved.makes_sense(self.admission.pool(step));
        self.pass = if goes_on { saved.clone() } else { own };
        self.left = Weights::new(self.pass.lengths().map(|(_, length, drawn)| length - drawn));
        goes_on
    }

    /// When sequences come in.
    pub fn admission(&self) -> &Admission {
        &self.admission
    }
}
