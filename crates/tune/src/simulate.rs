//! `ferrospeed plan --simulate`: a step of up to tens of thousands of ranks, event by event, before there is one of them.
//!
//! What runs is this program's own: pipeline schedules as lists of instructions ([`ferrospeed_pipeline::schedule`]), the mesh (pipe,
//! data, sequence, tensor; neighbours differ in the last), what each stage holds ([`crate::stages`]), what its ranks compute and
//! send ([`crate::cost`]) and when. Each instruction takes what the roofline says; messages between stages travel beside it;
//! collectives take their bytes over the slowest link that they cross and a latency per doubling of their ranks. Ranks that
//! hold slices or parts of the same samples move together, as slow as the slowest of them; replicas meet when gradients are
//! summed.
//!
//! - `stage`: what the parts of a step take on each stage.
//! - `events`: when everything happens.
//! - [`failures`]: what is left of the time where hosts fail.
//! - [`best`]: which layout is fastest.
//! - `show`: all of it as text.
//!
//! It does not know kernels that reach less than the measured product, congestion, or an allocator. Ratios between layouts are
//! its use; docs/planning.md has how far its times are from measured ones.

pub mod best;
mod events;
pub mod failures;
mod show;
mod stage;

use ferrospeed_config::Config;
use ferrospeed_pipeline::PipelineError;
use ferrospeed_pipeline::division::Division;
use ferrospeed_pipeline::schedule::{Kind, Schedule};
use serde::Serialize;

use crate::cost::{Rates, Reason};
use crate::model::Model;
use crate::plan::{Plan, Processor, Request, plan};
use crate::stages::{part_of_stage, plan_in_stages};
use events::{Cell, Timeline};
pub use show::seconds;
use stage::StageCost;

/// The most ranks that are simulated.
pub const MOST_RANKS: u64 = 1 << 20;

/// What ranks run on, beside their rates.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Machine {
    /// What a rank can do.
    pub rates: Rates,
    /// What a collective or message waits for before its first byte: within a host, and between hosts.
    pub latency_s: [f64; 2],
    /// By how much computations vary: each takes up to so many times longer.
    pub jitter: f64,
    /// Ranks that are slower than the others, and how many times longer they take.
    pub slow: Vec<(u64, f64)>,
    /// Which computations take longer.
    pub seed: u64,
}

/// What is simulated.
#[derive(Debug, Clone, Copy)]
pub struct Question<'a> {
    /// The run, as [`plan_in_stages`] takes it: the model is what a rank would hold of it undivided.
    pub request: Request<'a>,
    /// Which stage has which layers, where there are stages.
    pub division: Option<&'a Division>,
    /// Ranks that hold slices of each layer.
    pub tensor: u64,
    /// What it runs on.
    pub machine: &'a Machine,
}

/// What a step spends its time on, where it is longest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Spent {
    /// Forward and backward.
    Compute,
    /// Waiting for other stages.
    Bubble,
    /// Waiting for slower replicas.
    Stragglers,
    /// What ranks send each other and nothing hides.
    Exposed(Reason),
    /// The update of the weights.
    Update,
    /// Between devices, hosts and disks.
    Offload,
}

/// A step of all ranks.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Simulated {
    /// Ranks.
    pub ranks: u64,
    /// Hosts.
    pub hosts: u64,
    /// Sizes of the mesh: pipe, data, sequence, tensor.
    pub mesh: [u64; 4],
    /// The order in which stages work.
    pub schedule: String,
    /// From the first forward to the last new weight.
    pub step_s: f64,
    /// Samples of a step.
    pub samples: u64,
    /// Tokens of all ranks in a second.
    pub tokens_per_s: f64,
    /// Operations per second and rank that the model needs: what is computed again does not count.
    pub flops_per_s: f64,
    /// The share of its own time that the longest stage waits for others.
    pub bubble: f64,
    /// Where the time of the longest stage goes.
    pub spent: Vec<(Spent, f64)>,
    /// By stage: the seconds that it computes, and those that it waits.
    pub stages: Vec<[f64; 2]>,
    /// The rank that the others wait for, where one is slower.
    pub slowest: Option<u64>,
    /// Bytes of the fullest rank.
    pub plan: Plan,
    /// What happened in the simulation.
    pub events: u64,
}

