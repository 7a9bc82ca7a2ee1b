//! Which sequence is the n-th of a run.
//!
//! Every epoch visits every sequence once, in an order that a keyed permutation gives without holding a list: a
//! Feistel network over the next power of four, walked until it lands inside (Black, Rogaway: "Ciphers with arbitrary
//! finite domains", 2002). The n-th sample of the whole job is therefore a pure function of (seed, n), whatever the
//! number of ranks, and a position to resume from is n itself.

use serde::{Deserialize, Serialize};

/// Where a run stands in its data: how many samples all ranks together have taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Position {
    /// Samples taken.
    pub samples: u64,
}

/// The order of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sampler {
    count: u64,
    seed: u64,
}

const ROUNDS: u64 = 6;

impl Sampler {
    /// An endless order over `count` sequences.
    ///
    /// # Panics
    /// When `count` is zero: [`crate::Sequences`] refuses that.
    pub fn new(count: u64, seed: u64) -> Sampler {
        assert!(count > 0, "an order needs something to order");
        Sampler { count, seed }
    }

    /// The sequence that is sample `n` of the job.
    pub fn sequence(&self, n: u64) -> u64 {
        self.within_epoch(n / self.count, n % self.count)
    }

    /// The sequence that is the `within`-th of an epoch, which is below their number.
    pub(crate) fn within_epoch(&self, epoch: u64, within: u64) -> u64 {
        // Half the bits of the next power of four.
        let bits = (64 - (self.count - 1).leading_zeros()).div_ceil(2).max(1);
        let mut value = within;
        loop {
            value = self.feistel(value, epoch, bits);
            if value < self.count {
                return value;
            }
        }
    }

    fn feistel(&self, value: u64, epoch: u64, bits: u32) -> u64 {
        let mask = (1u64 << bits) - 1;
        let (mut left, mut right) = (value >> bits, value & mask);
        for round in 0..ROUNDS {
            let mixed = mix(right ^ mix(self.seed ^ mix(epoch.wrapping_mul(ROUNDS).wrapping_add(round))));
            (left, right) = (right, left ^ (mixed & mask));
        }
        (left << bits) | right
    }

    /// The samples that `rank` of `ranks` takes for micro-batch `micro` of a step that starts at `position`: within a
    /// step, micro-batches come one after the other, ranks side by side.
    pub fn micro_batch(
        &self,
        position: Position,
        micro: u64,
        rank: u64,
        ranks: u64,
        size: u64,
    ) -> impl Iterator<Item = u64> + use<> {
        let first = position.samples + (micro * ranks + rank) * size;
        let sampler = *self;
        (first..first + size).map(move |n| sampler.sequence(n))
    }
}

/// The finaliser of SplitMix64 (Steele, Lea, Flood, 2014).
pub(crate) fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_epoch_visits_every_sequence_once_in_an_order_of_its_own() {
        for count in [1, 2, 3, 17, 100, 1024, 1025] {
            let sampler = Sampler::new(count, 7);
            let epoch = |epoch: u64| -> Vec<u64> {
                (0..count).map(|n| sampler.sequence(epoch * count + n)).collect()
            };
            for index in 0..3 {
                let mut seen = epoch(index);
                seen.sort_unstable();
                assert_eq!(seen, (0..count).collect::<Vec<_>>());
            }
            if count > 10 {
                assert_ne!(epoch(0), epoch(1));
                assert_ne!(epoch(0), (0..count).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn the_order_of_a_step_does_not_depend_on_the_number_of_ranks() {
        let sampler = Sampler::new(1000, 3);
        let step = |ranks: u64, micro_batches: u64, size: u64| -> Vec<u64> {
            let position = Position { samples: 24 };
            (0..micro_batches)
                .flat_map(|micro| (0..ranks).map(move |rank| (micro, rank)))
                .flat_map(|(micro, rank)| sampler.micro_batch(position, micro, rank, ranks, size))
                .collect()
        };
        assert_eq!(step(1, 1, 24), step(4, 2, 3));
        assert_eq!(step(1, 1, 24), step(2, 3, 4));
    }
}
