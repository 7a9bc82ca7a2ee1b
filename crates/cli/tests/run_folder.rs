//! A run's folder is its own, what cannot be made again is saved first, and a run that failed says so.

mod support;

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use serde_json::Value;
use support::{binary, finish, may_mount, output_of, small_recipe, stderr, stdout, wait_until};

fn recipe() -> String {
    small_recipe(
        r#"
        name = "small"
        steps = 6
        model.layers = 1
        data = { text = ["text.txt"], sequence = 16 }
        save = { every = 2, background = false }
        "#,
        r#"
        train_micro_batch_size_per_gpu = 2
        steps_per_print = 1000000
        optimizer = { type = "AdamW", params = { lr = 3e-3 } }
        "#,
    )
}

struct Workplace(tempfile::TempDir);

impl Workplace {
    fn new() -> Workplace {
        let folder = tempfile::tempdir().unwrap();
        let text: String = (0..4000u32).map(|n| char::from(b'a' + (n * n % 89 % 26) as u8)).collect();
        std::fs::write(folder.path().join("text.txt"), text).unwrap();
        std::fs::write(folder.path().join("recipe.toml"), recipe()).unwrap();
        Workplace(folder)
    }

    fn run_folder(&self, name: &str) -> PathBuf {
        self.0.path().join("runs").join(name)
    }

    fn command(&self, more: &[&str]) -> Command {
        let mut command = binary();
        command.args(["train", "recipe.toml"]).args(more).current_dir(self.0.path()).stdin(Stdio::null());
        command
    }

    fn train(&self, more: &[&str]) -> Output {
        output_of(&mut self.command(more))
    }

    fn train_well(&self, more: &[&str]) -> Output {
        let output = self.train(more);
        assert!(output.status.success(), "{more:?}:\n{}\n{}", stdout(&output), stderr(&output));
        output
    }
}

/// A run that goes on until the test is over.
struct Endless(Child);

impl Drop for Endless {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn losses(run: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(run.join("log.jsonl")).unwrap();
    let record = |line: &str| serde_json::from_str::<Value>(line).unwrap();
    text.lines().map(|line| record(line)["loss"].to_string()).collect()
}

fn outcome(run: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(run.join("outcome.json")).unwrap()).unwrap()
}

