//! Layer norm and RMS norm over rows, with an optional residual sum in front.
//!
//! Legend: `x_rn` rows × width; statistics are one f32 per row. RMS norm rounds the normalised value to the
//! element type before the weight, as the models that use it were trained.

use ferrospeed_tensor::backend::Norms;
use ferrospeed_tensor::dtype::Float;
use ferrospeed_tensor::loops::simd::{dot, sum_by, vectorized};
use ferrospeed_tensor::{NormKind, Out, Result, Tensor};

use crate::parallel::{Shared, row_block};
use crate::reduce::partial_blocks;
use crate::{CpuBackend, float_kernel, read, write};

#[inline(always)]
fn widen_row<T: Float>(row: &[T], out: &mut [f32]) {
    for (out, value) in out.iter_mut().zip(row) {
        *out = value.widen();
    }
}

impl Norms for CpuBackend {
    fn norm(
        &self,
        kind: NormKind,
        eps: f32,
        x: &Tensor,
        residual: Option<(&Tensor, Out<'_>)>,
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        y: Out<'_>,
        mean: Out<'_>,
        rstd: Out<'_>,
    ) -> Result<()> {
        let threads = &self.threads;
        let (rows, width) = (x.shape().rows(), x.shape().last());
        float_kernel!("norm", x.dtype(), T => {
            let x_rn = read::<T>(x);
            let residual_rn = residual.map(|(residual, sum)| (read::<T>(residual), Shared::new(write::<T>(sum))));
            let weight_n = weight.map(|w| w.to_vec_f32()).transpose()?;
            let bias_n = bias.map(|b| b.to_vec_f32()).transpose()?;
            let y_rn = Shared::new(write::<T>(y));
            let (mean_r, rstd_r) = (Shared::new(write::<f32>(mean)), Shared::new(write::<f32>(rstd)));
            threads.blocks(rows, row_block(width), |range| vectorized!(|| {
                let mut row = vec![0.0f32; width];
                for r in range {
                    let span = r * width..(r + 1) * width;
                    widen_row(&x_rn[span.clone()], &mut row);
                    if let Some((residual_rn, sum_rn)) = &residual_rn {
                        // SAFETY: rows are disjoint.
                        let sum = unsafe { sum_rn.range(span.clone()) };
                        for ((value, other), sum) in row.iter_mut().zip(&residual_rn[span.clone()]).zip(sum) {
                            let rounded = T::narrow(*value + other.widen());
                            *sum = rounded;
                            *value = rounded.widen();
                        }
                    }
                    let count = width as f32;
                    let average = if kind == NormKind::Layer { sum_by(&row, |_, v| v) / count } else { 0.0 };
                    let variance = sum_by(&row, |_, v| (v - average) * (v - average)) / count;
                    let scale = 1.0 / (variance + eps).sqrt();
                    // SAFETY: rows are disjoint.
                    let output = unsafe {
                        mean_r.range(r..r + 1)[0] = average;
                        rstd_r.range(r..r + 1)[0] = scale;
                        y_rn.range(span)
                    };
                    match (kind, &weight_n, &bias_n) {
                        (NormKind::Rms, Some(w), _) => {
                            // Equal lengths in sight spare the loop its bounds checks, which keep it from vectorising.
                            let (row, w, output) = (&row[..width], &w[..width], &mut output[..width]);
                            for i in 0..width {
                                output[i] = T::narrow(T::narrow(row[i] * scale).widen() * w[i]);
                            }
                        }
                        (_, Some(w), Some(b)) => {
                            let (row, w, b, output) = (&row[..width], &w[..width], &b[..width], &mut output[..width]);
                            for i in 0..width {
                                output[i] = T::narrow((row[i] - average) * scale * w[i] + b[i]);
                            }
                        }
                        (_, w, b) => {
                            for i in 0..width {
                                let scaled = (row[i] - average) * scale * w.as_ref().map_or(1.0, |w| w[i]);
                                output[i] = T::narrow(scaled + b.as_ref().map_or(0.0, |b| b[i]));
                            }
                        }
                    }
                }
            }));
            Ok(())
        })?
    }

    fn norm_backward(
        &self,
        kind: NormKind,
        x: &Tensor,
        weight: Option<&Tensor>,
        mean: &Tensor,
        rstd: &Tensor,
        dy: &Tensor,
        dsum: Option<&Tensor>,
        dx: Out<'_>,
        dweight: Option<Out<'_>>,
        dbias: Option<Out<'_>>,
    ) -> Result<()> {
        let threads = &self.threads;
        let (rows, width) = (x.shape().rows(), x.shape().last());
        float_kernel!("norm_backward", x.dtype(), T => {
            let (x_rn, dy_rn) = (read::<T>(x), read::<T>(dy));
            let dsum_rn = dsum.map(read::<T>);
            let weight_n = weight.map(|w| w.to_vec_f32()).transpose()?.unwrap_or_else(|| vec![1.0; width]);
            let (mean_r, rstd_r) = (read::<f32>(mean), read::<f32>(rstd));
            let dx_rn = Shared::new(write::<T>(dx));
            let (blocks, block_rows) = partial_blocks(rows);
            let mut partial_weight = vec![0.0f32; blocks * width];
            let mut partial_bias = vec![0.0f32; blocks * width];
            let (weight_parts, bias_parts) = (Shared::new(&mut partial_weight), Shared::new(&mut partial_bias));
            threads.run(blocks, |block| vectorized!(|| {
                // SAFETY: each block has its own part.
                let (dw, db) = unsafe {
                    (weight_parts.range(block * width..(block + 1) * width), bias_parts.range(block * width..(block + 1) * width))
                };
                let (mut normal, mut gradient) = (vec![0.0f32; width], vec![0.0f32; width]);
                for r in block * block_rows..((block + 1) * block_rows).min(rows) {
                    let span = r * width..(r + 1) * width;
                    let (average, scale) = (mean_r[r], rstd_r[r]);
                    let (x_n, dy_n) = (&x_rn[span.clone()][..width], &dy_rn[span.clone()][..width]);
                    let (normal, gradient) = (&mut normal[..width], &mut gradient[..width]);
                    let (dw, db, weight_n) = (&mut dw[..width], &mut db[..width], &weight_n[..width]);
                    for i in 0..width {
                        let d = dy_n[i].widen();
                        normal[i] = (x_n[i].widen() - average) * scale;
                        dw[i] += d * normal[i];
                        db[i] += d;
                        gradient[i] = d * weight_n[i];
                    }
                    let count = width as f32;
                    let along = dot(gradient, normal) / count;
                    let shift = if kind == NormKind::Layer { sum_by(gradient, |_, g| g) / count } else { 0.0 };
                    // SAFETY: rows are disjoint.
                    let output = unsafe { dx_rn.range(span.clone()) };
                    let output = &mut output[..width];
                    match dsum_rn {
                        Some(dsum_rn) => {
                            let more = &dsum_rn[span][..width];
                            for i in 0..width {
                                let d = scale * (gradient[i] - shift - normal[i] * along);
                                output[i] = T::narrow(d + more[i].widen());
                            }
                        }
                        None => {
                            for i in 0..width {
                                output[i] = T::narrow(scale * (gradient[i] - shift - normal[i] * along));
                            }
                        }
                    }
                }
            }));
            for (target, partial) in [(dweight, &partial_weight), (dbias, &partial_bias)] {
                let Some(target) = target else { continue };
                let target = write::<T>(target);
                for i in 0..width {
                    let sum = (0..blocks).fold(0.0, |sum, block| sum + partial[block * width + i]);
                    target[i] = T::narrow(sum);
                }
            }
            Ok(())
        })?
    }
}
