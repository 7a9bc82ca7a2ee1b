//! A model in stages: what the rank of the fullest one holds.
//!
//! A stage has the state of its own layers, and activations of as many micro-batches as its schedule has under way there: its
//! instructions are followed one by one, and what lies there is counted at each. A chunk of layers holds what its layers save,
//! and its result until the gradient of that has come. Where the gradients of weights are put off, their operands wait. A
//! weight that two stages use is on both, and each keeps half of its states. Divided is what the model is before layers are cut into slices.

mod slots;

use std::collections::HashMap;
use std::num::NonZeroUsize;

use ferrospeed_config::Config;
use ferrospeed_pipeline::PipelineError;
use ferrospeed_pipeline::division::{Asked, Division};
use ferrospeed_pipeline::partition::{LayerSize, Measured};
use ferrospeed_pipeline::schedule::{Instruction, Item, Schedule};

use crate::activations::{ActivationBytes, PassingBytes};
use crate::estimate::ModelSize;
use crate::model::{Model, Transformer};
use crate::plan::{Plan, Processor, Request, StagedBytes, Tier, human};
use crate::planner::plan_part;
pub use slots::too_few_slots;

/// Of a gradient, a master weight and two states in f32.
const STATE_BYTES: f64 = 16.0;

/// Which stage gets which layers of a transformer: its embedding, its blocks and its head.
pub fn divide(
    whole: &Transformer,
    config: &Config,
    stages: NonZeroUsize,
    sequence_length: u64,
) -> Result<Division, PipelineError> {
    let micro_batches = config.batch.gradient_accumulation_steps.get();
    let asked = Asked {
        stages,
        partition: &config.pipeline.partition,
        schedule: &config.pipeline.schedule,
        micro_batches: usize::try_from(micro_batches).unwrap_or(usize::MAX),
    };
    let (width, ends) = (config.precision.data_type().bytes(), Ends::of(whole));
    let tokens = config.batch.train_micro_batch_size_per_gpu.get().saturating_mul(sequence_length);
    let bytes = ActivationBytes::of(whole, width, tokens, sequence_length, false, None, Processor::Cpu);
    // Nobody has measured anything yet: time goes with the weights that tokens are multiplied with.
    let layer = |class: &str, parameters: u64, multiplied: u64, activation_bytes: u64| LayerSize {
        class: class.to_owned(),
        parameters: usize::try_from(parameters).unwrap_or(usize::MAX),
        measured: Some(Measured {
            seconds: multiplied as f64,
            state_bytes: parameters as f64 * (width as f64 + STATE_BYTES),
            activation_bytes: activation_bytes as f64,
        }),
    };
    let mut layers = vec![layer("Embedding", ends.embedding, 0, bytes.layer_input)];
    let block = layer("Block", whole.layer_params, whole.layer_params, bytes.layer);
    layers.extend((0..whole.layers).map(|_| block.clone()));
    let own = ends.head - if asked.ends_meet() { ends.tied } else { 0 };
    layers.push(layer("Head", own, ends.head, bytes.loss.saturating_sub(bytes.logits)));
    Division::of(&asked, &layers)
}

/// The part of a model that a stage computes. `model` is what a rank would hold of it undivided. `tied_head` says of the part that
/// every table in it is multiplied by: one that is only looked up takes no operations, and one that lies with another stage
/// is not in this one's parameters.
pub(crate) fn part_of_stage(
    model: &Model,
    division: &Division,
    stage: usize,
) -> Result<Transformer, PipelineError> {
    let Model::Transformer(whole) = model else { return Err(shapeless()) };
    // In which order stages work says nothing of their layers: any number of micro-batches will do.
    let schedule = Schedule::new(division.kind, division.stages(), division.stages())?;
    let staged = Staged { whole, division, schedule: &schedule, stage, tied_params: 0, interval: 0 };
    let [embeds, has_head] =
        [staged.chunks().any(|chunk| chunk.embeds), staged.chunks().any(|chunk| chunk.has_head)];
    let only_looks_up = embeds && !(has_head && whole.tied_head);
    Ok(Transformer { tied_head: !only_looks_up, ..staged.part() })
}

fn shapeless() -> PipelineError {
    let why = "which layers a stage gets follows from the model's shape, and only its size is known";
    PipelineError::Key { key: "pipeline.stages", why: why.to_owned() }
}

