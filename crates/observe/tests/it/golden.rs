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

/// What an event holds. Where we differ: monitors take numbers, while DeepSpeed writes whatever it is given as Python
/// prints it (truth values, nothing, text, lists).
enum Event {
    Integer(i64),
    Real(f64),
    NoNumber,
}

fn event(value: &Value) -> Event {
    // The names that the set gives to numbers which JSON lacks.
    let named = [("nan", f64::NAN), ("inf", f64::INFINITY), ("-inf", f64::NEG_INFINITY)];
    let named = named.iter().find(|(name, _)| value.as_str() == Some(*name)).map(|(_, real)| *real);
    match (value.as_i64(), value.as_f64().or(named)) {
        (Some(integer), _) => Event::Integer(integer),
        (None, Some(real)) => Event::Real(real),
        (None, None) => Event::NoNumber,
    }
}

#[test]
fn golden_csv_monitor_writes_the_recorded_files() {
    golden().each_case("utils/monitor.json", 4, |case| {
        if case["fn"] != "csv_monitor" {
            return;
        }
        let (folder, mut left_out) = (tempfile::tempdir().unwrap(), Vec::new());
        let mut csv = CsvMonitor::create(folder.path(), case["job_name"].as_str().unwrap()).unwrap();
        for event in case["writes"].as_array().unwrap().iter().flat_map(|call| call.as_array().unwrap()) {
            let (tag, step) = (event[0].as_str().unwrap(), event[2].as_u64().unwrap());
            match self::event(&event[1]) {
                Event::Integer(integer) => csv.write_integer(tag, integer, step).unwrap(),
                Event::Real(real) => csv.write(tag, real, step).unwrap(),
                Event::NoNumber => left_out.push(format!("/{}.csv", tag.replace(['/', ' '], "_"))),
            }
        }
        let is_compared = |name: &String| !left_out.iter().any(|file| name.ends_with(file.as_str()));
        let mut written = BTreeMap::new();
        files_under(folder.path(), "", &mut written);
        let mut expected: BTreeMap<String, String> = serde_json::from_value(case["expect"].clone()).unwrap();
        written.retain(|name, _| is_compared(name));
        expected.retain(|name, _| is_compared(name));
        assert_eq!(written, expected, "case {}", case["id"]);
    });
}
