//! What cannot run is refused by every command that looks at it, in the same words, and leaves nothing behind.

use std::path::Path;
use std::process::Command;

use super::support::{ferrospeed, may_mount, output_of, small_recipe, stderr, stdout};
use serde_json::json;

/// A recipe and a ds_config with the same mistake are refused by whoever reads them, before anything begins.
#[test]
fn what_a_run_would_refuse_is_refused_by_check_and_plan_in_the_same_words() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let model = r#"{"model_type": "gpt2", "n_embd": 32, "n_head": 2, "n_layer": 2, "n_positions": 16, "vocab_size": 50}"#;
    std::fs::write(at("config.json"), model).unwrap();
    let recipe = small_recipe(
        r#"
        name = "refused"
        steps = 1
        ranks = 2
        model.layers = 2
        model.activation_checkpointing = true
        data = { synthetic = 1000, sequence = 16 }
        "#,
        "train_batch_size = 2\noptimizer = { type = 'Adam' }",
    );
    std::fs::write(at("recipe.toml"), recipe).unwrap();
    let good = r#"{"train_batch_size": 2, "optimizer": {"type": "Adam"}}"#;
    std::fs::write(at("ds_config.json"), good).unwrap();
    let cases = [
        (
            vec!["pipeline.schedule=\"zb-h2\"".to_owned(), "pipeline.stages=2".to_owned()],
            "did you mean 'zb-h1'?",
        ),
        (
            vec!["pipeline.partition=\"parameter\"".to_owned(), "pipeline.stages=2".to_owned()],
            "did you mean 'parameters'?",
        ),
        (vec!["optimizer.type=\"MuAdam\"".to_owned()], "\"MuAdam\" does not run here"),
        (
            vec!["optimizer.type=\"OneBitAdam\"".to_owned(), "tensor_parallel.autotp_size=2".to_owned()],
            "same whole model",
        ),
        (
            vec!["eigenvalue.enabled=true".to_owned(), "tensor_parallel.autotp_size=2".to_owned()],
            "measures whole blocks",
        ),
        (vec!["amp.enabled=true".to_owned()], "apex does not exist here"),
        (
            vec!["comms_logger={\"enabled\": true, \"prof_ops\": [\"all_reduse\"]}".to_owned()],
            "'all_reduse' is no operation",
        ),
        (
            vec!["csv_monitor={\"enabled\": true, \"job_name\": \"../../x\"}".to_owned()],
            "`csv_monitor.job_name`: \"../../x\" leads out",
        ),
    ];
    for (overrides, why) in &cases {
        let set: Vec<&str> = overrides.iter().flat_map(|one| ["--set", one.as_str()]).collect();
        let (ds_config, recipe, model) = (at("ds_config.json"), at("recipe.toml"), at("config.json"));
        let out = at("out");
        for words in [
            &["config", "check", &ds_config][..],
            &["plan", &ds_config, "--model", &model],
            &["config", "check", &recipe],
            &["plan", &recipe],
            &["train", &recipe, "--out", &out],
        ] {
            let output = ferrospeed(&[words, &set].concat());
            assert_eq!(output.status.code(), Some(2), "{words:?} {overrides:?}: {}", stdout(&output));
            assert!(stderr(&output).contains(why), "{words:?} {overrides:?}: {}", stderr(&output));
        }
        assert!(!folder.path().join("out/logs").exists(), "a rank began: {overrides:?}");
    }
    let method = ["--set", "pipeline={\"partition_method\": \"uniform\"}"];
    let output = ferrospeed(&[&["config", "check", &at("ds_config.json")][..], &method].concat());
    assert_eq!(output.status.code(), Some(2), "{}", stdout(&output));
    assert!(stderr(&output).contains("did you mean `partition`?"), "{}", stderr(&output));
    // What the rest of a recipe gets wrong, `config check` says too.
    for (set, why) in [("steps=0", "steps: must be at least 1"), ("model.layers=0", "model.layers")] {
        for words in [&["config", "check"][..], &["plan"], &["train"]] {
            let output = ferrospeed(&[words, &[&at("recipe.toml"), "--set", set]].concat());
            assert_eq!(output.status.code(), Some(2), "{words:?} {set}: {}", stdout(&output));
            assert!(stderr(&output).contains(why), "{words:?} {set}: {}", stderr(&output));
        }
    }
    let output = ferrospeed(&["config", "check", &at("recipe.toml"), "--set", "steps=0", "--json"]);
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    let document: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!((&document["ok"], &document["errors"]), (&false.into(), &1.into()), "{document}");
    assert!(document["findings"][0]["why"].as_str().unwrap().starts_with("steps: "), "{document}");
    let output = ferrospeed(&["config", "check", &at("recipe.toml"), "--set", "pipeline.stages=2"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
}

/// What runs, and not as its author most likely meant, is told by whoever looks at a recipe, and refused by nobody.
#[test]
fn a_technique_that_begins_too_late_is_told_by_check_plan_and_train() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let own = "name = 'late'\nsteps = 2\nmodel.layers = 1\nmodel.vocabulary = 64\ndata = { synthetic = 1000, sequence = 16 }";
    let ds_config = r#"
        train_batch_size = 2
        optimizer = { type = "Adam" }
        [ds_config.compression_training.sparse_pruning]
        shared_parameters = { enabled = true, method = "l1" }
        different_groups = { all = { params = { dense_ratio = 0.5 }, modules = ["mlp"] } }
    "#;
    std::fs::write(at("recipe.toml"), small_recipe(own, ds_config)).unwrap();
    let (recipe, out) = (at("recipe.toml"), at("out"));
    let late = "note: compression_training.sparse_pruning.shared_parameters.schedule_offset: it begins after";
    let in_time = "compression_training.sparse_pruning.shared_parameters.schedule_offset=1";
    let at_end = in_time.replace("=1", "=2");
    for words in [&["config", "check", &recipe][..], &["plan", &recipe], &["train", &recipe, "--out", &out]] {
        let overwrites: &[&str] = if words[0] == "train" { &["--overwrite"] } else { &[] };
        for (set, offset) in [(None, Some(1000)), (Some(in_time), None), (Some(at_end.as_str()), Some(2))] {
            let set = set.map_or(Vec::new(), |set| vec!["--set", set]);
            let output = ferrospeed(&[words, &set, overwrites].concat());
            assert_eq!(output.status.code(), Some(0), "{words:?} {set:?}: {}", stderr(&output));
            let said = stderr(&output).replace(&format!("{recipe}: "), "");
            let told =
                offset.map(|offset| format!("{late} {offset} steps, and the run has 2: no step learns"));
            assert_eq!(said.contains(late), told.is_some(), "{words:?} {set:?}: {said}");
            assert!(told.is_none_or(|told| said.contains(&told)), "{words:?} {set:?}: {said}");
        }
    }
    let output = ferrospeed(&["config", "check", &recipe, "--json"]);
    let document: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!((&document["ok"], &document["warnings"]), (&true.into(), &1.into()), "{document}");
    assert_eq!(document["findings"][0]["severity"], "warning", "{document}");
}

