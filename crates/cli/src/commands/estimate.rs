//! `ferrospeed estimate`: DeepSpeed's ZeRO memory estimators, by formula.

use std::process::ExitCode;

use clap::Args;
use ferrospeed_command::{Failure, terminal};
use ferrospeed_tune::estimate::{Estimate, Setup, Zero3Offload, zero2, zero2_table, zero3, zero3_table};
use serde_json::{Value, json};

use super::model::ModelArgs;

#[derive(Debug, Args)]
pub(crate) struct EstimateArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// The ZeRO stage
    #[arg(long, value_parser = clap::value_parser!(u8).range(2..=3), default_value_t = 3)]
    stage: u8,
    /// Hosts
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    nodes: u64,
    /// Devices on each host
    #[arg(long = "num_gpus", alias = "num-gpus", short = 'n', value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1 << 16))]
    num_gpus: u64,
    /// What host memory is multiplied by
    #[arg(long = "buffer_factor", alias = "buffer-factor", value_name = "FACTOR", default_value_t = 1.5)]
    buffer_factor: f64,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &EstimateArgs) -> Result<ExitCode, Failure> {
    if !args.buffer_factor.is_finite() || args.buffer_factor < 1.0 {
        return Err(Failure::Usage(format!("--buffer_factor {} is below 1", args.buffer_factor)));
    }
    let size = args.model.read()?.size();
    let setup =
        Setup { additional_buffer_factor: args.buffer_factor, ..Setup::new(args.nodes, args.num_gpus) };
    let text = match (args.stage, args.json) {
        (2, false) => zero2_table(size.total_params, setup),
        (_, false) => zero3_table(size, setup),
        (2, true) => {
            let rows = [("cpu", true), ("none", false)].map(|(device, offload)| {
                row(json!({"offload_optimizer": device}), zero2(size.total_params, offload, setup))
            });
            document(&rows)
        }
        (_, true) => {
            let tiers = [
                (Zero3Offload::OptimizerAndParams, "cpu", "cpu"),
                (Zero3Offload::Optimizer, "none", "cpu"),
                (Zero3Offload::None, "none", "none"),
            ];
            let rows: Vec<Value> = tiers
                .into_iter()
                .flat_map(|tier| [(tier, true), (tier, false)])
                .map(|((offload, params, optimizer), init)| {
                    let options =
                        json!({"offload_param": params, "offload_optimizer": optimizer, "zero_init": init});
                    row(options, zero3(size, offload, init, setup))
                })
                .collect();
            document(&rows)
        }
    };
    terminal::print_output(&text)?;
    Ok(ExitCode::SUCCESS)
}

fn row(options: Value, estimate: Estimate) -> Value {
    json!({
        "options": options,
        "host_bytes": estimate.host_bytes,
        "device_bytes": estimate.device_bytes,
    })
}

fn document(rows: &[Value]) -> String {
    serde_json::to_string_pretty(&json!({ "rows": rows })).unwrap_or_default()
}
