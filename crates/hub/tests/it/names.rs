//! Names, and which files they mean.

use std::path::Path;

use ferrospeed_hub::{HubName, Network, RepoKind, Wanted};

use super::server::{COMMIT, HubServer};
use super::{bring, hub, names};

#[test]
fn a_name_is_read_in_every_form_that_people_write() {
    let read = |text: &str| HubName::parse(text, RepoKind::Model).map(|name| name.with_scheme());
    assert_eq!(read("Qwen/Qwen3-0.6B").unwrap(), "hf://Qwen/Qwen3-0.6B");
    assert_eq!(read("Qwen/Qwen3-0.6B@main").unwrap(), "hf://Qwen/Qwen3-0.6B");
    assert_eq!(read("a/b@v1.2").unwrap(), "hf://a/b@v1.2");
    assert_eq!(read("a/b@refs/pr/1").unwrap(), "hf://a/b@refs/pr/1");
    assert_eq!(read("a/b@refs/convert/parquet/x/y").unwrap(), "hf://a/b@refs/convert/parquet/x/y");
    assert_eq!(read("a/b/model.Q4_K_M.gguf").unwrap(), "hf://a/b/model.Q4_K_M.gguf");
    assert_eq!(
        read("hf://datasets/a/b@c/data/train-*.parquet").unwrap(),
        "hf://datasets/a/b@c/data/train-*.parquet"
    );
    for bad in [
        "a",
        "a/",
        "/b",
        "a/b@",
        "a/../b",
        "a/b/../c",
        "a b/c",
        "a--b/c",
        "-a/b",
        ".a/b",
        "a/b@x/../y",
        "hf://datasets/a",
    ] {
        assert!(read(bad).is_err(), "{bad}");
    }
}

#[test]
fn a_folder_of_that_name_wins_and_what_looks_like_a_path_is_one() {
    let meant = |text: &str| HubName::of_model(Path::new(text)).map(|name| name.unwrap().to_string());
    assert_eq!(meant("Qwen/Qwen3-0.6B").as_deref(), Some("Qwen/Qwen3-0.6B"));
    assert_eq!(meant("hf://src/name@v1").as_deref(), Some("src/name@v1"));
    // The folder that it would lie in is here, so that a slip in a name asks nobody.
    for local in ["src/lib.rs", "src/nothing", "./a/b", "../a/b", "/a/b", "a", "a/b/c", "~/a"] {
        assert_eq!(meant(local), None, "{local}");
    }
}

#[test]
fn what_lies_in_the_cache_has_a_name_that_other_machines_know() {
    let named = |path: &str| HubName::of_cached(Path::new(path)).map(|name| name.with_scheme());
    let at = format!("snapshots/{COMMIT}");
    assert_eq!(named(&format!("/c/models--a--b/{at}")), Some(format!("hf://a/b@{COMMIT}")));
    assert_eq!(
        named(&format!("/c/datasets--a--b-c/{at}/data/x.parquet")),
        Some(format!("hf://datasets/a/b-c@{COMMIT}/data/x.parquet"))
    );
    assert_eq!(named("/c/models--a--b/snapshots/main"), None);
    assert_eq!(named("runs/model"), None);
}

#[test]
fn of_data_the_training_split_is_taken_or_what_is_named() {
    let (server, place) = (HubServer::start(), tempfile::tempdir().unwrap());
    for file in [
        "README.md",
        "data/train-0.parquet",
        "data/train-1.parquet",
        "data/test-0.parquet",
        "dataset_infos.json",
    ] {
        server.put("datasets/org/one", file, file);
    }
    for file in ["easy/train.jsonl", "easy/test.jsonl", "hard/train.jsonl", ".gitattributes"] {
        server.put("datasets/org/two", file, file);
    }
    server.put("datasets/org/plain", "chats.jsonl", "x").put("datasets/org/plain", "eval.jsonl", "y");
    server.put("datasets/org/none", "pictures.zip", "x");
    let hub = hub(&server, place.path(), None, Network::Online);
    let chosen = |name: &str| bring(&hub, name, &Wanted::Data).map(|found| names(&found));
    assert_eq!(chosen("org/one").unwrap(), ["data/train-0.parquet", "data/train-1.parquet"]);
    assert_eq!(chosen("org/one/data/*-0.parquet").unwrap(), ["data/test-0.parquet", "data/train-0.parquet"]);
    assert_eq!(chosen("org/two/hard").unwrap(), ["hard/train.jsonl"]);
    assert_eq!(chosen("org/plain").unwrap(), ["chats.jsonl"]);
    let said = |name: &str| chosen(name).unwrap_err().to_string();
    assert!(
        said("org/two").contains("several folders") && said("org/two").contains("easy, hard"),
        "{}",
        said("org/two")
    );
    assert!(said("org/none").contains("no data that is read") && said("org/none").contains("pictures.zip"));
    assert!(said("org/one/data/nothing.parquet").contains("holds no file 'data/nothing.parquet'"));
}

#[test]
fn a_repository_without_weights_that_are_read_says_what_it_has() {
    let (server, place) = (HubServer::start(), tempfile::tempdir().unwrap());
    server.put("models/org/gguf", "m-Q4_K_M.gguf", "x").put("models/org/gguf", "config.json", "{}");
    server.put("models/org/original", "consolidated.00.pth", "x").put(
        "models/org/original",
        "config.json",
        "{}",
    );
    server.put("models/org/torch", "pytorch_model.bin", "x").put("models/org/torch", "config.json", "{}");
    let hub = hub(&server, place.path(), None, Network::Online);
    let said = bring(&hub, "org/gguf", &Wanted::Model).unwrap_err().to_string();
    assert!(said.contains("org/name/FILE.gguf") && said.contains("m-Q4_K_M.gguf"), "{said}");
    let said = bring(&hub, "org/original", &Wanted::Model).unwrap_err().to_string();
    assert!(said.contains("no weights that are read") && said.contains("consolidated.00.pth"), "{said}");
    let found = bring(&hub, "org/torch", &Wanted::Model).unwrap();
    assert_eq!(names(&found), ["config.json", "pytorch_model.bin"]);
    let found = bring(&hub, "org/gguf/m-Q4_K_M.gguf", &Wanted::Model).unwrap();
    assert_eq!(names(&found), ["m-Q4_K_M.gguf"]);
}