#[test]
fn a_student_that_contradicts_itself_is_refused_without_its_recipe_too() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("ds_config.json");
    let reduction = json!({"enabled": true, "keep_number_layer": 3, "teacher_layer": [1, 2]});
    let ds_config = json!({"train_batch_size": 1, "compression_training": {"layer_reduction": reduction}});
    std::fs::write(&config, ds_config.to_string()).unwrap();
    let check = |more: &[&str]| ferrospeed(&[&["config", "check", config.to_str().unwrap()], more].concat());
    let output = check(&[]);
    assert_eq!(output.status.code(), Some(2), "{}", stdout(&output));
    let why =
        "compression_training.layer_reduction: keep_number_layer is 3, and teacher_layer names 2 layers";
    assert!(stderr(&output).contains(why), "{}", stderr(&output));
    let output = check(&["--set", "compression_training.layer_reduction.keep_number_layer=2"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
}

#[test]
fn data_that_is_not_here_is_told_by_a_plan_and_refused_by_a_run() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let gone = at("gone.txt");
    let own =
        format!("name = 'gone'\nsteps = 1\nmodel.layers = 1\ndata = {{ text = ['{gone}'], sequence = 16 }}");
    let recipe = at("recipe.toml");
    std::fs::write(&recipe, small_recipe(&own, "train_batch_size = 2\noptimizer = { type = 'Adam' }"))
        .unwrap();
    let why = format!("data: {gone} does not exist");
    let output = ferrospeed(&["plan", &recipe, "--json"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(
        stderr(&output).contains(&format!("note: {why}; it is planned for all the same")),
        "{}",
        stderr(&output)
    );
    serde_json::from_str::<serde_json::Value>(&stdout(&output)).expect("a plan and nothing else");
    for words in [&["train", &recipe, "--out", &at("out")][..], &["config", "check", &recipe]] {
        let output = ferrospeed(words);
        assert_eq!(output.status.code(), Some(2), "{words:?}: {}", stdout(&output));
        assert!(stderr(&output).contains(&why), "{words:?}: {}", stderr(&output));
    }
    std::fs::write(&gone, "a text that is there again, and long enough to be cut").unwrap();
    let output = ferrospeed(&["plan", &recipe]);
    assert_eq!(stderr(&output), "");
}

#[test]
fn too_few_slots_for_checkpoints_are_told_with_the_number_before_a_rank_begins() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let recipe = small_recipe(
        r#"
        name = "slots"
        steps = 1
        model.layers = 4
        model.vocabulary = 64
        model.activation_checkpointing = true
        data = { synthetic = 1000, sequence = 16 }
        "#,
        r#"
        train_batch_size = 4
        train_micro_batch_size_per_gpu = 1
        optimizer = { type = "Adam" }
        [ds_config.activation_checkpointing]
        partition_activations = true
        contiguous_memory_optimization = true
        number_checkpoints = 3
        "#,
    );
    std::fs::write(at("recipe.toml"), recipe).unwrap();
    let (recipe, out) = (at("recipe.toml"), at("out"));
    let uniform = ["--set", "pipeline.partition=\"uniform\""];
    // Four micro-batches: the first of two stages has two of them under way, each with the inputs of its blocks.
    let in_stages = [&["--pp", "2"][..], &uniform].concat();
    for (more, needed) in [(&[][..], 4), (&in_stages, 4)] {
        let slots = format!("activation_checkpointing.number_checkpoints={needed}");
        for words in [&["plan", &recipe][..], &["train", &recipe, "--out", &out, "--device", "cpu"]] {
            let output = ferrospeed(&[words, more].concat());
            assert_eq!(output.status.code(), Some(2), "{words:?} {more:?}: {}", stdout(&output));
            assert!(stderr(&output).contains(&format!("write {needed}")), "{words:?}: {}", stderr(&output));
            assert!(!folder.path().join("out/logs").exists());
        }
        // With the number that was told it runs, and with one less it would not.
        let output = ferrospeed(
            &[
                &["train", &recipe, "--out", &out, "--overwrite", "--set", &slots, "--device", "cpu"][..],
                more,
            ]
            .concat(),
        );
        assert_eq!(output.status.code(), Some(0), "{more:?}: {}", stderr(&output));
        std::fs::remove_dir_all(&out).unwrap();
    }
}

/// A text, and a recipe that trains on it and keeps its optimizer's state in `disk`.
fn offloading(folder: &Path, disk: &Path) -> String {
    std::fs::write(folder.join("text.txt"), "some text, and more of it. ".repeat(50)).unwrap();
    let own = format!(
        "name = 'offloading'\nsteps = 1\nmodel.layers = 1\ndata = {{ text = ['{}'], sequence = 16 }}",
        folder.join("text.txt").display()
    );
    let ds_config = format!(
        "train_batch_size = 1\noptimizer = {{ type = 'Adam' }}\n\
         zero_optimization = {{ stage = 3, offload_optimizer = {{ device = 'nvme', nvme_path = '{}' }} }}",
        disk.display()
    );
    small_recipe(&own, &ds_config)
}

#[test]
fn a_file_in_the_place_of_a_disks_folder_is_told_before_a_rank_begins() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    std::fs::write(at("taken"), "").unwrap();
    for place in ["taken", "taken/below"] {
        std::fs::write(at("recipe.toml"), offloading(folder.path(), Path::new(&at(place)))).unwrap();
        let zero = json!({"stage": 3, "offload_param": {"device": "nvme", "nvme_path": at(place)}});
        let ds_config =
            json!({"train_batch_size": 1, "optimizer": {"type": "Adam"}, "zero_optimization": zero});
        std::fs::write(at("ds_config.json"), ds_config.to_string()).unwrap();
        let (recipe, ds_config, out) = (at("recipe.toml"), at("ds_config.json"), at("out"));
        for words in [
            &["config", "check", &recipe][..],
            &["config", "check", &ds_config],
            &["plan", &recipe],
            &["train", &recipe, "--out", &out],
        ] {
            let output = ferrospeed(words);
            assert_eq!(output.status.code(), Some(2), "{words:?}: {}", stdout(&output));
            let why = format!("nvme_path: {} is no folder", at("taken"));
            assert!(stderr(&output).contains(&why), "{}", stderr(&output));
        }
        assert!(!folder.path().join("out").exists(), "tokens of a refused run stay behind");
    }
}

