//! A run that failed says so, what cannot be made again is saved first, and nothing odd in a folder is written to.

use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::support::small_run::{Workplace, losses, outcome};
use super::support::{
    binary, children, finish, may_mount, output_of, stderr, stdout, variable, wait_for, wait_until,
};
use serde_json::Value;

#[test]
fn a_run_that_diverges_ends_with_a_verdict_and_exports_nothing() {
    let place = Workplace::new();
    for ranks in ["1", "2"] {
        let out = place.run_folder(&format!("diverged-{ranks}"));
        let mut words = vec!["-n", ranks, "--out", out.to_str().unwrap(), "--set", "steps=40"];
        words.extend(["--set", "optimizer.params.lr=1e38", "--set", "max_bad_steps=5"]);
        let output = place.train(&words);
        let said = stderr(&output) + &stdout(&output);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("the run has diverged") && said.contains("is not a number"), "{said}");
        assert!(!out.join("model/model.safetensors").exists(), "{ranks} ranks: bad weights were exported");
        assert!(losses(&out).len() < 40, "it ends early");
        let outcome = outcome(&out);
        assert!(outcome["why"].as_str().unwrap().contains("diverged"), "{outcome}");
        let report = std::fs::read_to_string(out.join("report.html")).unwrap();
        assert!(report.contains("diverged"), "the report of a failed run says why");
    }
}

#[test]
fn output_that_nobody_reads_holds_neither_a_run_nor_its_launcher() {
    let place = Workplace::new();
    for ranks in ["1", "2"] {
        let out = place.run_folder(&format!("unread-{ranks}"));
        // The end that reads is held, and never read.
        let (_unread, pipe) = std::io::pipe().unwrap();
        // SAFETY: both ends are open.
        assert!(unsafe { libc::fcntl(pipe.as_raw_fd(), libc::F_SETPIPE_SZ, 4096) } >= 4096);
        let mut command =
            place.command(&["-n", ranks, "--out", out.to_str().unwrap(), "--set", "steps=1000000"]);
        command.args(["--set", "steps_per_print=1"]).stdout(pipe.try_clone().unwrap()).stderr(pipe);
        let mut running = command.spawn().unwrap();
        drop(command);
        // More lines than this pipe holds.
        wait_until("the run goes on although nobody reads", || {
            std::fs::read_to_string(out.join("log.jsonl")).is_ok_and(|log| log.lines().count() > 100)
        });
        let expected = match ranks {
            "1" => {
                signal(running.id(), libc::SIGTERM);
                75
            }
            _ => {
                let is_second = |pid: &u32| variable(*pid, "RANK").as_deref() == Some("1");
                signal(children(running.id()).into_iter().find(is_second).unwrap(), libc::SIGKILL);
                128 + libc::SIGKILL
            }
        };
        assert_eq!(wait_for(&mut running).code(), Some(expected));
        let state = if ranks == "1" { "stopped" } else { "failed" };
        assert_eq!(outcome(&out)["state"], state);
    }
}

fn signal(pid: u32, signal: i32) {
    // SAFETY: the process is this test's own.
    assert_eq!(unsafe { libc::kill(pid as i32, signal) }, 0);
}

/// Two ranks in the validation after the first step, which takes hours.
fn validating(place: &Workplace, out: &Path) -> std::process::Child {
    let data = r#"data={"synthetic": 400000000, "sequence": 16, "validation": 0.99}"#;
    let mut command = place.command(&["-n", "2", "--out", out.to_str().unwrap(), "--set", data]);
    command.args(["--set", "model.vocabulary=64", "--set", "eval.every=1"]);
    let running = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    wait_until("the first step is taken", || {
        std::fs::read_to_string(out.join("log.jsonl")).is_ok_and(|log| log.ends_with('\n'))
    });
    running
}

#[test]
fn a_signal_is_heard_by_ranks_that_validate() {
    let place = Workplace::new();
    for (name, number, code) in [("term", libc::SIGTERM, 75), ("int", libc::SIGINT, 130)] {
        let out = place.run_folder(name);
        let running = validating(&place, &out);
        signal(running.id(), number);
        let output = finish(running);
        assert_eq!(output.status.code(), Some(code), "{}{}", stdout(&output), stderr(&output));
        assert_eq!(std::fs::read_to_string(out.join("eval.jsonl")).unwrap_or_default(), "");
        assert!(out.join("checkpoints/global_step1/manifest.json").exists());
    }
}

#[test]
fn a_rank_that_is_stopped_while_ranks_validate_is_named() {
    let place = Workplace::new();
    let running = validating(&place, &place.run_folder("stopped"));
    let is_second = |pid: &u32| variable(*pid, "RANK").as_deref() == Some("1");
    signal(children(running.id()).into_iter().find(is_second).unwrap(), libc::SIGSTOP);
    let output = finish(running);
    let said = stderr(&output);
    assert!(!output.status.success() && said.contains("rank 1"), "{said}");
    assert!(said.contains("stopped responding") || said.contains("is stopped"), "{said}");
}

