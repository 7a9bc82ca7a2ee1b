//! What `evaluate` promises: losses that training would have, answers that do not depend on each other, and mistakes told by line.

use std::path::{Path, PathBuf};
use std::slice::from_ref;

use ferrospeed_evaluate::{EvaluateError, Model, Part, Reading, changes, evaluate};
use ferrospeed_models::directory::{WriteOptions, create};
use serde_json::json;
use tempfile::TempDir;

struct Place {
    folder: TempDir,
}

impl Place {
    /// A model of 256 tokens, which reads bytes, with a chat template.
    fn new() -> Place {
        let folder = tempfile::tempdir().unwrap();
        let place = Place { folder };
        place.model("tiny", 3);
        place
    }

    fn model(&self, name: &str, seed: u64) -> Model {
        let path = self.folder.path().join(name);
        if !path.exists() {
            let config = json!({
                "model_type": "llama", "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2,
                "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
                "max_position_embeddings": 512, "initializer_range": 0.3,
            });
            create(&path, &config, seed, &WriteOptions::default()).unwrap();
            let template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}";
            std::fs::write(path.join("chat_template.jinja"), template).unwrap();
        }
        Model::open(&path, None, &ferrospeed_cpu::device()).unwrap()
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    fn found(&self, path: &Path) -> Result<Part, EvaluateError> {
        let reading = Reading { sequence: Some(64), ..Reading::default() };
        evaluate(&self.model("tiny", 3), path, &reading, &self.folder.path().join("cache"))
    }
}

const TALKS: [&str; 3] = [
    r#"{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho ho ho"}]}"#,
    r#"{"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]}"#,
    r#"{"messages": [{"role": "user", "content": "A longer question than the others"}, {"role": "assistant", "content": "Yes"}]}"#,
];

#[test]
fn what_a_sample_counts_does_not_depend_on_those_beside_it() {
    let place = Place::new();
    let whole = place.write("all.jsonl", &TALKS.join("\n"));
    let whole = place.found(&whole).unwrap().totals.unwrap();
    let (mut nats, mut tokens) = (0.0, 0);
    for talk in TALKS {
        let alone = place.found(&place.write("one.jsonl", talk)).unwrap().totals.unwrap();
        assert_eq!(alone.texts, 1);
        nats += alone.nats;
        tokens += alone.tokens;
    }
    // Each sum is of the same bits; only the order in which sums of f64 are added up is another.
    assert_eq!(tokens, whole.tokens);
    assert!((nats - whole.nats).abs() < 1e-9 * nats, "{nats} {}", whole.nats);
    let backwards: Vec<&str> = TALKS.iter().rev().copied().collect();
    let backwards = place.found(&place.write("back.jsonl", &backwards.join("\n"))).unwrap().totals.unwrap();
    assert!((backwards.nats - whole.nats).abs() < 1e-9 * nats);
    // Of bytes, a token is a byte: " Ho ho ho\n", " So.\n" and " Yes\n".
    assert_eq!((whole.tokens, whole.bytes), (10 + 5 + 5, 20));
    let bits = whole.bits_per_byte().unwrap();
    assert!((bits - whole.loss() / std::f64::consts::LN_2).abs() < 1e-12);
    assert!((whole.perplexity().ln() - whole.loss()).abs() < 1e-12);
}

#[test]
fn texts_tokens_and_samples_of_the_same_are_equally_likely() {
    let place = Place::new();
    let text = "to be, or not to be, that is the question: whether it is nobler in the mind to suffer; and so on it goes.";
    let plain = place.found(&place.write("a.txt", text)).unwrap();
    assert_eq!(plain.kind, "text");
    // A newline ends a document, and the first token of each sequence is predicted by nobody.
    let plain = plain.totals.unwrap();
    assert_eq!((plain.texts, plain.tokens), (2, text.len() as u64 + 1 - 2));
    let tokens: Vec<u8> = format!("{text}\n").bytes().flat_map(|byte| [byte, 0]).collect();
    let path = place.folder.path().join("a.bin");
    std::fs::write(&path, tokens).unwrap();
    let found = place.found(&path).unwrap();
    assert_eq!((found.kind, found.totals.unwrap()), ("tokens", plain));
    let sample = place.found(&place.write("a.jsonl", &json!({ "text": &text[..40] }).to_string())).unwrap();
    assert_eq!(sample.kind, "text");
    let short = place.found(&place.write("b.txt", &text[..40])).unwrap();
    assert_eq!(sample.totals.unwrap(), short.totals.unwrap());
    let cut =
        place.found(&place.write("c.jsonl", &json!({ "text": text }).to_string())).unwrap().totals.unwrap();
    assert_eq!((cut.cut, cut.tokens), (1, 63));
}

