//! Runs that are saved, killed, stopped by signals and gone on with: real processes through the real launcher.

use super::support;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use super::support::small_run::outcome;
use super::support::{is_running, stderr, stdout, wait_until};
use serde_json::Value;

const RECIPE: &str = r#"
    name = "small"
    steps = 20
    ranks = 2
    [model]
    preset = "gpt2"
    layers = 2
    width = 32
    heads = 2
    dropout = 0.1
    [data]
    text = ["text.txt"]
    sequence = 32
    validation = 0.05
    [eval]
    every = 5
    sequences = 8
    [save]
    every = 10
    [ds_config]
    train_micro_batch_size_per_gpu = 3
    gradient_accumulation_steps = 2
    gradient_clipping = 1.0
    steps_per_print = 10
    optimizer = { type = "AdamW", params = { lr = 3e-3 } }
    scheduler = { type = "WarmupLR", params = { warmup_max_lr = 3e-3, warmup_num_steps = 15 } }
"#;

struct Workplace(tempfile::TempDir);

impl Workplace {
    fn new() -> Workplace {
        let folder = tempfile::tempdir().unwrap();
        let text: String = (0..6000u32).map(|n| char::from(b'a' + (n * n % 89 % 26) as u8)).collect();
        std::fs::write(folder.path().join("text.txt"), text).unwrap();
        std::fs::write(folder.path().join("recipe.toml"), RECIPE).unwrap();
        Workplace(folder)
    }

    fn command(&self, name: &str, more: &[&str]) -> Command {
        let mut command = support::binary();
        command.args(["train", "recipe.toml", "--out"]).arg(self.run(name)).args(more);
        command.current_dir(self.0.path()).stdin(Stdio::null());
        command
    }

    fn run(&self, name: &str) -> PathBuf {
        self.0.path().join("runs").join(name)
    }

    fn train(&self, name: &str, more: &[&str]) -> Output {
        let output = support::output_of(&mut self.command(name, more));
        assert!(output.status.success(), "{name}:\n{}\n{}", stdout(&output), stderr(&output));
        output
    }

    /// Starts a run that has far to go.
    fn start(&self, name: &str, more: &[&str]) -> std::process::Child {
        let mut command = self.command(name, more);
        command.args(["--set", "steps=100000"]).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    }
}

