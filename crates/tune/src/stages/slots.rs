//! `activation_checkpointing.number_checkpoints`: how many inputs of blocks wait for backward at once.
//!
//! A run finds out when its ranks are under way; what a schedule has under way is known before.

use ferrospeed_config::Config;
use ferrospeed_pipeline::division::Division;
use ferrospeed_pipeline::partition::Method;
use ferrospeed_pipeline::schedule::{Instruction, Schedule};

use super::Staged;
use crate::model::Transformer;

/// What is to be written instead, where a model whose blocks are computed again needs more slots than the configuration has.
/// A division that is measured when ranks have begun is not judged.
pub fn too_few_slots(whole: &Transformer, config: &Config, division: Option<&Division>) -> Option<String> {
    let section = &config.activation_checkpointing;
    let slots = section.number_checkpoints.filter(|_| section.contiguous_memory_optimization)?;
    let needed = match division {
        None => whole.layers,
        Some(_) if config.pipeline.partition.parse().is_ok_and(|method: Method| method.needs_measuring()) => {
            return None;
        }
        Some(division) => most_of_stages(whole, config, division)?,
    };
    (slots < needed).then(|| {
        format!(
            "activation_checkpointing.number_checkpoints: {slots} are too few: the inputs of {needed} blocks wait for backward at once; write {needed}"
        )
    })
}

fn most_of_stages(whole: &Transformer, config: &Config, division: &Division) -> Option<u64> {
    let micro_batches = usize::try_from(config.batch.gradient_accumulation_steps.get()).ok()?;
    let schedule = Schedule::new(division.kind, division.stages(), micro_batches).ok()?.sending_at_once();
    let interval = config.pipeline.activation_checkpoint_interval;
    let stages = (0..division.stages()).map(|stage| {
        Staged { whole, division, schedule: &schedule, stage, tied_params: 0, interval }.slots()
    });
    stages.max()
}

impl Staged<'_> {
    /// The most inputs of blocks that wait here.
    fn slots(&self) -> u64 {
        // Layers that are computed again for backward are recorded only then, so many together.
        if self.interval > 0 {
            return self.chunks().flat_map(|chunk| self.segments(&chunk)).max().unwrap_or(0);
        }
        let (mut waiting, mut most) = (0u64, 0);
        for instruction in self.schedule.instructions(self.stage) {
            let Some(item) = instruction.item() else { continue };
            let blocks = self.chunk(item.chunk).blocks;
            match instruction {
                Instruction::Forward(_) => waiting = waiting.saturating_add(blocks),
                Instruction::Backward(_) | Instruction::BackwardInput(_) => {
                    waiting = waiting.saturating_sub(blocks);
                }
                _ => {}
            }
            most = most.max(waiting);
        }
        most
    }
}