#[test]
fn of_pairs_it_is_told_which_answers_are_preferred() {
    let place = Place::new();
    let pairs = [("a", "b"), ("c", "dd"), ("eee", "f")].map(|(chosen, rejected)| {
        json!({ "prompt": "x: ", "chosen": chosen, "rejected": rejected }).to_string()
    });
    let found = place.found(&place.write("pairs.jsonl", &pairs.join("\n"))).unwrap();
    let shares = found.pairs.unwrap();
    assert_eq!((found.kind, shares.pairs), ("preference", 3));
    let swapped = pairs.map(|pair| {
        pair.replace("chosen", "x").replace("rejected", "chosen").replace("\"x\"", "\"rejected\"")
    });
    let swapped = place.found(&place.write("swapped.jsonl", &swapped.join("\n"))).unwrap().pairs.unwrap();
    assert!((shares.preferred + swapped.preferred - 1.0).abs() < 1e-12, "{shares:?} {swapped:?}");
}

#[test]
fn tasks_are_done_alike_alone_and_together_and_changes_are_told() {
    let place = Place::new();
    let choice = |prompt: &str, answer: usize| {
        json!({ "id": prompt, "prompt": prompt, "choices": [" one", " two words", " 3"], "answer": answer })
            .to_string()
    };
    let asked =
        json!({ "messages": [{ "role": "user", "content": "What?" }], "choices": ["a", "b"], "answer": 1 });
    let mut lines: Vec<String> = (0..3).map(|answer| choice("The same question?", answer)).collect();
    lines.push(asked.to_string());
    let written = |model: &Model, text: &str| {
        let path = place.write("written.jsonl", text);
        evaluate(model, &path, &Reading::default(), place.folder.path()).unwrap()
    };
    let (tiny, other) = (place.model("tiny", 3), place.model("other", 4));
    let exact = |answer: &str| {
        json!({ "prompt": "to be", "answer": answer, "max_tokens": 5, "stop": ["\u{1}"] }).to_string()
    };
    let gives = written(&tiny, &exact("?")).outcomes.remove(0).given;
    lines.push(exact(if gives.is_empty() { "?" } else { &gives }));
    let path = place.write("tasks.jsonl", &lines.join("\n"));
    let run = |model: &Model| evaluate(model, &path, &Reading::default(), place.folder.path()).unwrap();
    let (found, against) = (run(&tiny), run(&other));
    let tasks = found.tasks.unwrap();
    assert_eq!((found.kind, tasks.choices, tasks.exact), ("tasks", 4, 1));
    // Three times the same question with three answers: one of them is right.
    let right = |outcomes: &[ferrospeed_evaluate::Outcome]| {
        outcomes.iter().filter(|outcome| outcome.is_right).count()
    };
    assert_eq!(right(&found.outcomes[..3]), 1);
    assert_eq!(tasks.exact_match, f64::from(u8::from(!gives.is_empty())));
    let alone = written(&tiny, &lines[0]);
    assert_eq!(alone.outcomes[0].choices, found.outcomes[0].choices);
    assert_eq!(
        found.outcomes[0].choices.iter().map(|c| (c.tokens, c.bytes)).collect::<Vec<_>>(),
        [(4, 4), (10, 10), (2, 2)]
    );
    let changed = changes(from_ref(&found), from_ref(&against));
    let differ =
        found.outcomes.iter().zip(&against.outcomes).filter(|(a, b)| a.is_right != b.is_right).count();
    assert_eq!(changed.len(), differ);
    assert!(changes(from_ref(&found), from_ref(&found)).is_empty());
}

