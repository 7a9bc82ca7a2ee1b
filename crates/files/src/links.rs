//! Which links are followed by what is written: those that this user or the system's administrator made.
//!
//! A link in a run's folder may keep a log on another disk. One that somebody else put there, which is possible wherever
//! others may write, would have this user write over a file of that somebody's choice, or into a folder. Of a name's last part no such
//! link is followed. In its folders one is where only its maker, or the owner of the folder it lies in, can have meant it: a
//! colleague's link in the colleague's own folder leads on, one in a folder that everyone may write to does not. The kernel
//! has the same rule for sticky folders, where `fs.protected_symlinks` is on.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs::{Metadata, OpenOptions};
use std::io::{Error, ErrorKind, Result};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};

/// What the system allows.
const MAX_LINKS: usize = 40;
/// Everyone may write.
const WRITABLE_BY_ALL: u32 = 0o002;

/// Where a name leads, free of links: a file, something else, or a place where nothing is.
pub(crate) fn place_to_write(path: &Path) -> Result<PathBuf> {
    let (mut place, mut ahead, mut links) = (PathBuf::new(), VecDeque::new(), 0);
    put_ahead(&mut ahead, path);
    while let Some(part) = ahead.pop_front() {
        let next = place.join(&part);
        // Owner and target are those of one and the same link, whatever takes its name meanwhile.
        let looked = OpenOptions::new().read(true).custom_flags(libc::O_PATH | libc::O_NOFOLLOW).open(&next);
        let found = match looked {
            Ok(found) => found,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Ok(ahead.iter().fold(next, |place, part| place.join(part)));
            }
            Err(error) => return Err(error),
        };
        let about = found.metadata()?;
        if !about.is_symlink() {
            place = next;
            continue;
        }
        links += 1;
        if links > MAX_LINKS {
            return Err(Error::from_raw_os_error(libc::ELOOP));
        }
        if is_foreign(&about) && (ahead.is_empty() || is_anybodys(&place, &about)?) {
            let why = format!(
                "is a link that user {} made, and would be written through; remove it, or make it yourself",
                about.uid()
            );
            return Err(Error::new(
                ErrorKind::PermissionDenied,
                if ahead.is_empty() { why } else { format!("{}, on the way, {why}", next.display()) },
            ));
        }
        put_ahead(&mut ahead, Path::new(&nix::fcntl::readlinkat(&found, "")?));
    }
    Ok(place)
}

/// The parts of a name, before those that are ahead already. A slash at its end, which would have a link followed before it is
/// looked at, is not among them.
fn put_ahead(ahead: &mut VecDeque<OsString>, path: &Path) {
    for part in path.components().rev().filter(|part| *part != Component::CurDir) {
        ahead.push_front(part.as_os_str().to_owned());
    }
}

fn is_foreign(link: &Metadata) -> bool {
    link.uid() != 0 && link.uid() != nix::unistd::geteuid().as_raw()
}

/// Whether the folder that a link lies in lets everyone make one, and is not the maker's own.
fn is_anybodys(folder: &Path, link: &Metadata) -> Result<bool> {
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let about = folder.metadata()?;
    Ok(about.mode() & WRITABLE_BY_ALL != 0 && about.uid() != link.uid())
}
