//! Files from the server into the cache: one process at a time, on from where it stopped, compared with what the list says.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::fcntl::{Flock, FlockArg};

use crate::Phase;
use crate::cache::{Repository, make_folder, open_unfinished};
use crate::client::{ATTEMPTS, Client, Trouble, is_busy};
use crate::error::{HubError, Result};
use crate::listing::{Hasher, Listing, RemoteFile};
use crate::name::HubName;
use crate::patience::{Came, Patience};

/// One answer may take so long; what has come by then is kept, and the rest is asked for anew.
const BODY_TIME: Duration = Duration::from_secs(3600);
/// Less than this is no progress.
const LEAST_PROGRESS: u64 = 1 << 16;
/// In a share of the time that a server has in all, a connection brings so much, or the rest is asked for anew.
const CONNECTIONS: u32 = 3;
/// What is slower is told as a wait.
const SLOW: Duration = Duration::from_secs(10);
/// A process that has a file may have to look through all that is there of it.
const OF_PROCESSES: u32 = 10;
const BUFFER_BYTES: usize = 1 << 18;
const LOCK_POLL: Duration = Duration::from_millis(100);

/// What a download is part of: told to whoever listens.
struct Course<'a, 'b, 'c> {
    client: &'a Arc<Client>,
    name: &'a HubName,
    commit: &'a str,
    before: u64,
    patience: &'a mut Patience<'b, 'c>,
}

/// When something came last: so many bytes more than before that it counts.
struct Gain {
    bytes: u64,
    at: Instant,
}

impl Gain {
    fn from(bytes: u64) -> Gain {
        Gain { bytes, at: Instant::now() }
    }

    fn note(&mut self, have: u64) {
        if have >= self.bytes.saturating_add(LEAST_PROGRESS) {
            *self = Gain::from(have);
        }
    }
}

/// A file to be brought.
struct Wanted<'a> {
    file: &'a RemoteFile,
    size: u64,
    hash: String,
}

/// Brings all of these that are not there yet, or not in the size that the list gives.
pub(crate) fn bring_all(
    client: &Arc<Client>,
    name: &HubName,
    repository: &Repository,
    listing: &Listing,
    files: &[&RemoteFile],
    patience: &mut Patience<'_, '_>,
) -> Result<()> {
    let root = repository.snapshot(&listing.commit);
    let (here, absent): (Vec<&RemoteFile>, Vec<&RemoteFile>) =
        files.iter().copied().partition(|file| file.is_whole_in(&root));
    let mut wanted = Vec::new();
    for file in absent {
        let (size, hash) = client.described(name, &listing.commit, file, patience)?;
        wanted.push(Wanted { file, size, hash });
    }
    // Sizes are what a server says: their sum may be more than there are numbers.
    let sum = |sizes: &mut dyn Iterator<Item = u64>| sizes.fold(0, u64::saturating_add);
    let needed = sum(&mut wanted.iter().map(|wanted| wanted.size));
    check_room(name, repository, needed)?;
    let before = sum(&mut here.iter().filter_map(|file| file.size));
    patience.total_bytes = before.saturating_add(needed);
    let mut course = Course { client, name, commit: &listing.commit, before, patience };
    for wanted in &wanted {
        course.patience.file.clone_from(&wanted.file.path);
        course.bring(repository, wanted)?;
        course.before = course.before.saturating_add(wanted.size);
    }
    Ok(())
}

/// Refuses to begin what the disk has no room for.
fn check_room(name: &HubName, repository: &Repository, needed: u64) -> Result<()> {
    make_folder(repository.root())?;
    let Ok(disk) = nix::sys::statvfs::statvfs(repository.root()) else { return Ok(()) };
    let free = disk.blocks_available().saturating_mul(disk.fragment_size());
    if needed <= free {
        return Ok(());
    }
    Err(HubError::NoRoom { name: name.to_string(), folder: repository.root().to_path_buf(), needed, free })
}

