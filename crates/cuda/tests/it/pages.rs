//! Attention over a cache in blocks on the GPU, against the processor's.
//!
//! Without a device each test says so and passes: there is nothing to compare.

use std::sync::Arc;

use ferrospeed_tensor::ops::{self, AttentionOptions, Turn};
use ferrospeed_tensor::random::RandomKey;
use ferrospeed_tensor::{DType, Device, PageMap, PagedRows, PagedSequence, Pages, Tensor};
use ferrospeed_testkit::property::Random;

const BLOCK: usize = 16;
const BLOCKS: usize = 160;
/// Tokens of the texts.
const TEXTS: [usize; 6] = [1, 16, 37, 600, 1100, 20];

fn device() -> Option<Device> {
    if ferrospeed_cuda::device_count() == 0 {
        ferrospeed_testkit::skip::skip("no CUDA device");
        return None;
    }
    Some(ferrospeed_cuda::device(0, &ferrospeed_cpu::device()).expect("a device is there"))
}

#[derive(Clone, Copy)]
struct Case {
    heads: usize,
    kv_heads: usize,
    dim: usize,
    dtype: DType,
    window: Option<usize>,
    alibi: bool,
    /// Whether queries and keys are turned by their places.
    turned: bool,
}

/// Nothing but grouped queries.
const PLAIN: Case =
    Case { heads: 8, kv_heads: 2, dim: 64, dtype: DType::BF16, window: None, alibi: false, turned: false };

impl Case {
    fn options(&self, device: &Device) -> AttentionOptions {
        let slopes: Vec<f32> = (0..self.heads).map(|head| 0.02 / (head + 1) as f32).collect();
        AttentionOptions {
            causal: true,
            window: self.window,
            alibi_slopes: self.alibi.then(|| Tensor::from_slice(&slopes, [self.heads], device).unwrap()),
            ..Default::default()
        }
    }

    /// Rows `from..to` of queries, keys and values of a text.
    fn rows(&self, text: usize, from: usize, to: usize) -> [Vec<f32>; 3] {
        let part = |part: usize, heads: usize| {
            let mut values = vec![0.0f32; TEXTS[text] * heads * self.dim];
            RandomKey::new(7, (10 * text + part) as u32).fill_normal(0, &mut values);
            values[from * heads * self.dim..to * heads * self.dim].to_vec()
        };
        [part(0, self.heads), part(1, self.kv_heads), part(2, self.kv_heads)]
    }

    fn cache(&self, device: &Device) -> [Tensor; 2] {
        // What no row may see is no number.
        [(); 2].map(|()| {
            Tensor::full([BLOCKS, BLOCK, self.kv_heads, self.dim], f32::NAN, self.dtype, device).unwrap()
        })
    }

    /// One pass over `(text, from, to)`.
    fn pass(&self, caches: &mut [Tensor; 2], pieces: &[(usize, usize, usize)], pages: &Pages) -> Vec<f32> {
        let device = &caches[0].device().clone();
        let mut parts = [vec![], vec![], vec![]];
        for &(text, from, to) in pieces {
            for (all, own) in parts.iter_mut().zip(self.rows(text, from, to)) {
                all.extend(own);
            }
        }
        let count = parts[0].len() / (self.heads * self.dim);
        let tensor = |values: &[f32], heads: usize| {
            Tensor::from_f32(values, [1, count, heads, self.dim], self.dtype, device).unwrap()
        };
        let [q, k, v] = [
            tensor(&parts[0], self.heads),
            tensor(&parts[1], self.kv_heads),
            tensor(&parts[2], self.kv_heads),
        ];
        let options = self.options(device);
        let out = match self.turned {
            false => ops::attention_paged([&q, &k, &v], caches.each_mut(), pages, &options),
            true => {
                let places: Vec<usize> = pieces.iter().flat_map(|&(_, from, to)| from..to).collect();
                let [cos, sin] = [f32::cos, f32::sin].map(|of| self.angles(&places, of, device));
                let turn = Turn { cos: &cos, sin: &sin, interleaved: false };
                ops::attention_paged_turned([q, k, v], caches.each_mut(), pages, &turn, &options)
            }
        };
        out.unwrap().to_vec_f32().unwrap()
    }

    fn angles(&self, places: &[usize], of: fn(f32) -> f32, device: &Device) -> Tensor {
        let pairs = self.dim / 2;
        let angle = |place: usize, pair: usize| place as f32 * 100f32.powf(-(pair as f32) / pairs as f32);
        let values: Vec<f32> =
            places.iter().flat_map(|&place| (0..pairs).map(move |pair| of(angle(place, pair)))).collect();
        Tensor::from_slice(&values, [1, places.len(), pairs], device).unwrap()
    }

