//! `ferrospeed plan-pipeline`: a schedule drawn, with its bubble, what stages hold and what they send.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use ferrospeed_command::{Failure, terminal};
use ferrospeed_pipeline::schedule::{Kind, Schedule};
use ferrospeed_pipeline::simulate::{Simulation, Times, simulate};
use ferrospeed_pipeline::{PipelineError, draw};
use ferrospeed_tune::plan::human;

/// Columns of a drawing where the terminal does not say how many it has.
const DEFAULT_COLUMNS: usize = 120;
/// What stands before the drawing in a line.
const LABEL_COLUMNS: usize = 10;

#[derive(Debug, Args)]
pub(crate) struct PlanPipelineArgs {
    /// The schedule: 1f1b, interleaved:CHUNKS, zb-h1, zb-v, inference or data-parallel
    #[arg(value_name = "SCHEDULE", default_value = "1f1b")]
    schedule: Kind,
    /// Stages
    #[arg(long, value_name = "COUNT", default_value = "4")]
    stages: usize,
    /// Micro-batches per step
    #[arg(long = "micro_batches", alias = "micro-batches", value_name = "COUNT", default_value = "8")]
    micro_batches: usize,
    /// How long forward, the input's gradient, the weights' gradients and a message take, in any unit
    #[arg(long, value_name = "F,B,W,SEND", default_value = "1,1,1,0", value_parser = parse_times)]
    times: Times,
    /// Bytes that cross a boundary with each micro-batch: micro-batch × tokens × width × bytes per element
    #[arg(long = "boundary_bytes", alias = "boundary-bytes", value_name = "COUNT")]
    boundary_bytes: Option<u64>,
    /// Write the drawing there too
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

fn parse_times(text: &str) -> Result<Times, String> {
    let parse = |word: &str| word.trim().parse::<f64>().ok().filter(|time| (0.0..1e12).contains(time));
    let numbers: Option<Vec<f64>> = text.split(',').map(parse).collect();
    match numbers.as_deref() {
        Some(&[forward, backward_input, backward_weight, send]) if forward > 0.0 => {
            Ok(Times { forward, backward_input, backward_weight, send })
        }
        _ => Err("must be four numbers: forward, backward of input and of weights, message".to_owned()),
    }
}

pub(crate) fn run(args: &PlanPipelineArgs) -> Result<ExitCode, Failure> {
    let kind = args.schedule;
    let wrong = |error: PipelineError| Failure::Usage(error.to_string());
    let schedule = Schedule::new(kind, args.stages, args.micro_batches).map_err(wrong)?;
    let simulation = simulate(&schedule, &args.times).map_err(wrong)?;
    let unit = shortest(&simulation);
    let columns = terminal_size::terminal_size().map_or(DEFAULT_COLUMNS, |(width, _)| usize::from(width.0));
    terminal::print_output(&text(args, kind, &simulation, unit, columns))?;
    if let Some(path) = &args.svg {
        let title = format!("{kind}: {} stages, {} micro-batches", args.stages, args.micro_batches);
        ferrospeed_files::write(path, draw::svg(&simulation, unit, &title))
            .map_err(|error| Failure::Run(format!("{}: {error}", path.display())))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The shortest work: one column.
fn shortest(simulation: &Simulation) -> f64 {
    let spans = simulation.spans.iter().flatten().map(|span| span.end - span.start);
    spans.fold(f64::INFINITY, f64::min)
}

fn text(args: &PlanPipelineArgs, kind: Kind, simulation: &Simulation, unit: f64, columns: usize) -> String {
    let (stages, micro_batches) = (args.stages, args.micro_batches);
    let mut text = draw::text(simulation, unit, columns.saturating_sub(LABEL_COLUMNS).max(1));
    let held: Vec<String> = (0..stages).map(|stage| format!("{}", simulation.held(stage))).collect();
    let sends: usize = simulation.sends.iter().sum();
    text.push_str(&format!(
        "{kind}: {stages} stages, {micro_batches} micro-batches\nbubble   {:.1} % of the longest stage's time\nmakespan {}\nholds    activations of {} micro-batches, by stage\nsends    {sends} messages per step",
        100.0 * simulation.bubble(),
        simulation.makespan(),
        held.join(", "),
    ));
    if let Some(bytes) = args.boundary_bytes {
        text.push_str(&format!(", {}", human(bytes.saturating_mul(sends as u64))));
    }
    text.push('\n');
    text
}
