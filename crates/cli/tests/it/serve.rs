//! `ferrospeed serve` and `ferrospeed chat` as a user runs them.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ferrospeed_models::directory::{WriteOptions, create};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::support::{children, variable};

/// The time that a loaded machine may take for what usually takes a second.
const PATIENCE: Duration = Duration::from_secs(60);

fn model() -> (TempDir, String) {
    model_of(json!({"model_type": "llama"}))
}

fn model_of(family: Value) -> (TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny");
    let mut config = json!({
        "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 4096, "initializer_range": 0.3,
    });
    config.as_object_mut().unwrap().extend(family.as_object().unwrap().clone());
    create(&path, &config, 3, &WriteOptions::default()).unwrap();
    let name = path.to_str().unwrap().to_owned();
    (folder, name)
}

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrospeed"));
    command
        .args(arguments)
        .env("FERROSPEED_DEVICE", "cpu")
        .env_remove("FERROSPEED_API_KEY")
        .stdin(Stdio::null());
    command
}

/// A child that does not outlive its test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Running {
    fn wait(&mut self) -> i32 {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                return status.code().unwrap_or(-1);
            }
            assert!(Instant::now() < end, "it does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Sends a request and reads the answer's body.
fn ask(address: &str, method: &str, path: &str, body: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.0\r\nHost: {address}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
    )
    .unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text.split_once("\r\n\r\n").unwrap().1.to_owned()
}

fn serve(arguments: &[&str]) -> (Running, String) {
    let mut child = command(arguments).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let address = line.strip_prefix("http://").and_then(|rest| rest.split(' ').next());
    let address = address.unwrap_or_else(|| panic!("no address in '{line}'")).to_owned();
    (Running(child), address)
}

#[test]
fn a_server_says_where_it_is_answers_as_generate_does_and_ends_when_told_to() {
    let (_folder, model) = model();
    let (mut server, address) = serve(&["serve", &model, "--port", "0"]);
    assert!(address.starts_with("127.0.0.1:"), "{address}");
    let body = json!({"prompt": "to be", "max_tokens": 20, "temperature": 0}).to_string();
    let reply: Value = serde_json::from_str(&ask(&address, "POST", "/v1/completions", &body)).unwrap();
    let generate =
        ["generate", "--model", &model, "--prompt", "to be", "--tokens", "20", "--temperature", "0"];
    let written = command(&generate).output().unwrap();
    let written = String::from_utf8_lossy(&written.stdout).into_owned();
    assert_eq!(format!("to be{}\n", reply["choices"][0]["text"].as_str().unwrap()), written);
    nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(server.0.id() as i32),
        nix::sys::signal::Signal::SIGTERM,
    )
    .unwrap();
    assert_eq!(server.wait(), 0);
}