#[test]
fn tasks_that_ask_nothing_clear_are_refused_with_their_line() {
    let place = Place::new();
    let good = r#"{"prompt": "1 + 1 =", "choices": [" 2", " 3"], "answer": 0}"#;
    let cases = [
        (r#"{"prompt": "x", "choices": [" 2", " 3"]}"#, "has no 'answer'"),
        (r#"{"prompt": "x", "choices": [" 2", " 3"], "answer": 2}"#, "is no number of a choice, from 0 to 1"),
        (r#"{"prompt": "x", "choices": [" 2", " 3"], "answer": -1}"#, "is no number of a choice"),
        (r#"{"prompt": "x", "choices": [" 2", " 3"], "answer": "3"}"#, "'3' is number 1"),
        (r#"{"prompt": "x", "choices": [" 2", " 3"], "answer": true}"#, "is no number of a choice"),
        (r#"{"prompt": "x", "choices": [" 2", " 3"], "answer": 0.5}"#, "is no number of a choice"),
        (r#"{"prompt": "x", "choices": [" 2"], "answer": 0}"#, "has 1 choices: there is nothing to choose"),
        (r#"{"prompt": "x", "choices": [], "answer": 0}"#, "has 0 choices"),
        (r#"{"prompt": "x", "choices": "23", "answer": 0}"#, "'choices' are no list of texts"),
        (r#"{"prompt": "x", "choices": [2, 3], "answer": 0}"#, "'choices' are no list of texts"),
        (r#"{"prompt": "x", "choices": [" 2", " 2"], "answer": 0}"#, "choices 0 and 1 (from 0) are the same"),
        (r#"{"prompt": "x", "choices": [" 2", ""], "answer": 0}"#, "its choice 1 is empty"),
        (r#"{"prompt": "", "choices": [" 2", " 3"], "answer": 0}"#, "its 'prompt' is empty"),
        (r#"{"prompt": 7, "choices": [" 2", " 3"], "answer": 0}"#, "its 'prompt' is no text"),
        (r#"{"choices": [" 2", " 3"], "answer": 0}"#, "asks nothing"),
        (r#"{"prompt": "x", "messages": [], "answer": "y"}"#, "has 'prompt' and 'messages'"),
        (r#"{"messages": [], "answer": "y"}"#, "its 'messages': has no message"),
        (r#"{"messages": [{"content": "x"}], "answer": "y"}"#, "its 'messages': message 1"),
        (r#"{"prompt": "x", "answer": 4}"#, "it has no 'choices'; give them, or write \"4\""),
        (r#"{"prompt": "x", "answer": ""}"#, "any model would be right"),
        (r#"{"prompt": "x", "answer": []}"#, "any model would be right"),
        (r#"{"prompt": "x", "answer": ["y", 1]}"#, "is a list, and not one of texts"),
        (r#"{"prompt": "x", "answer": "y", "stop": ""}"#, "its 'stop' is empty"),
        (r#"{"prompt": "x", "answer": "y", "max_tokens": 0}"#, "'max_tokens' is no whole number"),
        (
            r#"{"prompt": "x", "choises": [" 2", " 3"], "answer": 0}"#,
            "has 'choises', which is no key of tasks",
        ),
        (r#"{"prompt": "x", "choices": [" 2", " 3"], "answer": 0, "stop": "a"}"#, "take it out"),
        (r#"["prompt"]"#, "is no task, for it is no object"),
        (r#"{"prompt": "x", "answer": "y""#, "is no JSON object"),
    ];
    for (bad, why) in cases {
        let path = place.write("tasks.jsonl", &format!("{good}\n\n{bad}\n"));
        let error = place.found(&path).unwrap_err().to_string();
        assert!(error.contains("tasks.jsonl: line 3: ") && error.contains(why), "{bad}: {error}");
    }
    let long = json!({ "prompt": "x".repeat(600), "answer": "y" }).to_string();
    let error = place.found(&place.write("long.jsonl", &long)).unwrap_err().to_string();
    assert!(error.contains("long.jsonl: line 1: ") && error.contains("600 tokens"), "{error}");
    let empty = place.found(&place.write("empty.jsonl", "\n")).unwrap_err().to_string();
    assert!(empty.contains("is empty"), "{empty}");
    let absent = place.found(&place.folder.path().join("absent.jsonl")).unwrap_err().to_string();
    assert!(absent.contains("absent.jsonl"), "{absent}");
}
