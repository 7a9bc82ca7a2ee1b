//! A recipe whose model has fewer layers than the teacher that it starts from: what its folder holds at the end.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::support::{Quiet, alone};
use ferrospeed_testkit::tensors::{Recorded, read};
use ferrospeed_train::{Recipe, RunFolder, TrainError, check, run};
use serde_json::{Value, json};

struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Place {
        Place(tempfile::tempdir().unwrap())
    }

    fn recipe(&self, model: Value, steps: u64, stage: u8, lr: f64, compression: &Value) -> (PathBuf, Recipe) {
        let recipe = json!({
            "name": "small", "steps": steps, "model": model,
            "data": {"synthetic": 4000, "sequence": 16},
            "ds_config": {
                "train_micro_batch_size_per_gpu": 2,
                "optimizer": {"type": "AdamW", "params": {"lr": lr, "weight_decay": 0.0}},
                "bf16": {"enabled": true},
                "zero_optimization": {"stage": stage},
                "compression_training": compression,
            },
        });
        let path = self.0.path().join("recipe.toml");
        std::fs::write(&path, toml::to_string(&recipe).unwrap()).unwrap();
        let recipe = Recipe::load(&path, &[]).unwrap();
        (path, recipe)
    }

    /// Runs a recipe on one rank; gives the folder of its model.
    fn train(&self, name: &str, (path, recipe): &(PathBuf, Recipe)) -> PathBuf {
        let folder = RunFolder::at(self.0.path().join(name));
        run(&alone(path, recipe, &folder), &mut Quiet).unwrap_or_else(|error| panic!("{name}: {error}"));
        folder.model()
    }

    fn problems(&self, (path, recipe): &(PathBuf, Recipe)) -> String {
        match check(recipe, path, &RunFolder::at(self.0.path().join("run")), &mut ferrospeed_train::unheard) {
            Ok(_) => String::new(),
            Err(TrainError::Recipe { problems, .. }) => problems.join("\n"),
            Err(other) => other.to_string(),
        }
    }
}

fn weights(model: &Path) -> BTreeMap<String, Recorded> {
    read(&model.join("model.safetensors"))
}

fn preset(layers: u64) -> Value {
    json!({"preset": "gpt2", "layers": layers, "width": 32, "heads": 2, "vocabulary": 256})
}

#[test]
fn a_student_starts_from_some_layers_of_its_teacher() {
    let place = Place::new();
    let teacher = place.train("teacher", &place.recipe(preset(3), 2, 0, 1e-2, &json!({})));
    let path = json!({"path": teacher.display().to_string()});
    let reduction = |layers: Value| json!({"layer_reduction": {"enabled": true, "keep_number_layer": 2, "teacher_layer": layers}});
    let of_teacher = weights(&teacher);
    for stage in [0, 3] {
        // Nothing moves without a rate.
        let recipe = place.recipe(path.clone(), 1, stage, 0.0, &reduction(json!([2, 0])));
        let student = place.train(&format!("student{stage}"), &recipe);
        let found = weights(&student);
        assert!(found.len() < of_teacher.len() && found.keys().all(|name| !name.contains("h.2.")));
        for (name, tensor) in &found {
            let from = match name.contains("h.0.") {
                true => name.replace("h.0.", "h.2."),
                false => name.replace("h.1.", "h.0."),
            };
            assert!(*tensor == of_teacher[&from], "{name}");
        }
        let config = std::fs::read_to_string(student.join("config.json")).unwrap();
        let config: Value = serde_json::from_str(&config).unwrap();
        assert_eq!(config["n_layer"], 2);
    }
    for (model, layers, expected) in [
        (path.clone(), json!([2, 3]), "names the layer 3, and the teacher has 3"),
        (path, json!([2]), "keep_number_layer is 2, and teacher_layer names 1"),
        (preset(3), json!([2, 0]), "needs a teacher"),
    ] {
        let said = place.problems(&place.recipe(model, 1, 0, 1e-2, &reduction(layers)));
        assert!(said.contains(expected), "{said}");
    }
}
