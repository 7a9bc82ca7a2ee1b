//! Likelihoods of tokens together with their text, which may be held back: nothing of a stop string is told, not even how likely it was.

use std::collections::VecDeque;

use crate::sampling::Likelihood;

/// A token's own likelihood, and the likeliest alternatives.
pub(crate) type Likelihoods = (Likelihood, Vec<Likelihood>);

/// Tokens whose text has not been given out. Places are bytes of the answer's text.
#[derive(Debug, Default)]
pub(crate) struct Paired {
    waiting: VecDeque<(usize, usize, Likelihoods)>,
    /// Text that tokens have made, and what of it was given out.
    made: usize,
    given: usize,
}

impl Paired {
    /// Takes a token that has made so much text.
    pub(crate) fn push(&mut self, text_bytes: usize, likelihoods: Likelihoods) {
        self.waiting.push_back((self.made, self.made + text_bytes, likelihoods));
        self.made += text_bytes;
    }

    /// Text that is given out now, cut into that of single tokens. A token without text goes with what is before it, unless
    /// the text has `ended` there.
    pub(crate) fn give(&mut self, text: &str, ended: bool) -> Vec<(String, Option<Likelihoods>)> {
        let first = self.given;
        let (mut pieces, mut at) = (Vec::new(), first);
        self.given += text.len();
        let given = self.given;
        let piece = |from: usize, to: usize| text[from - first..to - first].to_owned();
        let is_told = |&(start, end, _): &(usize, usize, _)| {
            start < given || (start == end && start == given && !ended)
        };
        while let Some((start, end, likelihoods)) = self.waiting.pop_front_if(|token| is_told(token)) {
            if start > at {
                pieces.push((piece(at, start), None));
                at = start;
            }
            let until = end.min(given).max(at);
            pieces.push((piece(at, until), Some(likelihoods)));
            at = until;
        }
        if at < given {
            pieces.push((piece(at, given), None));
        }
        pieces
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tokens by the text they make; what is given out at a time with the tokens that go with it.
    fn given(paired: &mut Paired, text: &str, ended: bool) -> Vec<(String, Option<i64>)> {
        let pieces = paired.give(text, ended).into_iter();
        pieces.map(|(text, of)| (text, of.map(|(own, _)| own.token))).collect()
    }

    fn token(token: i64) -> Likelihoods {
        (Likelihood { token, logprob: -1.0 }, Vec::new())
    }

    #[test]
    fn tokens_of_a_stop_string_are_never_told() {
        let mut paired = Paired::default();
        paired.push(2, token(1));
        assert_eq!(given(&mut paired, "ab", false), [("ab".to_owned(), Some(1))]);
        for number in 2..4 {
            paired.push(1, token(number));
            assert_eq!(given(&mut paired, "", false), []);
        }
        paired.push(1, token(4));
        assert_eq!(given(&mut paired, "", true), []);
    }

    #[test]
    fn text_that_was_held_back_comes_with_its_tokens() {
        let mut paired = Paired::default();
        for number in 1..4 {
            paired.push(1, token(number));
        }
        let all = [("a".to_owned(), Some(1)), ("b".to_owned(), Some(2)), ("c".to_owned(), Some(3))];
        assert_eq!(given(&mut paired, "abc", false), all);
        // A token of which the stop string takes the end, and the first of a character's two.
        paired.push(0, token(4));
        assert_eq!(given(&mut paired, "", false), [(String::new(), Some(4))]);
        paired.push(4, token(5));
        assert_eq!(given(&mut paired, "de", false), [("de".to_owned(), Some(5))]);
        assert_eq!(given(&mut paired, "f", true), [("f".to_owned(), None)]);
    }
}
