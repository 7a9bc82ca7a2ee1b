//! Validation on the way: before the first step, the best weights, patience, and samples.

use std::path::Path;

use super::support::{Quiet, alone};
use ferrospeed_train::{Job, Progress, Recipe, Resume, RunFolder, run};
use serde_json::Value;

const RECIPE: &str = r#"
    name = "small"
    steps = 12
    model = { preset = "gpt2", layers = 1, width = 16, heads = 1 }
    [data]
    text = ["PLACE/text.txt"]
    tokenizer = "bytes"
    sequence = 16
    validation = ["PLACE/other.txt"]
    [eval]
    every = 1
    at_start = true
    [save]
    every = 4
    [sample]
    prompt = "to be"
    prompts = ["or"]
    tokens = 4
    every = 5
    [ds_config]
    train_batch_size = 4
    optimizer = { type = "AdamW", params = { lr = 3e-2 } }
"#;

/// Text to learn, and text that is worse known the better that is learnt.
fn place() -> tempfile::TempDir {
    let place = tempfile::tempdir().unwrap();
    std::fs::write(place.path().join("text.txt"), "to be or not to be ".repeat(40)).unwrap();
    std::fs::write(place.path().join("other.txt"), "QXZJ to WVKB or #%&@ ".repeat(8)).unwrap();
    place
}

fn recipe(place: &Path, overrides: &[&str]) -> Recipe {
    let path = place.join("recipe.toml");
    std::fs::write(&path, RECIPE.replace("PLACE", &place.display().to_string())).unwrap();
    let overrides: Vec<String> = overrides.iter().map(|&text| text.to_owned()).collect();
    Recipe::load(&path, &overrides).unwrap()
}

#[derive(Default)]
struct Warned(Vec<String>);
impl Progress for Warned {
    fn warning(&mut self, text: &str) {
        self.0.push(text.to_owned());
    }
}

fn evals(folder: &RunFolder) -> Vec<(u64, f64)> {
    let text = std::fs::read_to_string(folder.eval()).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.map(|line| (line["step"].as_u64().unwrap(), line["loss"].as_f64().unwrap())).collect()
}

fn weights(folder: &Path) -> Vec<u8> {
    std::fs::read(folder.join("model.safetensors")).unwrap()
}

#[test]
fn the_best_weights_stay_and_a_run_without_gain_ends() {
    let place = place();
    let path = place.path().join("recipe.toml");
    // No gain is large enough, so the start stays the best.
    let small = ["eval.keep_best=true", "eval.patience=3", "eval.min_gain=100"];
    let small = recipe(place.path(), &small);
    let folder = RunFolder::at(place.path().join("patient"));
    let mut warned = Warned::default();
    let summary = run(&alone(&path, &small, &folder), &mut warned).unwrap();
    let steps: Vec<u64> = evals(&folder).iter().map(|(step, _)| *step).collect();
    assert_eq!((summary.steps, steps), (3, vec![0, 1, 2, 3]));
    let said = warned.0.join("\n");
    assert!(
        said.contains("none of the last 3 validations was better than that of step 0 (loss 5."),
        "{said}"
    );
    assert!(weights(&folder.best_model()) != weights(&folder.model()));
    // Of a run that goes on, the best weights are those that a run has which ends there.
    let long = recipe(place.path(), &["eval.keep_best=true"]);
    let folder = RunFolder::at(place.path().join("long"));
    run(&alone(&path, &long, &folder), &mut Quiet).unwrap();
    let evals = evals(&folder);
    let (best, _) = evals.iter().copied().min_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
    assert!(best > 0, "{evals:?}");
    let shorter = recipe(place.path(), &[&format!("steps={best}")]);
    let other = RunFolder::at(place.path().join("shorter"));
    run(&alone(&path, &shorter, &other), &mut Quiet).unwrap();
    assert!(weights(&folder.best_model()) == weights(&other.model()), "{evals:?}");
    // What a checkpoint remembers of it is that of a run that never stopped.
    let whole = recipe(place.path(), &["eval.patience=50", "eval.keep_best=true"]);
    let half = recipe(place.path(), &["eval.patience=50", "eval.keep_best=true", "steps=8"]);
    let [one, two] = ["one", "two"].map(|name| RunFolder::at(place.path().join(name)));
    run(&alone(&path, &whole, &one), &mut Quiet).unwrap();
    run(&alone(&path, &half, &two), &mut Quiet).unwrap();
    run(&Job { resume: Resume::Newest, ..alone(&path, &whole, &two) }, &mut Quiet).unwrap();
    assert!(weights(&one.best_model()) == weights(&two.best_model()));
    assert_eq!(self::evals(&one), self::evals(&two));
}

#[test]
fn samples_are_written_on_the_way_and_shown_in_the_report() {
    let place = place();
    let path = place.path().join("recipe.toml");
    let small = recipe(place.path(), &[]);
    let folder = RunFolder::at(place.path().join("run"));
    let summary = run(&alone(&path, &small, &folder), &mut Quiet).unwrap();
    let text = std::fs::read_to_string(folder.samples()).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.iter().map(|line| line["step"].as_u64().unwrap()).collect::<Vec<_>>(), [5, 10]);
    assert!(lines[0]["samples"][0].as_str().unwrap().starts_with("to be"), "{text}");
    assert!(lines[0]["samples"][1].as_str().unwrap().starts_with("or"), "{text}");
    assert!(summary.sample.unwrap().contains("\n\nor"));
    let report = std::fs::read_to_string(folder.report()).unwrap();
    assert!(report.contains("samples on the way") && report.contains("step 10"));
}

#[test]
fn what_recipes_say_of_validation_is_checked() {
    let place = place();
    for (set, expected) in [
        (
            &["eval.every=0", "eval.patience=2"][..],
            "eval.patience: compares validations on the way; give eval.every",
        ),
        (&["data.validation=0", "eval.keep_best=true"], "eval.keep_best: nothing is validated"),
        (&["data.validation=0"], "eval.at_start: nothing is validated"),
        (&["eval.patience=0"], "eval.patience: must be at least 1"),
        (
            &["eval.measure=accuracy", "eval.keep_best=true"],
            "eval.measure: 'accuracy' is not measured by this objective; known are loss",
        ),
        (&["eval.min_gain=0.1"], "min_gain and measure belong to keep_best and patience"),
        (&["eval.min_gain=-1", "eval.patience=1"], "eval.min_gain: must be 0 or more"),
        (&["sample.prompts=[\"\"]"], "sample.prompt: must not be empty"),
    ] {
        let problems = recipe(place.path(), set).problems().join("\n");
        assert!(problems.contains(expected), "{set:?}: {problems}");
    }
}
