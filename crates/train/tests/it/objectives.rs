//! Preferences: losses and gradients as TRL has them, and runs that learn from them on any number of ranks.

use std::path::{Path, PathBuf};

use super::support::{Quiet, alone};
use ferrospeed_train::objective::{Document, Objective, Row};
use ferrospeed_train::{Job, Recipe, Resume, RunFolder, TrainError, check, run};
use serde_json::{Value, json};

const RECORDED: &str = include_str!("../golden/preferences.json");

/// The objective of a recipe with these keys.
fn objective(keys: &Value) -> Objective {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("recipe.toml");
    std::fs::write(&path, pairs_recipe(place.path())).unwrap();
    let overrides = vec![format!("objective={keys}")];
    let recipe = Recipe::load(&path, &overrides).unwrap();
    let problems = recipe.problems();
    let own: Vec<&String> = problems.iter().filter(|problem| problem.starts_with("objective.")).collect();
    assert!(own.is_empty(), "{keys}: {own:?}");
    recipe.objective()
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

/// Of a recorded document: of each token but the first its log-probability, and the probabilities it was drawn from.
fn predictions(document: &Value, vocabulary: usize) -> Vec<(f64, Vec<f64>)> {
    let (ids, logits) = (numbers(&document["ids"]), numbers(&document["logits"]));
    let predicted = logits.chunks(vocabulary).zip(&ids[1..]).map(|(row, &next)| {
        let total: f64 = row.iter().map(|logit| logit.exp()).sum();
        let shares: Vec<f64> = row.iter().map(|logit| logit.exp() / total).collect();
        (shares[next as usize].ln(), shares)
    });
    predicted.collect()
}

#[test]
fn golden_losses_gradients_and_measures_are_those_of_trl() {
    let recorded: Value = serde_json::from_str(RECORDED).unwrap();
    let vocabulary = recorded["vocabulary"].as_u64().unwrap() as usize;
    let cases = recorded["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 15);
    for case in cases {
        let objective = objective(&case["objective"]);
        let name = &case["objective"];
        let document = |document: &Value| {
            let first = document["answer_from"].as_u64().unwrap() as usize;
            let mut found =
                Document { reference: document["reference"].as_f64().unwrap(), ..Document::default() };
            for (place, (logprob, _)) in predictions(document, vocabulary).iter().enumerate() {
                if place + 1 >= first {
                    found.answer.add(*logprob);
                }
                found.whole.add(*logprob);
            }
            found
        };
        let rows: Vec<Row> = case["rows"]
            .as_array()
            .unwrap()
            .iter()
            .map(|row| Row {
                documents: [document(&row["documents"][0]), document(&row["documents"][1])],
                is_wanted: row["is_wanted"] == true,
            })
            .collect();
        let judgement = objective.judge(&rows, objective.drift(&rows));
        let expected = case["loss"].as_f64().unwrap();
        assert!((judgement.loss - expected).abs() < 1e-5, "{name}: {} is not {expected}", judgement.loss);
        let named = objective.measures().iter().zip(&judgement.measures);
        for (measure, [sum, of]) in named {
            let Some(expected) = case["measures"][measure].as_f64() else { continue };
            assert!((sum / of - expected).abs() < 1e-5, "{name}: {measure} is {}, not {expected}", sum / of);
        }
        // From the log-probability of a token to the logits it was drawn from.
        let mut compared = 0;
        for (row, slopes) in case["rows"].as_array().unwrap().iter().zip(&judgement.slopes) {
            for (at, slope) in slopes.iter().enumerate() {
                let document = &row["documents"][at];
                let first = document["answer_from"].as_u64().unwrap() as usize;
                let (ids, expected) = (numbers(&document["ids"]), numbers(&document["gradient"]));
                for (place, (_, shares)) in predictions(document, vocabulary).iter().enumerate() {
                    let own = slope.whole + if place + 1 >= first { slope.answer } else { 0.0 };
                    for (token, share) in shares.iter().enumerate() {
                        let is_next = f64::from(u8::from(token as f64 == ids[place + 1]));
                        let (found, expected) =
                            (own * (is_next - share), expected[place * vocabulary + token]);
                        assert!((found - expected).abs() < 1e-5, "{name}: {found} is not {expected}");
                        compared += usize::from(expected != 0.0);
                    }
                }
            }
        }
        assert!(compared > 0 || expected == 0.0, "{name}: nothing was compared");
    }
}

fn pairs_recipe(place: &Path) -> String {
    format!(
        r#"
    name = "pairs"
    steps = 6
    objective = "dpo"
    model = {{ preset = "llama", layers = 1, width = 32, heads = 2 }}
    [data]
    samples = ["{0}/pairs.jsonl"]
    chat_template = "plain"
    tokenizer = "bytes"
    sequence = 64
    validation = ["{0}/pairs.jsonl"]
    [eval]
    every = 3
    [save]
    every = 2
    [ds_config]
    train_batch_size = 8
    train_micro_batch_size_per_gpu = 2
    optimizer = {{ type = "AdamW", params = {{ lr = 5e-3 }} }}
"#,
        place.display()
    )
}

const ANIMALS: [(&str, &str); 4] = [("cow", "moos"), ("cat", "meows"), ("dog", "barks"), ("owl", "hoots")];

/// Pairs, and answers with a verdict, of which the polite ones are preferred.
fn place() -> tempfile::TempDir {
    let place = tempfile::tempdir().unwrap();
    let (mut pairs, mut verdicts) = (String::new(), String::new());
    for (at, (animal, sound)) in ANIMALS.iter().cycle().take(16).enumerate() {
        let ask = format!("Question {at}: what does the {animal} do?");
        let [good, bad] = [format!(" It {sound}, thank you."), format!(" Go away, {animal}.")];
        pairs += &format!("{}\n", json!({ "prompt": ask, "chosen": good, "rejected": bad }));
        for (completion, label) in [(good, true), (bad, false)] {
            verdicts += &format!("{}\n", json!({ "prompt": ask, "completion": completion, "label": label }));
        }
    }
    std::fs::write(place.path().join("pairs.jsonl"), pairs).unwrap();
    std::fs::write(place.path().join("verdicts.jsonl"), verdicts).unwrap();
    place
}

fn recipe(place: &Path, overrides: &[&str]) -> (PathBuf, Recipe) {
    let path = place.join("recipe.toml");
    std::fs::write(&path, pairs_recipe(place)).unwrap();
    let overrides: Vec<String> = overrides.iter().map(|&text| text.to_owned()).collect();
    (path.clone(), Recipe::load(&path, &overrides).unwrap())
}

/// Lines of a run's log, without times.
fn log(path: PathBuf) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    let kept = ["step", "loss", "grad_norm", "measures", "tokens"];
    let line = |line: &str| -> Value {
        let all: Value = serde_json::from_str(line).unwrap();
        kept.iter().map(|key| ((*key).to_owned(), all[key].clone())).collect::<serde_json::Map<_, _>>().into()
    };
    text.lines().map(line).collect()
}

fn train(place: &Path, name: &str, overrides: &[&str]) -> RunFolder {
    let (path, recipe) = recipe(place, overrides);
    let folder = RunFolder::at(place.join(name));
    check(&recipe, &path, &folder, &mut ferrospeed_train::unheard).unwrap_or_else(|error| panic!("{error}"));
    run(&alone(&path, &recipe, &folder), &mut Quiet).unwrap_or_else(|error| panic!("{error}"));
    folder
}

fn weights(folder: &RunFolder) -> Vec<u8> {
    std::fs::read(folder.model().join("model.safetensors")).unwrap()
}

const KTO: [&str; 2] = ["objective=kto", "data.validation=0.25"];

fn with_verdicts<'a>(place: &Path, more: &[&'a str], kept: &'a mut Vec<String>) -> Vec<&'a str> {
    kept.push(format!("data.samples=[\"{}/verdicts.jsonl\"]", place.display()));
    kept.iter().map(String::as_str).chain(KTO).chain(more.iter().copied()).collect()
}

