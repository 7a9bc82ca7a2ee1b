//! What `ferrospeed train` says of a run when its ds_config asks.

mod support;

use std::path::Path;

use support::{binary, output_of, stderr, stdout};

/// A folder with a text and a recipe, to which a test adds keys of the ds_config.
fn workplace() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let text = "the quick brown fox jumps over the lazy dog; a stitch in time saves nine.\n".repeat(200);
    std::fs::write(folder.path().join("text.txt"), text).unwrap();
    let recipe = r#"
        name = "small"
        steps = 6
        ranks = 2
        [model]
        preset = "gpt2"
        layers = 1
        width = 32
        heads = 2
        [data]
        text = ["text.txt"]
        sequence = 32
        [ds_config]
        train_micro_batch_size_per_gpu = 2
        steps_per_print = 2
        optimizer = { type = "AdamW", params = { lr = 3e-3 } }
    "#;
    std::fs::write(folder.path().join("recipe.toml"), recipe).unwrap();
    folder
}

/// Trains with some keys; what it said on its two outputs.
fn train(folder: &Path, keys: &[&str]) -> (String, String) {
    let mut words = vec!["train", "recipe.toml", "--device", "cpu"];
    words.extend(keys.iter().flat_map(|key| ["--set", *key]));
    let output = output_of(binary().args(&words).current_dir(folder));
    assert!(output.status.success(), "{}\n{}", stdout(&output), stderr(&output));
    (stdout(&output), stderr(&output))
}

#[test]
fn a_run_with_comms_logger_ends_with_what_ranks_sent_each_other() {
    let folder = workplace();
    let keys = ["comms_logger.enabled=true", "comms_logger.verbose=true", "wall_clock_breakdown=true"];
    let (said, lines) = train(folder.path(), &keys);
    // What the configuration asks for by name is shown among the lines of progress.
    assert!(lines.contains("comm op: ") && lines.contains("| bwd_allreduce_microstep: "), "{lines}");
    assert!(said.contains("communication of rank 0\n"), "{said}");
    assert!(said.contains("Comm. Op            Message Size        Count"), "{said}");
    assert!(said.contains("Breakdown with straggler effect"), "{said}");
}
