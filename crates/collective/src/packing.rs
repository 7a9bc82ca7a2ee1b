//! Values as the bytes they travel in: small integers with their steps, or f32.
//!
//! A *run* is a stretch of values of one tensor; groups of integers do not reach beyond it, so that tensors of unlike
//! magnitude do not share a step. A run begins with the steps of its groups and goes on with their integers; where it is
//! to stay exact it is f32. Sums of what several ranks sent are in f32 and in the order of the sources, and a group that
//! held what is no number is nothing but NaN in them.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use ferrospeed_tensor::Device;
use ferrospeed_tensor::cpu::quantize::{Bits, Format, Quantized};
use ferrospeed_tensor::dtype::Float;

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
        each(device, values.chunks(block).zip(places), |_, (values, (head, packed))| {
            let mut steps = [0.0; GROUPS_AT_ONCE];
            let steps = &mut steps[..head.len() / WORD];
            format.quantize_turned(values, group, packed, steps);
            write_words(steps.iter().copied(), head);
        });
    }

    /// The sum of runs, times `factor`, on the threads of a device.
    ///
    /// # Panics
    /// When they are not of this many values: a bug of the caller.
    pub fn unpack_sum<T: Float>(self, device: &Device, runs: &[&[u8]], factor: f32, out: &mut [T]) {
        let (numel, block) = (out.len(), self.group() * GROUPS_AT_ONCE);
        each(device, out.chunks_mut(block), |index, out| {
            let start = index * block;
            self.each_group(runs, numel, start..start + out.len(), |range, sums| {
                let out = &mut out[range.start - start..range.end - start];
                out.iter_mut().zip(sums).for_each(|(out, sum)| *out = T::narrow(*sum * factor));
            });
        });
    }

    /// The sum of runs of `numel` values, packed again in the same pass, on the threads of a device.
    ///
    /// # Panics
    /// When they are not of this many values: a bug of the caller.
    pub fn repack_sum(self, device: &Device, runs: &[&[u8]], numel: usize, out: &mut [u8]) {
        assert_eq!(out.len(), self.bytes(numel), "bytes of {numel} values");
        let block = self.group() * GROUPS_AT_ONCE;
        let Some((format, group)) = self.integers() else {
            return each(device, out.chunks_mut(block * WORD), |index, out| {
                let start = index * block;
                self.each_group(runs, numel, start..start + out.len() / WORD, |range, sums| {
                    let out = &mut out[(range.start - start) * WORD..(range.end - start) * WORD];
                    write_words(sums.iter().copied(), out);
                });
            });
        };
        let (head, packed) = out.split_at_mut(format.params_len(numel, group) * WORD);
        let places = head.chunks_mut(GROUPS_AT_ONCE * WORD).zip(packed.chunks_mut(format.packed_len(block)));
        each(device, places, |index, (head, packed)| {
            let start = index * block;
            let mut heads = head.chunks_exact_mut(WORD);
            self.each_group(runs, numel, start..(start + block).min(numel), |range, sums| {
                let mut step = [0.0];
                let bytes = format.packed_len(range.start - start)..format.packed_len(range.end - start);
                format.quantize_turned(sums, group, &mut packed[bytes], &mut step);
                if let Some(head) = heads.next() {
                    head.copy_from_slice(&step[0].to_le_bytes());
                }
            });
        });
    }

    /// Values that are worked on together.
    const fn group(self) -> usize {
        match self.integers() {
            None => LARGEST_GROUP,
            Some((_, group)) => group,
        }
    }

    /// Hands on the sum of some whole groups of runs of `numel` values, a group at a time.
    fn each_group(
        self,
        runs: &[&[u8]],
        numel: usize,
        wanted: Range<usize>,
        mut take: impl FnMut(Range<usize>, &[f32]),
    ) {
        for run in runs {
            assert_eq!(run.len(), self.bytes(numel), "bytes of {numel} values");
        }
        let mut sums = [0.0f32; LARGEST_GROUP];
        let integers = self.integers();
        let words = integers.map_or(0, |(format, group)| format.params_len(numel, group));
        let mut steps = vec![0.0f32; runs.len()];
        for start in wanted.clone().step_by(self.group()) {
            let range = start..(start + self.group()).min(wanted.end);
            let sums = &mut sums[..range.len()];
            match integers {
                None => {
                    sums.fill(0.0);
                    for run in runs {
                        sums.iter_mut()
                            .zip(words_of(&run[range.start * WORD..range.end * WORD]))
                            .for_each(|(sum, word)| *sum += word);
                    }
                }
                Some((format, group)) => {
                    let bytes = words * WORD + format.packed_len(range.start);
                    let bytes = bytes..bytes + format.packed_len(range.len());
                    let of_runs = runs.iter().flat_map(|run| words_of(&run[start / group * WORD..][..WORD]));
                    steps.iter_mut().zip(of_runs).for_each(|(place, step)| *place = step);
                    let sources: Vec<Quantized<'_>> = runs
                        .iter()
                        .zip(steps.chunks_exact(1))
                        .map(|(run, params)| Quantized { packed: &run[bytes.clone()], params })
                        .collect();
                    format.dequantize_sum(&sources, group, 1.0, sums);
                }
            }
            take(range, sums);
        }
    }
}

/// Does something with each of some parts, on the threads of a device. Where there is one part it is done at once.
fn each<P: Send>(device: &Device, parts: impl Iterator<Item = P>, work: impl Fn(usize, P) + Send + Sync) {
    // Each task takes its own part out of the list, so none is shared.
    let parts: Vec<Mutex<Option<P>>> = parts.map(|part| Mutex::new(Some(part))).collect();
    device.backend().parallel(parts.len(), &|index| {
        let part = parts[index].lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(part) = part {
            work(index, part);
        }
    });
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
        packing.pack(&Device::cpu_with_threads(1), values, &mut bytes);
        bytes
    }

    #[test]
    fn sums_come_back_within_half_a_step_of_every_source() {
        for (packing, levels) in
            [(Packing::Exact, f32::INFINITY), (Packing::Eight, 128.0), (Packing::Four, 8.0)]
        {
            for numel in [1, 7, 512, 513, 2048, 70 * 2048 + 5] {
                let given: Vec<Vec<f32>> = (0..3).map(|turn| values(numel, turn)).collect();
                let runs: Vec<Vec<u8>> = given.iter().map(|values| packed(packing, values)).collect();
                let runs: Vec<&[u8]> = runs.iter().map(Vec::as_slice).collect();
                let mut found = vec![0.0f32; numel];
                packing.unpack_sum(&Device::cpu(), &runs, 0.5, &mut found);
                for (at, found) in found.iter().enumerate() {
                    let exact: f32 = given.iter().map(|values| values[at]).sum::<f32>() * 0.5;
                    // Half a step of each source: their largest values are one, two and three.
                    let near = 0.5 * 0.5 * 6.0 / levels + 1e-5;
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
                packing.unpack_sum(&Device::cpu(), &runs, 1.0, &mut sum);
                let mut again = vec![0; packing.bytes(numel)];
                packing.repack_sum(&Device::cpu(), &runs, numel, &mut again);
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
            packing.repack_sum(&Device::cpu(), &runs, 600, &mut again);
            let mut found = vec![0.0f32; 600];
            packing.unpack_sum(&Device::cpu(), &[&again], 1.0, &mut found);
            assert!(found[3].is_nan(), "{packing:?}");
        }
    }
}
