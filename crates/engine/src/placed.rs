//! Who would hold what of a model on how many ranks: the placement of a run that has not been started.

use ferrospeed_config::{Config, Stage};
use ferrospeed_nn::Parameters;
use ferrospeed_optim::GroupOptions;
use ferrospeed_placement::buckets::Kind;
use ferrospeed_placement::{DeviceKind, GroupFacts, ParamFacts, Placement, Ranks, Request, Spread, place};
use ferrospeed_zero::{data_type, group_facts};

use crate::error::{EngineError, Result};
use crate::setup::{configured_optimizer, element_type, groups_of, kept_type, model_type};

/// Where a run would be.
#[derive(Debug, Clone, Copy)]
pub struct PlacedOn {
    /// Data-parallel ranks.
    pub ranks: usize,
    /// Which of them is asked about.
    pub rank: usize,
    /// Whether all are on one host.
    pub on_one_host: bool,
    /// Where each computes.
    pub device: DeviceKind,
}

/// Who would hold what of a model's state, where, and what a step would do to it, on ranks that all hold the whole model:
/// what [`crate::initialize`] allocates there. `spares_vectors`: weight decay leaves biases and norms alone.
pub fn placement(
    config: &Config,
    parameters: &Parameters,
    spares_vectors: bool,
    on: &PlacedOn,
) -> Result<Placement> {
    if on.rank >= on.ranks {
        let why = format!("{} of {}: ranks are counted from 0", on.rank, on.ranks);
        return Err(EngineError::Argument { what: "rank", why });
    }
    let optimizer = configured_optimizer(config)?;
    let untrained = GroupOptions { lr: 0.0, weight_decay: 0.0, betas: [0.0; 2] };
    let (rule, options) = optimizer.map_or((None, untrained), |(rule, options)| (Some(rule), options));
    let groups = groups_of(parameters, rule.as_ref(), options, spares_vectors);
    let places: std::collections::HashMap<u64, (usize, usize)> = groups
        .iter()
        .enumerate()
        .flat_map(|(group, of)| {
            of.params.iter().enumerate().map(move |(at, param)| (param.id(), (group, at)))
        })
        .collect();
    let params: Vec<ParamFacts> = parameters
        .as_slice()
        .iter()
        .map(|param| ParamFacts {
            numel: param.numel(),
            dims: param.shape().dims(),
            group: places.get(&param.id()).copied().filter(|_| param.is_trainable()),
            spread: 0,
            kind: if param.unit().is_some() { Kind::Leaf } else { Kind::Ordinary },
        })
        .collect();
    let groups: Vec<GroupFacts> =
        groups.iter().map(|group| group_facts(rule.as_ref(), &group.options)).collect();
    let accumulates = config.batch.gradient_accumulation_steps.get() > 1;
    let dtype = model_type(config);
    let wire = config.communication_data_type.map_or(dtype, element_type);
    Ok(place(&Request {
        zero: &config.zero,
        params: &params,
        groups: &groups,
        spreads: &[spread(config, on)?],
        world: on.ranks,
        device: on.device,
        values: data_type(dtype),
        wire: data_type(wire),
        kept: data_type(kept_type(config, wire, accumulates)),
        accumulates,
        reduces_each_micro_batch: config.zero.reduce_each_micro_batch,
        scales: &[config.gradient_predivide_factor != 1.0 && !config.prescale_gradients],
        parts_differ: false,
    }))
}

/// Over all ranks, or in shards of neighbours.
fn spread(config: &Config, on: &PlacedOn) -> Result<Spread> {
    let all = Ranks { own: on.rank, ..Ranks::first_of(on.ranks, on.on_one_host) };
    let size = match config.zero.mics_shard_size {
        Some(size) if config.zero.stage == Stage::Parameters => usize::try_from(size).unwrap_or(usize::MAX),
        _ => on.ranks,
    };
    if size == 0 || !on.ranks.is_multiple_of(size) {
        let why = format!("{} ranks cannot be cut into shards of {size}", on.ranks);
        return Err(EngineError::Argument { what: "zero_optimization.mics_shard_size", why });
    }
    let shard = Ranks { own: on.rank % size, ..Ranks::first_of(size, on.on_one_host) };
    let replicas = Ranks { own: on.rank / size, ..Ranks::first_of(on.ranks / size, on.on_one_host) };
    Ok(Spread { shard, replicas, ..Spread::over(all) })
}
