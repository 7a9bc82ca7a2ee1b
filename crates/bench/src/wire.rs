//! `ferrospeed bench wire`: values packed to eight and four bits and back, beside a plain copy of them.

use std::process::ExitCode;

use clap::Args;
use ferrospeed_collective::bench::packing;
use ferrospeed_collective::packing::Packing;
use ferrospeed_command::{DeviceChoice, Failure, terminal};
use serde_json::json;

#[derive(Debug, Args)]
pub(super) struct WireBenchArgs {
    /// Values of bf16; few enough to fit the caches say nothing about memory
    #[arg(long, value_name = "COUNT", default_value_t = 100_000_000, value_parser = clap::value_parser!(u64).range(1..=10_000_000_000))]
    values: u64,
    /// Where to compute: auto, cpu, cuda or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "auto", env = "FERROSPEED_DEVICE", value_parser = DeviceChoice::parse)]
    device: DeviceChoice,
    /// Passes to measure
    #[arg(long, value_name = "COUNT", default_value_t = 7, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    repeats: u64,
    /// Print JSON, one object per line
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &WireBenchArgs) -> Result<ExitCode, Failure> {
    let device = args.device.open()?;
    if !args.json {
        terminal::print_output(&format!(
            "{} values of bf16 on {}, best of {} passes\n{:>5}  {:>8}  {:>9}  {:>6}  {:>9}  {:>5}",
            args.values,
            device.backend().name(),
            args.repeats,
            "bits",
            "pack ms",
            "unpack ms",
            "GB/s",
            "copy GB/s",
            "share"
        ))?;
    }
    for (bits, form) in [(8, Packing::Eight), (4, Packing::Four)] {
        let speed = packing(form, args.values as usize, args.repeats as usize, &device)
            .map_err(|error| Failure::Run(error.to_string()))?;
        let share = speed.bytes_per_s() / speed.copy_bytes_per_s();
        let text = if args.json {
            json!({
                "bits": bits, "values": args.values, "pack_s": speed.pack_s, "unpack_s": speed.unpack_s,
                "bytes_per_s": speed.bytes_per_s(), "copy_bytes_per_s": speed.copy_bytes_per_s(), "share": share,
            })
            .to_string()
        } else {
            format!(
                "{bits:>5}  {:>8.2}  {:>9.2}  {:>6.1}  {:>9.1}  {share:>5.2}",
                speed.pack_s * 1e3,
                speed.unpack_s * 1e3,
                speed.bytes_per_s() / 1e9,
                speed.copy_bytes_per_s() / 1e9
            )
        };
        terminal::print_output(&text)?;
    }
    Ok(ExitCode::SUCCESS)
}