#[test]
fn every_objective_learns_to_prefer_what_is_preferred() {
    let place = place();
    let more = ["steps=24", "save.every=0"];
    for objective in [
        "objective=dpo",
        "objective={\"kind\": \"dpo\", \"loss\": \"ipo\"}",
        "objective={\"kind\": \"dpo\", \"reference_free\": true}",
        "objective=orpo",
    ] {
        let folder = train(place.path(), objective, &[&more[..], &[objective]].concat());
        let steps = log(folder.log());
        let (first, last) = (&steps[0], steps.last().unwrap());
        let number = |line: &Value, name: &str| line["measures"][name].as_f64().unwrap();
        assert!(
            last["loss"].as_f64().unwrap() < 0.8 * first["loss"].as_f64().unwrap(),
            "{objective}: {first} {last}"
        );
        assert!(number(last, "rewards/accuracies") > 0.99, "{objective}: {last}");
        assert!(number(last, "rewards/margins") > number(first, "rewards/margins"), "{objective}");
        let evals = log(folder.eval());
        assert!(number(evals.last().unwrap(), "rewards/accuracies") > 0.99, "{objective}");
        if objective == "objective=dpo" {
            // Where nothing is learnt yet the model is its own reference.
            assert!((first["loss"].as_f64().unwrap() - std::f64::consts::LN_2).abs() < 1e-4, "{first}");
            assert!(number(first, "rewards/chosen").abs() < 1e-3, "{first}");
        }
    }
    let mut kept = Vec::new();
    let folder = train(place.path(), "kto", &with_verdicts(place.path(), &more, &mut kept));
    let last = log(folder.log()).pop().unwrap();
    let [good, bad] = ["rewards/chosen", "rewards/rejected"].map(|name| last["measures"][name].as_f64());
    assert!(good.zip(bad).is_none_or(|(good, bad)| good > bad), "{last}");
    assert!(last["loss"].as_f64().unwrap() < 0.48, "{last}");
}

