//! Values as the bytes they travel in: small integers with their steps, or f32.
//!
//! A *run* is a stretch of values of one tensor; groups of integers do not reach beyond it, so that tensors of unlike
//! magnitude do not share a step. A run begins with the steps of its groups and goes on with their integers; where it is
//! to stay exact it is f32. Sums of what several ranks sent are in f32 and in the order of the sources, and a group that
//! held what is no number is nothing but NaN in them.

use ferrospeed_tensor::Device;
use ferrospeed_tensor::backend::RunForm;
use ferrospeed_tensor::dtype::Float;
use ferrospeed_tensor::quantize::{Bits, Format, Quantized};

const WORD: usize = size_of::<f32>();
/// Groups that one thread takes at a time. Even, so that no byte is cut.
const GROUPS_AT_ONCE: usize = 32;
/// Elements per group at most.
const LARGEST_GROUP: usize = 2048;

/// How the values of a run travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packing {
    /// As f32.
    Exact,
    /// As symmetric integers of eight bits: a step per 2048 values costs a fifth of a percent.
    Eight,
    /// As symmetric integers of four bits, with a step per 512 values: few levels ask for small groups.
    Four,
}

impl Packing {
    /// The format of the integers, and how many share a step.
    const fn integers(self) -> Option<(Format, usize)> {
        match self {
            Packing::Exact => None,
            Packing::Eight => Some((Format { bits: Bits::Eight, symmetric: true }, LARGEST_GROUP)),
            Packing::Four => Some((Format { bits: Bits::Four, symmetric: true }, 512)),
        }
    }

    /// The same for the kernels of a device.
    pub const fn form(self) -> RunForm {
        match self.integers() {
            None => RunForm::Exact,
            Some((Format { bits, .. }, group)) => RunForm::Turned { bits, group },
        }
    }

    /// Bytes of a run of so many values.
    pub const fn bytes(self, numel: usize) -> usize {
        match self.integers() {
            None => numel * WORD,
            Some((format, group)) => format.params_len(numel, group) * WORD + format.packed_len(numel),
        }
    }

    /// Packs a run, on the threads of a device.
    ///
    /// # Panics
    /// When there is not exactly room for it: a bug of the caller.
    pub fn pack<T: Float>(self, device: &Device, values: &[T], out: &mut [u8]) {
        assert_eq!(out.len(), self.bytes(values.len()), "bytes of {} values", values.len());
        let Some((format, group)) = self.integers() else {
            return write_words(values.iter().map(|value| value.widen()), out);
        };
        let (head, packed) = out.split_at_mut(format.params_len(values.len(), group) * WORD);
        let block = group * GROUPS_AT_ONCE;
        let places = head.chunks_mut(GROUPS_AT_ONCE * WORD).zip(packed.chunks_mut(format.packed_len(block)));
        device.each(values.chunks(block).zip(places), |_, (values, (head, packed))| {
            self.pack_block(values, head, packed);
        });
    }

    /// The sum of runs, times `factor`, on the threads of a device.
    ///
    /// # Panics
    /// When they are not of this many values: a bug of the caller.
    pub fn unpack_sum<T: Float>(self, device: &Device, runs: &[&[u8]], factor: f32, out: &mut [T]) {
        let (numel, block) = (out.len(), self.group() * GROUPS_AT_ONCE);
        device.each(out.chunks_mut(block), |index, out| self.sum(runs, numel, index * block, factor, out));
    }

    /// The sum of runs of `numel` values, packed again in the same pass, on the threads of a device.
    ///
    /// # Panics
    /// When they are not of this many values: a bug of the caller.
    pub fn repack_sum(self, device: &Device, runs: &[&[u8]], numel: usize, out: &mut [u8]) {
        assert_eq!(out.len(), self.bytes(numel), "bytes of {numel} values");
        let block = self.group() * GROUPS_AT_ONCE;
        let summed = |index: usize| {
            let start = index * block;
            let mut sums = vec![0.0f32; block.min(numel - start)];
            self.sum(runs, numel, start, 1.0, &mut sums);
            sums
        };
        let Some((format, group)) = self.integers() else {
            return device.each(out.chunks_mut(block * WORD), |index, out| {
                write_words(summed(index).into_iter(), out);
            });
        };
        let (head, packed) = out.split_at_mut(format.params_len(numel, group) * WORD);
        let places = head.chunks_mut(GROUPS_AT_ONCE * WORD).zip(packed.chunks_mut(format.packed_len(block)));
        device.each(places, |index, (head, packed)| self.pack_block(&summed(index), head, packed));
    }

    /// Packs some groups, where there are any.
    fn pack_block<T: Float>(self, values: &[T], head: &mut [u8], packed: &mut [u8]) {
        let Some((format, group)) = self.integers() else { return };
        let mut steps = [0.0; GROUPS_AT_ONCE];
        let steps = &mut steps[..head.len() / WORD];
        format.quantize_turned(values, group, packed, steps);
        write_words(steps.iter().copied(), head);
    }

    /// Values that share a step.
    const fn group(self) -> usize {
        match self.integers() {
            None => LARGEST_GROUP,
            Some((_, group)) => group,
        }
    }

