//! `ferrospeed bench engine`: training steps of several ranks, for each ZeRO stage and precision.
//!
//! Alone it starts the ranks of each case on this host, so that every case's memory and start are its own; started as
//! a rank it measures on the job it belongs to. What is reported is a whole step as a user takes it, where its time
//! went, the time from the launch to the first step, and memory: what the system counts and what the allocator holds,
//! by kind. `benches/peers/engine.py` runs the same cases in DeepSpeed and prints the ratios.

use std::process::ExitCode;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use clap::Args;
use ferrospeed_comm::{ConnectOptions, ReduceOp, World};
use ferrospeed_command::{Failure, place, terminal};
use ferrospeed_config::{AutoValues, Config};
use ferrospeed_engine::{Engine, Options, Setup, initialize_model};
use ferrospeed_launch::supervise::OutputMode;
use ferrospeed_launch::{JobOutcome, LocalJob};
use ferrospeed_models::{ModelError, Tokens};
use ferrospeed_tensor::Category;
use serde_json::{Value, json};

use super::measure::{Precision, gpt2, ids, parse_width, peak_rss_bytes, processor_s};

#[derive(Debug, Args)]
pub(super) struct EngineBenchArgs {
    /// Ranks to start; ignored by a rank of a running job
    #[arg(long, value_name = "COUNT", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1024))]
    ranks: u32,
    /// Threads of each rank
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: u32,
    /// ZeRO stages to measure
    #[arg(long, value_delimiter = ',', default_values_t = [0, 1, 2, 3], value_parser = clap::value_parser!(u8).range(0..=3))]
    stage: Vec<u8>,
    /// Element types to measure
    #[arg(long, value_delimiter = ',', value_enum, default_values_t = [Precision::F32, Precision::Bf16])]
    dtype: Vec<Precision>,
    /// Micro-batches of a step
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    accumulation: u64,
    #[command(flatten)]
    size: ModelSize,
    /// Steps to measure after two to warm up
    #[arg(long, value_name = "COUNT", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..))]
    repeats: u64,
    /// Print JSON, one object per line
    #[arg(long)]
    json: bool,
    /// When the job was launched, in seconds since 1970
    #[arg(long = "launched_unix_s", value_name = "SECONDS", hide = true)]
    launched_unix_s: Option<f64>,
}

/// A model of GPT-2's shape and what it is fed with.
#[derive(Debug, Clone, Args)]
struct ModelSize {
    /// Blocks of the model
    #[arg(long, default_value_t = 6, value_parser = clap::value_parser!(u64).range(1..))]
    layers: u64,
    /// Width of the model: a multiple of 64
    #[arg(long, default_value_t = 512, value_parser = parse_width)]
    width: u64,
    /// Tokens that the model knows
    #[arg(long, default_value_t = 8192, value_parser = clap::value_parser!(u64).range(1..))]
    vocabulary: u64,
    /// Sequences of a micro-batch
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..))]
    batch: u64,
    /// Tokens of a sequence
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u64).range(1..))]
    tokens: u64,
}

