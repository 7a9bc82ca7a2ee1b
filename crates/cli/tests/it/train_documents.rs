//! `data.documents = "apart"`: tokens see their own document alone, on one rank and on meshes, and from every kind of data that
//! says where documents end; and feed-forward layers in chunks.

use super::support;
use std::path::{Path, PathBuf};
use std::process::Output;

use serde_json::Value;

const RECIPE: &str = r#"
    name = "documents"
    steps = 5
    [model]
    config = "model.json"
    [data]
    jsonl = ["documents.jsonl"]
    sequence = 48
    documents = "apart"
    validation = 0.1
    [eval]
    every = 5
    [ds_config]
    train_batch_size = 4
    gradient_accumulation_steps = 2
    optimizer = { type = "AdamW", params = { lr = 3e-3 } }
"#;

const MODEL: &str = r#"{
    "model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64
}"#;

struct Workplace(tempfile::TempDir);

impl Workplace {
    fn new() -> Workplace {
        let place = Workplace(tempfile::tempdir().unwrap());
        let words = ["the ", "quick ", "brown ", "fox ", "jumps ", "over "];
        let texts: Vec<String> = (0..200usize)
            .map(|n| (0..1 + n * 7 % 19).map(|word| words[(n + word * word) % 6]).collect())
            .collect();
        let lines: Vec<String> =
            texts.iter().map(|text| serde_json::json!({ "text": text }).to_string()).collect();
        // What the same documents are as tokens: a newline ends each.
        let tokens: Vec<u8> = texts
            .iter()
            .flat_map(|text| format!("{text}\n").into_bytes())
            .flat_map(|byte| [byte, 0])
            .collect();
        place.write("documents.jsonl", lines.join("\n").as_bytes());
        place.write("tokens.bin", &tokens);
        place.write("model.json", MODEL.as_bytes());
        place.write("recipe.toml", RECIPE.as_bytes());
        place.write(
            "tokens.toml",
            RECIPE.replace("jsonl = [\"documents.jsonl\"]", "tokens = [\"tokens.bin\"]").as_bytes(),
        );
        place
    }

    fn write(&self, name: &str, content: &[u8]) {
        std::fs::write(self.0.path().join(name), content).unwrap();
    }

    fn ferrospeed(&self, recipe: &str, run: &str, more: &[&str]) -> (PathBuf, Output) {
        let out = self.0.path().join("runs").join(run);
        let words = ["train", recipe, "--device", "cpu", "--out", out.to_str().unwrap()];
        let output = support::output_of(support::binary().args(words).args(more).current_dir(self.0.path()));
        (out, output)
    }

    fn train(&self, recipe: &str, run: &str, more: &[&str]) -> Vec<f64> {
        let (out, output) = self.ferrospeed(recipe, run, more);
        let said = [output.stdout, output.stderr].concat();
        assert!(output.status.success(), "{run}:\n{}", String::from_utf8_lossy(&said));
        losses(&out)
    }
}

/// The losses of a run's log, and behind them those of its measurements and the tokens they were taken over.
fn losses(run: &Path) -> Vec<f64> {
    let read = |file: &str| std::fs::read_to_string(run.join(file)).unwrap();
    let number = |line: &str, key: &str| serde_json::from_str::<Value>(line).unwrap()[key].as_f64().unwrap();
    let (log, eval) = (read("log.jsonl"), read("eval.jsonl"));
    let mut all: Vec<f64> = log.lines().chain(eval.lines()).map(|line| number(line, "loss")).collect();
    all.extend(eval.lines().map(|line| number(line, "tokens")));
    all
}

#[track_caller]
fn assert_near(found: &[f64], wanted: &[f64], what: &str) {
    assert_eq!(found.len(), wanted.len(), "{what}");
    for (found, wanted) in found.iter().zip(wanted) {
        assert!((found / wanted - 1.0).abs() < 1e-4, "{what}: {found}, not {wanted}");
    }
}

