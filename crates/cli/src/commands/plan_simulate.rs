//! `ferrospeed plan --simulate`: a step of many ranks, event by event, and the layouts that would be fastest.

use std::fmt::Write;
use std::num::NonZeroU64;
use std::process::ExitCode;

use clap::Args;
use ferrospeed_command::{Failure, terminal};
use ferrospeed_config::{AutoValues, Config, DataType};
use ferrospeed_tensor::DType;
use ferrospeed_tune::model::Model;
use ferrospeed_tune::plan::{Capacity, Processor, Purpose, Request, Tier, human};
use ferrospeed_tune::simulate::best::{Fitting, Open, best};
use ferrospeed_tune::simulate::failures::{Availability, Failures};
use ferrospeed_tune::simulate::{MOST_RANKS, Machine, Question, Simulated, seconds, simulate};
use serde_json::{Value, json};

use super::plan::{PlanArgs, capacity, spread, staged};
use super::plan_asked::Asked;
use super::rates::Ranks;

/// Layouts that are shown.
const SHOWN: usize = 5;
/// Microseconds before the first byte: between GPUs of a host, and between hosts; of ranks that are processes of hosts.
const LATENCY_US: [f64; 2] = [10.0, 20.0];
const LATENCY_US_CPU: [f64; 2] = [20.0, 60.0];

#[derive(Debug, Args, Clone)]
pub(crate) struct SimulateArgs {
    /// Simulate a step of the pipelines, exchanges and updates of all ranks, and name the layouts that would be fastest
    #[arg(long, conflicts_with_all = ["search", "placement"])]
    pub(super) simulate: bool,
    /// Ranks in all [default: as --world_size and the mesh make them]
    #[arg(long, value_name = "COUNT", requires = "simulate", conflicts_with = "world_size")]
    pub(super) ranks: Option<NonZeroU64>,
    /// Microseconds before the first byte of an exchange: within a host, and between hosts [default: 10,20 of GPUs, else 20,60]
    #[arg(long = "latency_us", alias = "latency-us", value_name = "WITHIN,BETWEEN", requires = "simulate", value_parser = parse_latencies)]
    latency_us: Option<[f64; 2]>,
    /// Up to how many percent longer computations take, by chance
    #[arg(long, value_name = "PERCENT", requires = "simulate", default_value_t = 0.0, value_parser = parse_percent)]
    jitter: f64,
    /// A rank that takes so many times longer than the others; may be repeated
    #[arg(long, value_name = "RANK:FACTOR", requires = "simulate", value_parser = parse_slow)]
    slow: Vec<(u64, f64)>,
    /// Hours between two failures of one host: says what is left of the time
    #[arg(long = "host_hours", alias = "host-hours", value_name = "HOURS", requires = "simulate", value_parser = parse_hours)]
    host_hours: Option<f64>,
    /// Seconds from a failure until training goes on
    #[arg(
        long = "restart_s",
        alias = "restart-s",
        value_name = "SECONDS",
        requires = "host_hours",
        default_value_t = 120
    )]
    restart_s: u32,
}

fn number(text: &str, least: f64, most: f64) -> Result<f64, String> {
    let number: f64 = text.trim().parse().map_err(|_| format!("{text:?} is not a number"))?;
    let is_in = (least..=most).contains(&number);
    is_in.then_some(number).ok_or_else(|| format!("must be from {least} to {most}"))
}

fn parse_latencies(text: &str) -> Result<[f64; 2], String> {
    let (within, between) = text.split_once(',').ok_or("write two numbers: WITHIN,BETWEEN")?;
    Ok([number(within, 0.0, 1e6)?, number(between, 0.0, 1e6)?])
}

fn parse_percent(text: &str) -> Result<f64, String> {
    number(text, 0.0, 1000.0)
}

fn parse_hours(text: &str) -> Result<f64, String> {
    number(text, 1e-3, 1e9)
}

fn parse_slow(text: &str) -> Result<(u64, f64), String> {
    let (rank, factor) = text.split_once(':').ok_or("write RANK:FACTOR, such as 17:1.3")?;
    let rank = rank.parse().map_err(|_| format!("{rank:?} is not a rank"))?;
    Ok((rank, number(factor, 1.0, 1e6)?))
}

