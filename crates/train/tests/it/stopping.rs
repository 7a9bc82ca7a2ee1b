//! A run that is told to stop before it has begun, or where it takes long without a step.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ferrospeed_observe::StepRecord;

use super::support::{Quiet, alone};
use ferrospeed_train::{Ending, Job, Progress, Recipe, Resume, RunFolder, StopRequests, TrainError, run};

const RECIPE: &str = r#"
    name = "small"
    steps = 2
    model = { preset = "gpt2", layers = 1, width = 16, heads = 1, vocabulary = 32 }
    data = { synthetic = 4000, sequence = 16 }
    save = { every = 0 }
    [ds_config]
    train_micro_batch_size_per_gpu = 2
    optimizer = { type = "AdamW" }
"#;

#[test]
fn no_step_is_trained_and_a_later_run_begins_at_the_first() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("recipe.toml");
    std::fs::write(&path, RECIPE).unwrap();
    let recipe = Recipe::load(&path, &[]).unwrap();
    let folder = RunFolder::at(place.path().join("run"));
    for leaves in [true, false] {
        let job = alone(&path, &recipe, &folder);
        let job = if leaves { job } else { Job { resume: Resume::Newest, ..job } };
        let flag = if leaves { &job.requests.leave } else { &job.requests.finish };
        flag.store(true, Ordering::SeqCst);
        let expected = if leaves { Ending::Left } else { Ending::Stopped };
        match run(&job, &mut Quiet) {
            Err(TrainError::StoppedAtOnce(ending)) => assert_eq!(ending, expected),
            other => panic!("{other:?}"),
        }
        assert_eq!(std::fs::read_to_string(folder.log()).unwrap(), "", "no step is in the log");
        assert!(!folder.checkpoints().exists() && !folder.holds_weights());
        let outcome = std::fs::read_to_string(folder.outcome()).unwrap();
        let outcome: serde_json::Value = serde_json::from_str(&outcome).unwrap();
        assert_eq!(outcome, serde_json::json!({"state": "stopped", "step": 0}));
    }
    let job = Job { resume: Resume::Newest, ..alone(&path, &recipe, &folder) };
    assert_eq!(run(&job, &mut Quiet).unwrap().new_steps, 2);
    // One that has nothing left to do says so, and not that it was stopped.
    let job = Job { resume: Resume::Newest, ..alone(&path, &recipe, &folder) };
    job.requests.leave.store(true, Ordering::SeqCst);
    assert_eq!(run(&job, &mut Quiet).unwrap().new_steps, 0);
}

/// Tells the run to stop as soon as it has said that it took a step: what comes next is its validation, or its samples.
struct StopsBehind {
    step: u64,
    flag: Arc<AtomicBool>,
}
impl Progress for StopsBehind {
    fn step(&mut self, record: &StepRecord) {
        if record.step == self.step {
            self.flag.store(true, Ordering::SeqCst);
        }
    }
}

/// The flag of one of both requests.
fn flag(requests: &StopRequests, ending: Ending) -> Arc<AtomicBool> {
    if ending == Ending::Left { requests.leave.clone() } else { requests.finish.clone() }
}

fn validated(folder: &RunFolder) -> Vec<String> {
    std::fs::read_to_string(folder.eval()).unwrap_or_default().lines().map(str::to_owned).collect()
}

fn loaded(place: &Path, recipe: &str) -> Recipe {
    let path = place.join("recipe.toml");
    std::fs::write(&path, recipe).unwrap();
    Recipe::load(&path, &[]).unwrap()
}

const VALIDATED: &str = r#"
    name = "small"
    steps = 4
    model = { preset = "gpt2", layers = 1, width = 16, heads = 1, vocabulary = 32 }
    data = { synthetic = 4000, sequence = 16, validation = 0.2 }
    save = { every = 0 }
    eval = { every = 2, keep_best = true }
    [ds_config]
    train_micro_batch_size_per_gpu = 2
    optimizer = { type = "AdamW" }
"#;