#[test]
fn a_disk_that_cannot_be_written_to_is_told_before_a_rank_begins() {
    if !may_mount() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    std::fs::create_dir(at("disk")).unwrap();
    for (place, words, why) in [
        ("disk", "config check", "cannot be written to (Read-only file system)"),
        ("disk", "plan", "cannot be written to (Read-only file system)"),
        ("disk", "train", "cannot be written to (Read-only file system)"),
        ("disk/new", "train", "is not there and cannot be made"),
    ] {
        std::fs::write(at("recipe.toml"), offloading(folder.path(), Path::new(&at(place)))).unwrap();
        let out = if words == "train" { format!("--out {}", at("out")) } else { String::new() };
        let script = format!(
            "mount -t tmpfs -o ro tmpfs {} && exec {} {words} {} {out}",
            at("disk"),
            env!("CARGO_BIN_EXE_ferrospeed"),
            at("recipe.toml")
        );
        let output = output_of(Command::new("unshare").args(["-rm", "sh", "-c", &script]));
        assert_eq!(output.status.code(), Some(2), "{words}: {} {}", stdout(&output), stderr(&output));
        assert!(stderr(&output).contains(why), "{words}: {}", stderr(&output));
        assert!(!folder.path().join("out").exists());
    }
    // A folder that is not there may be on the machine that the configuration is for.
    for words in ["config check", "plan"] {
        let script = format!(
            "mount -t tmpfs -o ro tmpfs {} && exec {} {words} {}",
            at("disk"),
            env!("CARGO_BIN_EXE_ferrospeed"),
            at("recipe.toml")
        );
        let output = output_of(Command::new("unshare").args(["-rm", "sh", "-c", &script]));
        assert!(!stderr(&output).contains("disk/new"), "{words}: {}", stderr(&output));
    }
}

