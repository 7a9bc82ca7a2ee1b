//! Models in slices: over which ranks each parameter's state is spread, and the wholes that slices are of.
//!
//! A slice is spread over the ranks that see different data, like any parameter. One that several ranks hold and use for
//! different heads has its gradients summed over those, and one of them speaks for it. What all ranks of a tensor group hold
//! alike gets the same gradient on each; the first speaks for it in norms and checkpoints.

use std::collections::BTreeMap;

use ferrospeed_comm::topology::MODEL;
use ferrospeed_comm::{Group, Mesh};
use ferrospeed_config::Config;
use ferrospeed_nn::Parameters;
use ferrospeed_optim::Optimizer;
use ferrospeed_tensor::{Param, Slice};
use ferrospeed_zero::access::Which;
use ferrospeed_zero::{Elsewhere, Sharding};

use crate::engine::Engine;
use crate::error::{EngineError, Result};

/// What does not work on slices, or is not what the configuration says, is refused.
pub(crate) fn check(config: &Config, optimizer: Option<&Optimizer>, mesh: Option<&Mesh>) -> Result<()> {
    let asked =
        config.section("tensor_parallel").and_then(|section| section["autotp_size"].as_u64()).unwrap_or(0);
    let slices = mesh.map_or(1, |mesh| mesh.size(MODEL));
    if asked > 1 && asked != slices as u64 {
        let why = format!(
            "the configuration asks for {asked} slices of each layer, and there are {slices}: lay the ranks out on a mesh with {asked} on its axis {MODEL}, build the model for that axis' group, and call Options::spread_over"
        );
        return Err(EngineError::Argument { what: "tensor_parallel.autotp_size", why });
    }
    if slices == 1 {
        return Ok(());
    }
    let refuse = |key, why: &str| Err(EngineError::Unsupported { key, why: why.to_owned() });
    if matches!(optimizer, Some(Optimizer::OneBit(_))) {
        let why =
            "it averages over all ranks, and ranks hold slices; use AdamW, Adam, Lamb, Lion, Adagrad or SGD";
        return refuse("optimizer.type", why);
    }
    if matches!(optimizer, Some(Optimizer::Muon(_))) {
        let why = "it needs whole matrices, and ranks hold slices of them; use AdamW, Adam, Lamb, Lion, Adagrad or SGD";
        return refuse("optimizer.type", why);
    }
    if config.section("eigenvalue").is_some_and(|section| section["enabled"] == true) {
        return refuse("eigenvalue", "it measures whole blocks, and ranks hold slices of them; remove it");
    }
    Ok(())
}

/// What is spread in another way than slices of this rank alone, but for what is `settled`. All ranks call it together.
pub(crate) fn elsewhere(
    mesh: &Mesh,
    parameters: &Parameters,
    common: &Sharding,
    settled: &[Elsewhere],
) -> Result<Vec<Elsewhere>> {
    let is_settled =
        |param: &Param| settled.iter().any(|way| way.params.iter().any(|known| known.is_same(param)));
    let mut by_holders: BTreeMap<usize, Vec<Param>> = BTreeMap::new();
    for param in parameters.as_slice().iter().filter(|param| !is_settled(param)) {
        by_holders.entry(param.slice().map_or(0, Slice::holders)).or_default().push(param.clone());
    }
    by_holders.remove(&1);
    let mut elsewhere = Vec::with_capacity(by_holders.len());
    for (holders, params) in by_holders {
        let sharding = match holders {
            0 if mesh.coordinate(MODEL) > 0 => common.clone().uncounted(),
            0 => common.clone(),
            _ => common.clone().tied_to(&mesh.neighbours(MODEL, holders)?),
        };
        elsewhere.push(Elsewhere { params, sharding });
    }
    Ok(elsewhere)
}

/// All ranks' slices of a value, in place in the whole. All ranks of the group call it together.
fn joined(group: &Group, slice: &Slice, own: &[f32]) -> Result<Vec<f32>> {
    let ends: Vec<i64> =
        slice.ranges().iter().flat_map(|range| [range.start as i64, range.end as i64]).collect();
    let mut all_ends = vec![0i64; ends.len() * group.size()];
    group.all_gather(&ends, &mut all_ends)?;
    let mut slices = Vec::with_capacity(group.size());
    for ends in all_ends.chunks(ends.len()) {
        let ranges = ends.chunks(2).map(|ends| ends[0] as usize..ends[1] as usize).collect();
        slices.push(Slice::new(*slice.whole(), slice.dim(), ranges)?);
    }
    let counts: Vec<usize> = slices.iter().map(|slice| slice.shape().numel()).collect();
    let mut all = vec![0.0; counts.iter().sum()];
    group.all_gather_unequal(own, &mut all, &counts)?;
    let mut whole = vec![0.0; slice.whole().numel()];
    let mut rest = all.as_slice();
    for (slice, count) in slices.iter().zip(counts) {
        let (mut values, later) = rest.split_at(count);
        rest = later;
        for run in slice.runs(0..count) {
            let (now, behind) = values.split_at(run.len());
            whole[run].copy_from_slice(now);
            values = behind;
        }
    }
    Ok(whole)
}

impl Engine {
    /// The full value of the whole that a parameter is, or is a slice of, on every rank. All ranks call it together.
    pub fn whole(&self, param: &Param, which: Which<'_>) -> Result<Vec<f32>> {
        let own = self.store.full(param, which)?;
        self.whole_of(param, own)
    }

    /// The whole of which `own` is this rank's slice.
    pub(crate) fn whole_of(&self, param: &Param, own: Vec<f32>) -> Result<Vec<f32>> {
        match (&self.slices, param.slice()) {
            (Some(group), Some(slice)) => joined(group, slice, &own),
            _ => Ok(own),
        }
    }
}
