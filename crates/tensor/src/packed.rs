//! Weights of 8 or 4 bits: 32 neighbours along the inputs share a scale.
//!
//! The form is that of GGUF's `Q8_0` and `Q4_0`: a scale in 16 bits for each block, and values that it multiplies, from -127
//! to 127, or from -8 to 7 with the sign of the scale such that the largest magnitude is -8; or floats of eight bits, for GPUs
//! that multiply such (e4m3: Micikevicius et al., "FP8 formats for deep learning", 2022; `packed/float8.rs`). In memory the blocks of sixteen rows
//! are woven into each other, four values of each row at a time, as products want them. These read the packed bytes once
//! ([`Products::gemm_packed`](crate::backend::PackedProducts::gemm_packed)); everything else gets the weights back in full.

mod float8;

use std::sync::OnceLock;

use half::f16;

use crate::backend::Device;
use crate::dtype::{DType, Float};
use crate::error::{Result, TensorError};
use crate::memory::Category;
use crate::ops::WeightLayout;
use crate::param::Param;
use crate::store::ParamSource;
use crate::tensor::Tensor;

/// Values that are rounded at a time, about.
const ROUNDED_AT_ONCE: usize = 1 << 20;

/// Weights that share a scale.
pub const BLOCK: usize = 32;
/// Rows whose weights lie in one line.
pub const GROUP: usize = 16;
/// Bytes of a line: four neighbours along the inputs for each row of a group.
pub const LINE: usize = 4 * GROUP;

/// Bytes that kernels read at once, at a place that begins a line of the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
struct Line([u8; LINE]);

/// How a parameter is packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packing {
    /// To how many bits.
    pub bits: PackedBits,
    /// How the parameter itself lies; packed it is always `[outputs, inputs]`.
    pub layout: WeightLayout,
}

/// How many bits a weight has, its scale not counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PackedBits {
    /// A byte for each weight.
    Eight,
    /// A byte for two: those 16 apart in a block.
    Four,
    /// A byte for each weight, which is a float: a sign, four bits of exponent, three of fraction.
    Float8,
}

impl PackedBits {
    /// Bytes of a block's values.
    #[inline]
    pub fn block_bytes(self) -> usize {
        match self {
            PackedBits::Eight | PackedBits::Float8 => BLOCK,
            PackedBits::Four => BLOCK / 2,
        }
    }

    /// Bytes of a block in a file, its scale included.
    pub fn file_block_bytes(self) -> usize {
        2 + self.block_bytes()
    }

    /// Lines of a block.
    #[inline]
    pub fn lines(self) -> usize {
        self.block_bytes() / 4
    }

    /// What turns the bytes of files into unsigned values.
    fn sign(self) -> u8 {
        match self {
            PackedBits::Eight => 0x80,
            PackedBits::Four | PackedBits::Float8 => 0,
        }
    }

    /// What stands for a weight of zero where values are unsigned.
    #[inline]
    pub fn zero(self) -> i32 {
        match self {
            PackedBits::Eight => 128,
            PackedBits::Four => 8,
            PackedBits::Float8 => 0,
        }
    }

    /// By the name that users write.
    pub fn by_name(name: &str) -> Option<PackedBits> {
        match name {
            "int8" => Some(PackedBits::Eight),
            "int4" => Some(PackedBits::Four),
            "fp8" => Some(PackedBits::Float8),
            _ => None,
        }
    }

    /// The name that users write.
    pub fn name(self) -> &'static str {
        match self {
            PackedBits::Eight => "int8",
            PackedBits::Four => "int4",
            PackedBits::Float8 => "fp8",
        }
    }
}

/// A weight `[outputs, inputs]` in few bits.
#[derive(Debug, Clone, PartialEq)]
pub struct PackedWeight {
    bits: PackedBits,
    outputs: usize,
    inputs: usize,
    /// `[group][block][line]`; of four bits a byte holds the values of a line and of that half a block later. Unsigned.
    lines: Vec<Line>,
    /// `[group][block][row of the group]`.
    scales: Vec<f16>,
    on_device: OnDevice,
}

