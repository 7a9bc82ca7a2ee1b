//! ds_configs that were written for Hugging Face's Trainer, which builds the optimizer where they have none.

use std::path::Path;

use serde_json::Value;

use super::support::small_run::losses;
use super::support::{binary, ferrospeed, output_of, small_recipe, stderr, stdout};

#[path = "../../../checkpoint/tests/it/common/rewrite.rs"]
mod rewrite;

/// A recipe of a run of 4 steps.
fn recipe(training: &str, ds_config: &str) -> String {
    let own = format!(
        "name = 'trained'\nsteps = 4\nmodel.layers = 1\ndata = {{ text = ['text.txt'], sequence = 16 }}\nsave = {{ every = 2 }}\n{training}"
    );
    small_recipe(&own, ds_config)
}

struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Place {
        let folder = tempfile::tempdir().unwrap();
        let text: String = (0..4000u32).map(|n| char::from(b'a' + (n * n % 89 % 26) as u8)).collect();
        std::fs::write(folder.path().join("text.txt"), text).unwrap();
        Place(folder)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn train(&self, recipe: &str, out: &str, more: &[&str]) -> std::process::Output {
        std::fs::write(self.path().join("recipe.toml"), recipe).unwrap();
        let mut command = binary();
        command.args(["train", "recipe.toml", "--out", out]).args(more).current_dir(self.path());
        output_of(&mut command)
    }

    fn train_well(&self, recipe: &str, out: &str, more: &[&str]) {
        let output = self.train(recipe, out, more);
        assert!(output.status.success(), "{recipe}\n{more:?}:\n{}\n{}", stdout(&output), stderr(&output));
    }

    /// The groups of a run's newest checkpoint.
    fn groups(&self, out: &str) -> Vec<Value> {
        let run = self.path().join(out);
        let output = ferrospeed(&["checkpoint", "inspect", "--json", run.to_str().unwrap()]);
        assert!(output.status.success(), "{}", stderr(&output));
        let manifest: Value = serde_json::from_str(&stdout(&output)).unwrap();
        manifest["training"]["groups"].as_array().unwrap().clone()
    }
}

#[test]
fn a_recipe_without_an_optimizer_has_the_trainers() {
    let place = Place::new();
    let sizes = "train_micro_batch_size_per_gpu = 2\nzero_optimization.stage = 2";
    let written = format!(
        "{sizes}\noptimizer = {{ type = 'AdamW', params = {{ lr = 3e-3, betas = [0.9, 0.999], eps = 1e-8, weight_decay = 0.0 }} }}"
    );
    for ranks in ["1", "2"] {
        let at = |name: &str| format!("{name}-{ranks}");
        place.train_well(&recipe("training.learning_rate = 3e-3", sizes), &at("left"), &["-n", ranks]);
        place.train_well(&recipe("", &written), &at("written"), &["-n", ranks]);
        let [left, own] = ["left", "written"].map(|name| losses(&place.path().join(at(name))));
        assert_eq!(left, own, "the same rule, {ranks} ranks");
    }
    // Weight decay spares biases and norms, whatever the stage.
    let decays = "[training]\nlearning_rate = 3e-3\nweight_decay = 0.1";
    let mut trained = Vec::new();
    for stage in ["0", "2", "3"] {
        let stage_is = format!("zero_optimization.stage={stage}");
        let at = format!("decays-{stage}");
        place.train_well(&recipe(decays, sizes), &at, &["-n", "2", "--set", &stage_is]);
        let groups = place.groups(&at);
        assert_eq!(groups.len(), 2, "{groups:?}");
        for (group, decay, is_vector) in [(&groups[0], 0.1, false), (&groups[1], 0.0, true)] {
            assert_eq!((&group["weight_decay"], &group["lr"]), (&decay.into(), &3e-3.into()));
            let names = group["params"].as_array().unwrap();
            assert!(!names.is_empty());
            for name in names.iter().map(|name| name.as_str().unwrap()) {
                assert_eq!(name.ends_with(".bias") || name.contains(".ln_"), is_vector, "{name}");
            }
        }
        trained.push(losses(&place.path().join(&at)));
        // It goes on to the same bits.
        place.train_well(
            &recipe(decays, sizes),
            &at,
            &["-n", "2", "--set", &stage_is, "--resume", "--set", "steps=6"],
        );
        let whole = format!("whole-{stage}");
        place.train_well(
            &recipe(decays, sizes),
            &whole,
            &["-n", "2", "--set", &stage_is, "--set", "steps=6"],
        );
        assert_eq!(losses(&place.path().join(&at)), losses(&place.path().join(&whole)), "stage {stage}");
    }
    assert!(trained.iter().all(|losses| *losses == trained[0]), "{trained:?}");
    // A model in stages knows both groups of the whole.
    let staged = ["--pp", "2", "--set", "model.layers=2", "--set", "zero_optimization.stage=0"];
    place.train_well(&recipe(decays, sizes), "stages", &staged);
    let of_stages: Vec<Value> =
        place.groups("stages").iter().map(|group| group["weight_decay"].clone()).collect();
    assert_eq!(of_stages, [0.1, 0.0]);
    let again = place.train(&recipe(decays, sizes), "stages", &[&staged[..], &["--resume"]].concat());
    assert!(again.status.success() && !stdout(&again).contains(" -> "), "{}", stdout(&again));

    // Who speaks neither of the Trainer nor of an optimizer is asked.
    let refused = place.train(&recipe("", sizes), "none", &[]);
    assert_eq!(refused.status.code(), Some(2), "{}", stdout(&refused));
    assert!(stderr(&refused).contains("[training] with a learning_rate"), "{}", stderr(&refused));
}

