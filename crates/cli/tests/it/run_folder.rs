//! A run's folder is its own, and what it holds is found again.

use std::process::Stdio;

use super::support::small_run::{Endless, Workplace, losses, outcome};
use super::support::{binary, finish, output_of, stderr, stdout, wait_until};

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

#[test]
fn a_terminal_that_is_closed_does_not_cost_what_was_trained() {
    for ranks in ["1", "2"] {
        let place = Workplace::new();
        let run = place.run_folder("small");
        let endless = ["steps=1000000", "save.every=1000000", "wall_clock_breakdown=true"];
        let words: Vec<&str> =
            ["-n", ranks].into_iter().chain(endless.iter().flat_map(|setting| ["--set", setting])).collect();
        let mut left = place.command(&words).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        wait_until("a step", || run.join("log.jsonl").metadata().is_ok_and(|log| log.len() > 0));
        // Nobody reads any more what it says at each step.
        drop(left.stderr.take());
        // SAFETY: the process is ours and was not waited for.
        unsafe { libc::kill(left.id() as i32, libc::SIGHUP) };
        assert_eq!(finish(left).status.code(), Some(75), "{ranks} ranks");
        assert_eq!(outcome(&run)["state"], "stopped");
        place.train_well(&["-n", ranks, "--resume", "--set", "steps=1"]);
    }
}

#[test]
fn what_a_killed_run_was_writing_goes_with_the_next() {
    let place = Workplace::new();
    place.train_well(&[]);
    let run = place.run_folder("small");
    let left = [
        "config/.run.json.partial-4194999-1f",
        ".report.html.partial-4194999-0",
        "data/.tokens-1.bin.partial-4194999-2f",
        "model/.vocab.json.partial-4194999-3f",
    ];
    let alive = run.join(format!(".report.html.partial-{}-0", std::process::id()));
    left.iter().map(|name| run.join(name)).chain([alive.clone()]).for_each(|path| {
        std::fs::write(path, "half").unwrap();
    });
    for folder in [".model.4194999.partial", "model/.4194999.partial"] {
        std::fs::create_dir_all(run.join(folder).join("deep")).unwrap();
    }
    place.train_well(&["--resume"]);
    for name in left.iter().chain(&[".model.4194999.partial", "model/.4194999.partial"]) {
        assert!(!run.join(name).exists(), "{name} stays behind");
    }
    assert!(alive.exists(), "its process is not dead");
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
    // As one that was killed after its last step.
    std::fs::remove_file(run.join("outcome.json")).unwrap();

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
