//! What the reducer does on a rank of its own.

use ferrospeed_config::{AutoValues, Config};
use ferrospeed_placement::{DeviceKind, GroupFacts, ParamFacts, Ranks, Request, Spread, UpdateRule, place};

use super::*;
use crate::sharding::Sharding;

/// A rank of its own with parameters of so many elements.
fn reducer(numels: &[usize], accumulates: bool) -> Reducer {
    let json = serde_json::json!({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"reduce_bucket_size": 100}});
    let config = Config::from_value("test", &json).unwrap();
    let config = config.resolve(std::num::NonZeroU64::MIN, &AutoValues::new()).unwrap().0;
    let facts = |(place, &numel)| ParamFacts {
        numel,
        dims: 1,
        group: Some((0, place)),
        spread: 0,
        kind: Kind::Ordinary,
    };
    let params: Vec<ParamFacts> = numels.iter().enumerate().map(facts).collect();
    let placement = place(&Request {
        zero: &config.zero,
        params: &params,
        groups: &[GroupFacts { states: 0, rule: UpdateRule::EachElement }],
        spreads: &[Spread::over(Ranks::alone())],
        world: 1,
        device: DeviceKind::Host,
        values: DataType::Fp32,
        wire: DataType::Fp32,
        kept: DataType::Fp32,
        accumulates,
        reduces_each_micro_batch: true,
        scales: &[false],
        parts_differ: false,
    });
    let shapes = numels.iter().map(|&numel| (Shape::from([numel]), DType::F32)).collect();
    let numel = placement.shares[0].layout.part_numel;
    let sharding = Sharding::over_world(&ferrospeed_comm::World::solo());
    let road = Road { sharding, before: 1.0, after: None, hops: None };
    let (gradients, buckets) = (placement.gradients, placement.buckets);
    Reducer::new(vec![road], gradients, buckets, &[numel], shapes, &ferrospeed_cpu::device()).unwrap()
}

fn gradient(value: f32, numel: usize) -> Arrived {
    Arrived::Whole(Tensor::full([numel], value, DType::F32, &ferrospeed_cpu::device()).unwrap())
}

#[test]
fn a_gradient_is_written_where_it_goes_by_one_at_a_time() {
    let mut reducer = reducer(&[16, 16, 3, 5], true);
    for turn in 1..3 {
        let place = reducer.lend_place(1).unwrap().expect("its place is free");
        assert!(reducer.lend_place(1).unwrap().is_none(), "another use of the parameter");
        assert!(reducer.lend_place(3).unwrap().is_none(), "not aligned");
        let mut place = place.into_tensor();
        ferrospeed_cpu::device().backend().fill(place.out().unwrap(), 4.0).unwrap();
        reducer.push(1, Arrived::of(1, place).unwrap(), true).unwrap();
        for (param, numel) in [(0, 16), (2, 3), (3, 5)] {
            reducer.push(param, gradient(1.0, numel), true).unwrap();
        }
        reducer.finish().unwrap();
        let kept = reducer.segments().unwrap()[0].values.to_vec::<f32>().unwrap();
        let expected = [1.0; 16].iter().chain(&[4.0; 16]).chain(&[1.0; 8]).map(|value| value * turn as f32);
        assert_eq!(kept, expected.collect::<Vec<f32>>());
    }
    reducer.push(1, gradient(1.0, 16), false).unwrap();
    assert!(reducer.lend_place(1).unwrap().is_none(), "one waits already");
}

#[test]
fn a_backward_that_failed_leaves_nothing_behind() {
    let mut reducer = reducer(&[3, 2], false);
    // One gradient comes, then backward fails and its gradients are dropped.
    reducer.push(1, gradient(9.0, 2), true).unwrap();
    reducer.clear();
    reducer.push(1, gradient(1.0, 2), true).unwrap();
    reducer.push(0, gradient(2.0, 3), true).unwrap();
    reducer.finish().unwrap();
    let mut found: Vec<(usize, Vec<f32>)> = reducer
        .segments()
        .unwrap()
        .iter()
        .map(|segment| (segment.in_part, segment.values.to_vec::<f32>().unwrap()))
        .collect();
    found.sort_by_key(|(in_part, _)| *in_part);
    assert_eq!(found, [(0, vec![2.0; 3]), (3, vec![1.0; 2])]);
}
