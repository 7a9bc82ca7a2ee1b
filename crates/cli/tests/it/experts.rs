//! `ferrospeed train --ep`: processes that hold different experts train, save, go on and export as those that hold all.

use super::support;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

/// Largest difference of f32 losses and norms: ranks sum in another order.
const TOLERANCE: f64 = 2e-4;

const RECIPE: &str = r#"
    name = "experts"
    steps = 6
    ranks = 4
    [model]
    config = "config.json"
    [data]
    text = ["text.txt"]
    tokenizer = "bytes"
    sequence = 32
    validation = 0.05
    [eval]
    every = 3
    sequences = 10
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
    fn new(family: &str) -> Workplace {
        let folder = tempfile::tempdir().unwrap();
        let text = "the quick brown fox jumps over the lazy dog; a stitch in time saves nine.\n".repeat(400);
        std::fs::write(folder.path().join("text.txt"), text).unwrap();
        std::fs::write(folder.path().join("recipe.toml"), RECIPE).unwrap();
        std::fs::write(folder.path().join("config.json"), shape(family).to_string()).unwrap();
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

/// A small model of a family, as its `config.json` says it.
fn shape(family: &str) -> Value {
    let mut shape = json!({
        "model_type": family, "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48, "output_router_logits": true,
    });
    let fields = shape.as_object_mut().unwrap();
    let foreign: &[&str] = match family {
        "mixtral" => &["num_experts", "moe_intermediate_size", "shared_expert_intermediate_size"],
        "qwen2_moe" => &["num_local_experts"],
        "olmoe" => &["num_local_experts", "moe_intermediate_size", "shared_expert_intermediate_size"],
        _ => &["num_local_experts", "shared_expert_intermediate_size"],
    };
    foreign.iter().for_each(|key| drop(fields.remove(*key)));
    shape
}

/// What a run's logs say of its losses and norms.
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

fn assert_near(found: &Path, wanted: &Path, tolerance: f64) {
    let (found, wanted) = (numbers(found), numbers(wanted));
    assert_eq!(found.len(), wanted.len());
    for (a, b) in found.iter().zip(&wanted) {
        assert!((a - b).abs() <= tolerance * b.abs().max(1.0), "{found:?}, not {wanted:?}");
    }
}

#[test]
fn experts_on_any_ranks_train_save_go_on_and_export_as_on_one() {
    let place = Workplace::new("mixtral");
    let whole = place.train("whole", &[]);
    assert_eq!(numbers(&whole).len(), 14);
    // On one mesh every stage has the same bits.
    let two = place.train("two-0", &["--ep", "2", "--set", "zero_optimization.stage=0"]);
    assert_near(&two, &whole, TOLERANCE);
    for stage in ["1", "2", "3"] {
        let stage = format!("zero_optimization.stage={stage}");
        let other = place.train(&format!("two-{stage}"), &["--ep", "2", "--set", &stage]);
        assert_eq!(numbers(&other), numbers(&two), "{stage}");
    }
    for (name, more) in [
        ("four", &["--ep", "4", "--set", "zero_optimization.stage=3"][..]),
        ("data-first", &["--ep", "2", "--set", "use_data_before_expert_parallelism=true"]),
    ] {
        assert_near(&place.train(name, more), &whole, TOLERANCE);
    }
    // The balance of experts is one of a rank's samples, so fewer ranks that see different ones have another loss.
    let larger = place.train("larger", &["-n", "2"]);
    for (name, more) in [
        ("by-section", &["--set", "expert_parallel.autoep_size=2", "-n", "2"][..]),
        ("with-slices", &["--ep", "2", "--tp", "2", "-n", "4"]),
        ("with-parts-of-sequences", &["--ep", "2", "--sp", "2", "-n", "4"]),
    ] {
        let run = place.train(name, more);
        assert_near(&run, &larger, TOLERANCE);
        // Ranks that hold different experts write the text together.
        let text = std::fs::read_to_string(run.join("sample.txt")).unwrap();
        assert_eq!(text, std::fs::read_to_string(larger.join("sample.txt")).unwrap(), "{name}");
        assert!(text.starts_with("the ") && text.len() > 8, "{text:?}");
    }

    // Half of it with experts on four ranks, the rest on two in another stage; and half on two, the rest on none of their own.
    let half = place.train("half", &["--ep", "4", "--set", "steps=3"]);
    place.train("half", &["--resume", "--ep", "2", "--set", "zero_optimization.stage=3"]);
    assert_near(&half, &whole, TOLERANCE);
    let back = place.train("back", &["--ep", "2", "--set", "steps=3"]);
    place.train("back", &["--resume"]);
    assert_near(&back, &whole, TOLERANCE);
    // A run that stops and goes on where it was has the bits of one that did not.
    let stopped = place.train("stopped", &["--ep", "2", "--set", "steps=3"]);
    place.train("stopped", &["--resume", "--ep", "2"]);
    assert_eq!(numbers(&stopped), numbers(&two));

    // The exported model is whole: it generates, and has the other's size.
    let model = stopped.join("model");
    let generated =
        place.run(&["generate", "--model", model.to_str().unwrap(), "--prompt", "the ", "--tokens", "4"]);
    assert!(generated.status.success(), "{}", support::stderr(&generated));
    let bytes = |run: &Path| std::fs::metadata(run.join("model/model.safetensors")).unwrap().len();
    assert_eq!(bytes(&stopped), bytes(&whole));
    // And its experts are read where it is trained further, each by the ranks that hold it.
    let further = RECIPE.replace("config = \"config.json\"", "path = \"whole/model\"");
    std::fs::write(place.0.path().join("recipe.toml"), further).unwrap();
    assert_near(
        &place.train("further-spread", &["--ep", "2", "-n", "2"]),
        &place.train("further", &["-n", "2"]),
        TOLERANCE,
    );
}

#[test]
fn every_family_and_every_number_format_trains_with_experts_apart() {
    for family in ["qwen2_moe", "olmoe", "qwen3_moe"] {
        let place = Workplace::new(family);
        let more = ["-n", "2", "--set", "steps=3", "--set", "zero_optimization.stage=3"];
        let whole = place.train("whole", &more);
        let apart = place.train("apart", &[&["--ep", "2"], &more[..]].concat());
        assert_near(&apart, &whole, TOLERANCE);
    }
    let place = Workplace::new("mixtral");
    for precision in ["bf16", "fp16"] {
        let enabled = format!("{precision}.enabled=true");
        let more =
            ["-n", "2", "--set", "steps=3", "--set", "gradient_accumulation_steps=2", "--set", &enabled];
        let whole = place.train(&format!("whole-{precision}"), &more);
        let apart = place.train(&format!("apart-{precision}"), &[&["--ep", "2"], &more[..]].concat());
        // Steps of a 16-bit format, not of f32.
        assert_near(&apart, &whole, 2e-2);
    }
}

/// What a run's log says of routers: by step, by layer.
fn routing(run: &Path) -> Vec<Vec<Value>> {
    let lines = support::lines_of(&run.join("log.jsonl"));
    let of_step =
        |line: &String| serde_json::from_str::<Value>(line).unwrap()["routing"].as_array().unwrap().clone();
    lines.iter().map(of_step).collect()
}

#[test]
fn where_routers_send_tokens_is_logged_monitored_and_printed_alike_on_every_mesh() {
    let place = Workplace::new("mixtral");
    let board = place.0.path().join("board");
    let (path, on) = (format!("csv_monitor.output_path={}", board.display()), "csv_monitor.enabled=true");
    let common = ["--set", "steps=2", "--set", on, "--set", &path];
    let mut seen: Vec<Vec<Vec<Value>>> = Vec::new();
    for (name, more) in [
        ("whole", &["-n", "2"][..]),
        ("apart", &["-n", "2", "--ep", "2"]),
        ("sliced", &["-n", "4", "--ep", "2", "--tp", "2"]),
    ] {
        let job = format!("csv_monitor.job_name={name}");
        let run = place.train(name, &[more, &common, &["--set", &job]].concat());
        seen.push(routing(&run));
        let csv = board.join(name).join("Train_Routing_entropy.csv");
        assert_eq!(support::lines_of(&csv).len(), 3, "a heading and two steps in {}", csv.display());
        assert!(board.join(name).join("Train_Routing_tokens_of_expert_7.csv").exists());
    }
    for run in &seen {
        assert_eq!((run.len(), run[0].len()), (2, 2), "two steps, two layers");
        for layer in run.iter().flatten() {
            let tokens = layer["tokens_per_expert"].as_array().unwrap();
            // Two ranks of four sequences of 32 tokens, of which each chooses two experts.
            assert_eq!(tokens.iter().map(|count| count.as_u64().unwrap()).sum::<u64>(), 2 * 4 * 32 * 2);
            assert_eq!((tokens.len(), layer["dropped_share"].as_f64()), (8, Some(0.0)));
            let entropy = layer["entropy"].as_f64().unwrap();
            assert!(entropy > 1.0 && entropy <= 8f64.ln() + 1e-6, "{entropy}");
        }
        // The first step's routers are the same bits everywhere; their tokens are summed over ranks.
        assert_eq!(run[0][0]["tokens_per_expert"], seen[0][0][0]["tokens_per_expert"]);
    }
    let words = ["train", "recipe.toml", "--out", "printed", "-n", "2", "--ep", "2", "--set", "steps=1"];
    let printed = support::stdout(&place.run(&words));
    assert!(printed.contains("busiest expert ") && printed.contains("router entropy "), "{printed}");
}

#[test]
fn a_plan_counts_the_experts_of_a_rank() {
    let place = Workplace::new("mixtral");
    let file = |name: &str, value: Value| {
        let path = place.0.path().join(name);
        std::fs::write(&path, value.to_string()).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let run = file("run.json", json!({"train_micro_batch_size_per_gpu": 1}));
    let spread = file(
        "spread.json",
        json!({"train_micro_batch_size_per_gpu": 1, "expert_parallel": {"autoep_size": 4}}),
    );
    let model = place.0.path().to_str().unwrap();
    let output =
        |words: &[&str]| place.run(&[&["plan"], words, &["--model", model, "-w", "4", "--json"]].concat());
    let planned =
        |words: &[&str]| -> Value { serde_json::from_str(&support::stdout(&output(words))).unwrap() };
    let bytes = |plan: &Value, row: usize| plan["plan"]["rows"][row]["bytes"].as_u64().unwrap();
    let (whole, by_flag, by_key) = (planned(&[&run]), planned(&[&run, "--ep", "4"]), planned(&[&spread]));
    assert_eq!(by_flag["plan"], by_key["plan"]);
    // Two layers of eight experts, three matrices of 32 × 48 each in f32; six of eight are elsewhere.
    assert_eq!(bytes(&whole, 0) - bytes(&by_flag, 0), 2 * 6 * 3 * 32 * 48 * 4);
    let note = by_flag["plan"]["notes"].as_array().unwrap().last().unwrap().as_str().unwrap();
    assert!(note.contains("2 of 8 experts of a layer on each of 4 ranks"), "{note}");
    // What ZeRO shares out, it shares out among the ranks that hold it: a quarter of all, either way.
    let stage = ["--set", "zero_optimization.stage=3"];
    let (whole, spread) =
        (planned(&[&[&run[..]], &stage[..]].concat()), planned(&[&[&spread[..]], &stage[..]].concat()));
    assert_eq!(bytes(&whole, 0), bytes(&spread, 0));
    let refused = support::stderr(&output(&[&run, "--ep", "3"]));
    assert!(refused.contains("8 experts cannot be shared by 3 ranks alike"), "{refused}");
    let refused = support::stderr(&output(&[&run, "--ep", "8"]));
    assert!(refused.contains("experts on 8 ranks need a multiple of as many"), "{refused}");
}

#[test]
fn what_cannot_be_spread_is_told_before_any_rank_starts() {
    let place = Workplace::new("mixtral");
    let refused = |more: &[&str], told: &str| {
        let mut words = vec!["train", "recipe.toml", "--out", "no"];
        words.extend(more);
        let refused = support::stderr(&place.run(&words));
        // Once: ranks would tell it each for itself.
        assert_eq!(refused.matches(told).count(), 1, "{refused}");
    };
    refused(&["--ep", "3", "-n", "3"], "8 experts cannot be shared by 3 ranks alike; 1, 2, 4, 8 ranks fit");
    refused(&["--ep", "2", "-n", "3"], "experts on 2 ranks need a multiple of 2 ranks");
    refused(
        &["--ep", "2", "--tp", "2", "--set", "tensor_parallel.sequence_parallel=true"],
        "ranks with tokens of their own hold whole experts",
    );
    let dense = json!({
        "model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 64,
    });
    std::fs::write(place.0.path().join("config.json"), dense.to_string()).unwrap();
    refused(&["--ep", "2"], "a llama has no experts to spread over 2 ranks");
}

/// A run of one step has no step 1, which is the default: its only one is profiled.
#[test]
fn a_profile_counts_all_experts_wherever_they_are() {
    let place = Workplace::new("mixtral");
    let params = |name: &str, more: &[&str]| -> String {
        let more = [&["--set", "steps=1", "--set", "flops_profiler.enabled=true"][..], more].concat();
        let report = std::fs::read_to_string(place.train(name, &more).join("profile.txt")).unwrap();
        let line = report.lines().find(|line| line.starts_with("params of model")).unwrap_or_default();
        line.rsplit(':').next().unwrap_or_default().trim().to_owned()
    };
    let whole = params("whole", &["-n", "2"]);
    // Two tables of 256 × 32, and two layers of which the experts are 8 × 3 × 32 × 48.
    assert_eq!(whole, "96.93 K");
    assert_eq!(params("spread", &["-n", "2", "--ep", "2"]), whole);
    let stages = ["-n", "4", "--ep", "2", "--pp", "2", "--set", "zero_optimization.stage=1"];
    assert_eq!(params("staged", &stages), whole);
}
