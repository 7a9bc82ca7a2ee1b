//! What optimizers that exchange one bit per value do on a device: values as signs, and the passes of their rules.
//!
//! The host's own are loops over slices, in the crates that train; a device does the same for all tensors of a model at once.

use crate::backend::Memory;
use crate::error::Result;
use crate::tensor::Tensor;

/// How momentum moves weights: by `lr·(m/(√v + eps) + decay·w)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OneBitPace {
    /// Learning rate.
    pub lr: f32,
    /// Weight decay.
    pub decay: f32,
    /// Added to the denominator.
    pub eps: f32,
}

/// A pass over whole parameters, with g the gradient times its factor, m and v the moments, and `number` a piece's own. Where
/// v is zero there never was a gradient, and what ranks have averaged counts as zero.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum OneBitPass {
    /// `values ← (beta·m + rest·g)·number`; all else stays.
    GiveMomentum {
        /// What of the momentum stays.
        beta: f32,
        /// The share of the gradient.
        rest: f32,
    },
    /// `m ← beta·m + rest·values`, and weights follow it.
    Take {
        /// What of the momentum stays.
        beta: f32,
        /// The share of what was averaged.
        rest: f32,
        /// How weights follow.
        pace: OneBitPace,
    },
    /// `m ← beta·m + rest·g`; weights follow it, and the third state becomes less by as much as they do.
    Travel {
        /// What of the momentum stays.
        beta: f32,
        /// The share of the gradient.
        rest: f32,
        /// How weights follow.
        pace: OneBitPace,
    },
    /// Weights go back by the third state, their way; `values` is that way in units of momentum: times `√v + eps`.
    GoBack {
        /// Added to the denominator.
        eps: f32,
    },
    /// Weights go the way in `values`, `m ← −values/number`, and the third state becomes zero.
    Arrive {
        /// Added to the denominator.
        eps: f32,
    },
    /// Measures m alone: `[Σ m², 0, 0]`.
    Sizes,
    /// Blends g into both moments, `values ← m/(√v + eps) + decay·w`; the third state, where there is one, becomes v. Measures
    /// `[Σ w², Σ values², 0]`.
    Direct {
        /// Decay rates of the moments.
        betas: [f32; 2],
        /// One less the rates.
        rest: [f32; 2],
        /// Added to the denominator.
        eps: f32,
        /// Weight decay.
        decay: f32,
    },
    /// `m ← values/number`; the gradient that led there from the old m is blended into the third state, a second moment that
    /// goes on; `values` becomes the direction as above. Measures `[Σ (m/(√v + eps))², Σ values²,` the largest
    /// `(√v + eps)/(√third + eps)]`.
    Correct {
        /// Decay rates of the moments.
        betas: [f32; 2],
        /// One less the rates.
        rest: [f32; 2],
        /// Added to the denominator.
        eps: f32,
        /// Weight decay.
        decay: f32,
    },
    /// `w ← w − number·values`.
    Follow,
}

/// What a pass reads and writes of one parameter: flat tensors of one length, in memory that is not the host's. Of what a pass does
/// not name nothing is needed.
#[derive(Debug, Clone)]
pub struct OneBitOperands {
    /// f32 master weights.
    pub weights: Tensor,
    /// Their gradient.
    pub gradient: Option<Tensor>,
    /// m, v, and the third state where there is one; f32.
    pub states: Vec<Tensor>,
    /// What ranks average, f32.
    pub values: Option<Tensor>,
    /// Where the rounded copy of new weights goes.
    pub copy: Option<Tensor>,
    /// The piece's own number.
    pub number: f32,
}

/// A tensor that goes as signs of one size.
#[derive(Debug, Clone, Copy)]
pub struct Rounding<'a> {
    /// f32, padded. What went as signs last, of which what those did not say is still to be said: it becomes what goes now.
    pub values: &'a Tensor,
    /// One f32: the size of the signs, last and now.
    pub scale: &'a Tensor,
    /// What is added to what was left; what it is shorter than `values` counts as zero. `None`: the mean of what was received.
    pub given: Option<&'a Tensor>,
    /// Where its message begins in each rank's bytes.
    pub at: usize,
}

/// A tensor of which each rank has sent the signs of a stretch.
#[derive(Debug, Clone, Copy)]
pub struct Signed<'a> {
    /// What becomes of them, f32. It may be shorter than all stretches.
    pub values: &'a Tensor,
    /// Elements of a stretch.
    pub stretch: usize,
    /// Where its message begins in each rank's bytes.
    pub at: usize,
}

/// As many bytes from or to each of some ranks, end to end. Of each tensor they hold one message: the size of its signs as f32, then
/// the signs of a rank's stretch, eight to a byte, the first the highest.
#[derive(Debug, Clone, Copy)]
pub struct SignMessages<'a> {
    /// The bytes.
    pub bytes: &'a Tensor,
    /// The ranks.
    pub ranks: usize,
}

impl SignMessages<'_> {
    /// How far it is from one rank's bytes to the next one's.
    pub fn stride(&self) -> usize {
        self.bytes.numel() / self.ranks.max(1)
    }
}

/// Signs and the passes of rules that use them. The host does both by loops of its own.
pub trait OneBit: Memory {
    /// Does some passes, each over pieces that are alike in their types.
    fn one_bit(&self, _gradient_factor: f32, _passes: &[(OneBitPass, Vec<OneBitOperands>)]) -> Result<()> {
        Err(self.left_to_the_host("1-bit optimizer"))
    }
    /// The same, and waits for what they measure, by piece. Sums have a fixed order.
    fn one_bit_measured(
        &self,
        _gradient_factor: f32,
        _passes: &[(OneBitPass, Vec<OneBitOperands>)],
    ) -> Result<Vec<[f64; 3]>> {
        Err(self.left_to_the_host("1-bit optimizer"))
    }
    /// Rounds tensors to signs, into a message to each rank. The size of a tensor's signs is its root mean square, whose sum
    /// has a fixed order.
    fn round_to_signs(
        &self,
        _tensors: &[Rounding<'_>],
        _received: Option<SignMessages<'_>>,
        _sent: SignMessages<'_>,
    ) -> Result<()> {
        Err(self.left_to_the_host("signs"))
    }
    /// Tensors become the signs that were received.
    fn take_signs(&self, _tensors: &[Signed<'_>], _received: SignMessages<'_>) -> Result<()> {
        Err(self.left_to_the_host("signs"))
    }
}