fn lines(path: &Path) -> Vec<Value> {
    std::fs::read_to_string(path).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// What a run learned, to the last digit: a line's step, loss, rate, norm and tokens.
fn learned(run: &Path) -> Vec<String> {
    let of = |record: &Value| {
        ["step", "loss", "lr", "grad_norm", "tokens", "loss_scale"]
            .map(|key| record[key].to_string())
            .join(" ")
    };
    lines(&run.join("log.jsonl")).iter().map(of).collect()
}

fn weights(run: &Path) -> Vec<u8> {
    std::fs::read(run.join("model/model.safetensors")).unwrap()
}

fn signal(pid: &str, name: &str) {
    let sent = Command::new("kill").args(["-s", name, pid]).status().unwrap();
    assert!(sent.success(), "{name} to {pid}");
}

/// Kills a launcher and all of its ranks as a power cut would.
fn kill_all(mut launcher: std::process::Child) {
    let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", launcher.id())).unwrap();
    let children: Vec<String> = children.split_whitespace().map(str::to_owned).collect();
    children.iter().for_each(|pid| signal(pid, "KILL"));
    launcher.kill().unwrap();
    support::wait_for(&mut launcher);
    wait_until("the ranks are gone", || children.iter().all(|pid| !is_running(pid)));
}

#[test]
fn a_killed_run_goes_on_as_if_nothing_had_happened() {
    for (stage, precision, background) in [
        (0, "fp32", "true"),
        (1, "fp16", "false"),
        (2, "bf16", "true"),
        (3, "bf16", "false"),
        (3, "fp32", "true"),
    ] {
        let place = Workplace::new();
        let stage = format!("zero_optimization.stage={stage}");
        let background = format!("save.background={background}");
        let mut settings = vec!["--set", &stage, "--set", &background];
        let precision = format!("{precision}={{\"enabled\": true}}");
        if !precision.starts_with("fp32") {
            settings.extend(["--set", &precision]);
        }
        place.train("whole", &settings);

        let launcher = place.start("killed", &settings);
        let saved = place.run("killed").join("checkpoints/global_step10");
        // A few steps after the checkpoint are logged, and lost.
        let log = place.run("killed").join("log.jsonl");
        let steps = || std::fs::read_to_string(&log).map_or(0, |text| text.lines().count());
        wait_until("the checkpoint is there", || saved.is_dir() && steps() > 12);
        kill_all(launcher);

        let resumed = place.train("killed", &[&settings[..], &["--resume", "global_step10"]].concat());
        assert!(stdout(&resumed).contains("going on after step 10 from"), "{}", stdout(&resumed));
        let (whole, killed) = (place.run("whole"), place.run("killed"));
        assert_eq!(learned(&killed), learned(&whole), "{settings:?}");
        assert!(weights(&killed) == weights(&whole), "{settings:?}: the weights differ");
        let evals = |run: &Path| std::fs::read_to_string(run.join("eval.jsonl")).unwrap();
        assert_eq!(evals(&killed), evals(&whole), "{settings:?}");
        assert!(place.run("killed").join("report.html").is_file());
    }
}

#[test]
fn a_run_goes_on_from_the_newest_and_never_over_an_earlier_one() {
    let place = Workplace::new();
    // A batch script that says `--resume` every time starts where there is nothing yet.
    let first = place.train("auto", &["--resume", "--set", "steps=4"]);
    assert!(stderr(&first).contains("no checkpoint yet"), "{}", stderr(&first));
    place.train("auto", &["--resume", "--set", "steps=7"]);
    place.train("auto", &["--resume=auto", "--set", "steps=9"]);
    place.train("whole", &["--set", "steps=9"]);
    assert_eq!(learned(&place.run("auto")), learned(&place.run("whole")));
    assert!(weights(&place.run("auto")) == weights(&place.run("whole")));

    // Nothing is left to do: what a crash after the last step cost is written again.
    std::fs::remove_dir_all(place.run("auto").join("model")).unwrap();
    place.train("auto", &["--resume", "--set", "steps=9"]);
    assert!(weights(&place.run("auto")) == weights(&place.run("whole")));

    let refuse = |more: &[&str]| {
        let output = support::output_of(&mut place.command("auto", more));
        assert!(!output.status.success());
        (output.status.code(), stderr(&output))
    };
    let (code, message) = refuse(&[]);
    assert_eq!(code, Some(2));
    assert!(message.contains("an earlier run has left its log, checkpoints and weights here"), "{message}");
    assert!(message.contains("--resume") && message.contains("--overwrite"), "{message}");
    let (_, message) = refuse(&["--resume", "global_step3"]);
    assert!(message.contains("there are: global_step4, global_step7, global_step9"), "{message}");
    let (_, message) = refuse(&["--resume", "no/such/folder"]);
    assert!(message.contains("no/such/folder: is no folder"), "{message}");
    assert_eq!(learned(&place.run("auto")).len(), 9, "a refused run changes nothing");

    // Damage is no reason to start anew.
    for step in [4, 7, 9] {
        let folder = place.run("auto").join(format!("checkpoints/global_step{step}"));
        std::fs::remove_file(folder.join("rank_00001.safetensors")).unwrap();
    }
    let (_, message) = refuse(&["--resume"]);
    assert!(message.contains("there is no whole checkpoint to go on from"), "{message}");
    assert!(message.contains("'global_step9' is passed over"), "{message}");
    // Where only the weights are left, going on would begin anew and write over them.
    std::fs::remove_dir_all(place.run("auto").join("checkpoints")).unwrap();
    let before = weights(&place.run("auto"));
    let (_, message) = refuse(&["--resume", "--set", "steps=12"]);
    assert!(message.contains("no checkpoint to go on from"), "{message}");
    assert!(weights(&place.run("auto")) == before);
}

#[test]
fn another_number_of_ranks_takes_the_same_samples_and_says_what_changed() {
    let place = Workplace::new();
    let recipe = RECIPE.replace("train_micro_batch_size_per_gpu = 3", "train_batch_size = 12");
    std::fs::write(place.0.path().join("recipe.toml"), recipe.replace("dropout = 0.1", "dropout = 0.0"))
        .unwrap();
    let run = |name: &str, ranks: &str, steps: &str| {
        stdout(&place.train(name, &["-n", ranks, "--set", &format!("steps={steps}"), "--resume"]))
    };
    run("whole", "2", "9");
    run("elastic", "2", "3");
    let said = run("elastic", "1", "5");
    for change in ["ranks: 2 -> 1", "train_micro_batch_size_per_gpu: 3 -> 6"] {
        assert!(said.contains(change), "'{change}' is not in:\n{said}");
    }
    assert!(!said.contains("train_batch_size:"), "the batch is the same:\n{said}");
    run("elastic", "3", "7");
    run("elastic", "2", "9");

    // Sums have another order on other ranks, but they are sums over the same samples.
    let (whole, elastic) =
        (lines(&place.run("whole").join("log.jsonl")), lines(&place.run("elastic").join("log.jsonl")));
    assert_eq!((whole.len(), elastic.len()), (9, 9));
    for (whole, elastic) in whole.iter().zip(&elastic) {
        let loss = |record: &Value| record["loss"].as_f64().unwrap();
        assert_eq!((&whole["step"], &whole["tokens"]), (&elastic["step"], &elastic["tokens"]));
        assert!((loss(whole) - loss(elastic)).abs() < 1e-4, "{whole}\n{elastic}");
    }
    // Nothing is lost on the way from one number of ranks to another.
    let expected = weights(&place.run("elastic"));
    for ranks in ["1", "3", "2"] {
        std::fs::remove_dir_all(place.run("elastic").join("model")).unwrap();
        run("elastic", ranks, "9");
        assert!(weights(&place.run("elastic")) == expected, "{ranks} ranks");
    }

    // With a fixed micro-batch the batch grows with the ranks, and that is said.
    std::fs::write(place.0.path().join("recipe.toml"), RECIPE).unwrap();
    run("grown", "1", "2");
    let said = run("grown", "2", "3");
    assert!(said.contains("train_batch_size: 6 -> 12"), "{said}");
}

#[test]
fn a_signal_saves_at_the_end_of_the_step_and_gives_its_own_code() {
    for ranks in ["1", "2"] {
        for (name, code) in [("TERM", 75), ("USR2", 75), ("INT", 130)] {
            let place = Workplace::new();
            let child = place.start("stopped", &["-n", ranks]);
            let log = place.run("stopped").join("log.jsonl");
            wait_until("some steps", || {
                std::fs::read_to_string(&log).is_ok_and(|text| text.lines().count() > 2)
            });
            signal(&child.id().to_string(), name);
            let output = support::finish(child);
            let said = format!("{ranks} ranks, {name}:\n{}\n{}", stdout(&output), stderr(&output));
            assert_eq!(output.status.code(), Some(code), "{said}");
            assert!(stdout(&output).contains("\ngo on    ferrospeed train recipe.toml --resume "), "{said}");
            let run = place.run("stopped");
            let done = lines(&log).len();
            assert!(run.join(format!("checkpoints/global_step{done}/manifest.json")).is_file(), "{said}");
            assert!(run.join("report.html").is_file(), "{said}");
            assert_eq!(outcome(&run), serde_json::json!({"state": "stopped", "step": done}), "{said}");
            assert_eq!(run.join("model/model.safetensors").is_file(), name == "INT", "{said}");

            // It goes on, and ends where a run ends that was never stopped.
            let steps = format!("steps={}", done + 2);
            place.train("stopped", &["-n", ranks, "--resume", "--set", &steps]);
            place.train("whole", &["-n", ranks, "--set", &steps]);
            assert_eq!(learned(&run), learned(&place.run("whole")), "{said}");
            assert!(weights(&run) == weights(&place.run("whole")), "{said}");
        }
    }
}

/// Ranks that have not met yet have lost nothing: whoever requeues on the code of a saved run may do so here.
#[test]
fn a_signal_while_ranks_meet_gives_the_code_of_a_run_that_goes_on() {
    let place = Workplace::new();
    place.train("stopped", &["--set", "steps=1"]);
    let logs = place.run("stopped").join("logs");
    let count = || std::fs::read_dir(&logs).map_or(0, |entries| entries.count());
    for (delay_ms, name, code) in [(0, "TERM", 75), (10, "INT", 130), (20, "TERM", 75), (40, "TERM", 75)] {
        let before = count();
        let child = place.start("stopped", &["--resume"]);
        wait_until("ranks", || count() > before);
        // Wherever it falls, the end is the same.
        std::thread::sleep(std::time::Duration::from_millis(delay_ms));
        signal(&child.id().to_string(), name);
        let output = support::finish(child);
        let said = format!("{delay_ms} ms, {name}:\n{}\n{}", stdout(&output), stderr(&output));
        assert_eq!(output.status.code(), Some(code), "{said}");
        assert!(!stderr(&output).contains("before they had saved"), "{said}");
    }
}

/// Text that becomes tokens is no step: whoever requeues on the code of a saved run may do so here too.
#[test]
fn a_signal_while_text_becomes_tokens_gives_that_code_too_and_leaves_nothing() {
    let place = Workplace::new();
    let cache = place.0.path().join("cache");
    let set = format!("data.cache={}", cache.display());
    place.train("first", &["--set", "steps=1", "--set", &set]);
    let with_ending = |ending: &str| {
        let files = std::fs::read_dir(&cache).unwrap().map(|entry| entry.unwrap().path());
        files.filter(|file| file.extension().is_some_and(|found| found == ending)).collect::<Vec<_>>()
    };
    with_ending("json").iter().for_each(|manifest| std::fs::remove_file(manifest).unwrap());
    // Somebody else is making the same tokens, for as long as this test likes.
    let held = std::fs::File::open(&with_ending("lock")[0]).unwrap();
    held.lock().unwrap();
    for ranks in ["1", "2"] {
        for (name, code) in [("TERM", 75), ("INT", 130)] {
            let child = place.start("stopped", &["-n", ranks, "--set", &set]);
            let open_files = format!("/proc/{}/fd", child.id());
            wait_until("it waits for the tokens", || {
                let open = std::fs::read_dir(&open_files).into_iter().flatten().flatten();
                open.filter_map(|file| std::fs::read_link(file.path()).ok())
                    .any(|file| file.extension().is_some_and(|ending| ending == "lock"))
            });
            signal(&child.id().to_string(), name);
            let output = support::finish(child);
            let said = format!("{ranks} ranks, {name}:\n{}\n{}", stdout(&output), stderr(&output));
            assert_eq!(output.status.code(), Some(code), "{said}");
            assert!(stderr(&output).contains("nothing was trained, and nothing is lost"), "{said}");
            assert!(!place.run("stopped").exists(), "{said}");
        }
    }
}

/// What a run reads before it has its folder may be long; whoever stops it then stops nothing that was trained.
#[test]
fn a_signal_while_the_recipe_is_read_is_heard_too() {
    let place = Workplace::new();
    // A list that says nothing of plain files, and takes its time.
    let extensions = "\"x\",".repeat(900_000);
    let recipe = RECIPE.replace("[data]", &format!("[data]\nextensions = [{extensions}]"));
    std::fs::write(place.0.path().join("recipe.toml"), &recipe).unwrap();
    for (ranks, name, code) in [("1", "TERM", 75), ("2", "TERM", 75), ("1", "INT", 130)] {
        let child = place.start("stopped", &["-n", ranks]);
        wait_until("the recipe is in memory", || {
            let read = std::fs::read_to_string(format!("/proc/{}/io", child.id())).unwrap_or_default();
            let bytes = read.lines().find_map(|line| line.strip_prefix("rchar: ")?.parse().ok());
            bytes.is_none_or(|bytes: usize| bytes >= recipe.len())
        });
        signal(&child.id().to_string(), name);
        let output = support::finish(child);
        let said = format!("{ranks} ranks, {name}:\n{}\n{}", stdout(&output), stderr(&output));
        assert_eq!(output.status.code(), Some(code), "{said}");
        assert!(stderr(&output).contains("nothing was trained, and nothing is lost"), "{said}");
        assert!(!place.run("stopped").exists(), "{said}");
    }
}

fn with_sets<'a>(more: &[&'a str], sets: &[&'a str]) -> Vec<&'a str> {
    more.iter().copied().chain(sets.iter().flat_map(|one| ["--set", one])).collect()
}

#[test]
fn a_diverged_run_with_nothing_left_to_do_is_still_diverged() {
    let place = Workplace::new();
    let often = ["save.every=2", "save.background=false"];
    for (name, layout) in [("data", &[][..]), ("slices", &["--tp", "2"]), ("stages", &["--pp", "2"])] {
        let run = place.run(name);
        place.train(name, &with_sets(layout, &[&often[..], &["steps=4"]].concat()));
        let good = weights(&run);
        let train = |resume: &[&str], rate: &str| {
            let rate = format!("scheduler.params.warmup_max_lr={rate}");
            let sets = [&often[..], &["steps=10", &rate]].concat();
            let words = with_sets(&[layout, resume].concat(), &sets);
            let output = support::output_of(&mut place.command(name, &words));
            (output.status.code(), stdout(&output) + &stderr(&output))
        };
        let (code, said) = train(&["--resume"], "1e38");
        assert_eq!(code, Some(1), "{name}: {said}");
        assert!(
            run.join("checkpoints/global_step10").is_dir(),
            "{name}: all of its steps were taken: {said}"
        );
        for rate in ["1e38", "1e-4"] {
            let (code, said) = train(&["--resume"], rate);
            assert_eq!(code, Some(1), "{name}: {said}");
            assert!(said.contains("the last 5 steps is not a number"), "{name}: {said}");
            assert!(said.contains("/checkpoints/global_step4 goes on after step 4"), "{name}: {said}");
            let outcome = std::fs::read_to_string(run.join("outcome.json")).unwrap();
            assert!(outcome.contains("the run has diverged"), "{name}: {outcome}");
            assert!(weights(&run) == good, "{name}: broken weights were exported");
        }
        let (code, said) = train(&["--resume", "global_step4"], "1e-4");
        assert_eq!(code, Some(0), "{name}: {said}");
        assert_eq!(outcome(&run), serde_json::json!({"state": "finished", "step": 10}), "{name}");
        assert!(weights(&run) != good, "{name}");
    }
}

#[test]
fn a_loss_scale_that_cannot_fall_shows_the_way_back() {
    let place = Workplace::new();
    let half = ["save.every=2", "fp16={\"enabled\": true, \"initial_scale_power\": 2}"];
    place.train("half", &with_sets(&[], &[&half[..], &["steps=4"]].concat()));
    let sets = [&half[..], &["gradient_predivide_factor=1e-300", "gradient_clipping=0"]].concat();
    let output = support::output_of(&mut place.command("half", &with_sets(&["--resume"], &sets)));
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("overflowed at the smallest loss scale allowed"), "{said}");
    assert!(said.contains("/checkpoints/global_step2 goes on after step 2"), "{said}");
}

