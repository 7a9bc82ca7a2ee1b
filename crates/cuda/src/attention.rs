//! Attention: cuDNN's tensor-core kernels where they fit, for gradients on Hopper our own (`attention_backward.rs`), for all else of
//! 16-bit values those of `attention_any.rs`, and plain ones (`kernels/attention.cu`) for f32, few queries and odd layouts.

use ferrospeed_tensor::backend::{Attention, AttentionSpec, Heads, HeadsOut};
use ferrospeed_tensor::random::{RandomKey, drop_threshold};
use ferrospeed_tensor::{DType, Documents, Out, Result, Tensor, TensorError};

use crate::elementwise::DeviceKey;
use crate::{
    CudaBackend, Kernel, Source, at, at_option, attention_any, attention_backward, cudnn_attention, launch,
    real,
};

/// Warps that share one query or key,
const WARPS: u32 = 4;
/// and one query of few, when there are too few blocks to fill the GPU: decoding.
const DECODING_WARPS: u32 = 16;
/// Channels that a warp can hold.
const MAX_DIM: usize = 256;

/// Matches `Heads` in the kernels.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Strides {
    batch: u64,
    token: u64,
    head: u64,
}

pub(super) fn strides(heads: &Heads<'_>) -> Strides {
    Strides {
        batch: heads.batch_stride as u64,
        token: heads.token_stride as u64,
        head: heads.head_stride as u64,
    }
}

/// The address of the first element.
pub(super) fn start(heads: &Heads<'_>) -> u64 {
    at(heads.tensor) + (heads.offset * heads.tensor.dtype().size_bytes()) as u64
}

/// Matches `Spec` in the kernels.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct DeviceSpec {
    sizes: [u64; 6],
    scale: f32,
    causal: i32,
    window: i64,
    key_mask: u64,
    slopes: u64,
    positions: u64,
    drop_threshold: u32,
    keep_scale: f32,
    key: DeviceKey,
    dropout: i32,
    unused: i32,
    documents: u64,
    shift: i64,
    drawn: [u64; 3],
    drawn_first: [u64; 3],
}

fn device_spec(spec: &AttentionSpec<'_>) -> Result<DeviceSpec> {
    if spec.dim > MAX_DIM {
        let what = format!("heads of {} channels; at most {MAX_DIM} are supported on CUDA", spec.dim);
        return Err(TensorError::argument("attention", what));
    }
    if spec.documents.is_some_and(|documents| documents.table().is_none()) {
        let what =
            "the borders of documents are in the host's memory; describe them for the device of the tensors";
        return Err(TensorError::argument("attention", what));
    }
    let (p, key) = spec.dropout.unwrap_or((0.0, RandomKey::new(0, 0)));
    let drawn = spec.weight_grid();
    Ok(DeviceSpec {
        sizes: [spec.batch, spec.queries, spec.keys, spec.heads, spec.kv_heads, spec.dim]
            .map(|size| size as u64),
        scale: spec.scale,
        causal: spec.causal.into(),
        window: spec.window.map_or(0, |window| window as i64),
        key_mask: at_option(spec.key_mask),
        slopes: at_option(spec.alibi_slopes),
        positions: at_option(spec.alibi_positions),
        drop_threshold: drop_threshold(p),
        keep_scale: 1.0 / (1.0 - p),
        key: key.into(),
        dropout: spec.dropout.is_some().into(),
        unused: 0,
        documents: at_option(spec.documents.and_then(Documents::table)),
        shift: spec.shift() as i64,
        drawn: drawn.whole.map(|size| size as u64),
        drawn_first: drawn.first.map(|size| size as u64),
    })
}

fn kernel(dtype: DType, dim: usize, name: &'static str) -> Result<Kernel> {
    let lanes = match dim {
        0..=32 => "LANES=1",
        33..=64 => "LANES=2",
        65..=128 => "LANES=4",
        _ => "LANES=8",
    };
    Ok(Kernel { source: Source::Attention, defines: [real("attention", dtype)?, lanes, ""], name })
}

impl Attention for CudaBackend {
    fn attention(
        &self,
        spec: &AttentionSpec<'_>,
        q: &Heads<'_>,
        k: &Heads<'_>,
        v: &Heads<'_>,
        out: HeadsOut<'_>,
        logsumexp: Out<'_>,
    ) -> Result<()> {
        let out = &out.into_heads();
        let logsumexp = logsumexp.into_tensor();
        let rows = spec.batch * spec.heads * spec.queries;
        if rows == 0 {
            return Ok(());
        }
        if cudnn_attention::forward(self, spec, [q, k, v, out], logsumexp)? {
            return Ok(());
        }
        if attention_any::covers(self, spec, &[q, k, v, out]) {
            return attention_any::forward(self, spec, device_spec(spec)?, [q, k, v, out], at(logsumexp));
        }
        let is_decoding = rows < 2 * self.driver.multiprocessors as usize;
        let warps = if is_decoding { DECODING_WARPS } else { WARPS };
        launch!(
            self,
            kernel(q.tensor.dtype(), spec.dim, "attention_forward")?,
            [rows as u32, 1, 1],
            [32 * warps, 1, 1],
            joined_bytes(warps, spec.dim),
            device_spec(spec)?,
            start(q),
            strides(q),
            start(k),
            strides(k),
            start(v),
            strides(v),
            start(out),
            strides(out),
            at(logsumexp)
        )
    }

