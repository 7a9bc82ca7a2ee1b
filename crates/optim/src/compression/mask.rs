//! Which units of a weight are kept: single elements, rows, channels or heads.

use ferrospeed_tensor::dtype::Float;
use ferrospeed_tensor::{DType, Result, Tensor, TensorError};

/// Elements per task.
const BLOCK: usize = 16 * 1024;

/// What a weight is cut into: element `i` is of unit `i / stride % count`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Units {
    /// Neighbouring elements of one unit.
    pub stride: usize,
    /// How many units there are.
    pub count: usize,
}

impl Units {
    fn of(&self, element: usize) -> usize {
        element / self.stride % self.count
    }

    /// The sum of magnitudes of each unit.
    pub fn scores(&self, weight: &[f32]) -> Vec<f32> {
        if self.count == weight.len() {
            return weight.iter().map(|value| value.abs()).collect();
        }
        let mut sums = vec![0.0f64; self.count];
        for (element, value) in weight.iter().enumerate() {
            sums[self.of(element)] += f64::from(value.abs());
        }
        sums.into_iter().map(|sum| sum as f32).collect()
    }
}

/// One bit for each unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mask {
    words: Vec<u64>,
    units: usize,
}

impl Mask {
    /// Keeps the units with the largest scores: `ceil(ratio · count)` of them, of equals the first.
    pub fn of_largest(scores: &[f32], ratio: f64) -> Mask {
        let kept = Mask::kept_of(scores.len(), ratio);
        let mut mask = Mask { words: vec![0; scores.len().div_ceil(64)], units: scores.len() };
        if kept == 0 {
            return mask;
        }
        let mut sorted = scores.to_vec();
        // No number is kept before any other: a weight that holds one is past saving, and whoever trains it is told.
        let (larger, last, _) = sorted.select_nth_unstable_by(kept - 1, |a, b| b.total_cmp(a));
        let last = *last;
        let mut equals = kept - larger.iter().filter(|score| score.total_cmp(&last).is_gt()).count();
        for (unit, score) in scores.iter().enumerate() {
            let order = score.total_cmp(&last);
            let among_equals = order.is_eq() && equals > 0;
            equals -= usize::from(among_equals);
            if order.is_gt() || among_equals {
                mask.words[unit / 64] |= 1 << (unit % 64);
            }
        }
        mask
    }

    /// How many of so many units are kept.
    pub fn kept_of(units: usize, ratio: f64) -> usize {
        ((ratio * units as f64).ceil() as usize).min(units)
    }

    /// How many units there are.
    pub fn units(&self) -> usize {
        self.units
    }

    /// Whether a unit is kept.
    pub fn keeps(&self, unit: usize) -> bool {
        self.words[unit / 64] >> (unit % 64) & 1 == 1
    }

    /// How many are.
    pub fn kept(&self) -> usize {
        self.words.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// The mask as text: a hexadecimal digit for every four units, the first unit in its lowest bit.
    pub fn to_text(&self) -> String {
        let digit = |at: usize| {
            let digit = self.words[at / 16] >> (at % 16 * 4) & 15;
            char::from_digit(digit as u32, 16).unwrap_or('0')
        };
        (0..self.units.div_ceil(4)).map(digit).collect()
    }

    /// From what [`Mask::to_text`] made of so many units; `None` where it is not that.
    pub fn from_text(text: &str, units: usize) -> Option<Mask> {
        if text.len() != units.div_ceil(4) {
            return None;
        }
        let mut words = vec![0; units.div_ceil(64)];
        for (at, digit) in text.chars().enumerate() {
            words[at / 16] |= u64::from(digit.to_digit(16)?) << (at % 16 * 4);
        }
        let beyond = units % 64;
        let is_clean = beyond == 0 || words.last().is_none_or(|last| last >> beyond == 0);
        is_clean.then_some(Mask { words, units })
    }

    /// `x` with zeros where its units are not kept, off the tape and in memory of its own.
    pub fn apply(&self, units: Units, x: &Tensor) -> Result<Tensor> {
        match x.dtype() {
            DType::F32 => self.filtered::<f32>(units, x),
            DType::BF16 => self.filtered::<half::bf16>(units, x),
            DType::F16 => self.filtered::<half::f16>(units, x),
            dtype => Err(TensorError::BadDType {
                op: "mask",
                what: "the operand",
                dtype,
                expected: "a float type",
            }),
        }
    }

    fn filtered<T: Float>(&self, units: Units, x: &Tensor) -> Result<Tensor> {
        let mut out = Tensor::empty(*x.shape(), x.dtype(), x.device())?;
        let values = x.host::<T>()?;
        let parts = out.out()?.into_host::<T>()?.chunks_mut(BLOCK);
        x.device().each(parts, |task, part| {
            let start = task * BLOCK;
            for (at, value) in part.iter_mut().enumerate() {
                let element = start + at;
                *value = if self.keeps(units.of(element)) { values[element] } else { T::narrow(0.0) };
            }
        });
        Ok(out)
    }
}

#[cfg(test)]
mod tests {

    use super::*;

    #[test]
    fn the_largest_are_kept_and_of_equals_the_first() {
        let mask = Mask::of_largest(&[1.0, 3.0, 1.0, 2.0, 1.0], 0.7);
        assert_eq!((0..5).map(|unit| mask.keeps(unit)).collect::<Vec<_>>(), [true, true, true, true, false]);
        assert_eq!((mask.kept(), Mask::of_largest(&[1.0; 7], 0.0).kept()), (4, 0));
        assert_eq!(Mask::of_largest(&[0.0; 130], 1.0).kept(), 130);
    }

    #[test]
    fn rows_columns_and_heads_are_units() {
        let weight: Vec<f32> = (0..24).map(|value| value as f32).collect();
        let x = Tensor::from_slice(&weight, [4, 6], &ferrospeed_cpu::with_threads(1)).unwrap();
        for (units, zeroed) in [
            (Units { stride: 6, count: 4 }, (0..12).collect::<Vec<usize>>()),
            (Units { stride: 1, count: 6 }, (0..24).filter(|at| at % 6 < 3).collect()),
            (Units { stride: 3, count: 2 }, (0..24).filter(|at| at % 6 < 3).collect()),
            (Units { stride: 1, count: 24 }, (0..12).collect()),
        ] {
            let mask = Mask::of_largest(&units.scores(&weight), 0.5);
            let found = mask.apply(units, &x).unwrap().to_vec::<f32>().unwrap();
            for (at, value) in found.iter().enumerate() {
                assert_eq!(*value == 0.0, zeroed.contains(&at) || at == 0, "{units:?}: {at}");
            }
        }
    }

    #[test]
    fn a_mask_comes_back_from_its_text_and_nothing_else_does() {
        for units in [1, 3, 4, 63, 64, 65, 200] {
            let scores: Vec<f32> = (0..units).map(|unit| (unit * 7 % 5) as f32).collect();
            let mask = Mask::of_largest(&scores, 0.4);
            assert_eq!(Mask::from_text(&mask.to_text(), units), Some(mask.clone()));
            assert_eq!(Mask::from_text(&mask.to_text(), units + 4), None);
        }
        for text in ["g", "8", "é", ""] {
            assert_eq!(Mask::from_text(text, 3), None, "{text}");
        }
    }
}
