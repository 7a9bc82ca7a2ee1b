//! Whether the disks of a run's folder have room for what it will write, before any of its ranks begins: a run that can keep nothing of
//! what it learns is told so at its start, and not at its end.
//!
//! What is counted is the least that there will be: one checkpoint, and the weights. A disk that does not say what is free is not
//! judged.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use ferrospeed_config::{Config, Precision};
use ferrospeed_train::{Recipe, RunFolder, frozen_and_adapters, shape_of};
use ferrospeed_tune::plan::human;
use serde_json::Value;

use super::offload_folders::free_bytes;
use super::train::TrainArgs;
use ferrospeed_command::Failure;
use ferrospeed_command::writable::nearest;

/// What a save leaves free besides its own files.
const SPARE_BYTES: u64 = 1 << 20;

/// Something that will be written.
struct ToWrite {
    what: &'static str,
    folder: PathBuf,
    bytes: u64,
}

/// Refuses a run whose checkpoints or weights have no room, unless it is forced. What --overwrite replaces makes some after the first step,
/// and an experiment keeps nothing.
pub(super) fn check(
    args: &TrainArgs,
    recipe: &Recipe,
    model: &Value,
    folder: &RunFolder,
) -> Result<(), Failure> {
    if args.force || args.overwrite || args.experiment {
        return Ok(());
    }
    let (frozen, adapters) = frozen_and_adapters(recipe, model);
    let (Ok(model), Ok((config, _))) = (shape_of(model), recipe.config()) else { return Ok(()) };
    let (of_weight, of_checkpoint) = bytes_per_parameter(&config);
    let trained = (model.size.total_params + adapters).saturating_sub(frozen);
    // What is trained beside a model's weights is written without them.
    let frozen = if recipe.adapter.is_some() { 0 } else { frozen };
    let bytes = trained.saturating_add(frozen).saturating_mul(of_weight);
    let weights = ToWrite { what: "the weights", folder: folder.model(), bytes };
    let checkpoint = recipe.save.as_ref().map(|_| ToWrite {
        what: "a checkpoint",
        folder: folder.checkpoints(),
        bytes: trained
            .saturating_mul(of_checkpoint)
            .saturating_add(frozen.saturating_mul(of_weight))
            .saturating_add(SPARE_BYTES),
    });
    let files: Vec<ToWrite> = checkpoint.into_iter().chain([weights]).collect();
    let disk_of = |file: &ToWrite| nearest(&file.folder).metadata().ok().map(|about| about.dev());
    for file in &files {
        let there: Vec<&ToWrite> = files.iter().filter(|other| disk_of(other) == disk_of(file)).collect();
        let needed = there.iter().fold(0u64, |sum, other| sum.saturating_add(other.bytes));
        let Ok(free) = free_bytes(&file.folder) else { continue };
        if free < needed {
            let what: Vec<String> =
                there.iter().map(|file| format!("{} {}", file.what, human(file.bytes))).collect();
            return Err(Failure::Run(format!(
                "this run has no room for what it learns: {} have {} free on their disk, and need {}; make room there or choose another --out, or --force starts it anyway",
                file.folder.display(),
                human(free),
                what.join(" and ")
            )));
        }
    }
    Ok(())
}

/// Of the weights as kernels read them, and of a checkpoint: masters and optimizer states.
fn bytes_per_parameter(config: &Config) -> (u64, u64) {
    let states = config.optimizer.as_ref().and_then(|optimizer| optimizer.states_per_parameter());
    let (weight, master) = match config.precision {
        Precision::Fp32 => (4, 4),
        Precision::Fp16 { half_master_weights: true, .. } => (2, 2),
        Precision::Fp16 { .. } | Precision::Bf16 { .. } => (2, 4),
    };
    (weight, master + master * states.unwrap_or(0))
}
