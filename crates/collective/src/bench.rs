//! How fast values are packed for the wire and unpacked, beside what a plain copy of them takes.
//!
//! All three are limited by memory; they take turns in one run.

use std::time::Instant;

use ferrospeed_tensor::backend::Runs;
use ferrospeed_tensor::{Category, DType, Device, Out, Tensor};
use half::bf16;

use crate::error::Result;
use crate::packing::Packing;

/// How long the best of several passes took, and how many bytes each reads and writes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PackingSpeed {
    /// Packing.
    pub pack_s: f64,
    /// Unpacking.
    pub unpack_s: f64,
    /// Bytes that each of them reads and writes.
    pub bytes: usize,
    /// A copy of the values.
    pub copy_s: f64,
    /// Bytes that it reads and writes.
    pub copy_bytes: usize,
}

impl PackingSpeed {
    /// Bytes per second of packing and unpacking together.
    pub fn bytes_per_s(&self) -> f64 {
        2.0 * self.bytes as f64 / (self.pack_s + self.unpack_s)
    }

    /// Bytes per second of the copy.
    pub fn copy_bytes_per_s(&self) -> f64 {
        self.copy_bytes as f64 / self.copy_s
    }
}

/// Packs and unpacks so many values of bf16 on a device.
pub fn packing(packing: Packing, numel: usize, repeats: usize, device: &Device) -> Result<PackingSpeed> {
    let values: Vec<bf16> = (0..numel).map(|i| bf16::from_f32((i % 1013) as f32 * 0.01 - 5.0)).collect();
    let given = Tensor::from_slice(&values, [numel], device)?;
    drop(values);
    let bytes = packing.bytes(numel);
    let packed = Tensor::zeros_in([bytes], DType::U8, device, Category::Buffers)?;
    let back = Tensor::zeros_in([numel], DType::BF16, device, Category::Buffers)?;
    let backend = device.backend();
    // SAFETY: these tensors are this function's own, and one pass is over before the next begins.
    let out = |tensor| unsafe { Out::vouched(tensor) };
    let timed = |work: &mut dyn FnMut() -> Result<()>, best: &mut f64| -> Result<()> {
        backend.synchronize()?;
        let begun = Instant::now();
        work()?;
        backend.synchronize()?;
        *best = best.min(begun.elapsed().as_secs_f64());
        Ok(())
    };
    let (mut pack_s, mut unpack_s, mut copy_s) = (f64::INFINITY, f64::INFINITY, f64::INFINITY);
    for _ in 0..repeats.max(1) {
        let mut pack = || {
            if !backend.pack_run(packing.form(), &given, out(&packed), 0)? {
                // SAFETY: as above.
                packing.pack(device, given.host::<bf16>()?, unsafe { packed.host_mut::<u8>()? });
            }
            Ok(())
        };
        timed(&mut pack, &mut pack_s)?;
        let mut unpack = || {
            let runs = Runs { bytes: &packed, first: 0, stride: bytes, count: 1 };
            if !backend.unpack_sum(packing.form(), runs, 1.0, out(&back))? {
                // SAFETY: as above.
                let back = unsafe { back.host_mut::<bf16>()? };
                packing.unpack_sum(device, &[packed.host::<u8>()?], 1.0, back);
            }
            Ok(())
        };
        timed(&mut unpack, &mut unpack_s)?;
        timed(&mut || Ok(backend.copy(&given, out(&back))?), &mut copy_s)?;
    }
    let wide = numel * DType::BF16.size_bytes();
    Ok(PackingSpeed { pack_s, unpack_s, bytes: wide + bytes, copy_s, copy_bytes: 2 * wide })
}