/// Lines and scales in the memory of a device that is no host; two weights are the same with and without.
#[derive(Default)]
struct OnDevice(OnceLock<[Tensor; 2]>);

impl Clone for OnDevice {
    fn clone(&self) -> OnDevice {
        OnDevice::default()
    }
}

impl PartialEq for OnDevice {
    fn eq(&self, _other: &OnDevice) -> bool {
        true
    }
}

impl std::fmt::Debug for OnDevice {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{:?}", self.0.get())
    }
}

impl PackedWeight {
    /// Room for a weight; rows are then written one by one.
    pub fn new(bits: PackedBits, outputs: usize, inputs: usize) -> Result<PackedWeight> {
        if inputs == 0 || !inputs.is_multiple_of(BLOCK) {
            let what = format!("{inputs} inputs are not cut into blocks of {BLOCK}");
            return Err(TensorError::argument("packed weight", what));
        }
        let blocks = outputs.div_ceil(GROUP) * inputs / BLOCK;
        let (lines, scales) = (vec![Line([0; LINE]); blocks * bits.lines()], vec![f16::ZERO; blocks * GROUP]);
        Ok(PackedWeight { bits, outputs, inputs, lines, scales, on_device: OnDevice::default() })
    }

    /// A parameter from its source, some rows at a time where it lies as `[outputs, inputs]`.
    pub fn load(param: &Param, packing: Packing, source: &dyn ParamSource) -> Result<PackedWeight> {
        let bits = packing.bits;
        let &[outputs, inputs] = param.shape().sizes() else {
            return Err(TensorError::shape("packed weight", "the weight", *param.shape(), "two dimensions"));
        };
        if let Some(weight) = source.load_packed(param, packing)? {
            return Ok(weight);
        }
        if packing.layout == WeightLayout::InOut {
            return PackedWeight::load_turned(param, bits, [outputs, inputs], source);
        }
        let mut weight = PackedWeight::new(bits, outputs, inputs)?;
        let rows = (ROUNDED_AT_ONCE / inputs).clamp(1, outputs.max(1));
        let mut values = vec![0.0f32; rows * inputs];
        for first in (0..outputs).step_by(rows) {
            let values = &mut values[..rows.min(outputs - first) * inputs];
            let start = first * inputs;
            source.load(param, start..start + values.len(), values)?;
            weight.write_rows(first, values).map_err(|error| of_param(param, error))?;
        }
        Ok(weight)
    }

    fn load_turned(
        param: &Param,
        bits: PackedBits,
        [inputs, outputs]: [usize; 2],
        source: &dyn ParamSource,
    ) -> Result<PackedWeight> {
        let mut weight = PackedWeight::new(bits, outputs, inputs)?;
        let mut values = vec![0.0f32; inputs * outputs];
        source.load(param, 0..values.len(), &mut values)?;
        let mut row = vec![0.0f32; inputs];
        for output in 0..outputs {
            row.iter_mut().enumerate().for_each(|(input, value)| *value = values[input * outputs + output]);
            weight.write_rows(output, &row).map_err(|error| of_param(param, error))?;
        }
        Ok(weight)
    }

