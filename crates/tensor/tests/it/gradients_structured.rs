//! The ops with structure of their own (heads, windows, indices, masks) against plain f64 arithmetic, value and gradient.

use super::reference;
use super::reference::check::{check, random, tensor};
use super::reference::{Array, Visibility};
use ferrospeed_tensor::backend::Window2d;
use ferrospeed_tensor::ops::{self, AttentionOptions, PackedHeads};
use ferrospeed_tensor::random::{self, RandomState};
use ferrospeed_tensor::{DType, Device, Operand, Tensor};

fn device() -> Device {
    ferrospeed_cpu::with_threads(2)
}

/// Rotates pairs of the first `2·pairs` channels of `x [batch, tokens, heads, dim]` by angles `[tables, tokens, pairs]`.
fn rotated(x: &Array, angles: &Array, interleaved: bool) -> Array {
    let [batch, tokens, heads, dim] = [0, 1, 2, 3].map(|i| x.shape[i]);
    let (tables, pairs) = (angles.shape[0], angles.shape[2]);
    let mut out = x.clone();
    for (row, channels) in out.data.chunks_mut(dim).enumerate() {
        let (b, t) = (row / heads / tokens, row / heads % tokens);
        assert!(b < batch);
        for pair in 0..pairs {
            let (i, j) = if interleaved { (2 * pair, 2 * pair + 1) } else { (pair, pair + pairs) };
            let (sin, cos) = angles.data[(b % tables * tokens + t) * pairs + pair].sin_cos();
            let (a, b) = (channels[i], channels[j]);
            (channels[i], channels[j]) = (a * cos - b * sin, b * cos + a * sin);
        }
    }
    out
}

#[test]
fn rotary_embedding() {
    for [batch, tables, tokens, heads, dim, pairs] in [
        [1, 1, 1, 1, 2, 1],
        [2, 1, 3, 2, 8, 4],
        [2, 2, 5, 3, 10, 3],
        [1, 1, 0, 2, 4, 2],
        [3, 3, 2, 1, 34, 17],
    ] {
        let angles = random(&[tables, tokens, pairs], 7);
        let (cos, sin) = (tensor(&angles.map(f64::cos), &device()), tensor(&angles.map(f64::sin), &device()));
        for interleaved in [false, true] {
            check(
                &format!("rotary {batch} {tables} {tokens} {heads} {dim} {pairs} {interleaved}"),
                &[random(&[batch, tokens, heads, dim], 1)],
                |x| ops::rotary(x[0].clone(), &cos, &sin, interleaved),
                |x| rotated(&x[0], &angles, interleaved),
            );
        }
    }
}

/// Queries, keys and values `[batch, tokens, heads, dim]` out of a packed projection.
fn unpacked(packed: &Array, heads: usize, layout: PackedHeads) -> [Array; 3] {
    let (batch, tokens, dim) = (packed.shape[0], packed.shape[1], packed.shape[2] / 3 / heads);
    [0, 1, 2].map(|part| {
        let data = (0..batch * tokens * heads * dim).map(|i| {
            let (row, head, channel) = (i / dim / heads, i / dim % heads, i % dim);
            let column = match layout {
                PackedHeads::Thirds => (part * heads + head) * dim + channel,
                PackedHeads::PerHead => (head * 3 + part) * dim + channel,
            };
            packed.data[row * 3 * heads * dim + column]
        });
        Array::new(&[batch, tokens, heads, dim], data.collect())
    })
}

