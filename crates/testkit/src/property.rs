//! Seeded random input for readers of files and peers: the same on every run, so that a failure can be repeated.
//!
//! The ordinary suite tries a bounded number of inputs. With `FERROSPEED_PROPERTY_SECONDS=N` a test goes on to further
//! seeds until N seconds have passed.

use std::time::{Duration, Instant};

/// The environment variable that says how long each test goes on.
pub const SECONDS_VARIABLE: &str = "FERROSPEED_PROPERTY_SECONDS";

/// The seeds of the inputs to try: the first `usual`, and more while there is time.
///
/// # Panics
/// When the variable is set to something that is no number of seconds.
pub fn seeds(usual: u64) -> impl Iterator<Item = u64> {
    let seconds = std::env::var(SECONDS_VARIABLE).ok().filter(|text| !text.is_empty()).map_or(0, |text| {
        text.parse().unwrap_or_else(|_| panic!("{SECONDS_VARIABLE}={text} is no number of seconds"))
    });
    let (begin, limit) = (Instant::now(), Duration::from_secs(seconds));
    (0..).take_while(move |seed| *seed < usual || begin.elapsed() < limit)
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
