//! Text to token ids and back: by a Hugging Face `tokenizer.json`, or one token per byte.

use std::ops::Range;
use std::path::{Path, PathBuf};

use tokenizers::Tokenizer;

use crate::error::{Result, TextError};
use crate::token_bytes::{self, Written};
use crate::tokenizer_limits::{self, quietly};

/// Ids of [`Codec::Bytes`] are below this.
const BYTES: u64 = 256;

/// Names that tokenizers give to the token after a document, where no `tokenizer_config.json` says.
const END_TOKENS: [&str; 6] = ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]"];

/// Names that tokenizers give to the token before a text, likewise.
const BEGIN_TOKENS: [&str; 5] = ["<|endoftext|>", "<|begin_of_text|>", "<s>", "<bos>", "<|startoftext|>"];

/// Text to ids and back.
#[derive(Debug, Clone)]
pub enum Codec {
    /// Every byte is a token, so any file is data.
    Bytes,
    /// A Hugging Face tokenizer.
    Tokenizer(Box<FileTokenizer>),
}

/// A tokenizer and where it was read from.
#[derive(Debug, Clone)]
pub struct FileTokenizer {
    path: PathBuf,
    tokenizer: Tokenizer,
    vocabulary: u64,
    begin_token: Option<u32>,
    end_token: Option<u32>,
}

/// What every tokenizer is tried on.
const PROBE: &str = "A probe:  two spaces, 1 digit,\n\n\ta tab, é, 語, and ▁.";

/// Vocabularies of a million tokens with their merges take a tenth of it.
const MAX_TOKENIZER_BYTES: u64 = 1 << 30;

impl Codec {
    /// Reads a `tokenizer.json`.
    pub fn from_file(path: &Path) -> Result<Codec> {
        // The tokenizers crate's own message would not name the file.
        let bytes = ferrospeed_files::read(path, MAX_TOKENIZER_BYTES).map_err(TextError::io(path))?;
        let said = ferrospeed_files::read(path.with_file_name("tokenizer_config.json"), MAX_TOKENIZER_BYTES);
        let said = said.ok().and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default();
        Codec::from_bytes(path, &bytes, &said)
    }

    /// From the content of a `tokenizer.json` that was found in the file `path`, and of the `tokenizer_config.json` with it.
    pub fn from_bytes(path: &Path, bytes: &[u8], config: &serde_json::Value) -> Result<Codec> {
        let no_tokenizer =
            |why: &dyn std::fmt::Display| TextError::bad_file(path, format!("is no tokenizer: {why}"));
        tokenizer_limits::check(bytes).map_err(|why| no_tokenizer(&why))?;
        let read = quietly(|| Tokenizer::from_bytes(bytes)).map_err(|why| no_tokenizer(&why))?;
        let mut tokenizer = read.map_err(|error| no_tokenizer(&error))?;
        // Some files keep what a past user set: cutting every text at 512 tokens is not what a corpus wants.
        tokenizer.with_padding(None);
        tokenizer
            .with_truncation(None)
            .map_err(|error| TextError::bad_file(path, format!("cannot lift its truncation: {error}")))?;
        // A pattern that matches nothing at all and its kin panic at any text: now rather than in the middle of a run.
        quietly(|| {
            let ids = tokenizer.encode_fast(PROBE, true).map(|encoding| encoding.get_ids().to_vec());
            ids.and_then(|ids| tokenizer.decode(&ids, true)).is_ok()
        })
        .map_err(|why| no_tokenizer(&why))?;
        let vocabulary = tokenizer.get_vocab(true).values().max().map_or(0, |&last| u64::from(last) + 1);
        let begin_token = special_token(config, &tokenizer, "bos_token", &BEGIN_TOKENS);
        let end_token = special_token(config, &tokenizer, "eos_token", &END_TOKENS);
        Ok(Codec::Tokenizer(Box::new(FileTokenizer {
            path: path.to_path_buf(),
            tokenizer,
            vocabulary,
            begin_token,
            end_token,
        })))
    }

