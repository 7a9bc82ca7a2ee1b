//! Layers in slices against the same layers whole: the loss, and who draws which random numbers.

use std::ops::Range;

use ferrospeed_comm::{Group, World};
use ferrospeed_nn::tensor_parallel::{Cut, Slices, linear_cross_entropy};
use ferrospeed_nn::{
    AttentionConfig, Embedding, HeadProjections, Init, Linear, Mode, MultiHeadAttention, Visibility,
};
use ferrospeed_tensor::ops::{self, CrossEntropyOptions, WeightLayout};
use ferrospeed_tensor::random::{self, RandomState};
use ferrospeed_tensor::store::{FromInitializers, ParamSource, PlainStore};
use ferrospeed_tensor::{DType, Param, Result, Tensor, autograd, profile};

/// Runs `work` on every rank of a group of threads.
fn on_ranks<R: Send + 'static>(
    ranks: usize,
    work: impl Fn(&Group) -> R + Send + Sync + Copy + 'static,
) -> Vec<R> {
    let start = |world: World| std::thread::spawn(move || work(&world.group()));
    let threads: Vec<_> = World::threads(ranks).into_iter().map(start).collect();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

fn assert_near(found: &[f32], wanted: &[f32], what: &str) {
    assert_eq!(found.len(), wanted.len(), "{what}");
    let size = wanted.iter().fold(1e-3f32, |size, value| size.max(value.abs()));
    for (a, b) in found.iter().zip(wanted) {
        assert!((a - b).abs() <= 1e-5 * size, "{what}: {found:?}, not {wanted:?}");
    }
}

const TOKENS: usize = 11;
const WIDTH: usize = 6;
const IGNORED: i64 = -100;

fn hidden(scale: f32) -> Vec<f32> {
    (0..40 * WIDTH).map(|i| ((i * 37 % 29) as f32 / 14.0 - 1.0) * scale).collect()
}

/// The loss, and the gradients of the hidden states and of this rank's rows of the head.
fn loss(group: Option<&Group>, dtype: DType, scale: f32, counts: bool) -> (f32, Vec<f32>, Vec<f32>) {
    let device = ferrospeed_cpu::with_threads(1);
    let init = Init::root().over(group.map(Slices::from).as_ref());
    let cut = Cut::Outputs { sections: 1, units: TOKENS };
    let head = Linear::normal(&init.at("head").cut(cut), WIDTH, TOKENS, false, WeightLayout::OutIn, 1.0);
    let source = FromInitializers { seed: 5 };
    let store = PlainStore::attach(init.parameters().as_slice(), dtype, &device, &source).unwrap();
    let x = Tensor::from_f32(&hidden(scale), [40, WIDTH], dtype, &device).unwrap().tracked();
    let targets: Vec<i64> =
        (0..40).map(|i| if counts && i % 5 != 0 { i * 7 % TOKENS as i64 } else { IGNORED }).collect();
    let targets = Tensor::from_slice(&targets, [40], &device).unwrap();
    let loss = match group {
        Some(group) => {
            linear_cross_entropy(&x, head.weight(), &targets, IGNORED, &Slices::from(group)).unwrap()
        }
        None => {
            let options = CrossEntropyOptions { ignore_index: IGNORED, ..Default::default() };
            ops::linear_cross_entropy(&x, head.weight(), WeightLayout::OutIn, &targets, options).unwrap()
        }
    };
    autograd::backward(&loss).unwrap();
    let dx = x.grad().unwrap().to_vec_f32().unwrap();
    (loss.item().unwrap(), dx, store.gradient(0).unwrap().to_vec_f32().unwrap())
}

#[test]
fn the_loss_in_slices_counts_what_the_whole_one_does() {
    let counted = |group: Option<&Group>| {
        let device = ferrospeed_cpu::with_threads(1);
        let total = profile::collect(&device, || loss(group, DType::F32, 1.0, true)).1.total();
        [total.forward, total.backward, total.recomputation].map(|work| [work.macs, work.flops])
    };
    let whole = counted(None);
    assert_eq!(whole[0][0], (40 * WIDTH * TOKENS) as u64);
    let parts = on_ranks(2, move |group| counted(Some(group)));
    let sum = [0, 1, 2]
        .map(|pass: usize| [0, 1].map(|what: usize| parts.iter().map(|part| part[pass][what]).sum::<u64>()));
    assert_eq!(sum, whole);
}

#[test]
fn tokens_that_no_rank_holds_are_refused() {
    for ranks in [2, 3] {
        on_ranks(ranks, |group| {
            let device = ferrospeed_cpu::with_threads(1);
            let init = Init::root().over(Some(&Slices::from(group)));
            let words = Embedding::new(&init.at("words").cut(Cut::Entries), TOKENS, WIDTH, 1.0);
            let source = FromInitializers { seed: 5 };
            let _store =
                PlainStore::attach(init.parameters().as_slice(), DType::F32, &device, &source).unwrap();
            let x = Tensor::from_f32(&hidden(1.0)[..2 * WIDTH], [2, WIDTH], DType::F32, &device).unwrap();
            for bad in [TOKENS as i64, -1] {
                let ids = Tensor::from_slice(&[3, bad], [2], &device).unwrap();
                let looked_up = words.forward(&ids).unwrap_err().to_string();
                let slices = Slices::from(group);
                let lost = linear_cross_entropy(&x, words.table(), &ids, IGNORED, &slices).unwrap_err();
                for error in [looked_up, lost.to_string()] {
                    assert!(
                        error.contains(&format!("index {bad} at position 1 is outside 0..11")),
                        "{error}"
                    );
                }
            }
        });
    }
}

#[test]
fn the_loss_over_slices_of_the_vocabulary_is_the_plain_one() {
    // Logits of hundreds must not overflow.
    for (scale, counts) in [(1.0, true), (200.0, true), (1.0, false)] {
        let (whole, dx, dweight) = loss(None, DType::F32, scale, counts);
        for ranks in [2, 4] {
            let found = on_ranks(ranks, move |group| loss(Some(group), DType::F32, scale, counts));
            for (loss, own_dx, _) in &found {
                assert_near(&[*loss], &[whole], "loss");
                assert_near(own_dx, &dx, "gradient of the hidden states");
            }
            let rows: Vec<f32> = found.iter().flat_map(|(_, _, rows)| rows.clone()).collect();
            assert_near(&rows, &dweight, "gradient of the head");
        }
    }
}

#[test]
fn ranks_with_more_tokens_than_others_still_tell_each_other_of_the_same_rows() {
    // So many that a rank with one more of them would by itself hold fewer rows at once.
    const MANY: usize = 2 * 8192 + 1;
    const ROWS: usize = 1024;
    let loss = |group: Option<&Group>| {
        let device = ferrospeed_cpu::with_threads(1);
        let init = Init::root().over(group.map(Slices::from).as_ref());
        let words = Embedding::new(&init.at("words").cut(Cut::Entries), MANY, 2, 1.0);
        let source = FromInitializers { seed: 5 };
        let _store = PlainStore::attach(init.parameters().as_slice(), DType::F32, &device, &source).unwrap();
        let x: Vec<f32> = (0..2 * ROWS).map(|i| (i * 37 % 29) as f32 / 14.0 - 1.0).collect();
        let x = Tensor::from_slice(&x, [ROWS, 2], &device).unwrap();
        let targets: Vec<i64> = (0..ROWS as i64).map(|i| i * 31 % MANY as i64).collect();
        let targets = Tensor::from_slice(&targets, [ROWS], &device).unwrap();
        let loss = match group {
            Some(group) => {
                linear_cross_entropy(&x, words.table(), &targets, IGNORED, &Slices::from(group)).unwrap()
            }
            None => {
                let options = CrossEntropyOptions { ignore_index: IGNORED, ..Default::default() };
                ops::linear_cross_entropy(&x, words.table(), WeightLayout::OutIn, &targets, options).unwrap()
            }
        };
        loss.item().unwrap()
    };
    let found = on_ranks(2, move |group| loss(Some(group)));
    assert_near(&found, &[loss(None); 2], "losses");
}

/// Weights that are the same in every head, so that only what is dropped tells heads apart.
struct Alike;

impl ParamSource for Alike {
    fn load(&self, _: &Param, range: Range<usize>, out: &mut [f32]) -> Result<()> {
        out.iter_mut().zip(range).for_each(|(value, at)| *value = (at % 16) as f32 / 16.0);
        Ok(())
    }
}

/// What attention with two heads per rank gives, and where the random numbers are behind it.
fn attend(group: Option<&Group>, dropout: f32) -> (Vec<f32>, RandomState) {
    let device = ferrospeed_cpu::with_threads(1);
    let init = Init::root().over(group.map(Slices::from).as_ref());
    let units = 2 * group.map_or(1, Group::size);
    let linear = |name: &str, cut, inputs, outputs| {
        Linear::normal(&init.at(name).cut(cut), inputs, outputs, false, WeightLayout::OutIn, 1.0)
    };
    let heads = Cut::Outputs { sections: 1, units };
    let [query, key, value] = ["q", "k", "v"].map(|name| linear(name, heads, 8, 2 * units));
    let output = linear("o", Cut::Inputs { units }, 2 * units, 8);
    let config = AttentionConfig {
        heads: units,
        kv_heads: units,
        head_dim: 2,
        scale: 1.0,
        causal: true,
        window: None,
        dropout,
    };
    let projections = HeadProjections::Separate { query, key, value };
    let attention = MultiHeadAttention::new(projections, output, config);
    let _store = PlainStore::attach(init.parameters().as_slice(), DType::F32, &device, &Alike).unwrap();
    random::set_state(RandomState { seed: 9, step: 1, next_stream: 3 });
    let x: Vec<f32> = (0..48).map(|i| (i % 7) as f32 / 7.0).collect();
    let x = Tensor::from_slice(&x, [1, 6, 8], &device).unwrap();
    let y = attention.forward(&x, &Visibility::default(), None, Mode::Train).unwrap();
    (y.to_vec_f32().unwrap(), random::state())
}

#[test]
fn ranks_drop_different_weights_of_their_heads_and_then_go_on_alike() {
    for dropout in [0.0, 0.5] {
        let found = on_ranks(2, move |group| attend(Some(group), dropout));
        assert_eq!(found[0], found[1], "the sum differs, or where the next random numbers come from");
        let alone = attend(None, dropout);
        assert_eq!(alone.1, found[0].1);
        // Two ranks that drop the same give twice what one of them gives.
        let twice: Vec<f32> = alone.0.iter().map(|value| 2.0 * value).collect();
        assert_eq!(found[0].0 == twice, dropout == 0.0);
    }
}