impl Simulated {
    /// Seconds of the step that are spent on something.
    pub fn on(&self, what: Spent) -> f64 {
        self.spent.iter().filter(|(spent, _)| *spent == what).map(|(_, seconds)| seconds).sum()
    }

    /// Seconds that ranks wait for bytes.
    pub fn exposed_s(&self) -> f64 {
        let exposed = self.spent.iter().filter(|(spent, _)| matches!(spent, Spent::Exposed(_)));
        exposed.map(|(_, seconds)| seconds).sum()
    }
}

/// Simulates a step.
pub fn simulate(question: &Question<'_>) -> Result<Simulated, PipelineError> {
    let Question { request, division, tensor, machine } = *question;
    let mesh = mesh(question);
    let (schedule, parts) = match division {
        Some(division) => {
            let micro_batches = micro_batches(request.config);
            let schedule = Schedule::new(division.kind, division.stages(), micro_batches)?.sending_at_once();
            let parts: Vec<Model> = (0..division.stages())
                .map(|stage| part_of_stage(request.model, division, stage).map(Model::Transformer))
                .collect::<Result<_, _>>()?;
            (schedule, parts)
        }
        None => {
            let micro_batches = micro_batches(request.config);
            (Schedule::new(Kind::DataParallel, 1, micro_batches)?, vec![*request.model])
        }
    };
    let costs: Vec<StageCost> =
        parts.iter().map(|part| StageCost::of(&Request { model: part, ..request }, mesh, machine)).collect();
    let timeline = Timeline::of(&schedule, &costs, mesh, machine);
    let longest = timeline.longest();
    let step_s = timeline.step_s();
    let samples = request.config.batch.train_batch_size.get();
    let tokens = samples as f64 * request.sequence_length as f64;
    let ranks: u64 = mesh.iter().product();
    let needed: f64 = costs.iter().map(|cost| cost.needed_flops).sum::<f64>() * mesh[1] as f64;
    let needed = needed * (request.sequence_ranks * tensor) as f64;
    let planned = match division {
        Some(division) => plan_in_stages(&request, division)?,
        None => plan(&request),
    };
    Ok(Simulated {
        ranks,
        hosts: ranks.div_ceil(machine.rates.ranks_per_host.max(1)),
        mesh,
        schedule: division.map_or_else(|| "none".to_owned(), |division| division.kind.to_string()),
        step_s,
        samples,
        tokens_per_s: tokens / step_s,
        flops_per_s: needed / ranks as f64 / step_s,
        bubble: longest.idle_s / (longest.idle_s + longest.busy_s()).max(f64::MIN_POSITIVE),
        spent: timeline.spent(longest, &costs),
        stages: timeline.by_stage().map(|cell: &Cell| [cell.compute_s, cell.idle_s]).collect(),
        slowest: timeline.slowest(machine, mesh),
        plan: planned,
        events: timeline.events,
    })
}

fn micro_batches(config: &Config) -> usize {
    usize::try_from(config.batch.gradient_accumulation_steps.get()).unwrap_or(usize::MAX)
}

/// Pipe, data, sequence, tensor.
fn mesh(question: &Question<'_>) -> [u64; 4] {
    let sequence = question.request.sequence_ranks.max(1);
    let stages = question.division.map_or(1, Division::stages) as u64;
    [stages, (question.request.data_parallel_size / sequence).max(1), sequence, question.tensor.max(1)]
}

/// The share of what is sent beside compute that compute hides: a GPU's streams do, a host's cores send by themselves.
fn hides(processor: Processor) -> bool {
    processor == Processor::Gpu
}