#[test]
fn a_diverged_run_is_shown_the_way_back_to_before_it_went_wrong() {
    let place = Workplace::new();
    let out = place.run_folder("small");
    let train = |more: &[&str], sets: &[&str]| {
        let sets: Vec<&str> = sets.iter().flat_map(|one| ["--set", one]).collect();
        let output = place.train(&[&["--out", out.to_str().unwrap()], more, &sets].concat());
        (output.status.code(), stderr(&output))
    };
    let broken = "optimizer.params.lr=1e38";
    // Its checkpoints were all saved after its first update.
    let (code, said) = train(&[], &["steps=80", "max_bad_steps=55", broken]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("the last 55 steps is not a number"), "the recipe says when: {said}");
    assert!(said.contains("there is no checkpoint from before it went wrong: start anew"), "{said}");
    // Whoever tries again from there is given as many steps as the recipe says.
    let (code, said) = train(&["--resume"], &["steps=80", "max_bad_steps=7"]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("the last 7 steps is not a number; none was taken since it went on"), "{said}");

    let (code, said) = train(&["--overwrite"], &["steps=4"]);
    assert_eq!(code, Some(0), "{said}");
    // As one that was killed before it saved again.
    std::fs::remove_dir_all(out.join("checkpoints/global_step4")).unwrap();
    std::fs::remove_file(out.join("outcome.json")).unwrap();
    let (code, said) =
        train(&["--resume"], &["steps=12", "max_bad_steps=3", "gradient_predivide_factor=1e-300"]);
    assert_eq!(code, Some(1), "{said}");
    assert!(
        said.contains("there is no checkpoint from before it went wrong"),
        "after step 2 it went wrong: {said}"
    );
    let (code, said) = train(&["--overwrite"], &["steps=4"]);
    assert_eq!(code, Some(0), "{said}");
    let (code, said) =
        train(&["--resume"], &["steps=12", "max_bad_steps=3", "gradient_predivide_factor=1e-300"]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("/checkpoints/global_step2 goes on after step 2"), "{said}");
    // What it is told to try is tried.
    let (code, said) = train(&["--resume", "global_step2"], &["steps=5", "optimizer.params.lr=0.25"]);
    assert_eq!(code, Some(0), "{said}");
    let log = std::fs::read_to_string(out.join("log.jsonl")).unwrap();
    let last: Value = serde_json::from_str(log.lines().last().unwrap()).unwrap();
    assert_eq!(last["lr"], 0.25, "{last}");
}

