//! The tokenizer that a GGUF file's metadata describes, as a Hugging Face `tokenizer.json`.
//!
//! `gpt2` is byte-level BPE: its merges are in the file, how text is cut before is known by a name. `llama` is SentencePiece's
//! BPE: pieces with scores, from which merges follow (the best piece first). What cannot be built exactly is refused.

use std::collections::HashMap;

use serde_json::{Value as Json, json};

use super::metadata::Metadata;
use crate::error::Result;

const TOKENS: &str = "tokenizer.ggml.tokens";
/// Pieces are words; splitting a piece everywhere costs the square of its length.
const MAX_PIECE_CHARS: usize = 1024;
const SPACE: &str = "\u{2581}";

/// Kinds of tokens, by their numbers in files.
const UNKNOWN: i64 = 2;
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;

const SPLIT_LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const SPLIT_QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// A file's tokens with what it says of them.
struct Vocabulary<'a> {
    metadata: &'a Metadata<'a>,
    tokens: &'a [String],
    kinds: &'a [i64],
}

/// `tokenizer.json` and `tokenizer_config.json`.
pub(super) fn tokenizer(metadata: &Metadata<'_>) -> Result<(Json, Json)> {
    let key = "tokenizer.ggml.model";
    let model = metadata.needed(key, metadata.text(key)?)?;
    let tokens = metadata.needed(TOKENS, metadata.texts(TOKENS)?)?;
    let kinds = metadata.numbers("tokenizer.ggml.token_type")?.unwrap_or(&[]);
    if !kinds.is_empty() && kinds.len() != tokens.len() {
        let why = format!("has {} entries for {} tokens", kinds.len(), tokens.len());
        return Err(metadata.error("tokenizer.ggml.token_type", why));
    }
    let vocabulary = Vocabulary { metadata, tokens, kinds };
    let mut built = match model {
        "gpt2" => vocabulary.byte_level()?,
        "llama" => vocabulary.sentence_piece()?,
        other => {
            return Err(metadata.error(key, format!("is '{other}'; gpt2 and llama are read")));
        }
    };
    built["version"] = "1.0".into();
    built["truncation"] = Json::Null;
    built["padding"] = Json::Null;
    built["added_tokens"] = vocabulary.added();
    // Files of SentencePiece begin every text unless they say otherwise.
    built["post_processor"] = vocabulary.around(model == "llama")?;
    Ok((built, configuration(&vocabulary)?))
}

/// What templates and servers want to know.
pub(super) fn chat_template<'a>(metadata: &Metadata<'a>) -> Result<Option<&'a str>> {
    metadata.text("tokenizer.chat_template")
}

fn configuration(vocabulary: &Vocabulary<'_>) -> Result<Json> {
    let mut config = json!({"tokenizer_class": "PreTrainedTokenizerFast"});
    for (key, name) in
        [("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")]
    {
        if let Some((_, token)) = vocabulary.special(name)? {
            config[key] = token.into();
        }
    }
    if let Some(template) = chat_template(vocabulary.metadata)? {
        config["chat_template"] = template.into();
    }
    Ok(config)
}