impl Course<'_, '_, '_> {
    fn bring(&mut self, repository: &Repository, wanted: &Wanted<'_>) -> Result<()> {
        let blob = repository.blob(&wanted.hash)?;
        let mut beside = blob.clone().into_os_string();
        beside.push(".incomplete");
        let beside = PathBuf::from(beside);
        let _lock = self.lock(repository, wanted, &beside)?;
        // One of another size was damaged here: it stays until there is a whole one.
        if !std::fs::metadata(&blob).is_ok_and(|about| about.is_file() && about.len() == wanted.size) {
            self.fill(wanted, &beside)?;
            std::fs::rename(&beside, &blob).map_err(HubError::io(&blob))?;
        }
        repository.link(self.commit, &wanted.file.path, &blob)
    }

    /// Waits until no other process downloads this file, as long as that one goes on with it.
    fn lock(&mut self, repository: &Repository, wanted: &Wanted<'_>, beside: &Path) -> Result<Flock<File>> {
        let mut file = repository.lock_file(&wanted.hash)?;
        let size = || std::fs::metadata(beside).map(|about| about.len()).ok();
        let (mut seen, mut since, mut process) = (size(), Instant::now(), None);
        let limit = self.patience.limit * OF_PROCESSES;
        loop {
            match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => return Ok(lock),
                Err((again, nix::errno::Errno::EWOULDBLOCK)) => file = again,
                Err((_, error)) => return Err(HubError::io(repository.root())(error.into())),
            }
            process = process.or_else(|| holder_of(&file));
            let now = size();
            if now != seen {
                (seen, since) = (now, Instant::now());
            }
            if since.elapsed() >= limit {
                return Err(HubError::Occupied {
                    name: self.name.to_string(),
                    file: wanted.file.path.clone(),
                    holder: process.map_or("a process".to_owned(), |id| format!("process {id}")),
                    lock: repository.lock_path(&wanted.hash),
                    seconds: limit.as_secs(),
                });
            }
            self.say(0, Phase::Waiting { process })?;
            std::thread::sleep(LOCK_POLL);
        }
    }

    /// Downloads until it is whole, and is what the list says.
    fn fill(&mut self, wanted: &Wanted<'_>, path: &Path) -> Result<()> {
        let failed = || HubError::io(path);
        let mut file = open_unfinished(path)?;
        let mut have = file.metadata().map_err(failed())?.len();
        if have > wanted.size {
            file.set_len(0).map_err(failed())?;
            have = 0;
        }
        let (mut hasher, mut is_fresh) = (self.hashed(wanted, &mut file, have, path)?, have == 0);
        let (mut failures, mut restarts, mut gain) = (0, 0, Gain::from(have));
        loop {
            if have == wanted.size {
                let found = hasher.finish();
                if found.as_ref().is_none_or(|found| *found == wanted.hash) {
                    return file.sync_all().map_err(failed());
                }
                file.set_len(0).map_err(failed())?;
                if is_fresh {
                    let _ = std::fs::remove_file(path);
                    let why = format!("its hash is {}, not {}", found.unwrap_or_default(), wanted.hash);
                    return Err(self.damaged(wanted, why));
                }
                // What an earlier attempt left was not what it went on with: once more, all of it.
                (have, is_fresh, gain.bytes) = (0, true, 0);
                hasher = Hasher::of(&wanted.hash, wanted.size);
                continue;
            }
            let before = have;
            let body_time = BODY_TIME * (1 << restarts.min(10));
            let why = match self.receive(wanted, &mut file, &mut have, &mut hasher, (&mut gain, body_time))? {
                Received::Whole => continue,
                Received::Less(why) => why,
                Received::Nonsense(why) => {
                    failures = ATTEMPTS - 1;
                    why
                }
                Received::FromTheStart(why) => {
                    // The server does not go on in the middle: it gets more time for the whole.
                    restarts += 1;
                    file.set_len(0).map_err(failed())?;
                    (have, is_fresh, gain.bytes) = (0, true, 0);
                    hasher = Hasher::of(&wanted.hash, wanted.size);
                    why
                }
            };
            failures = if have >= before + LEAST_PROGRESS { 0 } else { failures + 1 };
            if failures == ATTEMPTS || gain.at.elapsed() >= self.patience.limit {
                let (name, file) = (self.name.to_string(), wanted.file.path.clone());
                return Err(HubError::CutOff { name, file, why, bytes: have });
            }
            self.say(have, Phase::Receiving)?;
            if failures > 0 {
                self.patience.pause(self.client.delay(failures - 1), gain.at)?;
            }
        }
    }

    /// The hash of what is there already; the file stands at its end.
    fn hashed(&mut self, wanted: &Wanted<'_>, file: &mut File, have: u64, path: &Path) -> Result<Hasher> {
        let mut hasher = Hasher::of(&wanted.hash, wanted.size);
        let mut buffer = vec![0; BUFFER_BYTES];
        file.seek(SeekFrom::Start(0)).map_err(HubError::io(path))?;
        let mut left = have;
        while left > 0 {
            let most = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            let count = file.read(&mut buffer[..most]).map_err(HubError::io(path))?;
            if count == 0 {
                break;
            }
            hasher.update(&buffer[..count]);
            left -= count as u64;
            self.say(have - left, Phase::Receiving)?;
        }
        Ok(hasher)
    }

    /// One answer of the server, written behind what is there.
    fn receive(
        &mut self,
        wanted: &Wanted<'_>,
        file: &mut File,
        have: &mut u64,
        hasher: &mut Hasher,
        (gain, body_time): (&mut Gain, Duration),
    ) -> Result<Received> {
        let url = self.client.url_of(self.name, self.commit, &wanted.file.path);
        let (client, first, share) = (Arc::clone(self.client), *have, self.patience.limit / CONNECTIONS);
        let answer = self.patience.during(gain.at, Instant::now() + self.patience.limit / 2, move || {
            client.follow(&url, first, body_time)
        });
        let reply = match answer? {
            Came::This(Ok((reply, _))) => reply,
            Came::This(Err(trouble)) => return Ok(trouble.into()),
            Came::Ended | Came::Late => return Ok(Received::Less("the server does not answer".into())),
        };
        match reply.status.as_u16() {
            206 if range_fits(&reply.headers, *have, wanted.size) => {}
            206 | 416 => {
                return Ok(Received::FromTheStart(format!(
                    "the server has another range than from {have} on"
                )));
            }
            200 if *have > 0 => {
                return Ok(Received::FromTheStart("the server does not go on in the middle".into()));
            }
            200 => {
                let length = reply.body.content_length().unwrap_or(wanted.size);
                if length != wanted.size {
                    return Err(
                        self.damaged(wanted, format!("the server sends {length} bytes, not {}", wanted.size))
                    );
                }
            }
            _ if is_busy(reply.status) => {
                return Ok(Received::Less(format!("the server answers {}", reply.status)));
            }
            _ => return Err(self.client.refusal(self.name, &reply)),
        }
        file.seek(SeekFrom::Start(*have)).map_err(HubError::io(Path::new(&wanted.file.path)))?;
        let buffers = self.patience.buffers(reply.body.into_reader(), BUFFER_BYTES)?;
        let mut own = Gain::from(*have);
        loop {
            let next = self.patience.next(&buffers, gain.at, own.at + share)?;
            let buffer = match next {
                Came::This(Ok(buffer)) if buffer.is_empty() && *have == wanted.size => {
                    return Ok(Received::Whole);
                }
                Came::This(Ok(buffer)) if !buffer.is_empty() => buffer,
                Came::This(Ok(_)) | Came::Ended => {
                    return Ok(Received::Less("the connection ended early".into()));
                }
                Came::This(Err(error)) => return Ok(Trouble::of_read(error).into()),
                Came::Late => {
                    let why = format!("fewer than {} KiB of it came in {share:?}", LEAST_PROGRESS >> 10);
                    return Ok(Received::Less(why));
                }
            };
            if buffer.len() as u64 > wanted.size - *have {
                return Err(self.damaged(wanted, format!("the server sends more than {} bytes", wanted.size)));
            }
            file.write_all(&buffer).map_err(HubError::io(Path::new(&wanted.file.path)))?;
            hasher.update(&buffer);
            *have += buffer.len() as u64;
            [&mut *gain, &mut own].into_iter().for_each(|gain| gain.note(*have));
            match gain.at.elapsed() < SLOW {
                true => self.say(*have, Phase::Receiving)?,
                false => self.patience.say_silent(gain.at)?,
            }
        }
    }

    fn say(&mut self, have: u64, phase: Phase) -> Result<()> {
        self.patience.bytes = self.before.saturating_add(have);
        self.patience.say(phase)
    }

    fn damaged(&self, wanted: &Wanted<'_>, why: String) -> HubError {
        HubError::Damaged { name: self.name.to_string(), file: wanted.file.path.clone(), why }
    }
}

