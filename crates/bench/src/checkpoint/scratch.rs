//! The folder that the measurement fills with gigabytes.
//!
//! It goes when the measurement ends, also by Ctrl-C or SIGTERM. What a run leaves behind that was killed outright goes
//! when the next one begins in the same place: a run holds a lock on its folder, which the system releases with it.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ferrospeed_command::{Failure, terminal};
use signal_hook::consts::{SIGINT, SIGTERM};

use super::failed;

const PREFIX: &str = ".ferrospeed-bench-";
/// How often signals are looked for.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Ranks may still write while their folder is removed.
const ATTEMPTS: usize = 10;

/// A folder of this run.
pub(super) struct Scratch {
    path: PathBuf,
    _lock: File,
}

impl Scratch {
    pub(super) fn create(dir: &Path) -> Result<Scratch, Failure> {
        sweep(dir);
        let path = dir.join(format!("{PREFIX}{}", std::process::id()));
        std::fs::create_dir_all(&path).map_err(|error| failed(&path, &error))?;
        let lock = File::open(&path).map_err(|error| failed(&path, &error))?;
        // Where folders cannot be locked, nobody sweeps either.
        let _ = lock.try_lock();
        remove_on_signal(&path);
        Ok(Scratch { path, _lock: lock })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // What is left is swept by the next run.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

/// Removes what runs left behind that are no more.
fn sweep(dir: &Path) {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let process = name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.parse::<u32>().ok());
        let is_gone = process.is_some_and(|process| !Path::new(&format!("/proc/{process}")).exists());
        // A run on another machine that shares the folder holds its lock.
        let is_unlocked = || File::open(entry.path()).is_ok_and(|folder| folder.try_lock().is_ok());
        if is_gone && is_unlocked() && std::fs::remove_dir_all(entry.path()).is_ok() {
            terminal::print_note(&format!("removed {}, which an earlier run left", entry.path().display()));
        }
    }
}

/// Ends the process on Ctrl-C or SIGTERM, after removing the folder.
fn remove_on_signal(path: &Path) {
    let path = path.to_path_buf();
    let signals = [SIGINT, SIGTERM].map(|signal| {
        let arrived = Arc::new(AtomicBool::new(false));
        // Without a handler the signal ends the process, and the next run sweeps.
        let _ = signal_hook::flag::register(signal, Arc::clone(&arrived));
        (signal, arrived)
    });
    std::thread::spawn(move || {
        loop {
            std::thread::sleep(LOOK_EVERY);
            let arrived = signals.iter().find(|(_, arrived)| arrived.load(Ordering::Relaxed));
            if let Some((signal, _)) = arrived {
                let _ = (0..ATTEMPTS).find(|_| std::fs::remove_dir_all(&path).is_ok());
                std::process::exit(128 + signal);
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_killed_run_left_is_swept_and_what_others_use_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let folder = |name: String| {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.join("checkpoints")).unwrap();
            path
        };
        // No process has a number beyond the kernel's limit of 2^22.
        let dead = folder(format!("{PREFIX}{}", 1 << 23));
        let locked = folder(format!("{PREFIX}{}", (1 << 23) + 1));
        let alive = folder(format!("{PREFIX}1"));
        let other = folder(format!("{PREFIX}notes"));
        let holder = File::open(&locked).unwrap();
        holder.try_lock().unwrap();
        sweep(dir.path());
        assert!(!dead.exists());
        assert!(locked.exists() && alive.exists() && other.exists());
    }
}
