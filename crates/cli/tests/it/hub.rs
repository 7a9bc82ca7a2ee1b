//! Names on the Hugging Face Hub wherever a model or data can be named, with a server that answers like it.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use super::hub_itself::server::{COMMIT, HubServer, ListFault};
use super::support::{binary, finish, output_of, stderr, stdout, wait_until};

/// A model and conversations on a server, and a folder to work in.
struct Place {
    server: HubServer,
    folder: tempfile::TempDir,
}

const TALKS: &str = include_str!("../../../../recipes/chat/conversations.jsonl");

impl Place {
    fn new() -> Place {
        let place = Place { server: HubServer::start(), folder: tempfile::tempdir().unwrap() };
        let model = place.folder.path().join("made");
        let words = [
            "model",
            "init",
            "made",
            "--preset",
            "llama",
            "--layers",
            "1",
            "--width",
            "32",
            "--sequence",
            "128",
        ];
        place.expect(&words);
        for entry in std::fs::read_dir(&model).unwrap() {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().unwrap();
            place.server.put("models/org/tiny", &name, std::fs::read(entry.path()).unwrap());
        }
        std::fs::remove_dir_all(&model).unwrap();
        let talks: String = TALKS.lines().take(24).map(|line| format!("{line}\n")).collect();
        place.server.put("datasets/org/talks", "train.jsonl", talks.as_str());
        place.server.put("datasets/org/talks", "test.jsonl", talks);
        place
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = binary();
        command.args(words).current_dir(self.folder.path()).env("NO_COLOR", "1");
        command
            .env("HF_ENDPOINT", self.server.address())
            .env("HF_HUB_CACHE", self.folder.path().join("cache"));
        for name in
            ["HF_HOME", "HF_TOKEN", "HF_HUB_OFFLINE", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"]
        {
            command.env_remove(name);
        }
        command.env("HF_TOKEN_PATH", self.folder.path().join("no-token"));
        command
    }

    fn run(&self, words: &[&str]) -> Output {
        output_of(&mut self.command(words))
    }

    fn offline(&self, words: &[&str]) -> Output {
        output_of(self.command(words).env("HF_HUB_OFFLINE", "1"))
    }

    fn expect(&self, words: &[&str]) -> String {
        let output = self.run(words);
        assert!(output.status.success(), "{words:?}: {}{}", stdout(&output), stderr(&output));
        stdout(&output)
    }

    /// A recipe that names model and data by their names.
    fn recipe(&self, steps: u64) -> String {
        let text = format!(
            "name = \"tuned\"\nsteps = {steps}\n[model]\npath = \"org/tiny\"\n[data]\nhub = \"org/talks\"\nchat_template = \"plain\"\n\
             tokenizer = \"bytes\"\nsequence = 128\n[training]\nper_device_train_batch_size = 2\n[ds_config]\n"
        );
        std::fs::write(self.folder.path().join("recipe.toml"), text).unwrap();
        "recipe.toml".to_owned()
    }

    /// How often bytes of large files were asked for.
    fn downloads(&self) -> usize {
        self.server.asked().iter().filter(|asked| asked.of_bytes).count()
    }
}

#[test]
fn every_command_takes_a_name_and_downloads_once() {
    let place = Place::new();
    let said = place.run(&["generate", "org/tiny", "--prompt", "ab", "--tokens", "3"]);
    assert!(said.status.success(), "{}", stderr(&said));
    assert_eq!(place.downloads(), 1);
    let again = place.run(&["generate", "--model", "org/tiny", "--prompt", "ab", "--tokens", "3"]);
    assert_eq!((stdout(&again), place.downloads()), (stdout(&said), 0));
    let offline = place.offline(&["generate", "--model", "org/tiny@main", "--prompt", "ab", "--tokens", "3"]);
    assert_eq!(stdout(&offline), stdout(&said), "{}", stderr(&offline));
    assert!(place.expect(&["model", "inspect", "org/tiny"]).contains("llama"));
    place.expect(&["model", "convert", "org/tiny", "half", "--dtype", "float16"]);
    let talks = place.expect(&["data", "fetch", "org/talks"]);
    let talks = talks.trim();
    assert!(talks.ends_with(&format!("datasets--org--talks/snapshots/{COMMIT}/train.jsonl")), "{talks}");
    let words = ["eval", "org/tiny", "--data", talks, "--chat-template", "plain", "--against", "half"];
    assert!(place.expect(&words).contains("perplexity"));
    let fetched = place.expect(&["model", "fetch", "org/tiny"]);
    assert!(fetched.trim().ends_with(&format!("models--org--tiny/snapshots/{COMMIT}")), "{fetched}");
    let mut chat = place.command(&["chat", "org/tiny", "--tokens", "3"]);
    let output = output_of(chat.stdin(std::process::Stdio::null()));
    assert!(output.status.success(), "{}", stderr(&output));
}

#[test]
fn a_run_of_names_is_written_down_with_the_commits_that_they_were() {
    let place = Place::new();
    let recipe = place.recipe(2);
    place.expect(&["train", &recipe, "-n", "2", "--out", "run"]);
    // The model's weights and the conversations; ranks find what the command has brought.
    assert_eq!(place.downloads(), 2);
    let written = std::fs::read_to_string(place.folder.path().join("run/config/recipe.toml")).unwrap();
    assert!(written.contains(&format!("path = \"hf://org/tiny@{COMMIT}\"")), "{written}");
    let talks = format!("samples = [\"hf://datasets/org/talks@{COMMIT}/train.jsonl\"]");
    assert!(written.contains(&talks), "{written}");
    let again = place.offline(&["train", "run/config/recipe.toml", "--out", "again"]);
    assert!(again.status.success(), "{}", stderr(&again));
    let weights =
        |run: &str| std::fs::read(place.folder.path().join(run).join("model/model.safetensors")).unwrap();
    assert_eq!(weights("run"), weights("again"));
}

#[test]
fn of_ranks_that_another_launcher_starts_one_downloads() {
    let place = Place::new();
    let recipe = place.recipe(1);
    let program = binary().get_program().to_str().unwrap().to_owned();
    place.expect(&["launch", "-n", "2", "--", &program, "train", &recipe, "--out", "run"]);
    assert_eq!(place.downloads(), 2);
}

#[test]
fn a_plan_brings_the_configuration_alone() {
    let place = Place::new();
    let recipe = place.recipe(1);
    place.run(&["plan", &recipe]);
    let asked = place.server.asked();
    assert!(asked.iter().any(|asked| asked.path.ends_with("/config.json")), "{asked:?}");
    assert!(!asked.iter().any(|asked| asked.of_bytes), "{asked:?}");
    place.expect(&["config", "check", &recipe]);
}

#[test]
fn a_folder_of_that_name_wins() {
    let place = Place::new();
    let folder = place.folder.path().join("org/tiny");
    place.expect(&["model", "init", "org/tiny", "--preset", "gpt2", "--layers", "1", "--width", "32"]);
    assert!(folder.is_dir());
    place.expect(&["generate", "org/tiny", "--prompt", "ab", "--tokens", "3"]);
    // Nor is one asked for that would lie in a folder which is here.
    let missing = place.run(&["generate", "org/nothing", "--prompt", "ab"]);
    assert!(stderr(&missing).contains("org/nothing"), "{}", stderr(&missing));
    assert_eq!(place.server.asked(), []);
}

#[test]
fn what_cannot_be_had_says_how_to_bring_it() {
    let place = Place::new();
    let recipe = place.recipe(1);
    let output = place.offline(&["train", &recipe]);
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("model.path: org/tiny: is not in the cache"), "{text}");
    assert!(text.contains("ferrospeed model fetch org/tiny"), "{text}");
    let output =
        place.run(&["train", &recipe, "--set", "model.path=org/absent", "--set", "data.hub=org/missing"]);
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    for part in [
        "model.path: org/absent: is neither a folder here",
        "data.hub: org/missing: is no name that the server knows",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(!Path::new(&place.folder.path().join("runs")).exists());
}

#[test]
fn a_run_that_waits_for_the_server_hears_signals() {
    let place = Place::new();
    let recipe = place.recipe(1);
    place.server.list_fault(ListFault::Hang);
    for (signal, code) in [(libc::SIGTERM, 75), (libc::SIGINT, 130)] {
        let mut command = place.command(&["train", &recipe]);
        let running = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        wait_until("the server is asked", || !place.server.asked().is_empty());
        // SAFETY: the process is this test's own.
        assert_eq!(unsafe { libc::kill(running.id() as i32, signal) }, 0);
        let output = finish(running);
        assert_eq!(output.status.code(), Some(code), "{}", stderr(&output));
        assert!(stderr(&output).contains("nothing was trained"), "{}", stderr(&output));
        assert_eq!(place.server.asked(), [], "it is not asked again");
    }
}
