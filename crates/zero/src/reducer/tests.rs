//! What the reducer does on a rank of its own.

use super::*;
use crate::buckets;
use crate::partition::Layout;
use crate::sharding::Sharding;

/// A rank of its own with parameters of so many elements.
fn reducer(numels: &[usize], accumulates: bool) -> Reducer {
    let layout = Layout::flat(numels, 1, false);
    let group: Vec<(usize, usize)> = numels.iter().copied().enumerate().collect();
    let plan = buckets::plan(&[group], std::slice::from_ref(&layout), |_| Kind::Ordinary, &[0], &[100]);
    let options = ReduceOptions {
        whole: true,
        keep_buffers: true,
        overlap: false,
        wire: DType::F32,
        kept: DType::F32,
        accumulates,
        each_micro_batch: true,
        leaves: false,
    };
    let shapes = numels.iter().map(|&numel| (Shape::from([numel]), DType::F32)).collect();
    let numel = layout.part_numel;
    let sharding = Sharding::over_world(&ferrospeed_comm::World::solo());
    let road = Road { sharding, before: 1.0, after: None, hops: None };
    Reducer::new(vec![road], options, plan, &[numel], shapes, &ferrospeed_cpu::device()).unwrap()
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
