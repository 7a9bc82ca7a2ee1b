//! Conversations as samples: compared with transformers (`scripts/record-chat-masks`), and what is refused.

use std::path::PathBuf;

use ferrospeed_text::{ChatTemplate, Codec, Conversation, Sample, TrainOn, trained_text};
use serde_json::{Value, json};

fn template(source: &str) -> ChatTemplate {
    let tokens = [("bos_token", "<s>"), ("eos_token", "</s>")];
    let tokens = tokens.map(|(name, text)| (name.to_owned(), text.to_owned()));
    ChatTemplate::new(Some(source.to_owned()), tokens.into()).unwrap()
}

/// The recorded cases, or those of another file of the same kind.
fn recorded() -> Value {
    let own = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/masks.json");
    let path = std::env::var_os("FERROSPEED_CHAT_MASKS").map_or(own, PathBuf::from);
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap()
}

#[test]
fn golden_masks_are_those_of_transformers() {
    let (recorded, mut failed, mut compared) = (recorded(), Vec::new(), 0);
    for case in recorded["cases"].as_array().unwrap() {
        let conversation = Conversation::new(&case["messages"], None).unwrap();
        let of = |key: &str| trained_text(&template(text(&case[key])), &conversation, TrainOn::Assistant);
        let name = format!("{} of {}", case["template"], case["messages"]);
        if case.get("refused").is_some() {
            if of("plain").is_ok() {
                failed.push(format!("{name} is refused there"));
            }
            continue;
        }
        compared += 1;
        let wanted: Vec<[usize; 2]> = serde_json::from_value(case["spans"].clone()).unwrap();
        for (key, written) in [("marked", "text"), ("plain", "unmarked")] {
            let found = match of(key) {
                Ok(found) => found,
                Err(error) => {
                    failed.push(format!("{name} ({key}): {error}"));
                    continue;
                }
            };
            let spans: Vec<[usize; 2]> = found.1.iter().map(|span| [span.start, span.end]).collect();
            if found.0 != text(&case[written]) || spans != wanted {
                failed.push(format!("{name} ({key}): {found:?}, not {} {wanted:?}", case[written]));
            }
        }
    }
    assert!(failed.is_empty(), "{} of {compared} cases:\n{}", failed.len(), failed.join("\n"));
    assert!(compared > 15, "{compared}");
}

fn talk(messages: &[(&str, &str)]) -> Conversation {
    let messages = messages.iter().map(|(role, content)| json!({ "role": role, "content": content }));
    Conversation::new(&Value::Array(messages.collect()), None).unwrap()
}

fn learnt(sample: &Sample) -> String {
    let learnt = sample.tokens.iter().zip(&sample.trained).filter(|(_, trained)| **trained);
    Codec::Bytes.decode(&learnt.map(|(token, _)| i64::from(*token)).collect::<Vec<_>>()).unwrap()
}

