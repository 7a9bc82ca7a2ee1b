//! The commands that look at things: what they print, and their exit codes.

use super::support;
use std::time::{Duration, Instant};

use super::support::{ferrospeed, stderr, stdout};

fn config_file(text: &str) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ds_config.json");
    std::fs::write(&path, text).unwrap();
    let path = path.to_str().unwrap().to_owned();
    (folder, path)
}

#[test]
fn a_good_config_is_accepted_and_a_typo_is_answered_with_the_right_key() {
    let (_folder, path) = config_file("{\"train_batch_size\": 8}");
    assert_eq!(ferrospeed(&["config", "check", &path]).status.code(), Some(0));
    let (_folder, path) = config_file("{\"train_batch_sise\": 8}");
    let output = ferrospeed(&["config", "check", &path]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("train_batch_size"), "{}", stderr(&output));
}

#[test]
fn a_count_of_nothing_is_refused_in_plain_words_and_help_names_what_was_typed() {
    let (_folder, path) = config_file("{\"train_batch_size\": 8}");
    for words in [
        &["plan", &path, "-w", "0"][..],
        &["plan", &path, "--ranks_per_host", "0"],
        &["config", "check", &path, "--world_size=-3"],
    ] {
        let output = ferrospeed(words);
        assert_eq!(output.status.code(), Some(2));
        assert!(stderr(&output).contains("must be at least 1"), "{words:?}: {}", stderr(&output));
    }
    for command in ["pipeline", "estimate"] {
        let help = stdout(&ferrospeed(&["plan", command, "--help"]));
        assert!(help.contains(&format!("Usage: ferrospeed plan {command} [OPTIONS]")), "{help}");
    }
}

#[test]
fn config_show_fills_the_autos_of_a_recipe_and_says_from_where() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("recipe.toml");
    let recipe = r#"
        name = "auto"
        steps = 50
        ranks = 2
        [model]
        preset = "gpt2"
        layers = 1
        width = 32
        heads = 1
        vocabulary = 64
        [data]
        synthetic = 1000
        sequence = 16
        [training]
        learning_rate = 3e-4
        [ds_config]
        train_batch_size = "auto"
        train_micro_batch_size_per_gpu = "auto"
        optimizer = { type = "AdamW", params = { lr = "auto" } }
        zero_optimization = { stage = 2, reduce_bucket_size = "auto" }
    "#;
    std::fs::write(&path, recipe).unwrap();
    let path = path.to_str().unwrap();
    let output = ferrospeed(&["config", "show", path]);
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(0), "{said}");
    let shown: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(shown["train_batch_size"], 16);
    assert_eq!(shown["zero_optimization"]["reduce_bucket_size"], 1024);
    for line in [
        "`optimizer.params.lr`: \"auto\" is 0.0003, from the recipe's training.learning_rate",
        "`zero_optimization.reduce_bucket_size`: \"auto\" is 1024, from the model's hidden size 32: its square",
        "`train_micro_batch_size_per_gpu`: \"auto\" is 8, from the default of training.per_device_train_batch_size",
    ] {
        assert!(said.contains(line), "'{line}' is not in:\n{said}");
    }
    let contradicted = ferrospeed(&["config", "check", path, "--set", "optimizer.params.lr=0.1"]);
    assert_eq!(contradicted.status.code(), Some(2));
    assert!(
        stderr(&contradicted).contains("training.learning_rate: 0.0003 contradicts"),
        "{}",
        stderr(&contradicted)
    );
}

#[test]
fn ten_mistakes_give_ten_findings() {
    let keys: Vec<String> = (0..10).map(|key| format!("\"unknown_key_{key}\": 1")).collect();
    let (_folder, path) = config_file(&format!("{{\n{}\n}}", keys.join(",\n")));
    let output = ferrospeed(&["config", "check", "--json", &path]);
    assert_eq!(output.status.code(), Some(2));
    let document: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(document["errors"], 10);
    let lines: Vec<u64> = document["findings"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|finding| finding["line"].as_u64())
        .collect();
    assert_eq!(lines, (2..12).collect::<Vec<u64>>());
}

