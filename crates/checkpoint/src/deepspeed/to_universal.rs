//! One of our checkpoints in DeepSpeed's universal layout: a folder per parameter, a file per value.
//!
//! Any optimizer and any stage, which DeepSpeed's own converter does not offer. What is not trained goes into the
//! module file.

use std::path::{Path, PathBuf};

use crate::deepspeed::experts::Mixtures;
use crate::deepspeed::export::{Arrays, ExportOptions, Exporter, VERSION};
use crate::deepspeed::exported::exported;
use crate::deepspeed::spelling::Spelling;
use crate::error::{CheckpointError, Result};
use crate::load::Checkpoint;
use crate::manifest::{Dtype, Kind};
use crate::pt::Value;

/// Writes `TAG_universal` into the folder `dir`, and `latest_universal` beside. Returns the new folder.
pub fn export_universal(checkpoint: &Checkpoint, dir: &Path, spelling: Spelling) -> Result<PathBuf> {
    let tag = format!("{}_universal", checkpoint.manifest().tag);
    let hint = crate::directory::LATEST_UNIVERSAL_FILE;
    exported(dir, &tag, hint, |folder| write(checkpoint, folder, spelling))
}

fn write(checkpoint: &Checkpoint, folder: &Path, spelling: Spelling) -> Result<()> {
    let zero = folder.join("zero");
    std::fs::create_dir_all(&zero).map_err(CheckpointError::io("create", &zero))?;
    // Every parameter has a folder of its own here, experts too.
    let exporter = |stage| {
        let options = ExportOptions { stage, ranks: 1, expert_ranks: 1, spelling };
        Exporter::new(checkpoint, options, Mixtures::default())
    };
    // A stage 3 engine looks for its own name, with placeholders.
    for (stage, prefix) in [(2, ""), (3, "zero_pp_rank_0_")] {
        let mut arrays = Arrays::default();
        let module = exporter(stage)?.module(0, &mut arrays)?;
        let name = format!("{prefix}mp_rank_00_model_states.pt");
        arrays.write(checkpoint, &folder.join(name), &module)?;
    }
    let exporter = exporter(2)?;
    let aliases = exporter.aliases();
    for tensor in exporter.tensors() {
        let stem = match &tensor.kind {
            Kind::Master => "fp32",
            Kind::State(name) => name.as_str(),
            Kind::Weight | Kind::Buffer | Kind::Rank(_) => continue,
        };
        let plain = |name: &str| Path::new(name).file_name().is_some_and(|only| only == name);
        if !plain(&tensor.name) || !plain(stem) {
            let why = format!("'{}' cannot be the name of a folder", tensor.name);
            return Err(CheckpointError::file(checkpoint.path(), why));
        }
        // A tied parameter is asked for by whichever name its model lists first.
        let aliases = aliases.iter().filter(|(_, name)| *name == tensor.name);
        for name in aliases.map(|(alias, _)| alias).chain([&tensor.name]).filter(|name| plain(name)) {
            let own = zero.join(name);
            std::fs::create_dir_all(&own).map_err(CheckpointError::io("create", &own))?;
            let mut arrays = Arrays::default();
            let param = arrays.add(Dtype::F32, &tensor.shape, tensor.all());
            let value = Value::dict([("param", param), ("cat_dim", Value::Int(0))]);
            arrays.write(checkpoint, &own.join(format!("{stem}.pt")), &value)?;
            if tensor.kind == Kind::Master {
                let mut arrays = Arrays::default();
                let step = exporter.step(&mut arrays);
                arrays.write(checkpoint, &own.join("step.pt"), &step)?;
            }
        }
    }
    let mut arrays = Arrays::default();
    let state = exporter.flat(0, &mut arrays)?;
    let moved = ["base_optimizer_state", "single_partition_of_fp32_groups", "param_slice_mappings"];
    let pairs = state.pairs().unwrap_or_default().iter();
    let mut kept: Vec<(Value, Value)> =
        pairs.filter(|(key, _)| key.as_str().is_none_or(|key| !moved.contains(&key))).cloned().collect();
    let groups = state.get("base_optimizer_state").and_then(|base| base.get("param_groups"));
    let groups = groups.cloned().unwrap_or(Value::None);
    kept.push((Value::str("param_groups"), groups.clone()));
    // Stage 3 has the number of steps once for all parameters, here.
    let mut arrays = Arrays::default();
    let step = Value::dict([("step", exporter.step(&mut arrays))]);
    let state = Value::Dict(vec![(Value::Int(0), step)]);
    let of_stage_3 = Value::dict([("state", state), ("param_groups", groups)]);
    kept.push((Value::str("optimizer_state_dict"), of_stage_3));
    kept.retain(|(key, _)| key.as_str() != Some("ds_version"));
    kept.push((Value::str("ds_version"), Value::str(VERSION)));
    arrays.write(checkpoint, &zero.join("optimizer_state.pt"), &Value::Dict(kept))
}
