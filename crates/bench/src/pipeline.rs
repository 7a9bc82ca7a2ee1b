//! `ferrospeed bench pipeline`: the bubble of each schedule, measured beside its formula.
//!
//! The engine's own executor runs on ranks that are threads of this process; their layers sleep in place of computing, so that
//! eight stages fit on two cores, and everything else (sends, waits, gradients, the step) is real. Forward, the gradient
//! of the input and that of the weights take the same time, as the formulas suppose. What a stage held at most is compared
//! with what its schedule claims; a difference there is an error. A schedule that such stages and micro-batches do not fit is
//! passed over, and said to be.

use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use clap::Args;
use ferrospeed_comm::World;
use ferrospeed_command::{Failure, terminal};
use ferrospeed_config::{AutoValues, Config};
use ferrospeed_engine::{EngineError, Options, Setup, StageTimes, initialize_pipeline};
use ferrospeed_nn::{Carried, Init, Layer, Mode, Stages};
use ferrospeed_pipeline::schedule::{Kind, Schedule};
use ferrospeed_pipeline::simulate::{Simulation, Times, simulate};
use ferrospeed_tensor::{DType, Initializer, Operand, Param, Tensor, TensorError, autograd, ops};
use serde_json::json;

#[derive(Debug, Args)]
pub(super) struct PipelineBenchArgs {
    /// Stages, each a thread of this process
    #[arg(long, value_name = "COUNT", default_value_t = 8, value_parser = clap::value_parser!(u32).range(2..=64))]
    stages: u32,
    /// Micro-batches of a step
    #[arg(long = "micro_batches", alias = "micro-batches", value_name = "COUNT", default_value_t = 32,
          value_parser = clap::value_parser!(u32).range(1..=4096))]
    micro_batches: u32,
    /// Schedules to measure
    #[arg(long, value_delimiter = ',', default_values = ["1f1b", "interleaved:2", "interleaved:4", "zb-h1", "zb-v"])]
    schedule: Vec<Kind>,
    /// Milliseconds that a stage's forward takes, and either half of its backward
    #[arg(long = "part_ms", alias = "part-ms", value_name = "MS", default_value_t = 40,
          value_parser = clap::value_parser!(u64).range(1..=10_000))]
    part_ms: u64,
    /// Steps to measure after one to warm up
    #[arg(long, value_name = "COUNT", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repeats: u32,
    /// Elements that cross each boundary with a micro-batch
    #[arg(long, value_name = "COUNT", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=1 << 26))]
    elements: u32,
    /// Print JSON, one object per line
    #[arg(long)]
    json: bool,
}

/// Layers that sleep, each a chunk. A micro-batch is nothing but the size of what passes.
struct Sleepers {
    weights: Vec<Param>,
    part: Duration,
}

impl Sleepers {
    fn new(chunks: usize, part: Duration) -> (Sleepers, Init) {
        let init = Init::root();
        let weights =
            (0..chunks).map(|chunk| init.at(chunk).param("weight", [1], Initializer::Constant(1.0)));
        (Sleepers { weights: weights.collect(), part }, init)
    }

    fn layer(&self, index: usize, x: Tensor) -> Result<Tensor, TensorError> {
        thread::sleep(self.part);
        let (part, operands) = (self.part, [Operand::from(&x), Operand::from(&self.weights[index])]);
        let [input, weight] = &operands;
        if !autograd::needs_grad(&[input, weight]) {
            return Ok(x);
        }
        let owner = weight.clone();
        Ok(autograd::record("sleep", &[input, weight], x.detach(), move |dy| {
            thread::sleep(part);
            let device = dy.device().clone();
            let of_weight = move || {
                thread::sleep(part);
                Tensor::zeros([1], DType::F32, &device)
            };
            let of_weight = match autograd::for_later(std::iter::once(&owner)) {
                Some(params) => {
                    autograd::put_off(params, move || Ok(vec![of_weight()?]))?;
                    None
                }
                None => Some(of_weight()?),
            };
            Ok(vec![Some(dy), of_weight])
        }))
    }
}

impl Stages for Sleepers {
    type Batch = Tensor;

    fn layers(&self) -> Vec<Layer> {
        let layer = |weight: &Param| Layer { class: "Sleep".to_owned(), parameters: vec![weight.clone()] };
        self.weights.iter().map(layer).collect()
    }

    fn forward_range(
        &self,
        range: std::ops::Range<usize>,
        batch: &Tensor,
        carried: Carried,
        _: Mode,
    ) -> Result<Carried, TensorError> {
        let is_last = range.end == self.weights.len();
        let x = carried.into_iter().next().unwrap_or_else(|| batch.clone());
        let y = range.into_iter().try_fold(x, |x, index| self.layer(index, x))?;
        Ok(vec![if is_last { ops::mean(&y)? } else { y }])
    }
}