    /// Rounds whole rows, from row `first` on, to its bits. What is no number is refused: products would not notice it.
    pub fn write_rows(&mut self, first: usize, rows: &[f32]) -> Result<()> {
        let blocks = self.inputs / BLOCK;
        if !rows.len().is_multiple_of(self.inputs) || first + rows.len() / self.inputs > self.outputs {
            let what = format!("{} values are no rows of {} from {first} on", rows.len(), self.inputs);
            return Err(TensorError::argument("packed weight", what));
        }
        let mut values = [0; BLOCK];
        let values = &mut values[..self.bits.block_bytes()];
        for (index, block) in rows.as_chunks::<BLOCK>().0.iter().enumerate() {
            let scale = match self.bits {
                PackedBits::Eight => pack_eight(block, values),
                PackedBits::Four => pack_four(block, values),
                PackedBits::Float8 => float8::pack(block, values),
            };
            if !scale.is_finite() || block.iter().any(|value| value.is_nan()) {
                let row = first + index / blocks;
                let what = format!(
                    "row {row} has a weight that is no number, or larger than a 16-bit scale reaches"
                );
                return Err(TensorError::argument("packed weight", what));
            }
            self.set_block(first + index / blocks, index % blocks, scale, values);
        }
        Ok(())
    }

    /// The places of a row's block: its scale, its first line, its first byte in each line.
    fn place(&self, row: usize, block: usize) -> [usize; 3] {
        let (blocks, lines) = (self.inputs / BLOCK, self.bits.lines());
        let index = row / GROUP * blocks + block;
        [index * GROUP + row % GROUP, index * lines, 4 * (row % GROUP)]
    }

    /// Takes a block as files have it. Of eight bits they hold signed values, which turning the sign bit makes unsigned.
    fn set_block(&mut self, row: usize, block: usize, scale: f16, values: &[u8]) {
        let [place, line, byte] = self.place(row, block);
        self.scales[place] = scale;
        for (line, four) in self.lines[line..].iter_mut().zip(values.as_chunks::<4>().0) {
            line.0[byte..byte + 4].copy_from_slice(&four.map(|value| value ^ self.bits.sign()));
        }
    }

    /// A block as files have it.
    fn block(&self, row: usize, block: usize, values: &mut [u8]) -> f16 {
        let [place, line, byte] = self.place(row, block);
        for (line, four) in self.lines[line..].iter().zip(values.as_chunks_mut::<4>().0) {
            four.copy_from_slice(&line.0[byte..byte + 4]);
            *four = four.map(|value| value ^ self.bits.sign());
        }
        self.scales[place]
    }

    /// Its lines and its scales in the memory of a device that is no host, copied there by the first call. From then on it is
    /// only read.
    pub fn on(&self, device: &Device) -> Result<&[Tensor; 2]> {
        if let Some(found) = self.on_device.0.get().filter(|[lines, _]| lines.device() == device) {
            return Ok(found);
        }
        let place = |bytes: &[u8], dtype: DType| {
            let mut tensor =
                Tensor::empty_in([bytes.len() / dtype.size_bytes()], dtype, device, Category::Parameters)?;
            device.backend().copy_from_host(bytes, tensor.out()?)?;
            Ok::<_, TensorError>(tensor)
        };
        let lines = place(bytemuck::cast_slice(&self.lines), DType::U8)?;
        let scales = place(bytemuck::cast_slice(&self.scales), DType::F16)?;
        let found = self.on_device.0.get_or_init(|| [lines, scales]);
        match found[0].device() == device {
            true => Ok(found),
            false => Err(TensorError::argument("packed weight", "it is in the memory of another device")),
        }
    }

    /// How many bits.
    pub fn bits(&self) -> PackedBits {
        self.bits
    }

    /// Rows.
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// Columns.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// What it takes.
    pub fn size_bytes(&self) -> usize {
        LINE * self.lines.len() + 2 * self.scales.len()
    }

    /// How many groups of rows there are; the last one may stand for fewer.
    #[inline]
    pub fn groups(&self) -> usize {
        self.outputs.div_ceil(GROUP)
    }

    /// Lines and scales of one group.
    #[inline]
    pub fn group(&self, group: usize) -> (&[u8], &[f16]) {
        let blocks = self.inputs / BLOCK;
        let lines = blocks * self.bits.lines();
        let lines = &self.lines[group * lines..(group + 1) * lines];
        (bytemuck::cast_slice(lines), &self.scales[group * blocks * GROUP..(group + 1) * blocks * GROUP])
    }