#[test]
fn a_tokenizer_with_more_tokens_than_the_model_is_told_at_the_start() {
    let (_folder, model) = model();
    let words = json!({"type": "WordLevel", "vocab": {"x": 5000, "y": 1}, "unk_token": "y"});
    let tokenizer = json!({"version": "1.0", "model": words}).to_string();
    std::fs::write(format!("{model}/tokenizer.json"), tokenizer).unwrap();
    let arguments = ["serve", &model, "--port", "0"];
    let child = command(&arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut server = Running(child);
    let mut line = String::new();
    BufReader::new(server.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.starts_with("http://"), "{line}");
    server.0.kill().unwrap();
    let mut told = String::new();
    server.0.stderr.take().unwrap().read_to_string(&mut told).unwrap();
    assert!(told.contains("the tokenizer has 5001 tokens and the model 256"), "{told}");
}

/// What a server goes on with.
fn continuation(address: &str) -> Value {
    let body = json!({"prompt": "to be", "max_tokens": 20, "temperature": 0}).to_string();
    let reply = ask(address, "POST", "/v1/completions", &body);
    serde_json::from_str::<Value>(&reply).unwrap()["choices"][0]["text"].clone()
}

#[test]
fn a_mixture_is_served_by_processes_that_each_have_some_of_its_experts() {
    let mixture = json!({"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2});
    let (_folder, model) = model_of(mixture);
    let (_whole, address) = serve(&["serve", &model, "--port", "0"]);
    let expected = continuation(&address);
    let (mut server, address) = serve(&["serve", &model, "--port", "0", "--ep", "2"]);
    assert_eq!(continuation(&address), expected);
    nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(server.0.id() as i32),
        nix::sys::signal::Signal::SIGTERM,
    )
    .unwrap();
    assert_eq!(server.wait(), 0, "told to stop, all ranks end well");
    let (_both, address) = serve(&["serve", &model, "--port", "0", "--ep", "2", "--tp", "2"]);
    assert_eq!(continuation(&address), expected);

    // What cannot be is told once, before any rank starts.
    let (_folder, dense) = self::model();
    for (model, more, told) in [
        (&model, vec!["--ep", "3"], "4 experts cannot be shared by 3 ranks"),
        (&dense, vec!["--ep", "2"], "a llama has no experts"),
        (&model, vec!["--ep", "2", "--tp", "4"], "do not go together"),
    ] {
        let refused = command(&[&["serve", model, "--port", "0"][..], &more].concat()).output().unwrap();
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(refused.status.code() == Some(2) && said.matches("error").count() == 1, "{said}");
        assert!(said.contains(told), "{said}");
    }
}

#[test]
fn a_model_in_slices_is_served_by_processes_that_end_together() {
    let (_folder, model) = model();
    let (_whole, address) = serve(&["serve", &model, "--port", "0"]);
    let expected = continuation(&address);
    let (mut server, address) = serve(&["serve", &model, "--port", "0", "--tp", "2"]);
    assert_eq!(continuation(&address), expected);
    let signal = |pid: i32, signal| nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), signal).unwrap();
    signal(server.0.id() as i32, nix::sys::signal::Signal::SIGTERM);
    assert_eq!(server.wait(), 0, "told to stop, all ranks end well");

    // What cannot be cut so is told once, before any rank starts.
    let refused = command(&["serve", &model, "--port", "0", "--tp", "3"]).output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(2) && said.matches("error").count() == 1, "{said}");
    assert!(said.contains('3') && said.contains("heads"), "{said}");

    // A rank that is stopped is noticed, by the next request or by the silence, and all of them end with an error.
    let server = Watched::start(&["serve", &model, "--port", "0", "--tp", "2", "--grace-s", "1"]);
    signal(server.rank(1), nix::sys::signal::Signal::SIGSTOP);
    let said = server.fail();
    assert!(said.contains("rank 1") && said.contains("stopped responding"), "{said}");

    // A rank that is killed takes the others with it, and is named.
    let server = Watched::start(&["serve", &model, "--port", "0", "--tp", "2"]);
    signal(server.rank(1), nix::sys::signal::Signal::SIGKILL);
    let said = server.fail();
    assert!(said.contains("rank 1") && said.contains("SIGKILL"), "{said}");
}

