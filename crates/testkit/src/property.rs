//! Seeded random input for readers of files and peers: the same on every run, so that a failure can be repeated.
//!
//! The ordinary suite tries a bounded number of inputs. `FERROSPEED_PROPERTY_ROUNDS=N` tries N times as many.

/// The environment variable that multiplies the number of inputs.
pub const ROUNDS_VARIABLE: &str = "FERROSPEED_PROPERTY_ROUNDS";

/// How many inputs to try where the ordinary suite tries `usual`.
///
/// # Panics
/// When the variable is set to something that is no positive number.
pub fn rounds(usual: usize) -> usize {
    let factor = std::env::var(ROUNDS_VARIABLE).ok().filter(|text| !text.is_empty()).map_or(1, |text| {
        let factor = text.parse().ok().filter(|factor| *factor > 0usize);
        factor.unwrap_or_else(|| panic!("{ROUNDS_VARIABLE}={text} is no positive number"))
    });
    usual.saturating_mul(factor)
}

/// SplitMix64 (Steele, Lea and Flood 2014).
#[derive(Debug, Clone)]
pub struct Random(pub u64);

impl Random {
    /// Any number.
    #[allow(clippy::should_implement_trait, reason = "it never ends")]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`, or 0 where that is 0.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }

    /// One of some pieces.
    pub fn pick<'a>(&mut self, from: &[&'a str]) -> &'a str {
        from[self.below(from.len())]
    }

    /// Changes, cuts off, removes or repeats some bytes.
    pub fn damage(&mut self, bytes: &mut Vec<u8>) {
        for _ in 0..=self.below(6) {
            if bytes.is_empty() {
                return;
            }
            let at = self.below(bytes.len());
            let end = (at + 1 + self.below(16)).min(bytes.len());
            match self.below(5) {
                0 => bytes[at] = self.next() as u8,
                1 => bytes[at] ^= 1 << self.below(8),
                2 => bytes.truncate(at),
                3 => drop(bytes.drain(at..end)),
                _ => {
                    let copy = bytes[at..end].to_vec();
                    bytes.splice(at..at, copy);
                }
            }
        }
    }
}