#[test]
fn another_model_of_the_same_shapes_is_refused_with_every_difference() {
    let place = Workplace::new();
    let run = place.run("same");
    place.train("same", &with_sets(&[], &["steps=4"]));
    let files = ["config/recipe.toml", "config/run.json", "log.jsonl", "model/config.json", "outcome.json"];
    let read = || files.map(|name| std::fs::read_to_string(run.join(name)).unwrap());
    let before = read();
    let refused = |sets: &[&str], told: &[&str]| {
        let output = support::output_of(&mut place.command("same", &with_sets(&["--resume"], sets)));
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{sets:?}: {said}");
        assert!(told.iter().all(|one| said.contains(one)), "{sets:?}: {said}");
        assert!(read() == before, "{sets:?}: the run is as it was");
    };
    refused(&["steps=6", "model.heads=4"], &["global_step4", "another model", "n_head: 2 -> 4"]);

    // The run's own configuration goes on, and an editor's does not.
    let config: Value = serde_json::from_str(&before[3]).unwrap();
    let edited = |key: &str, value: Value| {
        let mut config = config.clone();
        config[key] = value;
        std::fs::write(place.0.path().join("edited.json"), config.to_string()).unwrap();
    };
    let recipe = RECIPE.replace("preset = \"gpt2\"", "config = \"edited.json\"");
    let sized = ["layers = 2\n", "width = 32\n", "heads = 2\n", "dropout = 0.1\n"];
    let recipe = sized.iter().fold(recipe, |recipe, line| recipe.replace(line, ""));
    let recipe = recipe.replace("[data]", "[data]\n    tokenizer = \"bytes\"");
    std::fs::write(place.0.path().join("recipe.toml"), recipe).unwrap();
    edited("layer_norm_epsilon", 0.001.into());
    refused(&["steps=6"], &["layer_norm_epsilon: 0.00001 -> 0.001"]);
    edited("attn_pdrop", 0.25.into());
    let resumed = place.train("same", &with_sets(&["--resume"], &["steps=6"]));
    assert!(stdout(&resumed).contains("attn_pdrop: 0.1 -> 0.25"), "{}", stdout(&resumed));
}