pub(super) fn run(args: &EngineBenchArgs) -> Result<ExitCode, Failure> {
    let place = place::of_this_process()?;
    for &precision in &args.dtype {
        for &stage in &args.stage {
            if let Some(place) = &place {
                run_rank(args, stage, precision, place.clone())?;
                continue;
            }
            match start_ranks(args, stage, precision)? {
                JobOutcome::Succeeded => {}
                outcome => {
                    if let JobOutcome::Failed(report) = &outcome {
                        terminal::print_error(&report.to_string());
                    }
                    return Ok(ExitCode::from(outcome.exit_code()));
                }
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn unix_s() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// Starts this program again, once per rank, for one case.
fn start_ranks(args: &EngineBenchArgs, stage: u8, precision: Precision) -> Result<JobOutcome, Failure> {
    let launched_unix_s = args.launched_unix_s.unwrap_or_else(unix_s);
    let program = std::env::current_exe()
        .map_err(|error| Failure::Run(format!("cannot find this program: {error}")))?;
    let size = &args.size;
    let mut words = vec!["bench".to_owned(), "engine".to_owned()];
    for (option, value) in [
        ("--threads", args.threads.to_string()),
        ("--stage", stage.to_string()),
        ("--dtype", precision.dtype().name().to_owned()),
        ("--accumulation", args.accumulation.to_string()),
        ("--layers", size.layers.to_string()),
        ("--width", size.width.to_string()),
        ("--vocabulary", size.vocabulary.to_string()),
        ("--batch", size.batch.to_string()),
        ("--tokens", size.tokens.to_string()),
        ("--repeats", args.repeats.to_string()),
        ("--launched_unix_s", launched_unix_s.to_string()),
    ] {
        words.extend([option.to_owned(), value]);
    }
    words.extend(args.json.then(|| "--json".to_owned()));
    let mut job = LocalJob::new(program.display().to_string(), words, args.ranks);
    job.output = OutputMode::Plain;
    Ok(job.run()?)
}

fn failed(error: impl std::fmt::Display) -> Failure {
    Failure::Run(error.to_string())
}

fn configuration(
    args: &EngineBenchArgs,
    stage: u8,
    precision: Precision,
    ranks: usize,
) -> Result<Config, Failure> {
    let mut config = json!({
        "train_micro_batch_size_per_gpu": args.size.batch,
        "gradient_accumulation_steps": args.accumulation,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
    });
    if precision == Precision::Bf16 {
        config["bf16"] = json!({"enabled": true});
    }
    let ranks = (ranks as u64).try_into().map_err(failed)?;
    let read = Config::from_value("bench", &config).map_err(failed)?;
    Ok(read.resolve(ranks, &AutoValues::new()).map_err(failed)?.0)
}

fn run_rank(
    args: &EngineBenchArgs,
    stage: u8,
    precision: Precision,
    place: ConnectOptions,
) -> Result<(), Failure> {
    let world = World::connect(place).map_err(failed)?;
    let device = ferrospeed_cpu::with_threads(args.threads as usize);
    let size = &args.size;
    let model = gpt2(size.layers, size.width, size.vocabulary, size.tokens).map_err(failed)?;
    let setup =
        Setup::new(configuration(args, stage, precision, world.size())?, world.clone(), device.clone());
    let mut engine = initialize_model(&setup, model.parameters(), Options::default()).map_err(failed)?;
    let shape = [size.batch as usize, size.tokens as usize];
    let ids = ids(&shape, size.vocabulary as usize, &device).map_err(failed)?;
    let step = |engine: &mut Engine| -> Result<f64, Failure> {
        let began = Instant::now();
        for _ in 0..args.accumulation {
            let loss = engine
                .forward(|mode| model.loss(&Tokens::new(ids.clone()), &ids, mode))
                .map_err(|error: ModelError| failed(error))?;
            engine.backward(&loss).map_err(failed)?;
            engine.step().map_err(failed)?;
        }
        Ok(began.elapsed().as_secs_f64())
    };
    let launched_s = args.launched_unix_s.map(|launched| unix_s() - launched);
    let first_s = step(&mut engine)?;
    step(&mut engine)?;
    let before_s = processor_s();
    let mut seconds = (0..args.repeats).map(|_| step(&mut engine)).collect::<Result<Vec<f64>, Failure>>()?;
    let processor_s = (processor_s() - before_s) / args.repeats as f64;
    seconds.sort_by(f64::total_cmp);
    let (best_s, median_s) = (seconds[0], seconds[seconds.len() / 2]);
    // The largest of all ranks.
    let mut largest = [peak_rss_bytes().unwrap_or(0) as i64];
    world.group().all_reduce(&mut largest, ReduceOp::Max).map_err(failed)?;
    let usage = device.memory_usage();
    let held: Value = Category::ALL
        .iter()
        .map(|&kind| (kind.name().to_owned(), json!([usage.current(kind), usage.peak(kind)])))
        .collect::<serde_json::Map<String, Value>>()
        .into();
    let times = engine.last_step_times();
    let tokens = (shape[0] * shape[1]) as u64 * args.accumulation * world.size() as u64;
    let row = json!({
        "dtype": precision.dtype().name(),
        "stage": stage,
        "ranks": world.size(),
        "threads": args.threads,
        "tokens_per_s": tokens as f64 / median_s,
        "best_s": best_s,
        "median_s": median_s,
        "processor_s": processor_s,
        "forward_s": times.forward.as_secs_f64(),
        "backward_s": times.backward.as_secs_f64(),
        "step_s": times.step.as_secs_f64(),
        "launch_to_first_step_s": launched_s,
        "first_step_s": first_s,
        "peak_rss_bytes": largest[0],
        "allocator_peak_bytes": usage.peak_total(),
        "allocator_now_and_peak_bytes": held,
    });
    if world.rank() == 0 {
        terminal::print_output(&if args.json { row.to_string() } else { as_text(&row) })?;
    }
    Ok(())
}

fn as_text(row: &Value) -> String {
    let ms = |key: &str| row[key].as_f64().unwrap_or(0.0) * 1e3;
    let mib = |bytes: &Value| bytes.as_f64().unwrap_or(0.0) / f64::from(1 << 20);
    let held: Vec<String> = row["allocator_now_and_peak_bytes"]
        .as_object()
        .into_iter()
        .flatten()
        .map(|(name, bytes)| format!("{name} {:.0}/{:.0}", mib(&bytes[0]), mib(&bytes[1])))
        .collect();
    format!(
        "{:<5} stage {}  {} ranks × {} threads  {:>8.1} tokens/s  median {:.1} ms, best {:.1} ms, processor {:.1} ms\n    \
         forward {:.1} ms, backward {:.1} ms, step {:.1} ms; first step {:.0} ms after the launch, taking {:.0} ms\n    \
         peak {:.0} MiB of the system, {:.0} MiB of the allocator; now/peak MiB: {}",
        row["dtype"].as_str().unwrap_or_default(),
        row["stage"],
        row["ranks"],
        row["threads"],
        row["tokens_per_s"].as_f64().unwrap_or(0.0),
        ms("median_s"),
        ms("best_s"),
        ms("processor_s"),
        ms("forward_s"),
        ms("backward_s"),
        ms("step_s"),
        ms("launch_to_first_step_s"),
        ms("first_step_s"),
        mib(&row["peak_rss_bytes"]),
        mib(&row["allocator_peak_bytes"]),
        held.join(", "),
    )
}