    fn pages(&self, pieces: &[(usize, usize, usize)], device: &Device) -> Pages {
        Pages::new(Arc::new(rows(pieces)), self.heads / self.kv_heads, device).unwrap()
    }
}

/// Blocks of a text, scattered.
fn blocks(text: usize) -> Vec<u32> {
    let before: usize = TEXTS[..text].iter().map(|tokens| tokens.div_ceil(BLOCK)).sum();
    (0..TEXTS[text].div_ceil(BLOCK)).map(|block| ((before + block) * 37 % BLOCKS) as u32).collect()
}

fn rows(pieces: &[(usize, usize, usize)]) -> PagedRows {
    let sequences = pieces
        .iter()
        .map(|&(text, from, to)| PagedSequence { first: from, count: to - from, blocks: blocks(text) })
        .collect();
    PagedRows { sequences }
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (heads, kv_heads) in [(4, 4), (8, 2), (14, 2), (32, 1), (12, 1)] {
        for dim in [64, 128] {
            for (dtype, window, alibi) in
                [(DType::BF16, None, false), (DType::F16, Some(30), false), (DType::BF16, Some(300), true)]
            {
                cases.push(Case { heads, kv_heads, dim, dtype, window, alibi, turned: !alibi });
            }
        }
    }
    cases
}

#[test]
fn pages_on_the_device_are_read_as_on_the_host() {
    let Some(device) = device() else { return };
    let host = ferrospeed_cpu::with_threads(2);
    for case in cases() {
        let (mut caches, mut expected) = (case.cache(&device), case.cache(&host));
        let (mut done, mut cut) = ([0; TEXTS.len()], Random(3));
        while done != TEXTS {
            let mut pieces = Vec::new();
            for (text, done) in done.iter_mut().enumerate() {
                // Single tokens beside pieces of prompts.
                let most = if cut.below(3) == 0 { 1 } else { cut.below(500) };
                let to = (*done + most).min(TEXTS[text]);
                if to > *done {
                    pieces.push((text, *done, to));
                    *done = to;
                }
            }
            if pieces.is_empty() {
                continue;
            }
            let got = case.pass(&mut caches, &pieces, &case.pages(&pieces, &device));
            let want = case.pass(&mut expected, &pieces, &case.pages(&pieces, &host));
            for (at, (got, want)) in got.iter().zip(&want).enumerate() {
                let near = (got - want).abs() <= 0.012 + 0.012 * want.abs();
                assert!(
                    near,
                    "{} heads of {}, {:?} {pieces:?}: {got} for {want} at {at}",
                    case.heads, case.dim, case.window
                );
            }
        }
    }
}

#[test]
fn a_single_row_has_the_same_bits_in_company_and_in_a_map_that_is_filled_anew() {
    let Some(device) = device() else { return };
    for case in cases() {
        let mut caches = case.cache(&device);
        let prompts: Vec<_> = (1..TEXTS.len()).map(|text| (text, 0, TEXTS[text] - 1)).collect();
        case.pass(&mut caches, &prompts, &case.pages(&prompts, &device));
        let last: Vec<_> = (1..TEXTS.len()).map(|text| (text, TEXTS[text] - 1, TEXTS[text])).collect();
        let together = case.pass(&mut caches, &last, &case.pages(&last, &device));
        let width = together.len() / last.len();
        let map = PageMap::for_single_rows(1, case.heads / case.kv_heads, BLOCK, 2048, &device).unwrap();
        let filled = Pages { rows: Arc::new(rows(&last[..1])), map: Some(Arc::new(map)) };
        for (index, piece) in last.iter().enumerate() {
            let own = &together[index * width..(index + 1) * width];
            let pieces = std::slice::from_ref(piece);
            assert_eq!(case.pass(&mut caches, pieces, &case.pages(pieces, &device)), own, "text {}", piece.0);
            filled.map.as_ref().unwrap().fill(&rows(pieces)).unwrap();
            assert_eq!(case.pass(&mut caches, pieces, &filled), own, "text {} by a filled map", piece.0);
        }
    }
}

#[test]
fn rows_that_are_nobodys_come_out_as_zeros_and_touch_nothing() {
    let Some(device) = device() else { return };
    let case = cases()[4];
    let mut caches = case.cache(&device);
    let map = PageMap::for_single_rows(3, case.heads / case.kv_heads, BLOCK, 64, &device).unwrap();
    map.fill(&rows(&[(0, 0, 1)])).unwrap();
    let pages = Pages { rows: Arc::new(rows(&[(0, 0, 1)])), map: Some(Arc::new(map)) };
    // Three rows of which the map knows one.
    let out = case.pass(&mut caches, &[(0, 0, 1), (1, 0, 1), (2, 0, 1)], &pages);
    let width = case.heads * case.dim;
    assert!(out[..width].iter().any(|value| *value != 0.0));
    assert!(out[width..].iter().all(|value| *value == 0.0));
    let written = caches[0].to_vec_f32().unwrap().iter().filter(|value| !value.is_nan()).count();
    assert_eq!(written, case.kv_heads * case.dim);
    let wrong = pages.map.as_ref().unwrap().fill(&rows(&[(3, 100, 101)]));
    assert!(wrong.unwrap_err().to_string().contains("none that its map was made for"));
}

