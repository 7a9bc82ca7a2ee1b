//! Products of more rows than [`few_rows`] takes, with what stands behind them, as one kernel of Hopper (`kernels/some_rows.cu`), for
//! types of 16 bits.

use std::mem::MaybeUninit;

use cudarc::driver::sys;
use ferrospeed_tensor::{DType, Result};

use crate::compile::Shared;
use crate::driver::Checked;
use crate::elementwise::activation_number;
use crate::few_rows::{self, MOST_SIDES, Product, Sides};
use crate::{CudaBackend, Kernel, Source, launch, real};

const OP: &str = "some_rows";
/// The most rows that the kernel takes, and has room for. With 64 of them models of 4096 channels were slower than by cuBLASLt.
pub(super) const MOST_ROWS: usize = 32;
/// The only devices that have its instructions.
const CAPABILITY: (i32, i32) = (9, 0);
const THREADS: u32 = 288;
/// Outputs of a tile; of a gated pair, of both together.
const TILE_OUTPUTS: usize = 128;
/// Inputs of a stage: a row of them has 128 bytes.
const PART: u32 = 64;
const PART_BYTES: usize = PART as usize * 2;
const WEIGHT_BYTES: usize = TILE_OUTPUTS * PART_BYTES;
const STAGE_BYTES: usize = WEIGHT_BYTES + MOST_ROWS * PART_BYTES;
/// What the kernel is told of it.
pub(super) const SHARED: Shared =
    &[("MOST_SIDES", MOST_SIDES), ("ROWS", MOST_ROWS), ("OUTPUTS", TILE_OUTPUTS), ("PART", PART as usize)];
/// Stages lie at multiples of this.
const ALIGNMENT: usize = 1024;

/// Matches the kernel's.
#[repr(C, align(64))]
#[derive(Debug, Clone, Copy)]
struct Map([u64; 16]);

/// Matches the kernel's.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Rows {
    x: Map,
    residual: u64,
    inputs: u64,
    rows: u32,
    activation: i32,
    gated: i32,
}

/// How many blocks share a multiprocessor, and with that how many share a tile. By the weight alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Room {
    /// Few tiles, each by four blocks with all of the shared memory.
    One,
    /// Many tiles, each by one block.
    Two,
    /// In between: four blocks to a tile, of which a multiprocessor holds three.
    Three,
}

impl Room {
    fn of(tiles: usize, inputs: usize, multiprocessors: usize) -> Room {
        let is_shared = inputs >= 4 * PART as usize && 2 * tiles < 3 * multiprocessors;
        match is_shared {
            false => Room::Two,
            true if tiles * 4 <= multiprocessors => Room::One,
            true => Room::Three,
        }
    }

    fn define(self) -> &'static str {
        match self {
            Room::One => "ROOM=1",
            Room::Two => "ROOM=2",
            Room::Three => "ROOM=3",
        }
    }

    fn blocks_to_a_tile(self) -> usize {
        if self == Room::Two { 1 } else { 4 }
    }

    /// Matches the kernel's.
    fn stages(self) -> usize {
        match self {
            Room::One => 8,
            Room::Two => 110_000 / STAGE_BYTES,
            Room::Three => 74_000 / STAGE_BYTES,
        }
    }
}

/// How the copying unit finds boxes of 64 inputs by `rows_at_once` in a matrix `[rows, inputs]`. What is beyond it is zero.
fn map(dtype: DType, address: u64, inputs: usize, rows: usize, rows_at_once: usize) -> Result<Map> {
    use sys::CUtensorMapDataType_enum as Type;
    let kind = match dtype {
        DType::F16 => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        _ => Type::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    };
    let mut map = MaybeUninit::<sys::CUtensorMap>::zeroed();
    // SAFETY: all pointers lead to arrays of the two dimensions that are announced (one stride less), and the map is written here
    // alone; the matrix is only described.
    unsafe {
        sys::cuTensorMapEncodeTiled(
            map.as_mut_ptr(),
            kind,
            2,
            address as *mut _,
            [inputs as u64, rows as u64].as_ptr(),
            [2 * inputs as u64].as_ptr(),
            [PART, rows_at_once as u32].as_ptr(),
            [1, 1].as_ptr(),
            sys::CUtensorMapInterleave_enum::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle_enum::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion_enum::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            sys::CUtensorMapFloatOOBfill_enum::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    }
    .result()
    .during("describe a matrix")?;
    // SAFETY: zero is a valid map to Rust, and the call has written it.
    Ok(Map(unsafe { map.assume_init() }.opaque))
}

/// The most rows that the kernel takes of a type.
pub(super) fn most_rows(backend: &CudaBackend, dtype: DType) -> usize {
    let knows = matches!(dtype, DType::BF16 | DType::F16) && backend.driver.capability == CAPABILITY;
    if knows { MOST_ROWS } else { 0 }
}

/// Whether the kernel computes it.
pub(super) fn takes(backend: &CudaBackend, product: &Product<'_>) -> bool {
    let is_aligned = |address: u64| address.is_multiple_of(16);
    (few_rows::MOST_ROWS + 1..=most_rows(backend, product.dtype)).contains(&product.rows)
        && (1..=MOST_SIDES).contains(&product.sides.len())
        && product.norm.is_none()
        && product.inputs > 0
        && product.inputs.is_multiple_of(8)
        && is_aligned(product.x)
        && product.sides.iter().all(|side| is_aligned(side.weight) && side.outputs.is_multiple_of(4))
}

/// Runs what [`takes`] has said yes to.
pub(super) fn run(backend: &CudaBackend, product: &Product<'_>) -> Result<()> {
    let Product { dtype, rows, inputs, .. } = *product;
    let (sides, tiles) = Sides::of(product, TILE_OUTPUTS, Map([0; 16]), |side| {
        map(dtype, side.weight, inputs, side.outputs, TILE_OUTPUTS / 2)
    })?;
    let told = Rows {
        x: map(dtype, product.x, inputs, rows, MOST_ROWS)?,
        residual: product.residual,
        inputs: inputs as u64,
        rows: rows as u32,
        activation: product.activation.map_or(-1, activation_number),
        gated: i32::from(product.gated),
    };
    let room = Room::of(tiles, inputs, backend.driver.multiprocessors as usize);
    launch!(
        overlapping backend,
        Kernel { source: Source::SomeRows, defines: [real(OP, dtype)?, room.define(), ""], name: "some_rows" },
        [(tiles * room.blocks_to_a_tile()) as u32, 1, 1],
        [THREADS, 1, 1],
        (room.stages() * STAGE_BYTES + ALIGNMENT) as u32,
        sides,
        told
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_fit_where_the_stages_were() {
        for room in [Room::One, Room::Two, Room::Three] {
            let sums = MOST_ROWS * (TILE_OUTPUTS + 4) * size_of::<f32>();
            let bytes = room.stages() * STAGE_BYTES;
            assert!(sums <= bytes && bytes + ALIGNMENT <= 227 << 10, "{room:?}: {bytes}");
        }
    }

    #[test]
    fn who_shares_a_tile_follows_from_the_weight() {
        assert_eq!(Room::of(16, 2048, 132), Room::One);
        assert_eq!(Room::of(88, 2048, 132), Room::Three);
        assert_eq!(Room::of(250, 2048, 132), Room::Two);
        assert_eq!(Room::of(16, 128, 132), Room::Two);
    }
}
