//! Attention over the active blocks of a layout: what it computes, what it refuses, and that time alone depends on what is not active.

use super::reference;
use std::num::NonZeroUsize;

use ferrospeed_tensor::ops::{self, AttentionOptions};
use ferrospeed_tensor::{BlockLayout, DType, Device, Documents, Tensor, autograd};

use super::reference::check::{check, random, tensor};
use super::reference::{Array, Visibility};

fn layout(block: usize, tokens: usize, heads: usize) -> BlockLayout {
    let blocks = tokens.div_ceil(block);
    BlockLayout::new(NonZeroUsize::new(block).unwrap(), blocks, heads, |head, row, columns| {
        // A window, a global block, and one far away that differs by row and head.
        columns[row.saturating_sub(1)..=row].fill(true);
        columns[0] = true;
        columns[(row * 5 + head * 3 + 2) % blocks] = true;
    })
}

/// The layout as a bias of all pairs.
fn bias(layout: &BlockLayout, heads: usize, tokens: usize) -> Vec<f32> {
    let place = |i: usize| (i / tokens / tokens, i / tokens % tokens, i % tokens);
    let seen = |i: usize| {
        let (head, query, key) = place(i);
        layout.is_active(head, query / layout.block(), key / layout.block())
    };
    (0..heads * tokens * tokens).map(|i| if seen(i) { 0.0 } else { f32::NEG_INFINITY }).collect()
}

fn of_batch(batch: usize, bias: &[f32]) -> Vec<f64> {
    let all: Vec<f64> = bias.iter().map(|&x| f64::from(x)).collect();
    all.repeat(batch)
}

#[test]
fn values_and_gradients_are_those_of_active_blocks() {
    // Blocks that divide the length and that do not, one layout and one for each head, grouped heads, odd widths.
    for ([tokens, block, heads, kv_heads, dim], causal, squares) in [
        ([16, 4, 2, 2, 3], false, 1),
        ([16, 4, 2, 1, 3], true, 2),
        ([13, 4, 4, 2, 2], false, 4),
        ([11, 3, 2, 2, 5], true, 1),
        ([5, 8, 1, 1, 4], false, 1),
        ([6, 1, 2, 2, 1], true, 2),
    ] {
        let layout = layout(block, tokens, squares);
        let shape = |heads| [2, tokens, heads, dim];
        let inputs = [random(&shape(heads), 1), random(&shape(kv_heads), 2), random(&shape(kv_heads), 3)];
        let bias = of_batch(2, &bias(&layout, heads, tokens));
        let rule = Visibility { causal, bias: Some(bias), ..Default::default() };
        let options = AttentionOptions { causal, blocks: Some(layout), ..Default::default() };
        check(
            &format!("{tokens} tokens, blocks of {block}, {heads} heads"),
            &inputs,
            |x| ops::attention(&x[0], &x[1], &x[2], &options),
            |x| reference::attention(&x[0], &x[1], &x[2], &rule),
        );
    }
}

#[test]
fn biases_and_masks_meet_the_layout_and_a_row_without_keys_gives_zeros() {
    let (batch, tokens, heads, dim) = (2, 10, 2, 3);
    let device = ferrospeed_cpu::with_threads(1);
    let layout = layout(4, tokens, 1);
    let inputs = [1, 2, 3].map(|stream| random(&[batch, tokens, heads, dim], stream));
    // Of the second sequence no key is left that the first block sees.
    let hides = |b: usize, key: usize| b == 1 && layout.is_active(0, 0, key / 4);
    let key_bias: Vec<f32> = (0..batch * tokens)
        .map(|i| if hides(i / tokens, i % tokens) { f32::NEG_INFINITY } else { (i % 5) as f32 * 0.3 })
        .collect();
    let key_mask: Vec<u8> = (0..batch * tokens).map(|i| u8::from(i % 7 != 3)).collect();
    let score_bias = random(&[heads, tokens, tokens], 4);
    let mut whole = of_batch(batch, &bias(&layout, heads, tokens));
    for (i, value) in whole.iter_mut().enumerate() {
        let (b, key) = (i / (heads * tokens * tokens), i % tokens);
        *value += f64::from(key_bias[b * tokens + key]) + score_bias.data[i % (heads * tokens * tokens)];
    }
    let rule = Visibility {
        bias: Some(whole),
        key_mask: Some(key_mask.iter().map(|&kept| kept != 0).collect()),
        ..Default::default()
    };
    let of_keys = |values: &[f32]| Tensor::from_slice(values, [batch, tokens], &device).unwrap();
    let options = AttentionOptions {
        blocks: Some(layout.clone()),
        key_bias: Some(of_keys(&key_bias)),
        key_mask: Some(Tensor::from_slice(&key_mask, [batch, tokens], &device).unwrap()),
        score_bias: Some(tensor(&score_bias, &device)),
        ..Default::default()
    };
    let truth = reference::attention(&inputs[0], &inputs[1], &inputs[2], &rule);
    let first_of_second = &truth.data[tokens * heads * dim..][..heads * dim];
    assert!(first_of_second.iter().all(|&x| x == 0.0), "a row that sees nothing");
    check(
        "biases",
        &inputs,
        |x| ops::attention(&x[0], &x[1], &x[2], &options),
        |x| reference::attention(&x[0], &x[1], &x[2], &rule),
    );
}