    /// One row as it was before, up to rounding.
    pub fn unpack_row(&self, row: usize, out: &mut [f32]) {
        let mut values = [0; BLOCK];
        let values = &mut values[..self.bits.block_bytes()];
        for (block, out) in out.chunks_mut(BLOCK).enumerate() {
            let scale = self.block(row, block, values);
            unpack_block(self.bits, values, scale, out);
        }
    }

    /// From blocks as files hold them. A scale that is not finite is refused: products would not notice it.
    pub fn from_file_bytes(
        bits: PackedBits,
        outputs: usize,
        inputs: usize,
        bytes: &[u8],
    ) -> Result<PackedWeight> {
        let mut weight = PackedWeight::new(bits, outputs, inputs)?;
        let blocks = inputs / BLOCK;
        if bytes.len() != outputs * blocks * bits.file_block_bytes() {
            let what = format!("{} bytes are no blocks of [{outputs}, {inputs}]", bytes.len());
            return Err(TensorError::argument("packed weight", what));
        }
        for (index, block) in bytes.chunks_exact(bits.file_block_bytes()).enumerate() {
            let scale = f16::from_le_bytes([block[0], block[1]]);
            if !scale.is_finite() {
                let what = format!("block {index} of [{outputs}, {inputs}] has a scale that is not finite");
                return Err(TensorError::argument("packed weight", what));
            }
            weight.set_block(index / blocks, index % blocks, scale, &block[2..]);
        }
        Ok(weight)
    }

    /// As files hold it: for each block its scale, then its values.
    pub fn to_file_bytes(&self) -> Vec<u8> {
        let (blocks, size) = (self.inputs / BLOCK, self.bits.file_block_bytes());
        let mut bytes = vec![0; self.outputs * blocks * size];
        for (index, bytes) in bytes.chunks_exact_mut(size).enumerate() {
            let scale = self.block(index / blocks, index % blocks, &mut bytes[2..]);
            bytes[..2].copy_from_slice(&scale.to_le_bytes());
        }
        bytes
    }
}

/// Weights from blocks as files hold them, [`PackedBits::file_block_bytes`] each.
pub fn unpack_file_blocks(bits: PackedBits, bytes: &[u8], out: &mut [f32]) {
    for (block, out) in bytes.chunks_exact(bits.file_block_bytes()).zip(out.chunks_mut(BLOCK)) {
        unpack_block(bits, &block[2..], f16::from_le_bytes([block[0], block[1]]), out);
    }
}

fn unpack_block(bits: PackedBits, values: &[u8], scale: f16, out: &mut [f32]) {
    let scale = scale.widen();
    for (place, out) in out.iter_mut().enumerate() {
        let value = match bits {
            PackedBits::Eight => f32::from(values[place] as i8),
            PackedBits::Four if place < BLOCK / 2 => f32::from(values[place] & 15) - 8.0,
            PackedBits::Four => f32::from(values[place - BLOCK / 2] >> 4) - 8.0,
            PackedBits::Float8 => float8::widen(values[place]),
        };
        *out = value * scale;
    }
}

/// An error that says whose rows it is about.
fn of_param(param: &Param, error: TensorError) -> TensorError {
    TensorError::argument("packed weight", format!("'{}': {error}", param.name()))
}

fn pack_eight(block: &[f32; BLOCK], values: &mut [u8]) -> f16 {
    let largest = block.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
    let scale = f16::from_f32(largest / 127.0);
    let inverse = inverse(scale);
    for (value, weight) in values.iter_mut().zip(block) {
        *value = (weight * inverse).round_ties_even().clamp(-127.0, 127.0) as i8 as u8;
    }
    scale
}

