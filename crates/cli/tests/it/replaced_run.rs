//! A run that replaces another gives it back unless it takes a step.

use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;
use std::time::Duration;

use super::support::small_run::{Workplace, losses, recipe};
use super::support::{finish, stderr, wait_until};

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