#[test]
fn a_rank_of_experts_that_is_killed_in_mid_stream_ends_the_stream_with_an_error_and_all_ranks() {
    let mixture = json!({"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2});
    let (_folder, model) = model_of(mixture);
    // Each has slices and experts of its own; the first answers, and may not be the one that is missed.
    for rank in [1, 0] {
        let server = Watched::start(&["serve", &model, "--port", "0", "--tp", "2", "--ep", "2"]);
        let ranks: Vec<u32> = children(server.running.0.id());
        let body =
            json!({"prompt": "to be", "max_tokens": 4000, "temperature": 0, "stream": true}).to_string();
        let mut stream = TcpStream::connect(&server.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        write!(
            stream,
            "POST /v1/completions HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        )
        .unwrap();
        let mut stream = BufReader::new(stream);
        let mut line = String::new();
        while !line.starts_with("data: ") {
            line.clear();
            assert_ne!(stream.read_line(&mut line).unwrap(), 0, "the stream ended before its first word");
        }
        let killed = nix::unistd::Pid::from_raw(server.rank(rank));
        nix::sys::signal::kill(killed, nix::sys::signal::Signal::SIGKILL).unwrap();
        let mut rest = String::new();
        // A connection to a rank that was killed is cut off by the system.
        let ended = stream.read_to_string(&mut rest);
        assert!(!rest.contains("[DONE]"), "a stream that was cut off says that it is complete: {rest}");
        if rank == 1 {
            ended.unwrap();
            let last: Vec<&str> = rest.lines().filter(|line| line.starts_with("data: ")).collect();
            let last = last.last().unwrap_or_else(|| panic!("no last word: {rest}"));
            let error =
                &serde_json::from_str::<Value>(last.strip_prefix("data: ").unwrap()).unwrap()["error"];
            assert!(error["message"].as_str().is_some_and(|why| why.contains("rank 1")), "{last}");
        }
        let said = server.fail();
        assert!(said.contains(&format!("rank {rank}")) && said.contains("SIGKILL"), "{said}");
        for pid in ranks {
            assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists(), "{pid} is left of {said}");
        }
    }
}

/// A server on several ranks whose errors are read.
struct Watched {
    running: Running,
    address: String,
    errors: std::thread::JoinHandle<String>,
}

impl Watched {
    fn start(arguments: &[&str]) -> Watched {
        let mut child = command(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut errors = child.stderr.take().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.strip_prefix("http://").and_then(|rest| rest.split(' ').next());
        let address = address.unwrap_or_else(|| panic!("no address in '{line}'")).to_owned();
        let errors = std::thread::spawn(move || {
            let mut said = String::new();
            errors.read_to_string(&mut said).unwrap();
            said
        });
        Watched { running: Running(child), address, errors }
    }

    /// The process of a rank.
    fn rank(&self, rank: usize) -> i32 {
        let wanted = rank.to_string();
        let ranks = children(self.running.0.id());
        let found = ranks.into_iter().find(|pid| variable(*pid, "RANK").as_ref() == Some(&wanted));
        found.expect("there is such a rank") as i32
    }

    /// Waits for its end, which is no good one; what it said.
    fn fail(mut self) -> String {
        assert_ne!(self.running.wait(), 0);
        self.errors.join().unwrap()
    }
}

#[test]
fn a_talk_goes_on_line_by_line() {
    let (_folder, model) = model();
    let arguments = ["chat", &model, "--temperature", "0", "--tokens", "5", "--system", "short"];
    let mut child = command(&arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"hello\n\nagain\n").unwrap();
    let mut said = Vec::new();
    child.stdout.take().unwrap().read_to_end(&mut said).unwrap();
    assert_eq!(Running(child).wait(), 0);
    assert!(said.len() >= 12 && said.ends_with(b"\n"), "two answers of five tokens: {said:?}");
}

#[test]
fn a_talk_can_be_taken_back_begun_anew_and_ended_by_words() {
    let (_folder, model) = model();
    let talk = |lines: &str| {
        let arguments = ["chat", &model, "--temperature", "0", "--tokens", "5"];
        let mut child = command(&arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        // It may have ended by then.
        let _ = child.stdin.take().unwrap().write_all(lines.as_bytes());
        let mut said = Vec::new();
        child.stdout.take().unwrap().read_to_end(&mut said).unwrap();
        assert_eq!(Running(child).wait(), 0);
        said
    };
    let once = talk("hello\n");
    for lines in [
        "hello\n/undo\nhello\n",
        "hello\n/new\nhello\n",
        "hello\n/again\n",
        "hello\n/undo\nhello\n/quit\nmore\n",
    ] {
        assert_eq!(talk(lines), [&once[..], &once].concat(), "{lines:?}");
    }
    let helped = String::from_utf8(talk("/help\n")).unwrap();
    assert!(helped.contains("/undo   take back"), "{helped}");
}

#[test]
fn an_answer_of_no_tokens_is_empty() {
    let (_folder, model) = model();
    let mut child = command(&["chat", &model, "--temperature", "0", "--tokens", "0"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"hello\n").unwrap();
    let mut said = String::new();
    child.stdout.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!((Running(child).wait(), said.as_str()), (0, "\n"));
}

#[test]
fn a_line_that_is_no_text_or_too_long_is_told_the_talk_goes_on_and_scripts_see_it_by_the_code() {
    let (_folder, model) = model();
    let mut child = command(&["chat", &model, "--temperature", "0", "--tokens", "5"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let long = "far too much ".repeat(5000);
    let lines = [&b"hel\xfflo"[..], long.as_bytes(), b"hello"].map(|line| [line, b"\n"].concat());
    child.stdin.take().unwrap().write_all(&lines.concat()).unwrap();
    let (mut said, mut told) = (String::new(), String::new());
    child.stdout.take().unwrap().read_to_string(&mut said).unwrap();
    child.stderr.take().unwrap().read_to_string(&mut told).unwrap();
    assert_eq!(Running(child).wait(), 1);
    assert!(said.len() >= 6 && said.lines().count() == 1, "one answer: {said:?}");
    assert!(told.contains("no UTF-8") && told.contains("begin a new talk"), "{told}");
}

#[test]
fn the_benchmark_counts_every_token_and_every_wait() {
    let (_folder, model) = model();
    for rate in [None, Some("200")] {
        let mut arguments =
            vec!["bench", "serve", &model, "--json", "--requests", "6", "--prompt-tokens", "40"];
        arguments.extend(["--new-tokens", "9"]);
        arguments.extend(rate.iter().flat_map(|rate| ["--rate", rate]));
        let output = command(&arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((&report["prompt_tokens"], &report["new_tokens"]), (&json!(240), &json!(54)));
        for spread in ["first_token_ms", "between_tokens_ms"] {
            let [median, late] = ["p50", "p99"].map(|key| report[spread][key].as_f64().unwrap());
            assert!(0.0 < median && median <= late, "{report}");
        }
    }
}

#[test]
fn what_cannot_be_served_is_said_before_anything_listens() {
    let (_folder, model) = model();
    for (arguments, word) in [
        (vec!["serve", "/nowhere"], "/nowhere"),
        (vec!["serve", &model, "--api-key", ""], "--api-key"),
        (vec!["serve", &model, "--cache-mib", "0"], "--cache-mib"),
        (vec!["serve", &model, "--host", "nobody"], "--host"),
        (vec!["serve", &model, "--weights-in", "/dev/null"], "--weights-in: /dev/null is neither"),
        (vec!["bench", "serve", &model, "--prompt-tokens", "4090"], "make texts of 4154 tokens"),
    ] {
        let output = command(&arguments).output().unwrap();
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {told}");
        assert!(told.contains(word), "{arguments:?}: {told}");
    }
}

#[test]
fn the_benchmark_asks_a_server_by_its_address_and_guesses_change_no_answer() {
    let (_folder, model) = model();
    let (_server, address) = serve(&["serve", &model, "--port", "0", "--speculate", "lookup"]);
    let url = format!("http://{address}/v1");
    let arguments = ["bench", "serve", &url, "--json", "--requests", "5", "--prompt-tokens", "40"];
    let output =
        command(&[&arguments[..], &["--new-tokens", "9", "--rate", "100"]].concat()).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["prompt_tokens"], &report["new_tokens"]), (&json!(200), &json!(45)));
    assert_eq!((&report["model"], &report["passes"]), (&json!("tiny"), &Value::Null));
    for spread in ["first_token_ms", "between_tokens_ms"] {
        assert!(report[spread]["p99"].as_f64().unwrap() > 0.0, "{report}");
    }
    // What repeats itself is guessed; the answer is that of a request that wants no guesses.
    let text = "to be";
    let answer = |speculate: bool| {
        let body = json!({
            "prompt": text, "max_tokens": 40, "temperature": 0, "logit_bias": {"97": 100}, "speculate": speculate,
        });
        let reply = ask(&address, "POST", "/v1/completions", &body.to_string());
        serde_json::from_str::<Value>(&reply).unwrap()["choices"][0]["text"].clone()
    };
    assert_eq!(answer(true), answer(false));
    let metrics = ask(&address, "GET", "/metrics", "");
    let accepted =
        metrics.lines().find_map(|line| line.strip_prefix("ferrospeed_guessed_tokens_accepted_total "));
    assert!(accepted.unwrap().parse::<u64>().unwrap() > 0, "{metrics}");
    let wrong = command(&["bench", "serve", "https://localhost"]).output().unwrap();
    assert_eq!(wrong.status.code(), Some(2));
}

#[test]
fn a_gguf_file_is_generated_from_served_and_converted() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tests/gguf/qwen2.gguf");
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().join("converted");
    let directory = directory.to_str().unwrap();
    let converted = command(&["model", "convert", file, directory, "--dtype", "float32"]).output().unwrap();
    assert_eq!(converted.status.code(), Some(0), "{}", String::from_utf8_lossy(&converted.stderr));
    let written = |model: &str| {
        let arguments = ["generate", "--model", model, "--prompt", "the quick", "--tokens", "8"];
        let more = ["--temperature", "0", "--dtype", "float32"];
        let output = command(&[&arguments[..], &more].concat()).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        output.stdout
    };
    assert_eq!(written(file), written(directory));
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let words = ["generate", "--model", file, "--prompt", "the quick", "--tokens", "2"];
    assert_eq!(command(&words).stdout(full).status().unwrap().code(), Some(1), "the text is lost");
    for (arguments, said) in [
        (vec!["model", "inspect", file], "weights: "),
        (vec!["estimate", "--stage", "3", "--model", file], "params"),
        (vec!["profile", file], "72 K"),
    ] {
        let output = command(&arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        let shown = String::from_utf8_lossy(&output.stdout);
        assert!(shown.contains(said), "{arguments:?}: {shown}");
    }
    let recipe = folder.path().join("recipe.toml");
    let text = format!(
        "name = \"g\"\nsteps = 1\nmodel.path = {file:?}\ndata.synthetic = 1000\ndata.sequence = 8\n[ds_config]\ntrain_batch_size = 1\n"
    );
    std::fs::write(&recipe, text).unwrap();
    let refused = command(&["train", recipe.to_str().unwrap()]).output().unwrap();
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("ferrospeed model convert"), "{refused:?}");
    let (_server, address) = serve(&["serve", file, "--port", "0"]);
    let models: Value = serde_json::from_str(&ask(&address, "GET", "/v1/models", "")).unwrap();
    assert_eq!(models["data"][0]["id"], "qwen2");
    let body = json!({"prompt": "the quick", "max_tokens": 4, "temperature": 0}).to_string();
    let reply: Value = serde_json::from_str(&ask(&address, "POST", "/v1/completions", &body)).unwrap();
    assert_eq!(reply["usage"]["completion_tokens"], 4, "{reply}");
}