fn pack_four(block: &[f32; BLOCK], values: &mut [u8]) -> f16 {
    let largest = block
        .iter()
        .fold(0.0f32, |largest, &value| if value.abs() > largest.abs() { value } else { largest });
    let scale = f16::from_f32(largest / -8.0);
    let inverse = inverse(scale);
    let steps = |weight: f32| (weight * inverse + 8.0).round_ties_even().clamp(0.0, 15.0) as u8;
    for (place, value) in values.iter_mut().enumerate() {
        *value = steps(block[place]) | steps(block[place + BLOCK / 2]) << 4;
    }
    scale
}

/// A block of nothing, or of less than 16 bits can say, becomes zeros.
fn inverse(scale: f16) -> f32 {
    let wide = scale.widen();
    if wide == 0.0 { 0.0 } else { 1.0 / wide }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::RandomKey;

    fn packed(bits: PackedBits, values: &[f32], inputs: usize) -> PackedWeight {
        let mut weight = PackedWeight::new(bits, values.len() / inputs, inputs).unwrap();
        weight.write_rows(0, values).unwrap();
        weight
    }

    fn unpacked(weight: &PackedWeight) -> Vec<f32> {
        let mut all = vec![0.0; weight.outputs() * weight.inputs()];
        all.chunks_mut(weight.inputs()).enumerate().for_each(|(row, out)| weight.unpack_row(row, out));
        all
    }

    #[test]
    fn weights_come_back_within_half_a_step_and_then_stay() {
        let mut values = vec![0.0f32; 96 * 5];
        RandomKey::new(1, 1).fill_normal(0, &mut values);
        values[32..64].fill(0.0);
        for (bits, steps) in [(PackedBits::Eight, 127.0), (PackedBits::Four, 8.0), (PackedBits::Float8, 14.0)]
        {
            let weight = packed(bits, &values, 96);
            let again = unpacked(&weight);
            for (block, ours) in values.chunks(BLOCK).zip(again.chunks(BLOCK)) {
                let largest = block.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
                // Of four bits the other end reaches a step less far.
                let bound = largest / steps * if bits == PackedBits::Four { 1.01 } else { 0.51 } + 1e-7;
                assert!(
                    block.iter().zip(ours).all(|(a, b)| (a - b).abs() <= bound),
                    "{bits:?} {block:?} {ours:?}"
                );
            }
            assert_eq!(packed(bits, &again, 96), weight, "{bits:?}: what was rounded is not rounded again");
            let mut from_file = vec![0.0; again.len()];
            unpack_file_blocks(bits, &weight.to_file_bytes(), &mut from_file);
            assert_eq!(from_file, again, "{bits:?}: a file says the same");
            let mut bytes = weight.to_file_bytes();
            assert_eq!(PackedWeight::from_file_bytes(bits, 5, 96, &bytes).unwrap(), weight);
            assert!(PackedWeight::from_file_bytes(bits, 4, 96, &bytes).is_err(), "of another shape");
            bytes[1] = 0x7c;
            bytes[0] = 0;
            assert!(PackedWeight::from_file_bytes(bits, 5, 96, &bytes).is_err(), "an infinite scale");
            for bad in [f32::NAN, f32::INFINITY, 1e30] {
                let mut rows = vec![0.5f32; 96];
                rows[40] = bad;
                let error =
                    PackedWeight::new(bits, 5, 96).unwrap().write_rows(3, &rows).unwrap_err().to_string();
                assert!(error.contains("row 3 has a weight that is no number"), "{error}");
            }
        }
    }

    #[test]
    fn a_weight_takes_the_bytes_that_it_says() {
        assert_eq!(PackedWeight::new(PackedBits::Eight, 3, 64).unwrap().size_bytes(), 16 * 2 * 34);
        assert_eq!(PackedWeight::new(PackedBits::Four, 16, 64).unwrap().size_bytes(), 16 * 2 * 18);
        assert!(PackedWeight::new(PackedBits::Four, 3, 40).is_err());
        assert!(PackedWeight::new(PackedBits::Four, 3, 64).unwrap().write_rows(2, &[0.0; 128]).is_err());
    }
}