/// Trains after a script has mounted what is to fail, in places no one else sees.
fn train_after(place: &Workplace, script: &str) -> Option<String> {
    if !may_mount() {
        return None;
    }
    let script = format!(
        "{script}; \"$FERROSPEED\" train recipe.toml --force --set data.validation=0.1 --set eval.every=2 \"$@\""
    );
    let output = Command::new("unshare")
        .args(["-rm", "sh", "-ec", &script])
        .env("FERROSPEED", env!("CARGO_BIN_EXE_ferrospeed"))
        .current_dir(place.0.path())
        .output()
        .unwrap();
    let said = stderr(&output) + &stdout(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    Some(said)
}

#[test]
fn weights_outlive_a_last_checkpoint_that_cannot_be_saved() {
    let place = Workplace::new();
    let out = place.run_folder("small");
    let script = "mkdir -p runs/small/checkpoints; mount -t tmpfs -o size=16k tmpfs runs/small/checkpoints";
    let Some(said) = train_after(&place, script) else { return };
    assert!(said.contains("its last checkpoint was not saved"), "{said}");
    assert!(out.join("model/model.safetensors").exists(), "{said}");
    assert!(outcome(&out)["why"].as_str().unwrap().contains("was not saved"));
}

#[test]
fn the_rank_whose_disk_is_full_is_blamed_and_not_one_that_left_because_of_it() {
    let place = Workplace::new();
    let out = place.run_folder("small");
    for room in ["16k", "64k", "200k"] {
        let _ = std::fs::remove_dir_all(&out);
        let folder = "runs/small/checkpoints";
        let script = format!("mkdir -p {folder}; mount -t tmpfs -o size={room} tmpfs {folder}; set -- -n 2");
        let Some(said) = train_after(&place, &script) else { return };
        let why = outcome(&out)["why"].as_str().unwrap().to_owned();
        assert!(why.contains("failed with exit code 1"), "{room}: {why}\n{said}");
        assert!(
            !why.contains("is stopped") && !why.contains("rank 0 failed:") && !why.contains("rank 1 failed:"),
            "{why}"
        );
    }
}

#[test]
fn ranks_without_a_loopback_interface_say_so_at_once() {
    if !may_mount() {
        return;
    }
    let place = Workplace::new();
    let mut alone = Command::new("unshare");
    alone.args(["-rn", env!("CARGO_BIN_EXE_ferrospeed"), "train", "recipe.toml", "-n", "2"]);
    let output = output_of(alone.current_dir(place.0.path()));
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(stderr(&output).contains("the loopback interface of this host is down"), "{}", stderr(&output));
}

#[test]
fn a_log_on_a_full_disk_costs_the_log_and_nothing_else() {
    let place = Workplace::new();
    let out = place.run_folder("small");
    let script = "mkdir -p runs/small; mount -t tmpfs -o size=4k tmpfs /mnt; \
                  head -c 4096 /dev/zero > /mnt/filled || true; touch /mnt/eval.jsonl; \
                  ln -s /mnt/eval.jsonl runs/small/eval.jsonl";
    let Some(said) = train_after(&place, script) else { return };
    assert!(said.contains("its log is not complete") && said.contains("eval.jsonl"), "{said}");
    assert!(out.join("model/model.safetensors").exists(), "{said}");
    assert!(out.join("checkpoints/global_step6/manifest.json").exists(), "{said}");
}

#[test]
fn a_token_file_that_is_cut_while_it_is_trained_on_is_told() {
    let place = Workplace::new();
    let data = place.0.path().join("tokens.bin");
    std::fs::write(&data, [7; 64_000]).unwrap();
    let source = "data={\"tokens\": [\"tokens.bin\"], \"sequence\": 16}";
    let set = ["--set", source, "--set", "model.vocabulary=2000", "--set", "steps=1000000"];
    let mut run = place.command(&set);
    let run = run.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let log = place.run_folder("small").join("log.jsonl");
    wait_until("a step", || log.metadata().is_ok_and(|log| log.len() > 0));
    std::fs::File::options().write(true).open(&data).unwrap().set_len(1000).unwrap();
    let output = finish(run);
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("tokens.bin: has 1000 bytes now, and bytes "), "{said}");
    assert!(said.contains("put it back as it was, and go on with --resume"), "{said}");
}

#[test]
fn no_file_of_a_run_is_written_through_a_link_of_somebody_else() {
    let place = Workplace::new();
    place.train_well(&[]);
    let (run, mine) = (place.run_folder("small"), place.0.path().join("mine"));
    std::fs::write(&mine, "mine").unwrap();
    for name in ["log.jsonl", "eval.jsonl", "report.html", "config/run.json"] {
        let (link, aside) = (run.join(name), place.0.path().join("aside"));
        std::fs::rename(&link, &aside).unwrap();
        std::os::unix::fs::symlink(&mine, &link).unwrap();
        if std::os::unix::fs::lchown(&link, Some(12_345), None).is_err() {
            return ferrospeed_testkit::skip::skip("only root makes links that are another user's");
        }
        let output = place.train(&["--resume", "--set", "steps=8"]);
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{name}: {said}");
        assert!(said.contains(&format!("{name}: is a link that user 12345 made")), "{name}: {said}");
        assert_eq!(std::fs::read_to_string(&mine).unwrap(), "mine", "{name}");
        std::fs::rename(&aside, &link).unwrap();
    }
}

#[test]
fn no_folder_of_a_run_is_reached_through_a_link_of_somebody_else() {
    let place = Workplace::new();
    place.train_well(&["--set", "save.every=2"]);
    let (run, theirs) = (place.run_folder("small"), place.0.path().join("theirs"));
    let kept = |folder: &std::path::Path| std::fs::read_dir(folder).unwrap().count();
    for name in ["", "checkpoints", "config", "model"] {
        let link = if name.is_empty() { run.clone() } else { run.join(name) };
        std::fs::rename(&link, &theirs).unwrap();
        std::os::unix::fs::symlink(&theirs, &link).unwrap();
        if std::os::unix::fs::lchown(&link, Some(12_345), None).is_err() {
            return ferrospeed_testkit::skip::skip("only root makes links that are another user's");
        }
        let before = kept(&theirs);
        let output = place.train(&["--overwrite"]);
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{name}: {said}");
        assert!(said.contains(": is a link that user 12345 made"), "{name}: {said}");
        assert_eq!(kept(&theirs), before, "{name}");
        // One's own is followed.
        std::os::unix::fs::lchown(&link, Some(0), None).unwrap();
        place.train_well(&["--overwrite", "--set", "save.every=2"]);
        std::fs::remove_file(&link).unwrap_or_else(|_| std::fs::remove_dir_all(&link).unwrap());
        let _ = std::fs::remove_dir_all(&theirs);
        place.train_well(&["--overwrite", "--set", "save.every=2"]);
    }
}

