//! A program that may take so long and so much memory, and no more: for experiments whose failure is an answer.
//!
//! It dies with whoever started it, and when its time is up it is killed; ranks that it started as a launcher go with it, for
//! a launcher's guardian sees to that. Memory is bounded per process, and processes it starts inherit the bound: what asks for
//! more is told that there is none, and bystanders are left alone.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

/// How often a running program is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// What a program may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// From its start to its end.
    pub deadline: Duration,
    /// Memory of its own of each of its processes (`RLIMIT_DATA`).
    pub memory_bytes: Option<u64>,
}

/// How a bounded program ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BoundedEnd {
    /// By itself, or by a signal that is not ours.
    Exited(ExitStatus),
    /// Its time was up.
    OutOfTime,
}

/// Runs a program within bounds, and waits for its end.
pub fn run_bounded(command: &mut Command, bounds: &Bounds) -> io::Result<BoundedEnd> {
    let memory = bounds.memory_bytes.map(|bytes| libc::rlimit { rlim_cur: bytes, rlim_max: bytes });
    let starter = std::process::id();
    // SAFETY: the closure makes system calls on memory that was prepared before the fork, and allocates nothing.
    unsafe {
        command.pre_exec(move || {
            if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
                return Err(io::Error::last_os_error());
            }
            // Whoever started it may have gone before the call above.
            if libc::getppid() as u32 != starter {
                return Err(io::Error::from_raw_os_error(libc::ESRCH));
            }
            match &memory {
                Some(limit) if libc::setrlimit(libc::RLIMIT_DATA, limit) != 0 => {
                    Err(io::Error::last_os_error())
                }
                _ => Ok(()),
            }
        });
    }
    let deadline = Instant::now() + bounds.deadline;
    let mut child = command.spawn()?;
    wait_until(&mut child, deadline)
}

fn wait_until(child: &mut Child, deadline: Instant) -> io::Result<BoundedEnd> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(BoundedEnd::Exited(status));
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            child.kill()?;
            child.wait()?;
            return Ok(BoundedEnd::OutOfTime);
        }
        std::thread::sleep(left.min(LOOK_EVERY));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, deadline: Duration, memory_bytes: Option<u64>) -> BoundedEnd {
        run_bounded(Command::new("sh").args(["-c", script]), &Bounds { deadline, memory_bytes }).unwrap()
    }

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn a_program_within_its_bounds_ends_as_it_likes() {
        for code in [0, 3] {
            let BoundedEnd::Exited(status) = shell(&format!("exit {code}"), LONG, Some(1 << 30)) else {
                panic!("out of time")
            };
            assert_eq!(status.code(), Some(code));
        }
    }

    #[test]
    fn a_program_whose_time_is_up_is_gone() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("pid");
        let script = format!("echo $$ > {}; exec sleep 1000", file.display());
        let start = Instant::now();
        assert_eq!(shell(&script, Duration::from_secs(1), None), BoundedEnd::OutOfTime);
        assert!(start.elapsed() < LONG);
        let pid = std::fs::read_to_string(&file).unwrap();
        assert!(!std::path::Path::new("/proc").join(pid.trim()).exists());
    }

    #[test]
    fn a_program_and_its_children_have_no_more_memory_than_allowed() {
        let BoundedEnd::Exited(status) =
            shell("test $(ulimit -d) = 65536 && sh -c 'test $(ulimit -d) = 65536'", LONG, Some(64 << 20))
        else {
            panic!("out of time")
        };
        assert!(status.success());
    }
}
