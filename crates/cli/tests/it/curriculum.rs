//! Curricula by metrics through the real binary: measured, trained with, gone on with to the same bits, and refused.

use std::path::{Path, PathBuf};
use std::process::Output;

use super::support::small_run::losses;
use super::support::{binary, output_of, small_recipe, stderr, stdout};
use serde_json::{Value, json};

/// Every other sequence of 16 is one letter over and over, the others are of all letters.
fn text() -> String {
    let sequence = |n: u32| -> String {
        let letter = |place: u32| match n % 2 {
            0 => 'a',
            _ => char::from(b'b' + ((n * 31 + place * place * 7 + place * n) % 25) as u8),
        };
        (0..16).map(letter).collect()
    };
    (0..200).map(sequence).collect()
}

struct Place(tempfile::TempDir);

impl Place {
    /// A place with a text, a recipe with this curriculum, and indexes of it.
    fn new(metrics: &Value) -> Place {
        let place = Place(tempfile::tempdir().unwrap());
        std::fs::write(place.path("text.txt"), text()).unwrap();
        place.write_recipe(metrics);
        let analyze =
            ["data", "analyze", "recipe.toml", "--metric", "vocabularyrarity,seqlen", "--out", "indexes"];
        place.well(&analyze);
        place
    }

    fn write_recipe(&self, metrics: &Value) {
        let section = json!({ "seed": 7, "data_sampling": { "enabled": true, "num_epochs": 20,
            "curriculum_learning": { "enabled": true, "curriculum_metrics": metrics } } });
        std::fs::write(self.path("section.json"), ds_config(&section).to_string()).unwrap();
        let own = r#"
            name = "run"
            steps = 40
            model.layers = 1
            data = { text = ["text.txt"], sequence = 16 }
            save = { every = 10, background = false }
            ds_config = "section.json"
        "#;
        let recipe = small_recipe(own, "");
        std::fs::write(self.path("recipe.toml"), recipe.replace("\n[ds_config]\n", "\n")).unwrap();
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn run(&self, words: &[&str]) -> Output {
        output_of(binary().args(words).current_dir(self.0.path()))
    }

    fn well(&self, words: &[&str]) -> String {
        let output = self.run(words);
        assert!(output.status.success(), "{words:?}:\n{}\n{}", stdout(&output), stderr(&output));
        stdout(&output) + &stderr(&output)
    }

    fn train(&self, name: &str, more: &[&str]) -> String {
        self.well(&[&["train", "recipe.toml", "--out", name][..], more].concat())
    }

    fn refused(&self, words: &[&str]) -> String {
        let output = self.run(words);
        assert_eq!(output.status.code(), Some(2), "{words:?}:\n{}\n{}", stdout(&output), stderr(&output));
        stdout(&output) + &stderr(&output)
    }
}

fn ds_config(section: &Value) -> Value {
    json!({
        "train_batch_size": 4,
        "steps_per_print": 1_000_000,
        "optimizer": { "type": "AdamW", "params": { "lr": 1e-2 } },
        "data_efficiency": section,
    })
}

/// The one letter alone for twenty steps, everything from then on.
fn one_letter_first() -> Value {
    json!({ "vocabularyrarity": {
        "index_to_sample_path": "indexes/vocabularyrarity_index_to_sample.index",
        "index_to_metric_path": "indexes/vocabularyrarity_index_to_metric.index",
        "difficulty_type": "value",
        "clustering_type": "schedule_based",
        "min_difficulty": 1000,
        "max_difficulty": 100_000,
        "schedule_type": "fixed_discrete",
        "schedule_config": { "difficulty": [1000, 100_000], "max_step": [20] },
    } })
}

/// By percentile, growing all the time, beside a second metric that all have reached.
fn growing() -> Value {
    json!({
        "vocabularyrarity": {
            "index_to_sample_path": "indexes/vocabularyrarity_index_to_sample.index",
            "difficulty_type": "percentile",
            "clustering_type": "schedule_based",
            "min_difficulty": 1,
            "max_difficulty": 100,
            "schedule_type": "fixed_linear",
            "schedule_config": { "total_curriculum_step": 30, "difficulty_step": 1 },
        },
        "seqlen": {
            "index_to_sample_path": "indexes/seqlen_index_to_sample.index",
            "index_to_metric_path": "indexes/seqlen_index_to_metric.index",
            "difficulty_type": "value",
            "clustering_type": "schedule_based",
            "min_difficulty": 16,
            "max_difficulty": 16,
            "schedule_type": "fixed_linear",
            "schedule_config": { "total_curriculum_step": 1, "difficulty_step": 1 },
        },
    })
}

fn numbers(run: &Path) -> Vec<f64> {
    losses(run).iter().map(|loss| loss.parse().unwrap()).collect()
}

fn weights(run: &Path) -> Vec<u8> {
    std::fs::read(run.join("model/model.safetensors")).unwrap()
}

#[test]
fn easy_sequences_come_first_and_hard_ones_when_they_are_reached() {
    let place = Place::new(&one_letter_first());
    place.train("run", &[]);
    let losses = numbers(&place.path("run"));
    assert!(losses[19] < 0.5, "one letter over and over is soon known: {losses:?}");
    let hard = losses[20..].iter().fold(0.0, |hardest: f64, &loss| hardest.max(loss));
    assert!(hard > 2.0, "then comes what was never seen: {losses:?}");
    // Without the curriculum it is there from the start.
    let off = "data_efficiency.data_sampling.curriculum_learning.enabled=false";
    place.train("off", &["--set", off]);
    assert!(numbers(&place.path("off"))[19] > 0.5);
}

#[test]
fn a_run_that_goes_on_draws_what_it_would_have_drawn_on_any_number_of_ranks() {
    let place = Place::new(&growing());
    place.train("whole", &[]);
    // More than one pass over the sequences is drawn, and the stop is within one.
    place.train("parts", &["--set", "steps=13"]);
    let said = place.train("parts", &["--resume"]);
    assert!(!said.contains("first pass"), "{said}");
    let [whole, parts] = ["whole", "parts"].map(|name| place.path(name));
    assert_eq!(losses(&parts), losses(&whole));
    assert!(weights(&parts) == weights(&whole), "the weights differ");

    place.train("ranks", &["-n", "2", "--set", "steps=13"]);
    place.train("ranks", &["-n", "4", "--resume", "--set", "steps=26"]);
    place.train("ranks", &["--resume"]);
    for (step, (one, other)) in numbers(&whole).iter().zip(numbers(&place.path("ranks"))).enumerate() {
        assert!((one - other).abs() < 2e-3, "step {}: {one} and {other}: not the same samples", step + 1);
    }
    // Another schedule is another order, which is told.
    place.train("other", &["--set", "steps=13"]);
    let seed = ["--resume", "--set", "data_efficiency.seed=8", "--set", "steps=20"];
    let said = place.train("other", &seed);
    assert!(said.contains("data_efficiency.data_sampling: sequences come in at other steps"), "{said}");
}

#[test]
fn a_metric_that_cuts_sequences_needs_no_index() {
    let cut = json!({ "seqlen_truncate": {
        "clustering_type": "single_cluster",
        "min_difficulty": 4,
        "max_difficulty": 16,
        "schedule_type": "fixed_linear",
        "schedule_config": { "total_curriculum_step": 6, "difficulty_step": 4 },
    } });
    let place = Place::new(&cut);
    std::fs::remove_dir_all(place.path("indexes")).unwrap();
    place.train("run", &["--set", "steps=8"]);
    let log = std::fs::read_to_string(place.path("run/log.jsonl")).unwrap();
    let tokens = |line: &str| serde_json::from_str::<Value>(line).unwrap()["tokens"].as_u64().unwrap();
    let tokens: Vec<u64> = log.lines().map(tokens).collect();
    let lengths: Vec<u64> =
        std::iter::once(tokens[0]).chain(tokens.windows(2).map(|pair| pair[1] - pair[0])).collect();
    assert_eq!((lengths[0], lengths[7]), (4 * 4, 4 * 16), "{lengths:?}");
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_trained() {
    let place = Place::new(&one_letter_first());
    let train = ["train", "recipe.toml", "--out", "run"];
    let refused = |more: &[&str], wanted: &[&str]| {
        for command in [&train[..], &["config", "check", "recipe.toml"]] {
            let said = place.refused(&[command, more].concat());
            for part in wanted {
                assert!(said.contains(part), "{command:?}: {part:?} is not in:\n{said}");
            }
        }
        assert!(!place.path("run/log.jsonl").exists());
    };
    let metric = "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.vocabularyrarity";
    refused(&["--set", "data.sequence=32"], &[metric, "is of sequences of 16 tokens, and here they have 32"]);
    let custom = format!("{metric}.schedule_type=custom");
    refused(
        &["--set", &custom],
        &["schedule_type", "a function, which a file cannot hold", "fixed_discrete"],
    );
    let missing = format!("{metric}.index_to_metric_path=null");
    refused(&["--set", &missing], &["index_to_metric_path", "`ferrospeed data analyze` writes the file"]);
    let nowhere = format!("{metric}.index_to_sample_path=nowhere.index");
    refused(&["--set", &nowhere], &[metric, "nowhere.index", "No such file"]);
    let [samples, values] = ["sample", "metric"]
        .map(|to| format!("{metric}.index_to_{to}_path=indexes/seqlen_index_to_{to}.index"));
    refused(
        &["--set", &samples, "--set", &values],
        &["is an index of seqlen; name the one of vocabularyrarity"],
    );
    let stairs = format!("{metric}.schedule_config.max_step=[20, 30, 40]");
    refused(
        &["--set", &stairs],
        &["vocabularyrarity: fixed_discrete needs one difficulty more than max_step"],
    );

    // What only the data shows.
    let only_train = |more: &[&str], part: &str| {
        let said = place.refused(&[&train[..], more].concat());
        assert!(said.contains(part), "{part:?} is not in:\n{said}");
    };
    only_train(
        &["--set", "data.validation=0.1"],
        "200 sequences to train on with 0 kept for validation, and here",
    );
    only_train(
        &["--set", "steps=1001"],
        "1001 steps of 4 samples are 4004, and 20 times 200 sequences are 4000",
    );
    let hard = format!("{metric}.schedule_config.difficulty=[1, 2]");
    only_train(
        &["--set", &hard],
        "no sequence is easy enough for the first step (none ever is); the easiest has vocabularyrarity",
    );
    let index = place.path("indexes/vocabularyrarity_index_to_sample.index");
    let mut bytes = std::fs::read(&index).unwrap();
    let last = bytes.len() - 20;
    bytes[last] ^= 1;
    std::fs::write(&index, &bytes).unwrap();
    only_train(
        &[],
        "is damaged: its checksum is not that of its content; make it anew with `ferrospeed data analyze`",
    );
    std::fs::write(&index, &bytes[..last]).unwrap();
    refused(&[], &["it is cut off or damaged"]);
}

#[test]
fn files_are_measured_without_a_recipe_and_what_cannot_be_is_told() {
    let place = Place(tempfile::tempdir().unwrap());
    std::fs::write(place.path("a.txt"), text()).unwrap();
    let words =
        ["data", "analyze", "--data", "a.txt", "--sequence", "16", "--metric", "vocabularyrarity", "--json"];
    let said = place.run(&[&words[..], &["--out", "new/place"]].concat());
    assert!(said.status.success(), "{}", stderr(&said));
    let found: Value = serde_json::from_str(&stdout(&said)).unwrap();
    assert_eq!((&found[0]["metric"], &found[0]["sequences"]), (&json!("vocabularyrarity"), &json!(200)));
    assert!(found[0]["quantiles"]["0"].as_u64() < found[0]["quantiles"]["100"].as_u64(), "{found}");
    for key in ["index_to_sample_path", "index_to_metric_path"] {
        assert!(place.path(found[0][key].as_str().unwrap()).is_file(), "{found}");
    }
    // Tokens that do not say how many there are, and do not know their documents.
    let tokens: Vec<u8> = (0..640u16).flat_map(|n| (n % 50_000).to_le_bytes()).collect();
    std::fs::write(place.path("t.bin"), tokens).unwrap();
    let of = |files: &[&str], metric: &str| {
        let words = [
            &["data", "analyze", "--data"][..],
            files,
            &["--sequence", "16", "--metric", metric, "--out", "o"],
        ];
        place.run(&words.concat())
    };
    let counted = of(&["t.bin"], "vocabularyrarity");
    assert!(counted.status.success(), "{}", stderr(&counted));
    let apart = of(&["t.bin"], "seqlen");
    assert!(stderr(&apart).contains("where documents end is not known"), "{}", stderr(&apart));
    let mixed = of(&["t.bin", "a.txt"], "seqlen");
    assert_eq!(mixed.status.code(), Some(2));
    assert!(stderr(&mixed).contains("the files are of several kinds"), "{}", stderr(&mixed));
    let none = of(&["none.txt"], "seqlen");
    assert!(!none.status.success() && stderr(&none).contains("none.txt"), "{}", stderr(&none));
    let unknown = of(&["a.txt"], "loss");
    assert!(stderr(&unknown).contains("seqlen") && unknown.status.code() == Some(2), "{}", stderr(&unknown));
}
