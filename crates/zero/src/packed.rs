//! Frozen weights that are kept as they travel: int8 with steps (`zero_quantized_nontrainable_weights`).
//!
//! What nobody trains loses its precision once, when it is first loaded, and then takes one byte a value in every rank's
//! part; a gather sends those bytes as they are. Each parameter's part is a run of its own. Vectors, and what stays whole
//! between passes, are few and stay exact. Writing some of a run's values rounds its others once more, so whoever has a
//! whole part writes it whole.

use std::sync::{Arc, Mutex, PoisonError};

use ferrospeed_collective::hops::Run;
use ferrospeed_tensor::{Category, DType, Device, Tensor};

use crate::error::Result;

/// Flat values as packed runs, end to end, in memory of the host.
#[derive(Clone)]
pub(crate) struct Packed {
    runs: Arc<[Placed]>,
    bytes: Arc<Mutex<Tensor>>,
    dtype: DType,
}

/// A run's place among values and among bytes.
struct Placed {
    run: Run,
    start: usize,
    byte: usize,
}

impl Placed {
    fn end(&self) -> usize {
        self.start + self.run.numel
    }

    fn bytes<'a>(&self, all: &'a [u8]) -> &'a [u8] {
        &all[self.byte..self.byte + self.run.packing.bytes(self.run.numel)]
    }

    fn values(&self, all: &[u8], host: &Device) -> Vec<f32> {
        let mut values = vec![0.0f32; self.run.numel];
        self.run.packing.unpack_sum(host, &[self.bytes(all)], 1.0, &mut values);
        values
    }
}

impl Packed {
    /// Packs values, which are these runs end to end.
    pub(crate) fn new(values: &Tensor, runs: &[Run]) -> Result<Packed> {
        let (mut start, mut byte) = (0, 0);
        let mut placed = Vec::with_capacity(runs.len());
        for &run in runs {
            placed.push(Placed { run, start, byte });
            (start, byte) = (start + run.numel, byte + run.packing.bytes(run.numel));
        }
        let device = values.device();
        let bytes = Tensor::zeros_in([byte], DType::U8, device.host(), Category::Parameters)?;
        let packed =
            Packed { runs: placed.into(), bytes: Arc::new(Mutex::new(bytes)), dtype: values.dtype() };
        packed.write(0, values)?;
        Ok(packed)
    }

    /// The runs that hold any of these values.
    fn touched(&self, start: usize, len: usize) -> impl Iterator<Item = &Placed> {
        let first = self.runs.partition_point(|placed| placed.end() <= start);
        self.runs[first..].iter().take_while(move |placed| placed.start < start + len)
    }

    /// Some of the values, in the type that kernels read.
    pub(crate) fn read(&self, start: usize, len: usize) -> Result<Tensor> {
        let bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        let all = bytes.host::<u8>()?;
        let mut found = vec![0.0f32; len];
        for placed in self.touched(start, len) {
            let (from, to) = (placed.start.max(start), placed.end().min(start + len));
            let values = placed.values(all, bytes.device());
            found[from - start..to - start].copy_from_slice(&values[from - placed.start..to - placed.start]);
        }
        let found = Tensor::from_slice(&found, [len], bytes.device())?;
        Ok(ferrospeed_tensor::ops::cast(&found, self.dtype)?)
    }

    /// Replaces some of the values.
    pub(crate) fn write(&self, start: usize, values: &Tensor) -> Result<()> {
        let (new, len) = (values.to_vec_f32()?, values.numel());
        let bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the lock is held, and nobody reaches these bytes without it.
        let all = unsafe { bytes.host_mut::<u8>()? };
        for placed in self.touched(start, len) {
            let (from, to) = (placed.start.max(start), placed.end().min(start + len));
            let mut run = placed.values(all, bytes.device());
            run[from - placed.start..to - placed.start].copy_from_slice(&new[from - start..to - start]);
            let range = placed.byte..placed.byte + placed.run.packing.bytes(placed.run.numel);
            placed.run.packing.pack(bytes.device(), &run, &mut all[range]);
        }
        Ok(())
    }

    /// The run that begins at a value, as it travels.
    pub(crate) fn message(&self, start: usize, len: usize) -> Result<Option<Tensor>> {
        let bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        let found = self.touched(start, len).find(|placed| placed.start == start && placed.run.numel == len);
        let Some(placed) = found else { return Ok(None) };
        let run = placed.bytes(bytes.host::<u8>()?);
        Ok(Some(Tensor::from_slice(run, [run.len()], bytes.device())?))
    }
}

#[cfg(test)]
mod tests {
    use ferrospeed_collective::packing::Packing;
    use half::bf16;

    use super::*;

    #[test]
    fn values_come_back_rounded_once_and_can_be_replaced() {
        let given: Vec<bf16> = (0..5000).map(|i| bf16::from_f32((i as f32 * 0.37).sin())).collect();
        let tensor =
            |values: &[bf16]| Tensor::from_slice(values, [values.len()], &ferrospeed_cpu::device()).unwrap();
        let runs = [(3000, Packing::Eight), (7, Packing::Exact), (1993, Packing::Eight)]
            .map(|(numel, packing)| Run { numel, packing });
        let packed = Packed::new(&tensor(&given), &runs).unwrap();
        let all = packed.read(0, 5000).unwrap().to_vec_f32().unwrap();
        for (at, (given, found)) in given.iter().zip(&all).enumerate() {
            let near = if (3000..3007).contains(&at) { 0.0 } else { 0.012 };
            assert!((given.to_f32() - found).abs() <= near, "{at}: {given} {found}");
        }
        assert_eq!(packed.read(2990, 30).unwrap().to_vec_f32().unwrap(), all[2990..3020]);
        // What travels is what is kept.
        let mut sent = vec![0.0f32; 3000];
        let message = packed.message(0, 3000).unwrap().unwrap();
        Packing::Eight.unpack_sum(
            &ferrospeed_cpu::device(),
            &[message.host::<u8>().unwrap()],
            1.0,
            &mut sent,
        );
        let sent: Vec<f32> = sent.into_iter().map(|value| bf16::from_f32(value).to_f32()).collect();
        assert_eq!(sent, all[..3000]);
        packed.write(3002, &tensor(&[bf16::from_f32(5.0); 4])).unwrap();
        let found = packed.read(3000, 7).unwrap().to_vec_f32().unwrap();
        assert_eq!((found[2..6].to_vec(), found[0]), (vec![5.0; 4], all[3000]));
        assert_eq!(packed.read(0, 3000).unwrap().to_vec_f32().unwrap(), all[..3000]);
    }
}
