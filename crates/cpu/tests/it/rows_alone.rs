//! Rows that share a product, or a pass over a paged cache, with others have the bits that they have alone.

use std::sync::Arc;

use ferrospeed_tensor::backend::{Gemm, Matrix};
use ferrospeed_tensor::ops::{self, AttentionOptions};
use ferrospeed_tensor::random::RandomKey;
use ferrospeed_tensor::{Activation, DType, Device, PagedRows, PagedSequence, Pages, Tensor, rows_alone};
use ferrospeed_testkit::close::assert_close;
use ferrospeed_testkit::property::Random;

fn random(shape: &[usize], stream: u32, dtype: DType, device: &Device) -> Tensor {
    let mut values = vec![0.0f32; shape.iter().product()];
    RandomKey::new(5, stream).fill_normal(0, &mut values);
    Tensor::from_f32(&values, shape, dtype, device).unwrap()
}

/// The first `m` rows of a product with everything fused.
fn product([m, k, n]: [usize; 3], turned: bool, dtype: DType, threads: usize) -> Vec<f32> {
    [false, true].map(|fresh| one_product([m, k, n], turned, dtype, threads, fresh)).concat()
}

fn one_product([m, k, n]: [usize; 3], turned: bool, dtype: DType, threads: usize, fresh: bool) -> Vec<f32> {
    let device = ferrospeed_cpu::with_threads(threads);
    let a = random(&[300, k], 1, dtype, &device);
    let b = random(&if turned { [n, k] } else { [k, n] }, 2, dtype, &device);
    let bias = random(&[n], 3, dtype, &device);
    let mut c = Tensor::full([m, n], 1.0, dtype, &device).unwrap();
    let right = Matrix { transposed: turned, ..Matrix::whole(&b) };
    let gemm = Gemm {
        alpha: if fresh { 1.0 } else { 0.5 },
        accumulate: !fresh,
        bias: Some(&bias),
        activation: Some(Activation::Silu),
        ..Gemm::plain(m, n, k, Matrix::whole(&a), right, c.out().unwrap())
    };
    rows_alone(|| device.backend().gemm(gemm)).unwrap();
    c.to_vec_f32().unwrap()
}

#[test]
fn a_row_of_a_product_has_the_same_bits_whatever_the_number_of_rows() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for turned in [false, true] {
            for [k, n] in [[64, 48], [130, 67], [1, 5], [1088, 75]] {
                let all = product([300, k, n], turned, dtype, 2);
                for m in [1, 2, 3, 4, 5, 16, 17, 31, 33, 130] {
                    let some = product([m, k, n], turned, dtype, 1);
                    for (some, all) in some.chunks(m * n).zip(all.chunks(300 * n)) {
                        assert_eq!(some, &all[..m * n], "{dtype} {turned} {k} {n}: {m} rows");
                    }
                }
            }
        }
    }
}

#[test]
fn products_are_what_they_are_outside() {
    let device = ferrospeed_cpu::device();
    let (x, w) = (random(&[37, 96], 1, DType::F32, &device), random(&[50, 96], 2, DType::F32, &device));
    let linear = || ops::linear(&x, &w, None, ops::WeightLayout::OutIn).unwrap().to_vec::<f32>().unwrap();
    assert_close("linear", &rows_alone(linear), &linear(), 1e-4, 1e-4);
}

const BLOCK: usize = 16;
const BLOCKS: usize = 64;
const KV_HEADS: usize = 2;
const DIM: usize = 24;

/// Queries, keys and values of all tokens of a sequence, `[1, tokens, …, DIM]`.
struct Text {
    parts: [Tensor; 3],
    tokens: usize,
    blocks: Vec<u32>,
}

struct Bench {
    device: Device,
    options: AttentionOptions,
    texts: Vec<Text>,
}

impl Bench {
    fn new(heads: usize, dtype: DType, options: fn(&Device, usize) -> AttentionOptions) -> Bench {
        let device = ferrospeed_cpu::with_threads(2);
        let mut free: Vec<u32> = (0..BLOCKS as u32).map(|block| block * 37 % BLOCKS as u32).collect();
        let text = |(index, &tokens): (usize, &usize)| {
            let part = |part: usize| {
                let heads = if part == 0 { heads } else { KV_HEADS };
                random(&[1, tokens, heads, DIM], (10 * index + part) as u32, dtype, &device)
            };
            let blocks = free.split_off(free.len() - tokens.div_ceil(BLOCK));
            Text { parts: [part(0), part(1), part(2)], tokens, blocks }
        };
        let texts = [1, 16, 37, 300, 20].iter().enumerate().map(text).collect();
        Bench { options: options(&device, heads), texts, device }
    }

