//! Attention over pieces of the keys folds into attention over all of them, and so do gradients; on every device that is there.

use ferrospeed_tensor::ops::{
    self, AttentionOptions, AttentionPart, Stretch, WeightGrid, attention_part, attention_part_backward,
};
use ferrospeed_tensor::random::{self, RandomKey, RandomState};
use ferrospeed_tensor::{DType, Device, Tensor};

use super::devices::devices;

const BATCH: usize = 2;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 8;

fn numbers(len: usize, salt: usize) -> Vec<f32> {
    (0..len).map(|at| ((at * 37 + salt * 101) as f32 * 0.61).sin()).collect()
}

fn random(tokens: usize, heads: usize, salt: usize, dtype: DType, device: &Device) -> Tensor {
    let values = numbers(BATCH * tokens * heads * DIM, salt);
    let x = Tensor::from_slice(&values, [BATCH, tokens, heads, DIM], device).unwrap();
    ops::cast(&x, dtype).unwrap()
}

/// The key of dropped weights.
const KEY: RandomKey = RandomKey { seed: 5, stream: 3, step: 2 };

/// Which keys are seen, with everything that depends on keys given for all of them.
fn rules(tokens: usize, device: &Device) -> Vec<AttentionOptions> {
    let mask: Vec<u8> = (0..BATCH * tokens).map(|at| u8::from(at >= 5 && at % 11 != 3)).collect();
    let mask = Tensor::from_slice(&mask, [BATCH, tokens], device).unwrap();
    let slopes = Tensor::from_slice(&[0.5f32, 0.25, 0.1, 0.05], [HEADS], device).unwrap();
    let places: Vec<f32> = (0..BATCH).flat_map(|_| (0..tokens).map(|key| key as f32)).collect();
    let places = Tensor::from_slice(&places, [BATCH, tokens], device).unwrap();
    let grid = WeightGrid { whole: [HEADS, tokens, tokens], first: [0; 3] };
    let causal = AttentionOptions { causal: true, ..Default::default() };
    vec![
        AttentionOptions::default(),
        causal.clone(),
        AttentionOptions { window: Some(7), ..causal.clone() },
        AttentionOptions { key_mask: Some(mask), ..causal.clone() },
        AttentionOptions { alibi_slopes: Some(slopes), alibi_positions: Some(places), ..causal.clone() },
        AttentionOptions { dropout: 0.3, dropout_key: Some(KEY), weights: Some(grid), ..causal },
    ]
}

/// The rule for some of the keys, for queries that start at the beginning.
fn of_keys(rule: &AttentionOptions, keys: &std::ops::Range<usize>) -> AttentionOptions {
    let narrow = |x: &Tensor| ops::narrow(x, 1, keys.start, keys.len()).unwrap();
    AttentionOptions {
        first_query: Some(-(keys.start as isize)),
        key_mask: rule.key_mask.as_ref().map(narrow),
        alibi_positions: rule.alibi_positions.as_ref().map(narrow),
        weights: rule.weights.map(|grid| WeightGrid { first: [0, 0, keys.start], ..grid }),
        ..rule.clone()
    }
}

fn assert_near(what: &str, found: &Tensor, wanted: &Tensor, tolerance: f32) {
    let (found, wanted) = (found.to_vec_f32().unwrap(), wanted.to_vec_f32().unwrap());
    assert_eq!(found.len(), wanted.len());
    for (at, (found, wanted)) in found.iter().zip(&wanted).enumerate() {
        assert!(
            found == wanted || (found - wanted).abs() <= tolerance,
            "{what}, element {at}: {found}, not {wanted}"
        );
    }
}

#[test]
fn pieces_of_the_keys_fold_into_the_whole_in_value_and_gradient() {
    for device in devices() {
        assert_pieces_fold(&device);
    }
}