#[test]
fn nothing_is_made_in_a_folder_through_a_link_of_somebody_else() {
    let place = Workplace::new();
    place.train_well(&[]);
    let (link, theirs) = (place.0.path().join("link"), place.0.path().join("theirs"));
    std::fs::create_dir(&theirs).unwrap();
    std::os::unix::fs::symlink(&theirs, &link).unwrap();
    if std::os::unix::fs::lchown(&link, Some(12_345), None).is_err() {
        return ferrospeed_testkit::skip::skip("only root makes links that are another user's");
    }
    for words in [
        &["model", "convert", "runs/small/model", "link/"][..],
        &["checkpoint", "export-deepspeed", "runs/small", "link"],
        &["launch", "-n", "1", "--log-dir", "link", "--", "true"],
        &["train", "recipe.toml", "--out", "link"],
        &["train", "recipe.toml", "--out", "new", "--set", "data.cache=link"],
        &[
            "train",
            "recipe.toml",
            "--out",
            "new",
            "--set",
            "csv_monitor.enabled=true",
            "--set",
            "csv_monitor.output_path=link",
        ],
        &["train", "recipe.toml", "--autotuning", "tune", "--set", "autotuning.results_dir=link"],
    ] {
        let output = output_of(binary().args(words).current_dir(place.0.path()));
        assert!(!output.status.success(), "{words:?}");
        assert!(stderr(&output).contains("is a link that user 12345 made"), "{words:?}: {}", stderr(&output));
        assert_eq!(std::fs::read_dir(&theirs).unwrap().count(), 0, "{words:?}");
    }
}

#[test]
fn weights_that_have_grown_beyond_all_measure_are_a_verdict() {
    let place = Workplace::new();
    // Squares in the norms are infinite, what is divided by their roots is nothing, and all of it is numbers.
    let set = ["model.preset=llama", "optimizer.params.lr=1e4", "steps=12", "max_bad_steps=3"];
    let output = place.train(&set.iter().flat_map(|one| ["--set", one]).collect::<Vec<_>>());
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("every gradient of the last 3 steps is zero"), "{said}");
    assert!(!place.run_folder("small").join("model/model.safetensors").exists(), "{said}");
}

#[test]
fn a_log_that_is_no_plain_file_is_refused_at_once() {
    let place = Workplace::new();
    let out = place.run_folder("small");
    std::fs::create_dir_all(&out).unwrap();
    for special in ["/dev/full", "/dev/zero"] {
        std::os::unix::fs::symlink(special, out.join("eval.jsonl")).unwrap();
        let output = place.train(&["--overwrite", "--set", "name=other", "--out", "runs/other"]);
        assert!(output.status.success(), "another run does not care");
        let output = place.train(&["--resume"]);
        assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
        assert!(stderr(&output).contains("is no plain file"), "{}", stderr(&output));
        std::fs::remove_file(out.join("eval.jsonl")).unwrap();
    }
}

/// A pipe without another end would be waited for.
#[test]
fn pipes_in_the_place_of_a_runs_files_keep_nobody_waiting() {
    fn files_of(folder: &Path) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        entries.flat_map(|path| if path.is_dir() { files_of(&path) } else { vec![path] }).collect()
    }
    let place = Workplace::new();
    let sample = ["--set", "sample={\"prompt\": \"a\", \"tokens\": 4}"];
    place.train_well(&sample);
    let run = place.run_folder("small");
    let aside = place.0.path().join("aside");
    let copy = |from: &Path, to: &Path| {
        let _ = std::fs::remove_dir_all(to);
        assert!(Command::new("cp").arg("-a").args([from, to]).status().unwrap().success());
    };
    copy(&run, &aside);
    let mut refused = Vec::new();
    for file in files_of(&run) {
        std::fs::remove_file(&file).unwrap();
        // As one that was killed: a finished run is not gone on with from before its end.
        let _ = std::fs::remove_file(run.join("outcome.json"));
        assert!(Command::new("mkfifo").arg(&file).status().unwrap().success());
        // It comes to an end, or the test is over.
        let output = place.train(&[&["--resume", "--set", "steps=8"][..], &sample].concat());
        let name = file.strip_prefix(&run).unwrap().display().to_string();
        if !output.status.success() {
            let said = stderr(&output);
            let file_name = file.file_name().unwrap().to_str().unwrap();
            assert!(said.contains(file_name) && said.contains("pipe"), "{name}: {said}");
            refused.push(name);
        }
        copy(&aside, &run);
    }
    for needed in ["config/run.json", "log.jsonl", "config/recipe.toml", ".ferrospeed.lock"] {
        assert!(refused.iter().any(|name| name == needed), "{needed} was written to: {refused:?}");
    }
}
