//! What the ranks could do at most: the yardstick for what they do.
//!
//! A square matrix product in the run's own type and a copy, on every rank at once ([`machine`]). So it holds for this machine,
//! its clock and its number of ranks; a machine that is busy with something else at that moment shows a lower peak, and the run
//! a higher share of it.

use ferrospeed_comm::ReduceOp;
use ferrospeed_engine::machine::Peak;
use ferrospeed_engine::{Engine, machine};

use crate::error::Result;

/// Of all ranks together. All ranks call it together.
pub(crate) fn measure(engine: &Engine) -> Result<Peak> {
    engine.world().group().barrier()?;
    let own = machine::measure_small_peak(engine.device(), engine.store().dtype())?;
    let mut all = [own.flops_per_s, own.bytes_per_s];
    engine.world().group().all_reduce(&mut all, ReduceOp::Sum)?;
    let [flops_per_s, bytes_per_s] = all;
    Ok(Peak { flops_per_s, bytes_per_s })
}

/// Of one of so many alike.
pub(crate) fn of_a_rank(all: Peak, ranks: usize) -> Peak {
    let ranks = ranks.max(1) as f64;
    Peak { flops_per_s: all.flops_per_s / ranks, bytes_per_s: all.bytes_per_s / ranks }
}
