//! Which layout is fastest by the simulation: stages and slices of the model, replicas, micro-batches, recomputation.
//!
//! Every choice is planned, and those that fit are simulated. The batch of a step stays what it is, so all of them train the same.

use ferrospeed_config::Config;
use serde::Serialize;
use serde_json::Value;
use std::num::NonZeroUsize;

use super::{Machine, Question, Simulated, simulate};
use crate::layout::{Layout, Offload};
use crate::model::{Model, Transformer};
use crate::plan::{Capacity, Operands, Processor, Request};
use crate::stages::divide;

/// Schedules that stages may follow.
const SCHEDULES: [&str; 2] = ["1f1b", "zb-v"];
/// The most slices and stages that are looked at.
const MOST_PARTS: u64 = 64;
/// Samples of a micro-batch that are looked at.
const MICRO_BATCHES: [u64; 3] = [1, 2, 4];

/// What is asked.
#[derive(Debug, Clone, Copy)]
pub struct Open<'a> {
    /// The model, whole.
    pub model: &'a Transformer,
    /// The configuration as it was written.
    pub ds_config: &'a Value,
    /// Ranks.
    pub ranks: u64,
    /// Samples of a step.
    pub samples: u64,
    /// Tokens of each.
    pub sequence_length: u64,
    /// What ranks compute on.
    pub processor: Processor,
    /// What products copy first.
    pub operands: Operands,
    /// What there is of memory.
    pub capacity: Capacity,
    /// What it runs on.
    pub machine: &'a Machine,
}

/// A layout that fits.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Fitting {
    /// Stages of the model.
    pub stages: u64,
    /// All else.
    pub layout: Layout,
    /// A step of it.
    pub step: Simulated,
}

/// Layouts that fit, the fastest first, and how many were looked at. `resolve` makes a configuration of its text for a number of
/// ranks that see samples of their own; `None` where it is refused.
pub fn best(
    open: &Open<'_>,
    mut resolve: impl FnMut(&Value, u64) -> Option<Config>,
) -> (Vec<Fitting>, usize) {
    let (mut found, mut looked_at) = (Vec::new(), 0);
    for (stages, schedule, layout) in choices(open) {
        looked_at += 1;
        found.extend(look_at(open, stages, schedule, layout, &mut resolve));
    }
    found.sort_by(|one: &Fitting, other: &Fitting| {
        // Equal speeds are settled by the simpler layout.
        let simple = |fitting: &Fitting| (fitting.stages, fitting.layout.tensor, fitting.layout);
        one.step.step_s.total_cmp(&other.step.step_s).then_with(|| simple(one).cmp(&simple(other)))
    });
    (found, looked_at)
}

fn choices(open: &Open<'_>) -> Vec<(u64, &'static str, Layout)> {
    let powers =
        |most: u64| (0..63).map(|power| 1u64 << power).take_while(move |size| *size <= most.min(MOST_PARTS));
    let mut all = Vec::new();
    for stages in powers(open.model.layers) {
        for tensor in powers(open.machine.rates.ranks_per_host) {
            let replica = stages * tensor;
            let divides = open.ranks.is_multiple_of(replica)
                && open.model.heads.is_multiple_of(tensor)
                && open.model.intermediate.is_multiple_of(tensor);
            if !divides || !open.samples.is_multiple_of(open.ranks / replica) {
                continue;
            }
            let own = open.samples / (open.ranks / replica);
            for micro_batch in MICRO_BATCHES.into_iter().filter(|micro| own.is_multiple_of(*micro)) {
                let accumulation = own / micro_batch;
                // ZeRO's higher stages reduce each micro-batch, which stages of a pipeline do not.
                let zero_stages: &[u8] = if stages == 1 { &[1, 3] } else { &[1] };
                let schedules = if stages == 1 { &SCHEDULES[..1] } else { &SCHEDULES[..] };
                for (&stage, &schedule) in
                    zero_stages.iter().flat_map(|stage| schedules.iter().map(move |name| (stage, name)))
                {
                    for recompute in [false, true] {
                        let layout = Layout {
                            stage,
                            micro_batch,
                            accumulation,
                            recompute,
                            tensor,
                            sequence: 1,
                            offload: Offload::AsConfigured,
                        };
                        all.push((stages, schedule, layout));
                    }
                }
            }
        }
    }
    all
}

fn look_at(
    open: &Open<'_>,
    stages: u64,
    schedule: &str,
    layout: Layout,
    resolve: &mut impl FnMut(&Value, u64) -> Option<Config>,
) -> Option<Fitting> {
    let data_ranks = open.ranks / (stages * layout.tensor);
    let mut written = layout.applied_to(open.ds_config);
    written["pipeline"]["stages"] = stages.into();
    written["pipeline"]["schedule"] = schedule.into();
    let config = resolve(&written, data_ranks)?;
    let division = match NonZeroUsize::new(usize::try_from(stages).ok()?)? {
        NonZeroUsize::MIN => None,
        stages => Some(divide(open.model, &config, stages, open.sequence_length).ok()?),
    };
    let request = Request {
        model: &Model::Transformer(open.model.in_slices(layout.tensor)),
        config: &config,
        data_parallel_size: data_ranks,
        sequence_ranks: 1,
        sequence_length: open.sequence_length,
        checkpoint_activations: layout.recompute,
        mlp_chunk: None,
        keeps_attention_matrix: false,
        processor: open.processor,
        operands: open.operands,
    };
    let question =
        Question { request, division: division.as_ref(), tensor: layout.tensor, machine: open.machine };
    let step = simulate(&question).ok()?;
    step.plan.fits(&open.capacity).then_some(Fitting { stages, layout, step })
}
