//! `ferrospeed bench checkpoint`: saving and loading beside what the disk itself gives, in the same run.
//!
//! Ranks are threads of this process, the state is that of Adam in fp32 (12 bytes per weight), and files are read after
//! the system was told to forget them. The raw figures write and read as many bytes from as many threads, with nothing
//! but `write`, `fsync` and `read`. The exports run as processes of their own, whose peak memory is looked at.

use std::fs::File;
use std::io::{Read, Write};
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use clap::Args;
use ferrospeed_comm::World;
use ferrospeed_config::{AutoValues, Config};
use ferrospeed_engine::{Engine, LoadOptions, SaveOptions, Setup, initialize};
use ferrospeed_nn::Linear;
use ferrospeed_tensor::Device;
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use serde_json::{Value, json};

use super::model_directory::parse_size;
use crate::failure::Failure;
use crate::terminal;

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
    /// The best of this many runs is reported
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    repeats: u32,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The width of a layer; a layer is 201 MB of state.
const WIDTH: usize = 4096;
/// An f32 weight and Adam's two moments.
const STATE_BYTES_PER_WEIGHT: usize = 12;
const BLOCK_BYTES: usize = 4 << 20;
/// How often a child's memory is looked at; its peak only grows.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// A folder that goes when the measurement ends, however it ends.
struct Scratch(PathBuf);

