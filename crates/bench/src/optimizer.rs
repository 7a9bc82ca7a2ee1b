//! `ferrospeed bench optimizer`: AdamW with a bf16 copy of the weights, beside scaling the same buffers in place.
//!
//! The update is limited by memory, so what counts is how near it comes to the plainest pass over the same memory; the
//! two take turns in one run. `benches/peers/optimizer.py` runs the same update in PyTorch and prints the ratios.

use std::process::ExitCode;

use clap::Args;
use ferrospeed_command::{Failure, terminal};
use ferrospeed_optim::bench::{self, AdamSpeed};
use serde_json::json;

/// Bytes of memory that each weight takes here: weight, gradient, two moments and the copy.
const BYTES_PER_WEIGHT: u64 = 4 * 4 + 2;

#[derive(Debug, Args)]
pub(super) struct OptimizerBenchArgs {
    /// Weights to update; few enough to fit the caches say nothing about memory
    #[arg(long, value_name = "COUNT", default_value_t = 100_000_000, value_parser = clap::value_parser!(u64).range(1..))]
    weights: u64,
    /// Numbers of threads to measure with
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2], value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: Vec<u32>,
    /// Passes to measure after one to warm up
    #[arg(long, value_name = "COUNT", default_value_t = 7, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    repeats: u64,
    /// Print JSON, one object per line
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &OptimizerBenchArgs) -> Result<ExitCode, Failure> {
    let needed = args.weights.saturating_mul(BYTES_PER_WEIGHT);
    if let Some(available) =
        ferrospeed_launch::probe::available_memory_bytes().filter(|&available| needed > available)
    {
        let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
        return Err(Failure::Usage(format!(
            "--weights {}: they take {:.1} GiB here, and {:.1} GiB of memory are free",
            args.weights,
            gib(needed),
            gib(available)
        )));
    }
    if !args.json {
        terminal::print_output(&format!(
            "AdamW with a bf16 copy, {} weights\n{:>7}  {:>9}  {:>9}  {:>9}  {:>9}  {:>14}  {:>5}",
            args.weights, "threads", "best ms", "median ms", "ns/weight", "GB/s", "in place GB/s", "share"
        ))?;
    }
    for &threads in &args.threads {
        let device = ferrospeed_cpu::with_threads(threads as usize);
        let speed = bench::adam(args.weights as usize, args.repeats as usize, &device)
            .map_err(|error| Failure::Run(error.to_string()))?;
        terminal::print_output(&if args.json { as_json(threads, &speed) } else { as_row(threads, &speed) })?;
    }
    Ok(ExitCode::SUCCESS)
}

fn as_json(threads: u32, speed: &AdamSpeed) -> String {
    json!({
        "case": "adamw with bf16 copy",
        "weights": speed.numel,
        "threads": threads,
        "best_s": speed.update.best_s,
        "median_s": speed.update.median_s,
        "bytes_per_s": speed.bytes_per_s(),
        "in_place_best_s": speed.scale.best_s,
        "in_place_median_s": speed.scale.median_s,
        "in_place_bytes_per_s": speed.memory_bytes_per_s(),
        "share_of_in_place": speed.share_of_memory_speed(),
    })
    .to_string()
}

fn as_row(threads: u32, speed: &AdamSpeed) -> String {
    format!(
        "{threads:>7}  {:>9.1}  {:>9.1}  {:>9.3}  {:>9.1}  {:>14.1}  {:>5.2}",
        speed.update.best_s * 1e3,
        speed.update.median_s * 1e3,
        speed.update.best_s * 1e9 / speed.numel as f64,
        speed.bytes_per_s() / 1e9,
        speed.memory_bytes_per_s() / 1e9,
        speed.share_of_memory_speed(),
    )
}