#[test]
fn keys_of_long_texts_are_spread_in_larger_chunks_and_joined() {
    let Some(device) = device() else { return };
    let host = ferrospeed_cpu::with_threads(2);
    let case = PLAIN;
    let most = 40_000usize.div_ceil(BLOCK);
    let shape = [most, BLOCK, case.kv_heads, case.dim];
    let mut values = vec![0.0f32; shape.iter().product()];
    RandomKey::new(9, 1).fill_normal(0, &mut values);
    let cache =
        |device: &Device| [(); 2].map(|()| Tensor::from_f32(&values, shape, case.dtype, device).unwrap());
    let (mut caches, mut expected) = (cache(&device), cache(&host));
    for place in [126usize, 127, 128, 4095, 4096, 4100, 32_767, 32_768, 39_999] {
        let blocks = (0..most as u32).rev().take((place + 1).div_ceil(BLOCK)).collect();
        let rows = PagedRows { sequences: vec![PagedSequence { first: place, count: 1, blocks }] };
        let pass = |caches: &mut [Tensor; 2], device: &Device| {
            let [q, k, v] = case.rows(3, 5, 6);
            let tensor = |values: &[f32], heads| {
                Tensor::from_f32(values, [1, 1, heads, case.dim], case.dtype, device).unwrap()
            };
            let [q, k, v] = [tensor(&q, case.heads), tensor(&k, case.kv_heads), tensor(&v, case.kv_heads)];
            let pages = Pages::new(Arc::new(rows.clone()), case.heads / case.kv_heads, device).unwrap();
            let options = case.options(device);
            let out = ops::attention_paged([&q, &k, &v], caches.each_mut(), &pages, &options).unwrap();
            out.to_vec_f32().unwrap()
        };
        let (got, want) = (pass(&mut caches, &device), pass(&mut expected, &host));
        // Twice: what finds the last block of threads is as it was.
        assert_eq!(got, pass(&mut caches, &device), "at {place}");
        for (got, want) in got.iter().zip(&want) {
            assert!((got - want).abs() <= 0.004 + 0.012 * want.abs(), "at {place}: {got} for {want}");
        }
    }
}

/// So many that the device is full without cutting their keys as small as those of few: texts of different lengths with a common
/// beginning, each with a last block of its own.
#[test]
fn many_texts_are_read_as_on_the_host() {
    let Some(device) = device() else { return };
    let host = ferrospeed_cpu::with_threads(2);
    let case = PLAIN;
    let (texts, shared) = (200, 1300usize.div_ceil(BLOCK));
    let shape = [shared + texts, BLOCK, case.kv_heads, case.dim];
    let values = |count: usize, stream: u32| {
        let mut values = vec![0.0f32; count];
        RandomKey::new(9, stream).fill_normal(0, &mut values);
        values
    };
    let cached = values(shape.iter().product(), 1);
    let sequences = (0..texts).map(|text| {
        let first = 6 * text + 17;
        let blocks = (0..first / BLOCK).chain([shared + text]).map(|block| block as u32).collect();
        PagedSequence { first, count: 1, blocks }
    });
    let rows = Arc::new(PagedRows { sequences: sequences.collect() });
    let pass = |device: &Device| {
        let tensor =
            |shape: &[usize], values: &[f32]| Tensor::from_f32(values, shape, case.dtype, device).unwrap();
        let mut caches = [(); 2].map(|()| tensor(&shape, &cached));
        let [q, k, v] = [case.heads, case.kv_heads, case.kv_heads].map(|heads| {
            let shape = [1, texts, heads, case.dim];
            tensor(&shape, &values(shape.iter().product(), 2 + heads as u32))
        });
        let pages = Pages::new(rows.clone(), case.heads / case.kv_heads, device).unwrap();
        let out =
            ops::attention_paged([&q, &k, &v], caches.each_mut(), &pages, &case.options(device)).unwrap();
        out.to_vec_f32().unwrap()
    };
    let (got, want) = (pass(&device), pass(&host));
    assert_eq!(got, pass(&device));
    for (at, (got, want)) in got.iter().zip(&want).enumerate() {
        assert!((got - want).abs() <= 0.004 + 0.012 * want.abs(), "at {at}: {got} for {want}");
    }
}