    /// Computes every text in passes cut by `random`, and gives the attention of every token.
    fn run(&self, cut: &mut Random) -> Vec<Vec<f32>> {
        let dtype = self.texts[0].parts[0].dtype();
        let cache = || Tensor::full([BLOCKS, BLOCK, KV_HEADS, DIM], f32::NAN, dtype, &self.device).unwrap();
        let mut caches = [cache(), cache()];
        let mut done = vec![0; self.texts.len()];
        let mut results = vec![Vec::new(); self.texts.len()];
        while done.iter().zip(&self.texts).any(|(&done, text)| done < text.tokens) {
            let (mut rows, mut who, mut parts) = (PagedRows::default(), Vec::new(), [vec![], vec![], vec![]]);
            for (index, text) in self.texts.iter().enumerate() {
                let count = cut.below(60).min(text.tokens - done[index]);
                if count == 0 {
                    continue;
                }
                rows.sequences.push(PagedSequence { first: done[index], count, blocks: text.blocks.clone() });
                for (part, whole) in parts.iter_mut().zip(&text.parts) {
                    part.push(ops::narrow(whole, 1, done[index], count).unwrap());
                }
                done[index] += count;
                who.push((index, count));
            }
            if who.is_empty() {
                continue;
            }
            let [q, k, v] = parts.map(|part| ops::concat(&part, 1).unwrap());
            let pages = Pages::new(Arc::new(rows), q.sizes()[2] / KV_HEADS, &self.device).unwrap();
            let out = ops::attention_paged([&q, &k, &v], caches.each_mut(), &pages, &self.options).unwrap();
            let out = out.to_vec_f32().unwrap();
            let width = out.len() / q.sizes()[1];
            let mut rest = &out[..];
            for (index, count) in who {
                results[index].extend_from_slice(&rest[..count * width]);
                rest = &rest[count * width..];
            }
        }
        results
    }
}

fn kinds() -> Vec<(&'static str, fn(&Device, usize) -> AttentionOptions)> {
    let plain: fn(&Device, usize) -> AttentionOptions =
        |_, _| AttentionOptions { causal: true, scale: Some(0.3), ..Default::default() };
    vec![
        ("plain", plain),
        ("window", |_, _| AttentionOptions { causal: true, window: Some(20), ..Default::default() }),
        ("alibi", |device, heads| {
            let slopes: Vec<f32> = (1..=heads).map(|head| 0.1 / head as f32).collect();
            let slopes = Some(Tensor::from_slice(&slopes, [heads], device).unwrap());
            AttentionOptions { causal: true, alibi_slopes: slopes, ..Default::default() }
        }),
    ]
}

#[test]
fn attention_over_pages_is_attention_and_does_not_depend_on_how_a_pass_is_cut() {
    for dtype in [DType::F32, DType::BF16] {
        for heads in [2, 6] {
            for (name, options) in kinds() {
                let bench = Bench::new(heads, dtype, options);
                let first = bench.run(&mut Random(1));
                for seed in 2..6 {
                    assert_eq!(
                        bench.run(&mut Random(seed)),
                        first,
                        "{name} {dtype} {heads} heads, cut {seed}"
                    );
                }
                for (text, ours) in bench.texts.iter().zip(&first) {
                    let wide = text.parts.each_ref().map(|part| ops::cast(part, DType::F32).unwrap());
                    let whole = ops::attention(&wide[0], &wide[1], &wide[2], &bench.options).unwrap();
                    let tolerance = if dtype == DType::F32 { 1e-5 } else { 1e-2 };
                    assert_close(name, ours, &whole.to_vec_f32().unwrap(), tolerance, tolerance);
                }
            }
        }
    }
}

#[test]
fn pages_that_do_not_fit_are_refused() {
    let device = ferrospeed_cpu::device();
    let new = |heads| Tensor::zeros([1, 3, heads, DIM], DType::F32, &device).unwrap();
    let mut caches = [(); 2].map(|()| Tensor::zeros([4, BLOCK, KV_HEADS, DIM], DType::F32, &device).unwrap());
    let options = AttentionOptions { causal: true, ..Default::default() };
    let mut refused = |first, count, blocks: &[u32], heads, options: &AttentionOptions| {
        let rows = PagedRows { sequences: vec![PagedSequence { first, count, blocks: blocks.to_vec() }] };
        let (q, kv) = (new(heads), new(KV_HEADS));
        let pages = Pages::new(Arc::new(rows), 1, &device).unwrap();
        ops::attention_paged([&q, &kv, &kv], caches.each_mut(), &pages, options).is_err()
    };
    assert!(!refused(0, 3, &[3], 4, &options));
    assert!(refused(0, 2, &[3], 4, &options), "another number of rows");
    assert!(refused(14, 3, &[3], 4, &options), "tokens behind the last block");
    assert!(refused(0, 3, &[4], 4, &options), "a block that is not there");
    assert!(refused(0, 3, &[3], 3, &options), "heads that cannot be shared");
    assert!(refused(0, 3, &[3], 4, &AttentionOptions::default()), "rows that see what follows");
}