#[test]
fn batch_sizes_are_checked_for_a_number_of_ranks() {
    let (_folder, path) = config_file(
        "{\"train_batch_size\": 8, \"train_micro_batch_size_per_gpu\": 4, \"gradient_accumulation_steps\": 1}",
    );
    assert_eq!(ferrospeed(&["config", "check", "-w", "2", &path]).status.code(), Some(0));
    assert_eq!(ferrospeed(&["config", "check", "-w", "3", &path]).status.code(), Some(2));
}

#[test]
fn show_fills_in_defaults_and_applies_overrides() {
    let (_folder, path) = config_file("{\"train_batch_size\": 8}");
    let output = ferrospeed(&["config", "show", "-w", "2", "--set", "zero_optimization.stage=2", &path]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let document: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(document["train_micro_batch_size_per_gpu"], 4);
    assert_eq!(document["zero_optimization"]["stage"], 2);
    assert_eq!(ferrospeed(&["config", "show", "/does/not/exist"]).status.code(), Some(2));
}

#[test]
fn the_schema_is_json_and_the_manual_is_not_empty() {
    let schema: serde_json::Value =
        serde_json::from_str(&stdout(&ferrospeed(&["config", "schema"]))).unwrap();
    assert!(schema["properties"]["train_batch_size"].is_object());
    assert!(stdout(&ferrospeed(&["config", "docs"])).contains("train_batch_size"));
}

#[test]
fn the_doctor_looks_at_everything_and_finds_fault_only_with_what_was_asked_for() {
    let output = ferrospeed(&["doctor", "--json"]);
    assert_eq!(output.status.code(), Some(0), "{}", stdout(&output));
    let document: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
    let checks = document["checks"].as_array().unwrap();
    for topic in ["CPU", "Memory", "Limits", "Disks", "Accelerators", "Launchers"] {
        assert!(checks.iter().any(|check| check["topic"] == topic), "{topic}");
    }
    let output = ferrospeed(&["doctor", "--path", "/does/not/exist"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stdout(&output).contains("/does/not/exist"));
}

#[test]
fn completions_are_written_for_every_shell() {
    for shell in ["bash", "zsh", "fish"] {
        let output = ferrospeed(&["completions", shell]);
        assert_eq!(output.status.code(), Some(0));
        assert!(stdout(&output).contains("ferrospeed"), "{shell}");
    }
    assert_eq!(ferrospeed(&["completions", "cmd"]).status.code(), Some(2));
}

#[test]
fn output_that_is_not_a_terminal_has_no_colours() {
    for arguments in [&["doctor"][..], &["launch", "-n", "0", "--", "true"], &["--help"]] {
        let output = ferrospeed(arguments);
        assert!(!output.stdout.contains(&0x1b) && !output.stderr.contains(&0x1b), "{arguments:?}");
    }
}

#[test]
fn starting_is_cheap() {
    let best_of_five = |arguments: &[&str]| {
        let times = (0..5).map(|_| {
            let started = Instant::now();
            ferrospeed(arguments);
            started.elapsed()
        });
        times.min().unwrap()
    };
    let lines: Vec<String> = (0..200).map(|line| format!("  \"_comment_{line}\": {line}")).collect();
    let (_folder, path) = config_file(&format!("{{\n\"train_batch_size\": 8,\n{}\n}}", lines.join(",\n")));
    // The targets are 10 and 20 ms; the bounds only catch what is wrong by far on a busy machine.
    assert!(best_of_five(&["--help"]) < Duration::from_millis(500));
    assert!(best_of_five(&["config", "check", &path]) < Duration::from_millis(500));
}

#[test]
fn a_plan_says_whether_it_fits_and_exits_accordingly() {
    let (_folder, path) = config_file(
        "{\"train_batch_size\": 8, \"bf16\": {\"enabled\": true}, \"zero_optimization\": {\"stage\": 3}}",
    );
    let sizes = ["--params", "1e9", "--largest_layer_params", "1e7", "-w", "4", "--nvme_gib", "10"];
    let run = |host: &str| {
        let memory = ["--host_gib", host, "--device_gib", host, "--json"];
        ferrospeed(&[&["plan", &path][..], &sizes[..], &memory[..]].concat())
    };
    let roomy = run("1000");
    assert_eq!(roomy.status.code(), Some(0), "{}", stderr(&roomy));
    let document: serde_json::Value = serde_json::from_str(&stdout(&roomy)).unwrap();
    assert_eq!(document["fits"], true);
    assert!(!document["plan"]["rows"].as_array().unwrap().is_empty());
    let tight = run("0.01");
    assert_eq!(tight.status.code(), Some(1));
    let document: serde_json::Value = serde_json::from_str(&stdout(&tight)).unwrap();
    assert_eq!(document["shortfalls"][0]["tier"], "device");
    let text = ferrospeed(&[&["plan", &path][..], &sizes[..], &["--device_gib", "0.01"]].concat());
    assert!(stdout(&text).contains("does not fit: device needs "), "{}", stdout(&text));
}

#[test]
fn a_plan_reads_a_hugging_face_model_and_fills_in_autos_from_it() {
    let (folder, path) = config_file(
        "{\"train_batch_size\": 8, \"zero_optimization\": {\"stage\": 3, \"reduce_bucket_size\": \"auto\"}}",
    );
    let model = "{\"model_type\": \"gpt2\", \"n_embd\": 64, \"n_layer\": 2, \"n_head\": 4, \"vocab_size\": 256, \"n_positions\": 128}";
    std::fs::write(folder.path().join("config.json"), model).unwrap();
    let output = ferrospeed(&["plan", &path, "--model", folder.path().to_str().unwrap(), "-w", "2"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(stdout(&output).ends_with("fits\n"), "{}", stdout(&output));
    for (arguments, expected) in [
        (vec!["plan", &path], "--model"),
        (vec!["plan", &path, "--model", "/does/not/exist"], "/does/not/exist"),
        (vec!["plan", &path, "--params", "1.5"], "whole number"),
    ] {
        let output = ferrospeed(&arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(stderr(&output).contains(expected), "{arguments:?}: {}", stderr(&output));
    }
}

/// What `plan --json` says.
fn planned(arguments: &[&str]) -> serde_json::Value {
    let output = ferrospeed(&[&["plan"], arguments, &["--json"]].concat());
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", stderr(&output));
    serde_json::from_str(&stdout(&output)).unwrap()
}

fn bytes_of(plan: &serde_json::Value, purpose: &str) -> u64 {
    let rows = plan["plan"]["rows"].as_array().unwrap().iter();
    rows.filter(|row| row["purpose"] == purpose).map(|row| row["bytes"].as_u64().unwrap()).sum()
}

#[test]
fn a_placement_names_tiles_and_what_a_step_does_and_refuses_what_it_cannot_show() {
    let (folder, config) = config_file(
        "{\"train_micro_batch_size_per_gpu\": 2, \"bf16\": {\"enabled\": true}, \"optimizer\": {\"type\": \"Adam\"}, \"zero_optimization\": {\"stage\": 2}}",
    );
    let model = "{\"model_type\": \"gpt2\", \"n_embd\": 64, \"n_layer\": 2, \"n_head\": 4, \"vocab_size\": 256, \"n_positions\": 128}";
    std::fs::write(folder.path().join("config.json"), model).unwrap();
    let model = folder.path().to_str().unwrap().to_owned();
    let words = ["plan", &config, "--model", &model, "-w", "4", "--placement", "--rank", "3"];
    let output = ferrospeed(&words);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let text = stdout(&output);
    // 124,672 parameters, in parts of a quarter.
    for line in [
        "share 0: group 0, 28 parameters; part 3 of 4, 31168 elements",
        "values    bf16        124672 elements          249344 bytes  device, once for all ranks of a host",
        "master    fp32         31168 elements          124672 bytes  device",
        "collect: reduced gradients are added to this rank's part",
        "publish: owners send new values to all",
    ] {
        assert!(text.contains(line), "{line}\n{text}");
    }
    for (more, expected) in [
        (&["--tp", "2"][..], "leave out --tp"),
        (&["--rank", "4"], "counted from 0"),
        (&["--json"], "cannot be used with"),
    ] {
        let words: Vec<&str> = words[..7].iter().chain(more).copied().collect();
        let output = ferrospeed(&words);
        assert_eq!(output.status.code(), Some(2), "{more:?}");
        assert!(stderr(&output).contains(expected), "{more:?}: {}", stderr(&output));
    }
    let output = ferrospeed(&["plan", &config, "--params", "1e6", "--placement"]);
    assert!(stderr(&output).contains("shapes of a model"), "{}", stderr(&output));
}

#[test]
fn a_plan_of_a_recipe_is_that_of_its_model_ranks_and_mesh() {
    let recipe = r#"
        name = "planned"
        steps = 3
        ranks = 4
        [model]
        preset = "gpt2"
        layers = 2
        width = 64
        heads = 4
        activation_checkpointing = true
        [data]
        text = ["nowhere.txt"]
        sequence = 128
        [ds_config]
        train_micro_batch_size_per_gpu = 2
        sequence_parallel_size = 2
        optimizer = { type = "Adam" }
        zero_optimization = { stage = 2 }
    "#;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("recipe.toml");
    std::fs::write(&path, recipe).unwrap();
    let of_recipe = planned(&[path.to_str().unwrap(), "--host_gib", "100"]);
    assert_eq!(of_recipe["capacity"]["ranks_per_host"], 4);
    let (model_folder, config) = config_file(
        "{\"train_micro_batch_size_per_gpu\": 2, \"optimizer\": {\"type\": \"Adam\"}, \"zero_optimization\": {\"stage\": 2}, \"sequence_parallel_size\": 2}",
    );
    let model = "{\"model_type\": \"gpt2\", \"n_embd\": 64, \"n_layer\": 2, \"n_head\": 4, \"vocab_size\": 256, \"n_positions\": 128}";
    std::fs::write(model_folder.path().join("config.json"), model).unwrap();
    let model = model_folder.path().to_str().unwrap().to_owned();
    let words = [&config, "--model", &model, "-w", "2", "--checkpoint_activations", "--host_gib", "100"];
    assert_eq!(planned(&words)["plan"], of_recipe["plan"]);
    // Half of a sequence is half of its activations, and gradients travel as the key says: in f32.
    let whole = planned(&[&words[..], &["--sp", "1"]].concat());
    let [half, all] = [&of_recipe, &whole].map(|plan| bytes_of(plan, "activations"));
    assert!(half * 2 == all, "{half} of {all}");
    let more = planned(&[path.to_str().unwrap(), "-w", "8", "--host_gib", "100"]);
    assert_eq!(more["capacity"]["ranks_per_host"], 16);
    assert!(bytes_of(&more, "gradients") < bytes_of(&of_recipe, "gradients"));
}

#[test]
fn the_estimators_print_a_table_or_json() {
    let arguments = ["estimate", "--params", "3e9", "--largest_layer_params", "1e8", "-n", "8"];
    let output = ferrospeed(&arguments);
    assert!(
        stdout(&output).contains("3000M total params, 100M largest layer params."),
        "{}",
        stdout(&output)
    );
    let output = ferrospeed(&[&arguments[..], &["--stage", "2", "--json"]].concat());
    let document: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(document["rows"][0]["device_bytes"], 6_000_000_000u64);
    assert_eq!(ferrospeed(&["estimate", "--params", "3e9", "--stage", "1"]).status.code(), Some(2));
}

#[test]
fn watch_serves_runs_on_loopback() {
    use std::io::{BufRead, BufReader, Read, Write};
    let folder = tempfile::tempdir().unwrap();
    let mut child = support::binary()
        .args(["watch", folder.path().to_str().unwrap(), "--port", "0"])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let address = line.strip_prefix("http://").and_then(|rest| rest.split(' ').next()).unwrap_or_default();
    let mut stream = std::net::TcpStream::connect(address).unwrap();
    write!(stream, "GET /runs.json HTTP/1.1\r\nHost: {address}\r\n\r\n").unwrap();
    stream.set_read_timeout(Some(std::time::Duration::from_secs(60))).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    child.kill().unwrap();
    support::wait_for(&mut child);
    assert!(answer.contains("\"state\":\"starting\""), "{answer}");
    assert!(address.starts_with("127.0.0.1:"), "{line}");
}

#[test]
fn a_pipeline_is_drawn_with_its_bubble_and_what_it_holds() {
    let folder = tempfile::tempdir().unwrap();
    let svg = folder.path().join("drawn.svg");
    let output = support::output_of(support::binary().args([
        "plan-pipeline",
        "1f1b",
        "--stages",
        "3",
        "--micro_batches",
        "4",
        "--boundary_bytes",
        "1024",
        "--svg",
        svg.to_str().unwrap(),
    ]));
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{told}");
    let expected = "\
stage   0 012....aa3bb.cc.dd
stage   1 .01..aa2bb3cc.dd..
stage   2 ..0aa1bb2cc3dd....
1f1b: 3 stages, 4 micro-batches
bubble   33.3 % of the longest stage's time
makespan 18
holds    activations of 3, 2, 1 micro-batches, by stage
sends    16 messages per step, 16.00 KiB
";
    assert_eq!(told, expected);
    let drawn = std::fs::read_to_string(svg).unwrap();
    assert!(drawn.starts_with("<svg") && drawn.matches("<rect").count() == 24, "{drawn}");

    let refused = support::output_of(support::binary().args([
        "plan-pipeline",
        "interleaved:2",
        "--micro_batches",
        "6",
    ]));
    let told = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(told.contains("6 micro-batches are not a multiple of 4 stages"), "{told}");
}

#[test]
fn a_disk_and_a_step_from_it_are_measured_in_json() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().to_str().unwrap();
    let output = ferrospeed(&[
        "bench",
        "io",
        "--dir",
        dir,
        "--size",
        "16MB",
        "--depth",
        "4",
        "--repeats",
        "1",
        "--weights",
        "1",
        "--json",
    ]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let lines: Vec<serde_json::Value> =
        stdout(&output).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 2);
    for key in ["read_bytes_per_s", "write_bytes_per_s"] {
        assert!(lines[0][key].as_f64().unwrap() > 0.0, "{}", lines[0]);
    }
    for key in ["share_of_disk", "share_of_memory"] {
        assert!(lines[1][key].as_f64().unwrap() > 0.0, "{}", lines[1]);
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "files stayed");
    let refused = ferrospeed(&["bench", "io", "--dir", "/proc/nowhere", "--size", "16MB"]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(stderr(&refused).contains("/proc/nowhere is no folder"), "{}", stderr(&refused));
}

#[test]
fn the_fastest_layout_that_fits_is_named_with_what_it_sends() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let model = serde_json::json!({
        "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048,
    });
    std::fs::write(at("config.json"), model.to_string()).unwrap();
    let config = r#"{"train_batch_size": 8, "bf16": {"enabled": true}, "optimizer": {"type": "AdamW"}}"#;
    std::fs::write(at("ds_config.json"), config).unwrap();
    let (config, model) = (at("ds_config.json"), at("config.json"));
    let asked = ["plan", &config, "--model", &model, "-w", "4", "--search"];
    let machine = ["--device_gib", "80", "--host_gib", "900", "--nvme_gib", "0"];
    let rates = ["--flops", "400", "--memory_rate", "2000", "--wire_rate", "200"];
    let output = ferrospeed(&[&asked[..], &machine, &rates, &["--json"]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let found: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
    let best = found["best"].as_array().unwrap();
    assert_eq!(best.len(), 5, "{found}");
    assert!(best[0]["device_bytes"].as_u64().unwrap() <= 80 << 30, "{}", best[0]);
    assert!(best.windows(2).all(|two| two[0]["tokens_per_s"].as_f64() >= two[1]["tokens_per_s"].as_f64()));
    let output = ferrospeed(&[&asked[..], &machine, &rates].concat());
    let text = stdout(&output);
    for what in ["fit, ", "tokens/s", "a rank sends per step: "] {
        assert!(text.contains(what), "{what}: {text}");
    }
    assert!(text.contains(", wire 200.0GB/s"), "{text}");
    // One rank sends nothing, and nothing is said about it.
    let alone = ["plan", &config, "--model", &model, "-w", "1", "--search"];
    let roomy = ["--device_gib", "800", "--host_gib", "900", "--nvme_gib", "0"];
    let output = ferrospeed(&[&alone[..], &roomy, &rates[..4]].concat());
    let text = stdout(&output);
    assert!(text.contains("by rates of one rank: ") && !text.contains("wire"), "{text}{}", stderr(&output));
    // What is too small says how much is missing, and a machine that is only described must be described.
    let small = ["--device_gib", "4", "--host_gib", "4", "--nvme_gib", "0"];
    let output = ferrospeed(&[&asked[..], &small, &rates].concat());
    assert_eq!(output.status.code(), Some(1), "{}", stdout(&output));
    assert!(stdout(&output).contains("nothing fits; z") && stdout(&output).contains(" are missing"));
    let output = ferrospeed(&[&asked[..], &machine].concat());
    assert_eq!(output.status.code(), Some(2), "{}", stdout(&output));
    assert!(stderr(&output).contains("--flops RATE"), "{}", stderr(&output));
    for rate in ["0", "-1", "inf", "nan", "1e300", "1e-300"] {
        let output = ferrospeed(&[&asked[..], &machine, &["--flops", rate]].concat());
        assert_eq!(output.status.code(), Some(2), "{rate}: {}", stdout(&output));
        assert!(stderr(&output).contains("no machine has such a rate"), "{rate}: {}", stderr(&output));
    }
}

#[test]
fn a_step_of_a_thousand_ranks_is_simulated_with_failures_and_the_fastest_layouts() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let model = serde_json::json!({
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
    });
    std::fs::write(at("config.json"), model.to_string()).unwrap();
    let config = r#"{"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 16, "bf16": {"enabled": true},
        "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 1}}"#;
    std::fs::write(at("ds_config.json"), config).unwrap();
    let (config, model) = (at("ds_config.json"), at("config.json"));
    let asked = ["plan", &config, "--model", &model, "--simulate", "--tp", "8", "--pp", "4"];
    let machine = ["--device_gib", "80", "--host_gib", "900", "--nvme_gib", "0", "--ranks_per_host", "8"];
    let rates = ["--flops", "600", "--memory_rate", "2400", "--wire_rate", "300", "--link_rate", "40"];
    let more = ["--ranks", "1024", "--jitter", "2", "--slow", "37:1.5", "--host_hours", "10000"];
    let output = ferrospeed(&[&asked[..], &machine, &rates, &more].concat());
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(0), "{text}{}", stderr(&output));
    for what in [
        "1024 ranks on 128 host(s): pp4×dp32×tp8, 1f1b",
        "a step of 512 samples takes",
        "slices, exposed",
        "the others wait for rank 37",
        "a host fails every 78.1 h somewhere",
        "layouts of these ranks and this batch:",
    ] {
        assert!(text.contains(what), "'{what}' is not in:\n{text}");
    }
    let output = ferrospeed(&[&asked[..], &machine, &rates, &["--ranks", "64", "--json"]].concat());
    let found: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!((&found["step"]["mesh"], &found["fits"]), (&serde_json::json!([4, 2, 1, 8]), &true.into()));
    let best = found["best"].as_array().unwrap();
    assert!(best[0]["step"]["step_s"].as_f64() <= found["step"]["step_s"].as_f64(), "{found}");
    for (wrong, why) in [
        (&["--ranks", "100"][..], "make 32 ranks of each replica"),
        (&["--ranks", "64", "--slow", "64:2"], "counted from 0"),
        (&["--ranks", "64", "--slow", "3"], "RANK:FACTOR"),
    ] {
        let output = ferrospeed(&[&asked[..], &machine, &rates, wrong].concat());
        assert_eq!(output.status.code(), Some(2), "{wrong:?}: {}", stdout(&output));
        assert!(stderr(&output).contains(why), "{wrong:?}: {}", stderr(&output));
    }
}

#[test]
fn a_checkpoint_and_its_exports_are_measured_in_json() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().to_str().unwrap();
    let output =
        ferrospeed(&["bench", "checkpoint", "--dir", dir, "--size", "1MB", "--rounds", "1", "--json"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let report: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
    for key in ["save_s", "load_s", "to_fp32_s", "export_hf_s"] {
        assert!(report[key].as_f64().unwrap() > 0.0, "{report}");
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "files stayed");
}
