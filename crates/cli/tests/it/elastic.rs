//! Jobs whose nodes leave and come, with real agents, ranks and training; every "host" is this one.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use serde_json::Value;

use super::backends::Cluster;
use super::support::{self, binary, finish, output_of, stderr, stdout, wait_for, wait_until};

const TOKEN: &str = "0123456789abcdef0123456789abcdef";
const STEPS: usize = 420;

fn recipe() -> String {
    support::small_recipe(
        &format!(
            r#"
            name = "small"
            steps = {STEPS}
            model.layers = 2
            data = {{ text = ["text.txt"], sequence = 64 }}
            save = {{ every = 20, background = false, keep_last = 2 }}
            "#
        ),
        r#"
        steps_per_print = 1000000
        optimizer = { type = "AdamW", params = { lr = 1e-3 } }
        zero_optimization = { stage = 2 }
        elasticity = { enabled = true, max_train_batch_size = 12, micro_batch_sizes = [1, 2, 3, 4, 6], version = 0.1 }
        "#,
    )
}

/// Hosts with a recipe that trains on them.
fn cluster(hosts: &str) -> Cluster {
    let cluster = Cluster::new(hosts);
    let text: String = (0..4000u32).map(|n| char::from(b'a' + (n * n % 89 % 26) as u8)).collect();
    std::fs::write(cluster.path().join("text.txt"), text).unwrap();
    std::fs::write(cluster.path().join("recipe.toml"), recipe()).unwrap();
    cluster
}

const TRAIN: [&str; 6] = ["--", env!("CARGO_BIN_EXE_ferrospeed"), "train", "recipe.toml", "--out", "run"];

/// A job that is under way; killed when a test gives up on it.
struct Job(Option<Child>);

impl Job {
    fn start(cluster: &Cluster, options: &[&str], program: &[&str]) -> Job {
        let elastic = ["--elastic_training", "--min_nodes", "1", "--retry_s", "0"];
        let mut command = cluster.launch(&[&elastic, options, program].concat());
        Job(Some(command.env("FERROSPEED_JOB_TOKEN", TOKEN).env("FERROSPEED_THREADS", "1").spawn().unwrap()))
    }

    fn signal(&self, signal: &str) {
        kill(signal, self.0.as_ref().unwrap().id());
    }

