//! How ranks of one host find the hub: a file in this user's private folder.
//!
//! Rank 0 writes the port that it really got, since the wanted one may be taken, and where the launcher handed over no
//! token a secret of its own making. The file's name comes from the token, or from what the launcher calls the job, and
//! from the wanted port, so two jobs may name the same one. As long as rank 0 lives it holds a lock on the file: a file
//! without it was left by a job that was killed, and is passed over or taken over; the next meeting of any job removes it. When all ranks
//! have met, the file goes. A process that a signal ends before that calls [`leave_meetings`] first.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::ConnectOptions;
use crate::auth::JobKey;
use crate::error::{Error, Result};
use crate::private;

/// What stands in the file where the ranks have a token of their own.
const NO_SECRET: &str = "-";

/// Between its opening and its locking a file looks as if nobody held it: only older ones are removed.
const ABANDONED: Duration = Duration::from_secs(60);

/// The files of this process.
static OWN: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Removes the files at which this process waits for others, for one that ends without unwinding.
pub fn leave_meetings() {
    for path in lock(&OWN).drain(..) {
        let _ = std::fs::remove_file(path);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Rank 0's file.
pub(super) struct Meeting {
    path: PathBuf,
    /// Holds the lock; gone once all ranks have met.
    file: Mutex<Option<File>>,
}

/// What a member reads.
pub(super) struct MeetingPoint {
    pub(super) address: SocketAddr,
    pub(super) key: JobKey,
}

fn path_of(options: &ConnectOptions) -> std::io::Result<PathBuf> {
    let key = match options.token.as_str() {
        "" => JobKey::of_token(&format!("job {}", options.job_id)),
        token => JobKey::of_token(token),
    };
    let name = key.name(&format!("meeting at {}", options.master_port));
    Ok(private::folder()?.join(format!("meeting-{name}")))
}

impl Meeting {
    /// Takes the job's place on this host, and gives the key by which its ranks will know each other.
    pub(super) fn call(options: &ConnectOptions, port: u16) -> Result<(Meeting, JobKey)> {
        let failed = |error| Error::io("announcing where ranks meet", error);
        let path = path_of(options).map_err(failed)?;
        let Some(mut file) = claim(&path).map_err(failed)? else {
            let whose = match options.token.as_str() {
                "" => "another job of yours without a token",
                _ => "another job with the same token",
            };
            return Err(Error::rendezvous(format!(
                "{whose} meets at port {} of this host; set MASTER_PORT or FERROSPEED_JOB_TOKEN",
                options.master_port
            )));
        };
        let secret = match options.token.as_str() {
            "" => private::random_hex::<32>().map_err(failed)?,
            _ => NO_SECRET.to_owned(),
        };
        let text = format!("{port} {secret}\n");
        file.set_len(0).and_then(|()| file.write_all(text.as_bytes())).map_err(failed)?;
        let key = key_of(options, &secret);
        lock(&OWN).push(path.clone());
        remove_abandoned(&path);
        Ok((Meeting { path, file: Mutex::new(Some(file)) }, key))
    }

    /// Nobody needs the file any more.
    pub(super) fn end(&self) {
        let held = lock(&self.file).take();
        if held.is_some() {
            lock(&OWN).retain(|own| *own != self.path);
            // Whoever cleared the temporary files did the same.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

impl Drop for Meeting {
    fn drop(&mut self) {
        self.end();
    }
}

fn key_of(options: &ConnectOptions, secret: &str) -> JobKey {
    JobKey::of_token(if options.token.is_empty() { secret } else { &options.token }).sealing(options.encrypt)
}

/// Where the hub is, for a member on the same host; why not, while it is not there.
pub(super) fn find(options: &ConnectOptions) -> std::result::Result<MeetingPoint, String> {
    let path = path_of(options).map_err(|error| error.to_string())?;
    let folder = path.parent().unwrap_or(&path).display();
    let not_yet = || {
        format!(
            "it has not announced itself in {folder}; ranks of one host need the same TMPDIR and the same token, FERROSPEED_JOB_TOKEN"
        )
    };
    let mut file = match private::open(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Err(not_yet()),
        Err(error) => return Err(error.to_string()),
    };
    if !is_held(&file).map_err(|error| error.to_string())? {
        return Err(not_yet());
    }
    let mut text = String::new();
    Read::take(&mut file, 256).read_to_string(&mut text).map_err(|error| error.to_string())?;
    let parsed = text.strip_suffix('\n').and_then(|line| line.split_once(' '));
    let (port, secret) = parsed.ok_or_else(not_yet)?;
    let port: u16 = port.parse().map_err(|_| format!("{} is not a meeting of ranks", path.display()))?;
    let address = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port);
    Ok(MeetingPoint { address, key: key_of(options, secret) })
}

/// Opens the file and locks it; `None` where a living process holds it.
fn claim(path: &Path) -> std::io::Result<Option<File>> {
    loop {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let file = options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)?;
        match lock_command(&file, libc::F_OFD_SETLK) {
            Ok(_) => {}
            Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => {
                return Ok(None);
            }
            Err(error) => return Err(error),
        }
        // Between opening and locking, its last holder may have removed it: then the name is another file's.
        let is_same = |now: std::fs::Metadata| now.ino() == file.metadata().map_or(0, |meta| meta.ino());
        if std::fs::symlink_metadata(path).is_ok_and(is_same) {
            return Ok(Some(file));
        }
    }
}

/// Removes what killed jobs have left beside `own`. What cannot be removed is left to the next.
fn remove_abandoned(own: &Path) {
    let Some(entries) = own.parent().and_then(|folder| std::fs::read_dir(folder).ok()) else { return };
    for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
        let is_meeting =
            path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"meeting-"));
        let is_old = || {
            let written = std::fs::symlink_metadata(&path).and_then(|found| found.modified());
            written.ok().and_then(|time| time.elapsed().ok()).is_some_and(|age| age > ABANDONED)
        };
        if is_meeting && path != own && is_old()
            // It stays locked until it is gone.
            && let Ok(Some(_file)) = claim(&path)
        {
            let _ = std::fs::remove_file(&path);
        }
    }
}

