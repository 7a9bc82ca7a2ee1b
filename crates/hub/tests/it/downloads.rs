//! Files on their way: whole, once, and what the list says.

use std::ops::ControlFlow;

use ferrospeed_hub::{HubError, HubName, Network, Phase, RepoKind, Wanted};

use super::server::{Asked, COMMIT, Fault, HubServer, git_hash, sha256};
use super::{bring, hub, names, with_model};

const LARGE: &str = "model-00002-of-00002.safetensors";

fn of_bytes(asked: &[Asked]) -> Vec<&Asked> {
    asked.iter().filter(|asked| asked.of_bytes).collect()
}

#[test]
fn a_model_lies_as_hugging_face_lays_it_out_and_is_found_again_without_the_server() {
    let ((server, large), place) = (with_model(), tempfile::tempdir().unwrap());
    let found =
        bring(&hub(&server, place.path(), None, Network::Online), "org/model", &Wanted::Model).unwrap();
    let repository = place.path().join("models--org--model");
    assert_eq!(found.root, repository.join("snapshots").join(COMMIT));
    assert_eq!(
        names(&found),
        [
            "config.json",
            "model-00001-of-00002.safetensors",
            LARGE,
            "model.safetensors.index.json",
            "tokenizer.json"
        ]
    );
    assert_eq!(std::fs::read(found.root.join(LARGE)).unwrap(), large);
    assert_eq!(std::fs::read_to_string(repository.join("refs/main")).unwrap(), COMMIT);
    let link = std::fs::read_link(found.root.join(LARGE)).unwrap();
    assert_eq!(link.to_str().unwrap(), format!("../../blobs/{}", sha256(&large)));
    assert!(repository.join("blobs").join(git_hash(b"{}")).is_file());
    server.asked();
    for network in [Network::Online, Network::Offline] {
        let again = bring(&hub(&server, place.path(), None, network), "org/model", &Wanted::Model).unwrap();
        assert_eq!(again, found);
    }
    assert_eq!(server.asked(), []);
    // What is asked for anew comes anew, but for the bytes that are here.
    let name = HubName::parse("org/model", RepoKind::Model).unwrap();
    let online = hub(&server, place.path(), None, Network::Online);
    online.refresh(&name, &Wanted::Model, &mut |_| ControlFlow::Continue(())).unwrap();
    let asked = server.asked();
    assert!(
        asked.len() == 1 && asked[0].path.starts_with("/api/models/org/model/revision/main"),
        "{asked:?}"
    );
}

#[test]
fn a_broken_connection_is_gone_on_with_from_where_it_broke() {
    let ((server, large), place) = (with_model(), tempfile::tempdir().unwrap());
    // The first answers are of the three small files; then the large one breaks off twice.
    let faults = [
        Fault::None,
        Fault::None,
        Fault::None,
        Fault::None,
        Fault::CutAfter(400_000),
        Fault::CutAfter(500_000),
    ];
    server.faults(faults);
    let found =
        bring(&hub(&server, place.path(), None, Network::Online), "org/model", &Wanted::Model).unwrap();
    assert_eq!(std::fs::read(found.root.join(LARGE)).unwrap(), large);
    let asked = server.asked();
    let ranges: Vec<Option<&str>> = of_bytes(&asked).iter().map(|asked| asked.range.as_deref()).collect();
    assert_eq!(ranges, [None, Some("bytes=400000-"), Some("bytes=900000-")]);
}

#[test]
fn what_a_killed_process_left_is_gone_on_with() {
    let ((server, large), place) = (with_model(), tempfile::tempdir().unwrap());
    let blobs = place.path().join("models--org--model/blobs");
    std::fs::create_dir_all(&blobs).unwrap();
    let left = blobs.join(format!("{}.incomplete", sha256(&large)));
    std::fs::write(&left, &large[..700_000]).unwrap();
    let online = hub(&server, place.path(), None, Network::Online);
    let found = bring(&online, "org/model", &Wanted::Model).unwrap();
    assert_eq!(std::fs::read(found.root.join(LARGE)).unwrap(), large);
    assert_eq!(of_bytes(&server.asked())[0].range.as_deref(), Some("bytes=700000-"));
    assert!(!left.exists());
}

#[test]
fn what_was_left_and_is_something_else_is_replaced() {
    let ((server, large), place) = (with_model(), tempfile::tempdir().unwrap());
    let blobs = place.path().join("models--org--model/blobs");
    std::fs::create_dir_all(&blobs).unwrap();
    std::fs::write(blobs.join(format!("{}.incomplete", sha256(&large))), vec![7; 700_000]).unwrap();
    let found =
        bring(&hub(&server, place.path(), None, Network::Online), "org/model", &Wanted::Model).unwrap();
    assert_eq!(std::fs::read(found.root.join(LARGE)).unwrap(), large);
}

#[test]
fn a_server_that_cannot_go_on_in_the_middle_sends_the_whole_again() {
    let ((server, large), place) = (with_model(), tempfile::tempdir().unwrap());
    server.faults([
        Fault::None,
        Fault::None,
        Fault::None,
        Fault::None,
        Fault::CutAfter(400_000),
        Fault::NoRange,
    ]);
    let found =
        bring(&hub(&server, place.path(), None, Network::Online), "org/model", &Wanted::Model).unwrap();
    assert_eq!(std::fs::read(found.root.join(LARGE)).unwrap(), large);
}

