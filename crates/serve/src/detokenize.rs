//! Text from tokens as they come: whole characters only, and nothing of a stop string.
//!
//! A character may take several tokens, and what a token reads as may depend on the one before. So text is made of all tokens
//! since the last piece, and a piece that ends in the middle of a character waits. Text that could become a stop string waits too.
//!
//! How a token reads also depends on whether it stands at the beginning: decoders take the space before a first word away. So
//! there is always a token before the new ones that can be seen, at first one of the prompt's.

use ferrospeed_text::{Codec, TextError};

use crate::request::Special;

/// What a decoder writes for bytes that are no character, or not yet one.
const UNFINISHED: char = char::REPLACEMENT_CHARACTER;
/// Tokens that an unfinished character can have, at most: each is a byte or more of its four.
const UNFINISHED_TOKENS: usize = 3;
/// Tokens that wait for such a place, at most.
const MOST_WAITING: usize = 16;
/// Tokens of the prompt that are looked at: the last that can be seen is among them, unless a template ends in more that hide.
const OF_PROMPT: usize = 8;

/// Turns the tokens of one answer into text.
#[derive(Debug, Default)]
pub struct Detokenizer {
    tokens: Vec<i64>,
    /// Tokens before this are not looked at any more.
    context: usize,
    /// Tokens before this have been given out as text.
    given: usize,
    special: Special,
}

impl Detokenizer {
    /// For what follows a prompt.
    pub fn after(prompt: &[i64], special: Special) -> Detokenizer {
        let tokens = prompt[prompt.len().saturating_sub(OF_PROMPT)..].to_vec();
        Detokenizer { given: tokens.len(), context: 0, tokens, special }
    }

    /// Takes a token; gives the text that is certain now.
    pub fn push(&mut self, codec: &Codec, token: i64) -> Result<String, TextError> {
        self.tokens.push(token);
        let text = self.decode(codec, &self.tokens[self.context..])?;
        if !text.ends_with(UNFINISHED) {
            return self.give(codec, &text, self.tokens.len());
        }
        let waiting = self.tokens.len() - self.given;
        if waiting > UNFINISHED_TOKENS {
            // So many tokens are more than one character: the first of them will never be part of one. They are cut off
            // where both sides read alone as they do together.
            let last = self.tokens.len() - UNFINISHED_TOKENS;
            for cut in (self.given + 1..=last).rev() {
                let first = self.decode(codec, &self.tokens[self.context..cut])?;
                if first.clone() + &self.decode(codec, &self.tokens[cut..])? == text {
                    return self.give(codec, &first, cut);
                }
            }
            if waiting > MOST_WAITING {
                return self.give(codec, &self.decode(codec, &self.tokens[self.context..last])?, last);
            }
        }
        Ok(String::new())
    }

    /// What is left when no token follows.
    pub fn finish(&mut self, codec: &Codec) -> Result<String, TextError> {
        let text = self.decode(codec, &self.tokens[self.context..])?;
        self.give(codec, &text, self.tokens.len())
    }

    fn decode(&self, codec: &Codec, ids: &[i64]) -> Result<String, TextError> {
        match self.special {
            Special::Hidden => codec.decode(ids),
            Special::Shown => codec.decode_all(ids),
        }
    }

    /// `text`: what the tokens read as from the context to `until`.
    fn give(&mut self, codec: &Codec, text: &str, until: usize) -> Result<String, TextError> {
        let before = self.decode(codec, &self.tokens[self.context..self.given])?;
        let new = match text.strip_prefix(&before) {
            Some(new) => new.to_owned(),
            // Bytes that were a character are none with what follows them: tokenizers that write characters as bytes take all
            // bytes in a row as one. What was given stays.
            None => self.decode(codec, &self.tokens[self.given..until])?,
        };
        // What hides is no beginning.
        if !new.is_empty() {
            self.context = self.given;
        }
        self.given = until;
        Ok(new)
    }
}

/// Holds back what may be the beginning of a stop string.
#[derive(Debug, Default)]
pub struct StopStrings {
    stops: Vec<String>,
    held: String,
    ended_by: Option<usize>,
}

impl StopStrings {
    /// Ends texts at the first of these.
    pub fn new(stops: Vec<String>) -> StopStrings {
        StopStrings { stops, held: String::new(), ended_by: None }
    }

    /// Takes text; gives what is certain, and whether a stop string ended it.
    pub fn push(&mut self, text: &str) -> (String, bool) {
        self.held.push_str(text);
        let places = self.stops.iter().enumerate().filter(|(_, stop)| !stop.is_empty());
        let first = places.filter_map(|(index, stop)| Some((self.held.find(stop)?, index))).min();
        if let Some((place, index)) = first {
            self.held.truncate(place);
            self.ended_by = Some(index);
            return (std::mem::take(&mut self.held), true);
        }
        let waits = (1..=self.held.len())
            .rev()
            .filter(|&length| self.held.is_char_boundary(self.held.len() - length))
            .find(|&length| {
                let tail = &self.held[self.held.len() - length..];
                self.stops.iter().any(|stop| stop.len() > length && stop.starts_with(tail))
            });
        let kept = self.held.split_off(self.held.len() - waits.unwrap_or(0));
        (std::mem::replace(&mut self.held, kept), false)
    }

    /// Which of them ended it.
    pub fn ended_by(&self) -> Option<usize> {
        self.ended_by
    }

    /// What is left when no text follows.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use ferrospeed_testkit::property::Random;

    use super::*;