/// Whether somebody else holds the lock.
fn is_held(file: &File) -> std::io::Result<bool> {
    Ok(lock_command(file, libc::F_OFD_GETLK)?.l_type != libc::F_UNLCK as libc::c_short)
}

/// Asks for, or about, a write lock of the whole file that belongs to this opening of it alone.
fn lock_command(file: &File, command: libc::c_int) -> std::io::Result<libc::flock> {
    // SAFETY: plain data for which all zeroes is a valid value.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::F_WRLCK as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    // SAFETY: the descriptor is open, and the kernel reads and writes one `flock`, which outlives the call.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, &mut lock) } {
        -1 => Err(std::io::Error::last_os_error()),
        _ => Ok(lock),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(token: &str) -> ConnectOptions {
        let mut options = ConnectOptions::new(0, 2, "127.0.0.1", 1);
        options.token = token.into();
        options.job_id = private::random_hex::<8>().unwrap();
        options
    }

    #[test]
    fn ranks_without_a_token_get_one_from_rank_0_and_others_find_nothing() {
        let options = options("");
        assert!(find(&options).is_err());
        let (meeting, key) = Meeting::call(&options, 4242).unwrap();
        let found = find(&options).unwrap_or_else(|why| panic!("{why}"));
        assert_eq!((found.address.port(), found.key.name("x")), (4242, key.name("x")));
        let taken = Meeting::call(&options, 4242).err().unwrap().to_string();
        assert!(taken.contains("another job of yours without a token meets at port 1"), "{taken}");
        meeting.end();
        assert!(find(&options).is_err() && !meeting.path.exists());
    }

    #[test]
    fn what_killed_jobs_left_goes_with_the_next_meeting_and_what_others_hold_stays() {
        let old = std::time::SystemTime::now() - 2 * ABANDONED;
        let [left, new, held, next] = [(); 4].map(|()| options(&private::random_hex::<8>().unwrap()));
        let [left, new, held_path] = [&left, &new, &held].map(|options| path_of(options).unwrap());
        for path in [&left, &new] {
            private::write(path, b"99 -\n").unwrap();
        }
        let (_held, _) = Meeting::call(&held, 5).unwrap();
        for path in [&left, &held_path] {
            File::options().write(true).open(path).unwrap().set_modified(old).unwrap();
        }
        let (_meeting, _) = Meeting::call(&next, 7).unwrap();
        assert!(!left.exists() && new.exists() && held_path.exists());
        std::fs::remove_file(&new).unwrap();
    }

    #[test]
    fn what_a_killed_job_left_is_passed_over_and_taken_over() {
        let options = options("secret");
        let path = path_of(&options).unwrap();
        private::write(&path, b"99 -\n").unwrap();
        assert!(find(&options).is_err());
        let (_meeting, _) = Meeting::call(&options, 7).unwrap();
        assert_eq!(find(&options).map(|found| found.address.port()).unwrap_or(0), 7);
    }
}
