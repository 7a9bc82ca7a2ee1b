//! What a model or a machine cannot do is found by `config check`, `plan` and `train` alike, before anything begins.

use super::support;
use std::path::Path;

use super::support::{ferrospeed, small_recipe, stderr, stdout};
use serde_json::{Value, json};

struct Workplace(tempfile::TempDir);

impl Workplace {
    /// A GPT-2 of two layers and two heads, 32 channels wide, on some text.
    fn new() -> Workplace {
        let place = Workplace(tempfile::tempdir().unwrap());
        std::fs::write(place.at("text.txt"), "some text, and more of it. ".repeat(50)).unwrap();
        let own = format!(
            "name = 'examined'\nsteps = 1\nmodel.layers = 2\ndata = {{ text = ['{}'], sequence = 16 }}",
            place.at("text.txt")
        );
        let ds_config = "train_micro_batch_size_per_gpu = 1\noptimizer = { type = 'Adam' }";
        std::fs::write(place.at("recipe.toml"), small_recipe(&own, ds_config)).unwrap();
        let ds_config = json!({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam"}});
        place.write("ds_config.json", &ds_config);
        place
    }

    fn at(&self, name: &str) -> String {
        self.0.path().join(name).display().to_string()
    }

    fn write(&self, name: &str, value: &Value) -> String {
        std::fs::write(self.at(name), value.to_string()).unwrap();
        self.at(name)
    }

    #[track_caller]
    fn refused(&self, words: &[&str], set: &[&str], why: &str) {
        let set: Vec<&str> = set.iter().flat_map(|one| ["--set", one]).collect();
        let output = ferrospeed(&[words, &set].concat());
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{words:?} {set:?}: {}{said}", stdout(&output));
        assert!(said.contains(why), "{words:?} {set:?}: {said}");
        assert!(!Path::new(&self.at("out")).exists(), "{words:?} {set:?}: a refused run leaves its folder");
    }

    /// Refused by each command that looks at a recipe.
    #[track_caller]
    fn refused_by_all(&self, set: &[&str], why: &str) {
        let (recipe, out) = (self.at("recipe.toml"), self.at("out"));
        for words in
            [&["config", "check", &recipe][..], &["plan", &recipe], &["train", &recipe, "--out", &out]]
        {
            self.refused(words, set, why);
        }
    }
}

#[test]
fn a_share_for_validation_that_leaves_nothing_to_train_on_is_refused_by_all() {
    let place = Workplace::new();
    let why = "validation = 0.9999 keeps all 84 sequences of 16 tokens, and none is left to train on";
    place.refused_by_all(&["data.validation=0.9999"], why);
    std::fs::write(place.at("tokens.bin"), [7; 84 * 32]).unwrap();
    let tokens =
        format!("{{\"tokens\": [{:?}], \"sequence\": 16, \"validation\": 0.9999}}", place.at("tokens.bin"));
    place.refused_by_all(&[&format!("data={tokens}"), "model.vocabulary=2000"], why);
    let lines = format!("{}\n", json!({"text": "x".repeat(84 * 16 - 20)}));
    std::fs::write(place.at("text.jsonl"), lines).unwrap();
    let lines =
        format!("{{\"jsonl\": [{:?}], \"sequence\": 16, \"validation\": 0.9999}}", place.at("text.jsonl"));
    place.refused_by_all(&[&format!("data={lines}")], "none is left to train on");
}

#[test]
fn a_size_that_is_null_is_the_usual_one_for_all() {
    let place = Workplace::new();
    let keys = json!({"model_type": "gpt2", "n_embd": 32, "n_head": 2, "n_layer": null, "n_positions": 64, "vocab_size": 256});
    let config = place.write("config.json", &keys);
    let mut recipe = std::fs::read_to_string(place.at("recipe.toml")).unwrap();
    recipe = recipe.lines().filter(|line| !line.starts_with("model.")).collect::<Vec<_>>().join("\n");
    std::fs::write(place.at("recipe.toml"), format!("model.config = {config:?}\n{recipe}")).unwrap();
    let recipe = place.at("recipe.toml");
    for words in [
        &["config", "check", &recipe][..],
        &["plan", &recipe],
        &["plan", &place.at("ds_config.json"), "--model", &config],
    ] {
        let output = ferrospeed(words);
        assert!(output.status.success(), "{words:?}: {}{}", stdout(&output), stderr(&output));
    }
}

#[test]
fn what_a_model_cannot_be_divided_into_is_refused_by_all() {
    let place = Workplace::new();
    let cases: [(&[&str], &str); 5] = [
        (&["ranks=4", "tensor_parallel.autotp_size=4"], "(--tp): 2 heads cannot be shared by 4 ranks alike"),
        (&["model.heads=5"], "32 channels cannot be cut into 5 heads"),
        (&["ranks=8", "pipeline.stages=8"], "of 8 gets none of 4 layers"),
        (
            &["ranks=2", "expert_parallel.autoep_size=2"],
            "(--ep): a gpt2 has no experts to spread over 2 ranks",
        ),
        (
            &[
                "model.preset=llama",
                "data.sequence=33",
                "ranks=2",
                "tensor_parallel={\"autotp_size\": 2, \"sequence_parallel\": true}",
            ],
            "33 tokens cannot be shared by 2 ranks",
        ),
    ];
    for (set, why) in cases {
        place.refused_by_all(set, why);
    }
}

#[test]
fn counts_mean_the_same_however_they_are_written() {
    let place = Workplace::new();
    let keys = [
        "sequence_parallel_size",
        "pipeline.stages",
        "ds_config.pipeline.stages",
        "tensor_parallel.autotp_size",
        "ds_config.tensor_parallel.autotp_size",
    ];
    for key in keys {
        for value in ["2.0", "2e0"] {
            place.refused_by_all(&[&format!("{key}={value}")], "need a multiple of 2 ranks, and there are 1");
        }
        place.refused_by_all(&[&format!("{key}=1e15")], "1000000000000000 ranks, and there are 1");
        for value in ["1.5", "-1", "\"many\""] {
            if (key, value) == ("ds_config.tensor_parallel.autotp_size", "1.5") {
                // A section that DeepSpeed reads by a schema has it as 1, with a warning.
                continue;
            }
            place.refused_by_all(&[&format!("{key}={value}")], key.trim_start_matches("ds_config."));
        }
    }
    place.refused_by_all(&["ds_config.tensor_parallel.autotp_size=\"2\""], "need a multiple of 2 ranks");
    place.refused_by_all(&["ranks=0"], "ranks: must be at least 1");
    place.refused_by_all(
        &["pipeline.stages=2", "ds_config.pipeline=3"],
        "`pipeline`: expected an object, found 3",
    );
    place.refused_by_all(&["steps=1.5"], "steps: must be a whole number");
    let out = place.at("taken");
    let sets = ["ranks=2.0", "steps=1e0", "sequence_parallel_size=2.0", "train_batch_size=1.0"];
    let sets = sets.map(|one| ["--set", one]).concat();
    let output = ferrospeed(
        &[&["train", &place.at("recipe.toml"), "--out", &out, "--device", "cpu"][..], &sets].concat(),
    );
    assert!(output.status.success(), "{}", stderr(&output));
    let about: Value =
        serde_json::from_str(&std::fs::read_to_string(Path::new(&out).join("config/run.json")).unwrap())
            .unwrap();
    assert!(about.to_string().contains("\"ranks\":2"), "{about}");
}

#[test]
fn what_an_engine_would_refuse_is_refused_before_ranks_begin() {
    let place = Workplace::new();
    let cases: [(&[&str], &str); 7] = [
        (&["eigenvalue.enabled=true"], "numbered blocks lie below 'transformer.h'"),
        (
            &["eigenvalue={\"enabled\": true, \"layer_name\": \"transformer.h\", \"layer_num\": 1e18}"],
            "eigenvalue.layer_num: there are 2 blocks",
        ),
        (
            &[
                "ranks=2",
                "pipeline.stages=2",
                "eigenvalue={\"enabled\": true, \"layer_name\": \"transformer.h\"}",
            ],
            "measures whole blocks, and ranks hold parts of them",
        ),
        (
            &[
                "curriculum_learning={\"enabled\": true, \"min_difficulty\": 8, \"max_difficulty\": 4, \"schedule_type\": \"fixed_linear\", \"schedule_config\": {\"total_curriculum_step\": 4, \"difficulty_step\": 4}}",
            ],
            "curriculum_learning: the start is wrong",
        ),
        (
            &["optimizer={\"type\": \"Lamb\", \"params\": {\"min_coeff\": 20}}"],
            "`optimizer.params.min_coeff`: 20 is larger than max_coeff 10",
        ),
        (&["optimizer.type=MuAdam"], "\"MuAdam\" does not run here"),
        (
            &["comms_logger={\"enabled\": true, \"prof_all\": false, \"prof_ops\": [\"x\"]}"],
            "'x' is no operation",
        ),
    ];
    for (set, why) in cases {
        place.refused_by_all(set, why);
    }
    // A configuration by itself, of ranks and batches that are not known.
    let ds_config = place.at("ds_config.json");
    for set in [&cases[3], &cases[6]] {
        let set = [set.0, &["gradient_clipping=auto", "train_batch_size=7"]].concat();
        place.refused(&["config", "check", &ds_config], &set, "");
    }
    // A program may have two groups of parameters, though no recipe has.
    let rates = "scheduler={\"type\": \"WarmupLR\", \"params\": {\"warmup_max_lr\": [0.1, 0.2]}}";
    place.refused_by_all(&[rates], "lists 2 values but the optimizer has 1 parameter groups");
    let output = ferrospeed(&["config", "check", &ds_config, "--set", rates]);
    assert!(output.status.success(), "{}", stderr(&output));
}

#[test]
fn a_check_tells_what_is_wrong_with_recipe_and_configuration_together() {
    let place = Workplace::new();
    let check = ["config", "check", &place.at("recipe.toml"), "--json"];
    let sets =
        ["steps=0", "zero_optimization.stage=7", "training.learning_rate=1e-3", "optimizer.params.lr=2e-3"];
    let output = ferrospeed(&[&check[..], &sets.map(|one| ["--set", one]).concat()].concat());
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    place.refused(&["config", "check", ""], &[], "a value is required");
    let found: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(found["errors"], 3, "{found:#}");
    for what in ["steps: must be", "zero_optimization.stage", "training.learning_rate: 0.001 contradicts"] {
        assert!(found.to_string().contains(what), "{what}: {found:#}");
    }
}

#[test]
fn data_that_is_too_little_is_refused_by_all() {
    let place = Workplace::new();
    let recipe = std::fs::read_to_string(place.at("recipe.toml")).unwrap();
    let text = format!("text = ['{}']", place.at("text.txt"));
    let synthetic = recipe.replace(&text, "synthetic = 1000");
    assert_ne!(recipe, synthetic);
    std::fs::write(place.at("recipe.toml"), &synthetic).unwrap();
    for tokens in ["0", "1", "15"] {
        let why = format!("data: {tokens} tokens do not make a sequence of 16 tokens");
        place.refused_by_all(&[&format!("data.synthetic={tokens}")], &why);
    }
    let share = ["data.synthetic=31", "data.validation=0.1"];
    place.refused_by_all(&share, "do not make a training and a validation sequence");
    place.refused_by_all(&["model.vocabulary=1"], "model.vocabulary: must be in 2..=16777216");
    // What lies in files may be on another machine than the one that is planned on.
    std::fs::write(place.at("tokens.bin"), [0; 8]).unwrap();
    std::fs::write(place.at("empty.txt"), "").unwrap();
    let tokens = format!("tokens = ['{}']", place.at("tokens.bin"));
    let empty = format!("text = ['{}']", place.at("empty.txt"));
    let cases = [(tokens, "data: 4 tokens do not make a sequence"), (empty, "there is no text in them")];
    let out = place.at("out");
    for (data, why) in cases {
        let recipe = synthetic.replace("synthetic = 1000", &data);
        std::fs::write(place.at("files.toml"), format!("model.vocabulary = 256\n{recipe}")).unwrap();
        place.refused(&["config", "check", &place.at("files.toml")], &[], why);
        place.refused(&["train", &place.at("files.toml"), "--out", &out], &[], why);
    }
}

#[test]
fn curves_are_written_to_no_place_that_keeps_none_and_the_key_is_named() {
    let place = Workplace::new();
    std::fs::write(place.at("file"), "").unwrap();
    for section in ["tensorboard", "csv_monitor"] {
        let of_files = format!("\"output_path\": {:?}, \"job_name\": \"file\"", place.at("."));
        let no_folder = format!("{section}.job_name: {} is no folder", place.at("./file"));
        for (keys, why) in [
            ("\"output_path\": \"/dev/null\"", format!("{section}.output_path: /dev/null is no folder")),
            ("\"job_name\": \"/dev/null\"", format!("`{section}.job_name`: \"/dev/null\" leads out of")),
            (&of_files, no_folder),
        ] {
            let set = format!("{section}={{\"enabled\": true, {keys}}}");
            place.refused_by_all(&[&set], &why);
            place.refused(&["config", "check", &place.at("ds_config.json")], &[&set], &why);
        }
        let set = format!("{section}={{\"enabled\": true, \"job_name\": \"a\\u0000b\"}}");
        place.refused_by_all(&[&set], &format!("{section}.job_name: \"a\\0b\" holds a NUL character"));
        let set = format!("{section}={{\"enabled\": true, \"output_path\": \"/proc/curves\"}}");
        place.refused_by_all(&[&set], &format!("{section}.output_path: /proc/curves is the kernel's"));
    }
    let search = ["train", &place.at("recipe.toml"), "--autotuning", "tune"];
    for key in ["results_dir", "exps_dir"] {
        let set = format!("autotuning.{key}=/dev/null");
        place.refused(&search, &[&set], &format!("autotuning.{key}: /dev/null is no folder"));
    }
    place.refused_by_all(
        &["wandb={\"enabled\": true, \"dir\": \"/dev/null\"}"],
        "wandb.dir: /dev/null is no folder",
    );
}

#[test]
fn experts_are_counted_by_all_and_the_option_is_named() {
    let place = Workplace::new();
    let mixture = json!({
        "model_type": "mixtral", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 8,
        "num_experts_per_tok": 2, "max_position_embeddings": 64,
    });
    let mixture = place.write("mixture.json", &mixture);
    let dense = json!({
        "model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 64,
    });
    let dense = place.write("dense.json", &dense);
    let recipe = std::fs::read_to_string(place.at("recipe.toml")).unwrap();
    let recipe = recipe.replace("model.preset = 'gpt2'", &format!("model.config = '{mixture}'"));
    let sized = ["model.width = 32\n", "model.heads = 2\n", "model.layers = 2\n"];
    let recipe = sized.iter().fold(recipe, |recipe, line| recipe.replace(line, ""));
    std::fs::write(place.at("mixture.toml"), recipe).unwrap();
    let (recipe, ds_config, out) = (place.at("mixture.toml"), place.at("ds_config.json"), place.at("out"));
    let why = "expert_parallel.autoep_size (--ep): 8 experts cannot be shared by 3 ranks alike; 1, 2, 4, 8 ranks fit";
    place.refused(&["train", &recipe, "--out", &out, "--ep", "3", "-n", "3"], &[], why);
    place.refused(&["plan", &recipe, "--ep", "3", "-w", "3"], &[], why);
    place.refused(&["config", "check", &recipe], &["ranks=3", "expert_parallel.autoep_size=3"], why);
    place.refused(&["plan", &ds_config, "--model", &mixture, "--ep", "3", "-w", "3"], &[], why);
    let why = "(--ep): a llama has no experts to spread over 2 ranks";
    place.refused(&["plan", &ds_config, "--model", &dense, "--ep", "2", "-w", "2"], &[], why);
    let why = "(--ep): the model has no experts to spread over 2 ranks";
    place.refused(&["plan", &ds_config, "--model", &dense, "--search", "--ep", "2", "-w", "2"], &[], why);
    let why = "(--tp): 4 heads cannot be shared by 3 ranks alike";
    place.refused(&["plan", &ds_config, "--model", &dense, "--tp", "3"], &[], why);
    // Feed-forward layers that are experts take no chunks, and nobody is left to believe that they do.
    let why = "model.mlp_chunk: experts take all tokens that are routed to them, not 16 at a time";
    for words in [&["config", "check", &recipe][..], &["plan", &recipe], &["train", &recipe, "--out", &out]] {
        place.refused(words, &["model.mlp_chunk=16"], why);
    }
}

#[test]
fn files_and_folders_that_a_run_cannot_use_are_found_by_a_check() {
    let place = Workplace::new();
    let (recipe, out) = (place.at("recipe.toml"), place.at("out"));
    let offload = |path: &str| {
        format!(
            "zero_optimization={{\"stage\": 3, \"offload_optimizer\": {{\"device\": \"nvme\", \"nvme_path\": \"{path}\"}}}}"
        )
    };
    let gone = format!("data.text=[\"{}\"]", place.at("gone.txt"));
    let cases = [
        (offload("/proc/nowhere/disk"), "nvme_path: /proc/nowhere/disk is the kernel's"),
        (offload("/sys/disk"), "nvme_path: /sys/disk is the kernel's"),
        (offload("a\\u0000b"), "holds a NUL character, which no path has"),
        (gone, "gone.txt does not exist"),
        ("data.text=[\"/dev/zero\"]".to_owned(), "/dev/zero is no plain file but a pipe, socket or device"),
        (format!("trace=\"{}\"", place.at("gone/trace.json")), "there is no folder"),
        ("trace=\"/proc/trace.json\"".to_owned(), "trace: /proc/trace.json is the kernel's"),
        ("data.cache=\"/proc/cache\"".to_owned(), "/proc/cache"),
        ("trace=\"a\\u0000b\"".to_owned(), "trace: \"a\\0b\" holds a NUL character"),
    ];
    for (set, why) in &cases {
        for words in [&["config", "check", &recipe][..], &["train", &recipe, "--out", &out]] {
            place.refused(words, &[set], why);
        }
        if !set.starts_with("data.text") {
            place.refused(&["plan", &recipe], &[set], why);
        }
    }
    let ds_config = place.at("ds_config.json");
    let why = "zero_optimization.offload_optimizer.nvme_path: /proc/nowhere/disk is the kernel's";
    place.refused(&["config", "check", &ds_config], &[&offload("/proc/nowhere/disk")], why);
}

#[test]
fn a_disks_folder_that_is_not_there_is_planned_for_made_and_taken_away() {
    let place = Workplace::new();
    let (recipe, out) = (place.at("recipe.toml"), place.at("out"));
    let offload = format!(
        "zero_optimization={{\"stage\": 3, \"offload_optimizer\": {{\"device\": \"nvme\", \"nvme_path\": \"{}\"}}}}",
        place.at("disks/one")
    );
    let set = ["--set", &offload];
    for words in [&["config", "check", &recipe][..], &["plan", &recipe]] {
        let output = ferrospeed(&[words, &set].concat());
        assert_eq!(output.status.code(), Some(0), "{words:?}: {}", stderr(&output));
    }
    for ranks in ["1", "2"] {
        let train = ["train", &recipe, "--out", &out, "--device", "cpu", "--overwrite", "-n", ranks];
        let output = ferrospeed(&[&train[..], &set].concat());
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        assert!(!Path::new(&place.at("disks")).exists(), "{ranks}: folders that the run made stay behind");
    }
    // What was there is not the run's.
    std::fs::create_dir(place.at("disks")).unwrap();
    let output = ferrospeed(
        &[&["train", &recipe, "--out", &out, "--device", "cpu", "--overwrite"][..], &set].concat(),
    );
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(Path::new(&place.at("disks")).is_dir() && !Path::new(&place.at("disks/one")).exists());
}

#[test]
fn a_disks_folder_that_a_killed_run_left_goes_with_the_next_that_uses_it() {
    let place = Workplace::new();
    let (recipe, disk) = (place.at("recipe.toml"), place.at("disks/one"));
    let offload = format!(
        "zero_optimization={{\"stage\": 3, \"offload_optimizer\": {{\"device\": \"nvme\", \"nvme_path\": \"{disk}\"}}}}"
    );
    let train = |out: &str, steps: &str| {
        ["train", &recipe, "--out", &place.at(out), "--device", "cpu", "--set", &offload, "--set", steps]
            .map(str::to_owned)
    };
    let words = train("killed", "steps=1000000");
    let run = support::start(&words.each_ref().map(String::as_str));
    let log = place.at("killed/log.jsonl");
    support::wait_until("its first step", || std::fs::metadata(&log).is_ok_and(|log| log.len() > 0));
    // While it runs, another that uses the folder leaves it alone.
    let other = train("other", "steps=1");
    assert!(ferrospeed(&other.each_ref().map(String::as_str)).status.success());
    assert!(Path::new(&disk).is_dir());
    let pid = run.pid().parse().unwrap();
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL).unwrap();
    run.finish();
    assert!(Path::new(&disk).is_dir(), "a killed run takes nothing away");
    // What somebody has put there stays, and so does what holds it.
    std::fs::write(place.at("disks/mine"), "mine").unwrap();
    let next = train("next", "steps=1");
    let output = ferrospeed(&next.each_ref().map(String::as_str));
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(!Path::new(&disk).exists(), "what the killed run made stays behind");
    assert_eq!(std::fs::read_to_string(place.at("disks/mine")).unwrap(), "mine");
}

#[test]
fn checkpoints_are_written_to_no_place_that_keeps_no_files() {
    let place = Workplace::new();
    let given = place.at("checkpoints");
    for command in ["to-fp32", "export-hf", "import-deepspeed", "export-deepspeed", "to-universal"] {
        let words = ["checkpoint", command, &given, "/proc/checkpoint.safetensors"];
        place.refused(&words, &[], "/proc/checkpoint.safetensors is the kernel's");
    }
}

#[test]
fn a_timeline_takes_the_place_of_no_other_file() {
    let place = Workplace::new();
    let recipe = place.at("recipe.toml");
    std::fs::write(place.at("log.jsonl"), "{\"event\":\"step\",\"step\":1}\n").unwrap();
    let other = format!("trace=\"{}\"", place.at("log.jsonl"));
    let cases = [(other.as_str(), "is no timeline"), ("trace=\"\"", "is empty")];
    for (set, why) in cases {
        place.refused_by_all(&[set], why);
    }
    assert!(std::fs::read_to_string(place.at("log.jsonl")).unwrap().contains("step"));
    let timeline = format!("trace=\"{}\"", place.at("trace.json"));
    for out in [place.at("one"), place.at("two")] {
        let output = ferrospeed(&["train", &recipe, "--out", &out, "--set", &timeline]);
        assert!(output.status.success(), "{}", stderr(&output));
    }
}

#[test]
fn a_run_whose_gradients_stay_no_numbers_ends_with_a_verdict_and_without_weights() {
    let place = Workplace::new();
    let out = place.at("out");
    let sets = ["optimizer.params={\"lr\": 1e30}", "steps=30", "max_bad_steps=5"].map(|one| ["--set", one]);
    let output =
        ferrospeed(&[&["train", &place.at("recipe.toml"), "--out", &out][..], &sets.concat()].concat());
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(stderr(&output).contains("the last 5 steps is not a number"), "{}", stderr(&output));
    assert!(!Path::new(&out).join("model/model.safetensors").exists());
}
