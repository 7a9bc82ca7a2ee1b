//! A process whose only task is to outlive a killed launcher by a moment.
//!
//! The parent-death signal reaches the launcher's children but not theirs. The guardian holds the reading end of
//! a pipe whose writing end only the launcher has: when the launcher dies, in whatever way, the pipe ends and
//! the guardian kills the job's control group where it has one, every rank's process group, and whatever carries the job's
//! mark. It is a fork without exec, so it works from any program that
//! uses this library; after the fork it allocates nothing and makes only async-signal-safe calls.

use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use super::cage::{self, Cage};
use super::marks::{GUARDIAN_NAME, Mark};
use crate::error::LaunchError;

#[derive(Debug)]
pub(super) struct Guardian {
    pid: i32,
    pipe: Option<OwnedFd>,
}

/// How often the guardian looks for what left its group, and how long it waits in between: two seconds in all.
const SWEEPS: usize = 200;
const SWEEP_PAUSE_US: u32 = 10_000;

/// How long a guardian may take to end when it is told, and how often it is looked whether it has.
const FAREWELL: Duration = Duration::from_secs(2);
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// Tells the guardian that the job ended well; group numbers are positive.
const DISMISSED: i32 = 0;

impl Guardian {
    pub(super) fn start(groups: usize, mark: &Mark, cage: Option<&Cage>) -> Result<Self, LaunchError> {
        let system = |action, source: nix::Error| LaunchError::System { action, source: source.into() };
        let flags = nix::fcntl::OFlag::O_CLOEXEC;
        let (read, write) =
            nix::unistd::pipe2(flags).map_err(|error| system("make a pipe for the guardian", error))?;
        let (watched, mark) = (Vec::with_capacity(groups), mark.clone());
        // SAFETY: the child runs `guard`, which allocates nothing, takes no lock and never returns.
        match unsafe { libc::fork() } {
            -1 => {
                Err(LaunchError::System { action: "fork the guardian", source: io::Error::last_os_error() })
            }
            0 => guard(read.as_raw_fd(), watched, &mark, cage),
            pid => Ok(Guardian { pid, pipe: Some(write) }),
        }
    }

    pub(super) fn pid(&self) -> i32 {
        self.pid
    }

    /// The end of the pipe where a new process announces itself; see [`announce`].
    pub(super) fn pipe(&self) -> Option<RawFd> {
        self.pipe.as_ref().map(AsRawFd::as_raw_fd)
    }

    /// Ends the guardian: nothing is left to guard.
    pub(super) fn dismiss(&mut self) {
        let Some(pipe) = self.pipe.take() else { return };
        // A guardian that someone killed cannot be told, and needs not.
        let _ = nix::unistd::write(&pipe, &DISMISSED.to_ne_bytes());
        if self.is_gone_within(FAREWELL) {
            return;
        }
        // Who cannot hear it is none the worse.
        let _ = writeln!(
            io::stderr(),
            "note: process {}, which guards the job, did not end when it was told to (was it stopped?); it is killed, and the job is none the worse",
            self.pid
        );
        // SAFETY: a plain system call; the guardian is our child and was not waited for, so the number is its own.
        unsafe { libc::kill(self.pid, libc::SIGKILL) };
        self.is_gone_within(FAREWELL);
    }

    /// Waits for its end, and reaps it.
    fn is_gone_within(&self, time: Duration) -> bool {
        let end = Instant::now() + time;
        loop {
            // SAFETY: a plain system call; the guardian is our child.
            match unsafe { libc::waitpid(self.pid, std::ptr::null_mut(), libc::WNOHANG) } {
                0 if Instant::now() < end => std::thread::sleep(LOOK_EVERY),
                0 => return false,
                // It ended, or somebody else has waited for it.
                _ => return true,
            }
        }
    }
}

impl Drop for Guardian {
    fn drop(&mut self) {
        self.dismiss();
    }
}

/// Tells the guardian the group of the calling process, which leads it.
///
/// A process does this itself, between fork and exec: were it the launcher's task, a launcher that is killed
/// right after the fork would leave a group nobody knows. Only async-signal-safe calls.
pub(super) fn announce(pipe: RawFd) -> io::Result<()> {
    // SAFETY: getpid has no preconditions; the pipe is open and the four bytes outlive the call, which is
    // atomic at this size.
    let written = unsafe {
        let bytes = libc::getpid().to_ne_bytes();
        libc::write(pipe, bytes.as_ptr().cast(), bytes.len())
    };
    if written == 4 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The guardian's whole life.
fn guard(pipe: RawFd, mut groups: Vec<i32>, mark: &Mark, cage: Option<&Cage>) -> ! {
    // SAFETY: only async-signal-safe calls on integers and on memory reserved before the fork. The launcher's
    // descriptors are closed so that neither its pipe nor anyone's output is held open from here.
    unsafe {
        libc::setsid();
        libc::prctl(libc::PR_SET_NAME, GUARDIAN_NAME.as_ptr());
        for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT, libc::SIGPIPE] {
            libc::signal(signal, libc::SIG_IGN);
        }
        // Both are above what they are moved to, unless the launcher was started without standard streams.
        let switch = cage.map_or(-1, |cage| libc::fcntl(cage.kill_switch(), libc::F_DUPFD, 3));
        libc::dup2(pipe, 0);
        libc::close(1);
        libc::dup2(switch, 1);
        if libc::syscall(libc::SYS_close_range, 2u32, u32::MAX, 0u32) != 0 {
            for descriptor in 2..65_536 {
                libc::close(descriptor);
            }
        }
        let mut message = [0u8; 4];
        loop {
            match libc::read(0, message.as_mut_ptr().cast(), message.len()) {
                4 => match i32::from_ne_bytes(message) {
                    DISMISSED => libc::_exit(0),
                    group if group > 1 && groups.len() < groups.capacity() => groups.push(group),
                    _ => {}
                },
                -1 if *libc::__errno_location() == libc::EINTR => {}
                _ => break,
            }
        }
        if cage.is_some() {
            cage::kill_by(1);
        }
        for &group in &groups {
            libc::kill(-group, libc::SIGKILL);
        }
        // What is being killed may be forking: look until nothing is left.
        for _ in 0..SWEEPS {
            let left = mark.kill_all();
            if left == 0 && cage.is_none_or(|cage| cage::remove(cage.folder())) {
                break;
            }
            libc::usleep(SWEEP_PAUSE_US);
        }
        libc::_exit(0)
    }
}