#[test]
fn a_checkpoint_that_the_trainer_had_deepspeed_write_goes_on_with_its_optimizer() {
    let recipe = recipe(
        "[training]\nlearning_rate = 3e-3\nweight_decay = 0.1",
        "train_micro_batch_size_per_gpu = 2\nzero_optimization.stage = 2",
    );
    let place = Place::new();
    place.train_well(&recipe, "first", &["-n", "2"]);
    place.train_well(&recipe, "whole", &["-n", "2", "--set", "steps=6"]);
    let at = |name: &str| place.path().join(name).display().to_string();
    for stage in ["1", "2", "3"] {
        let theirs = format!("checkpoint-{stage}");
        let words = ["export-deepspeed", &at("first"), &at(&theirs), "--stage", stage, "--ranks", "2"];
        let exported = ferrospeed(&[&["checkpoint"], &words[..]].concat());
        assert!(exported.status.success(), "{}", stderr(&exported));
        let files = std::fs::read_dir(place.path().join(&theirs).join("global_step4")).unwrap();
        let files = files.map(|file| file.unwrap().path());
        let modules: Vec<_> =
            files.filter(|file| file.to_str().unwrap().ends_with("model_states.pt")).collect();
        assert!(!modules.is_empty());
        modules.iter().for_each(|module| rewrite::as_the_trainer_writes(module, 4));

        let on = format!("on-{stage}");
        place.train_well(&recipe, &on, &["-n", "2", "--resume", &theirs, "--set", "steps=6"]);
        assert_eq!(
            losses(&place.path().join(&on)),
            losses(&place.path().join("whole"))[4..],
            "stage {stage}"
        );
        assert_eq!(place.groups(&on), place.groups("whole"), "stage {stage}");
        let ours = format!("ours-{stage}");
        let imported = ferrospeed(&["checkpoint", "import-deepspeed", &at(&theirs), &at(&ours)]);
        assert!(imported.status.success(), "{}", stderr(&imported));
        let said = stdout(&ferrospeed(&["checkpoint", "inspect", &at(&ours), "--tensors"]));
        assert!(said.contains("optimizer        adam") && said.contains("state.exp_avg_sq"), "{said}");
    }
}

#[test]
fn a_ds_config_of_autos_says_what_fills_them_in() {
    let place = Place::new();
    let file = place.path().join("ds.json");
    let text = r#"{
        "bf16": { "enabled": "auto" },
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "steps_per_print": Infinity,
        "zero_optimization": { "stage": 3, "reduce_bucket_size": "auto" }
    }"#;
    std::fs::write(&file, text).unwrap();
    let file = file.to_str().unwrap();
    for more in [&[][..], &["-w", "2"]] {
        let checked = ferrospeed(&[&["config", "check", file], more].concat());
        assert_eq!(checked.status.code(), Some(0), "{more:?}: {}", stderr(&checked));
        let said = stderr(&checked);
        assert!(said.contains("6 value(s) are \"auto\": a recipe (.toml) that names this file"), "{said}");
        assert!(said.contains("the defaults of Hugging Face's Trainer stand for them"), "{said}");
    }
    let shown = ferrospeed(&["config", "show", file, "-w", "2"]);
    assert!(shown.status.success(), "{}", stderr(&shown));
    let config: Value = serde_json::from_str(&stdout(&shown)).unwrap();
    assert_eq!((&config["train_batch_size"], &config["gradient_clipping"]), (&16.into(), &1.0.into()));
    // What only a run knows is asked for.
    let steps = r#"{ "train_batch_size": 8, "optimizer": { "type": "AdamW" },
        "scheduler": { "type": "WarmupDecayLR", "params": { "total_num_steps": "auto" } } }"#;
    std::fs::write(file, steps).unwrap();
    let checked = ferrospeed(&["config", "check", file, "-w", "1"]);
    assert_eq!(checked.status.code(), Some(2), "{}", stdout(&checked));
    assert!(stderr(&checked).contains("or use a recipe that names this file"), "{}", stderr(&checked));
}
