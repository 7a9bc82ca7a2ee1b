//! `ferrospeed train --tp`: processes that hold slices of a model train, save, go on and export as one that holds it whole.

use super::support;
use std::path::{Path, PathBuf};

use serde_json::Value;

/// Largest difference of f32 losses: ranks sum in another order.
const TOLERANCE: f64 = 2e-4;

const RECIPE: &str = r#"
    name = "slices"
    steps = 6
    [model]
    preset = "gpt2"
    layers = 2
    width = 64
    heads = 4
    [data]
    text = ["text.txt"]
    sequence = 32
    validation = 0.05
    [eval]
    every = 3
    [save]
    [sample]
    prompt = "the "
    tokens = 16
    temperature = 0.0
    [ds_config]
    train_batch_size = 8
    gradient_clipping = 1.0
    optimizer = { type = "AdamW", params = { lr = 3e-3 } }
    zero_optimization = { stage = 2 }
"#;

struct Workplace(tempfile::TempDir);

impl Workplace {
    fn new() -> Workplace {
        let folder = tempfile::tempdir().unwrap();
        let text = "the quick brown fox jumps over the lazy dog; a stitch in time saves nine.\n".repeat(400);
        std::fs::write(folder.path().join("text.txt"), text).unwrap();
        std::fs::write(folder.path().join("recipe.toml"), RECIPE).unwrap();
        Workplace(folder)
    }

    fn run(&self, words: &[&str]) -> std::process::Output {
        support::output_of(support::binary().args(words).current_dir(self.0.path()))
    }

    fn train(&self, name: &str, more: &[&str]) -> PathBuf {
        let out = self.0.path().join(name);
        let mut words = vec!["train", "recipe.toml", "--out", out.to_str().unwrap()];
        words.extend(more);
        let output = self.run(&words);
        assert!(
            output.status.success(),
            "{name}:\n{}\n{}",
            support::stdout(&output),
            support::stderr(&output)
        );
        out
    }
}

