//! Counter-based random numbers: Philox 4×32-10.
//!
//! A number is a pure function of (seed, stream, step, position), so it does not depend on execution order, on
//! threads or on how work is spread over ranks. (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy
//! as 1, 2, 3", SC 2011.)

use std::cell::Cell;

/// Names one sequence of random numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RandomKey {
    /// The run's seed.
    pub seed: u64,
    /// Which use of random numbers: a dropout site, a parameter's initial value.
    pub stream: u32,
    /// Which step of the run.
    pub step: u32,
}

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

impl RandomKey {
    /// A key of step 0.
    #[inline]
    pub fn new(seed: u64, stream: u32) -> Self {
        RandomKey { seed, stream, step: 0 }
    }

    /// Four random words for block `index` of the sequence.
    #[inline(always)]
    pub fn block(&self, index: u64) -> [u32; 4] {
        let mut counter = [index as u32, (index >> 32) as u32, self.stream, self.step];
        let mut key = [self.seed as u32, (self.seed >> 32) as u32];
        for _ in 0..10 {
            let first = u64::from(MULTIPLIERS[0]) * u64::from(counter[0]);
            let second = u64::from(MULTIPLIERS[1]) * u64::from(counter[2]);
            counter = [
                (second >> 32) as u32 ^ counter[1] ^ key[0],
                second as u32,
                (first >> 32) as u32 ^ counter[3] ^ key[1],
                first as u32,
            ];
            key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
        }
        counter
    }

    /// The word at `position` of the sequence.
    #[inline]
    pub fn word(&self, position: u64) -> u32 {
        self.block(position / 4)[(position % 4) as usize]
    }

    /// A uniform number in [0, 1) with 24 bits.
    #[inline]
    pub fn uniform(&self, position: u64) -> f32 {
        uniform_from_word(self.word(position))
    }

    /// Standard normal numbers for positions `start..start + out.len()`, by the Box–Muller transform.
    ///
    /// Positions `2i` and `2i+1` share a pair of words, so any range gives the same numbers as the whole.
    pub fn fill_normal(&self, start: u64, out: &mut [f32]) {
        let mut rest = out;
        let mut position = start;
        while !rest.is_empty() {
            // A whole block gives four; the first and the last one may be wanted in part.
            let numbers = self.normal_block(position / 4);
            let skipped = (position % 4) as usize;
            let count = rest.len().min(4 - skipped);
            let (now, later) = rest.split_at_mut(count);
            now.copy_from_slice(&numbers[skipped..skipped + count]);
            (rest, position) = (later, position + count as u64);
        }
    }

    /// The four normal numbers of a block.
    fn normal_block(&self, index: u64) -> [f32; 4] {
        let words = self.block(index);
        let pair = |radius: u32, angle: u32| {
            // 1 - u lies in (0, 1], so the logarithm is finite.
            let radius = (-2.0 * f64::ln(1.0 - f64::from(uniform_from_word(radius)))).sqrt();
            let (sin, cos) = (std::f64::consts::TAU * f64::from(uniform_from_word(angle))).sin_cos();
            [(radius * cos) as f32, (radius * sin) as f32]
        };
        let ([a, b], [c, d]) = (pair(words[0], words[1]), pair(words[2], words[3]));
        [a, b, c, d]
    }
}

/// A uniform number in [0, 1) from one word.
#[inline(always)]
pub fn uniform_from_word(word: u32) -> f32 {
    (word >> 8) as f32 * (1.0 / 16_777_216.0)
}

/// Words below this are dropped with probability `p`.
#[inline]
pub fn drop_threshold(p: f32) -> u32 {
    (f64::from(p) * 4_294_967_296.0) as u32
}

/// A stream number for a name, so that a parameter's initial value depends on its name alone (FNV-1a).
pub fn stream_of_name(name: &str) -> u32 {
    name.bytes().fold(0x811C_9DC5, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

/// Where this thread's next random numbers come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RandomState {
    /// The run's seed.
    pub seed: u64,
    /// The current step.
    pub step: u32,
    /// The next stream to hand out.
    pub next_stream: u32,
}

thread_local! {
    static STATE: Cell<RandomState> = const { Cell::new(RandomState { seed: 0, step: 0, next_stream: 0 }) };
}

/// This thread's state.
pub fn state() -> RandomState {
    STATE.get()
}

/// Replaces this thread's state: the engine does at each micro-step, activation checkpointing for a recomputation.
pub fn set_state(state: RandomState) -> RandomState {
    STATE.replace(state)
}

/// The key for the next random op of this thread.
pub fn next_key() -> RandomKey {
    let mut state = STATE.get();
    let key = RandomKey { seed: state.seed, stream: state.next_stream, step: state.step };
    state.next_stream = state.next_stream.wrapping_add(1);
    STATE.set(state);
    key
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_matches_the_published_vectors() {
        // Known-answer tests of the Random123 distribution for philox4x32-10.
        let zero = RandomKey { seed: 0, stream: 0, step: 0 };
        assert_eq!(zero.block(0), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        let ones = RandomKey { seed: u64::MAX, stream: u32::MAX, step: u32::MAX };
        assert_eq!(ones.block(u64::MAX), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
    }

    #[test]
    fn a_slice_of_normals_equals_the_whole() {
        let key = RandomKey::new(7, 3);
        let mut whole = vec![0.0; 1001];
        key.fill_normal(0, &mut whole);
        let mut part = vec![0.0; 13];
        key.fill_normal(501, &mut part);
        assert_eq!(part, whole[501..514]);
        let mean = whole.iter().sum::<f32>() / 1001.0;
        let variance = whole.iter().map(|v| (v - mean).powi(2)).sum::<f32>() / 1001.0;
        assert!(mean.abs() < 0.15 && (variance - 1.0).abs() < 0.15, "mean {mean}, variance {variance}");
    }
}