#[test]
fn packed_attention_and_its_heads() {
    for [batch, tokens, heads, dim] in [[1, 1, 1, 1], [2, 5, 3, 4], [1, 0, 2, 2], [1, 9, 1, 7]] {
        for layout in [PackedHeads::Thirds, PackedHeads::PerHead] {
            let inputs = [random(&[batch, tokens, 3 * heads * dim], 1)];
            for causal in [false, true] {
                let rule = Visibility { causal, ..Default::default() };
                check(
                    &format!("attention_packed {batch} {tokens} {heads} {dim} {layout:?} {causal}"),
                    &inputs,
                    |x| {
                        let options = AttentionOptions { causal, ..Default::default() };
                        ops::attention_packed(&x[0], heads, layout, &options)
                    },
                    |x| {
                        let [q, k, v] = unpacked(&x[0], heads, layout);
                        Array::new(
                            &[batch, tokens, heads * dim],
                            reference::attention(&q, &k, &v, &rule).data,
                        )
                    },
                );
            }
            for part in 0..3 {
                check(
                    &format!("split_heads {batch} {tokens} {heads} {dim} {layout:?}, part {part}"),
                    &inputs,
                    |x| Ok(ops::split_heads(&x[0], heads, layout)?[part].clone()),
                    |x| unpacked(&x[0], heads, layout)[part].clone(),
                );
            }
        }
    }
}

#[test]
fn batched_products() {
    for (batch, [m, k, n]) in [
        (vec![1], [1, 1, 1]),
        (vec![3], [2, 5, 4]),
        (vec![2, 3], [4, 3, 17]),
        (vec![0], [2, 2, 2]),
        (vec![2], [3, 0, 2]),
    ] {
        let shape = |rows, width| [&batch[..], &[rows, width]].concat();
        let inputs = [random(&shape(m, k), 1), random(&shape(k, n), 2)];
        check(
            &format!("matmul {batch:?} {m}x{k}x{n}"),
            &inputs,
            |x| ops::matmul(&x[0], &x[1]),
            |x| {
                let count = batch.iter().product::<usize>();
                let part = |x: &Array, i: usize, rows: usize, width: usize| {
                    Array::new(&[rows, width], x.data[i * rows * width..(i + 1) * rows * width].to_vec())
                };
                let products = (0..count)
                    .flat_map(|i| reference::matmul(&part(&x[0], i, m, k), &part(&x[1], i, k, n)).data);
                Array::new(&shape(m, n), products.collect())
            },
        );
    }
}

#[test]
fn picking_by_index() {
    for [rows, width, picks] in [[1, 1, 1], [3, 5, 4], [2, 33, 3], [0, 4, 2], [4, 2, 7]] {
        // Some are picked twice: their gradients add up.
        let picked: Vec<usize> = (0..rows * picks).map(|i| i * 7 % width).collect();
        let ids: Vec<i64> = picked.iter().map(|&index| index as i64).collect();
        let indices = Tensor::from_slice(&ids, [rows, picks], &device()).unwrap();
        check(
            &format!("gather {rows}x{width}, {picks}"),
            &[random(&[rows, width], 1)],
            |x| ops::gather(&x[0], &indices),
            |x| {
                let data = picked.iter().enumerate().map(|(i, &index)| x[0].data[i / picks * width + index]);
                Array::new(&[rows, picks], data.collect())
            },
        );
        let k = width.min(picks);
        check(
            &format!("top_k {k} of {rows}x{width}"),
            &[random(&[rows, width], 2)],
            |x| Ok(ops::top_k(&x[0], k)?.0),
            |x| {
                let largest = x[0].data.chunks(width).flat_map(|row| {
                    let mut row = row.to_vec();
                    row.sort_by(|a, b| b.total_cmp(a));
                    row.truncate(k);
                    row
                });
                Array::new(&[rows, k], largest.collect())
            },
        );
    }
}

#[test]
fn choosing_by_condition() {
    for [rows, width] in [[1, 1], [3, 7], [5, 16], [0, 3]] {
        for whole in [true, false] {
            let shape = if whole { [rows, width] } else { [rows, 1] };
            let chosen: Vec<bool> = (0..shape[0] * shape[1]).map(|i| i % 3 != 1).collect();
            let bytes: Vec<u8> = chosen.iter().map(|&yes| u8::from(yes)).collect();
            let condition = Tensor::from_slice(&bytes, shape, &device()).unwrap();
            for right in [vec![rows, width], vec![width], vec![]] {
                check(
                    &format!("select {rows}x{width} by {shape:?}, else {right:?}"),
                    &[random(&[rows, width], 1), random(&right, 2)],
                    |x| ops::select(&condition, &x[0], &x[1]),
                    |x| {
                        let other = x[0].zip(&x[1], |_, b| b);
                        let pick = |i: usize| chosen[if whole { i } else { i / width }];
                        let data =
                            (0..rows * width).map(|i| if pick(i) { x[0].data[i] } else { other.data[i] });
                        Array::new(&[rows, width], data.collect())
                    },
                );
            }
        }
    }
}