pub(super) fn run(args: &PipelineBenchArgs) -> Result<ExitCode, Failure> {
    let (stages, micro_batches) = (args.stages as usize, args.micro_batches as usize);
    let mut plain = None;
    if !args.json {
        terminal::print_output(&format!(
            "{stages} stages, {micro_batches} micro-batches, {} ms per part of a stage's work\n{:<14} {:>9} {:>9} {:>9} {:>9} {:>8}  {}\n",
            args.part_ms, "schedule", "best", "median", "formula", "of 1f1b", "step", "held, by stage"
        ))?;
    }
    let mut unfit = Vec::new();
    for &kind in &args.schedule {
        let made = Schedule::new(kind, stages, micro_batches);
        let made = made.and_then(|schedule| Ok((simulate(&schedule, &Times::default())?, schedule)));
        let (claimed, schedule) = match made {
            Ok(made) => made,
            Err(why) => {
                let line = match args.json {
                    true => json!({"schedule": kind.to_string(), "unfit": why.to_string()}).to_string(),
                    false => format!("{:<14} does not fit: {why}", kind.to_string()),
                };
                terminal::print_output(&format!("{line}\n"))?;
                unfit.push(why.to_string());
                continue;
            }
        };
        let mut measured = measure(args, &schedule, &claimed)?;
        measured.sort_by(|one, other| one.bubble().total_cmp(&other.bubble()));
        let (best, median) = (&measured[0], &measured[measured.len() / 2]);
        if kind == Kind::OneForwardOneBackward {
            plain = Some(of_work(best.bubble()));
        }
        if best.held_chunks != claimed.held_chunks {
            return Err(Failure::Run(format!(
                "{kind}: stages held {:?} chunks, and the schedule claims {:?}",
                best.held_chunks, claimed.held_chunks
            )));
        }
        let held: Vec<f64> = (0..stages).map(|stage| best.held(stage)).collect();
        let ratio = plain.map(|plain| of_work(best.bubble()) / plain);
        if args.json {
            let line = json!({
                "schedule": kind.to_string(), "stages": stages, "micro_batches": micro_batches,
                "bubble_best": best.bubble(), "bubble_median": median.bubble(), "bubble_formula": claimed.bubble(),
                "bubble_of_1f1b": ratio, "step_s": best.makespan(), "held": held,
            });
            terminal::print_output(&format!("{line}\n"))?;
        } else {
            let held: Vec<String> = held.iter().map(f64::to_string).collect();
            terminal::print_output(&format!(
                "{:<14} {:>8.2}% {:>8.2}% {:>8.2}% {:>9} {:>7.2}s  {}\n",
                kind.to_string(),
                100.0 * best.bubble(),
                100.0 * median.bubble(),
                100.0 * claimed.bubble(),
                ratio.map_or_else(String::new, |ratio| format!("{ratio:.2}")),
                best.makespan(),
                held.join(" ")
            ))?;
        }
    }
    match unfit.len() == args.schedule.len() {
        true => Err(Failure::Usage(format!("nothing was measured: {}", unfit.join("; ")))),
        false => Ok(ExitCode::SUCCESS),
    }
}

/// A share of the time as a share of the work in it.
fn of_work(bubble: f64) -> f64 {
    bubble / (1.0 - bubble)
}

/// What all stages did in each step.
fn measure(
    args: &PipelineBenchArgs,
    schedule: &Schedule,
    claimed: &Simulation,
) -> Result<Vec<Simulation>, Failure> {
    let part = Duration::from_millis(args.part_ms) / u32::try_from(claimed.chunks_per_stage).unwrap_or(1);
    let ranks: Vec<_> = World::threads(schedule.stages())
        .into_iter()
        .map(|world| {
            let (kind, chunks, stages) = (schedule.kind, schedule.chunks(), schedule.stages());
            let (repeats, micro_batches, elements) =
                (args.repeats, args.micro_batches, args.elements as usize);
            thread::spawn(move || {
                steps(world, kind, [stages, chunks, elements], part, repeats, micro_batches)
            })
        })
        .collect();
    let mut by_stage = Vec::with_capacity(ranks.len());
    for rank in ranks {
        let ended = rank.join().map_err(|_| Failure::Run("a stage panicked".to_owned()))?;
        by_stage.push(ended.map_err(|error| Failure::Run(error.to_string()))?);
    }
    let of_step = |step: usize| Simulation {
        spans: by_stage.iter().map(|steps: &Vec<StageTimes>| steps[step].spans.clone()).collect(),
        held_chunks: by_stage.iter().map(|steps| steps[step].held_chunks).collect(),
        ..claimed.clone()
    };
    Ok((0..args.repeats as usize).map(of_step).collect())
}

fn steps(
    world: World,
    kind: Kind,
    [stages, chunks, elements]: [usize; 3],
    part: Duration,
    repeats: u32,
    micro_batches: u32,
) -> Result<Vec<StageTimes>, EngineError> {
    let value = json!({
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "pipeline": {"schedule": kind.to_string(), "partition": "uniform"},
    });
    let one = std::num::NonZeroU64::MIN;
    let (config, _) = Config::from_str("bench", &value.to_string())
        .and_then(|config| config.resolve(one, &AutoValues::new()))
        .map_err(|error| EngineError::Argument { what: "bench", why: error.to_string() })?;
    let device = ferrospeed_cpu::with_threads(1);
    let setup = Setup::new(config, world, device.clone());
    let (model, init) = Sleepers::new(chunks, part);
    let stages = std::num::NonZeroUsize::new(stages).unwrap_or(std::num::NonZeroUsize::MIN);
    let mut engine = initialize_pipeline(&setup, stages, &model, &init.parameters(), Options::default())?;
    let mut all = Vec::new();
    for step in 0..=repeats {
        let batch = |_| Tensor::zeros([elements], DType::F32, &device).map_err(EngineError::from);
        engine.train_batch(&model, batch)?;
        all.extend(engine.stage_times().filter(|_| step > 0).cloned());
    }
    Ok(all)
}
