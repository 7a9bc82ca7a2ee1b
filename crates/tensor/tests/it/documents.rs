//! Documents that share a row: each has the bits that it has alone, forward and backward, on every kernel family; and
//! borders that are none are refused.

use super::reference;
use ferrospeed_testkit::child;
use std::ops::Range;

use super::reference::{Array, Visibility};
use ferrospeed_tensor::ops::{self, AttentionOptions, PackedHeads};
use ferrospeed_tensor::random::{self, RandomKey, RandomState};
use ferrospeed_tensor::{DType, Device, Documents, Result, Tensor, autograd};

const TOKENS: usize = 300;
const DIM: usize = 16;

/// Rows of documents: some fill no tile, some several blocks.
fn borders() -> Vec<Vec<usize>> {
    vec![vec![0, 1, 6, 40, TOKENS], vec![0, 270, TOKENS], vec![0, TOKENS]]
}

fn normal(shape: &[usize], stream: u32, dtype: DType, device: &Device) -> Tensor {
    let mut values = vec![0.0f32; shape.iter().product()];
    RandomKey::new(11, stream).fill_normal(0, &mut values);
    Tensor::from_f32(&values, shape, dtype, device).unwrap()
}

/// Some tokens of a row of `x [rows, tokens, …]`.
fn part(x: &Tensor, row: usize, tokens: &Range<usize>) -> Tensor {
    let width = x.numel() / x.sizes()[0] / x.sizes()[1];
    let mut sizes = x.sizes().to_vec();
    (sizes[0], sizes[1]) = (1, tokens.len());
    x.slice((row * x.sizes()[1] + tokens.start) * width, &sizes).unwrap()
}

/// The result and the gradients of the inputs, from one gradient of the result.
fn run(inputs: &[Tensor], gradient: &Tensor, attend: impl Fn(&[Tensor]) -> Result<Tensor>) -> Vec<Tensor> {
    let tracked: Vec<Tensor> = inputs.iter().map(Tensor::tracked).collect();
    let y = attend(&tracked).unwrap();
    autograd::backward_with(&[(y.clone(), gradient.view(*y.shape()).unwrap())]).unwrap();
    std::iter::once(y.detach()).chain(tracked.iter().map(|x| x.grad().unwrap())).collect()
}

fn bits(x: &Tensor) -> Vec<u32> {
    x.to_vec_f32().unwrap().into_iter().map(f32::to_bits).collect()
}

/// Compares rows of documents with each document alone.
fn assert_alike(
    what: &str,
    inputs: &[Tensor],
    options: &AttentionOptions,
    attend: impl Fn(&[Tensor], &AttentionOptions) -> Result<Tensor>,
) {
    let device = inputs[0].device();
    let rows = inputs[0].sizes()[0];
    let documents = Documents::new(borders(), device).unwrap();
    let within = AttentionOptions { documents: Some(documents.clone()), ..options.clone() };
    let result = attend(inputs, &within).unwrap();
    let gradient = normal(result.sizes(), 9, result.dtype(), device);
    let together = run(inputs, &gradient, |x| attend(x, &within));
    for row in 0..rows {
        for tokens in documents.of_row(row) {
            let own: Vec<Tensor> = inputs.iter().map(|x| part(x, row, &tokens)).collect();
            let key_mask = options.key_mask.as_ref().map(|mask| part(mask, row, &tokens));
            let options = AttentionOptions { key_mask, ..options.clone() };
            let alone = run(&own, &part(&gradient, row, &tokens), |x| attend(x, &options));
            for (index, (together, alone)) in together.iter().zip(&alone).enumerate() {
                let ours = part(together, row, &tokens);
                assert!(bits(&ours) == bits(alone), "{what}: row {row}, tokens {tokens:?}, result {index}");
            }
        }
    }
}

#[test]
fn a_document_in_a_row_has_the_bits_it_has_alone() {
    let device = ferrospeed_cpu::with_threads(2);
    let rows = borders().len();
    let causal = AttentionOptions { causal: true, ..Default::default() };
    let slopes = Tensor::from_slice(&[0.5f32, 0.25, 0.1, 0.05], [4], &device).unwrap();
    let mask: Vec<u8> = (0..rows * TOKENS).map(|token| u8::from(token % 5 != 1)).collect();
    let mask = Tensor::from_slice(&mask, [rows, TOKENS], &device).unwrap();
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for (what, options) in [
            ("all", AttentionOptions::default()),
            ("causal", causal.clone()),
            ("window", AttentionOptions { window: Some(37), ..causal.clone() }),
            ("ALiBi", AttentionOptions { alibi_slopes: Some(slopes.clone()), ..causal.clone() }),
            ("mask", AttentionOptions { key_mask: Some(mask.clone()), ..causal.clone() }),
        ] {
            for kv_heads in [4, 2] {
                let shape = |heads| [rows, TOKENS, heads, DIM];
                let inputs = [shape(4), shape(kv_heads), shape(kv_heads)];
                let inputs = [0, 1, 2].map(|i| normal(&inputs[i], i as u32, dtype, &device));
                let what = format!("{what}, {dtype}, {kv_heads} key heads");
                assert_alike(&what, &inputs, &options, |x, options| {
                    ops::attention(&x[0], &x[1], &x[2], options)
                });
            }
            for layout in [PackedHeads::Thirds, PackedHeads::PerHead] {
                let qkv = [normal(&[rows, TOKENS, 3 * 4 * DIM], 5, dtype, &device)];
                assert_alike(&format!("{what}, {dtype}, {layout:?}"), &qkv, &options, |x, options| {
                    ops::attention_packed(&x[0], 4, layout, options)
                });
            }
        }
    }
}

