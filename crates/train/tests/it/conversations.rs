//! Training on conversations: what the loss is the mean of, and what a run leaves.

use std::path::{Path, PathBuf};

use super::support::{Quiet, alone};
use ferrospeed_train::{Recipe, RunFolder, TrainError, check, run};
use serde_json::{Value, json};

const RECIPE: &str = r#"
    name = "chat"
    steps = 4
    model = { preset = "gpt2", layers = 1, width = 32, heads = 1 }
    [data]
    samples = ["PLACE/chats.jsonl"]
    chat_template = "chatml"
    tokenizer = "bytes"
    sequence = 128
    [ds_config]
    train_micro_batch_size_per_gpu = 4
    optimizer = { type = "AdamW", params = { lr = 1e-2 } }
"#;

fn talk(question: &str, answer: &str) -> String {
    let messages =
        json!([{ "role": "user", "content": question }, { "role": "assistant", "content": answer }]);
    json!({ "messages": messages }).to_string() + "\n"
}

/// Conversations whose answers have very different lengths, each nearly a sequence long.
fn place() -> tempfile::TempDir {
    let place = tempfile::tempdir().unwrap();
    let talks = (0..8usize).map(|at| {
        let answer = (at * at) % 23 + 1;
        talk(&"why ".repeat((60 - answer) / 4), "no".repeat(answer).split_at(answer).0)
    });
    std::fs::write(place.path().join("chats.jsonl"), talks.collect::<String>()).unwrap();
    place
}

fn recipe(place: &Path, overrides: &[&str]) -> (PathBuf, Recipe) {
    let path = place.join("recipe.toml");
    std::fs::write(&path, RECIPE.replace("PLACE", &place.display().to_string())).unwrap();
    let overrides: Vec<String> = overrides.iter().map(|&text| text.to_owned()).collect();
    let recipe = Recipe::load(&path, &overrides).unwrap();
    (path, recipe)
}

fn losses(place: &Path, name: &str, overrides: &[&str]) -> Vec<f64> {
    let (path, recipe) = recipe(place, overrides);
    let folder = RunFolder::at(place.join(name));
    check(&recipe, &path, &folder, &mut ferrospeed_train::unheard).unwrap();
    run(&alone(&path, &recipe, &folder), &mut Quiet).unwrap();
    let log = std::fs::read_to_string(folder.log()).unwrap();
    log.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["loss"].as_f64().unwrap()).collect()
}

#[test]
fn the_loss_is_the_mean_over_the_learnt_tokens_of_all_micro_batches() {
    let place = place();
    let whole = losses(place.path(), "whole", &[]);
    let parts = ["train_micro_batch_size_per_gpu=1", "gradient_accumulation_steps=4"];
    let parts = losses(place.path(), "parts", &parts);
    assert_eq!((whole.len(), parts.len()), (4, 4));
    for (whole, parts) in whole.iter().zip(&parts) {
        assert!((whole - parts).abs() < 2e-5, "{whole} and {parts}");
    }
    assert!(whole[3] < whole[0] - 0.3, "{whole:?}");
    // What is learnt is another thing where all tokens are.
    let all = losses(place.path(), "all", &["data.train_on=all"]);
    assert!((all[0] - whole[0]).abs() > 1e-3, "{all:?} and {whole:?}");
    let template = std::fs::read_to_string(place.path().join("whole/model/chat_template.jinja")).unwrap();
    assert!(template.contains("<|im_start|>"), "a model is served as it was trained");
}

#[test]
fn what_recipes_say_of_samples_is_checked() {
    let place = place();
    let problems = |overrides: &[&str]| {
        let (path, recipe) = recipe(place.path(), overrides);
        let folder = RunFolder::at(place.path().join("refused"));
        match check(&recipe, &path, &folder, &mut ferrospeed_train::unheard) {
            Err(TrainError::Recipe { problems, .. }) => problems.join("\n"),
            other => panic!("{other:?}"),
        }
    };
    for (set, expected) in [
        ("data.train_on=user", "data.train_on: 'user' is not known; use assistant, last or all"),
        ("data.too_long=keep", "data.too_long: 'keep' is not known; use cut, drop or split"),
        ("data.kind=chat", "data.kind: 'chat' is not known; use messages, sharegpt"),
        ("data.kind=alpaca", "chats.jsonl: line 1: is not of the kind 'alpaca'"),
        (
            "data.chat_template=none",
            "data.chat_template: 'none' is neither a file nor one of the chat templates",
        ),
    ] {
        let found = problems(&[set]);
        assert!(found.contains(expected), "{set}: {found}");
    }
    let found = problems(&["data.sequence=16", "data.too_long=drop"]);
    assert!(found.contains("leaves nothing to learn: all 8 samples were dropped"), "{found}");
}
