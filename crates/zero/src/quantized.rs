//! Weights on the wire as int8 (Wang et al.: "ZeRO++: extremely efficient collective communication for giant model
//! training", 2023: qwZ).
//!
//! Each rank quantises its part of a parameter, ranks gather integers and steps, and every rank dequantises all parts, its
//! own included, so that all compute with the same weights. What a rank keeps is not rounded: errors do not add up. Groups
//! are small beside DeepSpeed's, which costs a fifth of a percent and loses less.

use ferrospeed_tensor::cpu::quantize::{Bits, Format, Quantized};
use ferrospeed_tensor::dtype::Float;
use ferrospeed_tensor::{Category, DType, Device, Tensor};
use half::{bf16, f16};

use crate::error::Result;
use crate::home::moved_to;
use crate::memory::part;

const FORMAT: Format = Format { bits: Bits::Eight, symmetric: true };
/// Elements that share a step.
const GROUP: usize = 2048;

/// Bytes of steps before the integers of so many elements.
fn step_bytes(numel: usize) -> usize {
    FORMAT.params_len(numel, GROUP) * size_of::<f32>()
}

/// Bytes that a part of so many elements travels in.
pub(crate) fn message_bytes(numel: usize) -> usize {
    step_bytes(numel) + FORMAT.packed_len(numel)
}

/// A part of the host as it travels.
pub(crate) fn quantized(own: &Tensor) -> Result<Tensor> {
    match own.dtype() {
        DType::BF16 => message(own.host::<bf16>()?),
        DType::F16 => message(own.host::<f16>()?),
        _ => message(own.host::<f32>()?),
    }
}

fn message<T: Float>(own: &[T]) -> Result<Tensor> {
    let mut bytes = vec![0u8; message_bytes(own.len())];
    let mut steps = vec![0.0f32; FORMAT.params_len(own.len(), GROUP)];
    let (head, packed) = bytes.split_at_mut(step_bytes(own.len()));
    FORMAT.quantize(own, GROUP, packed, &mut steps);
    for (place, step) in head.chunks_exact_mut(size_of::<f32>()).zip(&steps) {
        place.copy_from_slice(&step.to_le_bytes());
    }
    Ok(Tensor::from_slice(&bytes, [bytes.len()], &Device::cpu())?)
}

/// Makes `value` what arrived from all ranks, of whom each sent `share` elements.
pub(crate) fn dequantize(arrived: &Tensor, share: usize, value: &Tensor) -> Result<()> {
    let device = value.device();
    if device.backend().is_host() {
        return on_host(arrived, share, value);
    }
    let landing = Tensor::empty_in(*value.shape(), value.dtype(), &Device::cpu(), Category::Buffers)?;
    on_host(arrived, share, &landing)?;
    Ok(device.backend().cast(&moved_to(landing, device)?, value)?)
}

fn on_host(arrived: &Tensor, share: usize, value: &Tensor) -> Result<()> {
    for (rank, message) in arrived.host::<u8>()?.chunks_exact(message_bytes(share).max(1)).enumerate() {
        let (head, packed) = message.split_at(step_bytes(share));
        let steps = head.chunks_exact(size_of::<f32>());
        let steps: Vec<f32> =
            steps.map(|step| f32::from_le_bytes(step.try_into().expect("four bytes"))).collect();
        let (source, place) = (Quantized { packed, params: &steps }, part(value, rank * share, share)?);
        // SAFETY: the value was made for this gather, and nobody has it before it is whole.
        unsafe {
            match value.dtype() {
                DType::BF16 => FORMAT.dequantize(source, GROUP, place.host_mut::<bf16>()?),
                DType::F16 => FORMAT.dequantize(source, GROUP, place.host_mut::<f16>()?),
                _ => FORMAT.dequantize(source, GROUP, place.host_mut::<f32>()?),
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_all_ranks_come_back_within_a_step_of_their_groups() {
        for share in [1, 7, GROUP, 3 * GROUP + 5] {
            let given: Vec<bf16> = (0..2 * share).map(|i| bf16::from_f32((i as f32 * 0.37).sin())).collect();
            let own = |rank: usize| {
                let part = &given[rank * share..(rank + 1) * share];
                quantized(&Tensor::from_slice(part, [share], &Device::cpu()).unwrap()).unwrap()
            };
            let arrived: Vec<u8> = (0..2).flat_map(|rank| own(rank).to_vec::<u8>().unwrap()).collect();
            let arrived = Tensor::from_slice(&arrived, [arrived.len()], &Device::cpu()).unwrap();
            let value =
                Tensor::zeros_in([2 * share], DType::BF16, &Device::cpu(), Category::Buffers).unwrap();
            dequantize(&arrived, share, &value).unwrap();
            for (given, found) in given.iter().zip(value.to_vec_f32().unwrap()) {
                assert!((given.to_f32() - found).abs() < 0.013, "{share}: {given} {found}");
            }
        }
    }
}