/// What came of one answer.
enum Received {
    Whole,
    /// Not all of it; why.
    Less(String),
    /// Nothing that fits behind what is there; why.
    FromTheStart(String),
    /// No answer, and the next would not be one either; why.
    Nonsense(String),
}

impl From<Trouble> for Received {
    fn from(trouble: Trouble) -> Received {
        match trouble {
            Trouble::Passing(why) => Received::Less(why),
            Trouble::Lasting(why) => Received::Nonsense(why),
        }
    }
}

/// Which process has locked a file, as far as the system tells: the only one that has locked one with its number.
fn holder_of(file: &File) -> Option<u32> {
    const MAX_BYTES: u64 = 16 << 20;
    let inode = file.metadata().ok()?.ino().to_string();
    let locks = ferrospeed_files::read_text("/proc/locks", MAX_BYTES).ok()?;
    let holder = |line: &str| {
        // `1: FLOCK ADVISORY WRITE 708 00:1b:57 0 EOF`; those that wait have an arrow behind the number.
        let [_, "FLOCK", _, _, process, place, ..] = line.split_whitespace().collect::<Vec<_>>()[..] else {
            return None;
        };
        (place.rsplit(':').next() == Some(&inode)).then(|| process.parse::<u32>().ok())?
    };
    let mut holders = locks.lines().filter_map(holder);
    holders.next().filter(|_| holders.next().is_none())
}

/// Whether what comes begins where it is to begin, and is of a file of this size.
fn range_fits(headers: &ureq::http::HeaderMap, first: u64, size: u64) -> bool {
    let range = headers.get("content-range").and_then(|range| range.to_str().ok());
    let Some((from, total)) = range.and_then(|range| range.strip_prefix("bytes ")?.split_once('/')) else {
        return false;
    };
    let begins = from.split('-').next().and_then(|from| from.parse::<u64>().ok());
    begins == Some(first) && (total == "*" || total.parse() == Ok(size))
}
