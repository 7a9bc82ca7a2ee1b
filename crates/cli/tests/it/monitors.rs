//! Curves of runs: on disks that are full for a while, and when a run goes on.

use super::support;
use std::path::Path;
use std::process::Command;

use super::support::small_run::Workplace;
use super::support::{may_mount, stderr, stdout};
use ferrospeed_observe::monitor::{Event, read_events};

/// The positions in a file of `csv_monitor`, all of whose rows have a number.
fn positions(path: &Path) -> Vec<u64> {
    let text = std::fs::read_to_string(path).unwrap();
    let rows = text.strip_suffix("\r\n").unwrap().split("\r\n").skip(1);
    let position = |row: &str| {
        let (position, value) = row.split_once(',').unwrap();
        assert!(value.parse::<f64>().is_ok(), "{row}");
        position.parse().unwrap()
    };
    rows.map(position).collect()
}

const ON_A_SMALL_DISK: &str = r#"
    mount -t tmpfs -o size=16m tmpfs /mnt
    "$FERROSPEED" train recipe.toml --set steps=1000000 --set save.every=1000000 \
        --set csv_monitor.enabled=true --set csv_monitor.output_path=/mnt --set csv_monitor.job_name=csv \
        --set tensorboard.enabled=true --set tensorboard.output_path=/mnt --set tensorboard.job_name=board \
        --set wandb.enabled=true --set wandb.dir=/mnt/wandb > said 2> told &
    run=$!
    trap 'kill -KILL $run 2> /dev/null || true' EXIT
    wait_until() {
        turns=0
        until eval "$1"; do
            kill -0 $run; turns=$((turns + 1)); test $turns -lt 6000; sleep 0.02
        done
    }
    all_told() { for place in csv board wandb; do grep -q "/mnt/$place/.*$1" told || return 1; done; }
    wait_until 'test -s /mnt/csv/Train_Samples_lr.csv'
    dd if=/dev/zero of=/mnt/filler bs=4k 2> /dev/null || true
    wait_until 'all_told "training goes on, and the curves lack"'
    steps=$(wc -l < runs/small/log.jsonl)
    wait_until 'test $(wc -l < runs/small/log.jsonl) -gt $((steps + 100))'
    rm /mnt/filler
    wait_until 'all_told "can be written again; the curves lack"'
    kill -TERM $run
    code=0; wait $run || code=$?
    cp -r /mnt kept
    echo "code $code"
"#;

#[test]
fn curves_on_a_disk_that_is_full_for_a_while_are_whole_and_what_they_lack_is_told() {
    if !may_mount() {
        return;
    }
    let place = Workplace::new();
    let output = Command::new("unshare")
        .args(["-rm", "sh", "-ec", ON_A_SMALL_DISK])
        .env("FERROSPEED", env!("CARGO_BIN_EXE_ferrospeed"))
        .current_dir(place.0.path())
        .output()
        .unwrap();
    let told = std::fs::read_to_string(place.0.path().join("told")).unwrap_or_default();
    assert!(output.status.success(), "{}{}\n{told}", stdout(&output), stderr(&output));
    assert!(stdout(&output).contains("code 1\n"), "{}\n{told}", stdout(&output));
    // Rows differ in length, so that a shorter one may find room once or twice between others that do not.
    assert!(told.matches("WARN").count() < 20, "not a warning a step: {told}");
    let (_, end) = told.split_once("its curves are not complete: ").expect(&told);
    for place in ["/mnt/csv/Train_Samples_", "/mnt/board/events.out.tfevents.", "/mnt/wandb/offline-run-"] {
        assert!(end.contains(place), "{place}: {told}");
    }

    let kept = place.0.path().join("kept");
    let steps = support::lines_of(&place.run_folder("small").join("log.jsonl")).len() as u64;
    let mut rows = 0;
    for (name, last) in [("train_loss", 2 * (steps - 1)), ("lr", 2 * steps)] {
        let positions = positions(&kept.join(format!("csv/Train_Samples_{name}.csv")));
        assert!(positions.is_sorted_by(|one, next| one < next), "{name}: {positions:?}");
        assert_eq!(positions.last(), Some(&last), "{name} goes on to the end");
        rows += positions.len() as u64;
    }
    assert!(rows < 2 * steps, "nothing was lost in {rows} rows of {steps} steps");
    let board = kept.join("board").read_dir().unwrap().next().unwrap().unwrap().path();
    let events = read_events(&board).unwrap();
    assert!(
        (events.len() as u64) < 2 * steps,
        "nothing was lost in {} events of {steps} steps",
        events.len()
    );
    assert!(matches!(events.last(), Some(Event::Scalar { step, .. }) if *step == 2 * steps), "{events:?}");
}

#[test]
fn a_run_that_goes_on_has_every_step_once_in_its_csv_files() {
    let place = Workplace::new();
    let curves = place.0.path().join("curves/mine");
    let csv = r#"csv_monitor={"enabled": true, "output_path": "curves", "job_name": "mine"}"#;
    let sets = ["--set", csv, "--set", "data.validation=0.1", "--set", "eval.every=2"];
    let all = || {
        ["Train_Samples_train_loss", "Train_Samples_lr", "Validation_Samples_loss"]
            .map(|name| positions(&curves.join(format!("{name}.csv"))))
    };
    let whole = [vec![0, 2, 4, 6, 8, 10], vec![2, 4, 6, 8, 10, 12], vec![4, 8, 12]];
    place.train_well(&sets);
    assert_eq!(all(), whole);
    // As one that was killed after its last step.
    std::fs::remove_file(place.run_folder("small").join("outcome.json")).unwrap();
    let resume = |words: &[&str]| stderr(&place.train_well(&[&sets, words].concat()));
    let said = resume(&["--out", "runs/small", "--resume", "global_step2"]);
    assert_eq!(all(), whole);
    let told = "curves/mine: 10 rows from after the checkpoint are taken away";
    assert_eq!(said.matches(told).count(), 1, "{said}");
    let said = resume(&["--out", "runs/small", "--resume", "--set", "steps=7"]);
    assert!(!said.contains("taken away") && !said.contains("not in it"), "nothing is amiss: {said}");

    // As one that was killed before its first checkpoint.
    let folder = place.run_folder("small");
    ["checkpoints", "model"].into_iter().for_each(|name| std::fs::remove_dir_all(folder.join(name)).unwrap());
    std::fs::remove_file(folder.join("outcome.json")).unwrap();
    let said = resume(&["--out", "runs/small", "--resume"]);
    assert_eq!(all(), whole);
    assert!(said.contains("rows from an attempt without a checkpoint are taken away"), "{said}");

    // A run that starts from another's checkpoint takes nothing from the other's curves.
    let before = all();
    let said = resume(&["--out", "runs/other", "--resume", "runs/small/checkpoints/global_step2"]);
    assert!(!said.contains("taken away") && !said.contains("not in it"), "{said}");
    assert!(all().iter().zip(&before).all(|(now, before)| now.starts_with(before)));
}
