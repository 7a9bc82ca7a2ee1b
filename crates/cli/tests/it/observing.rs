//! What `ferrospeed train` says of a run when its ds_config asks.

use std::collections::BTreeMap;
use std::path::Path;

use super::support::{binary, output_of, small_recipe, stderr, stdout};
use serde_json::Value;

/// A folder with a text and a recipe, to which a test adds keys of the ds_config.
fn workplace() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let text = "the quick brown fox jumps over the lazy dog; a stitch in time saves nine.\n".repeat(200);
    std::fs::write(folder.path().join("text.txt"), text).unwrap();
    let recipe = small_recipe(
        r#"
        name = "small"
        steps = 6
        ranks = 2
        model.layers = 1
        data = { text = ["text.txt"], sequence = 32 }
        "#,
        r#"
        train_micro_batch_size_per_gpu = 2
        steps_per_print = 2
        optimizer = { type = "AdamW", params = { lr = 3e-3 } }
        "#,
    );
    std::fs::write(folder.path().join("recipe.toml"), recipe).unwrap();
    folder
}

/// Trains with some keys; what it said on its two outputs.
fn train(folder: &Path, keys: &[&str]) -> (String, String) {
    let mut words = vec!["train", "recipe.toml", "--device", "cpu"];
    words.extend(keys.iter().flat_map(|key| ["--set", *key]));
    let output = output_of(binary().args(&words).current_dir(folder));
    assert!(output.status.success(), "{}\n{}", stdout(&output), stderr(&output));
    (stdout(&output), stderr(&output))
}

#[test]
fn a_run_with_comms_logger_ends_with_what_ranks_sent_each_other() {
    let folder = workplace();
    let keys = ["comms_logger.enabled=true", "comms_logger.verbose=true", "wall_clock_breakdown=true"];
    let (said, lines) = train(folder.path(), &keys);
    // What the configuration asks for by name is shown among the lines of progress.
    assert!(lines.contains("comm op: ") && lines.contains("| bwd_allreduce_microstep: "), "{lines}");
    assert!(said.contains("communication of rank 0\n"), "{said}");
    assert!(said.contains("Comm. Op            Message Size        Count"), "{said}");
    assert!(said.contains("Breakdown with straggler effect"), "{said}");
}

#[test]
fn a_trace_that_cannot_be_written_costs_the_trace_and_not_the_weights() {
    let folder = workplace();
    // A place like any other, until something is written to it.
    std::os::unix::fs::symlink("no-such-folder/trace.json", folder.path().join("trace.json")).unwrap();
    let words = ["train", "recipe.toml", "--device", "cpu", "--trace", "trace.json"];
    let output = output_of(binary().args(words).current_dir(folder.path()));
    assert_eq!(output.status.code(), Some(1), "{}", stdout(&output));
    assert!(stderr(&output).contains("its trace is missing: trace.json"), "{}", stderr(&output));
    assert!(folder.path().join("runs/small/model/model.safetensors").is_file());
}

#[test]
fn a_trace_has_every_rank_on_one_clock_and_slices_that_nest() {
    let folder = workplace();
    let output = output_of(
        binary()
            .args([
                "train",
                "recipe.toml",
                "--device",
                "cpu",
                "--trace",
                "trace.json",
                "--set",
                "save.every=3",
            ])
            .current_dir(folder.path()),
    );
    assert!(output.status.success(), "{}\n{}", stdout(&output), stderr(&output));
    let text = std::fs::read(folder.path().join("trace.json")).unwrap();
    let document: Value = serde_json::from_slice(&text).unwrap();
    let events = document["traceEvents"].as_array().unwrap();
    let number = |event: &Value, key: &str| event[key].as_f64().unwrap();
    let mut threads: BTreeMap<(u64, u64), Vec<&Value>> = BTreeMap::new();
    for event in events.iter().filter(|event| event["ph"] == "X") {
        let thread = (event["pid"].as_u64().unwrap(), event["tid"].as_u64().unwrap());
        threads.entry(thread).or_default().push(event);
    }
    for rank in 0..2 {
        let of_rank: Vec<&&Value> =
            threads.iter().filter(|((pid, _), _)| *pid == rank).flat_map(|(_, events)| events).collect();
        let count = |name: &str| of_rank.iter().filter(|event| event["name"] == name).count();
        for (name, expected) in [("forward", 6), ("backward", 6), ("step", 6), ("data", 6), ("checkpoint", 2)]
        {
            assert_eq!(count(name), expected, "{name} of rank {rank}");
        }
        assert!(count("all_reduce") >= 6, "rank {rank}");
        assert!(count("transformer.h.0") >= 6 && count("transformer.h.0 backward") >= 6, "rank {rank}");
        assert!(events.iter().any(|event| event["name"] == "process_name" && event["pid"] == rank));
        // Both ranks ran in the same seconds.
        let first = of_rank.iter().map(|event| number(event, "ts")).fold(f64::INFINITY, f64::min);
        assert!(first.abs() < 60e6, "rank {rank} begins at {first} us");
    }
    for events in threads.values_mut() {
        events.sort_by(|one, other| {
            let key = |event: &Value| (number(event, "ts"), -number(event, "dur"));
            key(one).partial_cmp(&key(other)).unwrap()
        });
        let mut open: Vec<f64> = Vec::new();
        for event in events.iter() {
            let (begin, end) = (number(event, "ts"), number(event, "ts") + number(event, "dur"));
            open.retain(|outer| *outer > begin + 1e-6);
            assert!(open.iter().all(|outer| end <= outer + 2e-3), "{event} sticks out");
            open.push(end);
        }
    }
}