/// The level is chosen once per process.
#[test]
fn every_kernel_family_stops_at_borders() {
    for level in ["portable", "avx2", "avx512", "avx512_bf16"] {
        let output = child::alone(module_path!(), "a_document_in_a_row_has_the_bits_it_has_alone")
            .env("FERROSPEED_CPU_KERNELS", level)
            .output()
            .unwrap();
        child::assert_passed(&output);
    }
}

#[test]
fn values_and_gradients_are_those_of_documents_apart() {
    let borders = vec![vec![0, 2, 3, 7], vec![0, 4, 7]];
    let documents = Documents::new(borders, &ferrospeed_cpu::device()).unwrap();
    let rule = Visibility { causal: true, ..Default::default() };
    let inputs = [2usize, 1, 1].map(|heads| reference::check::random(&[2, 7, heads, 3], heads as u32));
    reference::check::check(
        "attention within documents",
        &inputs,
        |x| {
            let options =
                AttentionOptions { causal: true, documents: Some(documents.clone()), ..Default::default() };
            ops::attention(&x[0], &x[1], &x[2], &options)
        },
        |x| {
            let mut out = vec![0.0; 2 * 7 * 2 * 3];
            for row in 0..2 {
                for tokens in documents.of_row(row) {
                    let [q, k, v] = [0, 1, 2].map(|i| {
                        let width = x[i].shape[2] * 3;
                        let own = (row * 7 + tokens.start) * width..(row * 7 + tokens.end) * width;
                        Array::new(&[1, tokens.len(), x[i].shape[2], 3], x[i].data[own].to_vec())
                    });
                    let own = (row * 7 + tokens.start) * 6..(row * 7 + tokens.end) * 6;
                    out[own].copy_from_slice(&reference::attention(&q, &k, &v, &rule).data);
                }
            }
            Array::new(&[2, 7, 2, 3], out)
        },
    );
}

/// What is dropped depends on where a weight is in the whole row, so equal documents lose different weights.
#[test]
fn equal_documents_of_a_row_lose_weights_of_their_own() {
    let device = ferrospeed_cpu::with_threads(1);
    let document = normal(&[1, 12, 2, 8], 1, DType::F32, &device).to_vec_f32().unwrap();
    let x = Tensor::from_slice(&document.repeat(2), [1, 24, 2, 8], &device).unwrap();
    let attend = |dropout| {
        random::set_state(RandomState { seed: 2, step: 1, next_stream: 0 });
        let documents = Some(Documents::new(vec![vec![0, 12, 24]], &device).unwrap());
        let options = AttentionOptions { causal: true, dropout, documents, ..Default::default() };
        let out = ops::attention(&x, &x, &x, &options).unwrap().to_vec_f32().unwrap();
        let (first, second) = out.split_at(out.len() / 2);
        (first.to_vec(), second.to_vec())
    };
    let (first, second) = attend(0.0);
    assert_eq!(first, second);
    let (first, second) = attend(0.5);
    assert_ne!(first, second);
    assert_eq!(attend(0.5), (first, second), "the same every time");
}

#[test]
fn documents_of_another_batch_and_of_parts_are_refused() {
    let device = ferrospeed_cpu::device();
    let x = |tokens: usize| Tensor::zeros([1, tokens, 1, 4], DType::F32, &device).unwrap();
    let within = |borders: Vec<usize>| AttentionOptions {
        documents: Some(Documents::new(vec![borders], &device).unwrap()),
        ..Default::default()
    };
    for (queries, keys, options, expected) in [
        (8, 8, within(vec![0, 3, 9]), "described for 1 rows of 9 tokens, and there are 1 of 8"),
        (8, 8, within(vec![0, 7]), "described for 1 rows of 7 tokens"),
        (2, 8, within(vec![0, 3, 8]), "2 queries over 8 keys"),
        (8, 8, AttentionOptions { first_query: Some(3), ..within(vec![0, 8]) }, "8 queries over 8 keys"),
    ] {
        let error = ops::attention(&x(queries), &x(keys), &x(keys), &options).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let stretch = ops::Stretch { tensor: &x(8), tokens: 0..8 };
    let error = ops::attention_part(&stretch, [&stretch, &stretch], &within(vec![0, 8])).unwrap_err();
    assert!(error.to_string().contains("not of parts"), "{error}");
}

#[test]
fn documents_brought_together_give_what_they_give_where_they_lie() {
    let device = ferrospeed_cpu::device();
    let documents = Documents::new(vec![vec![0, 70, 75, 200], vec![0, 130, 200]], &device).unwrap();
    let options =
        AttentionOptions { causal: true, window: Some(50), documents: Some(documents), ..Default::default() };
    let random = |heads: usize, stream: u32| {
        let mut values = vec![0.0f32; 2 * 200 * heads * 8];
        RandomKey::new(7, stream).fill_normal(0, &mut values);
        Tensor::from_slice(&values, [2, 200, heads, 8], &device).unwrap().tracked()
    };
    let [together, apart] = [ops::attention_by_sequences, ops::attention].map(|attention| {
        let qkv = [random(4, 0), random(2, 1), random(2, 2)];
        let out = attention(&qkv[0], &qkv[1], &qkv[2], &options).unwrap();
        let weighted = ops::mul(&out, random(4, 3).detach()).unwrap();
        autograd::backward(&ops::sum(weighted).unwrap()).unwrap();
        let mut all = vec![out.to_vec_f32().unwrap()];
        all.extend(qkv.iter().map(|x| x.grad().unwrap().to_vec_f32().unwrap()));
        all
    });
    for (together, apart) in together.iter().zip(apart) {
        assert_eq!(together.len(), apart.len());
        for (a, b) in together.iter().zip(apart) {
            assert!((a - b).abs() < 1e-5, "{a} and {b}");
        }
    }
}
