//! `ferrospeed train` and `generate` as a person uses them: real processes, real files.

use super::support;
use std::path::{Path, PathBuf};
use std::process::Output;

use serde_json::Value;

struct Workplace(tempfile::TempDir);

impl Workplace {
    /// A folder with a text and a recipe for it.
    fn new() -> Workplace {
        let folder = tempfile::tempdir().unwrap();
        let text = "the quick brown fox jumps over the lazy dog; a stitch in time saves nine.\n".repeat(400);
        std::fs::write(folder.path().join("text.txt"), text).unwrap();
        let recipe = r#"
            name = "small"
            steps = 12
            ranks = 2
            [model]
            preset = "gpt2"
            layers = 2
            width = 64
            heads = 2
            [data]
            text = ["text.txt"]
            sequence = 64
            validation = 0.05
            [eval]
            every = 6
            [sample]
            prompt = "the "
            tokens = 20
            [ds_config]
            train_micro_batch_size_per_gpu = 4
            gradient_clipping = 1.0
            steps_per_print = 4
            optimizer = { type = "AdamW", params = { lr = 3e-3 } }
            bf16 = { enabled = true }
            zero_optimization = { stage = 2 }
        "#;
        std::fs::write(folder.path().join("recipe.toml"), recipe).unwrap();
        Workplace(folder)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn ferrospeed(&self, words: &[&str]) -> Output {
        support::output_of(support::binary().args(words).current_dir(self.path()))
    }

    fn train(&self, name: &str, more: &[&str]) -> PathBuf {
        let out = self.path().join("runs").join(name);
        let mut words = vec!["train", "recipe.toml", "--out", out.to_str().unwrap()];
        words.extend(more);
        let output = self.ferrospeed(&words);
        assert!(output.status.success(), "{name}:\n{}\n{}", text(&output.stdout), text(&output.stderr));
        out
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn lines(path: &Path) -> Vec<Value> {
    std::fs::read_to_string(path).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn losses(run: &Path) -> Vec<String> {
    lines(&run.join("log.jsonl")).iter().map(|record| record["loss"].to_string()).collect()
}

#[test]
fn a_run_leaves_its_log_its_configuration_and_weights_that_generate() {
    let place = Workplace::new();
    let run = place.train("plain", &[]);
    let log = lines(&run.join("log.jsonl"));
    assert_eq!(log.len(), 12);
    let loss = |record: &Value| record["loss"].as_f64().unwrap();
    assert!(loss(&log[11]) < 0.8 * loss(&log[0]), "the loss must fall: {:?}", losses(&run));
    for key in
        ["step", "loss", "lr", "grad_norm", "tokens", "tokens_per_s", "step_ms", "memory_bytes", "skipped"]
    {
        assert!(log.iter().all(|record| !record[key].is_null()), "{key} is missing");
    }
    assert_eq!(lines(&run.join("eval.jsonl")).len(), 2);
    for file in [
        "config/recipe.toml",
        "config/ds_config.json",
        "model/config.json",
        "model/model.safetensors",
        "sample.txt",
        "report.html",
    ] {
        assert!(run.join(file).is_file(), "{file} is missing");
    }

    let events: Vec<PathBuf> =
        std::fs::read_dir(run.join("events")).unwrap().map(|entry| entry.unwrap().path()).collect();
    let events = ferrospeed_observe::monitor::read_events(&events[0]).unwrap();
    assert!(events.len() > 12, "TensorBoard has the curves: {} events", events.len());

    let model = run.join("model");
    let generated = place.ferrospeed(&[
        "generate",
        "--model",
        model.to_str().unwrap(),
        "--prompt",
        "the ",
        "--tokens",
        "8",
    ]);
    assert!(generated.status.success(), "{}", text(&generated.stderr));
    assert!(text(&generated.stdout).starts_with("the "), "{}", text(&generated.stdout));

    // The recipe that was written down gives the same run again, and the weights can be trained further.
    let again = place.train("again", &["--set", "name=again"]);
    assert_eq!(losses(&run), losses(&again));
    std::fs::copy(run.join("config/recipe.toml"), place.path().join("recipe.toml")).unwrap();
    assert_eq!(losses(&run), losses(&place.train("written", &[])));
    let path = format!("model={{\"path\": {:?}}}", model.display());
    let further = place.train("further", &["--set", &path, "--set", "steps=2"]);
    let start = lines(&further.join("log.jsonl"))[0]["loss"].as_f64().unwrap();
    assert!(start < 0.8 * loss(&log[0]), "training goes on from the weights, not anew: {start}");
}

#[test]
fn a_sample_that_will_be_shorter_than_was_asked_for_is_told_with_the_reason() {
    let place = Workplace::new();
    let said = |name: &str, sample: &str, more: &[&str]| {
        let sample = format!("sample={sample}");
        let words = ["train", "recipe.toml", "--out", name, "-n", "1", "--set", "steps=1", "--set", &sample];
        let output = place.ferrospeed(&[&words, more].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout) + &text(&output.stderr)
    };
    let long = said("long", r#"{"prompt": "the ", "tokens": 500}"#, &[]);
    let why = "a prompt of 4 tokens and its answer have at most 64 together (data.sequence)";
    let line = format!("sample: 500 tokens are asked for and 60 will be written: {why}");
    assert_eq!(long.matches(&line).count(), 1, "{long}");
    let granted = ["--set", "hybrid_engine={\"enabled\": true, \"max_out_tokens\": 10}"];
    let short = said("short", r#"{"prompt": "the quick brown fox", "tokens": 5}"#, &granted);
    assert!(short.contains("5 tokens are asked for and none will be written: a prompt of 19"), "{short}");
    assert!(short.contains("at most 10 together (hybrid_engine.max_out_tokens)"), "{short}");
    assert!(!said("fits", r#"{"prompt": "the ", "tokens": 5}"#, &[]).contains("are asked for"));
}

#[test]
fn stages_write_the_same_log_to_the_last_digit() {
    let place = Workplace::new();
    let reference = losses(&place.train("stage0", &["--set", "zero_optimization.stage=0"]));
    for stage in ["1", "3"] {
        let run =
            place.train(&format!("stage{stage}"), &["--set", &format!("zero_optimization.stage={stage}")]);
        assert_eq!(losses(&run), reference, "stage {stage}");
    }
}

#[test]
fn a_mixture_of_experts_trains_alike_in_every_stage_whatever_its_routers_choose() {
    let place = Workplace::new();
    let config = serde_json::json!({
        "model_type": "mixtral", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 6,
        "num_experts_per_tok": 2, "max_position_embeddings": 64, "router_aux_loss_coef": 0.02,
    });
    std::fs::write(place.path().join("mixtral.json"), config.to_string()).unwrap();
    let train = |stage: u8| {
        let stage_key = format!("zero_optimization.stage={stage}");
        let mut words = vec!["--set", "model={\"config\": \"mixtral.json\"}", "--set", &stage_key];
        // Few tokens and many experts: ranks choose differently, and some experts get none.
        words.extend(["--set", "data.sequence=8", "--set", "train_micro_batch_size_per_gpu=1"]);
        words.extend(["--set", "zero_optimization.stage3_param_persistence_threshold=0"]);
        losses(&place.train(&format!("mixture{stage}"), &words))
    };
    let reference = train(0);
    assert_eq!(reference.len(), 12);
    assert_eq!(train(3), reference);
}

#[test]
fn a_curriculum_cuts_sequences_and_layers_are_dropped_alike_in_every_stage() {
    let place = Workplace::new();
    let train = |stage: u8| {
        let sets = [
            format!("zero_optimization.stage={stage}"),
            "steps=6".into(),
            "curriculum_learning.enabled=true".into(),
            "curriculum_learning.min_difficulty=16".into(),
            "curriculum_learning.max_difficulty=64".into(),
            "curriculum_learning.schedule_type=\"fixed_linear\"".into(),
            "curriculum_learning.schedule_config.total_curriculum_step=4".into(),
            "curriculum_learning.schedule_config.difficulty_step=16".into(),
            "progressive_layer_drop.enabled=true".into(),
            "progressive_layer_drop.theta=0.1".into(),
            "progressive_layer_drop.gamma=1.0".into(),
        ];
        let words: Vec<&str> = sets.iter().flat_map(|set| ["--set", set.as_str()]).collect();
        place.train(&format!("curriculum{stage}"), &words)
    };
    let run = train(0);
    let tokens: Vec<u64> =
        lines(&run.join("log.jsonl")).iter().map(|record| record["tokens"].as_u64().unwrap()).collect();
    // 4 sequences on each of 2 ranks, of a length that grows by 12 a step and is a multiple of 16.
    assert_eq!(tokens[0], 8 * 16);
    let lengths: Vec<u64> = tokens.windows(2).map(|pair| (pair[1] - pair[0]) / 8).collect();
    assert_eq!(lengths, [32, 48, 64, 64, 64]);
    assert_eq!(losses(&train(3)), losses(&run));
}

#[test]
fn layers_drop_the_same_tokens_in_every_stage_and_after_a_resume() {
    let place = Workplace::new();
    let train = |name: &str, stage: u8, more: &[&str]| {
        let section = "data_efficiency.data_routing.random_ltd";
        let mut sets = vec![
            format!("zero_optimization.stage={stage}"),
            format!("{section}.enabled=true"),
            format!("{section}.random_ltd_layer_id=[1]"),
            format!("{section}.random_ltd_schedule.min_value=16"),
            format!("{section}.random_ltd_schedule.max_value=64"),
            format!("{section}.random_ltd_schedule.schedule_type=\"fixed_linear\""),
            format!("{section}.random_ltd_schedule.schedule_config.require_steps=8"),
            format!("{section}.random_ltd_schedule.schedule_config.seq_per_step=8"),
        ];
        sets.extend(more.iter().filter(|word| !word.starts_with("--")).map(|set| (*set).to_owned()));
        let mut words: Vec<&str> = sets.iter().flat_map(|set| ["--set", set.as_str()]).collect();
        words.extend(more.iter().filter(|word| word.starts_with("--")));
        place.train(name, &words)
    };
    let whole = place.train("whole", &["--set", "steps=6"]);
    let run = train("dropping0", 0, &["steps=6"]);
    assert_ne!(losses(&run), losses(&whole));
    assert_eq!(losses(&train("dropping3", 3, &["steps=6"])), losses(&run));
    train("halves", 1, &["steps=3", "save.every=3"]);
    assert_eq!(losses(&train("halves", 1, &["steps=6", "--resume"])), losses(&run));
    for (set, expected) in [
        ("data_efficiency.data_routing.random_ltd.random_ltd_layer_id=[7]", "names the layer 7"),
        ("data_efficiency.data_routing.random_ltd.total_layer_num=9", "the model has"),
        ("tensor_parallel.autotp_size=2", "needs whole sequences"),
        ("data.documents=apart", "documents that are apart"),
    ] {
        let mut words = vec!["train", "recipe.toml", "--out", "refused"];
        for more in [
            r#"data_efficiency.data_routing.random_ltd={"enabled": true, "random_ltd_layer_id": [1], "random_ltd_schedule": {"min_value": 16, "max_value": 64, "schedule_type": "fixed_linear", "schedule_config": {"require_steps": 8, "seq_per_step": 8}}}"#,
            set,
        ] {
            words.extend(["--set", more]);
        }
        let output = place.ferrospeed(&words);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{set}: {said}");
        assert!(said.contains(expected), "{set}: {said}");
    }
}

#[test]
fn a_model_that_is_trained_to_be_compressed_is_exported_so_alike_in_every_stage_and_after_a_resume() {
    let place = Workplace::new();
    let quantization = r#"compression_training.weight_quantization={"shared_parameters": {"enabled": true}, "different_groups": {"all": {"params": {"start_bits": 5, "target_bits": 4}}}}"#;
    let pruning = r#"compression_training.sparse_pruning={"shared_parameters": {"enabled": true, "schedule_offset": 2}, "different_groups": {"mlp": {"params": {"dense_ratio": 0.5}, "modules": ["mlp"]}}}"#;
    let train = |name: &str, stage: u8, more: &[&str]| {
        let stage = format!("zero_optimization.stage={stage}");
        let mut words = vec!["--set", &stage, "--set", quantization, "--set", pruning];
        words.extend(more);
        place.train(name, &words)
    };
    let whole = place.train("whole", &["--set", "steps=6"]);
    let run = train("compressed0", 0, &["--set", "steps=6"]);
    assert_ne!(losses(&run), losses(&whole));
    let checkpointed =
        train("compressed3", 3, &["--set", "steps=6", "--set", "model.activation_checkpointing=true"]);
    assert_eq!(losses(&checkpointed), losses(&run));
    train("halves", 1, &["--set", "steps=3", "--set", "save.every=3"]);
    assert_eq!(losses(&train("halves", 1, &["--set", "steps=6", "--resume"])), losses(&run));
    let weights = |run: &Path| std::fs::read(run.join("model/model.safetensors")).unwrap();
    assert!(
        weights(&checkpointed) == weights(&run)
            && weights(&place.path().join("runs/halves")) == weights(&run)
    );

    let tensors = ferrospeed_testkit::tensors::read(&run.join("model/model.safetensors"));
    let (mut pruned, mut coarse) = (0, 0);
    for (name, tensor) in tensors.iter().filter(|(_, tensor)| tensor.shape.len() == 2) {
        let values = tensor.floats();
        if name.contains("mlp") {
            assert!(2 * values.iter().filter(|value| **value == 0.0).count() >= values.len(), "{name}");
            pruned += 1;
        }
        // A table has levels of its own for each row.
        let groups = if name.contains("wte") || name.contains("wpe") { tensor.shape[0] } else { 1 };
        for group in values.chunks(values.len() / groups) {
            let mut levels: Vec<u32> = group.iter().map(|value| (value + 0.0).to_bits()).collect();
            levels.sort_unstable();
            levels.dedup();
            assert!(levels.len() <= 16, "{name} has {} levels", levels.len());
        }
        coarse += 1;
    }
    assert!(pruned == 4 && coarse > 8, "{pruned} and {coarse} of {:?}", tensors.keys());
    for (set, expected) in [
        ("tensor_parallel.autotp_size=2", "compresses whole weights, and ranks hold parts"),
        (r#"compression_training.sparse_pruning.different_groups.mlp.modules=[]"#, "mlp.modules is empty"),
        (
            r#"compression_training.sparse_pruning.different_groups.mlp.modules=["nothing"]"#,
            "in the name of no module",
        ),
        (r#"compression_training.sparse_pruning.shared_parameters.method="topk""#, "use \"l1\""),
    ] {
        let output =
            place.ferrospeed(&["train", "recipe.toml", "--out", "refused", "--set", pruning, "--set", set]);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{set}: {said}");
        assert!(said.contains(expected), "{set}: {said}");
    }
}

#[test]
fn everything_wrong_with_a_recipe_is_said_before_a_rank_starts() {
    let place = Workplace::new();
    let output = place.ferrospeed(&[
        "train",
        "recipe.toml",
        "--set",
        "steps=0",
        "--set",
        "data.text=[\"missing.txt\"]",
        "--set",
        "model.preset=gtp2",
        "--set",
        "zero_optimization.stge=2",
    ]);
    assert_eq!(output.status.code(), Some(2));
    let message = text(&output.stderr);
    for part in
        ["steps: must be at least 1", "missing.txt does not exist", "'gtp2' is not known", "stge", "stage"]
    {
        assert!(message.contains(part), "'{part}' is not in:\n{message}");
    }
    assert!(!place.path().join("runs").exists(), "nothing was started");
    let output =
        place.ferrospeed(&["train", "recipe.toml", "--set", "gradient_norms_every=9000000000000000000"]);
    assert_eq!(output.status.code(), Some(2));
    let message = text(&output.stderr);
    assert!(message.contains("gradient_norms_every: 9000000000000000000 is more steps than"), "{message}");
    let output =
        place.ferrospeed(&["train", "recipe.toml", "--set", "gradient_norms_every=1000000000000000000000"]);
    assert_eq!(output.status.code(), Some(2));
    let message = text(&output.stderr);
    assert!(
        message.contains("gradient_norms_every: must be a whole number")
            && message.contains("more than can be counted"),
        "{message}"
    );
    let output = place.ferrospeed(&["train", "recipe.toml", "--set", "model.layer=3"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("layer"), "{}", text(&output.stderr));
}

#[test]
fn a_variable_that_no_rank_could_read_is_told_once_before_any_starts() {
    let place = Workplace::new();
    for words in [&["train", "recipe.toml"][..], &["launch", "-n", "2", "--", "true"]] {
        let mut command = support::binary();
        command.args(words).current_dir(place.path()).env("FERROSPEED_COMM_ENCRYPT", "nonsense");
        let output = support::output_of(&mut command);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{words:?}: {said}");
        let told = "FERROSPEED_COMM_ENCRYPT: \"nonsense\" is neither 1 (sockets are encrypted) nor 0";
        assert_eq!(said.matches(told).count(), 1, "{words:?}: {said}");
        assert!(!place.path().join("runs").exists(), "{words:?} started something");
    }
}

#[test]
fn a_number_of_threads_that_is_none_is_refused() {
    for given in ["x", "0", "-1", ""] {
        let output = support::output_of(support::binary().args(["doctor"]).env("FERROSPEED_THREADS", given));
        assert_eq!(output.status.code(), Some(2), "{given}");
        assert!(text(&output.stderr).contains("FERROSPEED_THREADS: "), "{}", text(&output.stderr));
    }
}

#[test]
fn the_configuration_that_a_run_writes_down_is_one_that_runs_take() {
    let place = Workplace::new();
    let train = |more: &[&str]| {
        let output = support::output_of(
            support::binary().args(["train", "recipe.toml"]).args(more).current_dir(place.path()),
        );
        assert!(output.status.success(), "{}", text(&output.stderr));
    };
    train(&["--out", "one", "-n", "1"]);
    train(&["--out", "two", "-n", "1", "--set", "ds_config=one/config/ds_config.json"]);
}

/// A decoder without tied weights gives the same bits in stages: see the engine's tests for those that have some.
#[test]
fn a_pipeline_trains_saves_goes_on_and_exports_as_one_rank_does() {
    let place = Workplace::new();
    let config = r#"{"model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": false}"#;
    std::fs::write(place.path().join("config.json"), config).unwrap();
    let recipe = r#"
        name = "stages"
        steps = 6
        [model]
        config = "config.json"
        [data]
        text = ["text.txt"]
        tokenizer = "bytes"
        sequence = 32
        validation = 0.05
        [eval]
        every = 3
        [save]
        [ds_config]
        train_micro_batch_size_per_gpu = 2
        gradient_accumulation_steps = 4
        gradient_clipping = 1.0
        optimizer = { type = "AdamW", params = { lr = 3e-3 } }
        bf16 = { enabled = true }
        zero_optimization = { stage = 1 }
    "#;
    std::fs::write(place.path().join("recipe.toml"), recipe).unwrap();
    let weights = |run: &Path| std::fs::read(run.join("model/model.safetensors")).unwrap();

    let whole = place.train("whole", &[]);
    let staged = place.train("staged", &["--pp", "2"]);
    assert_eq!(losses(&whole), losses(&staged));
    assert!(weights(&whole) == weights(&staged), "other weights");

    // Half of it in three stages, the rest on one rank.
    let half = place.train("half", &["--pp", "3", "--set", "steps=3"]);
    place.train("half", &["--resume"]);
    assert_eq!(losses(&whole), losses(&half));
    assert!(weights(&whole) == weights(&half), "other weights after a change of stages");

    // Another order of the same work.
    let halves = place.train("halves", &["--pp", "2", "--pp_schedule", "zb-h1"]);
    assert_eq!(losses(&whole), losses(&halves));
    assert!(weights(&whole) == weights(&halves), "other weights with another schedule");

    for (more, told) in [
        (&["--pp", "2", "-n", "3"][..], "2 stages need a multiple of 2 ranks, and there are 3; start 4"),
        (
            &["--pp", "2", "--pp_schedule", "zigzag"],
            "schedule 'zigzag' is not known: use 1f1b, interleaved:CHUNKS",
        ),
        (&["--pp", "6"], "pipeline.stages: stage 5 of 6 gets none of 5 layers: use fewer stages"),
        (
            &["--pp", "2", "--set", "pipeline.partition=alphabet"],
            "`pipeline.partition`: partition method 'alphabet' is not known: use",
        ),
        (
            &["--pp", "2", "--set", "pipeline.partition=type:Cloud"],
            "the layers are Embedding, Block, Block, Block, Head",
        ),
    ] {
        let output = place.ferrospeed(&[&["train", "recipe.toml", "--out", "no"], more].concat());
        let said = text(&output.stderr);
        // Once, and by nobody but the program that would have started the ranks.
        assert_eq!(said.matches(told).count(), 1, "{more:?}: {said}");
        assert_eq!(said.lines().filter(|line| line.contains("pipeline.")).count(), 1, "{more:?}: {said}");
        assert!(!said.contains("rank 0") && !place.path().join("no/logs").exists(), "{more:?}: {said}");
    }
}
