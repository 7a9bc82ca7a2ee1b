//! `ferrospeed train --autotuning` on a tiny model: real runs, real files.

use std::path::Path;
use std::process::Output;

use super::support::{binary, output_of, stderr, stdout};
use serde_json::Value;

/// A folder with a recipe; a test adds keys of the ds_config.
fn workplace(keys: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let recipe = format!(
        r#"
        name = "small"
        steps = 3
        [model]
        preset = "gpt2"
        layers = 1
        width = 32
        heads = 2
        vocabulary = 64
        [data]
        synthetic = 20000
        sequence = 16
        validation = 0.1
        [ds_config]
        optimizer = {{ type = "AdamW", params = {{ lr = 3e-3 }} }}
        {keys}
    "#
    );
    std::fs::write(folder.path().join("recipe.toml"), recipe).unwrap();
    folder
}

fn tune(folder: &Path, mode: &str, more: &[&str]) -> Output {
    let mut words = vec!["train", "recipe.toml", "--device", "cpu", "--autotuning", mode];
    words.extend(more);
    output_of(binary().args(&words).current_dir(folder))
}

fn json(path: impl AsRef<Path>) -> Value {
    serde_json::from_slice(&std::fs::read(path.as_ref()).unwrap()).unwrap()
}

#[test]
fn a_search_takes_no_lock_through_a_link() {
    let folder = workplace("train_micro_batch_size_per_gpu = 2");
    let results = folder.path().join("autotuning_results");
    let mine = folder.path().join("mine");
    std::fs::write(&mine, "mine").unwrap();
    std::fs::create_dir(&results).unwrap();
    std::os::unix::fs::symlink(&mine, results.join(".ferrospeed-autotuning")).unwrap();
    let output = tune(folder.path(), "tune", &[]);
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("is a link, and a lock must be a file"), "{said}");
}

#[test]
fn a_run_that_fails_is_an_answer_and_the_rest_goes_on() {
    // A folder that cannot be made, which only stage 3 asks for.
    let folder = workplace(
        r#"
        train_micro_batch_size_per_gpu = [2, 4]
        zero_optimization = { stage = [0, 3], offload_param = { device = "nvme", nvme_path = "/proc/nowhere" } }
        autotuning = { start_profile_step = 1, end_profile_step = 2 }
        "#,
    );
    let results = folder.path().join("autotuning_results");
    let output = tune(folder.path(), "tune", &["--set", "model.activation_checkpointing=true"]);
    let said = stdout(&output);
    assert!(output.status.success(), "{said}\n{}", stderr(&output));
    assert!(said.contains("failed with code "), "{said}");
    let best = json(results.join("ds_config_optimal.json"));
    assert_eq!(best["zero_optimization"]["stage"], 0, "{best}");
    assert!(best.get("autotuning").is_none(), "{best}");
    let failed: Vec<Value> = [2, 4]
        .iter()
        .map(|size| results.join(format!("z3_gas1_tmbspg{size}_ac/exp.json")))
        .filter(|path| path.exists())
        .map(json)
        .collect();
    assert!(!failed.is_empty() && failed.iter().all(|about| about["error"].is_string()), "{failed:?}");
}

