//! Whether a run fits this host and itself, before any of its ranks begins: the kernel ends a rank that runs out of memory without a
//! word, and takes bystanders with it; a disk that runs full ends a run in the middle of a step.
//!
//! The estimate is that of `ferrospeed plan`. A model whose shape it does not know, or a host that does not say what it
//! has, is not judged.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use ferrospeed_command::writable::nearest;
use ferrospeed_command::{DeviceChoice, Failure};
use ferrospeed_config::Config;
use ferrospeed_launch::probe;
use ferrospeed_train::{Recipe, frozen_and_adapters, shape_of};
use ferrospeed_tune::model::Model;
use ferrospeed_tune::plan::{Capacity, Processor, Request, Tier, human, plan};
use ferrospeed_tune::stages::{divide, plan_in_stages, too_few_slots};
use serde_json::Value;

use super::offload_folders::{free_bytes, offload_folders};

/// Refuses a run of which `ranks` are on this host and need more memory, or more of its disks, than there is.
pub(super) fn check(recipe: &Recipe, model: &Value, device: DeviceChoice, ranks: u64) -> Result<(), Failure> {
    let (frozen, adapters) = frozen_and_adapters(recipe, model);
    let (Ok(model), Ok((config, _))) = (shape_of(model), recipe.config()) else { return Ok(()) };
    let model = model.with_adapters(frozen, adapters);
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
    let Some(capacity) = capacity(ranks, device, &config) else { return Ok(()) };
    let request = Request {
        model: &Model::Transformer(model),
        config: &config,
        data_parallel_size: recipe.data_ranks().get() * mesh.sequence.get() as u64,
        sequence_ranks: mesh.sequence.get() as u64,
        sequence_length: recipe.row_tokens(),
        checkpoint_activations: recipe.model.activation_checkpointing,
        mlp_chunk: recipe.model.mlp_chunk,
        keeps_attention_matrix: false,
        processor: if capacity.device_bytes.is_some() { Processor::Gpu } else { Processor::Cpu },
        operands: super::doctor::operands(),
    };
    let planned = match &division {
        Some(division) => plan_in_stages(&request, division).unwrap_or_else(|_| plan(&request)),
        None => plan(&request),
    };
    let shortfalls = planned.shortfalls(&capacity);
    let Some(short) = shortfalls.first() else { return Ok(()) };
    let (needed, available) = (human(short.needed_bytes), human(short.available_bytes));
    let (what, advice) = match short.tier {
        Tier::Nvme => {
            let folders: Vec<String> =
                offload_folders(&config).iter().map(|folder| folder.display().to_string()).collect();
            let what = format!("{needed} on the disk of {}, and {available} are free", folders.join(" and "));
            (what, "make room there, name another disk as nvme_path, or use more hosts")
        }
        Tier::Device | Tier::Host => (
            format!("{needed} of {} memory, and there is {available}", short.tier),
            "use more ranks or a higher ZeRO stage, a smaller micro-batch or model.activation_checkpointing",
        ),
    };
    Err(Failure::Run(format!(
        "this run does not fit: {ranks} rank(s) need {what}\n{planned}{advice}; --force starts it anyway"
    )))
}

/// Refuses a run whose blocks find fewer slots for their inputs than they need; it would end in its first step.
pub(super) fn check_slots(recipe: &Recipe, model: &Value) -> Result<(), Failure> {
    let (Ok(model), Ok((config, _))) = (shape_of(model), recipe.config()) else { return Ok(()) };
    if !recipe.model.activation_checkpointing {
        return Ok(());
    }
    let division = match recipe.stages().get() {
        1 => None,
        _ => match divide(&model, &config, recipe.stages(), recipe.data.sequence) {
            Ok(division) => Some(division),
            Err(_) => return Ok(()),
        },
    };
    too_few_slots(&model, &config, division.as_ref()).map_or(Ok(()), |why| Err(Failure::Usage(why)))
}

/// What this host has for so many ranks.
pub(super) fn capacity(ranks: u64, device: DeviceChoice, config: &Config) -> Option<Capacity> {
    let devices = if device == DeviceChoice::Cpu { 0 } else { ferrospeed_cuda::device_count() as u64 };
    let device_bytes = match devices {
        0 => None,
        // Ranks take the devices in turn.
        count => Some(probe::cuda_driver().ok()?.device_bytes? / ranks.div_ceil(count).max(1)),
    };
    let host_bytes = probe::available_memory_bytes()?;
    // A disk that does not say is not judged.
    let nvme_bytes = free_disk_bytes(&offload_folders(config)).unwrap_or(u64::MAX);
    Some(Capacity { device_bytes, host_bytes, nvme_bytes, ranks_per_host: ranks })
}

/// What is free on the disks of some folders, each disk counted once; `None` without any, or where one does not say.
fn free_disk_bytes(folders: &[PathBuf]) -> Option<u64> {
    let mut seen = Vec::new();
    let mut free = None;
    for folder in folders {
        let disk = nearest(folder).metadata().ok()?.dev();
        if !seen.contains(&disk) {
            seen.push(disk);
            free = Some(free.unwrap_or(0u64).saturating_add(free_bytes(folder).ok()?));
        }
    }
    free
}