#[test]
fn stages_of_zero_give_the_same_bits_and_accumulation_the_same_losses() {
    let place = place();
    let mut first = None;
    for stage in 0..4 {
        let stage = format!("zero_optimization.stage={stage}");
        let folder = train(place.path(), &stage, &[&stage, "train_micro_batch_size_per_gpu=8"]);
        let found = (log(folder.log()), log(folder.eval()), weights(&folder));
        let first = first.get_or_insert_with(|| found.clone());
        assert!(*first == found, "{stage}");
    }
    let (whole, ..) = first.unwrap();
    let parts = log(train(place.path(), "parts", &[]).log());
    for (whole, parts) in whole.iter().zip(&parts) {
        let [whole, parts] = [whole, parts].map(|line| line["loss"].as_f64().unwrap());
        assert!((whole - parts).abs() < 1e-4, "{whole} {parts}");
    }
}

#[test]
fn a_run_that_goes_on_is_the_run_that_never_stopped() {
    let place = place();
    let mut kept = Vec::new();
    let kto = with_verdicts(place.path(), &[], &mut kept);
    for (name, overrides) in [("dpo", vec![]), ("kto", kto)] {
        let whole = train(place.path(), &format!("{name}-whole"), &overrides);
        let shorter = [&overrides[..], &["steps=4"]].concat();
        let parts = train(place.path(), &format!("{name}-parts"), &shorter);
        // The reference is made again: nothing of it is left, and the weights have gone on.
        std::fs::remove_dir_all(parts.data()).unwrap();
        let (path, recipe) = recipe(place.path(), &overrides);
        let job = Job { resume: Resume::Newest, ..alone(&path, &recipe, &parts) };
        assert_eq!(run(&job, &mut Quiet).unwrap().new_steps, 2);
        assert_eq!(log(parts.log()), log(whole.log()), "{name}");
        assert!(weights(&parts) == weights(&whole), "{name}");
    }
}