#[test]
fn stages_that_a_recipes_ranks_cannot_hold_are_refused_by_all_and_options_bring_their_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = folder.path().join("recipe.toml").display().to_string();
    let own = "name = 'stages'\nsteps = 1\nmodel.layers = 2\ndata = { synthetic = 1000, sequence = 16 }";
    let ds_config = "train_micro_batch_size_per_gpu = 1\noptimizer = { type = 'Adam' }";
    std::fs::write(&recipe, small_recipe(own, &format!("{ds_config}\npipeline = {{ stages = 2 }}"))).unwrap();
    for words in [&["config", "check"][..], &["plan"], &["train"]] {
        let output = ferrospeed(&[words, &[&recipe]].concat());
        assert_eq!(output.status.code(), Some(2), "{words:?}: {}", stdout(&output));
        assert!(
            stderr(&output).contains("need a multiple of 2 ranks, and there are 1"),
            "{}",
            stderr(&output)
        );
    }
    std::fs::write(&recipe, small_recipe(own, ds_config)).unwrap();
    let output = ferrospeed(&["plan", &recipe, "--pp", "2"]);
    assert!(stdout(&output).contains("2 rank(s)"), "{}{}", stdout(&output), stderr(&output));
}

#[test]
fn a_refused_run_leaves_no_folder_and_of_an_earlier_one_nothing_is_lost() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    std::fs::write(at("text.txt"), "some text, and more of it. ".repeat(50)).unwrap();
    let own = format!(
        "name = 'refused'\nsteps = 1\nmodel.layers = 1\ndata = {{ text = ['{}'], sequence = 16 }}",
        at("text.txt")
    );
    let ds_config = "train_batch_size = 1\noptimizer = { type = 'Adam' }";
    std::fs::write(at("recipe.toml"), small_recipe(&own, ds_config)).unwrap();
    let train = |more: &[&str]| {
        ferrospeed(
            &[&["train", &at("recipe.toml"), "--out", &at("out"), "--device", "cpu"][..], more].concat(),
        )
    };
    // Text is looked at, and then a key is wrong, ranks are too many, or there is nothing to go on from.
    for more in [
        &["--set", "optimizer.type=MuAdam"][..],
        &["-n", "2000"],
        &["--resume", &at("nowhere")],
        &["--resume", "step9"],
        &["--trace", &at("gone/trace.json")],
    ] {
        let output = train(more);
        assert_eq!(output.status.code(), Some(2), "{more:?}: {}", stderr(&output));
        assert!(!folder.path().join("out").exists(), "{more:?}: {}", stderr(&output));
    }
    std::fs::write(at("out"), "mine").unwrap();
    let output = train(&["--overwrite"]);
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    assert!(stderr(&output).contains("is no folder, and a run needs one"), "{}", stderr(&output));
    std::fs::remove_file(at("out")).unwrap();
    assert!(train(&[]).status.success());
    let kept = || std::fs::read_dir(at("out/data")).unwrap().count();
    let before = kept();
    assert!(!train(&["--overwrite", "-n", "2000"]).status.success());
    assert_eq!((kept(), folder.path().join("out/log.jsonl").exists()), (before, true));
}

