//! A control group of a job's own, where the system lets us make one: what was started in it cannot leave it.
//!
//! Groups, sessions and environments can be shed; a control group (cgroup v2, Linux 5.14 for `cgroup.kill`) cannot, without
//! the right to write to another one. So whoever can make one below its own, root or a user to whom systemd or a container
//! has delegated it, ends a job by one write, daemons with an empty environment included. Elsewhere the job does without
//! it, and the sweeps by group, parentage and mark find all but those.

use std::ffi::{CStr, CString};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long a killed group may take to become empty before it is left behind.
const EMPTYING_LIMIT: Duration = Duration::from_secs(2);

/// A group that is empty for so long is nobody's: a job enters its own at once.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(600);

/// A control group that was made for one job. Dropping it ends what is in it and removes it.
#[derive(Debug)]
pub(super) struct Cage {
    folder: CString,
    members: File,
    kill: File,
}

/// Removes empty groups of jobs of long ago, whose launcher and guardian were both killed. One with anybody in it stays.
fn sweep(above: &Path) {
    for entry in std::fs::read_dir(above).into_iter().flatten().flatten() {
        let is_ours = entry.file_name().as_bytes().starts_with(b"ferrospeed-");
        let age = || entry.metadata().ok()?.modified().ok()?.elapsed().ok();
        if is_ours && age().is_some_and(|age| age > FORGOTTEN_AFTER) {
            let _ = std::fs::remove_dir(entry.path());
        }
    }
}

/// Where this process can give its jobs a control group of their own, or why it cannot.
pub fn can_cage() -> Result<PathBuf, String> {
    let probe = format!("probe-{}-{:?}", std::process::id(), std::thread::current().id());
    drop(Cage::make(&probe)?);
    own_folder()
}

impl Cage {
    /// Makes an empty group below this process's own.
    pub(super) fn make(name: &str) -> Result<Cage, String> {
        let above = own_folder()?;
        let folder = above.join(format!("ferrospeed-{name}"));
        let path = CString::new(folder.as_os_str().as_bytes()).map_err(|error| error.to_string())?;
        let failed = |what: &Path| {
            let what = what.display().to_string();
            move |error: io::Error| format!("{what}: {error}")
        };
        sweep(&above);
        std::fs::create_dir(&folder).map_err(failed(&folder))?;
        let open = |name: &str| {
            let file = folder.join(name);
            OpenOptions::new().write(true).open(&file).map_err(failed(&file))
        };
        match open("cgroup.procs").and_then(|members| Ok((members, open("cgroup.kill")?))) {
            Ok((members, kill)) => Ok(Cage { folder: path, members, kill }),
            Err(why) => {
                // It is empty, and nobody has heard of it.
                let _ = std::fs::remove_dir(&folder);
                Err(why)
            }
        }
    }

    /// For [`enter`].
    pub(super) fn door(&self) -> RawFd {
        self.members.as_raw_fd()
    }

    /// For [`kill_by`].
    pub(super) fn kill_switch(&self) -> RawFd {
        self.kill.as_raw_fd()
    }

    /// For [`remove`].
    pub(super) fn folder(&self) -> &CStr {
        &self.folder
    }

    /// Kills everything in the group.
    pub(super) fn kill_all(&self) {
        // A group that is gone has nobody in it.
        let _ = (&self.kill).write_all(b"1");
    }
}

impl Drop for Cage {
    fn drop(&mut self) {
        self.kill_all();
        let end = Instant::now() + EMPTYING_LIMIT;
        while !remove(&self.folder) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// Moves the calling process into the group whose door is open. Only async-signal-safe calls.
pub(super) fn enter(door: RawFd) {
    // A process that stays outside is still found by its group and its mark.
    write_byte(door, b"0");
}

/// Kills everything in the group. Only async-signal-safe calls.
pub(super) fn kill_by(switch: RawFd) {
    write_byte(switch, b"1");
}

fn write_byte(descriptor: RawFd, byte: &[u8; 1]) {
    // SAFETY: one byte that outlives the call; a descriptor that is not open is an error and nothing else.
    unsafe { libc::write(descriptor, byte.as_ptr().cast(), 1) };
}

/// Removes an empty group; says whether it is gone. Only async-signal-safe calls.
pub(super) fn remove(folder: &CStr) -> bool {
    // SAFETY: the path ends with a zero byte and outlives the call.
    let removed = unsafe { libc::rmdir(folder.as_ptr()) };
    removed == 0 || io::Error::last_os_error().raw_os_error() == Some(libc::ENOENT)
}

/// The folder of this process's own control group.
fn own_folder() -> Result<PathBuf, String> {
    let read = |path: &str| std::fs::read_to_string(path).map_err(|error| format!("{path}: {error}"));
    let groups = read("/proc/self/cgroup")?;
    let own = groups.lines().find_map(|line| line.strip_prefix("0::")).ok_or("there is no cgroup v2")?;
    let mounts = read("/proc/self/mountinfo")?;
    folder_in(&mounts, own).ok_or_else(|| format!("no mount of cgroup v2 shows {own}"))
}

/// Where a mount shows the control group `own`.
fn folder_in(mounts: &str, own: &str) -> Option<PathBuf> {
    mounts.lines().find_map(|line| {
        let (before, after) = line.split_once(" - ")?;
        let mut fields = before.split(' ').skip(3);
        let (root, place) = (fields.next()?, fields.next()?);
        // A group outside of what this namespace shows begins with `..`.
        let below = Path::new(own).strip_prefix(root).ok()?;
        let is_inside = below.components().all(|part| matches!(part, std::path::Component::Normal(_)));
        (after.starts_with("cgroup2 ") && is_inside).then(|| Path::new(place).join(below))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_own_group_is_found_where_cgroup_v2_is_mounted_and_shows_it() {
        let v1 = "30 24 0:26 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n";
        let v2 = "31 24 0:27 / /sys/fs/cgroup/unified rw,relatime shared:9 - cgroup2 cgroup2 rw\n";
        let found = |own| folder_in(&format!("{v1}{v2}"), own);
        assert_eq!(found("/"), Some("/sys/fs/cgroup/unified".into()));
        assert_eq!(found("/a/b"), Some("/sys/fs/cgroup/unified/a/b".into()));
        assert_eq!(found("/../outside"), None);
        assert_eq!(folder_in(v1, "/"), None);
        let bound = "31 24 0:27 /slice /cg rw - cgroup2 cgroup2 rw\n";
        assert_eq!(folder_in(bound, "/slice/job"), Some("/cg/job".into()));
        assert_eq!(folder_in(bound, "/other"), None);
    }
}
