//! Running the binary and looking at processes.

pub(crate) mod small_run;

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

/// Within this time of a failure or a signal every rank must be gone.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

/// How long a busy machine may take to get anything done at all.
const WAIT_LIMIT: Duration = Duration::from_secs(180);

/// How long a process of a test may run: far above what any needs, far below a hang that nobody notices.
const RUN_LIMIT: Duration = Duration::from_secs(300);

/// This binary, for which signals mean what they usually do: `nohup`, and a shell that puts the tests into its background,
/// have told them to ignore some, and programs inherit that.
pub(crate) fn binary() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrospeed"));
    take_signals(&mut command);
    command
}

/// Lets a program have the usual signals.
pub(crate) fn take_signals(command: &mut Command) -> &mut Command {
    // SAFETY: between fork and exec only `signal` is called, which is safe there.
    unsafe {
        command.pre_exec(|| {
            for signal in [libc::SIGINT, libc::SIGQUIT, libc::SIGTERM, libc::SIGHUP, libc::SIGUSR2] {
                libc::signal(signal, libc::SIG_DFL);
            }
            Ok(())
        })
    }
}

/// Runs a command to its end; one that does not come to an end is killed, and fails the test.
pub(crate) fn output_of(command: &mut Command) -> Output {
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    finish(command.spawn().expect("the program starts"))
}

/// Waits for a process and all of its output, as [`output_of`] does.
pub(crate) fn finish(mut child: Child) -> Output {
    fn read_all(pipe: Option<impl Read + Send + 'static>) -> std::thread::JoinHandle<Vec<u8>> {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            let _ = pipe.map(|mut pipe| pipe.read_to_end(&mut bytes));
            bytes
        })
    }
    let (out, error) = (read_all(child.stdout.take()), read_all(child.stderr.take()));
    let status = wait_for(&mut child);
    let end = Instant::now() + WAIT_LIMIT;
    while !(out.is_finished() && error.is_finished()) {
        assert!(Instant::now() < end, "something that outlived process {} holds its output open", child.id());
        std::thread::sleep(Duration::from_millis(2));
    }
    Output { status, stdout: out.join().unwrap(), stderr: error.join().unwrap() }
}

/// Waits for a process to end, within bounds.
pub(crate) fn wait_for(child: &mut Child) -> ExitStatus {
    let end = Instant::now() + RUN_LIMIT;
    loop {
        if let Some(status) = child.try_wait().expect("a child of ours") {
            return status;
        }
        if Instant::now() >= end {
            let _ = child.kill();
            let _ = child.wait();
            panic!("process {} was still running after {} s", child.id(), RUN_LIMIT.as_secs());
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Runs the binary to its end.
pub(crate) fn ferrospeed(arguments: &[&str]) -> Output {
    start(arguments).finish()
}

/// A running binary, killed when a test gives up on it.
pub(crate) struct Started(Option<Child>);

/// Starts the binary.
pub(crate) fn start(arguments: &[&str]) -> Started {
    let mut command = binary();
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    Started(Some(command.spawn().expect("the binary starts")))
}

impl Started {
    pub(crate) fn pid(&self) -> String {
        self.0.as_ref().expect("not finished").id().to_string()
    }

    pub(crate) fn finish(mut self) -> Output {
        finish(self.0.take().expect("finished once"))
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

/// A recipe of a small GPT-2. `own` begins with keys of recipes, `model.layers` among them, and may end with tables.
pub(crate) fn small_recipe(own: &str, ds_config: &str) -> String {
    format!("model.preset = 'gpt2'\nmodel.width = 32\nmodel.heads = 2\n{own}\n[ds_config]\n{ds_config}\n")
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

/// Whether a program is installed.
pub(crate) fn in_path(program: &str) -> bool {
    let folders = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&folders).any(|folder| folder.join(program).is_file())
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
        ferrospeed_testkit::skip::skip("an ordinary process may not mount a tmpfs here (unshare -rm)");
    }
    may
}

/// The processes that a process has started.
pub(crate) fn children(parent: u32) -> Vec<u32> {
    let path = format!("/proc/{parent}/task/{parent}/children");
    let of_task = std::fs::read_to_string(path).unwrap();
    of_task.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

/// A variable of a process's environment.
pub(crate) fn variable(pid: u32, name: &str) -> Option<String> {
    let environment = std::fs::read(format!("/proc/{pid}/environ")).ok()?;
    let of = environment.split(|&byte| byte == 0).filter_map(|entry| std::str::from_utf8(entry).ok());
    of.filter_map(|entry| entry.split_once('='))
        .find(|(key, _)| *key == name)
        .map(|(_, value)| value.to_owned())
}