/// Plans the bytes of a rank of the fullest stage. `request.model` is what a rank would hold of the undivided model.
pub fn plan_in_stages(request: &Request<'_>, division: &Division) -> Result<Plan, PipelineError> {
    let Model::Transformer(whole) = request.model else { return Err(shapeless()) };
    let micro_batches = request.config.batch.gradient_accumulation_steps.get();
    let micro_batches = usize::try_from(micro_batches).unwrap_or(usize::MAX);
    let schedule = Schedule::new(division.kind, division.stages(), micro_batches)?.sending_at_once();
    let plans = (0..division.stages()).map(|stage| {
        let staged = Staged {
            whole,
            division,
            schedule: &schedule,
            stage,
            tied_params: 0,
            interval: request.config.pipeline.activation_checkpoint_interval,
        };
        let staged = Staged { tied_params: staged.tied(), ..staged };
        let model = Model::Transformer(staged.part());
        plan_part(&Request { model: &model, ..*request }, Some(&staged))
    });
    let mut plans: Vec<Plan> = plans.collect();
    let totals: Vec<u64> = plans.iter().map(|plan| plan.total(Tier::Device)).collect();
    let fullest = (0..plans.len()).rev().max_by_key(|stage| totals[*stage]).unwrap_or(0);
    let each: Vec<String> = totals.iter().map(|bytes| human(*bytes)).collect();
    let own = |plan: &Plan| plan.total(Tier::Device).saturating_sub(plan.in_common().0);
    let stages = StagedBytes {
        ranks_per_stage: request.data_parallel_size.max(1).saturating_mul(whole.slices.max(1)),
        rank_bytes: plans.iter().map(own).collect(),
        common_bytes: plans.iter().map(|plan| plan.in_common().1).collect(),
    };
    let mut plan = plans.swap_remove(fullest);
    plan.stages = Some(stages);
    plan.notes.push(format!(
        "pipeline parallelism: stage {fullest} of {} is the fullest ({} each); {}; stages: {division}",
        division.stages(),
        each.join(", "),
        division.kind
    ));
    Ok(plan)
}

/// The parameters outside the blocks, by the end of the model that uses them.
struct Ends {
    embedding: u64,
    head: u64,
    /// What both have.
    tied: u64,
}

impl Ends {
    fn of(shape: &Transformer) -> Ends {
        let outside = shape.size.total_params.saturating_sub(shape.layers.saturating_mul(shape.layer_params));
        let table = shape.vocab.saturating_mul(shape.hidden);
        let tables = if shape.tied_head { table } else { 2 * table };
        let rest = outside.saturating_sub(tables);
        let norm = rest.min(2 * shape.hidden);
        Ends {
            embedding: outside.saturating_sub(tables - table + norm),
            head: table + norm,
            tied: if shape.tied_head { table } else { 0 },
        }
    }
}

/// One stage of a model.
pub(crate) struct Staged<'a> {
    whole: &'a Transformer,
    division: &'a Division,
    schedule: &'a Schedule,
    stage: usize,
    /// Parameters that another stage has as well.
    pub(crate) tied_params: u64,
    /// Layers that are computed again together; 0 where none are.
    interval: u64,
}

/// Bytes at the moment when there are most.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Held {
    /// What micro-batches have under way.
    pub(crate) activations: u64,
    /// What comes and goes beside.
    pub(crate) passing: u64,
}

/// The layers of a chunk.
struct Chunk {
    embeds: bool,
    blocks: u64,
    has_head: bool,
}

