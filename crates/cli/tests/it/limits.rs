//! What users name may be anything: pipes, devices, absurd numbers, names made to fool a terminal. All of it is refused at
//! once, by name.

use super::support;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use super::support::{small_recipe, stderr};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use tempfile::TempDir;

/// Far above what a refusal takes on a busy machine, far below for ever.
const DEADLINE: Duration = Duration::from_secs(60);

/// What no refusal needs: whoever reads a device whole meets this bound.
const MAX_ADDRESS_SPACE_BYTES: u64 = 16 << 30;

fn recipe() -> String {
    let own = "name = 'limits'\nsteps = 1\nmodel.layers = 1\ndata.synthetic = 1000\ndata.sequence = 16";
    small_recipe(own, "train_micro_batch_size_per_gpu = 1\noptimizer = { type = 'Adam' }")
}

struct Place(TempDir);

impl Place {
    fn new() -> Place {
        let place = Place(tempfile::tempdir().unwrap());
        std::fs::write(place.path().join("recipe.toml"), recipe()).unwrap();
        mkfifo(&place.path().join("pipe"), Mode::S_IRWXU).unwrap();
        mkfifo(&place.path().join("pipe.toml"), Mode::S_IRWXU).unwrap();
        place
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// Runs the binary, which has to end in time and without much memory.
    fn ferrospeed(&self, arguments: &[&str]) -> Output {
        let mut command: Command = support::binary();
        command.args(arguments).current_dir(self.path()).stdin(Stdio::null());
        command.env("FERROSPEED_DEVICE", "cpu");
        // SAFETY: between fork and exec only `setrlimit` is called, which is safe there.
        unsafe {
            command.pre_exec(|| {
                let bound =
                    libc::rlimit { rlim_cur: MAX_ADDRESS_SPACE_BYTES, rlim_max: MAX_ADDRESS_SPACE_BYTES };
                libc::setrlimit(libc::RLIMIT_AS, &bound);
                Ok(())
            });
        }
        let start = Instant::now();
        let output = support::output_of(&mut command);
        assert!(start.elapsed() < DEADLINE, "{arguments:?} took {:?}", start.elapsed());
        output
    }

    /// What is said about arguments that are wrong.
    fn refusal(&self, arguments: &[&str]) -> String {
        let output = self.ferrospeed(arguments);
        let said = stderr(&output);
        assert!(matches!(output.status.code(), Some(1 | 2)), "{arguments:?}: {:?}\n{said}", output.status);
        said
    }
}

#[test]
fn pipes_and_devices_are_refused_wherever_a_file_is_named() {
    let place = Place::new();
    std::fs::create_dir(place.path().join("model")).unwrap();
    mkfifo(&place.path().join("model/config.json"), Mode::S_IRWXU).unwrap();
    std::fs::create_dir_all(place.path().join("saved/step1")).unwrap();
    mkfifo(&place.path().join("saved/step1/manifest.json"), Mode::S_IRWXU).unwrap();
    std::fs::create_dir(place.path().join("recorders")).unwrap();
    mkfifo(&place.path().join("recorders/rank-0.jsonl"), Mode::S_IRWXU).unwrap();
    for name in ["pipe", "/dev/zero"] {
        for kind in ["text", "jsonl", "parquet", "tokens"] {
            let recipe = recipe().replace("synthetic = 1000", &format!("{kind} = [\"{name}\"]"));
            let recipe = recipe.replace("model.heads", "model.vocabulary = 256\nmodel.heads");
            std::fs::write(place.path().join("data.toml"), recipe).unwrap();
            let said = place.refusal(&["train", "data.toml"]);
            let named = said.contains("plain file") || said.contains("is neither a file nor a folder");
            assert!(named, "{kind} = {name}: {said}");
        }
        let tokenizer = format!("data.tokenizer={name}");
        let text = recipe().replace("synthetic = 1000", "text = [\"recipe.toml\"]");
        std::fs::write(place.path().join("text.toml"), text).unwrap();
        let said = place.refusal(&["train", "text.toml", "--set", &tokenizer]);
        assert!(said.contains("plain file"), "tokenizer {name}: {said}");
        let config = format!("ds_config={name}");
        for arguments in [
            &["train", name][..],
            &["train", "recipe.toml", "--set", &config],
            &["config", "check", name],
            &["model", "init", "new", "--config", name],
            &["launch", "-H", name, "program"],
        ] {
            let said = place.refusal(arguments);
            assert!(said.contains("plain file"), "{arguments:?}: {said}");
        }
    }
    for arguments in [
        &["train", "pipe.toml"][..],
        &["config", "check", "pipe.toml"],
        &["model", "inspect", "model"],
        &["generate", "--model", "model", "--prompt", "x"],
        &["checkpoint", "inspect", "saved", "--tag", "step1"],
        &["trace", "diff", "recorders"],
    ] {
        let said = place.refusal(arguments);
        let named = said.contains("plain file") || said.contains("has no manifest.json");
        assert!(named, "{arguments:?}: {said}");
    }
}

#[test]
fn recorders_that_are_both_of_one_rank_are_told() {
    let place = Place::new();
    std::fs::create_dir(place.path().join("recorders")).unwrap();
    for name in ["rank-0.jsonl", "rank-00.jsonl"] {
        std::fs::write(place.path().join("recorders").join(name), "").unwrap();
    }
    let said = place.refusal(&["trace", "diff", "recorders"]);
    assert!(said.contains("another file of the folder is of rank 0, too"), "{said}");
}

#[test]
fn absurd_sizes_are_refused_by_key_and_limit() {
    let place = Place::new();
    for (assignment, key, limit) in [
        ("model.layers=1000000000", "model.layers", "16384"),
        ("model.width=1000000000", "model.width", "16777216"),
        ("model.vocabulary=1000000000000", "model.vocabulary", "16777216"),
        ("train_micro_batch_size_per_gpu=1000000000000", "train_micro_batch_size_per_gpu", "2147483648"),
        ("gradient_accumulation_steps=1000000000000", "gradient_accumulation_steps", "16777216"),
        ("data.sequence=1000000000000", "data.sequence", "16777216"),
        ("data.synthetic=9223372036854775807", "data.synthetic", "17592186044416"),
        ("steps=9223372036854775808", "steps", "1000000000000"),
        ("ranks=1000000", "ranks", "65536"),
    ] {
        let said = place.refusal(&["train", "recipe.toml", "--set", assignment]);
        assert!(said.contains(key) && said.contains(limit), "{assignment}: {said}");
    }
    let said = place.refusal(&["train", "recipe.toml", "-n", "60000"]);
    assert!(said.contains("60000 ranks are too many for one host: at most 1024"), "{said}");
    for (option, key) in
        [("--layers", "n_layer"), ("--width", "n_embd"), ("--heads", "n_head"), ("--sequence", "n_positions")]
    {
        let said = place.refusal(&["model", "init", "new", "--preset", "gpt2", option, "1000000000"]);
        assert!(said.contains(key) && said.contains("at most"), "{option}: {said}");
        assert!(!place.path().join("new").exists());
    }
}

#[test]
fn control_characters_of_files_do_not_reach_the_terminal() {
    let place = Place::new();
    std::fs::create_dir(place.path().join("model")).unwrap();
    let config = r#"{ "model_type": "gpt2\u001b]0;owned\u0007\u001b[2J\r" }"#;
    std::fs::write(place.path().join("model/config.json"), config).unwrap();
    std::fs::write(place.path().join("evil.toml"), "name = \"a\\u001b[2J\"\n").unwrap();
    std::fs::write(place.path().join("evil.json"), "{ \"a\\u001b[2J\\u0007\": 1 }").unwrap();
    for arguments in [
        &["generate", "--model", "model", "--prompt", "x"][..],
        &["model", "inspect", "model"],
        &["train", "evil.toml"],
        &["config", "check", "evil.json"],
    ] {
        let output = place.ferrospeed(arguments);
        assert_ne!(output.status.code(), Some(0), "{arguments:?}");
        for stream in [&output.stdout, &output.stderr] {
            let control = |&byte: &u8| byte < 0x20 && byte != b'\n' && byte != b'\t';
            let text = String::from_utf8_lossy(stream);
            assert!(!stream.iter().any(control), "{arguments:?}: {text:?}");
        }
        assert!(
            stderr(&output).contains("u{1b}") || stderr(&output).contains("u001b"),
            "{}",
            stderr(&output)
        );
    }
}

#[test]
fn numbers_that_generation_cannot_use_are_refused_with_those_it_can() {
    let place = Place::new();
    for (option, value, allowed) in [
        ("--top-k", "0", "1 or more"),
        ("--top-k", "-1", "1 or more"),
        ("--top-p", "1.5", "above 0 and at most 1"),
        ("--top-p", "0", "above 0 and at most 1"),
        ("--top-p", "NaN", "above 0 and at most 1"),
        ("--temperature", "-1", "0 (always the likeliest token) or more"),
        ("--temperature", "inf", "0 (always the likeliest token) or more"),
        ("--tokens", "18446744073709551615", "not in"),
        ("--tokens", "16777217", "not in"),
    ] {
        let output = place.ferrospeed(&["generate", "--model", ".", "--prompt", "x", option, value]);
        assert_eq!(output.status.code(), Some(2));
        let said = stderr(&output).split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(said.contains(option) && said.contains(allowed), "{option} {value}: {said}");
    }
}

#[test]
fn a_recipe_that_is_not_there_is_wrong_usage() {
    let output = Place::new().ferrospeed(&["train", "missing.toml"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("missing.toml: No such file"), "{}", stderr(&output));
}

#[test]
fn another_ds_config_can_be_named_and_changed_on_the_command_line() {
    let place = Place::new();
    let config = r#"{ "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.5,
        "optimizer": { "type": "Adam", "params": { "lr": 0.001 } } }"#;
    std::fs::write(place.path().join("other.json"), config).unwrap();
    let output = place.ferrospeed(&[
        "train",
        "recipe.toml",
        "--set",
        "gradient_accumulation_steps=3",
        "--set",
        "ds_config=other.json",
    ]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let used = std::fs::read_to_string(place.path().join("runs/limits/config/ds_config.json")).unwrap();
    let used: serde_json::Value = serde_json::from_str(&used).unwrap();
    assert_eq!(used["train_micro_batch_size_per_gpu"], 2);
    assert_eq!(used["gradient_clipping"], 0.5);
    assert_eq!(used["gradient_accumulation_steps"], 3);
    let said = place.refusal(&["train", "recipe.toml", "--set", "ds_config=missing.json"]);
    assert!(said.contains("missing.json") && !said.contains("did you mean"), "{said}");
}

#[test]
fn a_run_that_cannot_fit_is_refused_with_the_numbers_before_a_rank_starts() {
    let place = Place::new();
    let large = ["--set", "model.layers=1000", "--set", "model.width=65536", "--set", "model.heads=64"];
    for ranks in [["-n", "1"], ["-n", "2"], ["--pp", "2"]] {
        let arguments = [&["train", "recipe.toml"], &ranks[..], &large].concat();
        let said = place.refusal(&arguments);
        for part in ["does not fit", "of host memory, and there is", "optimizer states", "--force"] {
            assert!(said.contains(part), "'{part}' is not in: {said}");
        }
        assert!(!place.path().join("runs/limits/logs").exists(), "no rank was started");
    }
}

/// A disk of 64 KiB, which only the run sees.
fn on_a_small_disk(place: &Place, more: &str) -> Option<Output> {
    let disk = place.path().join("disk");
    std::fs::create_dir_all(&disk).unwrap();
    let script = format!(
        "mount -t tmpfs -o size=64k small {disk} || exit 99\n\
         exec {} train recipe.toml -n 2 --set zero_optimization.stage=3 --set optimizer.type=AdamW \
         --set 'zero_optimization.offload_optimizer={{\"device\":\"nvme\",\"nvme_path\":\"{disk}/swap\"}}' {more}",
        env!("CARGO_BIN_EXE_ferrospeed"),
        disk = disk.display(),
    );
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-c", &script]).current_dir(place.path());
    let output = support::output_of(&mut command);
    let refused = output.status.code() == Some(99) || stderr(&output).contains("unshare failed");
    (!refused).then_some(output)
}

#[test]
fn a_run_that_its_disk_cannot_hold_is_refused_before_a_rank_starts() {
    let place = Place::new();
    let Some(output) = on_a_small_disk(&place, "") else {
        return ferrospeed_testkit::skip::skip("no mounts of our own");
    };
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    for part in ["does not fit: 2 rank(s) need ", "disk/swap, and 64.00 KiB are free", "nvme_path", "--force"]
    {
        assert!(said.contains(part), "'{part}' is not in: {said}");
    }
    assert!(!place.path().join("runs/limits/logs").exists(), "no rank was started");
    // Who insists hears of it from the ranks.
    let output = on_a_small_disk(&place, "--force").unwrap();
    let said = stderr(&output);
    assert!(!output.status.success() && place.path().join("runs/limits/logs").exists(), "{said}");
    assert!(!said.contains("does not fit") && said.contains("bytes free, and"), "{said}");
}

#[test]
fn chats_are_told_apart_from_texts_in_another_field() {
    let place = Place::new();
    std::fs::write(place.path().join("chat.jsonl"), "{\"messages\": [{\"role\": \"user\"}]}\n").unwrap();
    let recipe = recipe().replace("synthetic = 1000", "jsonl = [\"chat.jsonl\"]");
    std::fs::write(place.path().join("chat.toml"), recipe).unwrap();
    let said = place.refusal(&["train", "chat.toml"]);
    assert!(said.contains("is a chat") && !said.contains("set data.field"), "{said}");
}
