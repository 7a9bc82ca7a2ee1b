//! The bytes that each token stands for in the middle of a text, for those who must know what a token would write before it is
//! chosen: grammars that answers have to follow.
//!
//! Tokenizers say so in their decoders. Three ways are in use: every character of a token is a byte in disguise (GPT-2's), words
//! begin with `▁` and single bytes are written `<0x0A>` (SentencePiece's), or parts of words begin with `##` (BERT's).

use std::collections::HashMap;
use std::sync::LazyLock;

use serde_json::Value;
use tokenizers::Tokenizer;

/// What a token writes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Written {
    /// These bytes, which need not be whole characters.
    Bytes(Vec<u8>),
    /// Nothing that a reader sees: it has a meaning of its own, and this name.
    Special(String),
    /// It has no meaning.
    Nothing,
}

/// How a decoder makes text of tokens.
#[derive(Clone, Copy)]
enum Spelling {
    /// Characters are bytes in disguise.
    ByteLevel,
    /// `▁` is a space; `bytes`: `<0x0A>` is a byte.
    Metaspace { bytes: bool },
    /// `##` goes on with a word, anything else begins one.
    WordPiece,
    /// Tokens are what they write.
    Plain,
}

/// What every token of a tokenizer writes.
pub(crate) fn of_tokenizer(tokenizer: &Tokenizer, vocabulary: u64) -> Vec<Written> {
    let decoder = tokenizer.get_decoder().and_then(|decoder| serde_json::to_value(decoder).ok());
    let spelling = spelling(&decoder.unwrap_or_default());
    let added = tokenizer.get_added_tokens_decoder();
    let one = |id: u64| {
        let id = u32::try_from(id).ok()?;
        Some(match added.get(&id) {
            Some(token) if token.special => Written::Special(token.content.clone()),
            Some(token) => Written::Bytes(token.content.clone().into_bytes()),
            None => Written::Bytes(bytes_of(&tokenizer.id_to_token(id)?, spelling)),
        })
    };
    (0..vocabulary).map(|id| one(id).unwrap_or(Written::Nothing)).collect()
}

fn spelling(decoder: &Value) -> Spelling {
    let mut kinds = Vec::new();
    components(decoder, &mut kinds);
    let has = |kind: &str| kinds.iter().any(|component| component["type"] == kind);
    let spaces = || kinds.iter().any(|component| component["pattern"]["String"] == "▁");
    match () {
        () if has("ByteLevel") => Spelling::ByteLevel,
        () if has("Metaspace") || spaces() => Spelling::Metaspace { bytes: has("ByteFallback") },
        () if has("WordPiece") => Spelling::WordPiece,
        () => Spelling::Plain,
    }
}

fn components<'a>(decoder: &'a Value, found: &mut Vec<&'a Value>) {
    found.push(decoder);
    for inner in decoder["decoders"].as_array().into_iter().flatten() {
        components(inner, found);
    }
}

fn bytes_of(token: &str, spelling: Spelling) -> Vec<u8> {
    match spelling {
        Spelling::ByteLevel => {
            let bytes: Option<Vec<u8>> = token.chars().map(|char| DISGUISED.get(&char).copied()).collect();
            bytes.unwrap_or_else(|| token.as_bytes().to_vec())
        }
        Spelling::Metaspace { bytes } => match byte_name(token).filter(|_| bytes) {
            Some(byte) => vec![byte],
            None => token.replace('▁', " ").into_bytes(),
        },
        Spelling::WordPiece => match token.strip_prefix("##") {
            Some(rest) => rest.as_bytes().to_vec(),
            None => format!(" {token}").into_bytes(),
        },
        Spelling::Plain => token.as_bytes().to_vec(),
    }
}

/// The byte of `<0x0A>`.
fn byte_name(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() == 2 { u8::from_str_radix(digits, 16).ok() } else { None }
}

/// GPT-2's disguise: bytes that print stand for themselves, the others for characters from 256 on, in their order.
static DISGUISED: LazyLock<HashMap<char, u8>> = LazyLock::new(|| {
    let prints = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut next = 256u32;
    (0..=255u8)
        .filter_map(|byte| {
            let code = if prints(byte) {
                u32::from(byte)
            } else {
                next += 1;
                next - 1
            };
            Some((char::from_u32(code)?, byte))
        })
        .collect()
});

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn tokens_are_spelt_as_their_decoder_says() {
        let sentence_piece = json!({"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]});
        for (decoder, token, bytes) in [
            (json!({"type": "ByteLevel"}), "Ġa", &b" a"[..]),
            (json!({"type": "ByteLevel"}), "Ċ", b"\n"),
            (json!({"type": "ByteLevel"}), "Ã", &[0xC3]),
            (sentence_piece.clone(), "▁a", b" a"),
            (sentence_piece.clone(), "<0xE9>", &[0xE9]),
            (sentence_piece, "<0xE9", b"<0xE9"),
            (json!({"type": "Metaspace", "replacement": "▁"}), "<0xE9>", b"<0xE9>"),
            (json!({"type": "WordPiece"}), "##ing", b"ing"),
            (json!({"type": "WordPiece"}), "go", b" go"),
            (json!(null), "go", b"go"),
        ] {
            assert_eq!(bytes_of(token, spelling(&decoder)), bytes, "{token} by {decoder}");
        }
        let all: std::collections::BTreeSet<u8> = DISGUISED.values().copied().collect();
        assert_eq!((DISGUISED.len(), all.len()), (256, 256));
    }
}