#[test]
fn what_was_measured_is_not_measured_again() {
    let folder = workplace(
        r#"
        train_micro_batch_size_per_gpu = [2, 4]
        autotuning = { enabled = true, method = "deepspeed", start_profile_step = 1, end_profile_step = 2 }
        csv_monitor = { enabled = true, output_path = "curves" }
        "#,
    );
    let results = folder.path().join("autotuning_results");
    let output = tune(folder.path(), "tune", &[]);
    assert!(output.status.success(), "{}\n{}", stdout(&output), stderr(&output));
    for name in ["z0_gas2_tmbspg2", "z0_gas1_tmbspg4"] {
        for file in ["ds_config.json", "exp.json", "cmd.txt", "stdout.log", "stderr.log", "metrics.json"] {
            assert!(results.join(name).join(file).exists(), "{name}/{file}");
        }
        let metrics = json(results.join(name).join("metrics.json"));
        for key in ["fwd", "bwd", "step", "latency", "throughput", "FLOPS_per_gpu"] {
            assert!(metrics[key].as_f64().is_some_and(|value| value > 0.0), "{key} of {metrics}");
        }
        assert!(!results.join(name).join("run/model/model.safetensors").exists(), "nothing is exported");
        assert!(folder.path().join("autotuning_exps").join(format!("{name}.json")).exists());
    }
    assert!(!folder.path().join("curves").exists(), "experiments have no curves");
    assert_eq!(json(results.join("ds_config_optimal.json"))["csv_monitor"]["enabled"], true);
    let summary = std::fs::read_to_string(results.join("summary.txt")).unwrap();
    assert!(
        summary.contains("| tuning_space | num_experiments | best_metric_val | best_exp_name"),
        "{summary}"
    );
    assert!(summary.contains("Total number of experiments: 2."), "{summary}");

    let output = tune(folder.path(), "tune", &["--set", "autotuning.overwrite=false"]);
    let said = stdout(&output);
    assert_eq!(said.matches("(known)").count(), 2, "{said}");

    // What nobody can have measured is measured again.
    for (name, edited) in [
        ("z0_gas2_tmbspg2", (-5.0).into()),
        ("z0_gas2_tmbspg2", Value::Null),
        ("z0_gas1_tmbspg4", "fast".into()),
    ] {
        let path = results.join(name).join("metrics.json");
        let mut metrics = json(path.clone());
        metrics["throughput"] = edited;
        std::fs::write(&path, metrics.to_string()).unwrap();
        let output = tune(folder.path(), "tune", &["--set", "autotuning.overwrite=false"]);
        let said = stdout(&output);
        assert_eq!(said.matches("(known)").count(), 1, "{metrics}: {said}");
        assert!(json(path)["throughput"].as_f64().is_some_and(|value| value > 0.0), "{said}");
    }

    // Files that are not a search's own are not removed, though the folder is.
    let (notes, sketches) = (results.join("notes.txt"), results.join("sketches"));
    std::fs::write(&notes, "mine").unwrap();
    std::fs::create_dir(&sketches).unwrap();
    let (old, stale) = (results.join("z9_gas9_tmbspg9"), folder.path().join("autotuning_exps/z9.json"));
    std::fs::create_dir(&old).unwrap();
    std::fs::write(old.join("exp.json"), "{}").unwrap();
    std::fs::write(&stale, r#"{"name": "z9", "ds_config": {}}"#).unwrap();
    let output = tune(folder.path(), "tune", &[]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(notes.exists() && sketches.exists() && !old.exists() && !stale.exists());
}

#[test]
fn a_folder_that_holds_other_files_is_refused_and_left_as_it_is() {
    let folder = workplace("train_micro_batch_size_per_gpu = 2");
    for key in ["results_dir", "exps_dir"] {
        let place = format!("autotuning.{key}=.");
        for overwrite in ["autotuning.overwrite=true", "autotuning.overwrite=false"] {
            let output = tune(folder.path(), "tune", &["--set", &place, "--set", overwrite]);
            assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
            assert!(stderr(&output).contains("no search has left there"), "{}", stderr(&output));
            let names: Vec<_> =
                std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            assert_eq!(names, ["recipe.toml"], "nothing was made, and nothing removed");
        }
    }
}

#[test]
fn runs_that_exceed_their_deadline_are_ended_and_said_so() {
    let folder = workplace(
        r#"
        train_micro_batch_size_per_gpu = [2, 4]
        autotuning = { enabled = true, method = "deepspeed", deadline_s = 0.001 }
        "#,
    );
    let output = tune(folder.path(), "tune", &[]);
    assert!(!output.status.success());
    assert_eq!(stdout(&output).matches("out of time").count(), 2, "{}", stdout(&output));
    assert!(stderr(&output).contains("no configuration ran"), "{}", stderr(&output));
    let about = json(folder.path().join("autotuning_results/z0_gas1_tmbspg4/exp.json"));
    assert!(about["error"].as_str().unwrap().starts_with("out of time"), "{about}");
}

#[test]
fn our_own_search_takes_at_most_ten_runs_and_trains_with_what_it_found() {
    let folder = workplace(
        r#"
        train_batch_size = 8
        autotuning = { start_profile_step = 1, end_profile_step = 2 }
        "#,
    );
    let output = tune(folder.path(), "run", &["-n", "2"]);
    let said = stdout(&output);
    assert!(output.status.success(), "{said}\n{}", stderr(&output));
    let runs = said.matches("throughput ").count();
    assert!((2..=10).contains(&runs), "{said}");
    let results = folder.path().join("autotuning_results");
    let best = json(results.join("ds_config_optimal.json"));
    // The batch is the recipe's, however it is divided.
    let number = |value: &Value| value.as_u64().unwrap_or(1);
    let of_a_sample =
        number(&best["tensor_parallel"]["autotp_size"]) * number(&best["sequence_parallel_size"]);
    let of_a_rank =
        number(&best["train_micro_batch_size_per_gpu"]) * number(&best["gradient_accumulation_steps"]);
    assert_eq!(of_a_rank * 2 / of_a_sample, 8);
    assert!(
        std::fs::read_to_string(results.join("cmd_optimal.txt")).unwrap().contains("ds_config_optimal.json")
    );
    // The page marks the best among all that ran.
    let page = std::fs::read_to_string(results.join("report.html")).unwrap();
    assert_eq!(page.matches("<circle").count(), runs, "{page}");
    assert_eq!(page.matches("class=\"dot s1\"").count(), 1, "{page}");
    // And it was trained with.
    let used = json(folder.path().join("runs/small/config/ds_config.json"));
    assert_eq!(used["zero_optimization"]["stage"], best["zero_optimization"]["stage"]);
    assert!(folder.path().join("runs/small/model/model.safetensors").exists());
}

#[test]
fn meshes_are_searched_and_a_second_search_in_the_same_folders_is_refused() {
    let folder = workplace(
        r#"
        train_batch_size = 8
        zero_optimization = { stage = 1 }
        autotuning = { start_profile_step = 1, end_profile_step = 2 }
        "#,
    );
    let results = folder.path().join("autotuning_results");
    std::fs::create_dir_all(&results).unwrap();
    let mark = std::fs::File::create(results.join(".ferrospeed-autotuning")).unwrap();
    mark.lock().unwrap();
    let output = tune(folder.path(), "tune", &["-n", "2"]);
    assert!(!output.status.success());
    let said = stderr(&output);
    assert!(said.contains("another search is at work in autotuning_results"), "{said}");
    drop(mark);
    let output = tune(folder.path(), "tune", &["-n", "2", "--set", "model.activation_checkpointing=true"]);
    let said = stdout(&output);
    assert!(output.status.success(), "{said}\n{}", stderr(&output));
    // Two ranks share samples, or layers, or sequences.
    assert!(said.contains("_tp2") || said.contains("_sp2"), "no mesh was tried:\n{said}");
    for line in said.lines().filter(|line| line.starts_with("experiment")) {
        assert!(line.contains("throughput "), "{line}");
    }
    // The samples of a step stay, whatever the mesh.
    let best = json(results.join("ds_config_optimal.json"));
    let number = |value: &Value| value.as_u64().unwrap_or(1);
    let of_a_sample =
        number(&best["tensor_parallel"]["autotp_size"]) * number(&best["sequence_parallel_size"]);
    let own = number(&best["train_micro_batch_size_per_gpu"]) * number(&best["gradient_accumulation_steps"]);
    assert_eq!(own * 2 / of_a_sample, 8, "{best}");
}
