//! Fine-tuning on conversations, as `recipes/chat.toml` shows it.

use super::support::{binary, output_of, stderr, stdout};
use std::path::Path;

fn run(folder: &Path, words: &[&str]) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut command = binary();
    command.args(words).current_dir(root).env("NO_COLOR", "1").env("HOME", folder);
    let output = output_of(&mut command);
    assert!(output.status.success(), "{words:?}: {}", stderr(&output));
    stdout(&output)
}

#[test]
fn samples_are_shown_with_what_is_learnt_of_them() {
    let folder = tempfile::tempdir().unwrap();
    let shown = run(folder.path(), &["data", "inspect", "recipes/chat.toml"]);
    assert!(shown.contains("user: What does the cat do?\nassistant:[[ The cat meows.\n]]"), "{shown}");
    assert!(shown.contains("240 samples in sequences of 256 tokens"), "{shown}");
}

/// Every learnt token counts alike, whichever micro-batch, rank or stage has it (transformers from 4.46 on).
#[test]
fn the_loss_is_the_mean_over_the_learnt_tokens_of_the_whole_batch() {
    let folder = tempfile::tempdir().unwrap();
    let losses = |name: &str, batch: [&str; 2], more: &[&str]| {
        let out = folder.path().join(name);
        let [size, accumulation] = batch;
        let size = format!("training.per_device_train_batch_size={size}");
        let accumulation = format!("training.gradient_accumulation_steps={accumulation}");
        let sets = ["epochs=1", &size, &accumulation, "data.validation=0"].map(|set| ["--set", set]);
        let words = ["train", "recipes/chat.toml", "--out", out.to_str().unwrap()];
        run(folder.path(), &[&words[..], &sets.concat(), more].concat());
        let log = std::fs::read_to_string(out.join("log.jsonl")).unwrap();
        let loss =
            |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap()["loss"].as_f64().unwrap();
        log.lines().map(loss).collect::<Vec<f64>>()
    };
    let whole = losses("whole", ["8", "1"], &[]);
    assert!(whole.len() > 5 && whole.last() < whole.first(), "{whole:?}");
    for (name, batch, more) in [
        ("accumulated", ["2", "4"], &[][..]),
        ("ranks", ["4", "1"], &["-n", "2", "--set", "zero_optimization.stage=3"]),
        ("stages", ["2", "4"], &["-n", "2", "--pp", "2"]),
    ] {
        let parts = losses(name, batch, more);
        assert_eq!(parts.len(), whole.len(), "{name}");
        for (step, (part, whole)) in parts.iter().zip(&whole).enumerate() {
            assert!((part - whole).abs() < 1e-5 * whole.abs(), "{name}: step {step}: {part}, whole {whole}");
        }
    }
}
