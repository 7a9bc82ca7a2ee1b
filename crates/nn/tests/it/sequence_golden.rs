//! Attention of sequences that ranks share, by both methods, as DeepSpeed's `DistributedAttention` was recorded
//! (`sequence/distributed_attention.json`) where it is right: for a batch of one. For others it mixes sequences up
//! (`recorded_matches_math` is false); there the values are those of attention over the whole, which the recording has beside
//! them, and the gradients those of one rank that holds everything.

use std::ops::Range;
use std::sync::Arc;

use ferrospeed_comm::World;
use ferrospeed_nn::{SequenceMethod, SequenceParallel};
use ferrospeed_tensor::ops::{self, AttentionOptions};
use ferrospeed_tensor::store::{FromInitializers, PlainStore};
use ferrospeed_tensor::{DType, Device, Initializer, Param, Tensor, autograd};
use ferrospeed_testkit::close::assert_close;
use ferrospeed_testkit::golden::golden;
use serde_json::Value;

fn flat(value: &Value, into: &mut Vec<f32>) {
    match value {
        Value::Array(values) => values.iter().for_each(|value| flat(value, into)),
        number => into.push(number.as_f64().expect("a number") as f32),
    }
}

/// What all ranks have of `key`, in order of the sequence, as `[batch, tokens, heads, dim]`.
fn whole(case: &Value, key: &str, device: &Device) -> Tensor {
    let size = |key: &str| case[key].as_u64().expect("a size") as usize;
    let mut values = Vec::new();
    for rank in case["ranks"].as_array().expect("ranks") {
        flat(&rank[key], &mut values);
    }
    let shape = [size("seq"), size("batch"), size("heads"), size("head_dim")];
    ops::permute(Tensor::from_slice(&values, shape, device).unwrap(), &[1, 0, 2, 3]).unwrap()
}

fn taken(x: &Tensor, ranges: &[Range<usize>]) -> Tensor {
    let pieces: Vec<Tensor> =
        ranges.iter().map(|range| ops::narrow(x, 1, range.start, range.len()).unwrap()).collect();
    ops::concat(&pieces, 1).unwrap()
}

/// The result and the gradients of q, k and v, of this rank's part.
fn attended(
    case: &Value,
    ranges: &[Range<usize>],
    attention: impl Fn([&Tensor; 3]) -> Tensor,
    device: &Device,
) -> [Vec<f32>; 4] {
    let part = |key: &str| taken(&whole(case, key, device), ranges);
    let inputs = ["q", "k", "v"].map(part);
    let params: Vec<Param> =
        inputs.iter().map(|x| Param::new("x", *x.shape(), Initializer::Constant(0.0))).collect();
    let store = PlainStore::attach(&params, DType::F32, device, &FromInitializers { seed: 0 }).unwrap();
    let [q, k, v] = [0, 1, 2].map(|i| ops::add(&params[i], &inputs[i]).unwrap());
    let y = attention([&q, &k, &v]);
    let loss = ops::sum(ops::mul(&y, part("dy")).unwrap()).unwrap();
    autograd::backward(&loss).unwrap();
    let gradient = |index: usize| store.gradient(index).unwrap().to_vec_f32().unwrap();
    [y.to_vec_f32().unwrap(), gradient(0), gradient(1), gradient(2)]
}

#[test]
fn golden_shared_sequences_attend_like_whole_ones() {
    golden().each_case("sequence/distributed_attention.json", 3, |case| {
        let ranks = case["world_size"].as_u64().expect("a size") as usize;
        for method in [SequenceMethod::Ulysses, SequenceMethod::Ring] {
            let case = Arc::new(case.clone());
            let work = move |world: World| {
                let device = ferrospeed_cpu::with_threads(1);
                let tokens = case["seq"].as_u64().expect("a size") as usize;
                let part = SequenceParallel::new(world.group(), method).divide(tokens).unwrap();
                let options = AttentionOptions::default();
                let own = part.own().to_vec();
                let found = attended(&case, &own, |qkv| part.attention(qkv, &options).unwrap(), &device);
                let sound = case["recorded_matches_math"] == true;
                let alone = |[q, k, v]: [&Tensor; 3]| ops::attention(q, k, v, &options).unwrap();
                let all = attended(&case, std::slice::from_ref(&(0..tokens)), alone, &device);
                let shape = *whole(&case, "q", &device).shape();
                for (index, key) in ["y_mathematically_correct", "dq", "dk", "dv"].into_iter().enumerate() {
                    let wanted = match sound || index == 0 {
                        true => whole(&case, key, &device),
                        false => Tensor::from_slice(&all[index], shape, &device).unwrap(),
                    };
                    let wanted = taken(&wanted, &own).to_vec_f32().unwrap();
                    let what = format!("{method:?}, rank {}: {key}", world.rank());
                    assert_close(&what, &found[index], &wanted, 1e-5, 1e-5);
                }
            };
            let work = Arc::new(work);
            let start = |world: World| {
                let work = work.clone();
                std::thread::spawn(move || work(world))
            };
            let threads: Vec<_> = World::threads(ranks).into_iter().map(start).collect();
            threads.into_iter().for_each(|thread| thread.join().expect("a rank failed"));
        }
    });
}