impl Scratch {
    fn create(dir: &Path) -> Result<Scratch, Failure> {
        let path = dir.join(format!(".ferrospeed-bench-{}", std::process::id()));
        std::fs::create_dir_all(&path).map_err(|error| failed(&path, &error))?;
        Ok(Scratch(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // What is left names itself.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn failed(path: &Path, error: &dyn std::fmt::Display) -> Failure {
    Failure::Run(format!("{}: {error}", path.display()))
}

/// Seconds of the best runs.
#[derive(Debug, Clone, Copy)]
struct Times {
    write_s: f64,
    read_s: f64,
}

impl Times {
    const WORST: Times = Times { write_s: f64::INFINITY, read_s: f64::INFINITY };

    fn keep_best(&mut self, other: Times) {
        self.write_s = self.write_s.min(other.write_s);
        self.read_s = self.read_s.min(other.read_s);
    }
}

pub(super) fn run(args: &CheckpointBenchArgs) -> Result<ExitCode, Failure> {
    let scratch = Scratch::create(&args.dir)?;
    let layers = (args.size / (WIDTH * WIDTH * STATE_BYTES_PER_WEIGHT)).max(1);
    let bytes = layers * WIDTH * WIDTH * STATE_BYTES_PER_WEIGHT;
    let mut raw = Times::WORST;
    for _ in 0..args.repeats {
        raw.keep_best(raw_run(&scratch.0, bytes, args.ranks as usize)?);
    }
    let checkpoints = scratch.0.join("checkpoints");
    let measured = engine_run(args, layers, &checkpoints)?;
    let fp32 = export_run(&checkpoints, "to-fp32", &scratch.0.join("weights.safetensors"))?;
    let hf = export_run(&checkpoints, "export-hf", &scratch.0.join("model"))?;
    let report = json!({
        "bytes": bytes, "ranks": args.ranks, "repeats": args.repeats,
        "raw_write_s": raw.write_s, "save_s": measured.best.write_s, "save_of_raw": raw.write_s / measured.best.write_s,
        "raw_read_s": raw.read_s, "load_s": measured.best.read_s, "load_of_raw": raw.read_s / measured.best.read_s,
        "background_stall_s": measured.stall_s, "copy_s": measured.copy_s,
        "to_fp32_s": fp32.seconds, "to_fp32_peak_rss_bytes": fp32.peak_rss_bytes,
        "export_hf_s": hf.seconds, "export_hf_peak_rss_bytes": hf.peak_rss_bytes,
    });
    terminal::print_output(&if args.json { report.to_string() } else { table(&report) })?;
    Ok(ExitCode::SUCCESS)
}

/// What the disk gives: as many bytes, from as many threads, in blocks.
fn raw_run(dir: &Path, bytes: usize, threads: usize) -> Result<Times, Failure> {
    let block: Vec<u8> =
        (0..BLOCK_BYTES as u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let share = bytes / threads;
    let each = |work: &(dyn Fn(&Path) -> std::io::Result<()> + Sync)| -> Result<f64, Failure> {
        let start = Instant::now();
        std::thread::scope(|scope| {
            let paths = (0..threads).map(|index| dir.join(format!("raw-{index}")));
            let started: Vec<_> = paths
                .map(|path| scope.spawn(move || work(&path).map_err(|error| failed(&path, &error))))
                .collect();
            started.into_iter().try_for_each(|thread| match thread.join() {
                Ok(outcome) => outcome,
                Err(panic) => std::panic::resume_unwind(panic),
            })
        })?;
        Ok(start.elapsed().as_secs_f64())
    };
    let write_s = each(&|path| {
        let mut file = File::create(path)?;
        for at in (0..share).step_by(BLOCK_BYTES) {
            file.write_all(&block[..BLOCK_BYTES.min(share - at)])?;
        }
        file.sync_all()
    })?;
    forget(dir)?;
    let read_s = each(&|path| {
        let (mut file, mut into) = (File::open(path)?, vec![0; BLOCK_BYTES]);
        while file.read(&mut into)? > 0 {}
        Ok(())
    })?;
    for index in 0..threads {
        let path = dir.join(format!("raw-{index}"));
        std::fs::remove_file(&path).map_err(|error| failed(&path, &error))?;
    }
    Ok(Times { write_s, read_s })
}

/// Asks the system to drop what it keeps in memory of the files below a folder; they have been synced.
fn forget(dir: &Path) -> Result<(), Failure> {
    for entry in std::fs::read_dir(dir).map_err(|error| failed(dir, &error))? {
        let path = entry.map_err(|error| failed(dir, &error))?.path();
        if path.is_dir() {
            forget(&path)?;
        } else {
            let file = File::open(&path).map_err(|error| failed(&path, &error))?;
            posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED)
                .map_err(|error| failed(&path, &error))?;
        }
    }
    Ok(())
}

struct Measured {
    best: Times,
    /// How long a save in the background holds training up.
    stall_s: f64,
    /// How long it takes to copy the state of a rank.
    copy_s: f64,
}

fn engine_run(args: &CheckpointBenchArgs, layers: usize, dir: &Path) -> Result<Measured, Failure> {
    let ranks: Vec<_> = World::threads(args.ranks as usize)
        .into_iter()
        .map(|world| {
            let (dir, repeats) = (dir.to_path_buf(), args.repeats);
            std::thread::spawn(move || rank_run(world, layers, &dir, repeats))
        })
        .collect();
    let mut slowest: Option<Measured> = None;
    for rank in ranks {
        let measured = match rank.join() {
            Ok(outcome) => outcome.map_err(Failure::Run)?,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        let slower = slowest.as_ref().is_none_or(|other| measured.stall_s > other.stall_s);
        if slower {
            slowest = Some(measured);
        }
    }
    slowest.ok_or_else(|| Failure::Usage("--ranks: at least one".into()))
}

fn rank_run(world: World, layers: usize, dir: &Path, repeats: u32) -> Result<Measured, String> {
    let text = |error: &dyn std::fmt::Display| error.to_string();
    let config = json!({
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    });
    let ranks = NonZeroU64::new(world.size() as u64).unwrap_or(NonZeroU64::MIN);
    let config = Config::from_value("bench", &config).map_err(|error| text(&error))?;
    let (config, _) = config.resolve(ranks, &AutoValues::new()).map_err(|error| text(&error))?;
    let (rank, group) = (world.rank(), world.group());
    let setup = Setup::new(config, world, Device::cpu_with_threads(1));
    let (mut engine, _model) = initialize(&setup, |init| {
        (0..layers)
            .map(|layer| Linear::new(&init.at(format!("layer.{layer}")), WIDTH, WIDTH, false))
            .collect::<Vec<_>>()
    })
    .map_err(|error| text(&error))?;
    let timed = |engine: &mut Engine, work: &dyn Fn(&mut Engine) -> Result<(), String>| {
        group.barrier().map_err(|error| text(&error))?;
        let start = Instant::now();
        work(engine)?;
        group.barrier().map_err(|error| text(&error))?;
        Ok::<f64, String>(start.elapsed().as_secs_f64())
    };
    let mut best = Times::WORST;
    let options = SaveOptions::default();
    for _ in 0..repeats {
        let save = |engine: &mut Engine| {
            engine.save_checkpoint(dir, &options).map(drop).map_err(|error| text(&error))
        };
        let write_s = timed(&mut engine, &save)?;
        if rank == 0 {
            forget(dir).map_err(|error| text(&error))?;
        }
        let load = |engine: &mut Engine| {
            engine.load_checkpoint(dir, &LoadOptions::default()).map(drop).map_err(|error| text(&error))
        };
        let read_s = timed(&mut engine, &load)?;
        best.keep_best(Times { write_s, read_s });
    }
    let start = Instant::now();
    engine.save_checkpoint_in_background(dir, &options).map_err(|error| text(&error))?;
    let stall_s = start.elapsed().as_secs_f64();
    engine.finish_checkpoint().map_err(|error| text(&error))?;
    let copy_s = timed(&mut engine, &|engine| {
        let store = engine.store();
        for piece in store.pieces_to_write() {
            let mut copy = Vec::with_capacity(piece.len * piece.dtype.size_bytes());
            store.read_piece(&piece, 0..piece.len, &mut copy).map_err(|error| text(&error))?;
            std::hint::black_box(&copy);
        }
        Ok(())
    })?;
    Ok(Measured { best, stall_s, copy_s })
}

struct Export {
    seconds: f64,
    peak_rss_bytes: u64,
}

/// Runs a command of this program and watches its memory.
fn export_run(checkpoints: &Path, action: &str, output: &Path) -> Result<Export, Failure> {
    let program = std::env::current_exe()
        .map_err(|error| Failure::Run(format!("cannot find this program: {error}")))?;
    let start = Instant::now();
    let mut child = Command::new(program)
        .args(["checkpoint", action])
        .args([checkpoints, output])
        .stdout(Stdio::null())
        .spawn()
        .map_err(|error| failed(output, &error))?;
    let mut peak_rss_bytes = 0;
    let status = loop {
        peak_rss_bytes = peak_rss_bytes.max(peak_of(child.id()).unwrap_or(0));
        if let Some(status) = child.try_wait().map_err(|error| failed(output, &error))? {
            break status;
        }
        std::thread::sleep(LOOK_EVERY);
    };
    if !status.success() {
        return Err(Failure::Run(format!("`checkpoint {action}` ended with {status}")));
    }
    Ok(Export { seconds: start.elapsed().as_secs_f64(), peak_rss_bytes })
}

fn peak_of(pid: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let kib = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?.trim().strip_suffix(" kB")?;
    kib.trim().parse::<u64>().ok().map(|kib| kib << 10)
}

fn table(report: &Value) -> String {
    let number = |key: &str| report[key].as_f64().unwrap_or(f64::NAN);
    let bytes = number("bytes");
    let mut text = format!(
        "{:.2} GB of state on {} ranks, the best of {}\n",
        bytes / 1e9,
        report["ranks"],
        report["repeats"]
    );
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
        "{:<18} {:>8.3} s  a copy of the state takes {:.3} s\n",
        "background stall",
        number("background_stall_s"),
        number("copy_s")
    );
    for (what, key) in [("to-fp32", "to_fp32"), ("export-hf", "export_hf")] {
        let peak = number(&format!("{key}_peak_rss_bytes")) / 1e6;
        text +=
            &format!("{what:<18} {:>8.3} s  {peak:>8.0} MB of memory at most\n", number(&format!("{key}_s")));
    }
    text
}