#[test]
fn cutting_into_parts() {
    for (shape, dim, sizes) in [
        (vec![6], 0, vec![1, 2, 3]),
        (vec![2, 5], 1, vec![4, 1]),
        (vec![4, 3, 2], 0, vec![0, 4]),
        (vec![2, 7, 3], 1, vec![2, 2, 3]),
        (vec![1, 1, 0], 1, vec![1]),
    ] {
        for part in 0..sizes.len() {
            // Only one part is used: the gradient of the others is zero.
            check(
                &format!("split {shape:?} by {sizes:?} along {dim}, part {part}"),
                &[random(&shape, 1)],
                |x| Ok(ops::split(&x[0], dim, &sizes)?[part].clone()),
                |x| {
                    let inner = shape[dim + 1..].iter().product::<usize>();
                    let start: usize = sizes[..part].iter().sum::<usize>() * inner;
                    let block = shape[dim] * inner;
                    let width = sizes[part] * inner;
                    let outer = shape[..dim].iter().product::<usize>();
                    let data = (0..outer)
                        .flat_map(|o| x[0].data[o * block + start..o * block + start + width].to_vec());
                    let mut cut = shape.clone();
                    cut[dim] = sizes[part];
                    Array::new(&cut, data.collect())
                },
            );
        }
        check(
            &format!("split and concat {shape:?} by {sizes:?} along {dim}"),
            &[random(&shape, 1)],
            |x| {
                let parts = ops::split(&x[0], dim, &sizes)?;
                ops::concat(&parts, dim)
            },
            |x| x[0].clone(),
        );
    }
}

#[test]
fn sums_and_means_of_a_dimension() {
    for (shape, dim) in [
        (vec![1], 0),
        (vec![5], 0),
        (vec![3, 7], 0),
        (vec![3, 7], 1),
        (vec![2, 3, 33], 1),
        (vec![0, 4], 1),
        (vec![4, 0], 1),
    ] {
        let summed = |x: &Array, divisor: f64| {
            let (outer, size) = (shape[..dim].iter().product::<usize>(), shape[dim]);
            let inner = shape[dim + 1..].iter().product::<usize>();
            let mut left = shape.clone();
            left.remove(dim);
            let data = (0..outer * inner).map(|i| {
                let (o, j) = (i / inner.max(1), i % inner.max(1));
                (0..size).map(|s| x.data[(o * size + s) * inner + j]).sum::<f64>() / divisor
            });
            Array::new(&left, data.collect())
        };
        let inputs = [random(&shape, 1)];
        let what = format!("{shape:?} along {dim}");
        check(&format!("sum_dim {what}"), &inputs, |x| ops::sum_dim(&x[0], dim), |x| summed(&x[0], 1.0));
        let count = shape[dim].max(1) as f64;
        check(&format!("mean_dim {what}"), &inputs, |x| ops::mean_dim(&x[0], dim), |x| summed(&x[0], count));
    }
}

#[test]
fn rms_norm_behind_a_sum() {
    for [rows, width] in [[0, 5], [1, 2], [3, 7], [5, 16], [2, 33]] {
        check(
            &format!("add_rms_norm [{rows}, {width}]"),
            &[random(&[rows, width], 1), random(&[rows, width], 2), random(&[width], 3)],
            |x| {
                let (sum, y) = ops::add_rms_norm(&x[0], Some((&x[1]).into()), Some((&x[2]).into()), 1e-5)?;
                ops::add(&sum, &y)
            },
            |x| {
                let sum = x[0].zip(&x[1], |a, b| a + b);
                sum.zip(&reference::rms_norm(&sum, &x[2], 1e-5), |a, b| a + b)
            },
        );
    }
}

