//! TensorBoard event files: `OUTPUT/JOB/events.out.tfevents.SECONDS.HOST.PID.N`.
//!
//! A resumed run adds a file beside the old ones; TensorBoard shows a folder's files as one run.

mod event;
mod framing;

pub use event::Event;

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::error::{ObserveError, Result};
use crate::monitor::{Monitor, unix_time_s};
use crate::whole::WholeRecords;

/// Writes one event file.
#[derive(Debug)]
pub struct TensorBoard {
    path: PathBuf,
    file: WholeRecords,
}

impl TensorBoard {
    /// Starts a new event file in `output_path/job_name`, which is made if it is not there.
    pub fn create(output_path: &Path, job_name: &str) -> Result<TensorBoard> {
        let folder = output_path.join(job_name);
        ferrospeed_files::create_folder(&folder).map_err(ObserveError::io(&folder))?;
        let (path, file) = new_file(&folder)?;
        let mut monitor = TensorBoard { path, file };
        monitor.append(&Event::FileVersion("brain.Event:2".into()))?;
        Ok(monitor)
    }

    /// The event file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn append(&mut self, event: &Event) -> Result<()> {
        let record = framing::frame(&event.encode(unix_time_s()));
        self.file.append(&record).map_err(ObserveError::io(&self.path))
    }
}

impl Monitor for TensorBoard {
    fn write(&mut self, tag: &str, value: f64, step: u64) -> Result<()> {
        self.append(&Event::Scalar { tag: tag.to_owned(), value: value as f32, step })
    }

    /// Events go to the file as they are written: nothing is held back.
    fn flush(&mut self) -> Result<()> {
        Ok(())
    }
}

const MAX_EVENT_FILE_BYTES: u64 = 4 << 30;

/// Reads an event file, checking both checksums of every record.
pub fn read_events(path: &Path) -> Result<Vec<Event>> {
    let bytes = ferrospeed_files::read(path, MAX_EVENT_FILE_BYTES).map_err(ObserveError::io(path))?;
    let mut rest = &bytes[..];
    let mut events = Vec::new();
    while !rest.is_empty() {
        let offset = bytes.len() - rest.len();
        let bad = |why| ObserveError::BadEvents { path: path.to_path_buf(), offset, why };
        let (message, after) = framing::unframe(rest).map_err(bad)?;
        events.extend(Event::decode(message).map_err(bad)?);
        rest = after;
    }
    Ok(events)
}

fn new_file(folder: &Path) -> Result<(PathBuf, WholeRecords)> {
    let (second, host, process) = (unix_time_s() as u64, host_name(), std::process::id());
    let mut attempt = 0;
    loop {
        let path = folder.join(format!("events.out.tfevents.{second:010}.{host}.{process}.{attempt}"));
        match WholeRecords::create_new(&path) {
            Ok(file) => return Ok((path, file)),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => attempt += 1,
            Err(source) => return Err(ObserveError::Io { path, source }),
        }
    }
}

/// The host's name for a file name; it only tells files of several hosts apart.
fn host_name() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name: String =
        name.trim().chars().filter(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_')).collect();
    if name.is_empty() { "localhost".into() } else { name }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scalars_read_back_after_the_version() {
        let folder = tempfile::tempdir().unwrap();
        let mut board = TensorBoard::create(folder.path(), "job").unwrap();
        board.write("Train/Samples/lr", 0.5, 8).unwrap();
        board.write("Train/Samples/train_loss", f64::NAN, 0).unwrap();
        let events = read_events(board.path()).unwrap();
        assert_eq!(events[0], Event::FileVersion("brain.Event:2".into()));
        assert_eq!(events[1], Event::Scalar { tag: "Train/Samples/lr".into(), value: 0.5, step: 8 });
        assert!(matches!(&events[2], Event::Scalar { value, .. } if value.is_nan()));
        assert_eq!(events.len(), 3);
        let name = board.path().file_name().unwrap().to_string_lossy().into_owned();
        assert!(name.starts_with("events.out.tfevents."), "{name}");
    }

    #[test]
    fn a_resumed_run_starts_a_second_file() {
        let folder = tempfile::tempdir().unwrap();
        let first = TensorBoard::create(folder.path(), "job").unwrap();
        let second = TensorBoard::create(folder.path(), "job").unwrap();
        assert_ne!(first.path(), second.path());
    }

    #[test]
    fn a_damaged_file_is_refused_with_its_place() {
        let folder = tempfile::tempdir().unwrap();
        let mut board = TensorBoard::create(folder.path(), "").unwrap();
        let second_record = fs::metadata(board.path()).unwrap().len() as usize;
        board.write("lr", 0.5, 8).unwrap();
        let mut bytes = fs::read(board.path()).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        let path = folder.path().join("damaged");
        fs::write(&path, bytes).unwrap();
        let message = read_events(&path).unwrap_err().to_string();
        let expected =
            format!("damaged: record at byte {second_record}: the checksum of its payload does not match");
        assert!(message.ends_with(&expected), "{message}");
    }
}
