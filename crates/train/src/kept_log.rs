//! The log of a run that goes on: its lines up to the checkpoint. A damaged one costs its bad lines, never the run.

use std::ffi::OsString;
use std::fs::File;
use std::io::{ErrorKind, Write};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use ferrospeed_observe::JsonLines;
use serde::de::DeserializeOwned;

use crate::error::{Result, TrainError};

/// A log of ten million steps.
const MAX_LOG_BYTES: u64 = 8 << 30;

/// Steps, from one to another.
pub(crate) type Steps = RangeInclusive<u64>;

/// A new, empty log, or the one that is there without what came after `done` steps, and which of these it lacks. Adds to
/// `notes` which lines it has lost.
pub(crate) fn open_log<T: DeserializeOwned>(
    path: &Path,
    done: Option<u64>,
    step_of: fn(&T) -> u64,
    notes: &mut Vec<String>,
) -> Result<(JsonLines, Vec<Steps>)> {
    let Some(done) = done else { return Ok((JsonLines::create(path)?, Vec::new())) };
    if !path.exists() {
        return Ok((JsonLines::create(path)?, Vec::from_iter((done > 0).then_some(1..=done))));
    }
    let missing = keep_steps(path, done, step_of, notes)?;
    Ok((JsonLines::append(path)?, missing))
}

/// Drops the lines of later steps, those that cannot be read, and a last one that was never finished. The new file takes the
/// old one's place whole; one with bad lines is kept under another name. Gives the steps up to `last` that are not there.
fn keep_steps<T: DeserializeOwned>(
    path: &Path,
    last: u64,
    step_of: fn(&T) -> u64,
    notes: &mut Vec<String>,
) -> Result<Vec<Steps>> {
    let text = ferrospeed_files::read(path, MAX_LOG_BYTES).map_err(TrainError::io(path))?;
    let mut kept = Vec::with_capacity(text.len());
    let (mut bad, mut missing, mut logged, mut again) = (Vec::new(), Vec::new(), 0, 0u64);
    let lines = text.split_inclusive(|&byte| byte == b'\n').filter(|line| line.ends_with(b"\n"));
    for (number, line) in (1..).zip(lines) {
        match serde_json::from_slice(line) {
            Ok(record) if logged > 0 && step_of(&record) <= logged => again += 1,
            Ok(record) if step_of(&record) <= last => {
                kept.extend_from_slice(line);
                let step = step_of(&record);
                // One that begins later is of a run that began with another's checkpoint.
                missing.extend((logged > 0 && step > logged + 1).then(|| logged + 1..=step - 1));
                logged = logged.max(step);
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
    if again > 0 {
        notes.push(format!("{}: {again} lines repeat steps before them and were taken out", path.display()));
    }
    missing.extend((logged < last).then(|| logged + 1..=last));
    ferrospeed_files::write(path, kept).map_err(TrainError::io(path))?;
    Ok(missing)
}

/// Says which steps a log lacks, if any; many gaps by the first of them.
pub(crate) fn gaps(path: &Path, missing: &[Steps]) -> Option<String> {
    const SHOWN: usize = 5;
    let count: u64 = missing.iter().map(|steps| steps.end() - steps.start() + 1).sum();
    let mut named: Vec<String> = missing
        .iter()
        .take(SHOWN)
        .map(|steps| match steps.end() - steps.start() {
            0 => steps.start().to_string(),
            _ => format!("{} to {}", steps.start(), steps.end()),
        })
        .collect();
    if missing.len() > SHOWN {
        named.push("…".to_owned());
    }
    let (steps, are) = if count == 1 { ("step", "is") } else { ("steps", "are") };
    (count > 0).then(|| {
        format!(
            "{}: {count} {steps} before the checkpoint {are} not in it: {}",
            path.display(),
            named.join(", ")
        )
    })
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

    fn keep(path: &Path, last: u64) -> (Vec<Steps>, Vec<String>) {
        let mut notes = Vec::new();
        let missing = keep_steps(path, last, |record: &EvalRecord| record.step, &mut notes).unwrap();
        (missing, notes)
    }

    fn line(step: u64) -> String {
        format!("{{\"step\":{step},\"loss\":0.1,\"tokens\":7}}\n")
    }

    #[test]
    fn steps_that_a_log_lacks_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log.jsonl");
        let said = |steps: &[u64], last: u64| {
            std::fs::write(&path, steps.iter().map(|&step| line(step)).collect::<String>()).unwrap();
            let said = gaps(&path, &keep(&path, last).0)?;
            Some(said.strip_prefix(&format!("{}: ", path.display())).unwrap().to_owned())
        };
        assert_eq!(said(&[1, 2, 3, 4], 4), None);
        assert_eq!(said(&[1, 2, 3, 4, 7], 4), None, "what comes after the checkpoint is no gap");
        assert_eq!(said(&[1, 2, 2, 1, 3], 3), None);
        assert_eq!(said(&[1, 2, 4, 5], 4).unwrap(), "1 step before the checkpoint is not in it: 3");
        let most = "7 steps before the checkpoint are not in it: 3 to 5, 8 to 11";
        assert_eq!(said(&[2, 6, 7], 11).unwrap(), most);
        assert_eq!(said(&[], 2).unwrap(), "2 steps before the checkpoint are not in it: 1 to 2");
        let odd: Vec<u64> = (1..20).step_by(2).collect();
        assert!(said(&odd, 19).unwrap().ends_with("not in it: 2, 4, 6, 8, 10, …"));
    }

    #[test]
    fn steps_that_come_again_are_taken_out() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("eval.jsonl");
        std::fs::write(&path, [2, 4, 2, 4].map(line).concat()).unwrap();
        let (_, notes) = keep(&path, 4);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), [2, 4].map(line).concat());
        assert!(notes[0].contains("2 lines repeat steps before them"), "{notes:?}");
    }

    #[test]
    fn a_log_that_is_gone_lacks_every_step() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log.jsonl");
        let open =
            |done| open_log(&path, done, |record: &EvalRecord| record.step, &mut Vec::new()).unwrap().1;
        assert_eq!(open(None), []);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(open(Some(4)), [1..=4]);
    }

    #[test]
    fn a_log_goes_on_after_the_step_that_was_saved() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log.jsonl");
        std::fs::write(&path, format!("{}{}{}{{\"step\":4,\"lo", line(1), line(2), line(3))).unwrap();
        assert_eq!(keep(&path, 2), (vec![], vec![]));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), format!("{}{}", line(1), line(2)));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);

        // Bytes that are no text, a key that is another, and each time a file of its own for what was there.
        for (number, damage) in
            [&b"{\"step\":2,\xff\n"[..], b"{\"step\":2,\"lass\":0.1,\"tokens\":7}\n"].iter().enumerate()
        {
            let damaged = [line(1).as_bytes(), damage, line(3).as_bytes()].concat();
            std::fs::write(&path, &damaged).unwrap();
            let (missing, notes) = keep(&path, 3);
            assert_eq!((missing, notes.len()), (vec![2..=2], 1));
            assert!(notes[0].contains("log.jsonl: line 2 cannot be read"), "{notes:?}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), format!("{}{}", line(1), line(3)));
            let aside = folder.path().join(["log.jsonl.damaged", "log.jsonl.damaged-2"][number]);
            assert!(notes[0].contains(&aside.display().to_string()), "{notes:?}");
            assert_eq!(std::fs::read(aside).unwrap(), damaged);
        }
    }
}