/// Value and gradients.
fn run([q, k, v]: &[Array; 3], dtype: DType, options: &AttentionOptions, device: &Device) -> [Vec<f32>; 4] {
    let inputs = [q, k, v].map(|x| ops::cast(tensor(x, device), dtype).unwrap().detach().tracked());
    let y = ops::attention(&inputs[0], &inputs[1], &inputs[2], options).unwrap();
    let value = y.to_vec_f32().unwrap();
    let cotangent = random(y.sizes(), 9);
    let cotangent = ops::cast(tensor(&cotangent, device), dtype).unwrap();
    autograd::backward_with(&[(y, cotangent)]).unwrap();
    let [dq, dk, dv] = inputs.map(|x| x.grad().unwrap().to_vec_f32().unwrap());
    [value, dq, dk, dv]
}

#[test]
fn long_sequences_are_as_dense_ones_whose_other_blocks_are_hidden() {
    let device = ferrospeed_cpu::with_threads(2);
    for (dtype, tolerance) in [(DType::F32, 2e-5), (DType::BF16, 0.05), (DType::F16, 0.01)] {
        for ([tokens, block, heads, kv_heads, dim], causal) in [
            ([300, 16, 4, 2, 40], true),
            ([700, 16, 2, 2, 64], false),
            ([450, 100, 2, 1, 32], true),
            ([520, 128, 2, 2, 16], false),
        ] {
            let layout = layout(block, tokens, 1);
            let inputs = [(heads, 1), (kv_heads, 2), (kv_heads, 3)]
                .map(|(heads, stream)| random(&[2, tokens, heads, dim], stream));
            let hidden = bias(&layout, 1, tokens);
            let hidden = Tensor::from_slice(&hidden, [tokens, tokens], &device).unwrap();
            let dense = AttentionOptions { causal, score_bias: Some(hidden), ..Default::default() };
            let sparse = AttentionOptions { causal, blocks: Some(layout), ..Default::default() };
            let (found, wanted) =
                (run(&inputs, dtype, &sparse, &device), run(&inputs, dtype, &dense, &device));
            for (what, (found, wanted)) in ["value", "dq", "dk", "dv"].iter().zip(found.iter().zip(&wanted)) {
                let largest = wanted.iter().fold(1.0f32, |a, b| a.max(b.abs()));
                for (at, (a, b)) in found.iter().zip(wanted).enumerate() {
                    let near = (a - b).abs() <= tolerance * largest;
                    assert!(near, "{dtype} {tokens} {block}: {what} {at} is {a}, not {b}");
                }
            }
        }
    }
}

#[test]
fn a_layout_of_all_blocks_gives_the_bits_of_ordinary_attention() {
    let device = ferrospeed_cpu::with_threads(2);
    for dtype in [DType::F32, DType::BF16] {
        for causal in [false, true] {
            let all =
                BlockLayout::new(NonZeroUsize::new(16).unwrap(), 25, 1, |_, _, columns| columns.fill(true));
            let inputs = [1, 2, 3].map(|stream| random(&[1, 390, 2, 32], stream));
            let plain = AttentionOptions { causal, ..Default::default() };
            let sparse = AttentionOptions { blocks: Some(all), ..plain.clone() };
            assert_eq!(run(&inputs, dtype, &sparse, &device), run(&inputs, dtype, &plain, &device));
        }
    }
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    for dtype in [DType::F32, DType::BF16] {
        let inputs = [1, 2, 3].map(|stream| random(&[2, 200, 4, 24], stream));
        let options =
            AttentionOptions { causal: true, blocks: Some(layout(16, 200, 4)), ..Default::default() };
        let on = |threads| run(&inputs, dtype, &options, &ferrospeed_cpu::with_threads(threads));
        assert_eq!(on(1), on(3));
    }
}

#[test]
fn what_does_not_fit_is_refused_with_the_reason() {
    let device = ferrospeed_cpu::with_threads(1);
    let x = Tensor::zeros([1, 32, 2, 4], DType::F32, &device).unwrap();
    let half = Tensor::zeros([1, 16, 2, 4], DType::F32, &device).unwrap();
    let sparse = |layout| AttentionOptions { blocks: Some(layout), ..Default::default() };
    let floats = |sizes: &[usize]| Tensor::zeros(sizes, DType::F32, &device).unwrap();
    let documents = Documents::new(vec![vec![0, 5, 32]], &device).unwrap();
    for (q, options, expected) in [
        (&x, sparse(layout(16, 48, 1)), "3 × 3 blocks of 16 tokens for 32 tokens, which are 2 blocks"),
        (&x, sparse(layout(16, 32, 3)), "a layout of 3 heads for 2"),
        (&half, sparse(layout(16, 32, 1)), "16 queries over 32 keys"),
        (
            &x,
            AttentionOptions { documents: Some(documents), ..sparse(layout(16, 32, 1)) },
            "leave out one of the two",
        ),
        (
            &x,
            AttentionOptions { key_bias: Some(floats(&[32])), ..Default::default() },
            "key_bias is f32 of shape [32]",
        ),
        (&x, AttentionOptions { score_bias: Some(floats(&[3, 32, 32])), ..Default::default() }, "score_bias"),
    ] {
        let said = ops::attention(q, &x, &x, &options).unwrap_err().to_string();
        assert!(said.contains(expected), "{said}");
    }
}