#[test]
fn a_second_run_is_kept_out_of_a_folder_in_use() {
    let place = Workplace::new();
    let out = place.run_folder("small");
    for ranks in ["1", "2"] {
        let _ = std::fs::remove_dir_all(&out);
        let mut endless = place.command(&["-n", ranks, "--set", "steps=1000000"]);
        let endless = Endless(endless.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
        wait_until("the first step", || out.join("log.jsonl").metadata().is_ok_and(|log| log.len() > 0));
        let same = out.to_str().unwrap();
        for more in [&["--resume"][..], &["--overwrite"], &["--out", same]] {
            let second = place.train(&[&["-n", ranks], more].concat());
            assert_eq!(second.status.code(), Some(1), "{}", stderr(&second));
            assert!(stderr(&second).contains("another run is writing here"), "{}", stderr(&second));
            let holder = format!("process {}, since 20", endless.0.id());
            assert!(stderr(&second).contains(&holder), "{}", stderr(&second));
            assert!(
                !stderr(&second).contains("--overwrite"),
                "nothing that would be refused: {}",
                stderr(&second)
            );
        }
        let beside = stderr(&place.train_well(&["-n", ranks]));
        assert!(beside.contains("holds a run that is going on") && !beside.contains("--resume"), "{beside}");
        drop(endless);
        assert!(out.join("log.jsonl").exists(), "it was not touched");
        // What a killed run held is free again.
        place.train_well(&["-n", ranks, "--overwrite"]);
    }
}

#[test]
fn what_an_earlier_run_has_left_is_named_as_it_is() {
    let place = Workplace::new();
    let out = place.run_folder("small");
    std::fs::create_dir_all(&out).unwrap();
    std::fs::write(out.join("log.jsonl"), "").unwrap();
    let output = place.train(&["--out", out.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    assert!(stderr(&output).contains("an earlier run has left its log here"), "{}", stderr(&output));
}

#[test]
fn a_new_run_leaves_an_old_ones_log_and_weights_alone_unless_told() {
    let place = Workplace::new();
    place.train_well(&[]);
    let first = place.run_folder("small");
    let weights = std::fs::read(first.join("model/model.safetensors")).unwrap();

    let output = place.train_well(&["--set", "seed=7"]);
    assert!(stderr(&output).contains("small-2"), "it says where it goes: {}", stderr(&output));
    let second = place.run_folder("small-2");
    assert_ne!(losses(&second), losses(&first));
    assert_eq!(std::fs::read(first.join("model/model.safetensors")).unwrap(), weights);

    let refused = place.train(&["--out", first.to_str().unwrap()]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(stderr(&refused).contains("--overwrite"), "{}", stderr(&refused));
    assert_eq!(std::fs::read(first.join("model/model.safetensors")).unwrap(), weights);

    place.train_well(&["--out", first.to_str().unwrap(), "--overwrite", "--set", "seed=7"]);
    assert_eq!(losses(&first), losses(&second), "and then it is the run it would have been elsewhere");
}

#[test]
fn a_refused_run_leaves_the_one_that_it_would_replace() {
    let place = Workplace::new();
    place.train_well(&[]);
    let before = losses(&place.run_folder("small"));
    let (third, sharded) = ("zero_optimization.stage=3", "zero_optimization.mics_shard_size=2");
    let cases: [(&[&str], &[&str], &str); 5] = [
        (
            &[],
            &[third, "zero_optimization.zero_hpz_partition_size=3"],
            "4 ranks cannot be cut into shards of 3",
        ),
        (
            &[],
            &[third, sharded, "zero_optimization.zero_hpz_partition_size=2"],
            "zero_hpz_partition_size: keeps",
        ),
        (&["--sp", "2"], &[third, sharded], "on a mesh, state is spread over all ranks"),
        (&["--tp", "2"], &["optimizer.type=OneBitAdam"], "a 1-bit optimizer needs the same whole model"),
        (&["--tp", "2"], &["eigenvalue.enabled=true"], "measures whole blocks"),
    ];
    for (flags, settings, expected) in cases {
        let mut arguments = vec!["-n", "4", "--overwrite"];
        arguments.extend(flags);
        arguments.extend(settings.iter().flat_map(|setting| ["--set", setting]));
        let output = place.train(&arguments);
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {said}");
        assert!(said.contains(expected), "{arguments:?}: {said}");
        assert_eq!(losses(&place.run_folder("small")), before, "{arguments:?}");
    }
}

#[test]
fn a_run_that_fails_before_its_first_step_gives_back_the_one_that_it_would_replace() {
    let place = Workplace::new();
    place.train_well(&[]);
    let run = place.run_folder("small");
    let (before, weights) = (losses(&run), std::fs::read(run.join("model/model.safetensors")).unwrap());
    for ranks in ["1", "2"] {
        // No machine has so many GPUs, and only a rank looks.
        let output = place.train(&["--overwrite", "-n", ranks, "--force", "--device", "cuda:63"]);
        assert_ne!(output.status.code(), Some(0), "{}", stderr(&output));
        assert!(stderr(&output).contains("the earlier run is as it was"), "{}", stderr(&output));
        assert_eq!(losses(&run), before);
        assert_eq!(std::fs::read(run.join("model/model.safetensors")).unwrap(), weights);
    }
    // Killed before its first step: the next command finds what it put away.
    let aside = run.join(".replaced");
    std::fs::create_dir(&aside).unwrap();
    for name in ["log.jsonl", "model", "checkpoints", "config"] {
        std::fs::rename(run.join(name), aside.join(name)).unwrap();
    }
    let again = place.train_well(&["--resume"]);
    assert!(stderr(&again).contains("the earlier run is as it was"), "{}", stderr(&again));
    assert_eq!(losses(&run), before);
    assert!(!aside.exists());
    place.train_well(&["--overwrite", "--set", "seed=7"]);
    assert!(losses(&run) != before && !aside.exists());
}

#[test]
fn a_run_that_is_stopped_at_once_gives_back_the_one_that_it_would_replace() {
    let place = Workplace::new();
    place.train_well(&[]);
    let run = place.run_folder("small");
    let before = losses(&run);
    for (ranks, signal) in [("1", libc::SIGINT), ("2", libc::SIGTERM)] {
        // A signal may come before it is listened to, or after the first step: then it is tried again, a little later.
        let given_back = (0..40).any(|attempt| {
            let mut endless = place.command(&["--overwrite", "-n", ranks, "--set", "steps=1000000"]);
            let endless = endless.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
            wait_until("the earlier run to be put aside", || {
                run.join(".replaced").exists()
                    || run.join("log.jsonl").metadata().is_ok_and(|log| log.len() > 0)
            });
            std::thread::sleep(Duration::from_millis(4 * attempt));
            // SAFETY: the process is ours and was not waited for.
            unsafe { libc::kill(endless.id() as i32, signal) };
            let ended = finish(endless);
            let (said, ended) = (stderr(&ended), ended.status);
            if ended.signal().is_some() {
                place.train_well(&["--resume"]);
                assert_eq!(losses(&run), before, "what a killed run had put aside comes back");
                return false;
            }
            if !said.contains("the earlier run is as it was") {
                place.train_well(&["--overwrite"]);
                return false;
            }
            assert_eq!(ended.code(), Some(if signal == libc::SIGINT { 130 } else { 75 }), "{said}");
            assert_eq!(said.matches("told to stop before").count(), 1, "{said}");
            assert_eq!(losses(&run), before, "{said}");
            assert!(run.join("model/model.safetensors").exists() && !run.join(".replaced").exists());
            true
        });
        assert!(given_back, "{ranks} ranks");
    }
}

#[test]
fn a_run_does_not_replace_the_model_that_it_starts_from() {
    let place = Workplace::new();
    place.train_well(&[]);
    let run = place.run_folder("small");
    let (own, rest): (Vec<String>, Vec<String>) =
        recipe().lines().map(str::to_owned).partition(|line| line.trim_start().starts_with("model."));
    assert_eq!(own.len(), 4, "{own:?}");
    let recipe = format!("model.path = {:?}\n{}", run.join("model"), rest.join("\n"));
    std::fs::write(place.0.path().join("recipe.toml"), recipe).unwrap();
    let output = place.train(&["--overwrite", "--out", run.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    assert!(stderr(&output).contains("lies in the folder that --overwrite replaces"), "{}", stderr(&output));
    assert!(run.join("model/model.safetensors").exists());
}

#[test]
fn a_finished_run_that_is_resumed_says_that_nothing_is_left() {
    let place = Workplace::new();
    place.train_well(&[]);
    let again = place.train_well(&["--resume"]);
    let said = stdout(&again) + &stderr(&again);
    assert!(said.contains("all 6 steps were taken before") && !said.contains("NaN"), "{said}");
}

#[test]
fn a_resume_passes_over_damaged_checkpoints_and_says_which() {
    let place = Workplace::new();
    place.train_well(&["-n", "2"]);
    let run = place.run_folder("small");
    let expected = losses(&run);
    let checkpoints = run.join("checkpoints");

    // Somebody edits a counter; everything else is as it was written.
    let manifest = checkpoints.join("global_step6/manifest.json");
    let text = std::fs::read_to_string(&manifest).unwrap();
    std::fs::write(&manifest, text.replace("\"global_steps\": 6", "\"global_steps\": 5")).unwrap();
    let mut verify = binary();
    verify.args(["checkpoint", "verify", "--tag", "global_step6"]).arg(&checkpoints);
    let verified = output_of(&mut verify);
    assert!(!verified.status.success());
    assert!(stderr(&verified).contains("was changed after it was written"), "{}", stderr(&verified));

    // And a bit of the weights in the one before turns over.
    let shard = checkpoints.join("global_step4/rank_00001.safetensors");
    let mut bytes = std::fs::read(&shard).unwrap();
    let last = bytes.len() - 5;
    bytes[last] ^= 4;
    std::fs::write(&shard, bytes).unwrap();

    let output = place.train_well(&["-n", "2", "--resume"]);
    let said = stderr(&output) + &stdout(&output);
    for (tag, why) in [("global_step6", "was changed after it was written"), ("global_step4", "damaged")] {
        assert!(said.contains(&format!("'{tag}' is passed over")) && said.contains(why), "{tag}: {said}");
    }
    assert_eq!(losses(&run), expected, "it goes on from step 2 as it did before");
}

#[test]
fn a_resume_tells_of_checkpoints_that_were_put_away() {
    let place = Workplace::new();
    place.train_well(&[]);
    let checkpoints = place.run_folder("small").join("checkpoints");
    let away = checkpoints.join(".global_step6.replaced-12-0");
    let put_away = || std::fs::rename(checkpoints.join("global_step6"), &away).unwrap();
    put_away();
    for more in [&["--resume"][..], &["--resume", "global_step6"]] {
        let said = stderr(&place.train_well(more));
        assert!(said.contains(".replaced-12-0 is an earlier 'global_step6'"), "{more:?}: {said}");
        assert!(said.contains("it is used as 'global_step6'"), "{more:?}: {said}");
    }
    // A successor that is not whole costs nothing of it, whatever is saved next.
    std::fs::create_dir(checkpoints.join("global_step6")).unwrap();
    std::fs::copy(away.join("manifest.json"), checkpoints.join("global_step6/manifest.json")).unwrap();
    place.train_well(&["--resume", "--set", "steps=8"]);
    assert!(away.join("rank_00000.safetensors").exists(), "the only whole 'global_step6' is gone");
}

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
    std::fs::remove_dir_all(out.join("checkpoints/global_step4")).unwrap();
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
    assert!(said.contains("--resume global_step2 goes on after step 2"), "{said}");
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
    let script =
        format!("{script}; \"$FERROSPEED\" train recipe.toml --set data.validation=0.1 --set eval.every=2");
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

#[test]
fn a_run_has_no_folder_among_the_files_of_another() {
    let place = Workplace::new();
    place.train_well(&[]);
    for inside in ["runs/small/checkpoints", "runs/small/model/deeper", "runs/small/checkpoints/step2/x"] {
        for more in [&[][..], &["--resume"], &["--overwrite"]] {
            let refused = place.train(&[&["--out", inside], more].concat());
            assert_eq!(refused.status.code(), Some(2), "{inside}: {}", stderr(&refused));
            let why = "lies among the files of the run in";
            assert!(stderr(&refused).contains(why), "{inside}: {}", stderr(&refused));
        }
    }
    place.train_well(&["--out", "runs/small/another"]);
    place.train_well(&["--overwrite"]);
    assert!(
        place.run_folder("small/another/log.jsonl").exists(),
        "what is beside a run's files is not its own"
    );
}

#[test]
fn a_run_that_has_no_weights_yet_has_no_folder_for_them() {
    let place = Workplace::new();
    let run = place.run_folder("small");
    let stopped = place.command(&["--set", "steps=1000000"]).stdout(Stdio::null()).spawn().unwrap();
    wait_until("a step", || run.join("log.jsonl").metadata().is_ok_and(|log| log.len() > 0));
    // SAFETY: the process is ours and was not waited for.
    unsafe { libc::kill(stopped.id() as i32, libc::SIGTERM) };
    assert_eq!(finish(stopped).status.code(), Some(75));
    assert!(run.join("checkpoints").is_dir() && !run.join("model").exists());
    place.train_well(&["--resume"]);
    assert!(run.join("model/model.safetensors").exists());
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