    /// The sum of some whole groups, from `start` on, of runs of `numel` values, times `factor`.
    fn sum<T: Float>(self, runs: &[&[u8]], numel: usize, start: usize, factor: f32, out: &mut [T]) {
        for run in runs {
            assert_eq!(run.len(), self.bytes(numel), "bytes of {numel} values");
        }
        let Some((format, group)) = self.integers() else {
            let mut sums = vec![0.0f32; out.len()];
            for run in runs {
                let words = words_of(&run[start * WORD..(start + out.len()) * WORD]);
                sums.iter_mut().zip(words).for_each(|(sum, word)| *sum += word);
            }
            return out.iter_mut().zip(sums).for_each(|(out, sum)| *out = T::narrow(sum * factor));
        };
        let (first, count) = (start / group, format.params_len(out.len(), group));
        let bytes = format.params_len(numel, group) * WORD + format.packed_len(start);
        let bytes = bytes..bytes + format.packed_len(out.len());
        let steps = |run: &&[u8]| words_of(&run[first * WORD..(first + count) * WORD]).collect();
        let steps: Vec<Vec<f32>> = runs.iter().map(steps).collect();
        let sources: Vec<Quantized<'_>> = runs
            .iter()
            .zip(&steps)
            .map(|(run, params)| Quantized { packed: &run[bytes.clone()], params })
            .collect();
        format.dequantize_exact_sum(&sources, group, factor, out);
    }
}

fn write_words(values: impl Iterator<Item = f32>, out: &mut [u8]) {
    out.chunks_exact_mut(WORD)
        .zip(values)
        .for_each(|(place, value)| place.copy_from_slice(&value.to_le_bytes()));
}

fn words_of(bytes: &[u8]) -> impl Iterator<Item = f32> {
    bytes.chunks_exact(WORD).map(|word| f32::from_le_bytes(word.try_into().expect("four bytes")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(numel: usize, turn: usize) -> Vec<f32> {
        (0..numel).map(|i| ((i * 7 + turn * 13) as f32 * 0.37).sin() * (1 + turn) as f32).collect()
    }

    fn packed(packing: Packing, values: &[f32]) -> Vec<u8> {
        let mut bytes = vec![0; packing.bytes(values.len())];
        packing.pack(&ferrospeed_cpu::with_threads(1), values, &mut bytes);
        bytes
    }

    #[test]
    fn sums_come_back_within_a_step_of_every_source() {
        for (packing, levels) in
            [(Packing::Exact, f32::INFINITY), (Packing::Eight, 128.0), (Packing::Four, 8.0)]
        {
            for numel in [1, 7, 512, 513, 2048, 70 * 2048 + 5] {
                let given: Vec<Vec<f32>> = (0..3).map(|turn| values(numel, turn)).collect();
                let runs: Vec<Vec<u8>> = given.iter().map(|values| packed(packing, values)).collect();
                let runs: Vec<&[u8]> = runs.iter().map(Vec::as_slice).collect();
                let mut found = vec![0.0f32; numel];
                packing.unpack_sum(&ferrospeed_cpu::device(), &runs, 0.5, &mut found);
                for (at, found) in found.iter().enumerate() {
                    let exact: f32 = given.iter().map(|values| values[at]).sum::<f32>() * 0.5;
                    // A step of each source: their largest values are one, two and three, and what is as large with
                    // the other sign has no integer of its own.
                    let near = 0.5 * 6.0 / levels + 1e-5;
                    assert!((exact - found).abs() < near, "{packing:?} {numel}: {exact} {found}");
                }
            }
        }
    }

    #[test]
    fn a_sum_that_is_packed_again_is_the_sum_packed() {
        for packing in [Packing::Exact, Packing::Eight, Packing::Four] {
            for numel in [1, 7, 512, 515, 70 * 2048 + 5] {
                let runs: Vec<Vec<u8>> = (0..2).map(|turn| packed(packing, &values(numel, turn))).collect();
                let runs: Vec<&[u8]> = runs.iter().map(Vec::as_slice).collect();
                let mut sum = vec![0.0f32; numel];
                packing.unpack_sum(&ferrospeed_cpu::device(), &runs, 1.0, &mut sum);
                let mut again = vec![0; packing.bytes(numel)];
                packing.repack_sum(&ferrospeed_cpu::device(), &runs, numel, &mut again);
                assert!(again == packed(packing, &sum), "{packing:?} {numel}");
            }
        }
    }

    #[test]
    fn what_is_no_number_reaches_the_sum() {
        let mut bad = values(600, 0);
        bad[3] = f32::INFINITY;
        for packing in [Packing::Eight, Packing::Four] {
            let runs = [packed(packing, &values(600, 1)), packed(packing, &bad)];
            let runs: Vec<&[u8]> = runs.iter().map(Vec::as_slice).collect();
            let mut again = vec![0; packing.bytes(600)];
            packing.repack_sum(&ferrospeed_cpu::device(), &runs, 600, &mut again);
            let mut found = vec![0.0f32; 600];
            packing.unpack_sum(&ferrospeed_cpu::device(), &[&again], 1.0, &mut found);
            assert!(found[3].is_nan(), "{packing:?}");
        }
    }
}
