//! First values: each rank loads a share and the ranks give each other theirs.
//!
//! In stage 3 a rank keeps what it loads. Below it every rank holds everything, so each loads an equal stretch of the
//! flat values and gathers the rest: drawing or reading a model takes the time of one share of it.

use std::ops::Range;

use ferrospeed_comm::ReduceOp;
use ferrospeed_config::Stage;
use ferrospeed_tensor::store::ParamSource;
use ferrospeed_tensor::{Device, Out, Param, Tensor};

use crate::error::{Result, ZeroError};
use crate::memory::part;
use crate::store::Share;
use ferrospeed_collective::exchange;

/// Elements that are loaded at a time, so that what is under way stays in the cache.
const LOADED_AT_ONCE: usize = 256 << 10;

/// Loads the first values of a group. All ranks call it together.
pub(crate) fn fill(
    share: &Share,
    params: &[Param],
    stage: Stage,
    source: &dyn ParamSource,
    host: &Device,
) -> Result<()> {
    let among = share.owners().unwrap_or(&share.sharding.shard);
    let rank = among.rank();
    let whole = share.placed.layout.part_numel * share.placed.layout.ranks;
    // What this rank loads, in elements of the flat values; in stage 3 each rank has flat values of its own.
    let own = match stage {
        Stage::Parameters => {
            rank * share.placed.layout.part_numel..(rank + 1) * share.placed.layout.part_numel
        }
        _ if !share.values.is_here(host) => 0..whole,
        _ => stretch(whole, among.size(), among.rank()),
    };
    let loaded = load(share, params, rank, stage, &own, source, host);
    if stage == Stage::Parameters || among.size() == 1 || own.len() == whole {
        return loaded;
    }
    // A rank that could not load its share must not leave the others waiting for it.
    let mut good = [i32::from(loaded.is_ok())];
    among.all_reduce(&mut good, ReduceOp::Min)?;
    loaded?;
    if good[0] == 0 {
        return Err(ZeroError::Request("another rank could not load its share of the parameters".into()));
    }
    // Where everybody needs f32 weights as well, those are what is gathered, and the others follow from them.
    let whole_master = share.master.as_ref().filter(|_| share.placed.layout.ranks == 1);
    let gathered = whole_master.unwrap_or(&share.values).memory()?;
    let counts: Vec<usize> = (0..among.size()).map(|rank| stretch(whole, among.size(), rank).len()).collect();
    exchange::all_gather_unequal(among, gathered, own, &counts)?.wait()?;
    match whole_master {
        Some(_) => {
            // SAFETY: the share is being made, and nobody else knows it.
            let values = unsafe { Out::vouched(share.values.memory()?) };
            Ok(gathered.device().backend().cast(gathered, values)?)
        }
        None => Ok(()),
    }
}

/// Rank `rank`'s of `ranks` equal stretches of `whole` elements.
fn stretch(whole: usize, ranks: usize, rank: usize) -> Range<usize> {
    let len = whole.div_ceil(ranks);
    (rank * len).min(whole)..((rank + 1) * len).min(whole)
}

/// Loads what lies in `own` of the flat values, and this rank's master weights with it.
fn load(
    share: &Share,
    params: &[Param],
    rank: usize,
    stage: Stage,
    own: &Range<usize>,
    source: &dyn ParamSource,
    host: &Device,
) -> Result<()> {
    // Which elements of the flat order there are masters for, and where in it the values begin.
    let numel = share.placed.layout.part_numel;
    let mastered = if share.placed.layout.ranks > 1 { rank * numel..(rank + 1) * numel } else { 0..numel };
    let values_start = if stage == Stage::Parameters { own.start } else { 0 };
    let mut buffer = Vec::new();
    for (in_group, &param) in share.placed.params.iter().enumerate() {
        for fragment in &share.placed.layout.fragments[in_group] {
            let start = fragment.rank * share.placed.layout.part_numel + fragment.in_part;
            let wanted = start.max(own.start)..(start + fragment.len).min(own.end);
            for at in wanted.clone().step_by(LOADED_AT_ONCE) {
                let len = LOADED_AT_ONCE.min(wanted.end - at);
                let in_param = fragment.in_param + at - start;
                buffer.resize(len, 0.0);
                source.load(&params[param], in_param..in_param + len, &mut buffer)?;
                let values = Tensor::from_slice(&buffer, [len], host)?;
                share.values.write(at - values_start, &values)?;
                let both = at.max(mastered.start)..(at + len).min(mastered.end);
                if let Some(master) = share.master.as_ref().filter(|_| !both.is_empty()) {
                    master
                        .write(both.start - mastered.start, &part(&values, both.start - at, both.len())?)?;
                }
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stretches_cover_everything_once() {
        for (whole, ranks) in [(10, 3), (2, 4), (0, 2), (12, 4)] {
            let all: Vec<usize> = (0..ranks).flat_map(|rank| stretch(whole, ranks, rank)).collect();
            assert_eq!(all, (0..whole).collect::<Vec<_>>());
        }
    }
}
