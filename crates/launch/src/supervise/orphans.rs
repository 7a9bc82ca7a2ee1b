//! Descendants that left their group: while a job runs, the launcher adopts them, and it ends them after.
//!
//! A process that calls `setsid` leaves the group that is swept, but its parent's death hands it to the nearest
//! subreaper, and for the time of a job that is the launcher.

use std::collections::HashSet;
use std::io;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::marks::Mark;
use crate::error::LaunchError;

const SWEEP_LIMIT: Duration = Duration::from_secs(2);

/// How many jobs of this process adopt orphans now.
static OPEN: Mutex<usize> = Mutex::new(0);

#[derive(Debug)]
pub(super) struct Orphanage;

impl Orphanage {
    /// Adopts orphans from now on.
    pub(super) fn open() -> Result<Self, LaunchError> {
        let mut open = OPEN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        set_subreaper(true).map_err(|source| LaunchError::System { action: "become a subreaper", source })?;
        *open += 1;
        Ok(Orphanage)
    }

    /// Kills adopted processes that belong to one of `groups` or carry the job's mark.
    ///
    /// Other children of this process are none of the job's business.
    pub(super) fn sweep(&self, groups: &HashSet<i32>, mark: &Mark, spared: i32) {
        let end = Instant::now() + SWEEP_LIMIT;
        loop {
            let found: Vec<i32> = children()
                .into_iter()
                .filter(|pid| *pid != spared && !groups.contains(pid))
                .filter(|&pid| group_of(pid).is_some_and(|group| groups.contains(&group)) || mark.is_on(pid))
                .collect();
            if found.is_empty() || Instant::now() >= end {
                return;
            }
            for pid in found {
                // SAFETY: plain system calls; `pid` is our child and unreaped, so the number is still its own.
                unsafe {
                    libc::kill(pid, libc::SIGKILL);
                    libc::waitpid(pid, std::ptr::null_mut(), libc::WNOHANG);
                }
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Orphanage {
    fn drop(&mut self) {
        let mut open = OPEN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        *open -= 1;
        if *open == 0 {
            // Failing to stop adopting harms nobody.
            let _ = set_subreaper(false);
        }
    }
}

fn set_subreaper(on: bool) -> io::Result<()> {
    // SAFETY: a plain system call with integer arguments.
    match unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, libc::c_ulong::from(on)) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn group_of(pid: i32) -> Option<i32> {
    // SAFETY: a plain system call with integer arguments.
    Some(unsafe { libc::getpgid(pid) }).filter(|&group| group > 0)
}

/// The children of this process, by asking every process for its parent.
fn children() -> Vec<i32> {
    let own = std::process::id();
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    pids.filter(|pid| parent_of(*pid) == Some(own)).collect()
}

fn parent_of(pid: i32) -> Option<u32> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command name is in parentheses and may hold anything: what follows the last one is fixed.
    let after_name = stat.rsplit_once(')')?.1;
    after_name.split_whitespace().nth(1)?.parse().ok()
}
