//! One CSV file per tag: `OUTPUT/JOB/Train_Samples_lr.csv` with the header `step,lr` and rows that end in CRLF.
//!
//! Files grow: a resumed run goes on where the last one stopped, after [`CsvMonitor::go_back`] has taken away what it will
//! write again. The header is written once per file, and a row that a killed run left half-written is taken away before the
//! first new one. Tags that differ only in `/`, space and `_` share a file, as they do in DeepSpeed.

use std::collections::HashMap;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use crate::error::{ObserveError, Result};
use crate::monitor::{Monitor, TRAIN_LOSS};
use crate::whole::WholeRecords;

/// A curve of ten million steps.
const MAX_CSV_BYTES: u64 = 1 << 30;

/// Writes one CSV file per tag.
#[derive(Debug)]
pub struct CsvMonitor {
    folder: PathBuf,
    files: HashMap<PathBuf, WholeRecords>,
}

impl CsvMonitor {
    /// Writes into `output_path/job_name`, which is made if it is not there.
    pub fn create(output_path: &Path, job_name: &str) -> Result<CsvMonitor> {
        let folder = output_path.join(job_name);
        ferrospeed_files::create_folder(&folder).map_err(ObserveError::io(&folder))?;
        Ok(CsvMonitor { folder, files: HashMap::new() })
    }

    /// Adds a whole number, which is written without a decimal point.
    pub fn write_integer(&mut self, tag: &str, value: i64, step: u64) -> Result<()> {
        self.write_row(tag, &value.to_string(), step)
    }

    /// Takes the rows of steps away that come after so many `samples`, from the files of a run that goes on from there. Files
    /// whose names begin with none of `tags` are others', and what is no row stays. Gives how many rows it took.
    pub fn go_back(output_path: &Path, job_name: &str, samples: u64, tags: &[&str]) -> Result<u64> {
        let folder = output_path.join(job_name);
        let entries = match folder.read_dir() {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(0),
            entries => entries.map_err(ObserveError::io(&folder))?,
        };
        let starts: Vec<String> = tags.iter().map(|tag| flat(tag)).collect();
        let mut taken = 0;
        for entry in entries {
            let name = entry.map_err(ObserveError::io(&folder))?.file_name();
            let Some(name) = name.to_str().filter(|name| name.ends_with(".csv")) else { continue };
            if starts.iter().any(|start| name.starts_with(start)) {
                // A loss has its place before its step, and all else behind it.
                let last = if name == file_name(TRAIN_LOSS) { samples.checked_sub(1) } else { Some(samples) };
                taken += keep_rows(&folder.join(name), last)?;
            }
        }
        Ok(taken)
    }

    fn write_row(&mut self, tag: &str, value: &str, step: u64) -> Result<()> {
        let path = self.folder.join(file_name(tag));
        let row = format!("{step},{value}\r\n");
        // Another run may have gone back in a file that both add to, which puts a new one in its place.
        if self.files.get(&path).is_some_and(WholeRecords::is_unlinked) {
            self.files.remove(&path);
        }
        if let Some(file) = self.files.get_mut(&path) {
            return file.append(row.as_bytes()).map_err(ObserveError::io(&path));
        }
        let (mut file, has_header) = open_to_append(&path).map_err(ObserveError::io(&path))?;
        let label = tag.rsplit('/').next().unwrap_or(tag);
        let header = if has_header { String::new() } else { format!("step,{}\r\n", quoted(label)) };
        file.append((header + &row).as_bytes()).map_err(ObserveError::io(&path))?;
        self.files.insert(path, file);
        Ok(())
    }
}

impl Monitor for CsvMonitor {
    fn write(&mut self, tag: &str, value: f64, step: u64) -> Result<()> {
        self.write_row(tag, &decimal(value), step)
    }

    /// Rows go to the file as they are written: nothing is held back.
    fn flush(&mut self) -> Result<()> {
        Ok(())
    }
}

fn flat(tag: &str) -> String {
    tag.replace(['/', ' '], "_")
}

fn file_name(tag: &str) -> String {
    flat(tag) + ".csv"
}

/// Keeps the rows up to a position, or none, and all that is no row. Gives how many went.
fn keep_rows(path: &Path, last: Option<u64>) -> Result<u64> {
    let text = ferrospeed_files::read(path, MAX_CSV_BYTES).map_err(ObserveError::io(path))?;
    let position = |line: &[u8]| -> Option<u64> {
        let digits = &line[..line.iter().position(|&byte| byte == b',')?];
        std::str::from_utf8(digits).ok()?.parse().ok()
    };
    let (mut kept, mut taken) = (Vec::with_capacity(text.len()), 0);
    for line in text.split_inclusive(|&byte| byte == b'\n') {
        match position(line) {
            Some(position) if Some(position) > last => taken += 1,
            _ => kept.extend_from_slice(line),
        }
    }
    if taken > 0 {
        ferrospeed_files::write(path, kept).map_err(ObserveError::io(path))?;
    }
    Ok(taken)
}

/// Opens a file at its end, less a last line without an end, and says whether anything is in it.
fn open_to_append(path: &Path) -> std::io::Result<(WholeRecords, bool)> {
    let mut file = WholeRecords::open(path)?;
    let mut content = Vec::new();
    file.file().read_to_end(&mut content)?;
    let whole_lines = content.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1);
    if whole_lines < content.len() {
        file.cut(whole_lines as u64)?;
    }
    Ok((file, whole_lines > 0))
}

