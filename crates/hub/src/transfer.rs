//! Files from the server into the cache: one process at a time, on from where it stopped, compared with what the list says.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::time::Duration;

use nix::fcntl::{Flock, FlockArg};

use crate::cache::{Repository, make_folder, open_unfinished};
use crate::client::{ATTEMPTS, Client, is_busy};
use crate::error::{HubError, Result};
use crate::listing::{Hasher, Listing, RemoteFile};
use crate::name::HubName;
use crate::{Phase, Progress, Tell};

/// One answer may take so long; what has come by then is kept, and the rest is asked for anew. So a connection that stands still is
/// noticed, and a slow one is not cut off for good.
const BODY_TIME: Duration = Duration::from_secs(60);
/// Less than this is no progress.
const LEAST_PROGRESS: u64 = 1 << 16;
const BUFFER_BYTES: usize = 1 << 18;
const LOCK_POLL: Duration = Duration::from_millis(100);

/// What a download is part of: told to whoever listens.
struct Course<'a, 'b> {
    client: &'a Client,
    name: &'a HubName,
    commit: &'a str,
    before: u64,
    total: u64,
    tell: &'a mut Tell<'b>,
}

/// A file to be brought.
struct Wanted<'a> {
    file: &'a RemoteFile,
    size: u64,
    hash: String,
}

/// Brings all of these that are not there yet.
pub(crate) fn bring_all(
    client: &Client,
    name: &HubName,
    repository: &Repository,
    listing: &Listing,
    files: &[&RemoteFile],
    tell: &mut Tell<'_>,
) -> Result<()> {
    let root = repository.snapshot(&listing.commit);
    let (here, absent): (Vec<&RemoteFile>, Vec<&RemoteFile>) =
        files.iter().copied().partition(|file| root.join(&file.path).is_file());
    let mut wanted = Vec::new();
    for file in absent {
        let (size, hash) = client.described(name, &listing.commit, file)?;
        wanted.push(Wanted { file, size, hash });
    }
    let needed = wanted.iter().map(|wanted| wanted.size).sum();
    check_room(name, repository, needed)?;
    let before: u64 = here.iter().filter_map(|file| file.size).sum();
    let mut course =
        Course { client, name, commit: &listing.commit, before, total: before.saturating_add(needed), tell };
    for wanted in &wanted {
        course.bring(repository, wanted)?;
        course.before += wanted.size;
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

impl Course<'_, '_> {
    fn bring(&mut self, repository: &Repository, wanted: &Wanted<'_>) -> Result<()> {
        let blob = repository.blob(&wanted.hash)?;
        let _lock = self.lock(repository, wanted)?;
        if !blob.is_file() {
            let mut beside = blob.clone().into_os_string();
            beside.push(".incomplete");
            let beside = Path::new(&beside);
            self.fill(wanted, beside)?;
            std::fs::rename(beside, &blob).map_err(HubError::io(&blob))?;
        }
        repository.link(self.commit, &wanted.file.path, &blob)
    }

    /// Waits until no other process downloads this file.
    fn lock(&mut self, repository: &Repository, wanted: &Wanted<'_>) -> Result<Flock<File>> {
        let mut file = repository.lock_file(&wanted.hash)?;
        loop {
            match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => return Ok(lock),
                Err((again, nix::errno::Errno::EWOULDBLOCK)) => file = again,
                Err((_, error)) => return Err(HubError::io(repository.root())(error.into())),
            }
            self.say(wanted, 0, Phase::Waiting)?;
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
        let (mut failures, mut restarts) = (0, 0);
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
                (have, is_fresh) = (0, true);
                hasher = Hasher::of(&wanted.hash, wanted.size);
                continue;
            }
            let before = have;
            let body_time = BODY_TIME * (1 << restarts.min(10));
            let why = match self.receive(wanted, &mut file, &mut have, &mut hasher, body_time)? {
                Received::Whole => continue,
                Received::Less(why) => why,
                Received::FromTheStart(why) => {
                    // The server does not go on in the middle: it gets more time for the whole.
                    restarts += 1;
                    file.set_len(0).map_err(failed())?;
                    (have, is_fresh) = (0, true);
                    hasher = Hasher::of(&wanted.hash, wanted.size);
                    why
                }
            };
            failures = if have >= before + LEAST_PROGRESS { 0 } else { failures + 1 };
            if failures == ATTEMPTS {
                let (name, file) = (self.name.to_string(), wanted.file.path.clone());
                return Err(HubError::CutOff { name, file, why, bytes: have });
            }
            self.say(wanted, have, Phase::Receiving)?;
            if failures > 0 {
                self.client.wait(failures - 1);
            }
        }
    }

    /// The hash of what is there already; the file stands at its end.
    fn hashed(&self, wanted: &Wanted<'_>, file: &mut File, have: u64, path: &Path) -> Result<Hasher> {
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
        body_time: Duration,
    ) -> Result<Received> {
        let url = self.client.url_of(self.name, self.commit, &wanted.file.path);
        let (mut reply, _) = match self.client.follow(&url, *have, body_time) {
            Ok(answer) => answer,
            Err(why) => return Ok(Received::Less(why)),
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
        let mut reader = reply.body.as_reader();
        let mut buffer = vec![0; BUFFER_BYTES];
        loop {
            let count = match reader.read(&mut buffer) {
                Ok(0) if *have == wanted.size => return Ok(Received::Whole),
                Ok(0) => return Ok(Received::Less("the connection ended early".into())),
                Ok(count) => count,
                Err(error) => return Ok(Received::Less(error.to_string())),
            };
            if *have + count as u64 > wanted.size {
                return Err(self.damaged(wanted, format!("the server sends more than {} bytes", wanted.size)));
            }
            file.write_all(&buffer[..count]).map_err(HubError::io(Path::new(&wanted.file.path)))?;
            hasher.update(&buffer[..count]);
            *have += count as u64;
            self.say(wanted, *have, Phase::Receiving)?;
        }
    }

    fn say(&mut self, wanted: &Wanted<'_>, have: u64, phase: Phase) -> Result<()> {
        let progress = Progress {
            repository: self.name.repository(),
            file: &wanted.file.path,
            phase,
            bytes: self.before + have,
            total_bytes: self.total,
        };
        match (self.tell)(&progress) {
            std::ops::ControlFlow::Continue(()) => Ok(()),
            std::ops::ControlFlow::Break(()) => Err(HubError::Stopped { name: self.name.to_string() }),
        }
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