    /// What a model's folder says about its tokens: `tokenizer.json` when there is one; bytes for a model of 256
    /// tokens.
    pub fn of_model(folder: &Path, vocabulary: u64) -> Result<Codec> {
        let file = folder.join("tokenizer.json");
        // Whatever has the name: what cannot be read is no reason to take bytes for tokens.
        if file.symlink_metadata().is_ok() {
            return Codec::from_file(&file);
        }
        if vocabulary == BYTES {
            return Ok(Codec::Bytes);
        }
        let why = format!("holds no tokenizer.json, and a model of {vocabulary} tokens does not read bytes");
        Err(TextError::bad_file(folder, why))
    }

    /// Ids are below this.
    pub fn vocabulary(&self) -> u64 {
        match self {
            Codec::Bytes => BYTES,
            Codec::Tokenizer(file) => file.vocabulary,
        }
    }

    /// The file it was read from.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Codec::Bytes => None,
            Codec::Tokenizer(file) => Some(&file.path),
        }
    }

    /// The token that ends a text, where the tokenizer has one.
    pub fn end_token(&self) -> Option<u32> {
        match self {
            Codec::Bytes => None,
            Codec::Tokenizer(file) => file.end_token,
        }
    }

    /// The token that begins a text, where the tokenizer has one.
    pub fn begin_token(&self) -> Option<u32> {
        match self {
            Codec::Bytes => None,
            Codec::Tokenizer(file) => file.begin_token,
        }
    }

    /// What is put after each document: the end token, or without one a newline.
    pub fn separator(&self) -> Result<Vec<u32>> {
        match self.end_token() {
            Some(token) => Ok(vec![token]),
            None => self.encode("\n"),
        }
    }

    /// The ids of a text, without tokens that the tokenizer would put around it.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_with(text, false)
    }

    /// The ids of a text that a model is asked to go on with: with the tokens that the tokenizer puts around it, such as one
    /// that begins it.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_with(text, true)
    }

    fn encode_with(&self, text: &str, special_tokens: bool) -> Result<Vec<u32>> {
        match self {
            Codec::Bytes => Ok(text.bytes().map(u32::from).collect()),
            Codec::Tokenizer(file) => {
                let encoding = file.run(|tokenizer| tokenizer.encode_fast(text, special_tokens))?;
                Ok(encoding.get_ids().to_vec())
            }
        }
    }

    /// The ids of a text, and of which bytes of it each is made: a token of something that is not in the text, such as one that
    /// the tokenizer puts before it, is made of none.
    pub fn encode_places(&self, text: &str, special_tokens: bool) -> Result<Vec<(u32, Range<usize>)>> {
        match self {
            Codec::Bytes => {
                Ok(text.bytes().enumerate().map(|(at, byte)| (byte.into(), at..at + 1)).collect())
            }
            Codec::Tokenizer(file) => {
                let encoding = file.run(|tokenizer| tokenizer.encode(text, special_tokens))?;
                let places = encoding.get_offsets().iter().map(|&(start, end)| start..end);
                Ok(encoding.get_ids().iter().copied().zip(places).collect())
            }
        }
    }

    /// The ids of several texts; with a tokenizer they are worked on side by side. A text that goes on with another, which
    /// ended in a newline, gets the ids that it has inside the whole: many tokenizers put something before a text.
    pub fn encode_all(&self, texts: Vec<(String, bool)>) -> Result<Vec<Vec<u32>>> {
        let Codec::Tokenizer(file) = self else {
            return texts.iter().map(|(text, _)| self.encode(text)).collect();
        };
        let newline = self.encode("\n")?;
        let continues: Vec<bool> = texts.iter().map(|(_, continues)| *continues).collect();
        let joined =
            texts.into_iter().map(|(text, continues)| if continues { format!("\n{text}") } else { text });
        let joined: Vec<String> = joined.collect();
        let encodings = file.run(|tokenizer| tokenizer.encode_batch_fast(joined.clone(), false))?;
        let mut all = Vec::with_capacity(encodings.len());
        for ((encoding, continues), text) in encodings.iter().zip(continues).zip(&joined) {
            let ids = encoding.get_ids();
            all.push(match (continues, ids.strip_prefix(&newline[..])) {
                (false, _) => ids.to_vec(),
                (true, Some(rest)) => rest.to_vec(),
                // The newline is one token with what follows: the text has to be taken for itself.
                (true, None) => self.encode(&text[1..])?,
            });
        }
        Ok(all)
    }

    /// The text of ids. What is no text becomes a replacement character, ids without a meaning are left out.
    pub fn decode(&self, ids: &[i64]) -> Result<String> {
        self.decode_with(ids, true)
    }

    /// The same with the texts of special tokens, which is what a model sees.
    pub fn decode_all(&self, ids: &[i64]) -> Result<String> {
        self.decode_with(ids, false)
    }

    /// How one token reads in the middle of a text: with its space, and special ones by their names.
    pub fn token_text(&self, id: i64) -> Result<String> {
        // Decoders take the space before a first word away, so another stands before it.
        let before: Vec<i64> = self.encode("a")?.into_iter().map(i64::from).collect();
        let alone = self.decode_all(&before)?;
        let both = self.decode_all(&[before.as_slice(), &[id]].concat())?;
        match both.strip_prefix(&alone) {
            Some(text) => Ok(text.to_owned()),
            None => self.decode_all(&[id]),
        }
    }

    /// What each token writes in the middle of a text.
    pub fn token_bytes(&self) -> Vec<Written> {
        match self {
            Codec::Bytes => (0..=255).map(|byte| Written::Bytes(vec![byte])).collect(),
            Codec::Tokenizer(file) => token_bytes::of_tokenizer(&file.tokenizer, file.vocabulary),
        }
    }

    fn decode_with(&self, ids: &[i64], skips_special: bool) -> Result<String> {
        match self {
            Codec::Bytes => {
                let bytes: Vec<u8> = ids.iter().filter_map(|&id| u8::try_from(id).ok()).collect();
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
            Codec::Tokenizer(file) => {
                let ids: Vec<u32> = ids.iter().filter_map(|&id| u32::try_from(id).ok()).collect();
                file.run(|tokenizer| tokenizer.decode(&ids, skips_special))
            }
        }
    }
}

