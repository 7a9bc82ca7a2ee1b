//! `ferrospeed train --sp`: ranks that share sequences train, measure, save and go on like one that holds them whole.

use super::support;
use std::path::{Path, PathBuf};
use std::process::Output;

use serde_json::Value;

const RECIPE: &str = r#"
    name = "shared"
    steps = 6
    [model]
    config = "model.json"
    [data]
    text = ["text.txt"]
    sequence = 50
    validation = 0.1
    [eval]
    every = 3
    sequences = 6
    [save]
    every = 3
    background = false
    [sample]
    prompt = "the "
    tokens = 8
    [ds_config]
    train_batch_size = 4
    gradient_accumulation_steps = 2
    gradient_clipping = 0.5
    optimizer = { type = "AdamW", params = { lr = 3e-3 } }
    zero_optimization = { stage = 2 }
"#;

/// Three heads on one of keys: neither divides by the ranks.
const MODEL: &str = r#"{
    "model_type": "llama", "vocab_size": 256, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 3, "num_key_value_heads": 1, "max_position_embeddings": 64
}"#;

struct Workplace(tempfile::TempDir);

impl Workplace {
    fn new() -> Workplace {
        let folder = tempfile::tempdir().unwrap();
        let text = "the quick brown fox jumps over the lazy dog; a stitch in time saves nine.\n".repeat(100);
        for (name, text) in [("text.txt", text.as_str()), ("recipe.toml", RECIPE), ("model.json", MODEL)] {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        Workplace(folder)
    }

    fn ferrospeed(&self, run: &str, more: &[&str]) -> (PathBuf, Output) {
        let out = self.0.path().join("runs").join(run);
        let words = ["train", "recipe.toml", "--device", "cpu", "--out", out.to_str().unwrap()];
        let output = support::output_of(support::binary().args(words).args(more).current_dir(self.0.path()));
        (out, output)
    }

    fn train(&self, run: &str, more: &[&str]) -> PathBuf {
        let (out, output) = self.ferrospeed(run, more);
        let said = [output.stdout, output.stderr].concat();
        assert!(output.status.success(), "{run}:\n{}", String::from_utf8_lossy(&said));
        out
    }
}

/// The losses of a run's log, or of its measurements.
fn losses(run: &Path, file: &str) -> Vec<f64> {
    let text = std::fs::read_to_string(run.join(file)).unwrap();
    let loss = |line: &str| serde_json::from_str::<Value>(line).unwrap()["loss"].as_f64().unwrap();
    text.lines().map(loss).collect()
}

#[track_caller]
fn assert_same_curve(found: &Path, wanted: &Path) {
    for file in ["log.jsonl", "eval.jsonl"] {
        let (found, wanted) = (losses(found, file), losses(wanted, file));
        assert_eq!(found.len(), wanted.len(), "{file}");
        for (found, wanted) in found.iter().zip(&wanted) {
            assert!((found / wanted - 1.0).abs() < 1e-4, "{file}: {found}, not {wanted}");
        }
    }
}

#[test]
fn parts_of_sequences_on_ranks_of_their_own_give_the_curve_of_whole_ones() {
    let place = Workplace::new();
    let whole = place.train("whole", &[]);
    for (run, more) in [
        ("ulysses", &["--sp", "2"][..]),
        ("ring", &["--sp", "2", "--sp-method", "ring", "--set", "zero_optimization.stage=3"]),
        ("with-samples", &["--sp", "2", "-n", "4"]),
    ] {
        let run = place.train(run, more);
        assert_same_curve(&run, &whole);
        for file in ["sample.txt", "model/model.safetensors", "report.html"] {
            assert!(run.join(file).is_file(), "{} is missing", run.join(file).display());
        }
    }
}

#[test]
fn slices_and_parts_go_together() {
    let place = Workplace::new();
    let heads = MODEL.replace("\"num_attention_heads\": 3", "\"num_attention_heads\": 4");
    std::fs::write(place.0.path().join("model.json"), heads).unwrap();
    let whole = place.train("whole", &[]);
    let run =
        place.train("meshed", &["--tp", "2", "--sp", "2", "--set", "model.activation_checkpointing=true"]);
    assert_same_curve(&run, &whole);
    let (_, output) = place.ferrospeed(
        "refused",
        &["--tp", "2", "--sp", "2", "--set", "tensor_parallel.sequence_parallel=true"],
    );
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("have tokens of their own already"), "{said}");
}

#[test]
fn a_run_goes_on_with_another_number_of_parts() {
    let place = Workplace::new();
    let whole = place.train("whole", &[]);
    let moved = place.train("moved", &["--sp", "2", "--set", "steps=3"]);
    place.train("moved", &["--resume", "--set", "zero_optimization.stage=1", "--set", "steps=4"]);
    let ring = ["--resume", "--sp", "4", "--sp-method", "ring", "--set", "zero_optimization.stage=3"];
    place.train("moved", &ring);
    let (found, wanted) = (losses(&moved, "log.jsonl"), losses(&whole, "log.jsonl"));
    assert_eq!(found.len(), wanted.len());
    for (step, (found, wanted)) in found.iter().zip(&wanted).enumerate() {
        assert!((found / wanted - 1.0).abs() < 1e-4, "step {}: {found}, not {wanted}", step + 1);
    }
}

#[test]
fn what_cannot_be_shared_is_said_before_a_rank_starts() {
    let place = Workplace::new();
    for (more, expected) in [
        (
            &["--sp", "4", "--sp-method", "ring", "--set", "data.sequence=7"][..],
            "7 tokens cannot be cut into 8 pieces",
        ),
        (&["--sp", "3", "-n", "4"], "3 parts of a sequence need a multiple of 3 ranks"),
        (&["--sp", "2", "--sp-method", "star"], "ulysses, ring"),
    ] {
        let (out, output) = place.ferrospeed("refused", more);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains(expected), "{more:?}: {said}");
        assert!(!out.join("log.jsonl").exists(), "{more:?} was run");
    }
}