fn assert_pieces_fold(device: &Device) {
    for (dtype, tolerance) in [(DType::F32, 2e-6), (DType::BF16, 4e-2)] {
        for tokens in [12, 70] {
            let q = random(tokens, HEADS, 1, dtype, device);
            let [k, v] = [2, 3].map(|salt| random(tokens, KV_HEADS, salt, dtype, device));
            let dout = random(tokens, HEADS, 4, dtype, device);
            for rule in rules(tokens, device) {
                let what = format!("{device:?} {dtype} {tokens} {rule:?}");
                let queries = Stretch { tensor: &q, tokens: 0..tokens };
                let stretch =
                    |tensor, keys: &std::ops::Range<usize>| Stretch { tensor, tokens: keys.clone() };
                // The last piece is hidden from most queries, and from all of them by no rule here.
                let pieces = [0..5, 5..tokens - 1, tokens - 1..tokens];
                let mut folded: Option<AttentionPart> = None;
                for keys in &pieces {
                    let kv = [&stretch(&k, keys), &stretch(&v, keys)];
                    let part = attention_part(&queries, kv, &of_keys(&rule, keys)).unwrap();
                    folded = Some(match folded {
                        Some(before) => before.fold(&part).unwrap(),
                        None => part,
                    });
                }
                let folded = folded.unwrap();
                let whole = ops::attention(&q, &k, &v, &rule).unwrap();
                assert_near(&what, &folded.out, &whole, tolerance);

                let all = [&stretch(&k, &(0..tokens)), &stretch(&v, &(0..tokens))];
                let alone = attention_part(&queries, all, &rule).unwrap();
                assert_near(&what, &folded.lse, &alone.lse, tolerance);
                let wanted = attention_part_backward(&queries, all, &rule, &alone, &dout).unwrap();
                let folded = AttentionPart { out: ops::cast(&folded.out, dtype).unwrap(), lse: folded.lse };
                let mut dq = Tensor::zeros(*q.shape(), DType::F32, q.device()).unwrap();
                for keys in &pieces {
                    let kv = [&stretch(&k, keys), &stretch(&v, keys)];
                    let options = of_keys(&rule, keys);
                    let found = attention_part_backward(&queries, kv, &options, &folded, &dout).unwrap();
                    dq = ops::add(&dq, ops::cast(&found[0], DType::F32).unwrap()).unwrap();
                    for (found, wanted) in found[1..].iter().zip(&wanted[1..]) {
                        let wanted = ops::narrow(wanted, 1, keys.start, keys.len()).unwrap();
                        assert_near(&what, found, &wanted, 4.0 * tolerance);
                    }
                }
                assert_near(&what, &dq, &wanted[0], 4.0 * tolerance);
            }
        }
    }
}

#[test]
fn tokens_that_are_not_there_are_refused() {
    let device = ferrospeed_cpu::with_threads(1);
    let (q, k) = (random(4, HEADS, 1, DType::F32, &device), random(4, KV_HEADS, 2, DType::F32, &device));
    let stretch = |tensor, tokens| Stretch { tensor, tokens };
    let (of_q, of_k) = (stretch(&q, 0..4), stretch(&k, 2..5));
    let error = attention_part(&of_q, [&of_k, &of_k], &AttentionOptions::default()).unwrap_err().to_string();
    assert!(error.contains("tokens 2..5 of k"), "{error}");
    let dropping = AttentionOptions { dropout: 0.5, ..Default::default() };
    let of_k = stretch(&k, 0..4);
    let error = attention_part(&of_q, [&of_k, &of_k], &dropping).unwrap_err().to_string();
    assert!(error.contains("give dropout_key"), "{error}");
}

#[test]
fn rows_lose_what_they_lose_in_the_whole() {
    for device in devices() {
        assert_rows_lose_alike(&device);
    }
}

fn assert_rows_lose_alike(device: &Device) {
    let (rows, width) = (12, 7);
    let whole = Tensor::from_slice(&numbers(rows * width, 1), [rows, width], device).unwrap();
    let state = RandomState { seed: 9, step: 1, next_stream: 4 };
    for dtype in [DType::F32, DType::BF16] {
        let whole = ops::cast(&whole, dtype).unwrap();
        random::set_state(state);
        let dropped = ops::dropout(&whole, 0.4).unwrap();
        random::set_state(state);
        let starts = (5..11).map(|row| row * width as u64).collect();
        let found = ops::dropout_rows(ops::narrow(&whole, 0, 5, 6).unwrap(), 0.4, starts).unwrap();
        let wanted = ops::narrow(&dropped, 0, 5, 6).unwrap();
        assert_eq!(found.to_vec_f32().unwrap(), wanted.to_vec_f32().unwrap());
        assert!(found.to_vec_f32().unwrap().contains(&0.0));
    }
    let error = ops::dropout_rows(&whole, 0.4, vec![0; 5]).unwrap_err().to_string();
    assert!(error.contains("cannot be cut into 5 rows"), "{error}");
}
