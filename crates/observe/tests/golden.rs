//! CSV files against those that DeepSpeed wrote.

use std::collections::BTreeMap;
use std::path::Path;

use ferrospeed_observe::monitor::{CsvMonitor, Monitor};
use ferrospeed_testkit::golden::golden;
use serde_json::Value;

fn files_under(folder: &Path, prefix: &str, found: &mut BTreeMap<String, String>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = format!("{prefix}{}", path.file_name().unwrap().to_string_lossy());
        if path.is_dir() {
            files_under(&path, &format!("{name}/"), found);
        } else {
            found.insert(name, std::fs::read_to_string(&path).unwrap());
        }
    }
}

/// A number, or one of the names the set gives to those that JSON lacks.
fn real(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| value.as_str().expect("a number or its name").parse().unwrap())
}

#[test]
fn golden_csv_monitor_writes_the_recorded_files() {
    for case in golden().cases("utils/monitor.json") {
        if case["fn"] != "csv_monitor" {
            continue;
        }
        let folder = tempfile::tempdir().unwrap();
        let mut csv = CsvMonitor::create(folder.path(), case["job_name"].as_str().unwrap()).unwrap();
        for event in case["writes"].as_array().unwrap().iter().flat_map(|call| call.as_array().unwrap()) {
            let (tag, step) = (event[0].as_str().unwrap(), event[2].as_u64().unwrap());
            match event[1].as_i64() {
                Some(integer) => csv.write_integer(tag, integer, step).unwrap(),
                None => csv.write(tag, real(&event[1]), step).unwrap(),
            }
        }
        let mut written = BTreeMap::new();
        files_under(folder.path(), "", &mut written);
        let expected: BTreeMap<String, String> = serde_json::from_value(case["expect"].clone()).unwrap();
        assert_eq!(written, expected, "case {}", case["id"]);
    }
}
