//! Reads and writes files that somebody named: plain files only, and never more than it was told.
//!
//! A name in a recipe, a configuration or a command line may be anything: a named pipe waits for whoever is at its other
//! end, a device never ends, and a file that is read whole may be larger than memory. Here none of them is read or written. Links are
//! followed to what is read; to what is written, those that this user or root made. What is found is checked on the opened file, not on
//! its name, so that nothing can be put there in between; and it is opened without waiting. What is written takes the place of what was
//! there when it is complete, and what a killed process left of it is removed by the next that writes it.
//!
//! ```
//! let folder = tempfile::tempdir()?;
//! let path = folder.path().join("notes.txt");
//! std::fs::write(&path, "four")?;
//! assert_eq!(ferrospeed_files::read_text(&path, 4)?, "four");
//! assert!(ferrospeed_files::read(&path, 3).unwrap_err().to_string().contains("at most 3 bytes"));
//! assert!(ferrospeed_files::open("/dev/zero").is_err());
//! # Ok::<(), std::io::Error>(())
//! ```

mod links;
pub mod unfinished;

use std::fs::{File, FileType, OpenOptions};
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

pub use unfinished::create_beside;

/// Opens a plain file to be read.
pub fn open(path: impl AsRef<Path>) -> Result<File> {
    open_with(path, OpenOptions::new().read(true), 0)
}

/// Opens a plain file as `options` say, with these flags of the system besides.
///
/// Flags that `options` hold themselves are lost: only one set can be given.
pub fn open_with(path: impl AsRef<Path>, options: &OpenOptions, flags: i32) -> Result<File> {
    // O_NONBLOCK: a pipe without another end would wait for one. It means nothing to plain files, and stays set.
    let mut options = options.clone();
    options.custom_flags(flags | libc::O_NONBLOCK | libc::O_NOCTTY);
    let file = match options.open(path) {
        Ok(file) => file,
        // What the system says of a socket, and of a pipe that is to be written and has no reader.
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) => {
            return Err(refused("a pipe, socket or device"));
        }
        Err(error) => return Err(error),
    };
    let kind = file.metadata()?.file_type();
    match kind.is_file() {
        true => Ok(file),
        false if kind.is_dir() => Err(Error::from_raw_os_error(libc::EISDIR)),
        false => Err(refused(name_of(kind))),
    }
}

/// Reads a plain file whole, if it has no more than `max_bytes`.
pub fn read(path: impl AsRef<Path>, max_bytes: u64) -> Result<Vec<u8>> {
    let file = open(path)?;
    let claimed = file.metadata()?.len();
    if claimed > max_bytes {
        return Err(too_large(max_bytes));
    }
    // A file may grow, and those in /proc claim to be empty.
    let mut bytes = Vec::with_capacity(claimed as usize + 1);
    file.take(max_bytes.saturating_add(1)).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > max_bytes {
        true => Err(too_large(max_bytes)),
        false => Ok(bytes),
    }
}

/// Reads a plain file of UTF-8 text whole, if it has no more than `max_bytes`.
pub fn read_text(path: impl AsRef<Path>, max_bytes: u64) -> Result<String> {
    String::from_utf8(read(path, max_bytes)?).map_err(|error| {
        let place = error.utf8_error().valid_up_to();
        Error::new(ErrorKind::InvalidData, format!("is not UTF-8 text: see byte {place}"))
    })
}

/// Opens a plain file to be written, as `options` say: through links of this user only.
pub fn open_to_write(path: impl AsRef<Path>, options: &OpenOptions) -> Result<File> {
    open_with(links::place_to_write(path.as_ref())?, options, libc::O_NOFOLLOW)
}

/// Makes a folder to write in, with those it lies in, where there is none. One that is there through a link must be there through
/// links of this user or root: what is written, and what is removed to make room for it, would be of somebody else's choice.
pub fn create_folder(path: impl AsRef<Path>) -> Result<()> {
    expect_own_links(&path)?;
    std::fs::create_dir_all(path)
}

/// Refuses a name that leads to where it leads through a link of somebody else.
pub fn expect_own_links(path: impl AsRef<Path>) -> Result<()> {
    links::place_to_write(path.as_ref()).map(drop)
}

/// Opens the file that a lock is taken on, and makes it where there is none. No link is followed: nobody needs a lock elsewhere.
pub fn open_lock(path: &Path) -> Result<File> {
    let options = OpenOptions::new().create(true).truncate(false).read(true).write(true).clone();
    open_with(path, &options, libc::O_NOFOLLOW).map_err(|error| match error.raw_os_error() {
        Some(libc::ELOOP) => Error::other("is a link, and a lock must be a file; remove it"),
        _ => error,
    })
}

/// Writes a plain file, in place of what it held: whole, or not at all where the disk is full. A link of this user stays one.
pub fn write(path: impl AsRef<Path>, bytes: impl AsRef<[u8]>) -> Result<()> {
    let (place, bytes) = (links::place_to_write(path.as_ref())?, bytes.as_ref());
    // What is there and no plain file is refused here.
    match open_with(&place, OpenOptions::new().append(true), libc::O_NOFOLLOW) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let (beside, mut file) = match create_beside(&place) {
        Ok(created) => created,
        Err(error) if matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded) => {
            return Err(error);
        }
        // A folder that takes no new file may hold one that can be written.
        Err(_) => return write_over(&place, bytes),
    };
    let written = file
        .write_all(bytes)
        .and_then(|()| match std::fs::metadata(&place) {
            Ok(old) => file.set_permissions(old.permissions()),
            Err(_) => Ok(()),
        })
        .and_then(|()| std::fs::rename(&beside, &place));
    let Err(error) = written else { return Ok(()) };
    let _ = std::fs::remove_file(&beside);
    match error.kind() {
        // A file that is mounted on its own keeps its place.
        ErrorKind::ResourceBusy => write_over(&place, bytes),
        _ => Err(error),
    }
}

/// Writes a plain file where it is.
fn write_over(place: &Path, bytes: &[u8]) -> Result<()> {
    // It is cut only when it is known to be one.
    let options = OpenOptions::new().write(true).create(true).truncate(false).clone();
    let mut file = open_with(place, &options, libc::O_NOFOLLOW)?;
    file.set_len(0)?;
    file.write_all(bytes)
}

fn name_of(kind: FileType) -> &'static str {
    match () {
        () if kind.is_fifo() => "a pipe",
        () if kind.is_char_device() || kind.is_block_device() => "a device",
        () if kind.is_socket() => "a socket",
        () => "something else",
    }
}

fn refused(kind: &str) -> Error {
    Error::new(ErrorKind::InvalidInput, format!("is no plain file but {kind}"))
}

fn too_large(max_bytes: u64) -> Error {
    Error::new(ErrorKind::FileTooLarge, format!("is too large: at most {max_bytes} bytes are read"))
}

#[cfg(test)]
extern crate self as ferrospeed_files;
#[cfg(test)]
#[path = "../tests/it/main.rs"]
mod it;