impl FileTokenizer {
    fn run<T>(&self, work: impl FnOnce(&Tokenizer) -> tokenizers::Result<T>) -> Result<T> {
        let done = quietly(|| work(&self.tokenizer).map_err(|error| error.to_string())).flatten();
        done.map_err(|why| TextError::Tokenizer { tokenizer: self.path.clone(), why })
    }
}

/// What the `tokenizer_config.json` says under `key`, or the first of the usual names that it knows.
fn special_token(
    config: &serde_json::Value,
    tokenizer: &Tokenizer,
    key: &str,
    usual: &[&str],
) -> Option<u32> {
    // Either the text itself or an object that describes it.
    let token = &config[key];
    let named = token.as_str().or_else(|| token["content"].as_str());
    named.into_iter().chain(usual.iter().copied()).find_map(|name| tokenizer.token_to_id(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The recorded tokenizer; it begins every text with its end token if asked to.
    fn tokenizer(begins: bool) -> (tempfile::TempDir, Codec) {
        let recorded = Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/tests/golden/tokenizer.json");
        let text = std::fs::read_to_string(recorded).unwrap();
        let mut tokenizer: serde_json::Value = serde_json::from_str(&text).unwrap();
        if begins {
            let sequence = |name: &str| serde_json::json!({"Sequence": {"id": name, "type_id": 0}});
            let begin = "<|endoftext|>";
            tokenizer["post_processor"] = serde_json::json!({
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": begin, "type_id": 0}}, sequence("A")],
                "pair": [sequence("A"), sequence("B")],
                "special_tokens": {begin: {"id": begin, "ids": [0], "tokens": [begin]}},
            });
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        std::fs::write(&path, tokenizer.to_string()).unwrap();
        (folder, Codec::from_file(&path).unwrap())
    }

    /// The ids are those of `AutoTokenizer.from_pretrained(folder)("to be")` in transformers 5.22, whatever
    /// `add_bos_token` of the `tokenizer_config.json` says.
    #[test]
    fn a_prompt_has_the_tokens_that_the_tokenizer_puts_around_it_and_a_document_has_not() {
        let words = [84, 79, 221, 66, 69];
        let (_folder, codec) = tokenizer(true);
        assert_eq!(codec.encode_prompt("to be").unwrap(), [&[0], &words[..]].concat());
        assert_eq!(codec.encode("to be").unwrap(), words);
        let (_folder, codec) = tokenizer(false);
        assert_eq!(codec.encode_prompt("to be").unwrap(), words);
        assert_eq!(Codec::Bytes.encode_prompt("to").unwrap(), [116, 111]);
    }

    /// A tokenizer in the manner of LLaMA: it puts a space before every text, and nothing splits at lines.
    fn with_a_space_in_front() -> (tempfile::TempDir, Codec) {
        let mut vocabulary = serde_json::Map::new();
        for (id, token) in ["▁", "a", "b", "\n", "▁a", "▁b", "ab"].iter().enumerate() {
            vocabulary.insert((*token).into(), id.into());
        }
        let tokenizer = serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "post_processor": null,
            "normalizer": null, "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first"},
            "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": false},
            "model": {"type": "BPE", "vocab": vocabulary, "merges": ["▁ a", "▁ b", "a b"], "dropout": null,
                "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
                "fuse_unk": false, "byte_fallback": false, "ignore_merges": false},
        });
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        std::fs::write(&path, tokenizer.to_string()).unwrap();
        (folder, Codec::from_file(&path).unwrap())
    }

    #[test]
    fn a_tokenizer_that_panics_is_refused_by_its_file_when_it_is_read() {
        let (folder, _) = tokenizer(false);
        let path = folder.path().join("tokenizer.json");
        let sound: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        let empty_match = serde_json::json!({"type": "Replace", "pattern": {"Regex": "q*"}, "content": "x"});
        let stripped = serde_json::json!({"type": "Strip", "content": "A", "start": 0, "stop": 3});
        for (key, part) in [("normalizer", empty_match), ("decoder", stripped)] {
            let mut broken = sound.clone();
            broken[key] = part;
            std::fs::write(&path, broken.to_string()).unwrap();
            let error = Codec::from_file(&path).expect_err(key).to_string();
            assert!(error.contains("tokenizer.json") && error.contains("cannot be done"), "{error}");
        }
    }

    #[test]
    fn a_text_in_pieces_has_the_tokens_of_the_whole() {
        for (_folder, codec) in [with_a_space_in_front(), tokenizer(false)] {
            let lines = ["ab\n", "a b\n", "bab"];
            let pieces =
                lines.iter().enumerate().map(|(index, line)| (line.to_string(), index > 0)).collect();
            let whole = codec.encode(&lines.concat()).unwrap();
            assert_eq!(codec.encode_all(pieces).unwrap().concat(), whole);
        }
    }

    #[test]
    fn the_tokens_around_a_text_are_those_that_its_configuration_names() {
        let (folder, codec) = tokenizer(false);
        assert_eq!((codec.begin_token(), codec.end_token()), (Some(0), Some(0)));
        let said = r#"{"bos_token": {"content": "t"}, "eos_token": "o"}"#;
        std::fs::write(folder.path().join("tokenizer_config.json"), said).unwrap();
        let codec = Codec::from_file(&folder.path().join("tokenizer.json")).unwrap();
        assert_eq!((codec.begin_token(), codec.end_token()), (Some(84), Some(79)));
    }
}
