//! Gradients of attention by kernels for Hopper (`kernels/attention_backward.cu`, with what surrounds it in
//! `kernels/attention_ends.cu`): the same bits every time, in memory that grows with the tokens and not with their square.
//!
//! A block of the device owns some keys, so their gradients have one writer. Gradients of queries have many, in an order that
//! varies, and are therefore summed as integers, whose size is chosen from bounds on what a row's gradient can be.

use std::ops::Range;

use cudarc::driver::sys;
use ferrospeed_tensor::backend::{AttentionSpec, Heads};
use ferrospeed_tensor::{DType, Result, Tensor};

use crate::attention::start;
use crate::compile::Shared;
use crate::cudnn_attention::strides;
use crate::driver::failed;
use crate::{CudaBackend, Kernel, Source, at, launch};

const OP: &str = "attention_backward";
/// The chip whose instructions the kernel is made of; the ones after it lack them.
const CAPABILITY: (i32, i32) = (9, 0);
/// From which driver on (12.0) tensors can be described to the copy engine.
const DRIVER_VERSION: i32 = 12_000;
/// Channels of a head are filled up to the first of these that holds them.
const CHANNELS: [usize; 2] = [64, 128];
/// Keys of a block of the device.
const BLOCK_KEYS: usize = 128;
/// Tiles that are under way.
const STAGES: usize = 2;
/// Threads of a block: one group of warps that copies and two that multiply.
const THREADS: u32 = 384;
/// Threads of the kernels before and after.
const END_THREADS: u32 = 256;
/// The sums of queries' gradients in one go, unless those of one head of keys take more.
const SUMS_BYTES: usize = 1 << 30;

/// Queries of a step of a block.
const fn block_queries(channels: usize) -> usize {
    if channels == 64 { 128 } else { 64 }
}

/// What the kernels are told of it.
pub(super) const SHARED: Shared = &[
    ("BLOCK_N", BLOCK_KEYS),
    ("BLOCK_M_64", block_queries(64)),
    ("BLOCK_M_128", block_queries(128)),
    ("STAGES", STAGES),
];

/// Shared memory of a block, by what the kernel places there.
const fn shared_bytes(channels: usize) -> usize {
    let rows = block_queries(channels);
    let keys_and_values = 2 * BLOCK_KEYS * channels * 2;
    let queries_and_gradients = STAGES * 2 * rows * channels * 2;
    let score_gradients = 2 * rows * BLOCK_KEYS * 2;
    let sums = 2 * 64 * 64 * 4;
    let numbers = STAGES * 3 * rows * 4 + channels * 4;
    let barriers = 8 + 2 * 32;
    // Tiles begin at a multiple of 1,024.
    1024 + keys_and_values + queries_and_gradients + score_gradients + sums + numbers + barriers
}

/// A tensor of heads as the copy engine knows it.
#[repr(C, align(64))]
struct Map(sys::CUtensorMap);

/// Matches `Heads` in attention_ends.cu.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct DeviceHeads {
    start: u64,
    strides: [u64; 3],
}

/// Matches `Problem` in attention_backward.cu.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Problem {
    rows: [u64; 3],
    channels: u64,
    dq: u64,
    gradients: [u64; 2],
    parts: [u64; 2],
    strides: [[u64; 3]; 2],
    heads: u32,
    kv_heads: u32,
    shares: u32,
    queries: u32,
    keys: u32,
    dim: u32,
    padded: u32,
    scale: f32,
    causal: u32,
    window: u32,
}

/// How many sequences and heads of keys are computed at once: all, or as many as keep the sums within [`SUMS_BYTES`].
fn at_once([batch, heads, kv_heads]: [usize; 3], bytes_of_head: usize) -> (usize, usize) {
    let units = (SUMS_BYTES / (heads / kv_heads * bytes_of_head)).max(1);
    ((units / kv_heads).clamp(1, batch), units.min(kv_heads))
}

