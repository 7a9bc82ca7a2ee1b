//! `ferrospeed bench comm` and `engine` with real ranks, `ferrospeed bench model`'s arguments, and `ferrospeed trace diff`.

use super::support;
use std::path::Path;
use std::process::Stdio;

use super::support::{ferrospeed, stderr, stdout};
use ferrospeed_comm::Kind;
use ferrospeed_comm::recorder::{Progress, Record};
use serde_json::Value;

/// A small matrix: one operation and size, both kinds of memory, a moment each.
const SMALL: [&str; 10] =
    ["bench", "comm", "--op", "all_reduce", "--size", "64KiB", "--dtype", "bf16", "--case_ms", "1"];

#[test]
fn collectives_are_measured_over_ranks_and_backends_as_json() {
    let output = ferrospeed(&[&SMALL[..], &["--ranks", "1,2", "--backend", "local,tcp", "--json"]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let rows: Vec<Value> =
        stdout(&output).lines().map(|line| serde_json::from_str(line).expect("a row")).collect();
    let keys: Vec<String> = rows
        .iter()
        .map(|row| {
            assert_eq!((row["operation"].as_str(), row["bytes"].as_u64()), (Some("all_reduce"), Some(65536)));
            assert!(row["best_us"].as_f64() > Some(0.0) && row["iterations"].as_u64() >= Some(5), "{row}");
            format!("{} {} {}", row["ranks"], row["backend"], row["memory"]).replace('"', "")
        })
        .collect();
    assert_eq!(keys.len(), 8, "{keys:?}");
    for expected in ["2 local registered", "2 local staged", "2 tcp registered", "2 tcp staged"] {
        assert!(keys.iter().any(|key| key == expected), "{expected} is not in {keys:?}");
    }
}

#[test]
fn steps_of_real_ranks_are_measured_for_each_stage() {
    let small = ["--layers", "1", "--width", "64", "--vocabulary", "64", "--batch", "1", "--tokens", "8"];
    let cases = ["--stage", "0,3", "--dtype", "bf16", "--repeats", "1", "--accumulation", "2", "--json"];
    let output = ferrospeed(&[&["bench", "engine"][..], &small, &cases].concat());
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let rows: Vec<Value> =
        stdout(&output).lines().map(|line| serde_json::from_str(line).expect("a row")).collect();
    let stages: Vec<Option<u64>> = rows.iter().map(|row| row["stage"].as_u64()).collect();
    assert_eq!(stages, [Some(0), Some(3)]);
    for row in &rows {
        for key in ["tokens_per_s", "median_s", "launch_to_first_step_s", "peak_rss_bytes", "processor_s"] {
            assert!(row[key].as_f64() > Some(0.0), "{key}: {row}");
        }
        assert_eq!((row["ranks"].as_u64(), row["dtype"].as_str()), (Some(2), Some("bf16")));
    }
}

#[test]
fn looking_at_a_step_is_measured_beside_not_looking() {
    let small = ["--layers", "1", "--width", "64", "--vocabulary", "64", "--tokens", "8", "--repeats", "1"];
    let output = ferrospeed(&[&["bench", "profile", "--json"][..], &small].concat());
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let rows: Vec<Value> =
        stdout(&output).lines().map(|line| serde_json::from_str(line).expect("a row")).collect();
    let looks: Vec<&str> = rows.iter().filter_map(|row| row["look"].as_str()).collect();
    assert_eq!(looks, ["off", "flops_profiler", "trace", "gradient_norms", "off, by itself"]);
    assert_eq!(rows[0]["cost_percent"], 0.0);
    assert!(rows[4]["marks"].as_u64() > Some(0) && rows[4]["mark_ns"].as_f64() > Some(0.0), "{}", rows[4]);
}

#[test]
fn a_width_that_the_model_cannot_have_is_refused() {
    for bench in ["profile", "engine"] {
        for width in ["65", "0", "-64"] {
            let output = ferrospeed(&["bench", bench, &format!("--width={width}")]);
            assert_eq!(output.status.code(), Some(2), "{bench} {width}: {}", stdout(&output));
            assert!(stderr(&output).contains("multiple of 64"), "{bench} {width}: {}", stderr(&output));
        }
    }
}

#[test]
fn bubbles_of_schedules_are_measured_beside_their_formulas() {
    let small = ["--stages", "2", "--micro_batches", "4", "--part_ms", "2", "--repeats", "1"];
    let output = ferrospeed(&[&["bench", "pipeline", "--json"][..], &small].concat());
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let rows: Vec<Value> =
        stdout(&output).lines().map(|line| serde_json::from_str(line).expect("a row")).collect();
    let schedules: Vec<&str> = rows.iter().filter_map(|row| row["schedule"].as_str()).collect();
    assert_eq!(schedules, ["1f1b", "interleaved:2", "interleaved:4", "zb-h1", "zb-v"]);
    for row in &rows {
        // How long anything took is the machine's affair; that a stage waits less than always is not.
        let (best, formula) = (row["bubble_best"].as_f64(), row["bubble_formula"].as_f64());
        assert!(best >= Some(0.0) && best < Some(1.0) && formula < Some(0.21), "{row}");
    }
    assert_eq!(rows[0]["held"], serde_json::json!([2.0, 1.0]));
    assert_eq!(rows[4]["held"], serde_json::json!([2.0, 2.0]));

    // One that does not fit is told, and those behind it are measured all the same.
    let odd = ["--stages", "4", "--micro_batches", "6", "--part_ms", "2", "--repeats", "1", "--schedule"];
    let output = ferrospeed(&[&["bench", "pipeline"][..], &odd, &["interleaved:2,zb-h1"]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let table = stdout(&output);
    assert!(
        table.contains("interleaved:2  does not fit: ") && table.contains("not a multiple of 4 stages"),
        "{table}"
    );
    assert!(table.lines().last().is_some_and(|line| line.starts_with("zb-h1 ")), "{table}");
    let refused = ferrospeed(&[&["bench", "pipeline"][..], &odd, &["interleaved:2"]].concat());
    assert_eq!(refused.status.code(), Some(2));
    assert!(stderr(&refused).contains("not a multiple of 4 stages"), "{}", stderr(&refused));
}

#[test]
fn people_get_a_table() {
    let output = ferrospeed(&SMALL);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let text = stdout(&output);
    assert!(text.starts_with("operation") && text.lines().count() == 3, "{text}");
    assert!(text.contains("registered") && text.contains("staged"), "{text}");
}

#[test]
fn what_cannot_be_measured_is_refused() {
    for (arguments, part) in [
        (&["bench", "comm", "--op", "send"][..], "all_reduce"),
        (&["bench", "comm", "--dtype", "f8"], "bf16"),
        (&["bench", "comm", "--size", "0"], "--size"),
        (&["bench", "comm", "--ranks", "0"], "--ranks"),
        (&["bench", "model", "--only", "nothing"], "train gpt2-124m 2x512"),
        (&["bench", "model", "--threads", "0"], "--threads"),
        (&["bench", "model", "--repeats", "0"], "--repeats"),
        (&["bench", "engine", "--stage", "4"], "--stage"),
        (&["bench", "engine", "--threads", "0"], "--threads"),
    ] {
        let output = ferrospeed(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(stderr(&output).contains(part), "{arguments:?}: {}", stderr(&output));
    }
}

#[test]
fn a_backend_that_is_not_there_fails_the_run_and_says_why() {
    let output = ferrospeed(&[&SMALL[..], &["--backend", "mpi"]].concat());
    assert_ne!(output.status.code(), Some(0));
    assert!(stderr(&output).contains("cargo feature `mpi`"), "{}", stderr(&output));
}

/// Two ranks that ask for different operations: both fail, both leave their recorders, and one sentence tells why.
/// They are started without the launcher, which would end one as soon as the other has failed.
#[test]
fn a_disagreement_between_real_ranks_is_found_in_their_traces() {
    let folder = tempfile::tempdir().unwrap();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let ranks = ["all_reduce", "broadcast"].into_iter().enumerate().map(|(rank, operation)| {
        let mut command = support::binary();
        command.args([
            "bench",
            "comm",
            "--op",
            operation,
            "--size",
            "1MiB",
            "--dtype",
            "f32",
            "--case_ms",
            "1",
        ]);
        command
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", "2")
            .env("FERROSPEED_JOB_TOKEN", "disagreement");
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port);
        command.env("FERROSPEED_TRACE_DIR", folder.path()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    });
    for rank in ranks.collect::<Vec<_>>() {
        let output = support::finish(rank);
        assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    }
    let output = ferrospeed(&["trace", "diff", folder.path().to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let text = stdout(&output);
    assert_eq!(text.lines().count(), 1, "{text}");
    for part in ["rank 0 called", "rank 1 called", "broadcast(", "all_reduce("] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
}

fn record(rank: usize, sequence: u64, progress: Progress) -> Record {
    Record {
        rank,
        group: "world".into(),
        group_ranks: vec![0, 1],
        sequence,
        kind: Kind::AllReduce,
        peer: None,
        description: format!("all_reduce(f32 × 4) #{sequence} at train.rs:7:9"),
        started_us: sequence,
        duration_us: None,
        progress,
        error: None,
    }
}

fn write_trace(folder: &Path, rank: usize, records: &[Record]) {
    let lines: Vec<String> = records.iter().map(|record| serde_json::to_string(record).unwrap()).collect();
    std::fs::write(folder.join(format!("rank-{rank:05}.jsonl")), lines.join("\n")).unwrap();
}

#[test]
fn the_rank_that_stayed_behind_is_named_and_damage_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let empty = ferrospeed(&["trace", "diff", path]);
    assert_eq!(empty.status.code(), Some(2));
    assert!(stderr(&empty).contains("holds no flight recorder"), "{}", stderr(&empty));

    write_trace(folder.path(), 0, &[record(0, 1, Progress::Done), record(0, 2, Progress::Running)]);
    write_trace(folder.path(), 1, &[record(1, 1, Progress::Done)]);
    let text = stdout(&ferrospeed(&["trace", "diff", path]));
    assert!(text.starts_with("rank 1 (whose last operation there was all_reduce(f32 × 4) #1"), "{text}");
    assert!(text.contains("never entered all_reduce(f32 × 4) #2"), "{text}");

    std::fs::write(folder.path().join("rank-00001.jsonl"), "{\"rank\": 1").unwrap();
    let damaged = ferrospeed(&["trace", "diff", path]);
    assert_eq!(damaged.status.code(), Some(2));
    assert!(stderr(&damaged).contains("rank-00001.jsonl, line 1"), "{}", stderr(&damaged));
    assert_eq!(ferrospeed(&["trace", "diff", "/does/not/exist"]).status.code(), Some(2));
}
