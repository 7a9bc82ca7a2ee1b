//! What tells one stream of tokens from another of the same length, for a run that goes on.
//!
//! It is of the tokens, and of samples of which are learnt, and not of files, which may have moved, or lie in another format. Of a stream of up to 16 Mi tokens every one
//! counts; of a longer one 1024 blocks, the first and the last among them: a change between those is not seen.

use serde::{Deserialize, Serialize};

use crate::TokenStream;
use crate::error::Result;

const BLOCK: u64 = 16 << 10;
const MAX_BLOCKS: u64 = 1024;

/// Of a stream of tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fingerprint {
    /// How many tokens there are.
    pub tokens: u64,
    /// How many of them it is of.
    pub compared: u64,
    /// Their CRC-32.
    pub checksum: u32,
}

impl Fingerprint {
    /// Reads what it is of.
    pub fn of(stream: &dyn TokenStream) -> Result<Fingerprint> {
        let (tokens, mut compared) = (stream.len(), 0);
        let blocks = tokens.div_ceil(BLOCK);
        let looked_at = blocks.min(MAX_BLOCKS);
        let (mut sum, mut block) = (crc32fast::Hasher::new(), vec![0; BLOCK as usize]);
        for index in 0..looked_at {
            // The last is the last of the stream.
            let place = if looked_at < 2 { 0 } else { index * (blocks - 1) / (looked_at - 1) };
            let count = BLOCK.min(tokens - place * BLOCK);
            let block = &mut block[..count as usize];
            stream.read(place * BLOCK, block)?;
            block.iter().for_each(|token| sum.update(&token.to_le_bytes()));
            let marks = stream.marks(place * BLOCK, block.len())?;
            marks.into_iter().for_each(|marks| sum.update(&marks));
            compared += count;
        }
        Ok(Fingerprint { tokens, compared, checksum: sum.finalize() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Synthetic;

    /// A stream with one token changed.
    struct Changed(Synthetic, u64);

    impl TokenStream for Changed {
        fn len(&self) -> u64 {
            self.0.len()
        }

        fn vocabulary(&self) -> Option<u64> {
            None
        }

        fn read(&self, start: u64, out: &mut [i64]) -> Result<()> {
            self.0.read(start, out)?;
            let place = self.1.checked_sub(start).map(|place| place as usize);
            place.and_then(|place| out.get_mut(place)).into_iter().for_each(|token| *token += 1);
            Ok(())
        }

        fn place(&self, token: u64) -> String {
            self.0.place(token)
        }
    }

    #[test]
    fn one_token_makes_another_stream() {
        let small = |seed: u64| Synthetic::new(40_000, 100, seed);
        let of = |stream: &dyn TokenStream| Fingerprint::of(stream).unwrap();
        assert_eq!(of(&small(1)), of(&small(1)));
        assert_eq!(of(&small(1)).compared, 40_000);
        for place in [0, 16_383, 16_384, 39_999] {
            assert_ne!(of(&small(1)), of(&Changed(small(1), place)), "{place}");
        }
        assert_ne!(of(&small(1)), of(&small(2)));
        assert_eq!(of(&Synthetic::new(0, 100, 1)).compared, 0);
    }

    #[test]
    fn of_a_long_stream_both_ends_count() {
        let long = |place: u64| Changed(Synthetic::new(20_000_001, 100, 1), place);
        let of = |place: u64| Fingerprint::of(&long(place)).unwrap();
        let same = of(u64::MAX);
        assert!(same.compared < same.tokens && same.compared > 1023 * BLOCK);
        assert!(of(0) != same && of(20_000_000) != same);
    }
}
