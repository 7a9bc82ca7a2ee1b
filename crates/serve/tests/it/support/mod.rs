//! Tiny random models, a real server around them, and an HTTP client of a few lines.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ferrospeed_models::directory::{WriteOptions, create};
use ferrospeed_serve::core::schedule::Limits;
use ferrospeed_serve::engine::Engine;
use ferrospeed_serve::model::{ModelFacts, OpenOptions, open};
use ferrospeed_serve::runner::Runner;
use ferrospeed_serve::server::{Server, ServerOptions};
use ferrospeed_tensor::Device;
use serde_json::{Value, json};
use tempfile::TempDir;

pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn families() -> Vec<Value> {
    let shared = |more: Value| {
        let mut config = json!({
            "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
            "intermediate_size": 48, "max_position_embeddings": 4096, "initializer_range": 0.3,
        });
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        config
    };
    vec![
        shared(json!({"model_type": "llama", "num_key_value_heads": 2})),
        json!({"model_type": "gpt2", "vocab_size": 256, "n_embd": 32, "n_layer": 2, "n_head": 4,
               "n_positions": 512, "initializer_range": 0.3}),
        shared(json!({"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 7})),
        shared(json!({"model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 4,
                      "num_experts_per_tok": 2, "sliding_window": null})),
        json!({"model_type": "bloom", "vocab_size": 256, "hidden_size": 32, "n_layer": 2, "n_head": 4,
               "initializer_range": 0.3}),
    ]
}

/// Models with layers in linear time, which keep something of every text.
pub(crate) fn linear_families() -> Vec<Value> {
    let shared = |more: Value| {
        let mut config = json!({
            "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 8, "max_position_embeddings": 4096, "initializer_range": 0.3, "linear_conv_kernel_dim": 3,
            "linear_key_head_dim": 6, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        });
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        config
    };
    vec![
        shared(json!({"model_type": "qwen3_5_text", "intermediate_size": 48})),
        shared(
            json!({"model_type": "qwen3_next", "intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2,
                      "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}),
        ),
    ]
}

/// A directory with a model of 256 tokens, which reads bytes.
pub(crate) fn model(config: &Value) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    create(&folder.path().join("tiny"), config, 3, &WriteOptions::default()).unwrap();
    folder
}

pub(crate) const LIMITS: Limits =
    Limits { pass_tokens: 64, running: 16, waiting: 64, sequence_tokens: usize::MAX };

/// The CPU, or the first GPU with `FERROSPEED_TEST_DEVICE=cuda` in the environment.
pub(crate) fn device() -> Device {
    match std::env::var("FERROSPEED_TEST_DEVICE").as_deref() {
        Ok("cuda") => {
            ferrospeed_cuda::device(0, &ferrospeed_cpu::device()).unwrap_or_else(|error| panic!("{error}"))
        }
        _ => ferrospeed_cpu::device(),
    }
}

pub(crate) fn opened(folder: &TempDir, blocks: u64) -> (Arc<ModelFacts>, Runner, u32) {
    opened_on(folder, blocks, &ferrospeed_cpu::device())
}

pub(crate) fn opened_on(folder: &TempDir, blocks: u64, device: &Device) -> (Arc<ModelFacts>, Runner, u32) {
    let options = OpenOptions { cache_bytes: u64::MAX, running: 1, ..OpenOptions::default() };
    let path = folder.path().join("tiny");
    // A cache of so many blocks: what one takes is told when it does not fit.
    let probe = open(&path, &OpenOptions { cache_bytes: 1, ..options.clone() }, device);
    let Err(ferrospeed_serve::ServeError::CacheTooSmall { block_bytes, .. }) = probe else { unreachable!() };
    let options = OpenOptions { cache_bytes: block_bytes * blocks, running: 1000, ..options };
    open(&path, &options, device).unwrap()
}

pub(crate) fn engine(folder: &TempDir, blocks: u64, limits: Limits) -> Engine {
    let (facts, runner, blocks) = opened(folder, blocks);
    Engine::start(facts, runner, blocks, limits).unwrap()
}

pub(crate) fn write(folder: &TempDir, name: &str, text: &str) {
    std::fs::write(Path::join(&folder.path().join("tiny"), name), text).unwrap();
}

/// A server on loopback; dropping it stops it and waits for its end.
pub(crate) struct Running {
    pub(crate) address: SocketAddr,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Running {
    pub(crate) fn start(engine: Engine, options: ServerOptions) -> Running {
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let (tell, told) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
            runtime.block_on(async {
                let server = Server::bind("127.0.0.1:0".parse().unwrap(), engine, options).await.unwrap();
                tell.send(server.address()).unwrap();
                server
                    .run(async {
                        let _ = stopped.await;
                    })
                    .await;
            });
        });
        Running { address: told.recv_timeout(PATIENCE).unwrap(), stop: Some(stop), thread: Some(thread) }
    }

    /// Tells it to stop, without waiting.
    pub(crate) fn ask_to_stop(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
    }

    pub(crate) fn is_over(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    pub(crate) fn get(&self, path: &str) -> Reply {
        exchange(self.address, &format!("GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n"), b"").read_all()
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> Reply {
        self.post_stream(path, body).read_all()
    }

    pub(crate) fn post_stream(&self, path: &str, body: &Value) -> Exchange {
        let body = body.to_string();
        exchange(self.address, &head(path, "Host: localhost\r\n", body.len()), body.as_bytes())
    }

    /// One number of `/metrics`.
    pub(crate) fn metric(&self, name: &str) -> u64 {
        let text = self.get("/metrics").body;
        let line = text.lines().find(|line| line.split(' ').next() == Some(&format!("ferrospeed_{name}")));
        line.unwrap_or_else(|| panic!("{name} is not in {text}")).split(' ').nth(1).unwrap().parse().unwrap()
    }

    /// Waits until a number of `/metrics` is what it should be.
    pub(crate) fn wait_for(&self, name: &str, value: u64) {
        wait(&format!("{name} to be {value}"), || self.metric(name) == value);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.ask_to_stop();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Looks until something is so, for a while.
pub(crate) fn wait(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < end, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

pub(crate) fn head(path: &str, headers: &str, length: usize) -> String {
    format!(
        "POST {path} HTTP/1.0\r\n{headers}Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    )
}

/// A request that was sent and whose answer is being read. Dropping it hangs up.
pub(crate) struct Exchange(BufReader<TcpStream>);

pub(crate) fn exchange(address: SocketAddr, head: &str, body: &[u8]) -> Exchange {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(head.as_bytes()).unwrap();
    // A server that refuses by the head alone may have hung up.
    let _ = stream.write_all(body);
    Exchange(BufReader::new(stream))
}

#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: String,
}

impl Reply {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// The pieces of a stream, without its last word.
    pub(crate) fn pieces(&self) -> Vec<Value> {
        assert_eq!(self.status, 200, "{self:?}");
        let mut lines: Vec<&str> = self.body.lines().filter(|line| !line.is_empty()).collect();
        assert_eq!(lines.pop(), Some("data: [DONE]"), "{self:?}");
        lines.iter().map(|line| serde_json::from_str(line.strip_prefix("data: ").unwrap()).unwrap()).collect()
    }
}

impl Exchange {
    pub(crate) fn reader(&mut self) -> &mut impl Read {
        &mut self.0
    }

    pub(crate) fn line(&mut self) -> String {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        line
    }

    /// Reads until a line holds `word`.
    pub(crate) fn read_until(&mut self, word: &str) {
        loop {
            let line = self.line();
            assert!(!line.is_empty(), "the stream ended before '{word}'");
            if line.contains(word) {
                return;
            }
        }
    }

    pub(crate) fn read_all(mut self) -> Reply {
        let mut bytes = Vec::new();
        self.0.read_to_end(&mut bytes).unwrap();
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {text:?}"));
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        Reply { status, head: head.to_owned(), body: body.to_owned() }
    }
}
