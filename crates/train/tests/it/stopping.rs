//! A run that is told to stop before it has begun.

use std::sync::atomic::Ordering;

use super::support::{Quiet, alone};
use ferrospeed_train::{Ending, Job, Recipe, Resume, RunFolder, TrainError, run};

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