#[test]
fn documents_apart_are_learnt_alike_on_every_mesh() {
    let place = Workplace::new();
    let apart = place.train("recipe.toml", "apart", &[]);
    let together = place.train("recipe.toml", "together", &["--set", "data.documents=together"]);
    assert!(
        apart.iter().zip(&together).all(|(apart, together)| apart != together),
        "{apart:?}, {together:?}"
    );
    for (run, more) in [
        ("ulysses", &["--sp", "2"][..]),
        ("slices", &["--tp", "2"]),
        ("slices-and-tokens", &["--tp", "2", "--set", "tensor_parallel.sequence_parallel=true"]),
        ("stages", &["--pp", "2"]),
        ("samples", &["-n", "2", "--set", "zero_optimization.stage=3"]),
        ("chunks", &["--set", "model.activation_checkpointing=true", "--set", "model.mlp_chunk=16"]),
        ("sliced-chunks", &["--tp", "2", "--set", "model.mlp_chunk=20"]),
    ] {
        assert_near(&place.train("recipe.toml", run, more), &apart, run);
    }
}

#[test]
fn token_files_are_told_apart_by_their_end_token() {
    let place = Workplace::new();
    let apart = place.train("recipe.toml", "apart", &[]);
    assert_eq!(place.train("tokens.toml", "tokens", &["--set", "data.end_token=10"]), apart);
}

#[test]
fn what_cannot_be_told_apart_is_said_before_a_rank_starts() {
    let place = Workplace::new();
    for (recipe, more, expected) in [
        ("tokens.toml", &[][..], "name the token behind each (data.end_token)"),
        ("recipe.toml", &["--sp", "2", "--sp-method", "ring"], "use sequence_parallel_method \"ulysses\""),
        ("recipe.toml", &["--set", "data.documents=alone"], "'alone' is not known; use together or apart"),
    ] {
        let (out, output) = place.ferrospeed(recipe, "refused", more);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains(expected), "{more:?}: {said}");
        assert!(!out.join("log.jsonl").exists(), "{more:?} was run");
    }
}

/// Sequences of end tokens alone are documents of one token each, in which nothing is predicted.
#[test]
fn micro_batches_with_nothing_to_predict_are_no_part_of_a_loss() {
    let place = Workplace::new();
    let tokens = |sequences: &[&[u16]]| -> Vec<u8> {
        let length = 48;
        let ids = sequences.iter().flat_map(|pattern| pattern.iter().cycle().take(length));
        ids.flat_map(|id| id.to_le_bytes()).collect()
    };
    let (text, ends): (&[u16], &[u16]) = (&[5, 9, 7, 3], &[10]);
    place.write("full.bin", &tokens(&[text, text]));
    place.write("half.bin", &tokens(&[text, ends]));
    place.write("rare.bin", &tokens(&[text, ends, ends, ends]));
    let recipe = |file: &str| {
        let recipe = RECIPE.replace("jsonl = [\"documents.jsonl\"]", &format!("tokens = [\"{file}\"]"));
        let recipe = recipe.replace("validation = 0.1", "end_token = 10").replace("steps = 5", "steps = 2");
        recipe.replace("train_batch_size = 4", "train_batch_size = 2").replace("lr = 3e-3", "lr = 0.0")
    };
    for file in ["full.bin", "half.bin", "rare.bin"] {
        place.write(&file.replace("bin", "toml"), recipe(file).as_bytes());
    }
    let full = place.train("full.toml", "full", &[]);
    // Two micro-batches of one rank, one each of two ranks, and two that pass through stages.
    let alone = ("alone", &[][..]);
    let apart = ("ranks", &["-n", "2", "--set", "gradient_accumulation_steps=1"][..]);
    let staged = ("stages", &["--pp", "2"][..]);
    for (run, more) in [alone, apart, staged] {
        assert_near(&place.train("half.toml", &format!("half-{run}"), more), &full, run);
        // Of two steps, each with two sequences, one has nothing to predict.
        let (out, output) = place.ferrospeed("rare.toml", &format!("rare-{run}"), more);
        let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        assert!(output.status.success() && said.contains("loss none, nothing to predict"), "{run}: {said}");
        let log = std::fs::read_to_string(out.join("log.jsonl")).unwrap();
        let records: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let absent = |record: &&Value| record["loss"].is_null() && record["no_targets"] == true;
        assert_eq!(records.iter().filter(absent).count(), 1, "{run}: {log}");
        let told = records.iter().find_map(|record| record["loss"].as_f64()).unwrap();
        assert_near(&[told], &full[..1], run);
    }
}
