//! `ferrospeed train` with block-sparse attention, through real processes.

use super::support;
use std::path::{Path, PathBuf};
use std::process::Output;

use serde_json::Value;

const BIG_BIRD: &str = r#"sparse_attention={"mode": "bigbird", "block": 8, "num_random_blocks": 1, "different_layout_per_head": true}"#;

struct Workplace(tempfile::TempDir);

impl Workplace {
    fn new() -> Workplace {
        let folder = tempfile::tempdir().unwrap();
        let text = "the quick brown fox jumps over the lazy dog; a stitch in time saves nine.\n".repeat(400);
        std::fs::write(folder.path().join("text.txt"), text).unwrap();
        // Sequences end within a block.
        let recipe = r#"
            name = "sparse"
            steps = 4
            ranks = 2
            [model]
            preset = "llama"
            layers = 2
            width = 32
            heads = 2
            [data]
            text = ["text.txt"]
            sequence = 100
            validation = 0.05
            [eval]
            every = 2
            [ds_config]
            train_micro_batch_size_per_gpu = 2
            optimizer = { type = "AdamW", params = { lr = 3e-3 } }
            bf16 = { enabled = true }
        "#;
        std::fs::write(folder.path().join("recipe.toml"), recipe).unwrap();
        Workplace(folder)
    }

    fn ferrospeed(&self, words: &[&str]) -> Output {
        support::output_of(support::binary().args(words).current_dir(self.0.path()))
    }

    /// The losses of a run and of its validations, and what it said.
    fn train(&self, name: &str, sets: &[&str], flags: &[&str]) -> (Vec<Value>, String) {
        let out = self.0.path().join("runs").join(name);
        let mut words = vec!["train", "recipe.toml", "--out", out.to_str().unwrap()];
        words.extend(sets.iter().flat_map(|set| ["--set", set]));
        words.extend(flags);
        let output = self.ferrospeed(&words);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{name}: {said}");
        (losses(&out), said)
    }
}

fn losses(run: &Path) -> Vec<Value> {
    let log: PathBuf = run.join("log.jsonl");
    let text = std::fs::read_to_string(log).unwrap();
    let records = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    records.map(|record| serde_json::json!([record["loss"], record["validation_loss"]])).collect()
}

#[test]
fn layouts_are_the_same_in_every_stage_recomputed_and_after_a_resume() {
    let place = Workplace::new();
    let (plain, _) = place.train("plain", &[], &[]);
    let (sparse, said) = place.train("sparse0", &[BIG_BIRD, "zero_optimization.stage=0"], &[]);
    assert_ne!(sparse, plain);
    assert!(said.contains("samples, `generate` and `serve` attend over all tokens"), "{said}");
    for stage in 1..=3 {
        let key = format!("zero_optimization.stage={stage}");
        let (losses, _) = place.train(&format!("sparse{stage}"), &[BIG_BIRD, &key], &[]);
        assert_eq!(losses, sparse, "stage {stage}");
    }
    let recomputed = [BIG_BIRD, "zero_optimization.stage=3", "model.activation_checkpointing=true"];
    assert_eq!(place.train("recomputed", &recomputed, &[]).0, sparse);
    place.train("halves", &[BIG_BIRD, "zero_optimization.stage=2", "steps=2", "save.every=2"], &[]);
    // The layouts of a run that goes on are its own, whatever seed is given now.
    let rest = [BIG_BIRD, "zero_optimization.stage=2", "seed=77"];
    assert_eq!(place.train("halves", &rest, &["--resume"]).0, sparse);
    let dense = r#"sparse_attention={"mode": "dense", "block": 8}"#;
    assert_eq!(place.train("dense", &[dense], &[]).0, plain);
}

#[test]
fn what_cannot_go_with_a_layout_is_said_before_a_rank_starts() {
    let place = Workplace::new();
    let fixed = r#"sparse_attention={"mode": "fixed", "num_local_blocks": 4, "num_global_blocks": 3}"#;
    for (set, more, expected) in [
        (fixed, "steps=4", "num_local_blocks, 4, is no multiple of num_global_blocks, 3; choose one that is"),
        (r#"sparse_attention={"mode": "sideways"}"#, "steps=4", "sideways"),
        (BIG_BIRD, "sequence_parallel_size=2", "remove it, or sequence_parallel_size"),
        (BIG_BIRD, "data.documents=apart", "leave out one of the two"),
        (
            BIG_BIRD,
            r#"data_efficiency.data_routing.random_ltd={"enabled": true, "random_ltd_layer_id": [1], "random_ltd_schedule": {"min_value": 16, "max_value": 64, "schedule_type": "fixed_linear", "schedule_config": {"require_steps": 8, "seq_per_step": 8}}}"#,
            "remove it, or do not drop tokens",
        ),
    ] {
        for command in
            [&["train", "recipe.toml", "--out", "refused"][..], &["config", "check", "recipe.toml"]]
        {
            let words = [command, &["--set", set, "--set", more]].concat();
            let output = place.ferrospeed(&words);
            let said = [output.stdout, output.stderr].concat();
            let said = String::from_utf8_lossy(&said);
            assert!(!output.status.success() && said.contains(expected), "{words:?}: {said}");
        }
    }
    assert!(!place.0.path().join("refused/log.jsonl").exists());
}
