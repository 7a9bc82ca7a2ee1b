//! The README's first command with fewer steps: loss falls, and every file is there and can be read.

use super::support;
use std::path::{Path, PathBuf};

use ferrospeed_observe::monitor::{Event, read_events};
use serde_json::Value;

const STEPS: usize = 16;

fn json_lines(path: &Path) -> Vec<Value> {
    std::fs::read_to_string(path).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn only_file(folder: &Path) -> PathBuf {
    let files: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(files.len(), 1, "{files:?}");
    files[0].clone()
}

#[test]
fn the_quickstart_learns_and_leaves_readable_files() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let place = tempfile::tempdir().unwrap();
    let (run, monitors) = (place.path().join("run"), place.path().join("monitors"));
    let steps = format!("steps={STEPS}");
    let set = [
        steps.as_str(),
        "eval.sequences=4",
        "eval.every=8",
        "sample.tokens=8",
        "wandb.enabled=true",
        "csv_monitor.enabled=true",
        &format!("csv_monitor.output_path={}", monitors.display()),
        "csv_monitor.job_name=job",
        "tensorboard.enabled=true",
        &format!("tensorboard.output_path={}", monitors.display()),
        "tensorboard.job_name=board",
    ]
    .map(|assignment| ["--set".to_owned(), assignment.to_owned()]);
    let output = support::output_of(
        support::binary()
            .args(["train", "recipes/quickstart.toml", "--out", run.to_str().unwrap()])
            .args(set.as_flattened())
            .current_dir(root),
    );
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.contains("% of peak") && said.contains("validation loss"), "{said}");

    let log = json_lines(&run.join("log.jsonl"));
    let loss = |record: &Value| record["loss"].as_f64().unwrap();
    assert_eq!(log.len(), STEPS);
    assert!(loss(&log[STEPS - 1]) < loss(&log[0]) - 1.0, "{} to {}", loss(&log[0]), loss(&log[STEPS - 1]));
    assert!(said.contains(" nats per byte)"), "{said}");
    assert_eq!(json_lines(&run.join("eval.jsonl")).len(), 2);

    let weights = std::fs::read(run.join("model/model.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&weights).unwrap();
    assert!(tensors.names().iter().any(|name| name.ends_with("wte.weight")), "{:?}", tensors.names());

    // Both TensorBoard files, the run's own and the ds_config's, hold one loss per step.
    for folder in [run.join("events"), monitors.join("board")] {
        let events = read_events(&only_file(&folder)).unwrap();
        let is_loss =
            |event: &&Event| matches!(event, Event::Scalar { tag, .. } if tag == "Train/Samples/train_loss");
        assert_eq!(events.iter().filter(is_loss).count(), STEPS);
    }
    let csv = std::fs::read_to_string(monitors.join("job/Train_Samples_train_loss.csv")).unwrap();
    let mut rows = csv.split_terminator("\r\n");
    assert_eq!(rows.next(), Some("step,train_loss"));
    for (row, record) in rows.zip(&log) {
        let (_, value) = row.split_once(',').unwrap();
        assert_eq!(value.parse::<f64>().unwrap() as f32, loss(record) as f32);
    }
    let wandb = only_file(&run.join("wandb"));
    let id = wandb.to_str().unwrap().rsplit('-').next().unwrap();
    assert!(std::fs::read(wandb.join(format!("run-{id}.wandb"))).unwrap().starts_with(b":W&B"));

    let about: Value = serde_json::from_slice(&std::fs::read(run.join("config/run.json")).unwrap()).unwrap();
    assert_eq!((&about["steps"], &about["facts"]["ranks"]), (&STEPS.into(), &"2".into()));
    let report = std::fs::read_to_string(run.join("report.html")).unwrap();
    assert!(report.starts_with("<!DOCTYPE html>") && report.ends_with("</html>\n"));
    assert_eq!((report.matches("<svg ").count(), report.matches("</svg>").count()), (6, 6));
    assert!(!std::fs::read_to_string(run.join("sample.txt")).unwrap().is_empty());
}
