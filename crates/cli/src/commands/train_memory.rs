//! Whether a run fits this host, before any of its ranks starts: the kernel ends a rank that runs out of memory without a
//! word, and takes bystanders with it.
//!
//! The estimate is that of `ferrospeed plan`. A model whose shape it does not know, or a host that does not say what it
//! has, is not judged.

use ferrospeed_launch::probe;
use ferrospeed_tensor::cuda;
use ferrospeed_train::Recipe;
use ferrospeed_tune::model::{Model, from_hugging_face};
use ferrospeed_tune::plan::{Capacity, Processor, Request, human, plan};
use ferrospeed_tune::stages::{divide, plan_in_stages};
use serde_json::Value;

use super::device::DeviceChoice;
use crate::failure::Failure;

/// Refuses a run whose ranks, all on this host, need more memory than there is.
pub(super) fn check(recipe: &Recipe, model: &Value, device: DeviceChoice) -> Result<(), Failure> {
    let (Ok(model), Ok((config, _))) = (from_hugging_face(model), recipe.config()) else { return Ok(()) };
    let mesh = recipe.mesh();
    // What cannot be divided was told before.
    let division = match mesh.pipe.get() {
        1 => None,
        _ => match divide(&model, &config, mesh.pipe, recipe.data.sequence) {
            Ok(division) => Some(division),
            Err(_) => return Ok(()),
        },
    };
    let model = model.in_slices(mesh.tensor.get() as u64).with_experts_over(mesh.expert.get() as u64);
    let Some(model) = model else { return Ok(()) };
    let ranks = u64::from(recipe.ranks);
    let Some(capacity) = capacity(ranks, device) else { return Ok(()) };
    let request = Request {
        model: &Model::Transformer(model),
        config: &config,
        data_parallel_size: recipe.data_ranks().get() * mesh.sequence.get() as u64,
        sequence_ranks: mesh.sequence.get() as u64,
        sequence_length: recipe.data.sequence,
        checkpoint_activations: recipe.model.activation_checkpointing,
        keeps_attention_matrix: false,
        processor: if capacity.device_bytes.is_some() { Processor::Gpu } else { Processor::Cpu },
        in_tiles: super::doctor::multiplies_in_tiles(),
    };
    let planned = match &division {
        Some(division) => plan_in_stages(&request, division).unwrap_or_else(|_| plan(&request)),
        None => plan(&request),
    };
    match planned.shortfalls(&capacity).first() {
        None => Ok(()),
        Some(short) => Err(Failure::Run(format!(
            "this run does not fit: {} rank(s) need {} of {} memory, and there is {}\n{planned}use more ranks or a higher ZeRO stage, a smaller micro-batch or model.activation_checkpointing; --force starts it anyway",
            ranks,
            human(short.needed_bytes),
            short.tier,
            human(short.available_bytes),
        ))),
    }
}

pub(super) fn capacity(ranks: u64, device: DeviceChoice) -> Option<Capacity> {
    let devices = if device == DeviceChoice::Cpu { 0 } else { cuda::device_count() as u64 };
    let device_bytes = match devices {
        0 => None,
        // Ranks take the devices in turn.
        count => Some(probe::cuda_driver().ok()?.device_bytes? / ranks.div_ceil(count).max(1)),
    };
    let host_bytes = super::doctor::available_memory_bytes()?;
    Some(Capacity { device_bytes, host_bytes, nvme_bytes: u64::MAX, ranks_per_host: ranks })
}
