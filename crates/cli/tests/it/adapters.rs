//! Adapters from a recipe to a directory that generates, merges and goes on.

use std::path::{Path, PathBuf};
use std::process::Output;

use serde_json::Value;

use super::support::{binary, output_of, stderr, stdout};

const RECIPE: &str = r#"
    name = "adapted"
    steps = 6
    [model]
    path = "base"
    [adapter]
    rank = 3
    dropout = 0.1
    use_dora = true
    [data]
    text = ["text.txt"]
    tokenizer = "bytes"
    sequence = 24
    validation = 0.05
    [save]
    every = 3
    [sample]
    prompt = "the "
    tokens = 12
    [ds_config]
    train_batch_size = 4
    gradient_clipping = 1.0
    optimizer = { type = "AdamW", params = { lr = 2e-2 } }
"#;

struct Workplace(tempfile::TempDir);

impl Workplace {
    fn new() -> Workplace {
        let place = Workplace(tempfile::tempdir().unwrap());
        let text = "the quick brown fox jumps over the lazy dog; a stitch in time saves nine.\n".repeat(200);
        std::fs::write(place.path("text.txt"), text).unwrap();
        std::fs::write(place.path("recipe.toml"), RECIPE).unwrap();
        place.well(&[
            "model",
            "init",
            "base",
            "--preset",
            "llama",
            "--layers",
            "2",
            "--width",
            "32",
            "--heads",
            "2",
            "--sequence",
            "64",
        ]);
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn run(&self, words: &[&str]) -> Output {
        output_of(binary().args(words).current_dir(self.0.path()).env("NO_COLOR", "1"))
    }

    fn well(&self, words: &[&str]) -> String {
        let output = self.run(words);
        assert!(output.status.success(), "{words:?}:\n{}\n{}", stdout(&output), stderr(&output));
        stdout(&output)
    }

    fn ill(&self, words: &[&str]) -> String {
        let output = self.run(words);
        assert!(!output.status.success(), "{words:?}:\n{}", stdout(&output));
        stderr(&output)
    }

    fn train(&self, name: &str, more: &[&str]) {
        self.well(&[&["train", "recipe.toml", "--out", name], more].concat());
    }

    fn adapter(&self, run: &str) -> Vec<u8> {
        std::fs::read(self.path(run).join("model/adapter_model.safetensors")).unwrap()
    }

    /// What a model writes, always the likeliest.
    fn written(&self, model: &str, more: &[&str]) -> String {
        let words =
            ["generate", "--model", model, "--prompt", "the ", "--tokens", "24", "--temperature", "0"];
        self.well(&[&words[..], more].concat())
    }
}

fn json(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn a_run_leaves_an_adapter_that_generates_merges_and_is_trained_further() {
    let place = Workplace::new();
    place.train("runs/adapted", &[]);
    let model = place.path("runs/adapted/model");
    assert!(!model.join("config.json").exists() && !model.join("model.safetensors").exists());
    let config = json(&model.join("adapter_config.json"));
    assert_eq!(config["peft_type"], "LORA");
    assert_eq!(
        (&config["r"], &config["lora_alpha"], &config["use_dora"]),
        (&3.into(), &6.into(), &true.into())
    );
    assert_eq!(Path::new(config["base_model_name_or_path"].as_str().unwrap()), place.path("base"));
    // Merged, beside its model, and merged as it is read: one model.
    place.well(&["model", "merge", "base", "runs/adapted/model", "merged"]);
    let [beside, merged, base] =
        ["runs/adapted/model", "merged", "base"].map(|model| place.written(model, &[]));
    assert_eq!(beside, merged);
    assert_ne!(merged, base);
    let sample = std::fs::read_to_string(place.path("runs/adapted/sample.txt")).unwrap();
    assert!(beside.starts_with(sample.trim_end_matches('\n')), "{sample:?} is not how {beside:?} begins");
    // The model may have moved.
    std::fs::rename(place.path("base"), place.path("moved")).unwrap();
    let lost = place.ill(&["generate", "--model", "runs/adapted/model", "--prompt", "the "]);
    assert!(lost.contains("no directory of that name is here; name the model's with --base"), "{lost}");
    assert_eq!(place.written("runs/adapted/model", &["--base", "moved"]), beside);
    let told = place.well(&["model", "inspect", "runs/adapted/model", "--base", "moved"]);
    assert!(
        told.contains("DoRA of rank 3, alpha 6")
            && told.contains("14 layers: down_proj 2")
            && told.contains("it fits the model"),
        "{told}"
    );
    // On from there.
    let further = [
        "--set",
        "model.path=moved",
        "--set",
        "steps=2",
        "--set",
        "adapter={\"path\":\"runs/adapted/model\"}",
    ];
    place.train("runs/further", &further);
    assert_ne!(place.adapter("runs/further"), place.adapter("runs/adapted"));
    let first = |run: &str| -> f64 {
        let log = std::fs::read_to_string(place.path(run).join("log.jsonl")).unwrap();
        serde_json::from_str::<Value>(log.lines().next().unwrap()).unwrap()["loss"].as_f64().unwrap()
    };
    assert!(first("runs/further") < first("runs/adapted") - 0.1);
}

#[test]
fn every_stage_and_a_resumed_run_leave_the_same_adapter() {
    let place = Workplace::new();
    place.train("runs/0", &["-n", "2", "--set", "zero_optimization.stage=0"]);
    for stage in ["1", "2", "3"] {
        let set = format!("zero_optimization.stage={stage}");
        place.train(&format!("runs/{stage}"), &["-n", "2", "--set", &set]);
        assert!(place.adapter(&format!("runs/{stage}")) == place.adapter("runs/0"), "stage {stage}");
    }
    let from = "runs/2/checkpoints/global_step3";
    let checkpoint: u64 =
        std::fs::read_dir(place.path(from)).unwrap().map(|e| e.unwrap().metadata().unwrap().len()).sum();
    let base = std::fs::metadata(place.path("base/model.safetensors")).unwrap().len();
    assert!(checkpoint < base / 2, "{checkpoint} bytes of a checkpoint beside {base} of the model");
    place.train("runs/resumed", &["-n", "2", "--set", "zero_optimization.stage=3", "--resume", from]);
    assert!(place.adapter("runs/resumed") == place.adapter("runs/0"));
    let other = place.ill(&[
        "train",
        "recipe.toml",
        "--out",
        "runs/other",
        "--resume",
        from,
        "--set",
        "adapter.alpha=7",
    ]);
    assert!(other.contains("adapter: lora_alpha: 6 -> 7"), "{other}");
    place.well(&[
        "model",
        "init",
        "other",
        "--preset",
        "llama",
        "--layers",
        "2",
        "--width",
        "32",
        "--heads",
        "2",
        "--sequence",
        "64",
        "--seed",
        "9",
    ]);
    let other = place.ill(&[
        "train",
        "recipe.toml",
        "--out",
        "runs/other",
        "--resume",
        from,
        "--set",
        "model.path=other",
    ]);
    assert!(other.contains("its weights are not those that the adapters were trained on"), "{other}");
    // What a checkpoint holds is an adapter too.
    place.well(&["checkpoint", "export-hf", "runs/2/checkpoints/global_step6", "exported"]);
    assert!(
        std::fs::read(place.path("exported/adapter_model.safetensors")).unwrap() == place.adapter("runs/0")
    );
    assert_eq!(place.written("exported", &[]), place.written("runs/0/model", &[]));
}

#[test]
fn what_recipes_say_of_adapters_is_checked() {
    let place = Workplace::new();
    let refused = |sets: &[&str]| {
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
        place.ill(&[&["train", "recipe.toml", "--out", "runs/refused"], &sets[..]].concat())
    };
    for (set, expected) in [
        (
            "adapter.kind=qlora",
            "adapter.kind: 'qlora' is not known; weights of four bits are not trained on yet",
        ),
        ("adapter.kind=dora", "write kind = \"lora\" and use_dora = true"),
        ("adapter.r=4", "adapter.r: is not a key of recipes; here it is adapter.rank"),
        ("adapter.rank=0", "adapter.rank: 0 must be at least 1"),
        (
            "adapter.target_modules=[\"q_porj\"]",
            "adapter.target_modules: 'q_porj' means no linear layer of this model; there are: down_proj, gate_proj",
        ),
        ("adapter.target_modules=7", "adapter.target_modules: must be a text or a list of texts"),
        (
            "adapter.rank_pattern={\"q_proj\": \"x\"}",
            "adapter.rank_pattern: must be a table of whole numbers",
        ),
        ("adapter.modules_to_save=[\"nothing\"]", "has a path that ends with 'nothing'"),
        ("adapter.path=nowhere", "adapter.rank: the adapter in adapter.path says it"),
        ("model.frozen=[\"*\"]", "model.frozen: with [adapter] all weights of the model stay as they are"),
        ("adapter.bias=some", "adapter.bias: 'some' is not known"),
    ] {
        let found = refused(&[set]);
        assert!(found.contains(expected), "{set}: {found}");
    }
    let found = refused(&["model={\"preset\": \"gpt2\", \"layers\": 1, \"width\": 32, \"heads\": 2}"]);
    assert!(
        found.contains(
            "adapter: it is of a model whose weights stay as they are: name its directory, model.path"
        ),
        "{found}"
    );
    std::fs::write(place.path("lora.toml"), RECIPE.replace("[adapter]", "[lora]")).unwrap();
    let found = place.ill(&["train", "lora.toml"]);
    assert!(found.contains("lora: is not a key of recipes; here it is [adapter]"), "{found}");
    let found = refused(&["model.path=base", "adapter=null", "model.frozen=[\"nothing\"]"]);
    assert!(found.contains("model.frozen: 'nothing' is the name of no parameter"), "{found}");
}

#[test]
fn frozen_parameters_stay_and_the_plan_counts_what_is_trained() {
    let place = Workplace::new();
    let plan = |sets: &[&str]| {
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
        let printed = place.well(&[&["plan", "recipe.toml", "--json"], &sets[..]].concat());
        let plan: Value = serde_json::from_str(&printed).unwrap();
        let rows = plan["plan"]["rows"].as_array().unwrap().clone();
        let of = move |purpose: &str| -> u64 {
            rows.iter()
                .filter(|row| row["purpose"] == purpose)
                .map(|row| row["bytes"].as_u64().unwrap())
                .sum()
        };
        (of("parameters"), of("optimizer_states"))
    };
    let (whole, whole_states) = plan(&["adapter=null"]);
    let (adapted, states) = plan(&[]);
    let trained = adapted - whole;
    assert_eq!(whole_states, 2 * whole, "two moments of each weight");
    assert_eq!(states, 2 * trained, "none of what is frozen");
    assert!(trained > 0 && trained < whole / 4, "{trained} of {whole}");
    let frozen = "model.frozen=[\"model.embed_tokens*\", \"*.layers.0.*\"]";
    place.train("runs/frozen", &["--set", "adapter=null", "--set", frozen, "--set", "steps=2"]);
    let before = std::fs::read(place.path("base/model.safetensors")).unwrap();
    let after = std::fs::read(place.path("runs/frozen/model/model.safetensors")).unwrap();
    assert_eq!(before.len(), after.len());
    let differing = before.iter().zip(&after).filter(|(a, b)| a != b).count();
    assert!(
        differing > before.len() / 8 && differing < before.len() / 2,
        "{differing} of {} bytes",
        before.len()
    );
}
