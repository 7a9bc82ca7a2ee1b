//! Which links are followed by what is written: those that this user or the system's administrator made.
//!
//! A link in a run's folder may keep a log on another disk. One that somebody else put there, which is possible wherever
//! others may write, would have this user write over a file of that somebody's choice, or into a folder. Only the last part of a
//! name is looked at: whoever makes folders looks at each of them.

use std::fs::OpenOptions;
use std::io::{Error, ErrorKind, Result};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// What the system allows.
const MAX_LINKS: usize = 40;

/// Where a name leads, which is no link itself: a file, something else, or a place where nothing is.
pub(crate) fn place_to_write(path: &Path) -> Result<PathBuf> {
    // Without a slash at its end, which would have the link followed before it is looked at.
    let mut place: PathBuf = path.components().collect();
    for _ in 0..MAX_LINKS {
        // Owner and target are those of one and the same link, whatever takes its name meanwhile.
        let looked = OpenOptions::new().read(true).custom_flags(libc::O_PATH | libc::O_NOFOLLOW).open(&place);
        let found = match looked {
            Ok(found) => found,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(place),
            Err(error) => return Err(error),
        };
        let about = found.metadata()?;
        if !about.is_symlink() {
            return Ok(place);
        }
        if about.uid() != 0 && about.uid() != nix::unistd::geteuid().as_raw() {
            let why = format!(
                "is a link that user {} made, and would be written through; remove it, or make it yourself",
                about.uid()
            );
            return Err(Error::new(ErrorKind::PermissionDenied, why));
        }
        let target = nix::fcntl::readlinkat(&found, "")?;
        place = place.parent().unwrap_or(Path::new("")).join(target);
    }
    Err(Error::from_raw_os_error(libc::ELOOP))
}