#[test]
fn a_trace_has_every_read_and_write_of_state_on_a_disk() {
    let folder = workplace();
    let keys = [
        "trace=\"trace.json\"",
        "zero_optimization.stage=3",
        "zero_optimization.offload_optimizer.device=nvme",
        "zero_optimization.offload_optimizer.nvme_path=swap",
        "aio.queue_depth=100000",
        "aio.thread_count=2",
    ];
    let (_, lines) = train(folder.path(), &keys);
    // What is not taken as it is written is named, once.
    assert_eq!(lines.matches("aio.queue_depth: 4096 is used, not 100000").count(), 1, "{lines}");
    assert!(!lines.contains("aio.thread_count:"), "{lines}");
    let text = std::fs::read(folder.path().join("trace.json")).unwrap();
    let document: Value = serde_json::from_slice(&text).unwrap();
    let events = document["traceEvents"].as_array().unwrap();
    let of = |rank: u64, name: &str| -> Vec<&Value> {
        events.iter().filter(|event| event["pid"] == rank && event["name"] == name).collect()
    };
    let bounds = |event: &Value| {
        let begin = event["ts"].as_f64().unwrap();
        (begin, begin + event["dur"].as_f64().unwrap())
    };
    for rank in 0..2 {
        let whole = of(rank, "data")[0];
        for way in ["read", "write"] {
            let found = of(rank, &format!("{way} offload_optimizer (nvme)"));
            // Every step reads and writes master and moments.
            assert!(found.len() >= 6, "{} of rank {rank} to {way}", found.len());
            for event in found {
                assert!(
                    event["args"]["bytes"].as_u64().unwrap() >= 4096 && event["cat"] == "files",
                    "{event}"
                );
                assert!(bounds(event).0 >= bounds(whole).0, "{event} is on another clock than {whole}");
            }
        }
    }
}

#[test]
fn recomputed_blocks_are_timed_when_the_configuration_asks() {
    let folder = workplace();
    let keys = ["model.activation_checkpointing=true", "activation_checkpointing.profile=true"];
    let (_, lines) = train(folder.path(), &keys);
    let times: Vec<&str> =
        lines.lines().filter(|line| line.contains("time (ms) | checkpointed forward: ")).collect();
    // One block, one micro-batch a step, told by rank 0.
    assert_eq!(times.len(), 6, "{lines}");
    for line in times {
        assert!(line.contains("| checkpointed backward: ") && line.contains("| calls: 1"), "{line}");
        assert!(!line.contains("backward: 0.00"), "backward takes longer than that: {line}");
    }
    assert!(!lines.contains("activation_checkpointing.profile"), "nothing warns of a key that acts: {lines}");
}

#[test]
fn a_run_keeps_what_ranks_held_what_was_planned_and_the_norms_of_layers() {
    let folder = workplace();
    train(folder.path(), &["gradient_norms_every=2", "zero_optimization.stage=1"]);
    let run = folder.path().join("runs/small");
    let log = std::fs::read_to_string(run.join("log.jsonl")).unwrap();
    let records: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let about: Value = serde_json::from_slice(&std::fs::read(run.join("config/run.json")).unwrap()).unwrap();
    for (index, record) in records.iter().enumerate() {
        assert_eq!(record["ranks"].as_array().unwrap().len(), 2);
        let norms = record["layer_norms"].as_array();
        assert_eq!(norms.is_some(), index % 2 == 1, "{record}");
        let Some(norms) = norms else { continue };
        let squares: f64 = norms.iter().map(|norm| norm[1].as_f64().unwrap().powi(2)).sum();
        let norm = record["grad_norm"].as_f64().unwrap();
        assert!((squares.sqrt() / norm - 1.0).abs() < 1e-6, "{record}");
    }
    let told: Vec<&Value> = records.iter().filter_map(|record| record.get("rank_memory_bytes")).collect();
    assert!((1..records.len()).contains(&told.len()), "memory is told where it changes: {}", told.len());
    let held = told.last().unwrap()[1]["total"].as_f64().unwrap();
    let planned = about["expected"]["plan"]["total"].as_f64().unwrap();
    assert!((0.5..2.0).contains(&(planned / held)), "{planned} planned, {held} held");
    for limit in ["compute", "memory", "wire"] {
        assert!(about["expected"]["limits"][limit].as_f64().unwrap() > 0.0, "{about}");
    }
}