    fn pieces(bytes: &[u8]) -> Vec<String> {
        let mut detokenizer = Detokenizer::default();
        let mut pieces: Vec<String> =
            bytes.iter().map(|&byte| detokenizer.push(&Codec::Bytes, i64::from(byte)).unwrap()).collect();
        pieces.push(detokenizer.finish(&Codec::Bytes).unwrap());
        pieces
    }

    #[test]
    fn characters_come_out_whole() {
        let text = "aé€😀z";
        let pieces = pieces(text.as_bytes());
        assert_eq!(pieces.concat(), text);
        let spoken: Vec<&str> = pieces.iter().map(String::as_str).filter(|piece| !piece.is_empty()).collect();
        assert_eq!(spoken, ["a", "é", "€", "😀", "z"]);
    }

    #[test]
    fn pieces_of_anything_add_up_to_the_whole() {
        for seed in 0..2000 {
            let mut random = Random(seed);
            let alphabet = ["😀", "é", "x", "\u{fffd}"];
            let mut bytes = Vec::new();
            for _ in 0..random.below(12) {
                let text = random.pick(&alphabet).as_bytes();
                // Some characters are cut off, so that garbage stands before whole ones.
                bytes.extend_from_slice(&text[..1 + random.below(text.len())]);
            }
            assert_eq!(pieces(&bytes).concat(), String::from_utf8_lossy(&bytes), "{bytes:x?}");
        }
    }

    /// As LLaMA's: words with their spaces, bytes for what is no word, and a special token.
    fn words_and_bytes() -> Codec {
        let words = ["<unk>", "<s>", "▁of", "▁a", "cup", "<0x41>", "<0xC3>", "<0xA9>", "<0xE9>"];
        let vocabulary: serde_json::Map<String, serde_json::Value> =
            words.iter().enumerate().map(|(id, word)| ((*word).into(), id.into())).collect();
        let tokenizer = serde_json::json!({
            "added_tokens": [{"id": 1, "content": "<s>", "special": true, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false}],
            "model": {"type": "BPE", "vocab": vocabulary, "merges": [], "unk_token": "<unk>", "byte_fallback": true},
            "decoder": {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
                {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ]},
        });
        let path = std::path::Path::new("tokenizer.json");
        Codec::from_bytes(path, tokenizer.to_string().as_bytes(), &serde_json::Value::Null).unwrap()
    }

    fn text_after(codec: &Codec, prompt: &[i64], tokens: &[i64]) -> String {
        let mut detokenizer = Detokenizer::after(prompt, Special::Hidden);
        let pieces: Vec<String> =
            tokens.iter().map(|&token| detokenizer.push(codec, token).unwrap()).collect();
        pieces.concat() + &detokenizer.finish(codec).unwrap()
    }

    #[test]
    fn spaces_stay_behind_prompts_and_behind_tokens_that_hide() {
        let codec = words_and_bytes();
        assert_eq!(text_after(&codec, &[1, 3, 4], &[2, 3, 4]), " of acup", "the prompt is before it");
        assert_eq!(text_after(&codec, &[], &[3, 4, 1, 2, 1, 1, 3]), "acup of a");
    }

    #[test]
    fn words_are_whole_whatever_bytes_stand_beside_them() {
        let codec = words_and_bytes();
        assert_eq!(text_after(&codec, &[4], &[4, 5, 6, 7, 4]), "cupAécup", "bytes that are characters");
        for seed in 0..2000 {
            let mut random = Random(seed);
            let tokens: Vec<i64> = (0..random.below(14)).map(|_| 1 + random.below(8) as i64).collect();
            let text = text_after(&codec, &[4], &tokens);
            let words = |token: &i64| match token {
                2 => " of",
                3 => " a",
                4 => "cup",
                _ => "",
            };
            let expected: String = tokens.iter().map(words).collect();
            let seen: String = text.chars().filter(|c| c.is_ascii_lowercase() || *c == ' ').collect();
            assert_eq!(seen, expected, "{tokens:?}: {text}");
        }
    }

    #[test]
    fn a_stream_of_garbage_is_not_held_back_for_ever() {
        let mut detokenizer = Detokenizer::default();
        let text: String = (0..100).map(|_| detokenizer.push(&Codec::Bytes, 0xff).unwrap()).collect();
        assert!(text.chars().count() >= 96, "{}", text.chars().count());
    }

    #[test]
    fn nothing_of_a_stop_string_is_seen() {
        let stops = || StopStrings::new(vec!["STOP".into(), "###".into(), String::new()]);
        let mut one = stops();
        assert_eq!(one.push("go S"), ("go ".into(), false));
        assert_eq!(one.push("TO"), (String::new(), false));
        assert_eq!(one.push("P on"), (String::new(), true));
        let mut other = stops();
        assert_eq!(other.push("a#"), ("a".into(), false));
        assert_eq!(other.push("#b"), ("##b".into(), false), "it was none");
        assert_eq!(other.push("é##"), ("é".into(), false));
        assert_eq!(other.finish(), "##");
        assert_eq!(stops().push("x###STOP"), ("x".into(), true), "the first one ends it");
    }

    #[test]
    fn a_stop_string_is_found_however_the_text_is_cut() {
        let text = "aaab aab aaaab#";
        for seed in 0..500 {
            let mut random = Random(seed);
            let (mut stops, mut seen, mut rest) =
                (StopStrings::new(vec!["aaaab".into()]), String::new(), text);
            while !rest.is_empty() {
                let (piece, after) = rest.split_at(1 + random.below(rest.len()));
                rest = after;
                let (out, ended) = stops.push(piece);
                seen += &out;
                if ended {
                    break;
                }
            }
            assert_eq!(seen, "aaab aab ");
        }
    }
}
