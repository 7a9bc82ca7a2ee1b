//! Attention of 16-bit values by tensor cores in the cases that neither cuDNN nor the kernels for Hopper know: dropout, masks, ALiBi,
//! wide heads (`kernels/attention_any.cu`). The same bits every time.

use ferrospeed_tensor::backend::{AttentionSpec, Heads};
use ferrospeed_tensor::{DType, Result};

use crate::attention::{DeviceSpec, start, strides};
use crate::compile::Shared;
use crate::{CudaBackend, Kernel, Source, launch};

/// Tokens of a block, and of the other side at a time.
const TILE: usize = 64;
/// Channels of a head are filled up to the first of these that holds them.
const CHANNELS: [usize; 3] = [64, 128, 256];
/// Threads of a block: four warps of sixteen rows each.
const THREADS: u32 = 128;
/// Fewer queries than this leave most of a block idle.
const FEWEST_QUERIES: usize = 16;
/// The first chip that multiplies bf16 and copies to shared memory by itself.
const CAPABILITY: (i32, i32) = (8, 0);

/// What the kernels are told of it.
pub(super) const SHARED: Shared = &[("TILE", TILE)];

/// The width that a head is filled up to.
fn channels(dim: usize) -> usize {
    CHANNELS.into_iter().find(|&channels| dim <= channels).unwrap_or(dim)
}

/// Shared memory of a block: of its own side `own` tiles, and two of the other, which are brought ahead where heads are narrow.
fn shared_bytes(channels: usize, own: usize) -> u32 {
    let stages = if channels > 128 { 1 } else { 2 };
    ((own + 2 * stages) * TILE * channels * 2) as u32
}

/// Which gradients a pass over keys computes.
#[derive(Debug, Clone, Copy)]
enum Outputs {
    Values,
    Keys,
    Both,
}

impl Outputs {
    fn define(self) -> &'static str {
        match self {
            Outputs::Values => "OUT=1",
            Outputs::Keys => "OUT=2",
            Outputs::Both => "OUT=3",
        }
    }
}

fn kernel(spec: &AttentionSpec<'_>, dtype: DType, outputs: Outputs, name: &'static str) -> Kernel {
    let real = if dtype == DType::F16 { "REAL=f16" } else { "REAL=bf16" };
    let width = match channels(spec.dim) {
        64 => "CHANNELS=64",
        128 => "CHANNELS=128",
        _ => "CHANNELS=256",
    };
    Kernel { source: Source::AttentionAny, defines: [real, width, outputs.define()], name }
}

/// Whether the kernels compute a case on this device.
pub(super) fn covers(backend: &CudaBackend, spec: &AttentionSpec<'_>, heads: &[&Heads<'_>]) -> bool {
    let is_known = spec.blocks.is_none() && spec.key_bias.is_none() && spec.score_bias.is_none();
    let fits = spec.dim.is_multiple_of(8)
        && spec.dim <= CHANNELS[2]
        && spec.queries >= FEWEST_QUERIES
        && spec.heads.max(spec.batch) < 1 << 16
        && backend.driver.shared_bytes >= shared_bytes(channels(spec.dim), 2) as usize;
    let laid_out = heads.iter().all(|heads| {
        let [batch, head, token] = crate::cudnn_attention::strides(heads);
        matches!(heads.tensor.dtype(), DType::BF16 | DType::F16)
            && start(heads).is_multiple_of(16)
            && [batch, head, token].iter().all(|stride| stride.is_multiple_of(8))
    });
    is_known && fits && laid_out && backend.driver.capability >= CAPABILITY
}

/// The result of `[q, k, v, out]`, and at `logsumexp` what it was measured from.
pub(super) fn forward(
    backend: &CudaBackend,
    spec: &AttentionSpec<'_>,
    device: DeviceSpec,
    [q, k, v, out]: [&Heads<'_>; 4],
    logsumexp: u64,
) -> Result<()> {
    launch!(
        backend,
        kernel(spec, q.tensor.dtype(), Outputs::Both, "any_forward"),
        [spec.queries.div_ceil(TILE) as u32, spec.heads as u32, spec.batch as u32],
        [THREADS, 1, 1],
        shared_bytes(channels(spec.dim), 1),
        device,
        start(q),
        strides(q),
        start(k),
        strides(k),
        start(v),
        strides(v),
        start(out),
        strides(out),
        logsumexp
    )
}

/// The gradients of `[q, k, v, dout]`; `rows`: the log-sum-exp and δ of every query.
pub(super) fn backward(
    backend: &CudaBackend,
    spec: &AttentionSpec<'_>,
    device: DeviceSpec,
    [q, k, v, dout]: [&Heads<'_>; 4],
    rows: [u64; 2],
    [dq, dk, dv]: [&Heads<'_>; 3],
) -> Result<()> {
    let dtype = q.tensor.dtype();
    let shared = shared_bytes(channels(spec.dim), 2);
    launch!(
        backend,
        kernel(spec, dtype, Outputs::Both, "any_queries"),
        [spec.queries.div_ceil(TILE) as u32, spec.heads as u32, spec.batch as u32],
        [THREADS, 1, 1],
        shared,
        device,
        start(q),
        strides(q),
        start(k),
        strides(k),
        start(v),
        strides(v),
        start(dout),
        strides(dout),
        rows[0],
        rows[1],
        start(dq),
        strides(dq)
    )?;
    let passes: &[Outputs] =
        if channels(spec.dim) > 128 { &[Outputs::Values, Outputs::Keys] } else { &[Outputs::Both] };
    for &outputs in passes {
        launch!(
            backend,
            kernel(spec, dtype, outputs, "any_keys"),
            [spec.keys.div_ceil(TILE) as u32, spec.kv_heads as u32, spec.batch as u32],
            [THREADS, 1, 1],
            shared,
            device,
            start(q),
            strides(q),
            start(k),
            strides(k),
            start(v),
            strides(v),
            start(dout),
            strides(dout),
            rows[0],
            rows[1],
            start(dk),
            strides(dk),
            start(dv),
            strides(dv)
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_filled_up_to_what_shared_memory_holds() {
        assert_eq!([8, 64, 72, 128, 136, 256].map(channels), [64, 64, 128, 128, 256, 256]);
        for width in CHANNELS {
            assert!(shared_bytes(width, 2) <= 160 << 10, "{width}");
        }
        assert!(shared_bytes(128, 2) <= 99 << 10, "chips with less shared memory have heads of 128");
    }
}
