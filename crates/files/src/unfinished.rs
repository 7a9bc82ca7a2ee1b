//! What is being made lies beside its place under a name of its own, and gets its name when it is complete.
//!
//! The name is one that no other process uses, and the file is always a new one: two that write to the same place do not
//! mix, and a link that lies there leads nowhere. What a killed process has left is removed by the next that makes the same.

use std::fs::{File, Metadata};
use std::io::Result;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{SystemTime, UNIX_EPOCH};

/// So many names of a folder are looked at, at most: in one that holds more, what was left stays.
const MAX_NAMES: usize = 10_000;

/// `PROCESS-TIME`, which tells names of one moment from those of another.
pub fn nonce() -> String {
    // Two threads may ask in the same nanosecond.
    static GIVEN: AtomicU64 = AtomicU64::new(0);
    let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{}-{:x}{:04x}", std::process::id(), time.as_nanos(), GIVEN.fetch_add(1, Relaxed))
}

/// A new file beside `path`: `.NAME.partial-PROCESS-TIME`. It is locked while it is open.
pub fn create_beside(path: &Path) -> Result<(PathBuf, File)> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let folder = path.parent().unwrap_or(Path::new(""));
    remove_numbered(folder, &name, Metadata::is_file);
    let partial = folder.join(format!(".{name}.partial-{}", nonce()));
    let file = File::create_new(&partial)?;
    // The lock is for those who look for what was left; where there are none, the process' number has to do.
    let _ = file.try_lock();
    Ok((partial, file))
}

/// Removes each `.NAME.partial-PROCESS-TIME` of a folder whose process is dead.
pub fn remove_numbered(folder: &Path, name: &str, kind: fn(&Metadata) -> bool) {
    remove_left(folder, kind, |found| numbered(found).filter(|found| found.0 == name).map(|found| found.1));
}

/// Removes every file that a killed process was writing in a folder, whatever it was to become.
pub fn remove_files(folder: &Path) {
    remove_left(folder, Metadata::is_file, |found| numbered(found).map(|found| found.1));
}

/// NAME and PROCESS of `.NAME.partial-PROCESS-TIME`.
fn numbered(found: &str) -> Option<(&str, &str)> {
    let (name, number) = found.strip_prefix('.')?.rsplit_once(".partial-")?;
    let (process, time) = number.split_once('-')?;
    let is_time = !time.is_empty() && time.bytes().all(|digit| digit.is_ascii_hexdigit());
    is_time.then_some((name, process))
}

/// Removes what killed processes of this user have left in a folder, if it is of this kind. `process_in` finds a
/// process' number in the name of what may be removed. What cannot be removed stays.
pub fn remove_left(folder: &Path, kind: fn(&Metadata) -> bool, process_in: impl Fn(&str) -> Option<&str>) {
    // Where the system does not tell of its processes, none is known to be dead.
    let Ok(own) = std::fs::metadata("/proc/self") else { return };
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten().take(MAX_NAMES) {
        let name = entry.file_name();
        let Some(process) = name.to_str().and_then(&process_in) else { continue };
        // That of a link itself.
        let Ok(about) = entry.metadata() else { continue };
        let is_own = about.uid() == own.uid() && !about.is_symlink() && kind(&about);
        if !is_own || !is_dead(process) || is_locked(&entry.path()) {
            continue;
        }
        let removed = match about.is_dir() {
            true => std::fs::remove_dir_all(entry.path()),
            false => std::fs::remove_file(entry.path()),
        };
        match removed {
            Ok(()) => tracing::info!("removed {}, which was never finished", entry.path().display()),
            Err(error) => tracing::warn!("{} stays behind: {error}", entry.path().display()),
        }
    }
}

fn is_dead(process: &str) -> bool {
    let is_number = !process.is_empty() && process.bytes().all(|digit| digit.is_ascii_digit());
    is_number && !Path::new("/proc").join(process).exists()
}

/// A process of another machine has a number that says nothing here, but its lock does. What cannot be locked at all counts as
/// locked; a shared lock is one that network file systems give to readers, too.
fn is_locked(path: &Path) -> bool {
    File::open(path).is_ok_and(|file| file.try_lock_shared().is_err())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A number that no process can have.
    const DEAD: &str = "4194999";

    fn names(folder: &Path) -> Vec<String> {
        let names = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<String> = names.map(|name| name.into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn two_files_beside_one_place_are_two() {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("w.safetensors");
        let (first, second) = (create_beside(&place).unwrap(), create_beside(&place).unwrap());
        assert_ne!(first.0, second.0);
        assert_eq!(names(folder.path()).len(), 2, "neither was taken for one that was left");
    }

    #[test]
    fn only_what_the_dead_have_left_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let stay = [
            format!(".w.partial-{}-1f", std::process::id()),
            format!(".other.partial-{DEAD}-1f"),
            format!(".w.partial-{DEAD}"),
            format!(".w.partial-{DEAD}-mine"),
            format!(".w.partial-{DEAD}-2f"),
            format!(".w.partial-{DEAD}-3f"),
            "w.partial".to_owned(),
        ];
        stay.iter().for_each(|name| std::fs::write(at(name), "mine").unwrap());
        // One is a link, one is locked from another machine.
        std::fs::remove_file(at(&stay[4])).unwrap();
        std::os::unix::fs::symlink(at("w.partial"), at(&stay[4])).unwrap();
        let locked = File::open(at(&stay[5])).unwrap();
        locked.try_lock().unwrap();
        let expected = names(folder.path());

        std::fs::write(at(&format!(".w.partial-{DEAD}-4f")), "left").unwrap();
        std::fs::create_dir_all(at(&format!(".w.partial-{DEAD}-5f/deep"))).unwrap();
        remove_numbered(folder.path(), "w", Metadata::is_dir);
        assert_eq!(names(folder.path()).len(), expected.len() + 1, "the other is a file");
        remove_numbered(folder.path(), "w", Metadata::is_file);
        assert_eq!(names(folder.path()), expected);
    }
}