/// The reference of an adapter is the model without what is trained.
#[test]
fn adapters_learn_preferences_and_go_on_to_the_same_bits() {
    let place = place();
    let base = train(place.path(), "base", &["steps=2", "save.every=0"]);
    let model = format!("model={}", json!({ "path": base.model() }));
    let adapter = format!("adapter={}", json!({ "rank": 4, "target_modules": "all-linear" }));
    let overrides = [&model, &adapter, "zero_optimization.stage=3", "steps=8"];
    let whole = train(place.path(), "whole", &overrides);
    let steps = log(whole.log());
    let loss = |line: &Value| line["loss"].as_f64().unwrap();
    assert!((loss(&steps[0]) - std::f64::consts::LN_2).abs() < 1e-4, "{}", steps[0]);
    assert!(loss(&steps[7]) < loss(&steps[0]) - 0.01, "{}", steps[7]);
    let parts = train(place.path(), "parts", &[&overrides[..], &["steps=4"]].concat());
    std::fs::remove_dir_all(parts.data()).unwrap();
    let (path, recipe) = recipe(place.path(), &overrides);
    let job = Job { resume: Resume::Newest, ..alone(&path, &recipe, &parts) };
    assert_eq!(run(&job, &mut Quiet).unwrap().new_steps, 4);
    assert_eq!(log(parts.log()), steps);
    let weights =
        |folder: &RunFolder| std::fs::read(folder.model().join("adapter_model.safetensors")).unwrap();
    assert!(weights(&parts) == weights(&whole));
}

#[test]
fn what_recipes_say_of_objectives_is_checked() {
    let place = place();
    let problems = |overrides: &[&str]| {
        let (path, recipe) = recipe(place.path(), overrides);
        let folder = RunFolder::at(place.path().join("refused"));
        match check(&recipe, &path, &folder, &mut ferrospeed_train::unheard) {
            Err(TrainError::Recipe { problems, .. }) => problems.join("\n"),
            other => panic!("{overrides:?}: {other:?}"),
        }
    };
    let verdicts = format!("data.samples=[\"{}/verdicts.jsonl\"]", place.path().display());
    for (set, expected) in [
        (&["objective=dpoo"][..], "objective: 'dpoo' is not known; use next_token, dpo, kto or orpo"),
        (&["objective.loss=hing"], "objective.loss: 'hing' is not known; use sigmoid, robust, hinge or ipo"),
        (&["objective.beta=0"], "objective.beta: must be more than 0"),
        (&["objective.beta=-1"], "objective.beta: must be more than 0"),
        (&["objective.label_smoothing=0.5"], "objective.label_smoothing: must be a share"),
        (
            &["objective.loss=ipo", "objective.label_smoothing=0.1"],
            "the loss 'ipo' takes all labels for right",
        ),
        (&["objective.gamma=1"], "objective.gamma: is not a key of recipes"),
        (&["objective.beta=much"], "objective.beta: must be a number"),
        (&["objective=orpo", "objective.loss=ipo"], "objective.loss: belongs to dpo, not to orpo"),
        (&["objective.desirable_weight=2"], "objective.desirable_weight: belongs to kto, not to dpo"),
        (&["objective=next_token"], "write objective = \"dpo\""),
        (&["objective=kto"], "'label', which is true or false"),
        (
            &["objective=kto", "data.kind=preference"],
            "'preference' is of pairs of answers, and the objective is kto",
        ),
        (&["data.kind=messages"], "take objective away"),
        (&["data.train_on=all"], "data.train_on: dpo learns answers alone; leave it out"),
        (&["data.too_long=split"], "data.too_long: dpo needs answers whole"),
        (&["data.documents=together"], "data.documents: dpo compares"),
        (&["pipeline.stages=2", "ranks=2"], "pipeline.stages (--pp): dpo needs whole models"),
        (&["tensor_parallel.autotp_size=2", "ranks=2"], "(--tp): dpo needs whole models"),
        (&[&verdicts], "learns from pairs: records with 'chosen' and 'rejected'"),
        (&[&verdicts, "objective=next_token"], "write objective = \"kto\""),
    ] {
        let found = problems(set);
        assert!(found.contains(expected), "{set:?}: {found}");
    }
}
