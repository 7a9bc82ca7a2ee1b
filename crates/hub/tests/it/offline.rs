//! Without a server: what the cache has, and how to bring what it has not.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::Duration;

use ferrospeed_hub::{Hub, HubOptions, Network, Wanted};

use super::server::{COMMIT, HubServer};
use super::{bring, hub, names};

/// What `transformers` leaves of a model: links to blobs, and no list of ours.
fn brought_by_others(cache: &Path, files: &[&str]) {
    let root = cache.join("models--org--model");
    std::fs::create_dir_all(root.join("refs")).unwrap();
    std::fs::create_dir_all(root.join("blobs")).unwrap();
    std::fs::create_dir_all(root.join("snapshots").join(COMMIT)).unwrap();
    std::fs::write(root.join("refs/main"), COMMIT).unwrap();
    for file in files {
        std::fs::write(root.join("blobs").join(file), file).unwrap();
        symlink(Path::new("../../blobs").join(file), root.join("snapshots").join(COMMIT).join(file)).unwrap();
    }
}

#[test]
fn what_others_have_brought_is_found_without_asking() {
    let (server, place) = (HubServer::start(), tempfile::tempdir().unwrap());
    brought_by_others(place.path(), &["config.json", "tokenizer.json", "model.safetensors"]);
    for network in [Network::Online, Network::Offline] {
        let found = bring(&hub(&server, place.path(), None, network), "org/model", &Wanted::Model).unwrap();
        assert_eq!(found.root, place.path().join("models--org--model/snapshots").join(COMMIT));
        assert_eq!((names(&found).len(), &found.note), (3, &None));
    }
    assert_eq!(server.asked(), []);
}

#[test]
fn what_may_not_be_all_is_used_offline_with_a_note() {
    let (server, place) = (HubServer::start(), tempfile::tempdir().unwrap());
    brought_by_others(place.path(), &["config.json", "model.safetensors"]);
    let found =
        bring(&hub(&server, place.path(), None, Network::Offline), "org/model", &Wanted::Model).unwrap();
    assert!(found.note.unwrap().contains("the server was not asked whether that is all"));
}

#[test]
fn what_is_not_here_says_how_to_bring_it() {
    let (server, place) = (HubServer::start(), tempfile::tempdir().unwrap());
    let said = |hub: &Hub, name: &str, wanted: &Wanted| bring(hub, name, wanted).unwrap_err().to_string();
    let offline = hub(&server, place.path(), None, Network::Offline);
    let text = said(&offline, "org/model@v1", &Wanted::Model);
    for part in
        ["HF_HUB_OFFLINE", "ferrospeed model fetch org/model@v1", "models--org--model", "name a folder"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
    let text = said(&offline, "org/data", &Wanted::Data);
    assert!(
        text.contains("ferrospeed data fetch org/data") && text.contains("datasets--org--data"),
        "{text}"
    );
    assert_eq!(server.asked(), []);
    // A port that nobody listens on.
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let unreachable = Hub::new(HubOptions {
        endpoint: format!("http://{closed}"),
        cache: place.path().to_path_buf(),
        token: None,
        network: Network::Online,
        authorities: None,
        retry_after: Duration::from_millis(1),
        patience: Duration::from_secs(60),
    });
    let text = said(&unreachable.unwrap(), "org/model", &Wanted::Model);
    for part in ["cannot be reached", "HTTPS_PROXY", "HF_ENDPOINT", "ferrospeed model fetch org/model"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn half_of_a_model_is_not_taken_for_a_whole_one() {
    let (server, place) = (HubServer::start(), tempfile::tempdir().unwrap());
    brought_by_others(place.path(), &["config.json", "tokenizer.json"]);
    let offline = hub(&server, place.path(), None, Network::Offline);
    assert!(bring(&offline, "org/model", &Wanted::Model).is_err());
    assert!(bring(&offline, "org/model", &Wanted::Config).is_ok());
}
