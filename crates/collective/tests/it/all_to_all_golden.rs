//! The exchange around attention as DeepSpeed does it (`sequence/all_to_all.json`): there and back.
//!
//! DeepSpeed is right where the dims between the two that are exchanged are 1. Elsewhere its way back does not restore what
//! went there (`roundtrip_equal` is false or missing), and we do what it means to do: pieces in order of rank.

use std::sync::Arc;

use ferrospeed_collective::ops;
use ferrospeed_comm::World;
use ferrospeed_tensor::Tensor;
use ferrospeed_testkit::golden::golden;
use serde_json::Value;

fn sizes(value: &Value) -> Vec<usize> {
    value.as_array().expect("a list").iter().map(|v| v.as_u64().expect("a size") as usize).collect()
}

fn floats(value: &Value) -> Vec<f32> {
    value.as_array().expect("a list").iter().map(|v| v.as_f64().expect("a number") as f32).collect()
}

/// Every rank's input, as the recording says.
fn input(rank: usize, shape: &[usize]) -> Vec<f32> {
    (0..shape.iter().product::<usize>()).map(|at| (at + 1000 * rank) as f32).collect()
}

/// What a rank should get, element by element.
fn expected(rank: usize, ranks: usize, shape: &[usize], cut: usize, joined: usize) -> Vec<f32> {
    let mut sizes = shape.to_vec();
    sizes[cut] /= ranks;
    sizes[joined] *= ranks;
    let element = |at: usize| {
        let (mut rest, mut place) = (at, vec![0; sizes.len()]);
        for dim in (0..sizes.len()).rev() {
            (place[dim], rest) = (rest % sizes[dim], rest / sizes[dim]);
        }
        let source = place[joined] / shape[joined];
        place[joined] %= shape[joined];
        place[cut] += rank * sizes[cut];
        let flat = place.iter().zip(shape).fold(0, |flat, (place, size)| flat * size + place);
        (flat + 1000 * source) as f32
    };
    (0..sizes.iter().product()).map(element).collect()
}

#[test]
fn golden_exchanges_go_there_and_back() {
    golden().each_case("sequence/all_to_all.json", 7, |case| {
        let case = Arc::new(case.clone());
        let ranks = case["world_size"].as_u64().expect("a size") as usize;
        let threads: Vec<_> = World::threads(ranks)
            .into_iter()
            .map(|world| {
                let case = case.clone();
                std::thread::spawn(move || {
                    let (rank, group) = (world.rank(), world.group());
                    let index = |key: &str| case[key].as_u64().expect("a dim") as usize;
                    let (shape, cut, joined) =
                        (sizes(&case["local_shape"]), index("scatter_idx"), index("gather_idx"));
                    let recorded = &case["ranks"][rank];
                    let device = ferrospeed_cpu::with_threads(1);
                    let x = Tensor::from_slice(&input(rank, &shape), &shape[..], &device).unwrap();
                    let y = ops::all_to_all(&x, cut, joined, &group).unwrap();
                    assert_eq!(y.sizes(), sizes(&recorded["out_shape"]));
                    assert_eq!(y.to_vec_f32().unwrap(), expected(rank, ranks, &shape, cut, joined));
                    if recorded["roundtrip_equal"] == true {
                        assert_eq!(y.to_vec_f32().unwrap(), floats(&recorded["out"]));
                    }
                    let back = ops::all_to_all(&y, joined, cut, &group).unwrap();
                    assert_eq!(back.to_vec_f32().unwrap(), x.to_vec_f32().unwrap(), "rank {rank}");
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().expect("a rank failed"));
    });
}