/// What a run's log says of its losses and norms.
fn numbers(run: &Path) -> Vec<f64> {
    let records = |name: &str| -> Vec<Value> {
        let lines = support::lines_of(&run.join(name));
        lines.iter().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let steps = records("log.jsonl");
    let of = |key: &'static str| move |record: &Value| record[key].as_f64().unwrap();
    let losses = steps.iter().map(of("loss"));
    losses
        .chain(steps.iter().map(of("grad_norm")))
        .chain(records("eval.jsonl").iter().map(of("loss")))
        .collect()
}

fn assert_near(found: &Path, wanted: &Path) {
    let (found, wanted) = (numbers(found), numbers(wanted));
    assert_eq!((found.len(), wanted.len()), (14, 14));
    for (a, b) in found.iter().zip(&wanted) {
        assert!((a - b).abs() <= TOLERANCE * b.abs().max(1.0), "{found:?}, not {wanted:?}");
    }
}

/// What the trained model wrote.
fn sample(run: &Path) -> String {
    let text = std::fs::read_to_string(run.join("sample.txt")).unwrap();
    assert!(text.starts_with("the ") && text.len() > 8, "{text:?}");
    text
}

#[test]
fn slices_train_save_go_on_and_export_as_the_whole_does() {
    let place = Workplace::new();
    let whole = place.train("whole", &[]);
    for (name, more) in [
        ("two", &["--tp", "2"][..]),
        ("four", &["--tp", "2", "-n", "4", "--set", "zero_optimization.stage=3"]),
        ("by-tokens", &["--tp", "2", "--set", "tensor_parallel.sequence_parallel=true"]),
        ("by-section", &["--set", "tensor_parallel.autotp_size=2", "--set", "ranks=2"]),
    ] {
        let run = place.train(name, more);
        assert_near(&run, &whole);
        // All ranks write the text together.
        assert_eq!(sample(&run), sample(&whole), "{name}");
    }

    // Half of it in slices, the rest whole; and the other way round.
    let half = place.train("half", &["--tp", "2", "--set", "steps=3"]);
    place.train("half", &["--resume"]);
    assert_near(&half, &whole);
    let back = place.train("back", &["--set", "steps=3"]);
    place.train("back", &["--resume", "--tp", "4"]);
    assert_near(&back, &whole);

    // The exported model is whole: it generates, and its tensors have the shapes of the other's.
    let model = back.join("model");
    let generated =
        place.run(&["generate", "--model", model.to_str().unwrap(), "--prompt", "the ", "--tokens", "4"]);
    assert!(generated.status.success(), "{}", support::stderr(&generated));
    let bytes = |run: &Path| std::fs::metadata(run.join("model/model.safetensors")).unwrap().len();
    assert_eq!(bytes(&back), bytes(&whole));

    // And slices of it are read where it is trained further.
    let preset = "preset = \"gpt2\"\n    layers = 2\n    width = 64\n    heads = 4";
    let further = RECIPE.replace(preset, "path = \"whole/model\"");
    assert!(further.contains("whole/model"));
    let further = further.replace("sequence = 32", "tokenizer = \"bytes\"\n    sequence = 32");
    std::fs::write(place.0.path().join("recipe.toml"), further).unwrap();
    assert_near(&place.train("further-in-slices", &["--tp", "2"]), &place.train("further", &[]));
}

/// Losses are those of the model whole; the run is resumed on another mesh, and its exported model is whole.
#[test]
fn stages_of_slices_train_and_go_on_as_a_whole_model_does() {
    let place = Workplace::new();
    let more = ["--set", "zero_optimization.stage=1", "--set", "train_micro_batch_size_per_gpu=2"];
    let whole = place.train("whole", &more);
    let three_ways = [&more[..], &["--pp", "2", "--tp", "2", "--pp_schedule", "zb-v"]].concat();
    assert_near(&place.train("three-ways", &three_ways), &whole);
    let half = place.train("half", &[&three_ways[..], &["--set", "steps=3"]].concat());
    place.train("half", &[&more[..], &["--resume", "--pp", "2"]].concat());
    assert_near(&half, &whole);
    let bytes = |run: &Path| std::fs::metadata(run.join("model/model.safetensors")).unwrap().len();
    assert_eq!(bytes(&half), bytes(&whole));
}

#[test]
fn a_plan_counts_the_fullest_stage() {
    let place = Workplace::new();
    let planned = |words: &[&str]| -> Value {
        let output = place.run(&[&["plan", "recipe.toml", "--json"], words].concat());
        serde_json::from_str(&support::stdout(&output))
            .unwrap_or_else(|_| panic!("{}", support::stderr(&output)))
    };
    let stage_1 = ["--set", "zero_optimization.stage=1", "--set", "gradient_accumulation_steps=4"];
    let of = |more: &[&str]| planned(&[&stage_1[..], more].concat());
    let (whole, staged) = (of(&[]), of(&["--pp", "2"]));
    let states = |plan: &Value| -> u64 {
        let rows = plan["plan"]["rows"].as_array().unwrap().iter();
        rows.filter(|row| row["purpose"] == "optimizer_states")
            .map(|row| row["bytes"].as_u64().unwrap())
            .sum()
    };
    assert!(states(&staged) * 10 < states(&whole) * 8, "{staged}");
    assert_eq!(staged["plan"]["stages"]["rank_bytes"].as_array().unwrap().len(), 2);
    assert_eq!(staged["capacity"]["ranks_per_host"], 2);
    let note = |plan: &Value| plan["plan"]["notes"].to_string();
    assert!(note(&staged).contains("of 2 is the fullest") && note(&staged).contains("1f1b"), "{staged}");
    assert!(note(&of(&["--pp", "2", "--pp_schedule", "zb-v"])).contains("zb-v"));
    let refused = support::stderr(&place.run(&[
        "plan",
        "recipe.toml",
        "--pp",
        "5",
        "--set",
        "zero_optimization.stage=1",
    ]));
    assert!(refused.contains("stage 4 of 5 gets none of 4 layers"), "{refused}");
}

#[test]
fn a_plan_counts_slices() {
    let place = Workplace::new();
    let file = |name: &str, text: &str| {
        let path = place.0.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let run = file("run.json", r#"{"train_micro_batch_size_per_gpu": 1}"#);
    let cut =
        file("cut.json", r#"{"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 2}}"#);
    let shape = r#"{"model_type": "llama", "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 192,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64}"#;
    file("config.json", shape);
    let model = place.0.path().to_str().unwrap();
    let planned = |words: &[&str]| -> Value {
        let output = place.run(&[&["plan"], words, &["--model", model, "--json"]].concat());
        serde_json::from_str(&support::stdout(&output)).unwrap()
    };
    let parameters = |plan: &Value| plan["plan"]["rows"][0]["bytes"].as_u64().unwrap() as f64;
    let (whole, by_flag, by_key) = (planned(&[&run]), planned(&[&run, "--tp", "2"]), planned(&[&cut]));
    let ratio = parameters(&by_flag) / parameters(&whole);
    assert!((0.5..0.52).contains(&ratio), "{ratio}");
    assert_eq!(by_flag["plan"], by_key["plan"]);
    // Ten sums of 64 tokens × 64 channels × 4 bytes, on two ranks of this host.
    let note = by_flag["plan"]["notes"][0].as_str().unwrap();
    assert!(note.contains("2 ranks sum 160.00 KiB per micro-batch"), "{note}");
    assert_eq!(by_flag["capacity"]["ranks_per_host"], 2);
}

#[test]
fn what_cannot_be_cut_is_told_before_any_rank_starts() {
    let place = Workplace::new();
    for (more, told) in [
        (
            &["--tp", "3"][..],
            "4 heads cannot be shared by 3 ranks alike; tensor parallelism over 1, 2, 4 ranks fits",
        ),
        (&["--tp", "2", "-n", "3"], "2 slices of a layer need a multiple of 2 ranks, and there are 3"),
        (
            &["--tp", "2", "--set", "tensor_parallel.sequence_parallel=true", "--set", "data.sequence=33"],
            "33 tokens cannot be shared by 2 ranks alike",
        ),
    ] {
        let mut words = vec!["train", "recipe.toml", "--out", "no"];
        words.extend(more);
        let refused = support::stderr(&place.run(&words));
        // Once: ranks would tell it each for itself.
        assert_eq!(refused.matches(told).count(), 1, "{refused}");
    }
}
