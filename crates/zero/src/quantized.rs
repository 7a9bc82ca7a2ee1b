//! Weights on the wire as int8 (Wang et al.: "ZeRO++: extremely efficient collective communication for giant model
//! training", 2023: qwZ).
//!
//! Each rank quantises its part of a parameter, ranks gather integers and steps, and every rank dequantises all parts, its
//! own included, so that all compute with the same weights. What a rank keeps is not rounded: errors do not add up. Groups
//! are small beside DeepSpeed's, which costs a fifth of a percent and loses less.

use ferrospeed_collective::packing::Packing;
use ferrospeed_tensor::backend::Runs;
use ferrospeed_tensor::dtype::Float;
use ferrospeed_tensor::{Category, DType, Device, Out, Tensor};
use half::{bf16, f16};

use crate::error::Result;
use crate::home::moved_to;
use crate::memory::part;

/// A part as it travels, where it lies: on a device that packs such, or on the host.
pub(crate) fn quantized(own: &Tensor) -> Result<Tensor> {
    let device = own.device();
    if !device.backend().is_host() {
        let mut message = Tensor::empty_in([bytes_of(own.numel())], DType::U8, device, Category::Buffers)?;
        if device.backend().pack_run(Packing::Eight.form(), own, message.out()?, 0)? {
            return Ok(message);
        }
        return moved_to(quantized(&moved_to(own.clone(), device.host())?)?, device);
    }
    match own.dtype() {
        DType::BF16 => message(own.device(), own.host::<bf16>()?),
        DType::F16 => message(own.device(), own.host::<f16>()?),
        _ => message(own.device(), own.host::<f32>()?),
    }
}

/// Bytes of a message about so many values.
pub(crate) fn bytes_of(numel: usize) -> usize {
    Packing::Eight.bytes(numel)
}

fn message<T: Float>(device: &Device, own: &[T]) -> Result<Tensor> {
    let message = Tensor::empty_in([bytes_of(own.len())], DType::U8, device, Category::Buffers)?;
    // SAFETY: it was just made, and nobody else has it.
    Packing::Eight.pack(device, own, unsafe { message.host_mut::<u8>()? });
    Ok(message)
}

/// Makes `value` what arrived from all ranks, of whom each sent `share` elements.
pub(crate) fn dequantize(arrived: &Tensor, share: usize, value: &Tensor) -> Result<()> {
    let device = value.device();
    if device.backend().is_host() {
        return on_host(arrived, share, value);
    }
    if !arrived.device().backend().is_host() {
        if on_device(arrived, share, value)? {
            return Ok(());
        }
        return dequantize(&moved_to(arrived.clone(), device.host())?, share, value);
    }
    let landing = Tensor::empty_in(*value.shape(), value.dtype(), device.host(), Category::Buffers)?;
    on_host(arrived, share, &landing)?;
    Ok(device.backend().cast(&moved_to(landing, device)?, Out::of_device(value)?)?)
}

/// The same by the device that has both; `false` where it cannot.
fn on_device(arrived: &Tensor, share: usize, value: &Tensor) -> Result<bool> {
    let stride = bytes_of(share);
    for rank in 0..arrived.numel() / stride.max(1) {
        let runs = Runs { bytes: arrived, first: rank * stride, stride, count: 1 };
        let place = part(value, rank * share, share)?;
        let (form, out) = (Packing::Eight.form(), Out::of_device(&place)?);
        if !value.device().backend().unpack_sum(form, runs, 1.0, out)? {
            return Ok(false);
        }
    }
    Ok(true)
}

fn on_host(arrived: &Tensor, share: usize, value: &Tensor) -> Result<()> {
    for (rank, message) in arrived.host::<u8>()?.chunks_exact(bytes_of(share).max(1)).enumerate() {
        let place = part(value, rank * share, share)?;
        // SAFETY: the value was made for this gather, and nobody has it before it is whole.
        unsafe {
            match value.dtype() {
                DType::BF16 => {
                    Packing::Eight.unpack_sum(value.device(), &[message], 1.0, place.host_mut::<bf16>()?)
                }
                DType::F16 => {
                    Packing::Eight.unpack_sum(value.device(), &[message], 1.0, place.host_mut::<f16>()?)
                }
                _ => Packing::Eight.unpack_sum(value.device(), &[message], 1.0, place.host_mut::<f32>()?),
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
        for share in [1, 7, 2048, 3 * 2048 + 5] {
            let given: Vec<bf16> = (0..2 * share).map(|i| bf16::from_f32((i as f32 * 0.37).sin())).collect();
            let own = |rank: usize| {
                let part = &given[rank * share..(rank + 1) * share];
                quantized(&Tensor::from_slice(part, [share], &ferrospeed_cpu::device()).unwrap()).unwrap()
            };
            let arrived: Vec<u8> = (0..2).flat_map(|rank| own(rank).to_vec::<u8>().unwrap()).collect();
            let arrived = Tensor::from_slice(&arrived, [arrived.len()], &ferrospeed_cpu::device()).unwrap();
            let value =
                Tensor::zeros_in([2 * share], DType::BF16, &ferrospeed_cpu::device(), Category::Buffers)
                    .unwrap();
            dequantize(&arrived, share, &value).unwrap();
            for (given, found) in given.iter().zip(value.to_vec_f32().unwrap()) {
                assert!((given.to_f32() - found).abs() < 0.013, "{share}: {given} {found}");
            }
        }
    }
}
