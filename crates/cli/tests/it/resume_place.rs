//! Where a run that goes on may write: never over a finished run, and never among the files of another.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use super::support::small_run::{Workplace, losses};
use super::support::{finish, output_of, stderr, stdout, take_signals, wait_until};

/// Every file of a run but its ranks' output, and what it holds.
fn files(run: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![run.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
            let name = entry.path().strip_prefix(run).unwrap().display().to_string();
            if entry.path().is_dir() {
                folders.push(entry.path());
            } else if !name.starts_with("logs/") && !name.ends_with(".lock") {
                found.insert(name, std::fs::read(entry.path()).unwrap());
            }
        }
    }
    found
}

/// Refused twice, for a refusal must not make way for the next attempt.
fn refused(place: &Workplace, run: &str, words: &[&str], told: &[&str]) {
    let run = place.run_folder(run);
    let before = files(&run);
    for _ in 0..2 {
        let output = place.train(words);
        let said = stderr(&output);
        assert!(!output.status.success(), "{words:?}: {said}\n{}", stdout(&output));
        assert!(told.iter().all(|one| said.contains(one)), "{words:?}: {said}");
        let after = files(&run);
        let changed: Vec<_> = after.iter().filter(|(name, text)| before.get(*name) != Some(text)).collect();
        assert!(changed.is_empty() && after.len() == before.len(), "{words:?}: {changed:?}");
    }
}

#[test]
fn what_begins_with_a_checkpoint_of_another_folder_has_a_folder_of_its_own() {
    let place = Workplace::new();
    place.train_well(&[]);
    place.train_well(&["--out", "runs/other", "--set", "steps=4", "--set", "seed=7"]);
    for ranks in ["1", "2"] {
        for from in ["runs/small", "runs/small/checkpoints", "runs/small/checkpoints/global_step2"] {
            let words = ["-n", ranks, "--out", "runs/other", "--resume", from, "--set", "steps=8"];
            refused(&place, "other", &words, &["needs a folder of its own", "another --out"]);
        }
    }
    // Another recipe goes on in no run but its own, whatever is named.
    let mine = ["--set", "name=mine"];
    let told = ["holds the run 'small'", "the recipe is that of 'mine'", "another --out"];
    refused(&place, "small", &[&mine[..], &["--out", "runs/small", "--resume"]].concat(), &told);
    let small = files(&place.run_folder("small"));
    for (folder, first) in [("mine", "runs/small/checkpoints/global_step2"), ("mine-2", "runs/small")] {
        let output = place.train_well(&[&mine[..], &["--set", "steps=8", "--resume", first]].concat());
        assert!(stdout(&output).contains(&format!("runs/{folder}")), "{}", stdout(&output));
        let steps = if folder == "mine" { 6 } else { 2 };
        assert_eq!(losses(&place.run_folder(folder)).len(), steps, "{first}");
    }
    assert!(files(&place.run_folder("small")) == small, "the run that was begun with is as it was");
}

#[test]
fn a_finished_run_goes_on_from_its_end_and_nowhere_else() {
    let place = Workplace::new();
    place.train_well(&[]);
    let told = ["runs/small: this run is finished, after step 6", "with another --out"];
    for from in ["global_step2", "runs/small/checkpoints/global_step4"] {
        refused(&place, "small", &["--resume", from, "--set", "steps=8"], &told);
    }
    place.train_well(&["--resume", "runs/small/checkpoints/global_step2", "--out", "runs/branch"]);
    assert_eq!(losses(&place.run_folder("branch")), losses(&place.run_folder("small"))[2..]);
    place.train_well(&["--resume", "runs/small", "--set", "steps=8"]);
    assert_eq!(losses(&place.run_folder("small")).len(), 8);
    assert!(!place.run_folder("small-2").exists());

    // Where its end is damaged, what lies before is not gone on from without a word.
    let shard = place.run_folder("small").join("checkpoints/global_step8/rank_00000.safetensors");
    let whole = std::fs::read(&shard).unwrap();
    let mut damaged = whole.clone();
    *damaged.last_mut().unwrap() ^= 4;
    std::fs::write(&shard, &damaged).unwrap();
    let told = ["is damaged", "this run is finished, after step 8", "with another --out"];
    refused(&place, "small", &["--resume", "--set", "steps=10"], &told);
    std::fs::write(&shard, &whole[..100]).unwrap();
    let told = ["cut short", "this run is finished, after step 8", "with another --out"];
    refused(&place, "small", &["--resume", "--set", "steps=10"], &told);
}

/// Runs what a run has said at its end, as a shell does, and more options behind it.
fn again(place: &Workplace, said: &str, more: &str) -> Output {
    let command = said.lines().find_map(|line| line.strip_prefix("go on    ")).expect(said);
    let folder = Path::new(env!("CARGO_BIN_EXE_ferrospeed")).parent().unwrap().display();
    let script = format!("PATH={folder}:$PATH; {command} {more}");
    let mut shell = Command::new("sh");
    let output = output_of(take_signals(&mut shell).args(["-c", &script]).current_dir(place.0.path()));
    assert!(output.status.success(), "{script}:\n{}\n{}", stdout(&output), stderr(&output));
    output
}

#[test]
fn the_command_that_a_run_ends_with_goes_on_with_it() {
    for ranks in ["1", "2"] {
        let place = Workplace::new();
        let said = stdout(&place.train_well(&["-n", ranks]));
        again(&place, &said, "");
        assert_eq!(losses(&place.run_folder("small")).len(), 12, "twice as far: {said}");

        // One that has given way to an earlier one, with options that a shell would split.
        let first = files(&place.run_folder("small"));
        let optimizer = r#"optimizer={"type": "AdamW", "params": {"lr": 2e-3, "betas": [0.8, 0.9]}}"#;
        let words =
            ["-n", ranks, "--set", optimizer, "--set", "steps=1000000", "--set", "save.every=1000000"];
        let child = place.command(&words).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let second = place.run_folder("small-2");
        wait_until("a step", || second.join("log.jsonl").metadata().is_ok_and(|log| log.len() > 0));
        // SAFETY: the process is ours and was not waited for.
        unsafe { libc::kill(child.id() as i32, libc::SIGINT) };
        let stopped = finish(child);
        assert_eq!(stopped.status.code(), Some(130), "{}", stderr(&stopped));
        let done = losses(&second).len();
        let more = again(&place, &stdout(&stopped), &format!("--set steps={}", done + 3));
        assert_eq!(losses(&second).len(), done + 3);
        assert!(!stdout(&more).contains(" -> "), "nothing has changed: {}", stdout(&more));
        assert!(files(&place.run_folder("small")) == first, "the first run is as it was");
    }
}
