//! ds_configs that were written for Hugging Face's Trainer, with all that they leave to `"auto"`.

use std::path::{Path, PathBuf};

use super::support::{Quiet, alone};
use ferrospeed_train::{Recipe, RunFolder, TrainError, check, run};
use serde_json::{Value, json};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hugging-face")
}

struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Place {
        Place(tempfile::tempdir().unwrap())
    }

    fn recipe(&self, file: &str, width: u64, steps: u64, ranks: u64, training: &Value) -> (PathBuf, Recipe) {
        let recipe = json!({
            "name": "auto",
            "steps": steps,
            "ranks": ranks,
            "model": { "preset": "gpt2", "layers": 1, "width": width, "heads": 1, "vocabulary": 64 },
            "data": { "synthetic": 4000, "sequence": 16 },
            "training": training,
            "ds_config": folder().join(file).display().to_string(),
        });
        let path = self.0.path().join("recipe.toml");
        std::fs::write(&path, toml::to_string(&recipe).unwrap()).unwrap();
        let recipe = Recipe::load(&path, &[]).unwrap();
        (path, recipe)
    }

    fn problems(&self, recipe: &Recipe, path: &Path) -> Vec<String> {
        match check(recipe, path, &RunFolder::at(self.0.path().join("run")), &mut ferrospeed_train::unheard) {
            Ok(_) => Vec::new(),
            Err(TrainError::Recipe { problems, .. }) => problems,
            Err(other) => vec![other.to_string()],
        }
    }
}

/// Every value of `wanted` is in `got`, where 1 and 1.0 are the same.
fn assert_holds(got: &Value, wanted: &Value, path: &str) {
    match (got, wanted) {
        (Value::Object(got), Value::Object(wanted)) => {
            for (key, wanted) in wanted {
                let own = key.strip_prefix("stage3_").filter(|own| got.contains_key(*own)).unwrap_or(key);
                assert_holds(&got[own], wanted, &format!("{path}.{key}"));
            }
        }
        (Value::Number(got), Value::Number(wanted)) => assert_eq!(got.as_f64(), wanted.as_f64(), "{path}"),
        (Value::Array(got), Value::Array(wanted)) => {
            assert_eq!(got.len(), wanted.len(), "{path}");
            got.iter().zip(wanted).for_each(|(got, wanted)| assert_holds(got, wanted, path));
        }
        _ => assert_eq!(got, wanted, "{path}"),
    }
}

#[test]
fn every_auto_gets_the_value_that_the_trainer_fills_in() {
    let text = std::fs::read_to_string(folder().join("filled.json")).unwrap();
    let recorded: Value = serde_json::from_str(&text).unwrap();
    let cases = recorded["cases"].as_array().unwrap();
    assert!(!cases.is_empty());
    let place = Place::new();
    for case in cases {
        let [width, steps, ranks] = ["hidden_size", "steps", "ranks"].map(|key| case[key].as_u64().unwrap());
        let file = case["file"].as_str().unwrap();
        let (_, recipe) = place.recipe(file, width, steps, ranks, &case["training"]);
        let (config, _) = recipe.config().unwrap_or_else(|error| panic!("{case}: {error}"));
        assert_holds(&config.to_json(), &case["filled"], file);
    }
}

#[test]
fn each_filled_value_says_where_it_comes_from() {
    let place = Place::new();
    let (_, recipe) = place.recipe("zero3.json", 48, 25, 2, &json!({ "learning_rate": 3e-4 }));
    let (unresolved, auto, _) = recipe.unresolved().unwrap();
    let filled = unresolved.filled(&auto);
    let from = |path: &str| {
        let found = filled.iter().find(|filled| filled.path == path).unwrap_or_else(|| panic!("{path}"));
        (found.value.to_string(), found.from.clone())
    };
    let says = |path: &str, value: &str, source: &str| {
        assert_eq!(from(path), (value.to_owned(), source.to_owned()), "{path}");
    };
    says("optimizer.params.lr", "0.0003", "the recipe's training.learning_rate");
    says("optimizer.params.eps", "1e-8", "the default of training.adam_epsilon");
    says("scheduler.params.total_num_steps", "25", "the recipe's steps");
    says("zero_optimization.reduce_bucket_size", "2304", "the model's hidden size 48: its square");
    says("train_batch_size", "16", "micro-batch size × accumulation steps × ranks");
    assert_eq!(filled.len(), unresolved.autos().count());
}