#[test]
fn bytes_that_differ_from_the_list_are_refused_and_not_kept() {
    let ((server, large), place) = (with_model(), tempfile::tempdir().unwrap());
    let online = hub(&server, place.path(), None, Network::Online);
    let blob = place.path().join("models--org--model/blobs").join(sha256(&large));
    server.faults([Fault::None, Fault::None, Fault::None, Fault::None, Fault::Flip]);
    let error = bring(&online, "org/model", &Wanted::Model).unwrap_err();
    assert!(
        matches!(&error, HubError::Damaged { file, why, .. } if file == LARGE && why.contains("its hash is")),
        "{error}"
    );
    assert!(!blob.exists() && !blob.with_extension("incomplete").exists());
    server.faults([Fault::Longer]);
    let error = bring(&online, "org/model", &Wanted::Model).unwrap_err();
    assert!(error.to_string().contains("the server sends 1200001 bytes, not 1200000"), "{error}");
    assert!(!blob.exists());
    // A small file has git's hash.
    let place = tempfile::tempdir().unwrap();
    server.faults([Fault::Flip]);
    let error =
        bring(&hub(&server, place.path(), None, Network::Online), "org/model", &Wanted::Model).unwrap_err();
    assert!(matches!(error, HubError::Damaged { .. }), "{error}");
}

#[test]
fn a_server_that_is_busy_is_asked_again_and_one_that_stays_so_is_told_of() {
    let ((server, _), place) = (with_model(), tempfile::tempdir().unwrap());
    let online = hub(&server, place.path(), None, Network::Online);
    server.faults([Fault::Busy, Fault::Busy]);
    bring(&online, "org/model", &Wanted::Config).unwrap();
    server.faults([Fault::None, Fault::None, Fault::None].into_iter().chain([Fault::CutAfter(10); 20]));
    let error = bring(&online, "org/model", &Wanted::Model).unwrap_err();
    let HubError::CutOff { file, bytes, .. } = &error else { panic!("{error}") };
    assert_eq!((file.as_str(), *bytes), (LARGE, 50), "{error}");
    assert!(error.to_string().contains("goes on from there"), "{error}");
}

#[test]
fn a_mirror_whose_list_has_no_hashes_is_asked_for_each_file() {
    let ((server, large), place) = (with_model(), tempfile::tempdir().unwrap());
    server.without_hashes();
    let found =
        bring(&hub(&server, place.path(), None, Network::Online), "org/model", &Wanted::Model).unwrap();
    assert_eq!(std::fs::read(found.root.join(LARGE)).unwrap(), large);
    assert!(place.path().join("models--org--model/blobs").join(sha256(&large)).is_file());
}

#[test]
fn of_several_that_want_it_one_downloads() {
    let ((server, large), place) = (with_model(), tempfile::tempdir().unwrap());
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let own = hub(&server, place.path(), None, Network::Online);
                let found = bring(&own, "org/model", &Wanted::Model).unwrap();
                assert_eq!(std::fs::read(found.root.join(LARGE)).unwrap(), large);
            });
        }
    });
    assert_eq!(of_bytes(&server.asked()).len(), 1);
}

#[test]
fn who_listens_can_end_it_and_the_next_goes_on() {
    let ((server, large), place) = (with_model(), tempfile::tempdir().unwrap());
    let online = hub(&server, place.path(), None, Network::Online);
    let name = HubName::parse("org/model", RepoKind::Model).unwrap();
    let mut most = 0;
    let stopped = online.bring(&name, &Wanted::Model, &mut |progress| {
        assert_eq!(progress.repository, "org/model");
        assert!(!matches!(progress.phase, Phase::Waiting { .. }), "nobody else downloads it");
        assert!(progress.bytes <= progress.total_bytes && progress.bytes >= most);
        most = progress.bytes;
        if progress.bytes > 600_000 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    assert!(matches!(stopped, Err(HubError::Stopped { .. })), "{stopped:?}");
    server.asked();
    let found = bring(&online, "org/model", &Wanted::Model).unwrap();
    assert_eq!(std::fs::read(found.root.join(LARGE)).unwrap(), large);
    let asked = server.asked();
    let range = of_bytes(&asked)[0].range.as_deref().unwrap();
    assert!(range.strip_prefix("bytes=").unwrap().trim_end_matches('-').parse::<u64>().unwrap() > 500_000);
}

#[test]
fn a_revision_is_a_branch_a_tag_a_commit_or_a_reference() {
    let (server, place) = (HubServer::start(), tempfile::tempdir().unwrap());
    server.put("models/org/m", "config.json", "{}");
    let online = hub(&server, place.path(), None, Network::Online);
    for revision in ["v1", COMMIT, "refs/pr/1"] {
        let found = bring(&online, &format!("org/m@{revision}"), &Wanted::Config).unwrap();
        assert!(found.root.ends_with(COMMIT));
    }
    let refs = place.path().join("models--org--m/refs");
    assert!(refs.join("v1").is_file() && refs.join("refs/pr/1").is_file() && !refs.join(COMMIT).exists());
    let error = bring(&online, "org/m@v9", &Wanted::Config).unwrap_err().to_string();
    assert!(error.contains("has no branch, tag or commit 'v9'"), "{error}");
}
