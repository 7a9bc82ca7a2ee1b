//! Reads and writes files that somebody named: plain files only, and never more than it was told.
//!
//! A name in a recipe, a configuration or a command line may be anything: a named pipe waits for whoever is at its other
//! end, a device never ends, and a file that is read whole may be larger than memory. Here none of them is read or written. Links are
//! followed. What is found is checked on the opened file, not on its name, so that nothing can be put there in between;
//! and it is opened without waiting.
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

use std::fs::{File, FileType, OpenOptions};
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

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

/// Writes a plain file, in place of what it held.
pub fn write(path: impl AsRef<Path>, bytes: impl AsRef<[u8]>) -> Result<()> {
    // It is cut only when it is known to be one.
    let mut file = open_with(path, OpenOptions::new().write(true).create(true).truncate(false), 0)?;
    file.set_len(0)?;
    file.write_all(bytes.as_ref())
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
