//! The forms in which files hold weights of few bits: blocks of neighbours along the inputs that share scales. They are GGUF's, and one of ours.

use ferrospeed_tensor::packed::{BLOCK, PackedBits, unpack_file_blocks};
use half::f16;

/// Values of a block of the forms with scales of scales.
const LARGE: usize = 256;

/// A form of blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockForm {
    /// 32 values of 8 bits and a scale.
    Q8_0,
    /// 32 values of 4 bits and a scale.
    Q4_0,
    /// 256 values of 4 bits; each 32 have a scale and an offset of 6 bits, which two numbers scale.
    Q4K,
    /// 256 values of 6 bits; each 16 have a scale of 8 bits, which one number scales.
    Q6K,
    /// 32 floats of 8 bits and a scale.
    Float8,
}

impl BlockForm {
    /// All of them.
    pub(super) const ALL: [BlockForm; 5] =
        [BlockForm::Q8_0, BlockForm::Q4_0, BlockForm::Q4K, BlockForm::Q6K, BlockForm::Float8];

    /// The form of a stored tensor, where its name says one.
    pub fn of_tensor(name: &str) -> Option<BlockForm> {
        BlockForm::ALL.into_iter().find(|form| name.ends_with(form.suffix()))
    }

    /// The name of the form.
    pub fn name(self) -> &'static str {
        match self {
            BlockForm::Q8_0 => PackedBits::Eight.name(),
            BlockForm::Q4_0 => PackedBits::Four.name(),
            BlockForm::Float8 => PackedBits::Float8.name(),
            BlockForm::Q4K | BlockForm::Q6K => &self.suffix()[1..],
        }
    }

    /// What stands behind the name of a tensor of this form.
    pub(crate) fn suffix(self) -> &'static str {
        match self {
            BlockForm::Q8_0 => ".q8_0",
            BlockForm::Q4_0 => ".q4_0",
            BlockForm::Q4K => ".q4_k",
            BlockForm::Q6K => ".q6_k",
            BlockForm::Float8 => ".f8_e4m3",
        }
    }

    /// Values of a block.
    pub(crate) fn values(self) -> usize {
        match self {
            BlockForm::Q8_0 | BlockForm::Q4_0 | BlockForm::Float8 => BLOCK,
            BlockForm::Q4K | BlockForm::Q6K => LARGE,
        }
    }

    /// Bytes of a block.
    pub(crate) fn bytes(self) -> usize {
        match self {
            BlockForm::Q8_0 => PackedBits::Eight.file_block_bytes(),
            BlockForm::Q4_0 => PackedBits::Four.file_block_bytes(),
            BlockForm::Float8 => PackedBits::Float8.file_block_bytes(),
            BlockForm::Q4K => 4 + 12 + LARGE / 2,
            BlockForm::Q6K => LARGE / 2 + LARGE / 4 + LARGE / 16 + 2,
        }
    }

    /// The bits in which products hold such a weight. The large blocks are brought into eight: what that rounds is as small as
    /// what bf16 would.
    pub fn held_in(self) -> PackedBits {
        match self {
            BlockForm::Q4_0 => PackedBits::Four,
            BlockForm::Float8 => PackedBits::Float8,
            BlockForm::Q8_0 | BlockForm::Q4K | BlockForm::Q6K => PackedBits::Eight,
        }
    }

    /// The form that holds such bits as they are.
    pub(crate) fn of_bits(bits: PackedBits) -> BlockForm {
        match bits {
            PackedBits::Eight => BlockForm::Q8_0,
            PackedBits::Four => BlockForm::Q4_0,
            PackedBits::Float8 => BlockForm::Float8,
        }
    }

    /// The values of whole blocks.
    pub(super) fn unpack(self, bytes: &[u8], out: &mut [f32]) {
        let blocks = || bytes.chunks_exact(self.bytes());
        match self {
            BlockForm::Q8_0 => unpack_file_blocks(PackedBits::Eight, bytes, out),
            BlockForm::Q4_0 => unpack_file_blocks(PackedBits::Four, bytes, out),
            BlockForm::Float8 => unpack_file_blocks(PackedBits::Float8, bytes, out),
            BlockForm::Q4K => blocks().zip(out.chunks_mut(LARGE)).for_each(|(block, out)| four_k(block, out)),
            BlockForm::Q6K => blocks().zip(out.chunks_mut(LARGE)).for_each(|(block, out)| six_k(block, out)),
        }
    }
}

fn half_at(bytes: &[u8], place: usize) -> f32 {
    f16::from_le_bytes([bytes[place], bytes[place + 1]]).to_f32()
}

fn four_k(block: &[u8], out: &mut [f32]) {
    let (scale, offset) = (half_at(block, 0), half_at(block, 2));
    let (steps, values) = (&block[4..16], &block[16..]);
    for (group, out) in out.chunks_mut(BLOCK).enumerate() {
        // Of the last four groups each has its low four bits in a byte of its own and the upper two above those of the first.
        let [step, least] = match group.checked_sub(4) {
            None => [steps[group] & 63, steps[group + 4] & 63],
            Some(before) => [
                steps[group + 4] & 15 | steps[before] >> 6 << 4,
                steps[group + 4] >> 4 | steps[group] >> 6 << 4,
            ],
        };
        let (step, least) = (scale * f32::from(step), offset * f32::from(least));
        let (values, shift) = (&values[group / 2 * BLOCK..], group % 2 * 4);
        for (value, out) in values.iter().zip(out) {
            *out = step * f32::from(value >> shift & 15) - least;
        }
    }
}

fn six_k(block: &[u8], out: &mut [f32]) {
    let (low, rest) = block.split_at(LARGE / 2);
    let (high, rest) = rest.split_at(LARGE / 4);
    let scale = half_at(rest, LARGE / 16);
    for (group, out) in out.chunks_mut(BLOCK).enumerate() {
        // Halves of 128 values, each of four groups: low bits from two stretches, by nibbles; upper bits from one, by pairs.
        let (half, quarter) = (group / 4, group % 4);
        let low = &low[64 * half + BLOCK * (quarter % 2)..];
        let (low_shift, high_shift) = (quarter / 2 * 4, 2 * quarter);
        for (place, out) in out.iter_mut().enumerate() {
            let value = low[place] >> low_shift & 15 | (high[BLOCK * half + place] >> high_shift & 3) << 4;
            let step = scale * f32::from(rest[8 * half + 2 * quarter + place / 16] as i8);
            *out = step * (f32::from(value) - 32.0);
        }
    }
}
