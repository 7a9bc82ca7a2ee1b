//! What the ranks could compute at most: the yardstick for what they do.
//!
//! A square matrix product in the run's own type, on every rank at once ([`machine`]). So it holds for this machine, its clock
//! and its number of ranks; a machine that is busy with something else at that moment shows a lower peak, and the run a higher
//! share of it.

use ferrospeed_comm::ReduceOp;
use ferrospeed_engine::{Engine, machine};

use crate::error::Result;

/// Floating-point operations per second of all ranks together. All ranks call it together.
pub(crate) fn measure(engine: &Engine) -> Result<f64> {
    engine.world().group().barrier()?;
    let mut flops_per_s = [machine::product_flops_per_s(engine.device(), engine.store().dtype())?];
    engine.world().group().all_reduce(&mut flops_per_s, ReduceOp::Sum)?;
    Ok(flops_per_s[0])
}