#[test]
fn the_documented_files_train() {
    for file in ["zero2.json", "zero3.json"] {
        let place = Place::new();
        let training = json!({ "learning_rate": 1e-2, "per_device_train_batch_size": 2, "bf16": true });
        let (path, recipe) = place.recipe(file, 32, 4, 1, &training);
        assert_eq!(place.problems(&recipe, &path), Vec::<String>::new(), "{file}");
        let folder = RunFolder::at(place.0.path().join("run"));
        let summary = run(&alone(&path, &recipe, &folder), &mut Quiet)
            .unwrap_or_else(|error| panic!("{file}: {error}"));
        assert_eq!(summary.steps, 4);
        assert!(summary.loss.is_some_and(f32::is_finite), "{file}: {:?}", summary.loss);
        let written = std::fs::read_to_string(folder.path().join("config/ds_config.json")).unwrap();
        assert!(
            !written.contains("\"auto\",\n    \"betas\"") && written.contains("\"lr\": 0.01"),
            "{written}"
        );
    }
}

#[test]
fn a_recipe_that_contradicts_its_ds_config_is_refused() {
    let place = Place::new();
    let (path, mut recipe) =
        place.recipe("zero2.json", 32, 4, 1, &json!({ "learning_rate": 1e-2, "weight_decay": 0.1 }));
    recipe.ds_config["optimizer"]["params"]["lr"] = json!(1e-3);
    recipe.ds_config["optimizer"]["params"]["weight_decay"] = json!(0.1);
    recipe.ds_config["train_micro_batch_size_per_gpu"] = json!(4);
    let problems = place.problems(&recipe, &path);
    assert_eq!(
        problems,
        [
            "training.learning_rate: 0.01 contradicts ds_config's optimizer.params.lr 0.001; write \"auto\" there, or take \
             one of the two away"
        ]
    );
    let training = recipe.training.as_mut().unwrap();
    (training.learning_rate, training.per_device_train_batch_size) = (None, Some(2));
    let problems = place.problems(&recipe, &path);
    assert!(
        problems.len() == 1 && problems[0].contains("per_device_train_batch_size: 2 contradicts"),
        "{problems:?}"
    );
}

#[test]
fn what_the_ds_config_says_once_holds_for_its_other_autos() {
    let place = Place::new();
    let (_, mut recipe) = place.recipe("zero3.json", 32, 4, 2, &json!({}));
    recipe.ds_config["optimizer"]["params"]["lr"] = json!(1e-3);
    recipe.ds_config["train_batch_size"] = json!(12);
    let (config, _) = recipe.config().unwrap();
    let full = config.to_json();
    assert_eq!(full["scheduler"]["params"]["warmup_max_lr"], json!(1e-3));
    assert_eq!(config.batch.train_micro_batch_size_per_gpu.get(), 6);
}

#[test]
fn a_key_that_nothing_takes_is_refused() {
    let place = Place::new();
    let (path, mut recipe) = place.recipe("zero2.json", 32, 4, 1, &json!({ "warmup_steps": 3 }));
    recipe.ds_config["scheduler"] = Value::Null;
    let problems = place.problems(&recipe, &path);
    assert!(
        problems.len() == 1 && problems[0].starts_with("training.warmup_steps: nothing takes it"),
        "{problems:?}"
    );
    // What has a place is written there, though the ds_config leaves it out.
    let (_, mut recipe) =
        place.recipe("zero2.json", 32, 4, 1, &json!({ "max_grad_norm": 0.5, "adam_beta1": 0.8 }));
    recipe.ds_config.as_object_mut().unwrap().remove("gradient_clipping");
    recipe.ds_config["optimizer"]["params"].as_object_mut().unwrap().remove("betas");
    let (config, _) = recipe.config().unwrap();
    assert_eq!(config.gradient_clipping, Some(0.5));
    assert_eq!(config.to_json()["optimizer"]["params"]["betas"], json!([0.8, 0.999]));
}

#[test]
fn a_model_in_bfloat16_is_trained_in_bfloat16_unless_the_recipe_says_otherwise() {
    let place = Place::new();
    let model = json!({
        "model_type": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 1, "n_positions": 16, "vocab_size": 64,
        "torch_dtype": "bfloat16",
    });
    let config_file = place.0.path().join("config.json");
    std::fs::write(&config_file, model.to_string()).unwrap();
    let (_, mut recipe) = place.recipe("zero2.json", 32, 4, 1, &json!({}));
    recipe.model = ferrospeed_train::recipe::ModelRecipe { config: Some(config_file), ..Default::default() };
    let precision = |recipe: &Recipe| {
        let full = recipe.config().unwrap().0.to_json();
        [full["bf16"]["enabled"] == true, full["fp16"]["enabled"] == true]
    };
    assert_eq!(precision(&recipe), [true, false]);
    recipe.training.as_mut().unwrap().fp16 = Some(true);
    assert_eq!(precision(&recipe), [false, true]);
}
