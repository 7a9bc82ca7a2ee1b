//! What is refused, and that it is refused at once.

use std::fs::OpenOptions;
use std::io::ErrorKind;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::sync::mpsc;
use std::time::Duration;

use nix::sys::stat::Mode;
use nix::unistd::mkfifo;

use ferrospeed_files::{open, open_with, read, read_text, write};

const DEADLINE: Duration = Duration::from_secs(20);

/// What `act` gives, or a failed test when it waits.
fn in_time<T: Send + 'static>(act: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || sender.send(act()));
    receiver.recv_timeout(DEADLINE).expect("it waits instead of refusing")
}

#[test]
fn pipes_devices_and_sockets_are_refused_at_once_also_through_links() {
    let folder = tempfile::tempdir().unwrap();
    let (pipe, socket, link) =
        (folder.path().join("pipe"), folder.path().join("socket"), folder.path().join("link"));
    mkfifo(&pipe, Mode::S_IRWXU).unwrap();
    let _listener = UnixListener::bind(&socket).unwrap();
    symlink(&pipe, &link).unwrap();
    for path in [pipe.clone(), link, socket, "/dev/zero".into(), "/dev/null".into()] {
        let message = in_time(move || read(path, 1 << 20)).unwrap_err().to_string();
        assert!(message.starts_with("is no plain file but "), "{message}");
    }
    let there = pipe.clone();
    let written = in_time(move || open_with(there, OpenOptions::new().append(true), 0));
    assert!(written.unwrap_err().to_string().starts_with("is no plain file but "));
    let written = in_time(move || write(pipe, "text"));
    assert!(written.unwrap_err().to_string().starts_with("is no plain file but "));
    let file = folder.path().join("file");
    for text in ["long before", "short"] {
        write(&file, text).unwrap();
        assert_eq!(read_text(&file, 100).unwrap(), text);
    }
}