/// Among how many blocks the query heads of a head of keys are shared out: so many that the device is busy, each then leaving a
/// part of the keys' gradients in memory.
fn shares(blocks: usize, group: usize, multiprocessors: usize) -> usize {
    let enough = |&shares: &usize| group.is_multiple_of(shares) && 2 * blocks * shares >= 3 * multiprocessors;
    (1..=group).find(enough).unwrap_or(group)
}

/// Whether the kernel computes a case on this device.
fn covers(backend: &CudaBackend, spec: &AttentionSpec<'_>, heads: &[&Heads<'_>]) -> bool {
    let plain = spec.key_mask.is_none()
        && spec.alibi_slopes.is_none()
        && spec.dropout.is_none()
        && spec.documents.is_none()
        && spec.blocks.is_none()
        && spec.key_bias.is_none()
        && spec.score_bias.is_none();
    let square = spec.queries == spec.keys && spec.shift() == 0;
    let shaped = spec.dim.is_multiple_of(8)
        && spec.dim <= CHANNELS[1]
        && (square || !spec.causal)
        && (spec.causal || spec.window.is_none_or(|window| window >= spec.keys))
        && spec.queries.max(spec.keys) < 1 << 30
        && spec.batch.max(spec.heads) < 1 << 16;
    let laid_out = heads.iter().all(|heads| {
        matches!(heads.tensor.dtype(), DType::BF16 | DType::F16)
            && start(heads).is_multiple_of(16)
            && strides(heads).iter().all(|stride| stride.is_multiple_of(8))
    });
    let mut driver = 0;
    // SAFETY: the place is valid for a write.
    let told = unsafe { sys::cuDriverGetVersion(&mut driver) } == sys::CUresult::CUDA_SUCCESS;
    plain
        && shaped
        && laid_out
        && backend.driver.capability == CAPABILITY
        && (told && driver >= DRIVER_VERSION)
        && backend.driver.shared_bytes >= shared_bytes(CHANNELS[0]).max(shared_bytes(CHANNELS[1]))
}