#[test]
fn a_damaged_log_costs_its_bad_lines_and_no_run() {
    let place = Workplace::new();
    place.train("small", &["--set", "steps=10"]);
    let run = place.run("small");
    let log = run.join("log.jsonl");
    let whole = std::fs::read(&log).unwrap();
    let third = whole.iter().enumerate().filter(|(_, byte)| **byte == b'\n').nth(1).unwrap().0 + 1;
    let mut damaged = whole.clone();
    damaged[third + 2] = 0xff;
    std::fs::write(&log, &damaged).unwrap();
    let evals = std::fs::read(run.join("eval.jsonl")).unwrap();
    std::fs::write(run.join("eval.jsonl"), [b"?", &evals[..]].concat()).unwrap();

    let said = stderr(&place.train("small", &["--resume"]));
    assert!(said.contains("log.jsonl: line 3 cannot be read"), "{said}");
    assert!(said.contains("log.jsonl: 1 step before the checkpoint is not in it: 3"), "{said}");
    assert!(said.contains("eval.jsonl: line 1 cannot be read"), "{said}");
    assert_eq!(std::fs::read(run.join("log.jsonl.damaged")).unwrap(), damaged);
    let steps: Vec<u64> = lines(&log).iter().map(|line| line["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, (1..=20).filter(|step| *step != 3).collect::<Vec<u64>>());
    assert!(run.join("report.html").is_file());

    // One that was cut short.
    let end = whole.iter().enumerate().filter(|(_, byte)| **byte == b'\n').nth(6).unwrap().0 + 5;
    std::fs::write(&log, &whole[..end]).unwrap();
    let said = stderr(&place.train("small", &["--resume", "--set", "steps=21"]));
    assert!(said.contains("log.jsonl: 13 steps before the checkpoint are not in it: 8 to 20"), "{said}");
    assert_eq!(lines(&log).last().unwrap()["step"], 21);

    // One with a gap, and one that is gone, of a run that was killed.
    let killed = || std::fs::remove_file(run.join("outcome.json")).unwrap();
    killed();
    let lines: Vec<&[u8]> = whole.split_inclusive(|&byte| byte == b'\n').collect();
    std::fs::write(&log, [&lines[..2], &lines[3..4], &lines[6..]].concat().concat()).unwrap();
    let said = stderr(&place.train("small", &["--resume", "global_step10", "--set", "steps=11"]));
    assert!(said.contains("log.jsonl: 3 steps before the checkpoint are not in it: 3, 5 to 6"), "{said}");
    std::fs::remove_file(&log).unwrap();
    killed();
    let said = stderr(&place.train("small", &["--resume", "global_step10", "--set", "steps=11"]));
    assert!(said.contains("log.jsonl: 10 steps before the checkpoint are not in it: 1 to 10"), "{said}");
}

#[test]
fn a_lock_is_never_taken_through_a_link() {
    let place = Workplace::new();
    let (run, mine) = (place.run("small"), place.0.path().join("mine"));
    std::fs::write(&mine, "mine").unwrap();
    std::fs::create_dir_all(&run).unwrap();
    std::os::unix::fs::symlink(&mine, run.join(".ferrospeed.lock")).unwrap();
    let output = support::output_of(&mut place.command("small", &[]));
    let said = stderr(&output);
    assert!(!output.status.success() && said.contains(".ferrospeed.lock"), "{said}");
    assert!(said.contains("is a link, and a lock must be a file"), "{said}");
    assert_eq!(std::fs::read(&mine).unwrap(), b"mine");
}
