//! `ferrospeed bench io`: what a disk gives, and how near an optimizer step comes to it whose states are there.
//!
//! Reads and writes go through the same queue as training's, past the page cache, in a file without a name. Where `fio` is
//! found it does the same with the same block and depth, in turns with ours, so that the result is a ratio. A step from host
//! memory is measured beside, as a share of what the memory gives.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use clap::Args;
use ferrospeed_command::{Failure, parse_size, terminal};
use ferrospeed_io::bench::{DiskSpeed, disk_speed};
use ferrospeed_io::{Queue, QueueOptions};
use serde_json::{Value, json};

#[derive(Debug, Args)]
pub(super) struct IoBenchArgs {
    /// The folder whose disk is measured
    #[arg(long, value_name = "FOLDER", default_value = ".")]
    dir: PathBuf,
    /// Bytes that are written and read in each pass
    #[arg(long, default_value = "1GB", value_parser = parse_size)]
    size: usize,
    /// Bytes of one request (`aio.block_size`)
    #[arg(long = "block_size", alias = "block-size", value_delimiter = ',', default_values_t = [1 << 20], value_parser = clap::value_parser!(u64).range(4096..=1 << 30))]
    block_size: Vec<u64>,
    /// Requests at the disk at once (`aio.queue_depth`)
    #[arg(long, value_delimiter = ',', default_values_t = [8, 32], value_parser = clap::value_parser!(u64).range(1..=4096))]
    depth: Vec<u64>,
    /// Threads, in place of io_uring (`aio.thread_count`)
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..=64))]
    threads: Option<u64>,
    /// Passes to measure each way
    #[arg(long, value_name = "COUNT", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=1000))]
    repeats: u64,
    /// Weights of the optimizer step; 0 leaves it out
    #[arg(long, value_name = "COUNT", default_value_t = 50_000_000)]
    weights: u64,
    /// Print JSON, one object per line
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &IoBenchArgs) -> Result<ExitCode, Failure> {
    if !args.dir.is_dir() {
        return Err(Failure::Usage(format!("--dir: {} is no folder", args.dir.display())));
    }
    if !args.json {
        terminal::print_output(&format!(
            "{} bytes in {}, GB/s\n{:>8}  {:>10}  {:>6}  {:>7}  {:>7}  {:>10}  {:>11}",
            args.size,
            args.dir.display(),
            "by",
            "block",
            "depth",
            "read",
            "write",
            "fio's read",
            "fio's write"
        ))?;
    }
    let mut best: Option<(DiskSpeed, QueueOptions)> = None;
    for &block in &args.block_size {
        for &depth in &args.depth {
            let options = QueueOptions {
                block_bytes: block as usize,
                depth: depth as usize,
                threads: args.threads.unwrap_or(4) as usize,
                uring: args.threads.is_none(),
                ..QueueOptions::default()
            };
            let speed = disk_speed(&args.dir, args.size as u64, args.repeats as usize, options)
                .map_err(|error| Failure::Run(error.to_string()))?;
            let fio = fio(args, options)?;
            print_speed(args, options, speed, fio)?;
            let better =
                |(known, _): &(DiskSpeed, _)| known.read + known.written < speed.read + speed.written;
            if best.as_ref().is_none_or(better) {
                best = Some((speed, options));
            }
        }
    }
    if let (Some((speed, options)), 1..) = (best, args.weights) {
        print_step(args, speed, options)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn print_speed(
    args: &IoBenchArgs,
    options: QueueOptions,
    speed: DiskSpeed,
    fio: Option<DiskSpeed>,
) -> Result<(), Failure> {
    let by = if Queue::new(options).why_threads().is_some() { "threads" } else { "io_uring" };
    let (block, depth) = (options.block_bytes, options.depth);
    if args.json {
        let ratio = |own: f64, of: fn(&DiskSpeed) -> f64| fio.as_ref().map(|fio| own / of(fio));
        let line = json!({
            "case": "disk", "by": by, "block_bytes": block, "depth": depth, "bytes": args.size,
            "read_bytes_per_s": speed.read, "write_bytes_per_s": speed.written,
            "read_over_fio": ratio(speed.read, |fio| fio.read),
            "write_over_fio": ratio(speed.written, |fio| fio.written),
        });
        return terminal::print_output(&line.to_string());
    }
    let of_fio = |own: f64, fio: Option<f64>| {
        fio.map_or_else(|| "-".to_owned(), |fio| format!("{:.2} ({:.2})", fio / 1e9, own / fio))
    };
    terminal::print_output(&format!(
        "{by:>8}  {block:>10}  {depth:>6}  {:>7.2}  {:>7.2}  {:>10}  {:>11}",
        speed.read / 1e9,
        speed.written / 1e9,
        of_fio(speed.read, fio.map(|fio| fio.read)),
        of_fio(speed.written, fio.map(|fio| fio.written)),
    ))
}

/// An AdamW step with its states on the disk, and one with them in memory.
fn print_step(args: &IoBenchArgs, speed: DiskSpeed, options: QueueOptions) -> Result<(), Failure> {
    let device = ferrospeed_cpu::device();
    let (weights, repeats) = (args.weights as usize, args.repeats as usize);
    let step = ferrospeed_zero::bench::disk_step(&args.dir, weights, repeats, options, &device)
        .map_err(|error| Failure::Run(error.to_string()))?;
    // A disk does one thing at a time: what it must read and write takes this long.
    let needed_s = step.bytes_each_way as f64 * (1.0 / speed.read + 1.0 / speed.written);
    let share = needed_s / step.best_s;
    let memory = ferrospeed_optim::bench::adam(step.weights as usize, repeats, &device)
        .map_err(|error| Failure::Run(error.to_string()))?;
    if args.json {
        let line = json!({
            "case": "step", "weights": step.weights, "bytes_each_way": step.bytes_each_way,
            "best_s": step.best_s, "share_of_disk": share,
            "in_memory_best_s": memory.update.best_s, "share_of_memory": memory.share_of_memory_speed(),
        });
        return terminal::print_output(&line.to_string());
    }
    terminal::print_output(&format!(
        "AdamW, {} weights: {:.1} ms from the disk, {:.2} of its bandwidth; {:.1} ms from memory, {:.2} of its bandwidth",
        step.weights,
        step.best_s * 1e3,
        share,
        memory.update.best_s * 1e3,
        memory.share_of_memory_speed(),
    ))
}

/// The same by `fio`, where there is one.
fn fio(args: &IoBenchArgs, options: QueueOptions) -> Result<Option<DiskSpeed>, Failure> {
    if Command::new("fio").arg("--version").output().is_err() {
        return Ok(None);
    }
    let name = format!(".ferrospeed-bench-fio-{}", std::process::id());
    let path = args.dir.join(name);
    let passes = ["write", "read"].map(|way| {
        let speeds = (0..args.repeats).map(|_| fio_pass(&path, way, args, options));
        speeds.collect::<Result<Vec<f64>, Failure>>()
    });
    // It has a name, other than ours.
    let _ = std::fs::remove_file(&path);
    let [written, read] = passes;
    let best = |speeds: Vec<f64>| speeds.into_iter().fold(0.0, f64::max);
    Ok(Some(DiskSpeed { read: best(read?), written: best(written?) }))
}

fn fio_pass(path: &Path, way: &str, args: &IoBenchArgs, options: QueueOptions) -> Result<f64, Failure> {
    let engine = if options.uring { "io_uring" } else { "psync" };
    let mut command = Command::new("fio");
    command.args(["--name=bench", "--direct=1", "--overwrite=1", "--output-format=json"]);
    command.arg(format!("--filename={}", path.display())).arg(format!("--rw={way}"));
    command.arg(format!("--bs={}", options.block_bytes)).arg(format!("--iodepth={}", options.depth));
    command.arg(format!("--size={}", args.size)).arg(format!("--ioengine={engine}"));
    let output = command.output().map_err(|error| Failure::Run(format!("fio: {error}")))?;
    let parsed: Option<Value> = serde_json::from_slice(&output.stdout).ok();
    let speed = parsed.as_ref().and_then(|value| value["jobs"][0][way]["bw_bytes"].as_f64());
    speed.filter(|_| output.status.success()).ok_or_else(|| {
        Failure::Run(format!("fio failed: {}", String::from_utf8_lossy(&output.stderr).trim()))
    })
}
