//! What stage 3 must know of parameters to bring them together before they are read.

use ferrospeed_comm::World;
use ferrospeed_placement::Home;
use ferrospeed_placement::layout::Fragment;
use ferrospeed_tensor::{Device, Param};

use super::share::{is_packed, stays_whole};
use super::{Share, StoreOptions};
use crate::attached::State;
use crate::error::{Result, ZeroError};
use crate::residency::{Limits, Residency, Sharded};
use crate::updates::Tile;

/// What must be updated before each parameter is read, where updates may be queued.
pub(super) fn awaited(state: &State, positions: &[(usize, usize)]) -> Vec<Vec<Tile>> {
    if !state.shares.iter().any(|share| share.placed.is_away()) {
        return Vec::new();
    }
    if let Some(residency) = &state.residency {
        return (0..positions.len()).map(|param| residency.stretches(param)).collect();
    }
    // Whoever owns it: a tile is done when all ranks have it.
    let of_all = |&(group, in_group): &(usize, usize)| {
        let stretch = |f: &Fragment| Tile { share: group, range: f.in_part..f.in_part + f.len };
        state.shares[group].placed.layout.fragments[in_group].iter().map(stretch).collect()
    };
    positions.iter().map(of_all).collect()
}

fn is_locked(values: &ferrospeed_placement::Flat) -> bool {
    values.runs.iter().any(|(_, home, _)| *home == Home::LockedHost)
}

pub(super) fn residency(
    world: &World,
    device: &Device,
    params: &[Param],
    positions: &[(usize, usize)],
    shares: &[Share],
    leaves: &[Vec<usize>],
    options: &StoreOptions<'_>,
) -> Result<Residency> {
    let numels: Vec<usize> = params.iter().map(Param::numel).collect();
    let zero = options.zero;
    let stays = stays_whole(params, zero);
    // Parameters of one share lie end to end.
    let mut sharded: Vec<Sharded> = Vec::with_capacity(params.len());
    let mut filled = vec![0; shares.len()];
    let mut starts = vec![0; params.len()];
    for (share, filled) in shares.iter().zip(&mut filled) {
        for &param in &share.placed.params {
            starts[param] = *filled;
            *filled += numels[param].div_ceil(share.sharding.shard.size());
        }
    }
    for (index, param) in params.iter().enumerate() {
        let flat = positions[index].0;
        sharded.push(Sharded {
            shape: *param.shape(),
            start: starts[index],
            share: param.numel().div_ceil(shares[flat].sharding.shard.size()),
            flat,
            persistent: stays[index],
            // What stays whole is small, and gathered once a step.
            quantized: is_packed(&shares[flat], param, stays[index])
                || zero.quantized_weights && !stays[index] && shares[flat].sharding.shard.size() > 1,
            kept_near: !stays[index] && shares[flat].sharding.shard.name() == options.sharding.shard.name(),
        });
    }
    for leaf in leaves {
        let group = |param: &usize| shares[positions[*param].0].sharding.shard.name().to_owned();
        if let Some(other) = leaf.iter().find(|param| group(param) != group(&leaf[0])) {
            return Err(ZeroError::Parameter {
                name: params[*other].name().into(),
                why: format!(
                    "is spread over {}, and '{}' of the same leaf module over {}: a leaf module is gathered at once",
                    group(other),
                    params[leaf[0]].name(),
                    group(&leaf[0])
                ),
            });
        }
    }
    let limits = Limits {
        prefetch: zero.prefetch_bucket_size,
        live: zero.max_live_parameters,
        reuse_distance: zero.max_reuse_distance,
        reads: options.homes.reads(),
        beside: shares.iter().any(|share| is_locked(&share.placed.values)),
    };
    let flats = shares.iter().map(|share| (share.sharding.shard.clone(), share.values.clone())).collect();
    let neighbours = options.sharding.neighbours(world, zero.hpz_partition_size)?;
    Ok(Residency::new(limits, sharded, leaves, flats, neighbours, options.dtype, device))
}
