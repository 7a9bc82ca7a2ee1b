//! The log of a run that goes on: its lines up to the checkpoint. A damaged one costs its bad lines, never the run.

use std::ffi::OsString;
use std::fs::File;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use ferrospeed_observe::JsonLines;
use serde::de::DeserializeOwned;

use crate::error::{Result, TrainError};

/// A log of ten million steps.
const MAX_LOG_BYTES: u64 = 8 << 30;

/// A new, empty log, or the one that is there without what came after `done` steps, and the last step that is in it. Adds to
/// `notes` which lines it has lost.
pub(crate) fn open_log<T: DeserializeOwned>(
    path: &Path,
    done: Option<u64>,
    step_of: fn(&T) -> u64,
    notes: &mut Vec<String>,
) -> Result<(JsonLines, Option<u64>)> {
    let Some(done) = done.filter(|_| path.exists()) else { return Ok((JsonLines::create(path)?, None)) };
    let last = keep_steps(path, done, step_of, notes)?;
    Ok((JsonLines::append(path)?, Some(last)))
}

/// Drops the lines of later steps, those that cannot be read, and a last one that was never finished. The new file takes the
/// old one's place whole; one with bad lines is kept under another name. Gives the last step that stays.
fn keep_steps<T: DeserializeOwned>(
    path: &Path,
    last: u64,
    step_of: fn(&T) -> u64,
    notes: &mut Vec<String>,
) -> Result<u64> {
    let text = ferrospeed_files::read(path, MAX_LOG_BYTES).map_err(TrainError::io(path))?;
    let mut kept = Vec::with_capacity(text.len());
    let (mut bad, mut logged) = (Vec::new(), 0);
    let lines = text.split_inclusive(|&byte| byte == b'\n').filter(|line| line.ends_with(b"\n"));
    for (number, line) in (1..).zip(lines) {
        match serde_json::from_slice(line) {
            Ok(record) if step_of(&record) <= last => {
                kept.extend_from_slice(line);
                logged = step_of(&record);
            }
            Ok(_) => {}
            Err(error) => bad.push((number, error)),
        }
    }
    if let Some((number, error)) = bad.first() {
        let aside = put_aside(path, &text)?;
        notes.push(format!(
            "{}: line {number} cannot be read (column {}){}; the file is kept as {}, and the log goes on without {}",
            path.display(),
            error.column(),
            if bad.len() > 1 { format!(", nor can {} more", bad.len() - 1) } else { String::new() },
            aside.display(),
            if bad.len() > 1 { "these lines" } else { "this line" },
        ));
    }
    ferrospeed_files::write(path, kept).map_err(TrainError::io(path))?;
    Ok(logged)
}

/// Keeps a damaged log as `NAME.damaged`, or the first of `NAME.damaged-2`, `NAME.damaged-3` … that is free.
fn put_aside(path: &Path, text: &[u8]) -> Result<PathBuf> {
    let mut number = 1;
    loop {
        let mut name = OsString::from(path);
        name.push(".damaged");
        if number > 1 {
            name.push(format!("-{number}"));
        }
        let aside = PathBuf::from(name);
        match File::create_new(&aside) {
            Ok(mut file) => {
                file.write_all(text).map_err(TrainError::io(&aside))?;
                return Ok(aside);
            }
            Err(error) if error.kind() == ErrorKind::AlreadyExists => number += 1,
            Err(error) => return Err(TrainError::io(&aside)(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use ferrospeed_observe::EvalRecord;

    use super::*;

    fn keep(path: &Path, last: u64) -> (u64, Vec<String>) {
        let mut notes = Vec::new();
        let logged = keep_steps(path, last, |record: &EvalRecord| record.step, &mut notes).unwrap();
        (logged, notes)
    }

    #[test]
    fn a_log_goes_on_after_the_step_that_was_saved() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log.jsonl");
        let line = |step: u64| format!("{{\"step\":{step},\"loss\":0.1,\"tokens\":7}}\n");
        std::fs::write(&path, format!("{}{}{}{{\"step\":4,\"lo", line(1), line(2), line(3))).unwrap();
        assert_eq!(keep(&path, 2), (2, vec![]));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), format!("{}{}", line(1), line(2)));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);

        // Bytes that are no text, a key that is another, and each time a file of its own for what was there.
        for (number, damage) in
            [&b"{\"step\":2,\xff\n"[..], b"{\"step\":2,\"lass\":0.1,\"tokens\":7}\n"].iter().enumerate()
        {
            let damaged = [line(1).as_bytes(), damage, line(3).as_bytes()].concat();
            std::fs::write(&path, &damaged).unwrap();
            let (logged, notes) = keep(&path, 3);
            assert_eq!((logged, notes.len()), (3, 1));
            assert!(notes[0].contains("log.jsonl: line 2 cannot be read"), "{notes:?}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), format!("{}{}", line(1), line(3)));
            let aside = folder.path().join(["log.jsonl.damaged", "log.jsonl.damaged-2"][number]);
            assert!(notes[0].contains(&aside.display().to_string()), "{notes:?}");
            assert_eq!(std::fs::read(aside).unwrap(), damaged);
        }
    }
}