/// Computes the gradients of a case; `false` when the kernel does not know it.
pub(super) fn backward(
    backend: &CudaBackend,
    spec: &AttentionSpec<'_>,
    inputs: [&Heads<'_>; 5],
    logsumexp: &Tensor,
    gradients: [&Heads<'_>; 3],
) -> Result<bool> {
    let heads: Vec<&Heads<'_>> = inputs.into_iter().chain(gradients).collect();
    if !covers(backend, spec, &heads) {
        return Ok(false);
    }
    let channels = if spec.dim <= CHANNELS[0] { CHANNELS[0] } else { CHANNELS[1] };
    let padded = spec.queries.next_multiple_of(block_queries(channels));
    let (sequences, kv_heads) = at_once([spec.batch, spec.heads, spec.kv_heads], padded * channels * 4);
    for batch in (0..spec.batch).step_by(sequences) {
        for kv_head in (0..spec.kv_heads).step_by(kv_heads) {
            let part = Part {
                backend,
                spec,
                heads: &heads,
                logsumexp,
                sequences: batch..(batch + sequences).min(spec.batch),
                kv_heads: kv_head..(kv_head + kv_heads).min(spec.kv_heads),
                channels,
                padded,
            };
            part.compute()?;
        }
    }
    Ok(true)
}

/// Some sequences and heads of keys of a case, with the heads of queries that share them.
struct Part<'a> {
    backend: &'a CudaBackend,
    spec: &'a AttentionSpec<'a>,
    /// Queries, keys, values, results, their gradients; gradients of queries, keys and values.
    heads: &'a [&'a Heads<'a>],
    logsumexp: &'a Tensor,
    sequences: Range<usize>,
    kv_heads: Range<usize>,
    channels: usize,
    /// Queries filled up to whole blocks.
    padded: usize,
}

impl Part<'_> {
    fn group(&self) -> usize {
        self.spec.heads / self.spec.kv_heads
    }

    /// Where the part of one of the tensors begins.
    fn device_heads(&self, which: usize) -> DeviceHeads {
        let (heads, of_keys) =
            (self.heads[which], [false, true, true, false, false, false, true, true][which]);
        let first = if of_keys { self.kv_heads.start } else { self.kv_heads.start * self.group() };
        let [batch, head, token] = strides(heads);
        let elements = self.sequences.start * batch + first * head;
        let start = start(heads) + (elements * heads.tensor.dtype().size_bytes()) as u64;
        DeviceHeads { start, strides: [batch as u64, head as u64, token as u64] }
    }

    fn kernel(&self, source: Source, name: &'static str) -> Kernel {
        let [real, half] = match self.heads[0].tensor.dtype() {
            DType::F16 => ["REAL=f16", "HALF=2"],
            _ => ["REAL=bf16", "HALF=1"],
        };
        let channels = if self.channels == CHANNELS[0] { "CHANNELS=64" } else { "CHANNELS=128" };
        Kernel { source, defines: [real, half, channels], name }
    }

    /// Describes tiles of `rows` tokens to the copy engine. What lies beyond the tensor is brought as zeros.
    fn map(&self, which: usize, tokens: usize, head_count: usize, rows: usize) -> Result<Map> {
        use sys::CUtensorMapDataType as Type;
        let heads = self.device_heads(which);
        let sizes = [self.spec.dim, tokens, head_count, self.sequences.len()].map(|size| size as u64);
        let [batch, head, token] = heads.strides.map(|stride| (stride * 2).max(16));
        let kind = match self.heads[which].tensor.dtype() {
            DType::F16 => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            _ => Type::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        };
        let mut map = std::mem::MaybeUninit::<Map>::uninit();
        // SAFETY: the map's place is aligned as it must be, and is written when the call succeeds; the arrays have as many
        // elements as the tensor has dimensions. The address is only noted.
        unsafe {
            sys::cuTensorMapEncodeTiled(
                map.as_mut_ptr().cast(),
                kind,
                4,
                heads.start as *mut std::ffi::c_void,
                sizes.as_ptr(),
                [token, head, batch].as_ptr(),
                [64, rows as u32, 1, 1].as_ptr(),
                [1, 1, 1, 1].as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
            .result()
            .map_err(|error| failed(OP, format!("describe heads of {sizes:?} to the device: {error}")))?;
            Ok(map.assume_init())
        }
    }

    fn compute(&self) -> Result<()> {
        let (backend, spec) = (self.backend, self.spec);
        let (batches, kv_heads, group) = (self.sequences.len(), self.kv_heads.len(), self.group());
        let (heads, rows) = (kv_heads * group, block_queries(self.channels));
        let key_blocks = spec.keys.div_ceil(BLOCK_KEYS);
        let shares = shares(batches * kv_heads * key_blocks, group, backend.driver.multiprocessors as usize);
        let units = batches * kv_heads;
        let parts_bytes = if shares > 1 { shares * units * spec.keys * spec.dim * 4 } else { 0 };
        let row_bytes = batches * heads * self.padded * 4;
        let bounds_bytes = units * (self.channels + 1) * 4;
        let sizes = [
            bounds_bytes,
            row_bytes,
            row_bytes,
            row_bytes,
            row_bytes * self.channels,
            parts_bytes,
            parts_bytes,
        ];
        let scratch = backend.scratch(sizes.iter().map(|bytes| bytes.next_multiple_of(256)).sum())?;
        let mut next = scratch.address();
        let [channels, bits, delta, steps, dq, dk_parts, dv_parts] = sizes.map(|bytes| {
            let place = next;
            next += bytes.next_multiple_of(256) as u64;
            place
        });
        let values = channels + (units * self.channels * 4) as u64;
        backend.zero_bytes(channels, bounds_bytes)?;
        let (queries, keys, dim) = (spec.queries as u32, spec.keys as u32, spec.dim as u32);
        let of_keys = [spec.keys.div_ceil(256).min(64) as u32, kv_heads as u32, batches as u32];
        let of_rows = [(self.padded / rows) as u32, heads as u32, batches as u32];
        let ends = |name| self.kernel(Source::AttentionEnds, name);
        launch!(
            backend,
            ends("bounds"),
            of_keys,
            [END_THREADS, 1, 1],
            0,
            self.device_heads(1),
            self.device_heads(2),
            keys,
            dim,
            channels,
            values
        )?;
        let first_row = (self.sequences.start * spec.heads + self.kv_heads.start * group) * spec.queries;
        launch!(
            backend,
            ends("rows"),
            of_rows,
            [END_THREADS, 1, 1],
            0,
            self.device_heads(3),
            self.device_heads(4),
            at(self.logsumexp) + (first_row * 4) as u64,
            queries,
            dim,
            group as u32,
            values,
            channels,
            bits,
            delta,
            steps,
            dq
        )?;
        let gradients = [5, 6, 7].map(|which| self.device_heads(which));
        let [to_queries, to_keys, to_values] = gradients;
        let problem = Problem {
            rows: [bits, delta, steps],
            channels,
            dq,
            gradients: [to_keys.start, to_values.start],
            parts: if shares > 1 { [dk_parts, dv_parts] } else { [0, 0] },
            strides: [to_keys.strides, to_values.strides],
            heads: heads as u32,
            kv_heads: kv_heads as u32,
            shares: shares as u32,
            queries,
            keys,
            dim,
            padded: self.padded as u32,
            scale: spec.scale,
            causal: spec.causal.into(),
            window: spec.window.filter(|&window| window < spec.keys).unwrap_or(0) as u32,
        };
        launch!(
            backend,
            self.kernel(Source::AttentionBackward, "gradients"),
            [(units * shares * key_blocks) as u32, 1, 1],
            [THREADS, 1, 1],
            shared_bytes(self.channels) as u32,
            self.map(0, spec.queries, heads, rows)?,
            self.map(1, spec.keys, kv_heads, BLOCK_KEYS)?,
            self.map(2, spec.keys, kv_heads, BLOCK_KEYS)?,
            self.map(4, spec.queries, heads, rows)?,
            problem
        )?;
        launch!(
            backend,
            ends("write_queries"),
            of_rows,
            [END_THREADS, 1, 1],
            0,
            dq,
            steps,
            channels,
            queries,
            dim,
            group as u32,
            spec.scale,
            to_queries
        )?;
        if shares == 1 {
            return Ok(());
        }
        for (parts, target) in [(dk_parts, to_keys), (dv_parts, to_values)] {
            launch!(
                backend,
                ends("write_keys"),
                backend.grid(units * spec.keys * spec.dim),
                [END_THREADS, 1, 1],
                0,
                parts,
                shares as u32,
                batches as u32,
                kv_heads as u32,
                keys,
                dim,
                target
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_stay_within_their_limit_or_are_one_head_of_keys() {
        for (batch, heads, kv_heads, tokens) in [
            (4, 32, 4, 2048),
            (1, 32, 8, 131_072),
            (1, 32, 4, 524_288),
            (64, 12, 12, 1024),
            (2, 64, 1, 9_000),
        ] {
            let bytes_of_head = tokens * 64 * 4;
            let (sequences, kv) = at_once([batch, heads, kv_heads], bytes_of_head);
            let bytes = sequences * kv * (heads / kv_heads) * bytes_of_head;
            assert!(bytes <= SUMS_BYTES || (sequences, kv) == (1, 1), "{sequences} × {kv}");
            assert!(sequences == 1 || kv == kv_heads, "heads are cut after sequences");
            assert!((1..=batch).contains(&sequences) && (1..=kv_heads).contains(&kv));
        }
        assert_eq!(at_once([4, 32, 4], 2048 * 64 * 4), (4, 4));
    }

    #[test]
    fn heads_are_shared_out_until_the_device_is_busy() {
        assert_eq!(shares(256, 8, 132), 1);
        assert_eq!(shares(128, 4, 132), 2);
        assert_eq!(shares(64, 8, 132), 4);
        assert_eq!(shares(1, 8, 132), 8);
        assert_eq!(shares(1, 1, 132), 1);
        assert_eq!(shares(70, 3, 132), 3);
    }

    #[test]
    fn tiles_fit_into_the_shared_memory_of_the_chip() {
        for channels in CHANNELS {
            assert!(shared_bytes(channels) <= 227 << 10);
        }
    }
}
