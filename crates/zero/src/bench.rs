//! How fast steps are whose states are on a disk: a store of one rank, without a model.

use std::path::Path;
use std::time::Instant;

use ferrospeed_comm::World;
use ferrospeed_config::{AutoValues, Config};
use ferrospeed_io::QueueOptions;
use ferrospeed_optim::{GroupOptions, Optimizer, adam::Adam};
use ferrospeed_tensor::store::FromInitializers;
use ferrospeed_tensor::{DType, Device, Initializer, Param, Tensor};
use serde_json::json;

use crate::error::{Result, ZeroError};
use crate::home::Disk;
use crate::homes::Homes;
use crate::residency::Pass;
use crate::sharding::Sharding;
use crate::step::StepOptions;
use crate::store::{ParamGroup, StoreOptions, ZeroStore};

/// Elements of one parameter.
const PARAM_NUMEL: usize = 4 << 20;
/// Tiles in memory at once.
const TILE_BUFFERS: usize = 6;

/// A measured step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DiskStep {
    /// Weights that were updated.
    pub weights: u64,
    /// Bytes read from the disk, and as many written to it.
    pub bytes_each_way: u64,
    /// The best step's seconds, from its call until everything is on the disk.
    pub best_s: f64,
}

/// AdamW steps over about so many bf16 weights whose f32 weights and moments are on the disk of a folder.
pub fn disk_step(
    folder: &Path,
    weights: usize,
    repeats: usize,
    options: QueueOptions,
    device: &Device,
) -> Result<DiskStep> {
    let offload = json!({"device": "nvme", "nvme_path": folder});
    let zero = json!({"stage": 3, "offload_optimizer": offload});
    let json = json!({"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero});
    let fault = |what: String| ZeroError::Request(what);
    let config = Config::from_value("bench", &json).map_err(|error| fault(error.to_string()))?;
    let config = config.resolve(std::num::NonZeroU64::MIN, &AutoValues::new());
    let config = config.map_err(|error| fault(error.to_string()))?.0;
    let param = |index| Param::new(format!("p{index}"), [PARAM_NUMEL], Initializer::Constant(1.0));
    let params: Vec<Param> = (0..weights.div_ceil(PARAM_NUMEL).max(1)).map(param).collect();
    let world = World::solo();
    let group = GroupOptions { lr: 1e-3, weight_decay: 0.01, betas: [0.9, 0.999] };
    let groups = [ParamGroup { params: params.clone(), options: group }];
    let disk = Disk::new("bench", folder, options, device);
    let store_options = StoreOptions {
        zero: &config.zero,
        dtype: DType::BF16,
        wire: DType::BF16,
        kept: DType::BF16,
        accumulates: false,
        predivide: 1.0,
        prescale: false,
        sparse_gradients: false,
        sharding: Sharding::over_world(&world),
        elsewhere: &[],
        agreement: None,
        reduces_each_micro_batch: true,
        leaf_modules: &[],
        optimizer: Some(Optimizer::Adam(Adam { eps: 1e-8, bias_correction: true, decoupled: true })),
        homes: Homes::on(disk, TILE_BUFFERS),
    };
    let source = FromInitializers { seed: 0 };
    let store = ZeroStore::attach(&world, device, &params, &groups, &store_options, &source)?;
    let mut best_s = f64::INFINITY;
    // One to warm up.
    for _ in 0..=repeats {
        store.begin_pass(Pass::Train);
        store.begin_backward(true)?;
        for param in &params {
            param.push_grad(Tensor::full([PARAM_NUMEL], 0.5, DType::BF16, device)?)?;
        }
        store.finish_backward()?;
        let begin = Instant::now();
        store.step(StepOptions { loss_scale: 1.0, clip: None })?;
        store.settle("bench")?;
        best_s = best_s.min(begin.elapsed().as_secs_f64());
    }
    let weights = (params.len() * PARAM_NUMEL) as u64;
    Ok(DiskStep { weights, bytes_each_way: store.disk_bytes_per_step(), best_s })
}
