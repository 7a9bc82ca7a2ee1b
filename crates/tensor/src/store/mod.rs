//! The stores of this crate: [`PlainStore`] keeps everything resident, [`PackedStore`] weights in few bits, [`PoisonStore`]
//! proves that nobody peeks.

mod packed;
mod plain;
mod poison;

pub use packed::PackedStore;
pub use plain::PlainStore;
pub use poison::PoisonStore;

use std::ops::Range;

use crate::error::Result;
use crate::packed::{PackedWeight, Packing};
use crate::param::Param;

/// Where the first values of parameters come from: their initialisers, a model file, a checkpoint.
pub trait ParamSource {
    /// Writes elements `range` of `param` to `out`, as f32.
    fn load(&self, param: &Param, range: Range<usize>, out: &mut [f32]) -> Result<()>;

    /// `param` in so many bits, where the source holds it in those very bits: nothing is rounded anew.
    fn load_packed(&self, _param: &Param, _packing: Packing) -> Result<Option<PackedWeight>> {
        Ok(None)
    }
}

/// Starts every parameter by its own initialiser.
#[derive(Debug, Clone, Copy)]
pub struct FromInitializers {
    /// The run's seed.
    pub seed: u64,
}

impl ParamSource for FromInitializers {
    fn load(&self, param: &Param, range: Range<usize>, out: &mut [f32]) -> Result<()> {
        param.each_run(range, out, |run, out| {
            param.initializer().fill(self.seed, param.name(), run, out);
            Ok(())
        })
    }
}