#[test]
fn what_is_learnt_is_chosen() {
    let talk = talk(&[("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]);
    let chatml = ChatTemplate::of_name("chatml", None).unwrap();
    let of = |train_on| learnt(&Sample::of_conversation(&talk, &chatml, &Codec::Bytes, train_on).unwrap());
    assert_eq!(of(TrainOn::Assistant), "b<|im_end|>d<|im_end|>");
    assert_eq!(of(TrainOn::Last), "d<|im_end|>");
    assert!(of(TrainOn::All).starts_with("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb"));
    let later = talk.clone().learnt_from(2);
    let later = Sample::of_conversation(&later, &chatml, &Codec::Bytes, TrainOn::Assistant).unwrap();
    assert_eq!(learnt(&later), "d<|im_end|>");
    let completed = |train_on| Sample::of_completion(&Codec::Bytes, "1 + 1 = ", "2", train_on).unwrap();
    assert_eq!(learnt(&completed(TrainOn::Assistant)), "2\n");
    assert_eq!(learnt(&completed(TrainOn::All)), "1 + 1 = 2\n");
}

#[test]
fn every_named_template_can_be_cut() {
    for name in ["alpaca", "chatml", "gemma", "llama-3", "mistral", "phi-3", "plain", "zephyr"] {
        let folder = tempfile::tempdir().unwrap();
        let config = json!({ "bos_token": "<s>", "eos_token": "</s>" }).to_string();
        std::fs::write(folder.path().join("tokenizer_config.json"), config).unwrap();
        let template = ChatTemplate::of_name(name, Some(folder.path())).unwrap();
        let talk = talk(&[("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four")]);
        let sample = Sample::of_conversation(&talk, &template, &Codec::Bytes, TrainOn::Assistant).unwrap();
        let learnt = learnt(&sample);
        assert!(learnt.contains("two") && learnt.contains("four"), "{name}: {learnt:?}");
        assert!(!learnt.contains("one") && !learnt.contains("three"), "{name}: {learnt:?}");
        assert!(learnt.len() > "twofour".len(), "{name} learns no end: {learnt:?}");
    }
}

#[test]
fn tools_and_their_answers_are_written_and_answers_of_no_weight_are_not_learnt() {
    let call = json!({ "type": "function", "function": { "name": "add", "arguments": "{\"a\": 1}" } });
    let messages = json!([
        { "role": "user", "content": [{ "type": "text", "text": "1+" }, { "type": "text", "text": "1?" }] },
        { "role": "assistant", "content": null, "tool_calls": [call], "weight": 0 },
        { "role": "tool", "content": "2" },
        { "role": "assistant", "content": "It is 2." },
    ]);
    let source = "{{ tools | tojson }}{% for m in messages %}<{{ m.role }}>{{ m.content }}\
        {% for c in m.tool_calls %}{{ c.function.name }}={{ c.function.arguments | tojson }}{% endfor %}</>{% endfor %}\
        {% if add_generation_prompt %}<assistant>{% endif %}";
    let conversation = Conversation::new(&messages, Some(&json!("[{\"name\": \"add\"}]"))).unwrap();
    let (text, spans) = trained_text(&template(source), &conversation, TrainOn::Assistant).unwrap();
    let expected =
        "[{\"name\": \"add\"}]<user>1+1?</><assistant>add={\"a\": 1}</><tool>2</><assistant>It is 2.</>";
    assert_eq!(text, expected);
    assert_eq!(spans.iter().map(|span| &text[span.clone()]).collect::<Vec<_>>(), ["It is 2.</>"]);
}

#[test]
fn what_cannot_be_learnt_is_refused_with_what_to_do() {
    let of = |messages: Value| Conversation::new(&messages, None).unwrap_err().to_string();
    let image =
        json!([{ "role": "user", "content": [{ "type": "image_url", "image_url": { "url": "x" } }] }]);
    for (messages, expected) in [
        (json!("x"), "no list of messages"),
        (json!([]), "has no message"),
        (image, "message 1: has a part of type 'image_url', and only text is learnt"),
        (
            json!([{ "role": "user", "content": "x" }, { "text": "y" }]),
            "message 2: has no text in 'role', but text",
        ),
        (json!([{ "role": "user" }]), "message 1: says nothing"),
        (json!([{ "role": "user", "content": 3 }]), "neither a text nor a list of parts"),
    ] {
        assert!(of(messages).contains(expected), "{expected}");
    }
    // It writes the last message otherwise than the same one with others behind it.
    let source = "{% for m in messages %}{{ '<last>' if loop.last else '<m>' }}{{ m.content }}{% endfor %}";
    let talk_of_four = talk(&[("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]);
    let error = trained_text(&template(source), &talk_of_four, TrainOn::Assistant).unwrap_err().to_string();
    assert!(
        error.contains("message 2") && error.contains("behind \"<\" the template writes \"last>a\""),
        "{error}"
    );
    assert!(error.contains("{% generation %}") && error.contains("data.chat_template"), "{error}");
    let alone = talk(&[("assistant", "b")]);
    let chatml = ChatTemplate::of_name("chatml", None).unwrap();
    let error = trained_text(&chatml, &alone, TrainOn::Assistant).unwrap_err().to_string();
    assert!(error.contains("begins with it"), "{error}");
    let question = talk(&[("user", "a")]);
    let error = Sample::of_conversation(&question, &chatml, &Codec::Bytes, TrainOn::Assistant).unwrap_err();
    assert!(error.to_string().contains("no message of the assistant"), "{error}");
    let error = ChatTemplate::of_name("chat-ml", None).unwrap_err().to_string();
    assert!(error.contains("'chat-ml' is neither a file") && error.contains("alpaca, chatml"), "{error}");
}
