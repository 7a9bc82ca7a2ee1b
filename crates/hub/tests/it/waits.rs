//! Waits: whoever listens hears of each and may end it, and each has an end of its own; and what a cache has is looked at again.

use std::fs::File;
use std::ops::ControlFlow;
use std::path::Path;
use std::time::Duration;

use ferrospeed_hub::{Hub, HubError, HubName, HubOptions, Network, Phase, RepoKind, Wanted};

use super::server::{Fault, HubServer, ListFault, git_hash, sha256};
use super::{bring, hub, options, with_model};

const LARGE: &str = "model-00002-of-00002.safetensors";

/// One that waits no longer than this.
fn hasty(server: &HubServer, cache: &Path, patience: Duration) -> Hub {
    Hub::new(HubOptions { patience, ..options(server, cache, None, Network::Online) }).unwrap()
}

fn model() -> HubName {
    HubName::parse("org/model", RepoKind::Model).unwrap()
}

#[test]
fn who_listens_can_end_the_wait_for_a_server_that_does_not_answer() {
    let ((server, _), place) = (with_model(), tempfile::tempdir().unwrap());
    server.list_fault(ListFault::Hang);
    let patient = hub(&server, place.path(), None, Network::Online);
    let mut heard = Vec::new();
    let stopped = patient.bring(&model(), &Wanted::Model, &mut |progress| {
        heard.push((progress.file.to_owned(), progress.phase));
        ControlFlow::Break(())
    });
    assert!(matches!(stopped, Err(HubError::Stopped { .. })), "{stopped:?}");
    assert!(
        matches!(&heard[..], [(file, Phase::Silent { limit, .. })] if file == "the list of its files" && limit.as_secs() == 60),
        "{heard:?}"
    );
}

#[test]
fn a_server_that_does_not_answer_is_given_up() {
    let ((server, _), place) = (with_model(), tempfile::tempdir().unwrap());
    server.list_fault(ListFault::Hang);
    let error = bring(&hasty(&server, place.path(), Duration::from_secs(1)), "org/model", &Wanted::Model);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("it has not answered http://") && error.contains("in 1s"), "{error}");
    assert_eq!(server.asked().len(), 1, "it was asked once, and waited for");
}

#[test]
fn what_will_not_be_another_answer_in_a_second_is_asked_for_once() {
    for (fault, requests, why) in [
        (ListFault::Circle, 8, "leads on and on (8 redirects)"),
        (ListFault::NoHttp, 1, "cannot be reached: "),
    ] {
        let ((server, _), place) = (with_model(), tempfile::tempdir().unwrap());
        server.list_fault(fault);
        let online = hub(&server, place.path(), None, Network::Online);
        let error = bring(&online, "org/model", &Wanted::Model).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
        assert_eq!(server.asked().len(), requests, "{fault:?}: {error}");
    }
}

#[test]
fn bytes_that_come_one_by_one_are_given_up_and_kept() {
    let ((server, large), place) = (with_model(), tempfile::tempdir().unwrap());
    server.faults([Fault::None; 4].into_iter().chain([Fault::Drip; 20]));
    let error = bring(&hasty(&server, place.path(), Duration::from_secs(3)), "org/model", &Wanted::Model);
    let error = error.unwrap_err();
    let HubError::CutOff { file, bytes, why, .. } = &error else { panic!("{error}") };
    assert!(file == LARGE && *bytes > 0 && why.contains("fewer than 64 KiB of it came in 1s"), "{error}");
    server.faults([]);
    let found =
        bring(&hub(&server, place.path(), None, Network::Online), "org/model", &Wanted::Model).unwrap();
    assert_eq!(std::fs::read(found.root.join(LARGE)).unwrap(), large);
}

#[test]
fn a_process_that_has_a_file_and_brings_nothing_is_named() {
    let ((server, _), place) = (with_model(), tempfile::tempdir().unwrap());
    let locks = place.path().join(".locks/models--org--model");
    std::fs::create_dir_all(&locks).unwrap();
    let path = locks.join(format!("{}.lock", git_hash(b"{}")));
    let lock = File::create(&path).unwrap();
    lock.lock().unwrap();
    let mut named = Vec::new();
    let waited = hasty(&server, place.path(), Duration::from_secs(1)).bring(
        &model(),
        &Wanted::Config,
        &mut |progress| {
            if let Phase::Waiting { process } = progress.phase {
                named.extend(process);
            }
            ControlFlow::Continue(())
        },
    );
    let error = waited.unwrap_err();
    let own = std::process::id();
    assert!(matches!(&error, HubError::Occupied { file, .. } if file == "config.json"), "{error}");
    let said = error.to_string();
    assert!(said.contains(&format!("process {own} has had the lock")), "{said}");
    assert!(said.contains(path.to_str().unwrap()), "{said}");
    assert!(named.iter().all(|process| *process == own) && !named.is_empty(), "{named:?}");
    drop(lock);
    bring(&hub(&server, place.path(), None, Network::Online), "org/model", &Wanted::Config).unwrap();
}

#[test]
fn a_file_that_was_cut_in_the_cache_is_brought_again() {
    let ((server, large), place) = (with_model(), tempfile::tempdir().unwrap());
    let online = hub(&server, place.path(), None, Network::Online);
    let found = bring(&online, "org/model", &Wanted::Model).unwrap();
    let blob = place.path().join("models--org--model/blobs").join(sha256(&large));
    for asks_anew in [true, false] {
        File::options().write(true).open(&blob).unwrap().set_len(1000).unwrap();
        server.asked();
        let again = match asks_anew {
            true => online.refresh(&model(), &Wanted::Model, &mut |_| ControlFlow::Continue(())).unwrap(),
            false => bring(&online, "org/model", &Wanted::Model).unwrap(),
        };
        assert_eq!(again, found);
        assert_eq!(std::fs::read(found.root.join(LARGE)).unwrap(), large);
        assert_eq!(server.asked().iter().filter(|asked| asked.of_bytes).count(), 1, "the others are whole");
    }
    // Where a file system has no links, the bytes lie under the name itself.
    let place = found.root.join("config.json");
    std::fs::remove_file(&place).unwrap();
    std::fs::write(&place, "{").unwrap();
    bring(&online, "org/model", &Wanted::Model).unwrap();
    assert_eq!(std::fs::read_to_string(place).unwrap(), "{}");
}

#[test]
fn sizes_whose_sum_is_no_number_are_more_than_there_is_room_for() {
    let ((server, _), place) = (with_model(), tempfile::tempdir().unwrap());
    server.says_size((1 << 63) + 5);
    let error = bring(&hub(&server, place.path(), None, Network::Online), "org/model", &Wanted::Model);
    assert!(matches!(&error, Err(HubError::NoRoom { needed: u64::MAX, .. })), "{error:?}");
}
