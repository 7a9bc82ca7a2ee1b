//! What the parts of a step take on a stage: its micro-batches, and what comes once behind them.

use ferrospeed_config::Stage;

use super::{Machine, hides};
use crate::cost::{Reason, Sent, StepWork, step_work};
use crate::model::Model;
use crate::plan::Request;

/// What is waited for in each micro-batch, in forward and backward.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Exposed {
    pub(super) reason: Reason,
    pub(super) forward_s: f64,
    pub(super) backward_s: f64,
}

/// What one stage does in a step; times are of one micro-batch of the whole stage, but those that come once.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct StageCost {
    pub(super) forward_s: f64,
    pub(super) backward_input_s: f64,
    pub(super) backward_weight_s: f64,
    pub(super) exposed: Vec<Exposed>,
    /// A message to the next stage, or back.
    pub(super) send_s: f64,
    pub(super) send_latency_s: f64,
    /// Once: what comes behind the last backward, by reason.
    pub(super) at_end: Vec<(Reason, f64)>,
    pub(super) update_s: f64,
    pub(super) offload_s: f64,
    /// Operations of a step that the model needs of one rank.
    pub(super) needed_flops: f64,
}

impl StageCost {
    /// Of the stage whose part of the model the request has.
    pub(super) fn of(request: &Request<'_>, mesh: [u64; 4], machine: &Machine) -> StageCost {
        let work = step_work(request);
        let needed = step_work(&Request { checkpoint_activations: false, ..*request });
        let micro_batches = request.config.batch.gradient_accumulation_steps.get() as f64;
        let time = work.time(&machine.rates);
        // Each micro-batch takes the longer of its operations and its passes over memory.
        let compute_s = time.compute_s.max(time.memory_s - time.update_s) / micro_batches;
        // Of six operations per weight forward has two; where it runs twice, of eight.
        let forward = if request.checkpoint_activations { 0.25 } else { 1.0 / 3.0 };
        let forward_s = compute_s * forward;
        let again_s = if request.checkpoint_activations { forward_s } else { 0.0 };
        let half_s = (compute_s - forward_s - again_s) / 2.0;
        let mut cost = StageCost {
            forward_s,
            backward_input_s: half_s + again_s,
            backward_weight_s: half_s,
            exposed: Vec::new(),
            send_s: 0.0,
            send_latency_s: 0.0,
            at_end: Vec::new(),
            update_s: time.update_s,
            offload_s: time.offload_s,
            needed_flops: needed.flops,
        };
        cost.add_sent(request, &work, machine, micro_batches);
        cost.add_boundary(request, mesh, machine);
        cost
    }

    fn backward_s(&self) -> f64 {
        self.backward_input_s + self.backward_weight_s
    }

    fn add_sent(&mut self, request: &Request<'_>, work: &StepWork, machine: &Machine, micro_batches: f64) {
        let zero = &request.config.zero;
        let layers = layers_of(request.model);
        let each_micro_batch = zero.stage >= Stage::Gradients || zero.reduce_each_micro_batch;
        for sent in &work.sent {
            let seconds = sent.bytes / rate(machine, sent.span);
            let wait_s = latency(machine, sent.span);
            let per_micro = seconds / micro_batches;
            // Beside compute all but one layer's share is hidden, as far as compute lasts.
            let beside = |seconds: f64, window: f64| match hides(request.processor) {
                true => (seconds - window).max(seconds / layers),
                false => seconds,
            };
            match sent.reason {
                Reason::Weights if zero.stage == Stage::Parameters => {
                    let half = per_micro / 2.0;
                    self.exposed.push(Exposed {
                        reason: sent.reason,
                        forward_s: beside(half, self.forward_s) + wait_s,
                        backward_s: beside(half, self.backward_s()) + wait_s,
                    });
                }
                Reason::Weights => self.at_end.push((sent.reason, seconds + wait_s)),
                Reason::Gradients if each_micro_batch => {
                    let backward_s = beside(per_micro, self.backward_s()) + wait_s;
                    self.exposed.push(Exposed { reason: sent.reason, forward_s: 0.0, backward_s });
                }
                Reason::Gradients => {
                    let hidden = zero.overlap_comm;
                    let once = if hidden { beside(seconds, self.backward_s()) } else { seconds };
                    self.at_end.push((sent.reason, once + wait_s));
                }
                // Layers wait for these: half of them in forward, and in what is forward again.
                Reason::Slices | Reason::Sequences | Reason::Experts => {
                    let collectives = collectives(sent, layers) * wait_s;
                    let forward = if request.checkpoint_activations { 1.0 / 3.0 } else { 0.5 };
                    let seconds = per_micro + collectives;
                    self.exposed.push(Exposed {
                        reason: sent.reason,
                        forward_s: seconds * forward,
                        backward_s: seconds * (1.0 - forward),
                    });
                }
            }
        }
    }

    /// What crosses from a stage to the next: one residual stream, as far as this rank has it.
    fn add_boundary(&mut self, request: &Request<'_>, mesh: [u64; 4], machine: &Machine) {
        let Model::Transformer(shape) = request.model else { return };
        if mesh[0] < 2 {
            return;
        }
        let length = request.sequence_length.div_ceil(request.sequence_ranks.max(1));
        let tokens = request.config.batch.train_micro_batch_size_per_gpu.get().saturating_mul(length);
        let bytes =
            tokens.saturating_mul(shape.hidden) as f64 * request.config.precision.data_type().bytes() as f64;
        // The next stage's rank is as far away as all ranks of this one.
        let away = (mesh[1] * mesh[2] * mesh[3]).saturating_add(1);
        self.send_s = bytes / rate(machine, away);
        self.send_latency_s = machine.latency_s[usize::from(is_far(machine, away))];
    }
}

fn layers_of(model: &Model) -> f64 {
    match model {
        Model::Transformer(shape) => shape.layers.max(1) as f64,
        Model::Counts(_) => 1.0,
    }
}

/// How often layers wait for each other in a micro-batch: see the counts of `cost.rs`.
fn collectives(sent: &Sent, layers: f64) -> f64 {
    layers * if sent.reason == Reason::Sequences { 8.0 } else { 4.0 }
}

/// Whether neighbours so many ranks apart are on several hosts.
fn is_far(machine: &Machine, span: u64) -> bool {
    span > machine.rates.ranks_per_host
}

fn rate(machine: &Machine, span: u64) -> f64 {
    let far = machine.rates.link_bytes_per_s.filter(|_| is_far(machine, span));
    far.unwrap_or(machine.rates.wire_bytes_per_s)
}

/// What a collective among so many waits beside its bytes: once per doubling.
fn latency(machine: &Machine, span: u64) -> f64 {
    machine.latency_s[usize::from(is_far(machine, span))] * (span.max(1) as f64).log2()
}
