//! Every kind of data through the real binary, and a model of words trained, trained further and asked to write.

use super::support;
use std::path::{Path, PathBuf};
use std::process::Output;

use serde_json::Value;

fn golden(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/tests/golden").join(name);
    path.canonicalize().unwrap_or(path).display().to_string()
}

fn recipe(data: &str) -> String {
    format!(
        r#"
        name = "run"
        steps = 6
        [model]
        preset = "llama"
        layers = 1
        width = 32
        heads = 1
        vocabulary = 500
        [data]
        {data}
        sequence = 32
        validation = 0.1
        [ds_config]
        train_batch_size = 8
        optimizer = {{ type = "AdamW", params = {{ lr = 1e-2 }} }}
        zero_optimization = {{ stage = 1 }}
        "#
    )
}

fn ferrospeed(place: &Path, words: &[&str]) -> Output {
    support::output_of(support::binary().args(words).current_dir(place))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn train(place: &Path, name: &str, recipe: &str, more: &[&str]) -> PathBuf {
    std::fs::write(place.join("recipe.toml"), recipe).unwrap();
    let words = [&["train", "recipe.toml", "--out", name][..], more].concat();
    let output = ferrospeed(place, &words);
    assert!(output.status.success(), "{name}:\n{}\n{}", text(&output.stdout), text(&output.stderr));
    place.join(name)
}

fn losses(run: &Path) -> Vec<f64> {
    let log = std::fs::read_to_string(run.join("log.jsonl")).unwrap();
    log.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["loss"].as_f64().unwrap()).collect()
}

#[test]
fn every_kind_of_data_trains() {
    let place = tempfile::tempdir().unwrap();
    let list = |name: &str| format!("[{:?}]", golden(name));
    for (kind, files) in [
        ("jsonl", list("texts.jsonl")),
        ("parquet", list("texts-gzip.parquet")),
        ("tokens", list("tokens-u16.bin")),
        ("megatron", list("megatron-u16")),
        ("synthetic", "20000".into()),
    ] {
        // Megatron's is a short one.
        let data = format!("{kind} = {files}");
        let more: &[&str] = if kind == "megatron" { &["--set", "data.sequence=8"] } else { &[] };
        let run = train(place.path(), kind, &recipe(&data), more);
        let losses = losses(&run);
        assert!(losses[5] < losses[0], "{kind}: {losses:?}");
    }
}

#[test]
fn a_model_of_words_is_trained_then_trained_further_and_writes_on_any_number_of_ranks() {
    let place = tempfile::tempdir().unwrap();
    let data = format!("jsonl = [{:?}]\ntokenizer = {:?}", golden("texts.jsonl"), golden("tokenizer.json"));
    let first = train(place.path(), "first", &recipe(&data), &["-n", "2"]);
    for file in ["tokenizer.json", "config.json", "model.safetensors"] {
        assert!(first.join("model").join(file).is_file(), "{file} is missing");
    }
    // Going on from its folder needs no tokenizer named: it lies beside the weights.
    let further = recipe(&format!("parquet = [{:?}]", golden("texts-snappy.parquet")))
        .replace("preset = \"llama\"", "path = \"first/model\"")
        .replace("layers = 1", "")
        .replace("width = 32", "")
        .replace("heads = 1", "")
        .replace("vocabulary = 500", "");
    let sample = ["--set", "sample={\"prompt\": \"document\", \"tokens\": 4}"];
    let second = train(place.path(), "second", &further, &sample);
    assert!(losses(&second)[0] < losses(&first)[0], "it goes on from the weights");
    assert!(std::fs::read_to_string(second.join("sample.txt")).unwrap().starts_with("document"));
    let written = ferrospeed(
        place.path(),
        &[
            "generate",
            "--model",
            "second/model",
            "--prompt",
            "document",
            "--tokens",
            "4",
            "--temperature",
            "0",
        ],
    );
    assert!(text(&written.stdout).starts_with("document"), "{}", text(&written.stderr));
}

#[test]
fn what_belongs_to_a_model_comes_along_and_its_config_says_what_it_is() {
    let place = tempfile::tempdir().unwrap();
    let data = format!("jsonl = [{:?}]\ntokenizer = {:?}", golden("texts.jsonl"), golden("tokenizer.json"));
    let first = train(place.path(), "first", &recipe(&data), &[]);
    let config = |folder: &Path| -> Value {
        serde_json::from_slice(&std::fs::read(folder.join("config.json")).unwrap()).unwrap()
    };
    let made = config(&first.join("model"));
    assert_eq!((&made["bos_token_id"], &made["eos_token_id"]), (&0.into(), &0.into()));

    // As transformers 5 writes it, with everything that a tokenizer may bring.
    let base = place.path().join("first/model");
    let mut newer = made.clone();
    let fields = newer.as_object_mut().unwrap();
    fields.remove("torch_dtype");
    fields.insert("dtype".into(), "float32".into());
    let theta = fields.remove("rope_theta");
    fields.insert("rope_parameters".into(), serde_json::json!({"rope_type": "default", "rope_theta": theta}));
    std::fs::write(base.join("config.json"), newer.to_string()).unwrap();
    let companions = [
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
        "tokenizer.model",
        "generation_config.json",
    ];
    for name in &companions[1..] {
        std::fs::write(base.join(name), format!("{{\"about\": \"{name}\"}}")).unwrap();
    }
    let tuned = recipe(&format!("jsonl = [{:?}]", golden("texts.jsonl")))
        .replace("preset = \"llama\"", "path = \"first/model\"")
        .replace("layers = 1", "")
        .replace("width = 32", "")
        .replace("heads = 1", "")
        .replace("vocabulary = 500", "");
    let more = ["--set", "ds_config.bf16={\"enabled\": true}", "--set", "save={\"every\": 6}"];
    let run = train(place.path(), "second", &tuned, &more);
    let exported = ferrospeed(place.path(), &["checkpoint", "export-hf", "second/checkpoints", "hf"]);
    assert!(exported.status.success(), "{}", text(&exported.stderr));
    newer["dtype"] = "bfloat16".into();
    for folder in [run.join("model"), place.path().join("hf")] {
        assert_eq!(config(&folder), newer, "{}: one type, and the spelling it came with", folder.display());
        for name in companions {
            let copy = std::fs::read(folder.join(name)).unwrap_or_default();
            assert_eq!(copy, std::fs::read(base.join(name)).unwrap(), "{}: {name}", folder.display());
        }
    }
}

#[test]
fn data_that_changes_under_a_run_folder_is_read_anew() {
    let place = tempfile::tempdir().unwrap();
    let file = place.path().join("text.txt");
    std::fs::write(&file, "abcdefgh ".repeat(500)).unwrap();
    let data = format!("text = [{:?}]", file.display().to_string());
    let first = losses(&train(place.path(), "run", &recipe(&data), &[]));
    std::fs::write(&file, "12345678 ".repeat(500)).unwrap();
    let second = losses(&train(place.path(), "other", &recipe(&data), &["--set", "data.cache=run/data"]));
    assert_ne!(first, second);
}