#[test]
fn a_folder_that_is_not_there_is_not_watched() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    for (path, why) in [(folder.path().join("gone"), "is not there"), (file, "is no folder")] {
        let output = ferrospeed(&["watch", path.to_str().unwrap(), "--port", "0"]);
        assert_eq!(output.status.code(), Some(2), "{}", stdout(&output));
        assert!(stderr(&output).contains(why), "{}", stderr(&output));
    }
}

/// A pipe would be waited for: at the end of a run, before its weights are written.
#[test]
fn a_pipe_is_no_place_for_what_a_command_writes() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let (pipe, out) = (at("pipe"), at("out"));
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let model = r#"{"model_type": "gpt2", "n_embd": 32, "n_head": 2, "n_layer": 2, "n_positions": 16, "vocab_size": 50}"#;
    std::fs::write(at("config.json"), model).unwrap();
    let recipe = small_recipe(
        "name = 'piped'\nsteps = 1\nmodel.layers = 2\ndata = { synthetic = 1000, sequence = 16 }",
        "train_batch_size = 2\noptimizer = { type = 'Adam' }",
    );
    std::fs::write(at("recipe.toml"), recipe).unwrap();
    let (recipe, config) = (at("recipe.toml"), at("config.json"));
    for words in
        [vec!["train", &recipe, "--out", &out, "--trace", &pipe], vec!["profile", &config, "--output", &pipe]]
    {
        let output = ferrospeed(&words);
        assert_eq!(output.status.code(), Some(2), "{words:?}: {}", stderr(&output));
        assert!(stderr(&output).contains("is a pipe, socket or device; name a file"), "{}", stderr(&output));
    }
    // A report that cannot be written is told instead.
    let profiler =
        format!(r#"flops_profiler={{"enabled": true, "profile_step": 1, "output_file": "{pipe}"}}"#);
    let output = ferrospeed(&["train", &recipe, "--out", &out, "--set", "steps=3", "--set", &profiler]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stderr(&output).contains("is no plain file but a pipe"), "{}", stderr(&output));
}
