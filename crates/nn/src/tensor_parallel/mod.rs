//! Layers in slices: each rank of a group holds a part of every large weight, and together they compute what one would.
//!
//! (Shoeybi et al.: "Megatron-LM", 2019, section 3.) A layer whose *outputs* are cut takes an input that all ranks have and
//! gives each its part; one whose *inputs* are cut takes the parts and sums the results, and adds its bias once, behind the
//! sum. Attention and feed-forward are one of each, so a block sums twice forward and twice backward. Tables are cut by
//! entries: a rank looks up what it holds, and the sum is the row. The [`loss`] needs no rank to hold all logits.
//!
//! Nothing of this is a model's business: [`Init::over`](crate::Init::over) names the ranks, [`Init::cut`](crate::Init::cut)
//! says which way a layer is cut, and without ranks both change nothing. What all ranks compute alike draws the same random
//! numbers on all of them; between the cuts, each rank draws its own ([`own_numbers`]).

mod cut;
mod loss;

pub use cut::Cut;
pub(crate) use cut::{Held, held};
pub use loss::{cross_entropy, linear_cross_entropy};

use ferrospeed_collective::ops;
use ferrospeed_comm::Group;
use ferrospeed_tensor::{Result, Tensor, random};

/// The input of layers whose outputs are cut, once for all that read it: backward, the ranks' gradients are summed.
pub fn enter(x: &Tensor, group: Option<&Group>) -> Result<Tensor> {
    group.map_or(Ok(x.clone()), |group| Ok(ops::enter(x, group)?))
}

/// Runs what ranks compute each for their own slices, with random numbers that are theirs alone.
pub(crate) fn own_numbers<R>(group: Option<&Group>, work: impl FnOnce() -> R) -> R {
    let Some(group) = group else { return work() };
    let common = random::state();
    // Another odd factor than that of ranks which see different samples.
    let seed = common.seed ^ (group.rank() as u64).wrapping_mul(0xD1B5_4A32_D192_ED03);
    random::set_state(random::RandomState { seed, ..common });
    let result = work();
    random::set_state(random::RandomState { seed: common.seed, ..random::state() });
    result
}
