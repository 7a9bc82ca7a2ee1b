//! Every command that the pages for beginners print, run as it is printed: in a folder like this repository's, in the page's order.
//!
//! Recipes that are printed (`name = "words"`) are there as `words.toml`. Runs are made short, ports free, the Hub is one on this
//! machine. A command that nothing here knows how to run fails the test: the page then promises what nobody has tried.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use super::hub_itself::server::HubServer;
use super::support::{binary, finish, output_of, stderr, stdout};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// A folder in which the pages' commands find what they name.
struct Desk {
    folder: tempfile::TempDir,
    server: HubServer,
}

impl Desk {
    fn new() -> Desk {
        let desk = Desk { folder: tempfile::tempdir().unwrap(), server: HubServer::start() };
        for name in ["README.md", "recipes", "docs", "crates"] {
            std::os::unix::fs::symlink(Path::new(ROOT).join(name), desk.folder.path().join(name)).unwrap();
        }
        desk.write("hosts", "localhost slots=2\n");
        desk.write("hostfile", "localhost slots=2\n");
        desk.write("ds_config.json", r#"{"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}, "bf16": {"enabled": true}}"#);
        desk.write(
            "chats.jsonl",
            &std::fs::read_to_string(format!("{ROOT}/recipes/chat/conversations.jsonl")).unwrap(),
        );
        let made = desk.folder.path().join("made");
        let words = "model init made --preset llama --layers 1 --width 32 --sequence 1024 --vocabulary 320";
        desk.expect(&words.split(' ').map(str::to_owned).collect::<Vec<_>>(), 0);
        for repository in ["models/Qwen/Qwen3-0.6B", "models/openai-community/gpt2"] {
            for file in ["config.json", "model.safetensors"] {
                desk.server.put(repository, file, std::fs::read(made.join(file)).unwrap());
            }
            let tokenizer = std::fs::read(format!("{ROOT}/crates/data/tests/golden/tokenizer.json")).unwrap();
            desk.server.put(repository, "tokenizer.json", tokenizer);
            desk.server.put(repository, "chat_template.jinja", "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}");
        }
        desk
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.folder.path().join(name), text).unwrap();
    }

    fn command(&self, words: &[String]) -> Command {
        let mut command = binary();
        command.args(words).current_dir(self.folder.path()).env("NO_COLOR", "1").stdin(Stdio::null());
        command.env("HF_ENDPOINT", self.server.address()).env("HF_HOME", self.folder.path().join("hf"));
        for name in ["HF_HUB_CACHE", "HF_TOKEN", "HF_HUB_OFFLINE", "HTTP_PROXY", "http_proxy"] {
            command.env_remove(name);
        }
        command
    }

    fn expect(&self, words: &[String], code: i32) {
        let output = output_of(&mut self.command(words));
        let said = format!("{words:?}: {}{}", stdout(&output), stderr(&output));
        assert_eq!(output.status.code(), Some(code), "{said}");
    }

    /// Runs all that a page prints.
    fn follow(&self, page: &str) -> usize {
        let text = std::fs::read_to_string(format!("{ROOT}/{page}")).unwrap();
        for recipe in blocks(&text, "toml") {
            if let Some(name) =
                recipe.lines().find_map(|line| line.strip_prefix("name = \"")?.strip_suffix('"'))
            {
                self.write(&format!("{name}.toml"), &recipe);
            }
        }
        let commands: Vec<Vec<String>> =
            blocks(&text, "console").iter().flat_map(|block| commands(block)).collect();
        for words in &commands {
            self.run(page, words);
        }
        commands.len()
    }

    fn run(&self, page: &str, words: &[String]) {
        let mut words: Vec<String> = words.to_vec();
        if words.starts_with(&["cargo", "run", "--release", "--"].map(str::to_owned)) {
            words.splice(..4, ["ferrospeed".to_owned()]);
        }
        // Compiling is what this test's own executable shows; the rest are other people's programs.
        if ["cargo", "python3", "stat", "cat", "vllm", "llama-cli", "llama-server"]
            .contains(&words[0].as_str())
        {
            return;
        }
        // Where there is no GPU, the same on the processor.
        words.iter_mut().filter(|word| *word == "cuda").for_each(|word| *word = "cpu".to_owned());
        assert_eq!(words.remove(0), "ferrospeed", "{page}: nothing here knows how to run {words:?}");
        match words[0].as_str() {
            "train" => {
                let is_wrong = words.iter().any(|word| word.starts_with("stpes"));
                words.extend(self.short(&words[1], &words));
                self.expect(&words, if is_wrong { 2 } else { 0 });
            }
            "serve" | "watch" => self.serve(words),
            // Nobody has to listen on the hosts that the page names.
            "launch" => {
                words.insert(1, "--dry-run".to_owned());
                self.expect(&words, 0);
            }
            "plan" => {
                let output = output_of(&mut self.command(&words));
                assert!(matches!(output.status.code(), Some(0 | 1)), "{words:?}: {}", stderr(&output));
            }
            "doctor" | "generate" | "chat" | "eval" | "model" | "data" | "config" => self.expect(&words, 0),
            other => panic!("{page}: nothing here knows how to run ferrospeed {other}"),
        }
    }

