//! Guesses at what follows, so that one pass can settle several tokens of a text.
//!
//! A pass that reads all weights for one token could as well have computed a few: guessed tokens are computed behind the known
//! ones, and each is kept while it is what would have been chosen anyway. A choice is a function of logits, seed and place
//! (`sampling.rs`), and logits do not depend on what shares a pass. So an answer is the same, token for token, with guesses and
//! without: at temperature 0, and drawn too (accepting a guess if the draw gives it is the rejection rule of Leviathan et al.
//! 2023, equation 1, for a guess that is certain).

/// Tokens of the end of a text that are looked for, at most and at least.
const LONGEST: usize = 4;
const SHORTEST: usize = 2;
/// How far back is looked.
const REACH: usize = 1 << 14;

/// Where guesses come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Speculation {
    /// None are made.
    #[default]
    Off,
    /// What followed in the text itself when it was last as it is now (prompt look-up), up to so many tokens.
    LookUp {
        /// Guesses for a pass, at most.
        tokens: usize,
    },
}

impl Speculation {
    /// Up to `most` tokens that may follow `tokens`.
    pub fn guess(self, tokens: &[i64], most: usize) -> Vec<i64> {
        match self {
            Speculation::Off => Vec::new(),
            Speculation::LookUp { tokens: own } => look_up(tokens, most.min(own)),
        }
    }
}

/// What followed the last tokens of a text where they stood before: the longest such end, the latest such place.
fn look_up(tokens: &[i64], most: usize) -> Vec<i64> {
    let text = &tokens[tokens.len().saturating_sub(REACH)..];
    for length in (SHORTEST..=LONGEST).rev() {
        let Some(begin) = text.len().checked_sub(length) else { continue };
        let end = &text[begin..];
        let places = text[..text.len() - 1].windows(length).enumerate().rev();
        if let Some((place, _)) = places.into_iter().find(|(_, window)| *window == end) {
            let next = place + length;
            return text[next..text.len().min(next + most)].to_vec();
        }
    }
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_followed_the_longest_same_end_last_is_guessed() {
        let text = [1, 2, 3, 9, 1, 2, 4, 7, 8, 3, 1, 2];
        assert_eq!(look_up(&text, 3), [4, 7, 8], "the latest place");
        let text = [5, 1, 2, 3, 9, 6, 1, 2, 4, 7, 5, 1, 2];
        assert_eq!(look_up(&text, 2), [3, 9], "the longest end");
        assert_eq!(look_up(&[1, 1, 1], 4), [1], "an end may overlap what follows it");
        assert!(look_up(&[1, 2, 3, 1], 4).is_empty(), "one token says little");
        assert!(look_up(&[], 4).is_empty() && look_up(&text, 0).is_empty());
        assert!(Speculation::Off.guess(&text, 9).is_empty());
        assert_eq!(Speculation::LookUp { tokens: 1 }.guess(&text, 9), [3]);
    }
}
