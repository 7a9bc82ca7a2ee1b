//! `ferrospeed plan --search`: which of all layouts is fastest by the model of costs, of those that fit.
//!
//! Nothing runs: the answer is as good as the rates it is given and as the model ([`crate::cost`]) is. It does not know pipeline
//! stages. Equal speeds are settled by the simpler layout: fewer slices and parts, a lower stage.

use ferrospeed_config::Config;
use serde::Serialize;
use serde_json::Value;

use crate::cost::{Rates, StepTime, StepWork, step_work};
use crate::layout::{Layout, Space};
use crate::model::{Model, Transformer};
use crate::plan::{Capacity, Operands, Plan, Processor, Request, Shortfall, Tier, plan};
use crate::tuning::machine::Parts;
use crate::tuning::planned::Candidate;

/// What is asked.
#[derive(Debug, Clone, Copy)]
pub struct Question<'a> {
    /// The model, whole.
    pub model: &'a Transformer,
    /// Ranks that share the experts of a layer.
    pub expert_ranks: u64,
    /// The configuration as it was written.
    pub ds_config: &'a Value,
    /// Ranks.
    pub ranks: u64,
    /// Tokens per sample.
    pub sequence_length: u64,
    /// What ranks compute on.
    pub processor: Processor,
    /// Whether products copy an operand into tiles first.
    pub operands: Operands,
    /// What there is of memory.
    pub capacity: Capacity,
    /// What there is of speed.
    pub rates: Rates,
}

/// A layout that was looked at.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Found {
    /// Which.
    pub layout: Layout,
    /// Its configuration.
    pub ds_config: Value,
    /// What each rank holds.
    pub plan: Plan,
    /// What each rank does in a step.
    pub work: StepWork,
    /// How long that takes.
    pub time: StepTime,
    /// Samples of a step.
    pub samples: u64,
    /// Samples of all ranks per second.
    pub samples_per_s: f64,
    /// What is missing; empty where it fits.
    pub shortfalls: Vec<Shortfall>,
}

impl Found {
    /// As the autotuner takes it.
    pub fn candidate(&self) -> Candidate {
        let bytes = [Tier::Device, Tier::Host].map(|tier| self.plan.total(tier));
        let StepTime { compute_s, idle_s, memory_s, update_s, wire_s, offload_s } = self.time;
        let parts = Parts {
            compute_s: compute_s - idle_s,
            idle_s,
            passes_s: memory_s - update_s,
            update_s,
            wire_s,
            offload_s,
            exchanges: self.work.exchanges,
        };
        let (expected, samples) = (self.samples_per_s, self.samples as f64);
        Candidate { layout: self.layout, expected, bytes, parts, samples }
    }

    /// The share by which the tier that is shortest is too small; 0 where all fits.
    fn lack(&self) -> f64 {
        let lacks = self
            .shortfalls
            .iter()
            .map(|short| short.needed_bytes as f64 / short.available_bytes.max(1) as f64);
        lacks.fold(0.0, f64::max)
    }
}

/// What was found.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Answer {
    /// Those that fit, fastest first.
    pub fitting: Vec<Found>,
    /// Of those that do not, the one that lacks least.
    pub nearest: Option<Found>,
    /// Layouts that were looked at.
    pub looked_at: usize,
    /// Of these, such as the configuration's own rules refuse.
    pub refused: usize,
}

/// Looks at every layout of a space. `resolve` makes a configuration of its text for a number of ranks that see samples of their
/// own; `None` where it is refused.
pub fn search(
    question: &Question<'_>,
    space: &Space,
    mut resolve: impl FnMut(&Value, u64) -> Option<Config>,
) -> Answer {
    let mut answer = Answer { fitting: Vec::new(), nearest: None, looked_at: 0, refused: 0 };
    for layout in space.layouts(question.ranks) {
        answer.looked_at += 1;
        let Some(found) = look_at(question, layout, &mut resolve) else {
            answer.refused += 1;
            continue;
        };
        if found.shortfalls.is_empty() {
            answer.fitting.push(found);
        } else if answer.nearest.as_ref().is_none_or(|nearest| found.lack() < nearest.lack()) {
            answer.nearest = Some(found);
        }
    }
    let simplicity =
        |found: &Found| (found.layout.tensor, found.layout.sequence, found.layout.stage, found.layout);
    answer.fitting.sort_by(|one, other| {
        other
            .samples_per_s
            .total_cmp(&one.samples_per_s)
            .then_with(|| simplicity(one).cmp(&simplicity(other)))
    });
    answer
}

fn look_at(
    question: &Question<'_>,
    layout: Layout,
    resolve: &mut impl FnMut(&Value, u64) -> Option<Config>,
) -> Option<Found> {
    let data_ranks = layout.data_ranks(question.ranks);
    let ds_config = layout.applied_to(question.ds_config);
    let config = resolve(&ds_config, data_ranks)?;
    let shape = question.model.in_slices(layout.tensor).with_experts_over(question.expert_ranks)?;
    let request = Request {
        model: &Model::Transformer(shape),
        config: &config,
        data_parallel_size: data_ranks.saturating_mul(layout.sequence),
        sequence_ranks: layout.sequence,
        sequence_length: question.sequence_length,
        checkpoint_activations: layout.recompute,
        mlp_chunk: None,
        keeps_attention_matrix: false,
        processor: question.processor,
        operands: question.operands,
    };
    let (plan, work) = (plan(&request), step_work(&request));
    let time = work.time(&question.rates);
    let samples = layout.micro_batch.saturating_mul(layout.accumulation).saturating_mul(data_ranks);
    let shortfalls = plan.shortfalls(&question.capacity);
    let samples_per_s = samples as f64 / time.total_s();
    Some(Found { layout, ds_config, plan, work, time, samples, samples_per_s, shortfalls })
}
