//! What `hub` promises, a module per topic: a new test goes into the file of its topic, a new topic gets a line here.
//!
//! They run in the executable of `cli`'s tests.

mod downloads;
mod names;
mod offline;
mod refusals;
pub(crate) mod server;
mod waits;

use std::ops::ControlFlow;
use std::path::Path;
use std::time::Duration;

use ferrospeed_hub::{Hub, HubError, HubName, HubOptions, Network, RepoKind, Snapshot, Wanted};
use server::HubServer;

/// The Hub with a cache in this folder.
fn hub(server: &HubServer, cache: &Path, token: Option<&str>, network: Network) -> Hub {
    Hub::new(options(server, cache, token, network)).unwrap()
}

fn options(server: &HubServer, cache: &Path, token: Option<&str>, network: Network) -> HubOptions {
    HubOptions {
        endpoint: server.address().to_owned(),
        cache: cache.to_path_buf(),
        token: token.map(str::to_owned),
        network,
        authorities: None,
        retry_after: Duration::from_millis(1),
        patience: Duration::from_secs(60),
    }
}

fn bring(hub: &Hub, name: &str, wanted: &Wanted) -> Result<Snapshot, HubError> {
    let kind = if *wanted == Wanted::Data { RepoKind::Dataset } else { RepoKind::Model };
    hub.bring(&HubName::parse(name, kind)?, wanted, &mut |_| ControlFlow::Continue(()))
}

/// The names of the files of a snapshot.
fn names(snapshot: &Snapshot) -> Vec<String> {
    let name =
        |file: &std::path::PathBuf| file.strip_prefix(&snapshot.root).unwrap().to_str().unwrap().to_owned();
    snapshot.files.iter().map(name).collect()
}

/// A repository with a model in two shards, whose second file is large.
fn with_model() -> (HubServer, Vec<u8>) {
    let server = HubServer::start();
    let large: Vec<u8> = (0..300_000_u32).flat_map(u32::to_le_bytes).collect();
    let index = br#"{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}"#;
    server
        .put("models/org/model", "config.json", "{}")
        .put("models/org/model", "tokenizer.json", "{\"a\": 1}")
        .put("models/org/model", "model.safetensors.index.json", index.as_slice())
        .put("models/org/model", "model-00001-of-00002.safetensors", "small")
        .put("models/org/model", "model-00002-of-00002.safetensors", large.clone())
        .put("models/org/model", "pytorch_model.bin", "not this")
        .put("models/org/model", "onnx/model.onnx", "nor this")
        .put("models/org/model", "README.md", "nor this");
    (server, large)
}
