//! `ferrospeed bench checkpoint`: saving and loading beside what the disk itself gives, in the same run.
//!
//! Ranks are threads of this process, the state is that of Adam in fp32 (12 bytes per weight), and files are read after
//! the system was told to forget them. A round measures one thing after the other, so that what else the machine does
//! falls on all of them; medians over rounds are reported, and for shares the median of each round's share.

mod exports;
mod ranks;
mod raw;
mod scratch;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use ferrospeed_comm::World;
use ferrospeed_command::{Failure, parse_size, place, terminal};
use serde_json::{Value, json};

use self::ranks::Round;
use self::scratch::Scratch;

#[derive(Debug, Args)]
pub(super) struct CheckpointBenchArgs {
    /// Where files are written; what is measured is the disk behind it
    #[arg(long, value_name = "DIR", default_value = ".")]
    dir: PathBuf,
    /// Bytes of the whole state, such as 2GB
    #[arg(long, default_value = "2GB", value_parser = parse_size)]
    size: usize,
    /// How many ranks share it
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=64))]
    ranks: u32,
    /// Medians over this many rounds are reported
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Only export: the checkpoint is made without being in memory, so any size will do that the disk holds twice
    #[arg(long)]
    exports_only: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The width of a layer; a layer is 201 MB of state.
const WIDTH: usize = 4096;
/// An f32 weight and Adam's two moments.
const STATE_BYTES_PER_WEIGHT: usize = 12;

fn failed(path: &Path, error: &dyn std::fmt::Display) -> Failure {
    Failure::Run(format!("{}: {error}", path.display()))
}

pub(super) fn run(args: &CheckpointBenchArgs) -> Result<ExitCode, Failure> {
    if place::of_this_process()?.is_some_and(|place| place.world_size > 1) {
        let text = "bench checkpoint starts its own ranks: run it without a launcher, with --ranks";
        return Err(Failure::Usage(text.to_owned()));
    }
    let scratch = Scratch::create(&args.dir)?;
    let layers = (args.size / (WIDTH * WIDTH * STATE_BYTES_PER_WEIGHT)).max(1);
    let bytes = layers * WIDTH * WIDTH * STATE_BYTES_PER_WEIGHT;
    let checkpoints = scratch.path().join("checkpoints");
    let mut report = json!({"bytes": bytes, "ranks": args.ranks});
    if args.exports_only {
        exports::write_checkpoint(layers, args.ranks as usize, &checkpoints)?;
    } else {
        let rounds = measure(args, layers, scratch.path())?;
        report["rounds"] = json!(args.rounds);
        let median_of = |of: fn(&Round) -> f64| median(rounds.iter().map(of).collect());
        for (key, of) in FIGURES {
            report[key] = json!(median_of(of));
        }
    }
    for (action, key, name) in
        [("to-fp32", "to_fp32", "fp32.safetensors"), ("export-hf", "export_hf", "exported")]
    {
        let output = scratch.path().join(name);
        let export = exports::run(&checkpoints, action, &output)?;
        report[format!("{key}_s")] = json!(export.seconds);
        report[format!("{key}_peak_rss_bytes")] = json!(export.peak_rss_bytes);
        // The disk need not hold both.
        let removed =
            if output.is_dir() { std::fs::remove_dir_all(&output) } else { std::fs::remove_file(&output) };
        removed.map_err(|error| failed(&output, &error))?;
    }
    terminal::print_output(&if args.json { report.to_string() } else { table(&report) })?;
    Ok(ExitCode::SUCCESS)
}

/// What is reported of the rounds.
const FIGURES: [(&str, fn(&Round) -> f64); 11] = [
    ("raw_write_s", |round| round.raw_write_s),
    ("save_s", |round| round.save_s),
    ("save_of_raw", |round| round.raw_write_s / round.save_s),
    ("raw_read_s", |round| round.raw_read_s),
    ("load_s", |round| round.load_s),
    ("load_of_raw", |round| round.raw_read_s / round.load_s),
    ("step_s", |round| round.step_s),
    ("background_call_s", |round| round.call_s),
    ("saving_step_s", |round| round.saving_step_s),
    ("background_stall_s", |round| round.saving_step_s - round.step_s),
    ("copy_s", |round| round.copy_s),
];

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len().is_multiple_of(2) { (values[middle - 1] + values[middle]) / 2.0 } else { values[middle] }
}

/// Rounds of all ranks; every rank waits for the others, so that the first one's times are those of all.
fn measure(args: &CheckpointBenchArgs, layers: usize, dir: &Path) -> Result<Vec<Round>, Failure> {
    let ranks: Vec<_> = World::threads(args.ranks as usize)
        .into_iter()
        .map(|world| {
            let (dir, rounds) = (dir.to_path_buf(), args.rounds);
            std::thread::spawn(move || ranks::run(world, layers, &dir, rounds))
        })
        .collect();
    let mut rounds = Vec::new();
    for rank in ranks {
        let outcome = rank.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        let measured = outcome.map_err(Failure::Run)?;
        if rounds.is_empty() {
            rounds = measured;
        }
    }
    Ok(rounds)
}

fn table(report: &Value) -> String {
    let number = |key: &str| report[key].as_f64().unwrap_or(f64::NAN);
    let bytes = number("bytes");
    let mut text = format!("{:.2} GB of state on {} ranks", bytes / 1e9, report["ranks"]);
    if report.get("rounds").is_some() {
        text += &format!(", medians of {} rounds\n", report["rounds"]);
        for (what, seconds, share) in [
            ("raw write", "raw_write_s", None),
            ("save", "save_s", Some("save_of_raw")),
            ("raw read", "raw_read_s", None),
            ("load", "load_s", Some("load_of_raw")),
        ] {
            let share = share.map_or(String::new(), |key| format!("  {:>4.0} % of raw", number(key) * 100.0));
            text += &format!(
                "{what:<18} {:>8.3} s  {:>8.0} MB/s{share}\n",
                number(seconds),
                bytes / number(seconds) / 1e6
            );
        }
        text += &format!(
            "{:<18} {:>8.3} s  longer than the {:.3} s of a step; copying the state takes {:.3} s\n",
            "background save",
            number("background_stall_s"),
            number("step_s"),
            number("copy_s")
        );
    } else {
        text += "\n";
    }
    for (what, key) in [("to-fp32", "to_fp32"), ("export-hf", "export_hf")] {
        let peak = number(&format!("{key}_peak_rss_bytes")) / 1e6;
        text +=
            &format!("{what:<18} {:>8.3} s  {peak:>8.0} MB of memory at most\n", number(&format!("{key}_s")));
    }
    text
}
