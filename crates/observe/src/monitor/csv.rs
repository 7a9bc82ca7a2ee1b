//! One CSV file per tag: `OUTPUT/JOB/Train_Samples_lr.csv` with the header `step,lr` and rows that end in CRLF.
//!
//! Files grow: a resumed run goes on where the last one stopped. The header is written once per file, and a row that
//! a killed run left half-written is taken away before the first new one. Tags that differ only in `/`, space and
//! `_` share a file, as they do in DeepSpeed.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use crate::error::{ObserveError, Result};
use crate::monitor::Monitor;

/// Writes one CSV file per tag.
#[derive(Debug)]
pub struct CsvMonitor {
    folder: PathBuf,
    files: HashMap<PathBuf, File>,
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

    fn write_row(&mut self, tag: &str, value: &str, step: u64) -> Result<()> {
        let path = self.folder.join(tag.replace(['/', ' '], "_") + ".csv");
        // A row is one write, so that a reader beside the run sees whole rows.
        let row = format!("{step},{value}\r\n");
        if let Some(file) = self.files.get_mut(&path) {
            return file.write_all(row.as_bytes()).map_err(ObserveError::io(&path));
        }
        let (mut file, has_header) = open_to_append(&path).map_err(ObserveError::io(&path))?;
        let label = tag.rsplit('/').next().unwrap_or(tag);
        let header = if has_header { String::new() } else { format!("step,{}\r\n", quoted(label)) };
        file.write_all((header + &row).as_bytes()).map_err(ObserveError::io(&path))?;
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

/// Opens a file at its end, less a last line without an end, and says whether anything is in it.
fn open_to_append(path: &Path) -> std::io::Result<(File, bool)> {
    let options = OpenOptions::new().read(true).append(true).create(true).clone();
    let mut file = ferrospeed_files::open_to_write(path, &options)?;
    let mut content = Vec::new();
    file.read_to_end(&mut content)?;
    let whole_lines = content.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1);
    if whole_lines < content.len() {
        file.set_len(whole_lines as u64)?;
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