    fn attention_backward(
        &self,
        spec: &AttentionSpec<'_>,
        q: &Heads<'_>,
        k: &Heads<'_>,
        v: &Heads<'_>,
        out: &Heads<'_>,
        logsumexp: &Tensor,
        dout: &Heads<'_>,
        gradients: [HeadsOut<'_>; 3],
    ) -> Result<()> {
        let gradients = gradients.map(HeadsOut::into_heads);
        let [dq, dk, dv] = gradients.each_ref();
        let rows = spec.batch * spec.heads * spec.queries;
        if rows == 0 {
            return Ok(());
        }
        let (inputs, gradients) = ([q, k, v, out, dout], [dq, dk, dv]);
        let own_comes_first = !cudnn_attention::is_faster_backward(self, spec);
        if own_comes_first && attention_backward::backward(self, spec, inputs, logsumexp, gradients)? {
            return Ok(());
        }
        if cudnn_attention::backward(self, spec, inputs, logsumexp, gradients)? {
            return Ok(());
        }
        let (device, dtype) = (device_spec(spec)?, q.tensor.dtype());
        let delta = self.scratch(rows * 4)?;
        let block = [32 * WARPS, 1, 1];
        launch!(
            self,
            kernel(dtype, spec.dim, "attention_delta")?,
            [rows.div_ceil(WARPS as usize) as u32, 1, 1],
            block,
            0,
            device,
            start(out),
            strides(out),
            start(dout),
            strides(dout),
            delta.address()
        )?;
        if attention_any::covers(self, spec, &[q, k, v, out, dout, dq, dk, dv]) {
            let rows = [at(logsumexp), delta.address()];
            return attention_any::backward(self, spec, device, [q, k, v, dout], rows, gradients);
        }
        let shared_bytes = WARPS * spec.dim as u32 * 4;
        launch!(
            self,
            kernel(dtype, spec.dim, "attention_dq")?,
            [rows as u32, 1, 1],
            block,
            shared_bytes,
            device,
            start(q),
            strides(q),
            start(k),
            strides(k),
            start(v),
            strides(v),
            start(dout),
            strides(dout),
            at(logsumexp),
            delta.address(),
            start(dq),
            strides(dq)
        )?;
        let keys = spec.batch * spec.kv_heads * spec.keys;
        launch!(
            self,
            kernel(dtype, spec.dim, "attention_dkv")?,
            [keys as u32, 1, 1],
            block,
            shared_bytes,
            device,
            start(q),
            strides(q),
            start(k),
            strides(k),
            start(v),
            strides(v),
            start(dout),
            strides(dout),
            at(logsumexp),
            delta.address(),
            start(dk),
            strides(dk),
            start(dv),
            strides(dv)
        )
    }

    fn prefers_whole_sequences(&self, dtype: DType, dim: usize) -> bool {
        cudnn_attention::knows(self, dtype, dim)
    }

    fn attention_step(
        &self,
        spec: &AttentionSpec<'_>,
        new: [&Heads<'_>; 3],
        caches: [HeadsOut<'_>; 2],
        place: &Tensor,
        out: HeadsOut<'_>,
    ) -> Result<()> {
        let caches = caches.map(HeadsOut::into_heads);
        let [q, k, v] = new;
        let [keys, values] = caches.each_ref();
        let out = &out.into_heads();
        let rows = spec.batch * spec.heads;
        if rows == 0 {
            return Ok(());
        }
        launch!(
            overlapping self,
            kernel(q.tensor.dtype(), spec.dim, "attention_step")?,
            [rows as u32, 1, 1],
            [32 * DECODING_WARPS, 1, 1],
            joined_bytes(DECODING_WARPS, spec.dim),
            device_spec(spec)?,
            start(q),
            strides(q),
            start(k),
            strides(k),
            start(v),
            strides(v),
            start(keys),
            strides(keys),
            start(values),
            strides(values),
            at(place),
            start(out),
            strides(out)
        )
    }

    fn rotary(
        &self,
        heads: HeadsOut<'_>,
        batch: usize,
        tokens: usize,
        head_count: usize,
        cos: &Tensor,
        sin: &Tensor,
        interleaved: bool,
        inverse: bool,
    ) -> Result<()> {
        let heads = &heads.into_heads();
        let pairs = cos.shape().last();
        let count = batch * tokens * head_count * pairs;
        let per_sequence = i32::from(cos.numel() > tokens * pairs);
        let sign = if inverse { -1.0f32 } else { 1.0 };
        let by_eights = [pairs, heads.batch_stride, heads.token_stride, heads.head_stride];
        if !interleaved
            && by_eights.iter().all(|size| size.is_multiple_of(8))
            && start(heads).is_multiple_of(16)
        {
            return launch!(
                self,
                kernel(heads.tensor.dtype(), 0, "rotary_halves")?,
                self.grid(count),
                [super::BLOCK, 1, 1],
                0,
                (count / 8) as u64,
                tokens as u64,
                head_count as u64,
                pairs as u64,
                start(heads),
                strides(heads),
                at(cos),
                at(sin),
                per_sequence,
                sign
            );
        }
        launch!(
            self,
            kernel(heads.tensor.dtype(), 0, "rotary")?,
            self.grid_single(count),
            [super::BLOCK, 1, 1],
            0,
            count as u64,
            tokens as u64,
            head_count as u64,
            pairs as u64,
            start(heads),
            strides(heads),
            at(cos),
            at(sin),
            per_sequence,
            i32::from(interleaved),
            sign
        )
    }
}

/// Shared memory of a block of [`forward`] or [`step`].
fn joined_bytes(warps: u32, dim: usize) -> u32 {
    warps * (dim as u32 + 2) * 4
}
