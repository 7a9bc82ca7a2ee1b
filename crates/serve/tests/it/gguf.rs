//! GGUF files behind the engine: the tokens of texts, chat templates, answers.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ferrospeed_models::{ModelConfig, ModelFiles};
use ferrospeed_serve::Engine;
use ferrospeed_serve::core::schedule::Limits;
use ferrospeed_serve::model::{OpenOptions, codec_of, open};
use ferrospeed_serve::request::{Event, Request, Special, Work};
use ferrospeed_serve::sampling::SamplingOptions;
use ferrospeed_text::template::Message;
use serde_json::Value;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/gguf")
}

fn expected(name: &str) -> Value {
    let text = std::fs::read_to_string(folder().join(name).with_extension("json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn numbers(value: &Value) -> Vec<i64> {
    value.as_array().unwrap().iter().map(|number| number.as_i64().unwrap()).collect()
}

/// The ids are those of SentencePiece's own library, and of Hugging Face's with the tokenizer that the file was made from.
#[test]
fn texts_have_the_tokens_of_the_tokenizer_that_the_file_was_made_from() {
    for name in ["llama.gguf", "qwen2.gguf"] {
        let files = ModelFiles::open(&folder().join(name)).unwrap();
        let ModelConfig::Decoder(config) = files.model().unwrap() else { panic!("it is a decoder") };
        let codec = codec_of(&files, config.vocab).unwrap();
        for case in expected(name)["texts"].as_array().unwrap() {
            let text = case["text"].as_str().unwrap();
            let ids: Vec<i64> = codec.encode_prompt(text).unwrap().into_iter().map(i64::from).collect();
            assert_eq!(ids, numbers(&case["ids"]), "{name}: {text:?}");
            assert_eq!(codec.decode(&ids).unwrap(), text, "{name}");
        }
    }
}

#[test]
fn a_file_is_served_with_its_template_and_writes_what_transformers_writes() {
    let options = OpenOptions {
        dtype: Some("float32".into()),
        cache_bytes: 1 << 20,
        running: 4,
        ..OpenOptions::default()
    };
    let (facts, runner, blocks) =
        open(&folder().join("llama.gguf"), &options, &ferrospeed_cpu::device()).unwrap();
    assert_eq!((facts.name.as_str(), &facts.end_tokens[..]), ("llama", &[2, 2][..]));
    let talk = [Message { role: "user".into(), content: "hi".into() }];
    assert_eq!(facts.template.render(&talk).unwrap(), "hi</s>");
    let limits = Limits { pass_tokens: 64, running: 4, waiting: 4, sequence_tokens: 64 };
    let engine = Engine::start(facts, runner, blocks, limits).unwrap();
    let case = expected("llama.gguf");
    let work = Work::Generate {
        answers: vec![SamplingOptions { logprobs: Some(0), ..Default::default() }],
        max_tokens: Some(12),
        stops: vec![],
        stop_tokens: vec![],
        special: Special::Hidden,
    };
    let deadline = Instant::now() + Duration::from_secs(60);
    let events = engine.ask(Request { prompt: numbers(&case["prompt"]), work, first_answer: 0, deadline });
    let tokens: Vec<i64> = events
        .filter_map(|event| match event {
            Event::Token { logprobs, .. } => Some(logprobs.unwrap().0.token),
            Event::Finished { .. } => None,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(tokens, numbers(&case["greedy"]));
}
