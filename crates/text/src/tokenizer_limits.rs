//! What a `tokenizer.json` may ask for. It comes from strangers, and the crate that runs it trusts it: some parts panic, others
//! take all memory or time. What is seen beforehand is refused here with its name; what is left becomes an error at one place,
//! [`quietly`].

use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;

/// Normalizers, splitters, processors and decoders; those that people use have up to a dozen.
const MAX_COMPONENTS: usize = 128;
/// How many times longer replacements may make a text, all of them together.
const MAX_GROWTH: usize = 64;
/// Bytes that are put before each text or word.
const MAX_PREPENDED_BYTES: usize = 1024;
/// Of one character's replacement in a compiled table; the longest of Unicode's has 33.
const MAX_REPLACEMENT_BYTES: usize = 256;
/// Tokens beside the vocabulary: time to read them grows with their square.
const MAX_ADDED_TOKENS: usize = 1 << 16;
/// Pieces of a template around a text.
const MAX_TEMPLATE: usize = 256;

/// The parts of a `tokenizer.json` that say what to do with text.
#[derive(Deserialize, Default)]
#[serde(default)]
struct Parts {
    added_tokens: Option<Vec<IgnoredAny>>,
    normalizer: Value,
    pre_tokenizer: Value,
    post_processor: Value,
    decoder: Value,
}

/// Why a `tokenizer.json` is not read, if it is not.
pub(crate) fn check(bytes: &[u8]) -> Result<(), String> {
    // Also: the tokenizers crate panics at a decoder that is no JSON.
    let parts: Parts = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    let added = parts.added_tokens.map_or(0, |tokens| tokens.len());
    if added > MAX_ADDED_TOKENS {
        return Err(format!("added_tokens: {added} tokens, at most {MAX_ADDED_TOKENS} are read"));
    }
    for (place, part) in [
        ("normalizer", &parts.normalizer),
        ("pre_tokenizer", &parts.pre_tokenizer),
        ("post_processor", &parts.post_processor),
        ("decoder", &parts.decoder),
    ] {
        check_components(part).map_err(|why| format!("{place}: {why}"))?;
    }
    Ok(())
}

fn check_components(part: &Value) -> Result<(), String> {
    let mut components = Vec::new();
    collect(part, &mut components);
    if components.len() > MAX_COMPONENTS {
        return Err(format!("{} components, at most {MAX_COMPONENTS} are run", components.len()));
    }
    let (mut growth, mut prepended) = (1usize, 0);
    for component in components {
        let kind = component["type"].as_str().unwrap_or_default();
        match kind {
            "Replace" => growth = growth.saturating_mul(growth_of(component)?),
            "Prepend" => prepended += component["prepend"].as_str().map_or(0, str::len),
            "FixedLength" if component["length"] == 0 => return Err("FixedLength: a length of 0".to_owned()),
            "Precompiled" => check_table(component).map_err(|why| format!("Precompiled: {why}"))?,
            "TemplateProcessing" => {
                let pieces = |key: &str| component[key].as_array().map_or(0, Vec::len);
                if pieces("single").max(pieces("pair")) > MAX_TEMPLATE {
                    return Err(format!("TemplateProcessing: more than {MAX_TEMPLATE} pieces"));
                }
            }
            _ => {}
        }
    }
    if growth > MAX_GROWTH {
        return Err(format!(
            "replacements that make a text {growth} times longer, at most {MAX_GROWTH} times"
        ));
    }
    if prepended > MAX_PREPENDED_BYTES {
        return Err(format!("Prepend: {prepended} bytes before a text, at most {MAX_PREPENDED_BYTES}"));
    }
    Ok(())
}

/// All objects with a type, in depth.
fn collect<'v>(value: &'v Value, found: &mut Vec<&'v Value>) {
    match value {
        Value::Object(fields) => {
            if value["type"].is_string() {
                found.push(value);
            }
            fields.values().for_each(|field| collect(field, found));
        }
        Value::Array(items) => items.iter().for_each(|item| collect(item, found)),
        _ => {}
    }
}

/// How many times longer a replacement may make a text.
fn growth_of(replace: &Value) -> Result<usize, String> {
    let content = replace["content"].as_str().map_or(0, str::len);
    let pattern = &replace["pattern"];
    if pattern["String"] == "" || pattern["Regex"] == "" {
        return Err("Replace: an empty pattern".to_owned());
    }
    // A regex may match a single byte.
    let matched = pattern["String"].as_str().map_or(1, str::len);
    Ok(content.div_ceil(matched).max(1))
}