impl Vocabulary<'_> {
    fn special(&self, name: &str) -> Result<Option<(u64, &str)>> {
        let key = format!("tokenizer.ggml.{name}_token_id");
        let Some(id) = self.metadata.size(&key)? else { return Ok(None) };
        let token = usize::try_from(id).ok().and_then(|id| self.tokens.get(id));
        let why = format!("is {id}, of {} tokens", self.tokens.len());
        token.map(|token| Some((id, token.as_str()))).ok_or_else(|| self.metadata.error(&key, why))
    }

    /// Ids by token.
    fn ids(&self) -> Result<HashMap<&str, usize>> {
        let mut ids = HashMap::with_capacity(self.tokens.len());
        for (id, token) in self.tokens.iter().enumerate() {
            if let Some(other) = ids.insert(token.as_str(), id) {
                return Err(self.metadata.error(TOKENS, format!("has '{token}' twice: {other} and {id}")));
            }
        }
        Ok(ids)
    }

    fn added(&self) -> Json {
        let one = |id: usize, token: &String, special: bool| {
            json!({
                "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": special,
            })
        };
        let kinds = self.kinds.iter().zip(self.tokens).enumerate();
        let added = kinds.filter_map(|(id, (kind, token))| match *kind {
            UNKNOWN | CONTROL => Some(one(id, token, true)),
            USER_DEFINED => Some(one(id, token, false)),
            _ => None,
        });
        added.collect()
    }

    /// The tokens around every text.
    fn around(&self, begins: bool) -> Result<Json> {
        let wanted = |name: &str, default: bool| -> Result<Option<(u64, &str)>> {
            match self.metadata.flag(&format!("tokenizer.ggml.add_{name}_token"))?.unwrap_or(default) {
                true => self.special(name),
                false => Ok(None),
            }
        };
        let (begin, end) = (wanted("bos", begins)?, wanted("eos", false)?);
        let sequence = |name: &str| json!({"Sequence": {"id": name, "type_id": 0}});
        let token = |token: Option<(u64, &str)>| {
            token.map(|(_, text)| json!({"SpecialToken": {"id": text, "type_id": 0}}))
        };
        let around = |name: &str| -> Vec<Json> {
            token(begin).into_iter().chain([sequence(name)]).chain(token(end)).collect()
        };
        let special: serde_json::Map<String, Json> = [begin, end]
            .into_iter()
            .flatten()
            .map(|(id, text)| (text.to_owned(), json!({"id": text, "ids": [id], "tokens": [text]})))
            .collect();
        if special.is_empty() {
            return Ok(Json::Null);
        }
        let pair = [around("A"), around("B")].concat();
        Ok(json!({
            "type": "TemplateProcessing",
            "single": around("A"),
            "pair": pair,
            "special_tokens": special,
        }))
    }

    fn byte_level(&self) -> Result<Json> {
        let key = "tokenizer.ggml.pre";
        let bytes = |regex: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": regex});
        let split = |pattern: &str| {
            let split = json!({
                "type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false,
            });
            json!({"type": "Sequence", "pretokenizers": [split, bytes(false)]})
        };
        let (normalizer, before, whole_words) = match self.metadata.text(key)?.unwrap_or("default") {
            "gpt-2" => (Json::Null, bytes(true), false),
            "llama-bpe" => (Json::Null, split(SPLIT_LLAMA3), true),
            "qwen2" => (json!({"type": "NFC"}), split(SPLIT_QWEN2), false),
            other => {
                let why = format!(
                    "is '{other}', a way to cut texts that is not known; gpt-2, llama-bpe and qwen2 are"
                );
                return Err(self.metadata.error(key, why));
            }
        };
        let key = "tokenizer.ggml.merges";
        let merges = self.metadata.needed(key, self.metadata.texts(key)?)?;
        let ids = self.ids()?;
        let pair = |merge: &String| {
            let (left, right) = merge.split_once(' ')?;
            let known = |token: &str| ids.contains_key(token);
            (known(left) && known(right) && known(&format!("{left}{right}"))).then(|| json!([left, right]))
        };
        let merges: Option<Vec<Json>> = merges.iter().map(pair).collect();
        let merges =
            merges.ok_or_else(|| self.metadata.error(key, "has an entry that does not join two tokens"))?;
        Ok(json!({
            "normalizer": normalizer,
            "pre_tokenizer": before,
            "decoder": bytes(true),
            "model": {
                "type": "BPE", "vocab": ids, "merges": merges, "dropout": null, "unk_token": null,
                "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false,
                "byte_fallback": false, "ignore_merges": whole_words,
            },
        }))
    }

    fn sentence_piece(&self) -> Result<Json> {
        let key = "tokenizer.ggml.scores";
        let scores = self.metadata.needed(key, self.metadata.floats(key)?)?;
        if scores.len() != self.tokens.len() || scores.iter().any(|score| !score.is_finite()) {
            return Err(self.metadata.error(key, "is no list of one number for each token"));
        }
        let ids = self.ids()?;
        // Without a token for every byte, what is not in the vocabulary has no exact tokens.
        if let Some(byte) = (0..=255u8).find(|byte| !ids.contains_key(format!("<0x{byte:02X}>").as_str())) {
            return Err(self.metadata.error(TOKENS, format!("has no token for the byte {byte}")));
        }
        let unknown = self.special("unknown")?.map(|(_, token)| token);
        let merges = self.merges(scores, &ids)?;
        let prefix = self.metadata.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
        let mut before = vec![json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})];
        let mut after = vec![
            json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "}),
            json!({"type": "ByteFallback"}),
            json!({"type": "Fuse"}),
        ];
        if prefix {
            before.insert(0, json!({"type": "Prepend", "prepend": SPACE}));
            after.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        }
        Ok(json!({
            "normalizer": {"type": "Sequence", "normalizers": before},
            "pre_tokenizer": null,
            "decoder": {"type": "Sequence", "decoders": after},
            "model": {
                "type": "BPE", "vocab": ids, "merges": merges, "dropout": null, "unk_token": unknown,
                "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": true,
                "byte_fallback": true, "ignore_merges": false,
            },
        }))
    }

    /// SentencePiece joins the neighbours that make the piece of the highest score, whatever they are.
    fn merges(&self, scores: &[f32], ids: &HashMap<&str, usize>) -> Result<Vec<[String; 2]>> {
        let mut merges: Vec<(f32, usize, [&str; 2])> = Vec::new();
        for (id, (token, &score)) in self.tokens.iter().zip(scores).enumerate() {
            // Tokens of other kinds are found as a whole, never joined.
            if self.kinds.get(id).is_some_and(|&kind| kind != 1) {
                continue;
            }
            if token.len() > MAX_PIECE_CHARS {
                let why = format!("has a piece of {} bytes; at most {MAX_PIECE_CHARS} are read", token.len());
                return Err(self.metadata.error(TOKENS, why));
            }
            for (place, _) in token.char_indices().skip(1) {
                let halves = token.split_at(place);
                if ids.contains_key(halves.0) && ids.contains_key(halves.1) {
                    merges.push((score, id, [halves.0, halves.1]));
                }
            }
        }
        merges.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        Ok(merges.into_iter().map(|(_, _, pair)| pair.map(str::to_owned)).collect())
    }
}