impl Staged<'_> {
    fn chunk(&self, chunk: usize) -> Chunk {
        let layers = self.division.layers_of_chunk(chunk);
        let last = usize::try_from(self.whole.layers).unwrap_or(usize::MAX).saturating_add(1);
        let (embeds, has_head) = (layers.start == 0, layers.end > last);
        let blocks = layers.len() as u64 - u64::from(embeds) - u64::from(has_head);
        Chunk { embeds, blocks, has_head }
    }

    fn chunks(&self) -> impl Iterator<Item = Chunk> {
        self.division.chunks_of(self.stage).map(|chunk| self.chunk(chunk))
    }

    /// The parameters that this stage and another one have.
    fn tied(&self) -> u64 {
        let [embeds, has_head] =
            [self.chunks().any(|chunk| chunk.embeds), self.chunks().any(|chunk| chunk.has_head)];
        if embeds != has_head { Ends::of(self.whole).tied } else { 0 }
    }

    /// The part of the model that it holds.
    fn part(&self) -> Transformer {
        let ends = Ends::of(self.whole);
        let blocks: u64 = self.chunks().map(|chunk| chunk.blocks).sum();
        let embeds = self.chunks().any(|chunk| chunk.embeds);
        let has_head = self.chunks().any(|chunk| chunk.has_head);
        let twice = if embeds && has_head { ends.tied } else { 0 };
        let outside = if embeds { ends.embedding } else { 0 } + if has_head { ends.head } else { 0 } - twice;
        let total_params = blocks.saturating_mul(self.whole.layer_params).saturating_add(outside);
        let largest_layer_params = self.whole.size.largest_layer_params.min(total_params);
        let elsewhere = self.whole.params_elsewhere / self.whole.layers.max(1) * blocks;
        let all = self.whole.size.total_params.max(1) as f64;
        let frozen_params = (self.whole.frozen_params as f64 / all * total_params as f64) as u64;
        Transformer {
            frozen_params,
            adapter_params: self.whole.adapter_params / self.whole.layers.max(1) * blocks,
            layers: blocks,
            params_elsewhere: elsewhere,
            size: ModelSize { total_params, largest_layer_params },
            ..*self.whole
        }
    }

    /// The most that lies here while the stage follows its schedule.
    pub(crate) fn peak(&self, bytes: &ActivationBytes, passing: &PassingBytes, again: bool) -> Held {
        let (mut flights, mut left): (HashMap<Item, u64>, HashMap<Item, u64>) = Default::default();
        let mut most = Held::default();
        for instruction in self.schedule.instructions(self.stage) {
            let Some(item) = instruction.item() else { continue };
            let chunk = self.chunk(item.chunk);
            let before =
                flights.values().chain(left.values()).fold(0, |sum: u64, own| sum.saturating_add(*own));
            let mut see = |activations: u64, passing: u64| {
                if activations.saturating_add(passing) > most.activations.saturating_add(most.passing) {
                    most = Held { activations, passing };
                }
            };
            // The loss is taken when the head is recorded: in forward, or when it is computed again.
            let at_loss = bytes.logits.saturating_add(passing.at_loss);
            match instruction {
                Instruction::Forward(_) => {
                    let kept = self.kept(&chunk, bytes, again);
                    let records_head = chunk.has_head && self.interval == 0;
                    let passing_here = match (chunk.has_head, records_head) {
                        (false, _) => 0,
                        (true, true) => at_loss,
                        (true, false) => bytes.logits,
                    };
                    see(before.saturating_add(kept), passing_here);
                    flights
                        .insert(item, kept.saturating_add(if records_head { passing.after_loss } else { 0 }));
                }
                Instruction::Backward(_) | Instruction::BackwardInput(_) => {
                    let own = flights.remove(&item).unwrap_or(0);
                    let others = before.saturating_sub(own);
                    let in_halves = matches!(instruction, Instruction::BackwardInput(_));
                    let weights = if in_halves { 0 } else { passing.in_backward };
                    let arrived = if chunk.has_head { 0 } else { bytes.layer_input };
                    let rebuilt = self.recomputed(&chunk, bytes, again);
                    if chunk.blocks > 0 {
                        let held = before.saturating_add(arrived).saturating_add(rebuilt);
                        see(held, bytes.backward.saturating_add(weights));
                    }
                    if chunk.has_head && self.interval > 0 {
                        // With the blocks that are computed again beside it.
                        let beside = self.segments(&chunk).pop().unwrap_or(0).saturating_mul(bytes.layer);
                        let held = before.saturating_add(beside).saturating_add(bytes.loss - bytes.logits);
                        see(held, at_loss.max(passing.after_loss));
                    }
                    if chunk.embeds {
                        see(others.saturating_add(bytes.layer_input), passing.table);
                    }
                    if in_halves {
                        let put_off = chunk.blocks.saturating_mul(bytes.put_off);
                        left.insert(item, put_off);
                        see(others.saturating_add(put_off), bytes.layer_input);
                    }
                }
                Instruction::BackwardWeight(_) => {
                    see(before, passing.in_backward);
                    left.remove(&item);
                }
                _ => {}
            }
        }
        most
    }

    /// What a chunk keeps of a micro-batch from forward to backward.
    fn kept(&self, chunk: &Chunk, bytes: &ActivationBytes, again: bool) -> u64 {
        if self.interval > 0 {
            // Of so many layers each, the inputs, of which the first takes its own from the data; and the result.
            let layers = chunk.blocks + u64::from(chunk.embeds) + u64::from(chunk.has_head);
            let results = u64::from(!chunk.has_head);
            let inputs = layers.div_ceil(self.interval) - u64::from(chunk.embeds);
            return (inputs + results).saturating_mul(bytes.layer_input);
        }
        let of_block = if again { bytes.layer_input } else { bytes.layer };
        let end = if chunk.has_head { bytes.loss - bytes.logits } else { bytes.layer_input };
        chunk.blocks.saturating_mul(of_block).saturating_add(end)
    }

    /// How many blocks are computed again together, from the chunk's first layers to its last.
    fn segments(&self, chunk: &Chunk) -> Vec<u64> {
        let layers = chunk.blocks + u64::from(chunk.embeds) + u64::from(chunk.has_head);
        let of = |first: u64| {
            let end = first.saturating_add(self.interval).min(layers);
            let ends = u64::from(chunk.embeds && first == 0) + u64::from(chunk.has_head && end == layers);
            end - first - ends
        };
        match usize::try_from(self.interval).unwrap_or(usize::MAX) {
            0 => Vec::new(),
            step => (0..layers).step_by(step).map(of).collect(),
        }
    }

    /// What is computed again at a time in backward.
    fn recomputed(&self, chunk: &Chunk, bytes: &ActivationBytes, again: bool) -> u64 {
        let together = self.segments(chunk).into_iter().max().unwrap_or(0);
        match (self.interval, again) {
            (0, false) => 0,
            (0, true) => chunk.blocks.min(1).saturating_mul(bytes.layer),
            (_, false) => together.saturating_mul(bytes.layer),
            (_, true) => together.saturating_mul(bytes.layer_input).saturating_add(bytes.layer),
        }
    }

    /// How its activations come about.
    pub(crate) fn why(&self, tokens: u64) -> String {
        let layers: u64 = self.chunks().map(|chunk| chunk.blocks).sum();
        format!(
            "{tokens} tokens through {layers} layers of stage {}, for each micro-batch that its schedule has under way",
            self.stage
        )
    }
}
