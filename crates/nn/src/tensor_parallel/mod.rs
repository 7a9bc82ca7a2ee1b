//! Layers in slices: each rank of a group holds a part of every large weight, and together they compute what one would.
//!
//! (Shoeybi et al.: "Megatron-LM", 2019, section 3.) A layer whose *outputs* are cut takes an input that all ranks have and
//! gives each its part; one whose *inputs* are cut takes the parts and sums the results, and adds its bias once, behind the
//! sum. Attention and feed-forward are one of each, so a block sums twice forward and twice backward. Tables are cut by
//! entries: a rank looks up what it holds, and the sum is the row. The [`loss`](linear_cross_entropy) needs no rank to hold
//! all logits.
//!
//! Between the cuts all ranks have the same values, or each has those of some tokens ([`Between`]; Korthikanti et al.:
//! "Reducing activation recomputation in large transformer models", 2022, section 4.2.2).
//!
//! Nothing of this is a model's business: [`Init::over`](crate::Init::over) names the ranks, [`Init::cut`](crate::Init::cut)
//! says which way a layer is cut, and without ranks both change nothing. What all ranks compute alike draws the same random
//! numbers on all of them; what each computes for itself, its own.

mod cut;
mod loss;

pub use cut::Cut;
pub(crate) use cut::{Held, held};
pub(crate) use loss::expect_entries;
pub use loss::{cross_entropy, linear_cross_entropy};

use ferrospeed_collective::ops;
use std::cell::Cell;

use ferrospeed_comm::Group;
use ferrospeed_tensor::{DType, Result, Tensor, TensorError, ops as plain, random};

/// What ranks have between the cuts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Between {
    /// All tokens, each of them.
    AllTokens,
    /// Each its own neighbouring tokens, as many as every other: norms and what else works on single tokens is done once, and
    /// only so much of it is kept for backward. The sums over ranks become a reduce-scatter, and each region begins with an
    /// all-gather: as many bytes as before.
    OwnTokens,
}

/// The ranks that hold slices of the same layers.
#[derive(Debug, Clone)]
pub struct Slices {
    group: Group,
    between: Between,
}

thread_local! {
    static ALL_TOKENS: Cell<bool> = const { Cell::new(false) };
}

/// Runs a forward whose tokens no number of ranks need divide, such as the next token of one text: all ranks have all of them,
/// whatever they have in training.
pub fn with_all_tokens<R>(work: impl FnOnce() -> R) -> R {
    struct Before(bool);
    impl Drop for Before {
        fn drop(&mut self) {
            ALL_TOKENS.set(self.0);
        }
    }
    let _before = Before(ALL_TOKENS.replace(true));
    work()
}

/// The dim of tokens between the cuts: `[batch, tokens, width]`.
const TOKENS: usize = 1;

impl From<&Group> for Slices {
    fn from(group: &Group) -> Slices {
        Slices { group: group.clone(), between: Between::AllTokens }
    }
}

impl Slices {
    /// Over the ranks of a group.
    pub fn over(group: &Group, between: Between) -> Slices {
        Slices { group: group.clone(), between }
    }

    /// The ranks.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// What they have between the cuts: what they were made with, or all tokens [where each row counts](with_all_tokens).
    pub fn between(&self) -> Between {
        if ALL_TOKENS.get() { Between::AllTokens } else { self.between }
    }

    /// From what ranks have between the cuts to the input of layers whose outputs are cut, once for all that read it.
    /// Backward, the ranks' gradients are summed.
    pub fn enter(&self, x: &Tensor) -> Result<Tensor> {
        match self.between() {
            Between::AllTokens => Ok(ops::enter(x, &self.group)?),
            Between::OwnTokens => Ok(ops::all_gather(x, TOKENS, &self.group)?),
        }
    }

    /// From a summand on each rank to what they have between the cuts.
    pub fn leave(&self, x: &Tensor) -> Result<Tensor> {
        match self.between() {
            Between::AllTokens => Ok(ops::leave(x, &self.group)?),
            Between::OwnTokens => {
                self.check_tokens(x)?;
                Ok(ops::reduce_scatter(x, TOKENS, &self.group)?)
            }
        }
    }

    /// Of something that all ranks have of every token, and that has no gradient, what is for this rank's tokens.
    pub fn own_tokens(&self, x: &Tensor) -> Result<Tensor> {
        if self.between() == Between::AllTokens {
            return Ok(x.clone());
        }
        self.check_tokens(x)?;
        let own = x.sizes()[TOKENS] / self.group.size();
        plain::narrow(x, TOKENS, self.group.rank() * own, own)
    }

    fn check_tokens(&self, x: &Tensor) -> Result<()> {
        let (tokens, ranks) = (x.sizes().get(TOKENS).copied().unwrap_or(0), self.group.size());
        if tokens.is_multiple_of(ranks) {
            return Ok(());
        }
        let why = format!(
            "{tokens} tokens cannot be shared by {ranks} ranks alike; use sequences of a multiple of {ranks}"
        );
        Err(TensorError::argument("slices", why))
    }

    /// Runs what each rank computes for its own tokens with random numbers that are its own; what all compute alike, as it
    /// is.
    pub fn between_cuts<R>(&self, work: impl FnOnce() -> R) -> R {
        if self.between() == Between::OwnTokens { self.own_numbers(work) } else { work() }
    }

    /// Runs what each rank computes for its own heads with random numbers that are its own. Between the cuts they are already
    /// where each has tokens of its own.
    pub(crate) fn within_cuts<R>(&self, work: impl FnOnce() -> R) -> R {
        if self.between() == Between::AllTokens { self.own_numbers(work) } else { work() }
    }

    fn own_numbers<R>(&self, work: impl FnOnce() -> R) -> R {
        let common = random::state();
        // Another odd factor than that of ranks which see different samples.
        let seed = common.seed ^ (self.group.rank() as u64).wrapping_mul(0xD1B5_4A32_D192_ED03);
        random::set_state(random::RandomState { seed, ..common });
        let result = work();
        random::set_state(random::RandomState { seed: common.seed, ..random::state() });
        result
    }
}

/// What ranks have of the entries of rows, `[rows, own]`, side by side on all of them: `[rows, entries]`, as f32 on the host.
/// Without gradients.
pub fn joined_entries(own: &Tensor, entries: usize, slices: &Slices) -> Result<Tensor> {
    let group = slices.group();
    let (rows, ranks) = (own.shape().rows(), group.size());
    let range = |rank| held(entries, 1, entries, rank, ranks).ranges.remove(0);
    let counts: Vec<usize> = (0..ranks).map(|rank| rows * range(rank).len()).collect();
    let device = own.device();
    let own = plain::cast(own, DType::F32)?.to_vec::<f32>()?;
    let mut parts = vec![0.0f32; rows * entries];
    let gathered = group.all_gather_unequal(&own, &mut parts, &counts);
    gathered.map_err(|error| TensorError::argument("joined entries", error.to_string()))?;
    let mut whole = vec![0.0f32; rows * entries];
    let mut rest = &parts[..];
    for range in (0..ranks).map(range) {
        let (part, behind) = rest.split_at(rows * range.len());
        for (from, to) in part.chunks(range.len().max(1)).zip(whole.chunks_mut(entries)) {
            to[range.clone()].copy_from_slice(from);
        }
        rest = behind;
    }
    Tensor::from_slice(&whole, [rows, entries], device.host())
}

/// [`Slices::enter`], where there are slices.
pub fn enter(x: &Tensor, slices: Option<&Slices>) -> Result<Tensor> {
    slices.map_or(Ok(x.clone()), |slices| slices.enter(x))
}
