//! What a store is told, and what the reducer is told of that.

use ferrospeed_collective::hops::Hops;
use ferrospeed_comm::Group;
use ferrospeed_config::{Stage, Zero};
use ferrospeed_optim::{GroupOptions, Optimizer};
use ferrospeed_tensor::{DType, Param};

use crate::homes::Homes;
use crate::reducer::{ReduceOptions, Road};
use crate::sharding::{Elsewhere, Sharding};
use crate::store::Share;

/// Parameters that share optimizer options.
#[derive(Debug, Clone)]
pub struct ParamGroup {
    /// The parameters, in order. Frozen ones are left alone.
    pub params: Vec<Param>,
    /// Their options.
    pub options: GroupOptions,
}

/// Everything a store must know.
pub struct StoreOptions<'a> {
    /// The `zero_optimization` section.
    pub zero: &'a Zero,
    /// The type kernels read weights in.
    pub dtype: DType,
    /// The type gradients travel in.
    pub wire: DType,
    /// The type reduced gradients are kept in.
    pub kept: DType,
    /// Whether micro-batches are added up before a step.
    pub accumulates: bool,
    /// `gradient_predivide_factor`.
    pub predivide: f64,
    /// `prescale_gradients`.
    pub prescale: bool,
    /// `sparse_gradients`: below stage 1, gradients of tables travel as rows.
    pub sparse_gradients: bool,
    /// Over which ranks state is spread.
    pub sharding: Sharding,
    /// What is spread in another way.
    pub elsewhere: &'a [Elsewhere],
    /// The ranks that hold different parts of one model (stages, slices, experts) and must come to one norm, and to one
    /// decision to step: all of them. `None` where every shard holds the whole model.
    pub agreement: Option<Group>,
    /// Whether every micro-batch is reduced when it ends, in stages 0 and 1 too, where once per step is enough.
    pub reduces_each_micro_batch: bool,
    /// Parameters that stage 3 gathers and releases together, by leaf module: parts that ranks read unlike each other.
    pub leaf_modules: &'a [Vec<Param>],
    /// The update rule; `None` when nothing is trained.
    pub optimizer: Option<Optimizer>,
    /// Where state is at home.
    pub homes: Homes,
}

/// `trained`: the shares whose gradients are reduced.
pub(super) fn reduce_options(options: &StoreOptions<'_>, trained: &[&Share]) -> ReduceOptions {
    let stage = options.zero.stage;
    let is_moved = |share: &&Share| share.is_away && share.kept().is_empty();
    ReduceOptions {
        whole: stage == Stage::Off,
        keep_buffers: stage <= Stage::OptimizerStates,
        overlap: options.zero.overlap_comm,
        wire: options.wire,
        kept: options.kept,
        accumulates: options.accumulates,
        each_micro_batch: options.reduces_each_micro_batch,
        leaves: options.homes.gradients_leave() && trained.iter().all(is_moved),
    }
}

/// How the gradients of one way of being spread become their average.
pub(super) fn road(options: &StoreOptions<'_>, sharding: &Sharding, hops: Option<Hops>) -> Road {
    let n = sharding.divisor as f64;
    // The plain average rounds once. A predivide factor f multiplies by 1/f before and f/n after; prescaling
    // multiplies by 1/n before.
    let (before, after) = if options.prescale {
        (1.0 / n, Some(1.0))
    } else if options.predivide != 1.0 {
        (1.0 / options.predivide, Some(options.predivide / n))
    } else if sharding.divisor != sharding.ranks() {
        (1.0, Some(1.0 / n))
    } else {
        (1.0, None)
    };
    Road { sharding: sharding.clone(), before: before as f32, after: after.map(|after| after as f32), hops }
}