/// A field, in quotes only where CSV needs them.
fn quoted(field: &str) -> String {
    if field.contains([',', '"', '\r', '\n']) {
        format!("\"{}\"", field.replace('"', "\"\""))
    } else {
        field.into()
    }
}

/// The shortest decimal that reads back as `value`, laid out as Python's `repr` does: `1.0`, `1e-07`, `nan`.
fn decimal(value: f64) -> String {
    if value.is_nan() {
        return "nan".into();
    }
    if value.is_infinite() {
        return if value > 0.0 { "inf".into() } else { "-inf".into() };
    }
    let magnitude = value.abs();
    if magnitude == 0.0 || (1e-4..1e16).contains(&magnitude) {
        return format!("{value:?}");
    }
    let scientific = format!("{value:e}");
    match scientific.split_once('e') {
        Some((digits, exponent)) => {
            let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |rest| ('-', rest));
            format!("{digits}e{sign}{exponent:0>2}")
        }
        None => scientific,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn numbers_are_laid_out_as_python_does() {
        let cases = [
            (0.1, "0.1"),
            (3.0, "3.0"),
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1e-7, "1e-07"),
            (0.0001, "0.0001"),
            (0.00012345, "0.00012345"),
            (0.000099, "9.9e-05"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (-1.25e120, "-1.25e+120"),
            (5e-324, "5e-324"),
            (123456789012345680.0, "1.2345678901234568e+17"),
            (f64::NAN, "nan"),
            (f64::INFINITY, "inf"),
            (f64::NEG_INFINITY, "-inf"),
        ];
        for (value, text) in cases {
            assert_eq!(decimal(value), text);
        }
    }

    #[test]
    fn a_resumed_run_adds_rows_and_no_second_header() {
        let folder = tempfile::tempdir().unwrap();
        for step in [2, 4] {
            CsvMonitor::create(folder.path(), "job").unwrap().write("a/lr", 0.5, step).unwrap();
        }
        let text = fs::read_to_string(folder.path().join("job/a_lr.csv")).unwrap();
        assert_eq!(text, "step,lr\r\n2,0.5\r\n4,0.5\r\n");
    }

    #[test]
    fn a_run_that_goes_back_takes_away_what_it_will_write_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join("job").join(name);
        let mut csv = CsvMonitor::create(folder.path(), "job").unwrap();
        for after in [4, 8, 12, 16] {
            csv.write("Train/Samples/train_loss", 0.5, after - 4).unwrap();
            csv.write("Train/Samples/lr", 0.5, after).unwrap();
        }
        // Not ours, not a row, and a row that was never finished.
        fs::write(path("other.csv"), "step,x\n100,1\n").unwrap();
        fs::write(path("Validation_loss.csv"), "step,loss\r\n8,1.0\r\nabout,12\r\n12,1.0\r\n16,1").unwrap();
        let go_back =
            |samples| CsvMonitor::go_back(folder.path(), "job", samples, &["Train/", "Validation/"]);
        assert_eq!(go_back(8).unwrap(), 2 + 2 + 2);
        let read = |name: &str| fs::read_to_string(path(name)).unwrap();
        assert_eq!(read("Train_Samples_train_loss.csv"), "step,train_loss\r\n0,0.5\r\n4,0.5\r\n");
        assert_eq!(read("Train_Samples_lr.csv"), "step,lr\r\n4,0.5\r\n8,0.5\r\n");
        assert_eq!(read("Validation_loss.csv"), "step,loss\r\n8,1.0\r\nabout,12\r\n");
        assert_eq!(read("other.csv"), "step,x\n100,1\n");
        assert_eq!(go_back(8).unwrap(), 0);
        assert_eq!(go_back(0).unwrap(), 2 + 2 + 1);
        assert_eq!(CsvMonitor::go_back(folder.path(), "none", 0, &["Train/"]).unwrap(), 0);
    }

    #[test]
    fn a_row_cut_off_by_a_crash_is_taken_away() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lr.csv");
        for (before, after) in
            [("step,lr\r\n2,0.5\r\n4,0.", "step,lr\r\n2,0.5\r\n8,1.0\r\n"), ("ste", "step,lr\r\n8,1.0\r\n")]
        {
            fs::write(&path, before).unwrap();
            CsvMonitor::create(folder.path(), "").unwrap().write("lr", 1.0, 8).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), after);
        }
    }

    #[test]
    fn tags_stay_inside_the_folder_and_headers_stay_one_field() {
        let folder = tempfile::tempdir().unwrap();
        let mut csv = CsvMonitor::create(folder.path(), "job").unwrap();
        csv.write("../../x/a,\"b\"", 1.0, 1).unwrap();
        let text = fs::read_to_string(folder.path().join("job/.._.._x_a,\"b\".csv")).unwrap();
        assert_eq!(text, "step,\"a,\"\"b\"\"\"\r\n1,1.0\r\n");
    }

    #[test]
    fn a_tag_that_no_file_can_be_named_after_is_an_error_with_its_path() {
        let folder = tempfile::tempdir().unwrap();
        let mut csv = CsvMonitor::create(folder.path(), "job").unwrap();
        let error = csv.write(&"x".repeat(5000), 1.0, 1).unwrap_err();
        assert!(error.to_string().contains("xxx.csv: "), "{error}");
    }
}