/// Runs `op` from the same random state every time.
fn from_state<T>(op: impl FnOnce() -> T) -> T {
    let before = random::set_state(RandomState { seed: 5, step: 9, next_stream: 3 });
    let result = op();
    random::set_state(before);
    result
}

#[test]
fn dropout_scales_what_it_keeps() {
    for (shape, p) in [([1, 1], 0.5), ([3, 7], 0.25), ([40, 50], 0.3), ([0, 4], 0.5)] {
        let ones = Tensor::full(shape, 1.0, DType::F32, &device()).unwrap();
        let mask = from_state(|| ops::dropout(&ones, p)).unwrap().to_vec_f32().unwrap();
        let kept = 1.0 / (1.0 - p);
        assert!(
            mask.iter().all(|&m| m == 0.0 || (m - kept).abs() < 1e-6),
            "kept or dropped, nothing between"
        );
        if mask.len() > 1000 {
            let share = mask.iter().filter(|&&m| m == 0.0).count() as f32 / mask.len() as f32;
            assert!((share - p).abs() < 0.05, "{share} were dropped with probability {p}");
        }
        let mask = Array::new(&shape, mask.into_iter().map(f64::from).collect());
        check(
            &format!("dropout {shape:?} {p}"),
            &[random(&shape, 1)],
            |x| from_state(|| ops::dropout(&x[0], p)),
            |x| x[0].zip(&mask, |x, m| x * m),
        );
    }
}

/// Attention weights are dropped after the softmax. The mask shows itself when all weights are alike and values are unit
/// vectors.
#[test]
fn attention_dropout_drops_weights() {
    let (batch, tokens, heads, dim) = (2, 6, 2, 6);
    let shape = [batch, tokens, heads, dim];
    let options = AttentionOptions { dropout: 0.4, ..Default::default() };
    let zero = Tensor::zeros(shape, DType::F32, &device()).unwrap();
    let unit = |i: usize| f32::from(u8::from(i / dim / heads % tokens == i % dim));
    let units: Vec<f32> = (0..batch * tokens * heads * dim).map(unit).collect();
    let units = Tensor::from_slice(&units, shape, &device()).unwrap();
    let mask = from_state(|| ops::attention(&zero, &zero, &units, &options)).unwrap().to_vec_f32().unwrap();
    let mask: Vec<f64> = mask.into_iter().map(|weight| f64::from(weight) * tokens as f64).collect();
    assert!(mask.contains(&0.0) && mask.iter().any(|&m| m > 1.0), "some are dropped: {mask:?}");
    let truth = |x: &[Array]| {
        let mut out = vec![0.0; batch * tokens * heads * dim];
        let at = |b: usize, t: usize, h: usize| ((b * tokens + t) * heads + h) * dim;
        for (b, t, h) in
            (0..batch * tokens * heads).map(|i| (i / heads / tokens, i / heads % tokens, i % heads))
        {
            let score = |s: usize| -> f64 {
                let (q, k) = (&x[0].data[at(b, t, h)..][..dim], &x[1].data[at(b, s, h)..][..dim]);
                q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>() / (dim as f64).sqrt()
            };
            let weights = reference::softmax(&(0..tokens).map(score).collect::<Vec<f64>>());
            for (s, weight) in weights.into_iter().enumerate() {
                // Unit vectors: the mask of key s stands in channel s.
                let weight = weight * mask[at(b, t, h) + s];
                for i in 0..dim {
                    out[at(b, t, h) + i] += weight * x[2].data[at(b, s, h) + i];
                }
            }
        }
        Array::new(&shape, out)
    };
    let inputs = [1, 2, 3].map(|stream| random(&shape, stream));
    check(
        "attention with dropout",
        &inputs,
        |x| from_state(|| ops::attention(&x[0], &x[1], &x[2], &options)),
        truth,
    );
}

