//! The norm of gradients that leave: taken on the device as they go.
//!
//! The grid of an exact norm (`optim::norm`) is known when all gradients are, and by then they have left. So squares are
//! summed on the grids that the last step makes likely: its own, and those of a largest magnitude half and twice as large.
//! Where it is none of these the host goes over what has arrived.

use ferrospeed_optim::norm::{Magnitude, SquareSum};
use ferrospeed_tensor::backend::sum_of_words;
use ferrospeed_tensor::{Category, DType, Device, Out, Tensor};

use crate::error::Result;

const GRIDS: usize = 3;
/// The largest magnitude, and two words for each grid.
const WORDS: usize = 1 + 2 * GRIDS;

/// What is known so far, on the device.
pub(super) struct Measures {
    /// By group.
    words: Vec<Tensor>,
    grids: [f64; GRIDS],
    /// Whether it is of a micro-batch that has ended.
    is_old: bool,
}

/// What was measured, by group: the largest magnitude, and the sums on the grids.
pub(crate) struct Measured {
    groups: Vec<(Magnitude, [SquareSum; GRIDS])>,
    grids: [f64; GRIDS],
}

/// The grids of a magnitude half as large, as large and twice as large.
fn likely(magnitude: Magnitude) -> [f64; GRIDS] {
    [0.5, 1.0, 2.0].map(|factor| Magnitude::from_value(magnitude.value() * factor).grid())
}

impl Measures {
    pub(super) fn new(groups: usize, device: &Device) -> Result<Measures> {
        let words = || Tensor::zeros_in([WORDS], DType::I64, device, Category::Buffers);
        let words = (0..groups).map(|_| words()).collect::<Result<_, _>>()?;
        Ok(Measures { words, grids: likely(Magnitude::from_value(1.0)), is_old: false })
    }

    /// Adds a piece of a group.
    pub(super) fn add(&mut self, group: usize, piece: &Tensor) -> Result<()> {
        if self.is_old {
            for words in &self.words {
                // SAFETY: these words are nobody else's, and the device's work is in order.
                words.device().backend().fill(unsafe { Out::vouched(words) }, 0.0)?;
            }
            self.is_old = false;
        }
        let words = &self.words[group];
        // SAFETY: as above.
        let out = unsafe { Out::vouched(words) };
        Ok(words.device().backend().measure_more(&[piece], &self.grids, out)?)
    }

    /// Ends a micro-batch: what comes next has measures of its own, since it is the sum of both.
    pub(super) fn end(&mut self) {
        self.is_old = true;
    }

    /// Notes what the next gradients are likely to be like.
    pub(super) fn expect(&mut self, magnitude: Magnitude) {
        self.grids = likely(magnitude);
    }

    /// Waits for all that was added.
    pub(super) fn take(&self) -> Result<Measured> {
        let read = |words: &Tensor| -> Result<_> {
            let words = words.to_vec::<i64>()?.into_iter().map(i64::cast_unsigned).collect::<Vec<_>>();
            let sum =
                |grid: usize| SquareSum::from_sum(sum_of_words([words[1 + 2 * grid], words[2 + 2 * grid]]));
            Ok((Magnitude::from_value(f32::from_bits(words[0] as u32)), std::array::from_fn(sum)))
        };
        Ok(Measured { groups: self.words.iter().map(read).collect::<Result<_>>()?, grids: self.grids })
    }
}

impl Measured {
    /// The largest magnitude of all groups.
    pub(crate) fn largest(&self) -> Magnitude {
        self.groups.iter().fold(Magnitude::ZERO, |most, (magnitude, _)| most.max(*magnitude))
    }

    /// The sum of squares of some groups on the grid of the whole; `None` where nobody thought of that grid.
    pub(crate) fn squares(&self, whole: Magnitude, is_counted: impl Fn(usize) -> bool) -> Option<SquareSum> {
        let grid = self.grids.iter().position(|&grid| grid == whole.grid())?;
        let counted = self.groups.iter().enumerate().filter(|(group, _)| is_counted(*group));
        Some(counted.fold(SquareSum::default(), |sum, (_, (_, sums))| sum + sums[grid]))
    }
}