    /// What makes a run short, whatever its recipe says of its length.
    fn short(&self, recipe: &str, words: &[String]) -> Vec<String> {
        let text = std::fs::read_to_string(self.folder.path().join(recipe)).unwrap();
        let has = |key: &str| text.lines().any(|line| line.starts_with(key));
        let mut sets = vec![if has("epochs") { "epochs=0.1" } else { "steps=2" }];
        sets.extend(has("[eval]").then_some("eval.sequences=2"));
        sets.extend(has("[sample]").then_some("sample.tokens=2"));
        // A page may run the same recipe again.
        let again =
            (!words.iter().any(|word| word.starts_with("--resume"))).then(|| "--overwrite".to_owned());
        sets.into_iter().flat_map(|set| ["--set".to_owned(), set.to_owned()]).chain(again).collect()
    }

    /// A server that says where it is has started; then it is told to end.
    fn serve(&self, mut words: Vec<String>) {
        words.extend(["--port", "0"].map(str::to_owned));
        let mut child = self.command(&words).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        out.read_line(&mut line).unwrap();
        kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGINT).unwrap();
        let output = finish(child);
        assert!(line.starts_with("http://127.0.0.1:"), "{words:?}: {line}{}", stderr(&output));
    }
}

/// The fenced blocks of a language.
fn blocks(page: &str, language: &str) -> Vec<String> {
    let fence = format!("```{language}\n");
    let mut rest = page;
    let mut found = Vec::new();
    while let Some((_, block)) = rest.split_once(&fence) {
        let (block, behind) = block.split_once("\n```").expect("a fence that ends");
        found.push(block.to_owned());
        rest = behind;
    }
    found
}

/// The commands of a console block, as a shell would cut them into words.
fn commands(block: &str) -> Vec<Vec<String>> {
    let mut lines = block.lines();
    let mut found = Vec::new();
    while let Some(line) = lines.next() {
        let Some(command) = line.strip_prefix("$ ") else { continue };
        let mut command = command.to_owned();
        while let Some(begun) = command.strip_suffix('\\') {
            command = begun.to_owned() + lines.next().expect("a line that goes on").trim_start();
        }
        found.extend(words_of(&command).split(|word| word == "&&").map(<[String]>::to_vec));
    }
    found
}

fn words_of(command: &str) -> Vec<String> {
    let (mut words, mut word, mut quote, mut is_begun) = (Vec::new(), String::new(), None, false);
    for letter in command.chars() {
        match (quote, letter) {
            (Some(end), _) if letter == end => quote = None,
            (Some(_), _) => word.push(letter),
            (None, '\'' | '"') => (quote, is_begun) = (Some(letter), true),
            (None, '#') if word.is_empty() && !is_begun => break,
            (None, ' ') => {
                if is_begun || !word.is_empty() {
                    words.push(std::mem::take(&mut word));
                }
                is_begun = false;
            }
            (None, _) => word.push(letter),
        }
    }
    words.extend((is_begun || !word.is_empty()).then_some(word));
    words
}

#[test]
fn the_front_page_and_the_tutorial_run_as_printed() {
    let desk = Desk::new();
    // The recipe that the reader has for the ds_config of the front page.
    desk.write(
        "recipe.toml",
        "name = \"mine\"\nsteps = 1\nds_config = \"ds_config.json\"\n[model]\npath = \"Qwen/Qwen3-0.6B\"\n[data]\nsamples = [\"chats.jsonl\"]\nsequence = 64\n",
    );
    assert!(desk.follow("README.md") >= 10);
    // What the front page prints and does not run.
    desk.write("my-texts", &"A text of one's own.\n".repeat(400));
    let mine =
        ["train", "mine.toml", "--set", "steps=1", "--set", "model.width=32", "--set", "data.sequence=64"];
    desk.expect(&mine.map(str::to_owned), 0);
    assert!(desk.follow("docs/tutorial.md") >= 16);
}

#[test]
fn fine_tuning_adapters_and_evaluation_run_as_printed() {
    let desk = Desk::new();
    for (page, least) in [("docs/fine-tuning.md", 6), ("docs/adapters.md", 4), ("docs/evaluation.md", 4)] {
        let found = desk.follow(page);
        assert!(found >= least, "{page} has {found} commands");
    }
}

#[test]
fn recipes_beside_other_programs_files_can_be_run() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("recipe.toml");
    for page in ["deepspeed", "axolotl", "torchtitan", "nanogpt"] {
        let text = std::fs::read_to_string(format!("{ROOT}/docs/coming-from/{page}.md")).unwrap();
        let recipes = blocks(&text, "toml").into_iter().filter(|block| block.starts_with("name = "));
        let recipes: Vec<String> = recipes.collect();
        assert_eq!(recipes.len(), 1, "{page}");
        // The page shows the file beside it.
        let recipe = recipes[0].replace(
            "ds_config = \"ds_config.json\"",
            "training = { per_device_train_batch_size = 1, learning_rate = 1e-5 }\nds_config = {}",
        );
        std::fs::write(&path, recipe).unwrap();
        let problems = ferrospeed_train::Recipe::load(&path, &[]).unwrap().problems();
        assert!(problems.is_empty(), "{page}: {problems:#?}");
    }
}

#[test]
fn words_are_cut_as_a_shell_cuts_them() {
    let words = commands(
        "$ ferrospeed train a.toml --set 'data={\"a\": [\"b c\"]}' \\\n    --prompt \"A rank \"   # said\nout\n$ a && b",
    );
    let expected = [
        vec!["ferrospeed", "train", "a.toml", "--set", "data={\"a\": [\"b c\"]}", "--prompt", "A rank "],
        vec!["a"],
        vec!["b"],
    ];
    assert_eq!(words, expected.map(|words| words.into_iter().map(str::to_owned).collect::<Vec<_>>()));
}