#[test]
fn a_folder_is_named_as_such() {
    assert_eq!(open("/").unwrap_err().kind(), ErrorKind::IsADirectory);
    assert_eq!(open("/no/such/file").unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn no_more_is_read_than_was_allowed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    std::fs::write(&path, [0xff; 10]).unwrap();
    assert_eq!(read(&path, 10).unwrap(), [0xff; 10]);
    assert_eq!(read(&path, 9).unwrap_err().kind(), ErrorKind::FileTooLarge);
    assert!(read_text(&path, 10).unwrap_err().to_string().contains("is not UTF-8 text: see byte 0"));
    // It claims to be empty.
    assert!(!read("/proc/self/status", 1 << 20).unwrap().is_empty());
    assert!(read("/proc/self/status", 10).is_err());
}

#[test]
fn links_to_plain_files_are_followed() {
    let folder = tempfile::tempdir().unwrap();
    let (path, link) = (folder.path().join("file"), folder.path().join("link"));
    std::fs::write(&path, "text").unwrap();
    symlink(&path, &link).unwrap();
    assert_eq!(read_text(&link, 100).unwrap(), "text");
}

#[test]
fn what_is_written_takes_a_files_place_whole_and_keeps_links_and_rights() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    std::fs::write(at("own"), "old").unwrap();
    std::fs::set_permissions(at("own"), std::fs::Permissions::from_mode(0o640)).unwrap();
    // Whoever has it open reads what it was, to the end.
    let mut reader = open(at("own")).unwrap();
    std::os::unix::fs::symlink("own", at("link")).unwrap();
    std::os::unix::fs::symlink("new", at("ahead")).unwrap();
    write(at("link"), "longer than before").unwrap();
    write(at("ahead"), "there").unwrap();
    let mut old = String::new();
    std::io::Read::read_to_string(&mut reader, &mut old).unwrap();
    assert_eq!(old, "old");
    assert_eq!(read_text(at("own"), 99).unwrap(), "longer than before");
    assert_eq!(read_text(at("new"), 99).unwrap(), "there");
    assert!(at("link").is_symlink() && at("ahead").is_symlink());
    assert_eq!(std::fs::metadata(at("own")).unwrap().permissions().mode() & 0o777, 0o640);
    let threads: Vec<_> = (0..8)
        .map(|number| {
            let path = at("own");
            std::thread::spawn(move || write(path, number.to_string().repeat(1 << 16)).unwrap())
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    let last = read_text(at("own"), 1 << 16).unwrap();
    assert!(last.len() == 1 << 16 && last.bytes().all(|byte| byte == last.as_bytes()[0]), "a mixture");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 4, "something is left beside it");
}

#[test]
fn nothing_is_written_through_a_link_of_somebody_else() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    std::fs::write(at("precious"), "mine").unwrap();
    // The last link of a chain counts as the first does.
    symlink("precious", at("theirs")).unwrap();
    symlink("theirs", at("own")).unwrap();
    let append = || std::fs::File::options().append(true).create(true).clone();
    let log = || ferrospeed_files::open_to_write(at("own"), &append());
    std::io::Write::write_all(&mut log().unwrap(), b", still").unwrap();
    assert_eq!(read_text(at("precious"), 99).unwrap(), "mine, still");
    let other = nix::unistd::Uid::from_raw(12_345);
    let flags = nix::fcntl::AtFlags::AT_SYMLINK_NOFOLLOW;
    if nix::unistd::fchownat(nix::fcntl::AT_FDCWD, &at("theirs"), Some(other), None, flags).is_err() {
        return ferrospeed_testkit::skip::skip("only root makes links that are another user's");
    }
    for refused in [write(at("own"), "x"), write(at("theirs"), "x"), log().map(drop)] {
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains("is a link that user 12345 made"), "{refused}");
    }
    assert_eq!(read_text(at("own"), 99).unwrap(), "mine, still", "whoever reads it follows");
    // Nor where nothing is yet.
    symlink("nothing", at("ahead")).unwrap();
    nix::unistd::fchownat(nix::fcntl::AT_FDCWD, &at("ahead"), Some(other), None, flags).unwrap();
    assert!(write(at("ahead"), "x").is_err() && !at("nothing").exists());
    // On the way, it matters where the link lies: anybody can have put it where everyone may write.
    std::fs::create_dir(at("target")).unwrap();
    std::fs::create_dir(at("common")).unwrap();
    symlink("../target", at("common/way")).unwrap();
    symlink("common/way/", at("mine")).unwrap();
    nix::unistd::fchownat(nix::fcntl::AT_FDCWD, &at("common/way"), Some(other), None, flags).unwrap();
    let below = ["common/way/deep/x", "common/way/x", "mine/x"];
    for (mode, owner, is_followed) in [(0o755, 0, true), (0o777, 0, false), (0o777, 12_345, true)] {
        std::fs::set_permissions(at("common"), std::fs::Permissions::from_mode(mode)).unwrap();
        std::os::unix::fs::chown(at("common"), Some(owner), None).unwrap();
        for name in below {
            let folder = at(name).parent().unwrap().to_path_buf();
            let written = ferrospeed_files::create_folder(&folder).and_then(|()| write(at(name), "x"));
            let is_last = folder.ends_with("way") || folder.ends_with("mine");
            assert_eq!(
                written.is_ok(),
                is_followed && !is_last,
                "{name}, mode {mode:o}, of {owner}: {written:?}"
            );
        }
        assert_eq!(at("target/deep/x").exists(), is_followed);
        let _ = std::fs::remove_dir_all(at("target/deep"));
    }
    assert!(write(at("common/way/x"), "x").is_ok(), "the folder was somebody's choice, the file is in it");
    symlink("circle", at("circle")).unwrap();
    assert_eq!(write(at("circle"), "x").unwrap_err().raw_os_error(), Some(nix::libc::ELOOP));
}

#[test]
fn what_a_killed_writer_left_goes_with_the_next() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    // No process can have the number.
    std::fs::write(at(".run.json.partial-4194999-1f"), "half").unwrap();
    std::fs::write(at(".other.json.partial-4194999-1f"), "half").unwrap();
    write(at("run.json"), "whole").unwrap();
    assert!(!at(".run.json.partial-4194999-1f").exists() && at(".other.json.partial-4194999-1f").exists());
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
}