/// SentencePiece's table: its size in bytes, as many bytes of a trie, and replacements that end in a zero.
fn check_table(component: &Value) -> Result<(), String> {
    let table = component["precompiled_charsmap"].as_str().unwrap_or_default();
    let table =
        STANDARD.decode(table).map_err(|error| format!("precompiled_charsmap is no base64: {error}"))?;
    let (size, rest) = table.split_first_chunk::<4>().ok_or("a table of less than 4 bytes")?;
    let size = u32::from_le_bytes(*size) as usize;
    if size < 4 || size > rest.len() {
        return Err(format!("a trie of {size} bytes in a table of {}", table.len()));
    }
    let longest = rest[size..].split(|byte| *byte == 0).map(<[u8]>::len).max().unwrap_or(0);
    if longest > MAX_REPLACEMENT_BYTES {
        return Err(format!("a replacement of {longest} bytes, at most {MAX_REPLACEMENT_BYTES}"));
    }
    Ok(())
}

/// Crates that run what a `tokenizer.json` says.
const TRUSTING: [&str; 4] = ["/tokenizers-", "/spm_precompiled-", "/fancy-regex-", "/unicode-"];

/// Does what a `tokenizer.json` says. Where that panics, it is the file's fault: the panic becomes its message and prints nothing.
pub(crate) fn quietly<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = take_hook();
        set_hook(Box::new(move |panic| {
            let place = panic.location().map_or("", |location| location.file());
            if !TRUSTING.iter().any(|name| place.contains(name)) {
                before(panic);
            }
        }));
    });
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| {
        let said = panic.downcast_ref::<String>().map(String::as_str);
        let said = said.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no reason given");
        format!("what it says cannot be done: {said}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn refusal(key: &str, part: Value) -> String {
        check(json!({key: part}).to_string().as_bytes()).expect_err("it is refused")
    }

    fn replace(pattern: Value, content: &str) -> Value {
        json!({"type": "Replace", "pattern": pattern, "content": content})
    }

    #[test]
    fn what_panics_or_grows_is_refused_by_its_name() {
        let sequence = |parts: Vec<Value>| json!({"type": "Sequence", "normalizers": parts});
        let ten = replace(json!({"String": "a"}), "aaaaaaaaaa");
        let table =
            |bytes: &[u8]| json!({"type": "Precompiled", "precompiled_charsmap": STANDARD.encode(bytes)});
        let long = [&4u32.to_le_bytes()[..], &[0; 4], &[b'x'; 300]].concat();
        for (key, part, told) in [
            ("normalizer", replace(json!({"String": ""}), "x"), "normalizer: Replace: an empty pattern"),
            ("decoder", replace(json!({"Regex": ""}), "x"), "decoder: Replace: an empty pattern"),
            ("normalizer", sequence(vec![ten; 6]), "1000000 times longer"),
            (
                "normalizer",
                sequence(vec![replace(json!({"Regex": "."}), &"x".repeat(65))]),
                "65 times longer",
            ),
            (
                "normalizer",
                sequence(vec![json!({"type": "Prepend", "prepend": "x"}); 1000]),
                "1001 components",
            ),
            ("normalizer", json!({"type": "Prepend", "prepend": "x".repeat(2000)}), "2000 bytes"),
            ("pre_tokenizer", json!({"type": "FixedLength", "length": 0}), "a length of 0"),
            ("normalizer", table(&[1, 2]), "less than 4 bytes"),
            ("normalizer", table(&[0xff; 12]), "a trie of 4294967295 bytes"),
            ("normalizer", table(&long), "a replacement of 300 bytes"),
        ] {
            let why = refusal(key, part);
            assert!(why.contains(told), "{why}");
        }
        let many = json!({"added_tokens": vec![json!({}); MAX_ADDED_TOKENS + 1]});
        assert!(check(many.to_string().as_bytes()).unwrap_err().contains("65537 tokens"));
    }

    #[test]
    fn what_known_tokenizers_do_is_not() {
        let llama = json!({"normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"}, replace(json!({"String": " "}), "▁")]},
            "decoder": {"type": "Sequence", "decoders": [replace(json!({"String": "▁"}), " "),
                {"type": "ByteFallback"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}});
        assert_eq!(check(llama.to_string().as_bytes()), Ok(()));
        assert_eq!(check(b"{}"), Ok(()));
    }

    #[test]
    fn a_panic_is_an_error() {
        let why = quietly(|| [1][std::hint::black_box(7)]).unwrap_err();
        assert!(why.contains("index out of bounds"), "{why}");
        assert_eq!(quietly(|| 7), Ok(7));
    }
}
