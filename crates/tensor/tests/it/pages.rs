//! Attention over a cache in blocks, by kernels that read blocks and by those that do not.

use std::sync::Arc;

use ferrospeed_tensor::ops::{self, AttentionOptions};
use ferrospeed_tensor::random::RandomKey;
use ferrospeed_tensor::{DType, PagedRows, PagedSequence, Pages, Tensor};

#[test]
fn what_is_gathered_is_what_the_kernel_reads() {
    let device = ferrospeed_cpu::device();
    let random = |shape: &[usize], stream| {
        let mut values = vec![0.0f32; shape.iter().product()];
        RandomKey::new(3, stream).fill_normal(0, &mut values);
        Tensor::from_f32(&values, shape, DType::F32, &device).unwrap()
    };
    let [q, k, v] = [4, 2, 2].map(|heads| random(&[1, 8, heads, 8], heads as u32 + 10));
    let one = |first, count, blocks: &[u32]| PagedSequence { first, count, blocks: blocks.to_vec() };
    let rows = PagedRows { sequences: vec![one(40, 3, &[5, 1, 7]), one(15, 4, &[8, 0]), one(0, 1, &[2])] };
    let options = AttentionOptions { causal: true, window: Some(30), ..Default::default() };
    let pages = Pages::new(Arc::new(rows), 2, &device).unwrap();
    let [paged, gathered] = [ops::attention_paged, ops::attention_gathered].map(|attention| {
        let mut caches = [random(&[9, 16, 2, 8], 1), random(&[9, 16, 2, 8], 2)];
        attention([&q, &k, &v], caches.each_mut(), &pages, &options).unwrap().to_vec::<f32>().unwrap()
    });
    assert!(paged.iter().zip(&gathered).all(|(a, b)| (a - b).abs() < 1e-5), "{paged:?}\n{gathered:?}");
}
