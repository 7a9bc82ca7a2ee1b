//! Running the binary and looking at processes.
#![allow(dead_code)] // Each test file uses its own part.

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Within this time of a failure or a signal every rank must be gone.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

/// How long a busy machine may take to get anything done at all.
const WAIT_LIMIT: Duration = Duration::from_secs(60);

/// Runs the binary to its end.
pub(crate) fn ferrospeed(arguments: &[&str]) -> Output {
    start(arguments).finish()
}

/// A running binary, killed when a test gives up on it.
pub(crate) struct Started(Option<Child>);

/// Starts the binary.
pub(crate) fn start(arguments: &[&str]) -> Started {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrospeed"));
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    Started(Some(command.spawn().expect("the binary starts")))
}

impl Started {
    pub(crate) fn pid(&self) -> String {
        self.0.as_ref().expect("not finished").id().to_string()
    }

    pub(crate) fn finish(mut self) -> Output {
        let child = self.0.take().expect("finished once");
        child.wait_with_output().expect("the binary ends")
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

pub(crate) fn lines_of(path: &Path) -> Vec<String> {
    std::fs::read_to_string(path).expect("a readable file").lines().map(str::to_owned).collect()
}

/// Whether a process exists and is more than a zombie.
pub(crate) fn is_running(pid: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with('Z'))
}

/// Waits for a condition, and fails when patience runs out.
pub(crate) fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let end = Instant::now() + WAIT_LIMIT;
    while !condition() {
        assert!(Instant::now() < end, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Whether file systems may be mounted that no one else sees (`unshare -rm`); says so where they may not.
pub(crate) fn may_mount() -> bool {
    let tried = Command::new("unshare").args(["-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]).output();
    let may = tried.is_ok_and(|output| output.status.success());
    if !may {
        eprintln!("skipped: this machine does not let an ordinary process mount a tmpfs (unshare -rm)");
    }
    may
}
