//! Monitors and logs on a small disk that is full for a while: what is in their files is whole.
//!
//! The test runs itself again in a place of its own, where it may mount a disk.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use ferrospeed_testkit::skip::skip;

use super::wandb::records_of;
use super::{CsvMonitor, Event, Monitor, TensorBoard, WandbOffline, WandbRun, read_events};
use crate::record::EvalRecord;
use crate::{JsonLines, read_json_lines};

const DISK: &str = "FERROSPEED_TEST_SMALL_DISK";
const NAME: &str = "monitor::full_disk::a_disk_that_is_full_for_a_while_costs_whole_records_alone";
/// Steps before the disk is full, and after it has room again.
const STEPS: u64 = 50;

#[test]
fn a_disk_that_is_full_for_a_while_costs_whole_records_alone() {
    if let Some(disk) = std::env::var_os(DISK) {
        return write_through_a_full_disk(Path::new(&disk));
    }
    let alone = |script: &str| {
        let program = std::env::current_exe().unwrap();
        Command::new("unshare").args(["-rm", "sh", "-ec", script]).arg(program).env(DISK, "/mnt").output()
    };
    let mount = "mount -t tmpfs -o size=512k tmpfs /mnt";
    if !alone(mount).is_ok_and(|output| output.status.success()) {
        return skip("an ordinary process may not mount a tmpfs here (unshare -rm)");
    }
    let output = alone(&format!("{mount}; \"$0\" --exact {NAME} --nocapture")).unwrap();
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

/// A name, and what writes a step there.
type Writer<'a> = (&'a str, Box<dyn FnMut(u64) -> bool + 'a>);

fn write_through_a_full_disk(disk: &Path) {
    let mut csv = CsvMonitor::create(disk, "csv").unwrap();
    let mut board = TensorBoard::create(disk, "board").unwrap();
    let mut wandb = WandbOffline::create(disk, &WandbRun::default()).unwrap();
    let mut log = JsonLines::create(&disk.join("log.jsonl")).unwrap();
    let (events, wandb_folder) = (board.path().to_path_buf(), wandb.folder().to_path_buf());
    let mut writers: [Writer<'_>; 4] = [
        ("csv", Box::new(|step| csv.write("Train/loss", 1.0 / step as f64, step).is_ok())),
        ("board", Box::new(|step| board.write("Train/loss", 1.0 / step as f64, step).is_ok())),
        ("wandb", Box::new(|step| wandb.write("Train/loss", 1.0 / step as f64, step).is_ok())),
        (
            "log",
            Box::new(|step| {
                log.write(&EvalRecord { step, loss: 0.5, tokens: 7, ..EvalRecord::default() }).is_ok()
            }),
        ),
    ];
    let mut step = 0;
    // Steps until every writer failed so often; gives up after so many that all of them must have.
    let mut write = |until_failures: u64| {
        let mut failures = [0; 4];
        for count in 0.. {
            step += 1;
            for (failed, (_, write)) in failures.iter_mut().zip(&mut writers) {
                *failed += u64::from(!write(step));
            }
            let is_enough = failures.iter().all(|&failed| failed >= until_failures);
            if count >= STEPS && (is_enough || count > 100 * STEPS) {
                break;
            }
        }
        (failures, step)
    };
    let (failures, _) = write(0);
    assert_eq!(failures, [0; 4]);
    let filler = disk.join("filler");
    // As much as there is room for.
    let filled = std::fs::write(&filler, vec![0; 1 << 20]);
    assert!(filled.is_err(), "the disk is larger than it should be");
    let (failures, _) = write(2 * STEPS);
    assert!(failures.iter().all(|&failed| failed >= 2 * STEPS), "{failures:?}");
    std::fs::remove_file(&filler).unwrap();
    let (failures, last) = write(0);
    // Of W&B the row before the first with room.
    assert!(failures.iter().all(|&failed| failed == 0), "{failures:?}");
    drop(writers);
    wandb.finish().unwrap();

    let first_again = last - STEPS;
    let complete = |name: &str, steps: Vec<u64>| {
        assert!(steps.is_sorted_by(|one, next| one < next), "{name}: {steps:?}");
        let steps = BTreeSet::from_iter(steps);
        assert!((1..=STEPS).all(|step| steps.contains(&step)), "{name}: {steps:?}");
        assert!((first_again..=last).all(|step| steps.contains(&step)), "{name}: {steps:?}");
        assert!((steps.len() as u64) < last, "{name}: nothing was lost");
    };
    let rows = std::fs::read_to_string(disk.join("csv/Train_loss.csv")).unwrap();
    let rows = rows.strip_prefix("step,loss\r\n").unwrap().strip_suffix("\r\n").unwrap().split("\r\n");
    let step_of_row = |row: &str| {
        let (step, value) = row.split_once(',').unwrap();
        let step: u64 = step.parse().unwrap();
        assert_eq!(value.parse::<f64>().unwrap(), 1.0 / step as f64, "{row}");
        step
    };
    complete("csv", rows.map(step_of_row).collect());
    let step_of_event = |event: Event| match event {
        Event::Scalar { step, .. } => Some(step),
        _ => None,
    };
    complete("board", read_events(&events).unwrap().into_iter().filter_map(step_of_event).collect());
    let records = read_json_lines::<EvalRecord>(&disk.join("log.jsonl")).unwrap();
    complete("log", records.iter().map(|record| record.step).collect());
    // Their numbers have no gap; every step has a row, a version and the run come before them, a summary and the end behind.
    let rows = records_of(&wandb_folder);
    assert!((rows.len() as u64) < last + 4, "wandb: nothing was lost");
    for (index, record) in rows.iter().enumerate() {
        let number =
            u64::from(record[1] & 0x7f) | if record[1] < 0x80 { 0 } else { u64::from(record[2]) << 7 };
        assert_eq!(number, index as u64 + 1, "wandb");
    }
    let has_row = |step: u64| {
        let value = format!("{:?}", 1.0 / step as f64);
        rows.iter().any(|row| row.windows(value.len()).any(|window| window == value.as_bytes()))
    };
    assert!((1..=STEPS).chain(first_again..=last).all(has_row), "wandb");
}
