//! Which parameter belongs where: to a group, to a way of being spread, to a leaf module; and that all ranks see it alike.
//! Refuses parameters that belong to two, or to none that the model has.

use std::collections::{BTreeMap, HashMap, HashSet};

use ferrospeed_config::Stage;
use ferrospeed_placement::buckets::Kind;
use ferrospeed_tensor::{Param, Unit};

use super::{ParamGroup, StoreOptions};
use crate::error::{Result, ZeroError};
use crate::sharding::Sharding;

/// Which way every parameter is spread: 0 for the common one, then by `elsewhere`.
pub(super) fn spreads(
    params: &[Param],
    indices: &HashMap<u64, usize>,
    options: &StoreOptions<'_>,
) -> Result<Vec<usize>> {
    let mut spreads = vec![0; params.len()];
    for (way, elsewhere) in options.elsewhere.iter().enumerate() {
        for member in &elsewhere.params {
            let fail = |why: &str| ZeroError::Parameter { name: member.name().into(), why: why.into() };
            let param = indices.get(&member.id()).copied();
            let param = param.ok_or_else(|| fail("is to be spread but is not in the model"))?;
            if spreads[param] != 0 {
                return Err(fail("is to be spread in more than one way"));
            }
            spreads[param] = way + 1;
        }
    }
    Ok(spreads)
}

/// (group, index in it) of every parameter; the group after the last is what nobody trains.
pub(super) fn places(
    indices: &HashMap<u64, usize>,
    params: usize,
    groups: &[ParamGroup],
) -> Result<Vec<(usize, usize)>> {
    let mut places = vec![None; params];
    for (group, members) in groups.iter().enumerate() {
        for (index, member) in members.params.iter().enumerate() {
            let fail = |why: &str| ZeroError::Parameter { name: member.name().into(), why: why.into() };
            let param = indices.get(&member.id()).copied();
            let param = param.ok_or_else(|| fail("is in a group but not in the model"))?;
            if places[param].is_some() {
                return Err(fail("is in more than one group; give each parameter to one"));
            }
            if member.is_trainable() {
                places[param] = Some((group, index));
            }
        }
    }
    Ok(places.into_iter().map(|place| place.unwrap_or((groups.len(), 0))).collect())
}

/// The parameters of each leaf module by index, ascending: the units that the model was built with, and the modules that
/// were named. A unit within a named module becomes part of it.
pub(super) fn leaves(
    params: &[Param],
    indices: &HashMap<u64, usize>,
    modules: &[Vec<Param>],
) -> Result<Vec<Vec<usize>>> {
    let mut units: BTreeMap<Unit, Vec<usize>> = BTreeMap::new();
    for (index, unit) in params.iter().enumerate().filter_map(|(index, param)| Some((index, param.unit()?))) {
        units.entry(unit).or_default().push(index);
    }
    let mut taken = HashSet::new();
    let mut leaves = Vec::with_capacity(modules.len());
    for module in modules.iter().filter(|module| !module.is_empty()) {
        let mut leaf = Vec::with_capacity(module.len());
        for member in module {
            let fail = |why: &str| ZeroError::Parameter { name: member.name().into(), why: why.into() };
            let param = indices.get(&member.id()).copied();
            let param = param.ok_or_else(|| fail("is in a leaf module but not in the model"))?;
            if !taken.insert(param) {
                return Err(fail("is in more than one leaf module; one must not lie in another"));
            }
            leaf.push(param);
            let unit = member.unit().and_then(|unit| units.remove(&unit)).unwrap_or_default();
            leaf.extend(unit);
        }
        leaf.sort_unstable();
        leaf.dedup();
        taken.extend(leaf.iter().copied());
        leaves.push(leaf);
    }
    leaves.extend(units.into_values());
    Ok(leaves)
}

/// Whether each parameter's gradient is wanted as rows, and how it travels.
pub(super) fn kinds(
    params: &[Param],
    leaves: &[Vec<usize>],
    options: &StoreOptions<'_>,
) -> (Vec<bool>, Vec<Kind>) {
    let sharding = &options.sharding;
    let rows = options.sparse_gradients
        && options.zero.stage == Stage::Off
        && options.elsewhere.is_empty()
        && sharding.replicas.is_none()
        && sharding.ranks() > 1;
    let in_rows: Vec<bool> =
        params.iter().map(|param| rows && param.is_table() && param.shape().dims() == 2).collect();
    let mut kinds = vec![Kind::Ordinary; params.len()];
    leaves.iter().flatten().for_each(|&param| kinds[param] = Kind::Leaf);
    in_rows.iter().zip(&mut kinds).filter(|(rows, _)| **rows).for_each(|(_, kind)| *kind = Kind::Rows);
    (in_rows, kinds)
}

/// Every rank that holds a share of these must have the same parameters in the same order.
pub(super) fn agree<'a>(sharding: &Sharding, params: impl Iterator<Item = &'a Param>) -> Result<()> {
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    let mut mix = |bytes: &[u8]| {
        bytes.iter().for_each(|&byte| hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
    };
    let mut count = 0;
    for param in params {
        mix(param.name().as_bytes());
        param.shape().sizes().iter().for_each(|size| mix(&(*size as u64).to_le_bytes()));
        mix(&[u8::from(param.is_trainable())]);
        count += 1;
    }
    let own = [hash as i64, count];
    for group in std::iter::once(&sharding.shard).chain(&sharding.replicas).filter(|group| group.size() > 1) {
        let mut all = vec![0i64; 2 * group.size()];
        group.all_gather(&own, &mut all)?;
        for (theirs, &rank) in all.chunks(2).zip(group.ranks()) {
            if theirs[1] != all[1] {
                let what = format!("{} parameters, not {}", theirs[1], all[1]);
                return Err(ZeroError::Disagreement { rank, what });
            }
            if theirs[0] != all[0] {
                let what = "names, shapes or which are frozen".to_owned();
                return Err(ZeroError::Disagreement { rank, what });
            }
        }
    }
    Ok(())
}
