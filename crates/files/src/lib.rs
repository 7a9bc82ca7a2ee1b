//! Reads and writes files that somebody named: plain files only, and never more than it was told.
//!
//! A name in a recipe, a configuration or a command line may be anything: a named pipe waits for whoever is at its other
//! end, a device never ends, and a file that is read whole may be larger than memory. Here none of them is read or written. Links are
//! followed. What is found is checked on the opened file, not on its name, so that nothing can be put there in between;
//! and it is opened without waiting. What is written takes the place of what was there when it is complete.
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

use std::ffi::OsString;
use std::fs::{File, FileType, OpenOptions};
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

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

/// Writes a plain file, in place of what it held: whole, or not at all where the disk is full. A link stays one.
pub fn write(path: impl AsRef<Path>, bytes: impl AsRef<[u8]>) -> Result<()> {
    let (path, bytes) = (path.as_ref(), bytes.as_ref());
    // What is there and no plain file is refused here.
    let place = match open_with(path, OpenOptions::new().append(true), 0) {
        Ok(_) => path.canonicalize()?,
        Err(error) if error.kind() == ErrorKind::NotFound && !path.is_symlink() => path.to_path_buf(),
        Err(error) if error.kind() == ErrorKind::NotFound => return write_over(path, bytes),
        Err(error) => return Err(error),
    };
    let beside = beside(&place);
    let mut file = match open_with(&beside, OpenOptions::new().write(true).create_new(true), 0) {
        Ok(file) => file,
        Err(error) if matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded) => {
            return Err(error);
        }
        // A folder that takes no new file may hold one that can be written.
        Err(_) => return write_over(path, bytes),
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
        ErrorKind::ResourceBusy => write_over(path, bytes),
        _ => Err(error),
    }
}

/// A name in the same folder that nobody else uses.
fn beside(place: &Path) -> PathBuf {
    static WRITTEN: AtomicU64 = AtomicU64::new(0);
    let mut name = OsString::from(".");
    name.push(place.file_name().unwrap_or_default());
    name.push(format!(".partial-{}-{}", std::process::id(), WRITTEN.fetch_add(1, Relaxed)));
    place.with_file_name(name)
}

/// Writes a plain file where it is.
fn write_over(path: &Path, bytes: &[u8]) -> Result<()> {
    // It is cut only when it is known to be one.
    let mut file = open_with(path, OpenOptions::new().write(true).create(true).truncate(false), 0)?;
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