    /// Its exit code and what it said.
    fn end(mut self) -> (Option<i32>, String) {
        let output = finish(self.0.take().unwrap());
        (output.status.code(), format!("{}\n{}", stdout(&output), stderr(&output)))
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn kill(signal: &str, pid: u32) {
    assert!(Command::new("kill").args([signal, &pid.to_string()]).status().unwrap().success());
}

/// The process of a node's agent.
fn agent(name: &str) -> Option<u32> {
    let is_it = |pid: &u32| {
        let words = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let words: Vec<&[u8]> = words.split(|byte| *byte == 0).collect();
        words.get(1) == Some(&&b"agent"[..]) && words.contains(&format!("--name={name}").as_bytes())
    };
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).find(is_it)
}

fn records(run: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(run.join("log.jsonl")).unwrap_or_default();
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    whole.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn wait_for_step(run: &Path, step: usize) {
    wait_until(&format!("step {step}"), || records(run).len() >= step);
}

#[test]
fn a_run_goes_on_while_nodes_are_killed_drained_and_come_and_takes_every_sample_once() {
    let cluster = cluster("gone-a slots=1\ngone-b slots=1\ngone-c slots=1\n");
    let run = cluster.path().join("run");
    let job = Job::start(&cluster, &["--max_nodes", "3", "--master_port", "0"], &TRAIN);
    wait_for_step(&run, 15);
    // The first node, whose rank 0 writes the log and checkpoints.
    kill("-KILL", agent("gone-a").unwrap());
    wait_for_step(&run, 60);
    kill("-TERM", agent("gone-c").unwrap());
    wait_for_step(&run, 100);
    let meet = meeting_point("gone-b");
    let mut late = binary();
    late.args(["agent", "--meet", &meet, "--name=gone-late", "-n", "2"]).args(TRAIN);
    late.env("FERROSPEED_JOB_TOKEN", TOKEN).env("FERROSPEED_THREADS", "1").current_dir(cluster.path());
    let late = late.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (code, said) = job.end();
    assert_eq!(code, Some(0), "{said}");
    let late = finish(late);
    assert!(late.status.success(), "{}", stderr(&late));
    for expected in [
        "gone-a is gone: its agent has ended",
        "gone-c leaves: its agent got signal 15",
        "gone-late has come, with 2 slot(s)",
        "round 1: 2 rank(s) on gone-b, gone-c",
        "round 2: 1 rank(s) on gone-b",
        "round 3: 3 rank(s) on gone-b, gone-late",
    ] {
        assert!(said.contains(expected), "'{expected}' is not in:\n{said}");
    }

    let whole = output_of(
        binary().args(["train", "recipe.toml", "--out", "whole", "-n", "3"]).current_dir(cluster.path()),
    );
    assert!(whole.status.success(), "{}", stderr(&whole));
    let (elastic, whole) = (records(&run), records(&cluster.path().join("whole")));
    assert_eq!((elastic.len(), whole.len()), (STEPS, STEPS));
    let (mut early, mut furthest) = (0.0f64, 0.0f64);
    for (step, (elastic, whole)) in (1..).zip(elastic.iter().zip(&whole)) {
        let loss = |record: &Value| record["loss"].as_f64().unwrap();
        assert_eq!(elastic["step"], step);
        // Positions are of samples: with the same sequences in every step, losses differ by the order of sums alone.
        assert_eq!(elastic["tokens"], whole["tokens"], "step {step}");
        furthest = furthest.max((loss(elastic) - loss(whole)).abs());
        early = if step <= 100 { furthest } else { early };
    }
    println!(
        "losses are within {early:e} of the undisturbed run's for 100 steps, and within {furthest:e} at all"
    );
    assert!(early < 2e-4 && furthest < 1e-2, "{early} {furthest}");
}

/// Where a node's agent calls.
fn meeting_point(name: &str) -> String {
    let words = std::fs::read_to_string(format!("/proc/{}/cmdline", agent(name).unwrap())).unwrap();
    words.split('\0').find_map(|word| word.strip_prefix("--meet=")).unwrap().to_owned()
}

#[test]
fn a_node_that_is_stopped_is_given_up_and_its_ranks_end_when_it_wakes() {
    let cluster = cluster("still-a slots=1\nstill-b slots=1\n");
    let run = cluster.path().join("run");
    let job = Job::start(&cluster, &["--max_nodes", "2", "--master_port", "0"], &TRAIN);
    wait_for_step(&run, 12);
    let stopped = agent("still-b").unwrap();
    let ranks = support::children(stopped);
    kill("-STOP", stopped);
    ranks.iter().for_each(|rank| kill("-STOP", *rank));
    let (code, said) = job.end();
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("still-b is gone: nothing was heard of it"), "{said}");
    assert_eq!(records(&run).len(), STEPS);
    // Some may have gone with their launcher.
    for process in ranks.iter().chain([&stopped]) {
        let _ = Command::new("kill").args(["-CONT", &process.to_string()]).stderr(Stdio::null()).status();
    }
    wait_until("what was stopped to be gone", || {
        ranks.iter().chain([&stopped]).all(|process| !support::is_running(&process.to_string()))
    });
}

#[test]
fn the_launcher_of_an_elastic_job_passes_a_signal_on_and_its_agents_do_not_outlive_it() {
    let cluster = cluster("end-a slots=1\nend-b slots=1\n");
    let run = cluster.path().join("run");
    let start = || Job::start(&cluster, &["--max_nodes", "2", "--master_port", "0"], &TRAIN);
    let job = start();
    wait_for_step(&run, 3);
    job.signal("-TERM");
    let (code, said) = job.end();
    assert_eq!(code, Some(75), "{said}");
    let saved = records(&run).len();
    assert!(saved < STEPS, "it was to be stopped: {said}");
    // The same command does not begin over what is there: it is asked to go on.
    let resumed = [&TRAIN[..], &["--resume"]].concat();
    let mut job = Job::start(&cluster, &["--max_nodes", "2", "--master_port", "0"], &resumed);
    wait_for_step(&run, saved + 2);
    let agents = ["end-a", "end-b"].map(|name| agent(name).unwrap());
    let mut launcher = job.0.take().unwrap();
    kill("-KILL", launcher.id());
    wait_for(&mut launcher);
    wait_until("the agents to be gone", || agents.iter().all(|pid| !support::is_running(&pid.to_string())));
}

#[test]
fn too_few_nodes_end_an_elastic_job_with_the_names_of_those_that_left() {
    let cluster = cluster("few-a slots=1\nfew-b slots=1\n");
    let options = ["--min_nodes", "2", "--wait_s", "1", "--master_port", "0"];
    let elastic = [&["--elastic_training", "--retry_s", "0"][..], &options].concat();
    let program = ["--", "sh", "-c", "echo up > up.$RANK; exec sleep 600"];
    let job = Job(Some(cluster.launch(&[&elastic[..], &program].concat()).spawn().unwrap()));
    wait_until("both ranks", || (0..2).all(|rank| cluster.path().join(format!("up.{rank}")).exists()));
    kill("-KILL", agent("few-b").unwrap());
    let (code, said) = job.end();
    assert_eq!(code, Some(1), "{said}");
    assert!(
        said.contains("1 node(s) are there") && said.contains("few-b is gone: its agent has ended"),
        "{said}"
    );
    // A dry run starts nothing.
    let output = output_of(&mut cluster.launch(&[&elastic[..], &["--dry_run"], &program].concat()));
    let shown = stdout(&output);
    assert!(
        shown.contains("ssh -o ConnectTimeout=15") && shown.contains("--name=few-b --slots=0"),
        "{shown}"
    );
}