#[test]
fn a_validation_is_dropped_for_a_request_and_made_by_the_run_that_goes_on() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("recipe.toml");
    let recipe = loaded(place.path(), VALIDATED);
    let whole = RunFolder::at(place.path().join("whole"));
    run(&alone(&path, &recipe, &whole), &mut Quiet).unwrap();
    let expected = validated(&whole);
    assert_eq!(expected.len(), 2, "after steps 2 and 4");
    // The last validation, too: the run has no step left, and leaves all the same.
    for step in [2, 4] {
        for ending in [Ending::Left, Ending::Stopped] {
            let folder = RunFolder::at(place.path().join(format!("{step}-{ending:?}")));
            let job = alone(&path, &recipe, &folder);
            let mut stops = StopsBehind { step, flag: flag(&job.requests, ending) };
            let summary = run(&job, &mut stops).unwrap();
            assert_eq!((summary.ending, summary.steps), (ending, step));
            assert_eq!(validated(&folder), expected[..step as usize / 2 - 1], "it was dropped");
            assert!(summary.checkpoint.is_some(), "it was saved");
            assert_eq!(folder.holds_weights(), ending == Ending::Stopped);
            let job = Job { resume: Resume::Newest, ..alone(&path, &recipe, &folder) };
            assert_eq!(run(&job, &mut Quiet).unwrap().ending, Ending::Finished);
            assert_eq!(validated(&folder), expected, "{step} {ending:?}");
            let best =
                |folder: &RunFolder| std::fs::read(folder.best_model().join("model.safetensors")).unwrap();
            assert!(best(&folder) == best(&whole));
        }
    }
}

#[test]
fn who_ends_a_run_at_a_step_still_has_it_measured() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("recipe.toml");
    let recipe = loaded(place.path(), VALIDATED);
    let folder = RunFolder::at(place.path().join("run"));
    let job = alone(&path, &recipe, &folder);
    // It says that a step was taken when ranks have agreed on that step: the next one hears of it.
    let mut stops = StopsBehind { step: 1, flag: flag(&job.requests, Ending::Stopped) };
    let summary = run(&job, &mut stops).unwrap();
    assert_eq!((summary.ending, summary.steps), (Ending::Stopped, 2));
    assert_eq!(validated(&folder).len(), 1);
}

#[test]
fn no_sample_is_written_that_nobody_waits_for() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("recipe.toml");
    std::fs::write(place.path().join("text.txt"), "to be or not to be ".repeat(40)).unwrap();
    let text = format!(
        r#"
        name = "small"
        steps = 4
        model = {{ preset = "gpt2", layers = 1, width = 16, heads = 1 }}
        data = {{ text = ["{}/text.txt"], tokenizer = "bytes", sequence = 16 }}
        sample = {{ prompt = "to be", tokens = 4, every = 2 }}
        [ds_config]
        train_batch_size = 2
        optimizer = {{ type = "AdamW" }}
        "#,
        place.path().display()
    );
    let recipe = loaded(place.path(), &text);
    let folder = RunFolder::at(place.path().join("run"));
    let job = alone(&path, &recipe, &folder);
    let mut stops = StopsBehind { step: 2, flag: flag(&job.requests, Ending::Left) };
    let summary = run(&job, &mut stops).unwrap();
    assert_eq!((summary.ending, summary.steps), (Ending::Left, 2));
    assert_eq!(std::fs::read_to_string(folder.samples()).unwrap_or_default(), "");
}

/// Tells the run to stop when it says that it makes the reference.
struct StopsReference(Arc<AtomicBool>);
impl Progress for StopsReference {
    fn warning(&mut self, text: &str) {
        if text.contains("the reference is made first") {
            self.0.store(true, Ordering::SeqCst);
        }
    }
}

#[test]
fn a_reference_is_not_made_to_its_end_for_a_run_that_was_stopped() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("recipe.toml");
    let pair = r#"{"prompt": "to be", "chosen": " or not", "rejected": " to be"}"#;
    std::fs::write(place.path().join("pairs.jsonl"), format!("{pair}\n").repeat(20)).unwrap();
    let text = format!(
        r#"
        name = "small"
        objective = "dpo"
        steps = 2
        model = {{ preset = "gpt2", layers = 1, width = 16, heads = 1 }}
        data = {{ samples = ["{}/pairs.jsonl"], kind = "preference", tokenizer = "bytes", sequence = 64 }}
        [ds_config]
        train_batch_size = 2
        optimizer = {{ type = "AdamW" }}
        "#,
        place.path().display()
    );
    let recipe = loaded(place.path(), &text);
    let folder = RunFolder::at(place.path().join("run"));
    let references = || {
        let names = std::fs::read_dir(folder.data()).into_iter().flatten().flatten();
        names.filter(|file| file.file_name().to_string_lossy().starts_with("reference-")).count()
    };
    for ending in [Ending::Left, Ending::Stopped] {
        let job = Job { resume: Resume::Newest, ..alone(&path, &recipe, &folder) };
        let mut stops = StopsReference(flag(&job.requests, ending));
        match run(&job, &mut stops) {
            Err(TrainError::StoppedAtOnce(heard)) => assert_eq!(heard, ending),
            other => panic!("{other:?}"),
        }
        assert_eq!(references(), 0, "{ending:?}");
    }
    let job = Job { resume: Resume::Newest, ..alone(&path, &recipe, &folder) };
    assert_eq!(run(&job, &mut Quiet).unwrap().new_steps, 2);
    assert_eq!(references(), 1);
}
