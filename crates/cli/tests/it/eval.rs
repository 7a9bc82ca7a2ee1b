//! From conversations to preferences to what came of it, as `docs/fine-tuning.md` shows it.

use super::support::{binary, output_of, stderr, stdout};
use serde_json::Value;
use std::path::Path;
use std::process::Output;

const TALKS: &str = "recipes/chat/conversations.jsonl";
const PAIRS: &str = "recipes/dpo/pairs.jsonl";
const TASKS: &str = "recipes/dpo/tasks.jsonl";

fn output(folder: &Path, words: &[&str]) -> Output {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut command = binary();
    command.args(words).current_dir(root).env("NO_COLOR", "1").env("HOME", folder);
    output_of(&mut command)
}

fn run(folder: &Path, words: &[&str]) -> String {
    let output = output(folder, words);
    assert!(output.status.success(), "{words:?}: {}", stderr(&output));
    stdout(&output)
}

fn lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn what_a_run_validated_is_what_eval_finds_and_preferences_show() {
    let folder = tempfile::tempdir().unwrap();
    let place = |name: &str| folder.path().join(name).display().to_string();
    let (chat, dpo) = (place("chat"), place("dpo"));
    let files = format!("data.validation=[\"{TALKS}\"]");
    let sets = ["epochs=2", &files, "save.every=0"].map(|set| ["--set", set]);
    run(folder.path(), &[&["train", "recipes/chat.toml", "--out", &chat][..], &sets.concat()].concat());
    let found = |words: &[&str]| -> Value {
        serde_json::from_str(&run(folder.path(), &[&["eval"][..], words, &["--json"]].concat())).unwrap()
    };
    let validated = lines(&folder.path().join("chat/eval.jsonl")).pop().unwrap();
    let evaluated = found(&[&chat, "--data", TALKS]);
    let [loss, again] =
        [&validated["loss"], &evaluated["data"][0]["loss"]].map(|loss| loss.as_f64().unwrap());
    assert!((loss - again).abs() < 1e-5 * loss, "{loss} {again}");
    assert_eq!(validated["tokens"], evaluated["data"][0]["totals"]["tokens"]);
    let checkpoint = std::fs::read_dir(folder.path().join("chat/checkpoints")).unwrap();
    let tag =
        checkpoint.filter_map(|entry| entry.ok()).find(|entry| entry.path().is_dir()).unwrap().file_name();
    // A sequence is as long as the model sees, whatever is asked for, and that is said.
    let words = ["eval", &chat, "--data", TALKS, "--sequence", "1000000"];
    let said = stderr(&output(folder.path(), &words));
    assert!(
        said.contains("--sequence 1000000: ") && said.contains("is measured on sequences of so many"),
        "{said}"
    );
    let of_checkpoint = found(&[&chat, "--checkpoint", tag.to_str().unwrap(), "--data", TALKS]);
    assert_eq!(of_checkpoint["data"], evaluated["data"]);

    let model = format!("model.path={chat}/model");
    let sets = [&model, "epochs=3", "zero_optimization.stage=3"].map(|set| ["--set", set]);
    let words = [&["train", "recipes/dpo.toml", "-n", "2", "--out", &dpo][..], &sets.concat()].concat();
    run(folder.path(), &words);
    let last = lines(&folder.path().join("dpo/log.jsonl")).pop().unwrap();
    assert!(last["measures"]["rewards/accuracies"].as_f64().unwrap() > 0.6, "{last}");
    let both = found(&[&dpo, "--against", &chat, "--data", PAIRS, TASKS]);
    let preferred = |side: &Value| side["data"][0]["pairs"]["preferred_per_token"].as_f64().unwrap();
    assert!(preferred(&both) > preferred(&both["against"]), "{}", both["data"][0]);
    assert_eq!(both["data"][1]["tasks"]["choices"], 6);
    let differ = both["data"][1]["outcomes"].as_array().unwrap().iter();
    let differ = differ.zip(both["against"]["data"][1]["outcomes"].as_array().unwrap());
    let differ = differ.filter(|(own, other)| own["is_right"] != other["is_right"]).count();
    assert_eq!(both["changed"].as_array().unwrap().len(), differ);
    let text = run(folder.path(), &["eval", &dpo, "--against", &chat, "--data", TASKS]);
    assert!(
        text.contains("accuracy per byte") && text.contains("tasks are done that the other does not"),
        "{text}"
    );
}

#[test]
fn what_cannot_be_evaluated_is_said_with_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |words: &[&str]| {
        let output = output(folder.path(), &[&["eval"][..], words].concat());
        assert_eq!(output.status.code(), Some(2), "{words:?}: {}", stderr(&output));
        stderr(&output)
    };
    let nowhere = folder.path().display().to_string();
    assert!(
        refused(&[&nowhere, "--data", TALKS]).contains("is no model: neither config.json nor a run's model/")
    );
    assert!(refused(&["absent", "--data", TALKS]).contains("absent does not exist"));
    assert!(refused(&[&nowhere, "--data", "absent.jsonl"]).contains("--data: absent.jsonl does not exist"));
    let refused_recipe = output(
        folder.path(),
        &[
            "train",
            "recipes/dpo.toml",
            "--set",
            "objective=next_token",
            "--set",
            "model={\"preset\": \"llama\", \"layers\": 1, \"width\": 32, \"heads\": 2}",
            "--out",
            &format!("{nowhere}/run"),
        ],
    );
    let said = stderr(&refused_recipe);
    assert!(!refused_recipe.status.success() && said.contains("write objective = \"dpo\""), "{said}");
}