/// Every window of `x [batch, channels, height, width]`: (batch, channel, row, column) of the result and its values, zero
/// where padded.
fn windows(x: &Array, window: &Window2d) -> (Vec<usize>, Vec<Vec<f64>>) {
    let [batch, channels, height, width] = [0, 1, 2, 3].map(|i| x.shape[i]);
    let [kh, kw] = window.kernel;
    let size = |size: usize, axis: usize| {
        (size + 2 * window.padding[axis] - window.kernel[axis]) / window.stride[axis] + 1
    };
    let (out_h, out_w) = (size(height, 0), size(width, 1));
    let mut all = Vec::new();
    for plane in 0..batch * channels {
        for (top, left) in
            (0..out_h * out_w).map(|i| (i / out_w * window.stride[0], i % out_w * window.stride[1]))
        {
            let value = |i: usize| {
                let row = (top + i / kw).checked_sub(window.padding[0]).filter(|&row| row < height);
                let column = (left + i % kw).checked_sub(window.padding[1]).filter(|&column| column < width);
                row.zip(column).map_or(0.0, |(row, column)| x.data[(plane * height + row) * width + column])
            };
            all.push((0..kh * kw).map(value).collect());
        }
    }
    (vec![batch, channels, out_h, out_w], all)
}

#[test]
fn convolution() {
    for ([batch, channels, height, width], [out, kh, kw], stride, padding) in [
        ([1, 1, 1, 1], [1, 1, 1], [1, 1], [0, 0]),
        ([2, 3, 5, 4], [2, 3, 2], [1, 1], [0, 0]),
        ([1, 2, 7, 6], [3, 3, 3], [2, 1], [1, 1]),
        ([2, 1, 3, 9], [2, 1, 4], [1, 3], [0, 2]),
        ([0, 2, 4, 4], [2, 3, 3], [1, 1], [1, 1]),
    ] {
        let inputs = [
            random(&[batch, channels, height, width], 1),
            random(&[out, channels, kh, kw], 2),
            random(&[out], 3),
        ];
        check(
            &format!("conv2d {batch}x{channels}x{height}x{width} by {out}x{kh}x{kw}, {stride:?} {padding:?}"),
            &inputs,
            |x| ops::conv2d(&x[0], &x[1], Some(Operand::from(&x[2])), stride, padding),
            |x| {
                let (shape, windows) = windows(&x[0], &Window2d { kernel: [kh, kw], stride, padding });
                let places = shape[2] * shape[3];
                let data = (0..batch * out * places).map(|i| {
                    let (b, o, place) = (i / places / out, i / places % out, i % places);
                    let product = |c: usize| -> f64 {
                        let kernel = &x[1].data[(o * channels + c) * kh * kw..][..kh * kw];
                        let window = &windows[(b * channels + c) * places + place];
                        kernel.iter().zip(window).map(|(w, x)| w * x).sum()
                    };
                    (0..channels).map(product).sum::<f64>() + x[2].data[o]
                });
                Array::new(&[batch, out, shape[2], shape[3]], data.collect())
            },
        );
    }
}

#[test]
fn pooling() {
    for (shape, kernel, stride, padding) in [
        ([1, 1, 1, 1], [1, 1], [1, 1], [0, 0]),
        ([2, 3, 6, 4], [2, 2], [2, 2], [0, 0]),
        ([1, 2, 5, 7], [3, 2], [1, 3], [0, 0]),
        ([2, 2, 4, 5], [3, 3], [2, 2], [1, 1]),
    ] {
        let window = Window2d { kernel, stride, padding };
        let what = format!("{shape:?} by {kernel:?}, {stride:?} {padding:?}");
        // Positive values, so that a padding of zeros is never the largest.
        let inputs = [random(&shape, 1).map(|x| x.abs() + 0.1)];
        let pooled = |x: &Array, f: fn(&Vec<f64>) -> f64| {
            let (shape, windows) = windows(x, &window);
            Array::new(&shape, windows.iter().map(f).collect())
        };
        check(
            &format!("max_pool2d {what}"),
            &inputs,
            |x| ops::max_pool2d(&x[0], window),
            |x| pooled(&x[0], |values| values.iter().copied().fold(f64::NEG_INFINITY, f64::max)),
        );
        check(
            &format!("avg_pool2d {what}"),
            &inputs,
            |x| ops::avg_pool2d(&x[0], window),
            |x| pooled(&x[0], |values| values.iter().sum::<f64>() / values.len() as f64),
        );
    }
}
