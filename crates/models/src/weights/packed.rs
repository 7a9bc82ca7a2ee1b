//! Weights of 8 or 4 bits in files: `NAME.q8_0` or `NAME.q4_0` in place of `NAME`, bytes `[outputs, blocks, bytes of a block]`.

use std::ops::Range;

use ferrospeed_tensor::packed::{BLOCK, PackedBits, unpack_file_blocks};
use ferrospeed_tensor::{DType, Param};

use crate::error::{ModelError, Result};
use crate::weights::read::{StoredTensor, WeightFiles};

const SUFFIXES: [(&str, PackedBits); 2] = [(".q8_0", PackedBits::Eight), (".q4_0", PackedBits::Four)];

/// The name under which a weight of so many bits is stored.
pub(crate) fn packed_name(name: &str, bits: PackedBits) -> String {
    let suffix = SUFFIXES.iter().find(|(_, of)| *of == bits).map_or("", |(suffix, _)| suffix);
    format!("{name}{suffix}")
}

/// The shape of a weight `[outputs, inputs]` in a file.
pub(crate) fn packed_shape(shape: &[usize], bits: PackedBits) -> Option<Vec<usize>> {
    match shape {
        &[outputs, inputs] if inputs.is_multiple_of(BLOCK) => {
            Some(vec![outputs, inputs / BLOCK, bits.file_block_bytes()])
        }
        _ => None,
    }
}

impl WeightFiles {
    /// How a parameter is stored, where it is stored in few bits.
    pub fn packed(&self, param: &Param) -> Option<PackedBits> {
        self.find_packed(param.name()).map(|(_, bits)| bits)
    }

    /// The type in which a parameter is stored whole.
    pub(crate) fn dtype_of(&self, param: &Param) -> Option<DType> {
        self.find(param.name()).map(|found| found.own.dtype)
    }

    pub(super) fn find_packed(&self, name: &str) -> Option<(&StoredTensor, PackedBits)> {
        SUFFIXES.iter().find_map(|&(suffix, bits)| Some((self.find(&format!("{name}{suffix}"))?.whole, bits)))
    }

    /// Whether a stored tensor is that of a packed weight of this shape.
    pub(super) fn is_packed_of(stored: &StoredTensor, bits: PackedBits, shape: &[usize]) -> bool {
        stored.dtype == DType::U8 && packed_shape(shape, bits).is_some_and(|shape| shape == stored.shape)
    }

    /// Elements `range` of a packed weight.
    pub(super) fn packed_floats(
        &self,
        stored: &StoredTensor,
        bits: PackedBits,
        range: Range<usize>,
        out: &mut [f32],
    ) -> Result<()> {
        let bytes_each = bits.file_block_bytes();
        let blocks = range.start / BLOCK..range.end.div_ceil(BLOCK);
        if blocks.end * bytes_each > stored.size_bytes() || range.len() != out.len() {
            let why =
                format!("elements {range:?} were asked for of a packed tensor of {}", stored.size_bytes());
            return Err(ModelError::config("packed weight", why));
        }
        let mut bytes = vec![0; blocks.len() * bytes_each];
        self.read_bytes(stored, blocks.start * bytes_each, &mut bytes)?;
        let mut values = vec![0.0; blocks.len() * BLOCK];
        unpack_file_blocks(bits, &bytes, &mut values);
        let first = range.start - blocks.start * BLOCK;
        out.copy_from_slice(&values[first..first + out.len()]);
        Ok(())
    }
}
