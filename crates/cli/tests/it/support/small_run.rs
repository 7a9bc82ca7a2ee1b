//! A small run for tests of what a run leaves in its folder.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;

use super::{binary, output_of, small_recipe, stderr, stdout};

pub(crate) fn recipe() -> String {
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

pub(crate) struct Workplace(pub(crate) tempfile::TempDir);

impl Workplace {
    pub(crate) fn new() -> Workplace {
        let folder = tempfile::tempdir().unwrap();
        let text: String = (0..4000u32).map(|n| char::from(b'a' + (n * n % 89 % 26) as u8)).collect();
        std::fs::write(folder.path().join("text.txt"), text).unwrap();
        std::fs::write(folder.path().join("recipe.toml"), recipe()).unwrap();
        Workplace(folder)
    }

    pub(crate) fn run_folder(&self, name: &str) -> PathBuf {
        self.0.path().join("runs").join(name)
    }

    pub(crate) fn command(&self, more: &[&str]) -> Command {
        let mut command = binary();
        command.args(["train", "recipe.toml"]).args(more).current_dir(self.0.path()).stdin(Stdio::null());
        command
    }

    pub(crate) fn train(&self, more: &[&str]) -> Output {
        output_of(&mut self.command(more))
    }

    pub(crate) fn train_well(&self, more: &[&str]) -> Output {
        let output = self.train(more);
        assert!(output.status.success(), "{more:?}:\n{}\n{}", stdout(&output), stderr(&output));
        output
    }
}

/// A run that goes on until the test is over.
pub(crate) struct Endless(pub(crate) Child);

impl Drop for Endless {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub(crate) fn losses(run: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(run.join("log.jsonl")).unwrap();
    let record = |line: &str| serde_json::from_str::<Value>(line).unwrap();
    text.lines().map(|line| record(line)["loss"].to_string()).collect()
}

pub(crate) fn outcome(run: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(run.join("outcome.json")).unwrap()).unwrap()
}