pub(super) fn run(args: &PlanArgs) -> Result<ExitCode, Failure> {
    let asked = asked(args)?;
    let division = staged(&asked.model, &asked.config, asked.stages, asked.sequence_length)?;
    let zero_ranks = asked.data_ranks.get().saturating_mul(asked.shared.sequence);
    let ranks = zero_ranks.saturating_mul(asked.sliced).saturating_mul(asked.stages.get() as u64);
    if ranks > MOST_RANKS {
        return Err(Failure::Usage(format!(
            "{ranks} ranks are more than the {MOST_RANKS} that are simulated"
        )));
    }
    let capacity = capacity(args, &asked.config, ranks)?;
    let processor = if capacity.device_bytes.is_some() { Processor::Gpu } else { Processor::Cpu };
    let machine = machine(args, &asked.config, &capacity, processor, ranks)?;
    if let Some((rank, _)) = machine.slow.iter().find(|(rank, _)| *rank >= ranks) {
        return Err(Failure::Usage(format!("--slow {rank}: there are {ranks} ranks, counted from 0")));
    }
    let whole = asked.model;
    let model = spread(whole, asked.sliced, asked.shared.experts, zero_ranks)?;
    let request = Request {
        model: &model,
        config: &asked.config,
        data_parallel_size: zero_ranks,
        sequence_ranks: asked.shared.sequence,
        sequence_length: asked.sequence_length,
        checkpoint_activations: asked.recomputes,
        mlp_chunk: asked.mlp_chunk,
        keeps_attention_matrix: false,
        processor,
        operands: super::doctor::operands(),
    };
    let question = Question { request, division: division.as_ref(), tensor: asked.sliced, machine: &machine };
    let step = simulate(&question).map_err(|error| Failure::Usage(error.to_string()))?;
    let fits = step.plan.fits(&capacity);
    let availability = failures(args, &step, &machine).map(|failures| failures.run());
    let ds_config = asked.config.to_json();
    let (found, looked_at) = match (&whole, asked.shared.experts) {
        (Model::Transformer(whole), 1) => {
            let open = Open {
                model: whole,
                ds_config: &ds_config,
                ranks,
                samples: step.samples,
                sequence_length: asked.sequence_length,
                processor,
                operands: super::doctor::operands(),
                capacity,
                machine: &Machine { jitter: 0.0, slow: Vec::new(), ..machine.clone() },
            };
            let auto = AutoValues::new().with_hidden_size(whole.hidden);
            best(&open, |value: &Value, ranks| {
                let read = Config::from_value("--simulate", value).ok()?;
                Some(read.resolve(NonZeroU64::new(ranks)?, &auto).ok()?.0)
            })
        }
        // Which experts lie where is not chosen.
        _ => (Vec::new(), 0),
    };
    let text = match args.json {
        true => as_json(&step, fits, availability.as_ref(), &found, looked_at, &machine),
        false => as_text(&step, fits, availability.as_ref(), &found, looked_at),
    };
    terminal::print_output(&text)?;
    Ok(if fits { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The run on as many ranks as are asked for.
fn asked(args: &PlanArgs) -> Result<Asked, Failure> {
    let Some(ranks) = args.simulate.ranks else { return Asked::read(args, args.world_size) };
    // How many ranks a replica of the model has does not depend on how many replicas there are.
    let one = Asked::read(args, Some(NonZeroU64::MIN))?;
    let replica = one.sliced.saturating_mul(one.stages.get() as u64).saturating_mul(one.shared.sequence);
    let data_ranks = NonZeroU64::new(ranks.get() / replica).filter(|_| ranks.get().is_multiple_of(replica));
    let data_ranks = data_ranks.ok_or_else(|| {
        Failure::Usage(format!(
            "--ranks {ranks}: stages, slices and parts of sequences make {replica} ranks of each replica, of which it is no multiple"
        ))
    })?;
    Asked::read(args, Some(data_ranks))
}

fn machine(
    args: &PlanArgs,
    config: &Config,
    capacity: &Capacity,
    processor: Processor,
    ranks: u64,
) -> Result<Machine, Failure> {
    let rates = args.rates.of(&Ranks {
        count: ranks,
        per_host: capacity.ranks_per_host,
        processor,
        dtype: match config.precision.data_type() {
            DataType::Fp16 => DType::F16,
            DataType::Bf16 => DType::BF16,
            DataType::Fp32 => DType::F32,
        },
        are_here: args.is_about_this_machine(),
    })?;
    let usual = if processor == Processor::Gpu { LATENCY_US } else { LATENCY_US_CPU };
    let asked = &args.simulate;
    Ok(Machine {
        rates,
        latency_s: asked.latency_us.unwrap_or(usual).map(|us| us * 1e-6),
        jitter: asked.jitter / 100.0,
        slow: asked.slow.clone(),
        seed: 1,
    })
}

/// How hosts fail, where that is asked for. Each writes its part of what a checkpoint has: masters and states.
fn failures(args: &PlanArgs, step: &Simulated, machine: &Machine) -> Option<Failures> {
    let rows = step.plan.rows.iter().filter(|row| row.purpose == Purpose::OptimizerStates);
    let bytes: u64 = rows.map(|row| row.bytes).sum();
    Some(Failures {
        host_hours: args.simulate.host_hours?,
        hosts: step.hosts,
        save_s: bytes as f64 / machine.rates.disk_bytes_per_s,
        restart_s: f64::from(args.simulate.restart_s),
        seed: machine.seed,
    })
}

fn as_text(
    step: &Simulated,
    fits: bool,
    availability: Option<&Availability>,
    found: &[Fitting],
    looked_at: usize,
) -> String {
    let mut text = step.to_string();
    text.push_str(if fits { "it fits\n" } else { "it does not fit: `ferrospeed plan` says what lacks\n" });
    if let Some(there) = availability {
        let [saves, lost, returning] = there.lost.map(|share| 100.0 * share);
        // Writing to a string does not fail.
        let _ = writeln!(
            text,
            "a host fails every {:.1} h somewhere ({} times in 90 days); saved every {}, {:.1} % of the time is useful: {saves:.1} % saves, {lost:.1} % is trained again, {returning:.1} % comes back",
            there.job_hours,
            there.failures,
            seconds(there.save_every_s),
            100.0 * there.useful
        );
    }
    if looked_at == 0 {
        return text;
    }
    let _ = writeln!(
        text,
        "\n{looked_at} layouts of these ranks and this batch: {} fit; the fastest",
        found.len()
    );
    let _ = writeln!(
        text,
        "{:<18} {:<8} {:>4} {:>11} {:>9} {:>11} {:>9} {:>8} {:>8} {:>9}",
        "mesh",
        "schedule",
        "ZeRO",
        "micro×steps",
        "recompute",
        "device",
        "step",
        "bubble",
        "exposed",
        "TFLOP/s"
    );
    for Fitting { layout, step, .. } in found.iter().take(SHOWN) {
        let _ = writeln!(
            text,
            "{:<18} {:<8} {:>4} {:>11} {:>9} {:>11} {:>9} {:>6.1} % {:>6.1} % {:>9.1}",
            step.mesh_name(),
            if step.mesh[0] > 1 { step.schedule.as_str() } else { "-" },
            layout.stage,
            format!("{}×{}", layout.micro_batch, layout.accumulation),
            if layout.recompute { "yes" } else { "no" },
            human(step.plan.total(Tier::Device)),
            seconds(step.step_s),
            100.0 * step.bubble,
            100.0 * step.exposed_s() / step.step_s,
            step.flops_per_s / 1e12
        );
    }
    text
}

fn as_json(
    step: &Simulated,
    fits: bool,
    availability: Option<&Availability>,
    found: &[Fitting],
    looked_at: usize,
    machine: &Machine,
) -> String {
    let document = json!({
        "step": step,
        "fits": fits,
        "machine": machine,
        "availability": availability,
        "looked_at": looked_at,
        "fit": found.len(),
        "best": found.iter().take(SHOWN).collect::<Vec<_>>(),
    });
    serde_json::to_string_pretty(&document).unwrap_or_default()
}
