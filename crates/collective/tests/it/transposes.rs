//! Every collective's backward is its transpose: checked against differences of the sum of all ranks' losses.

use std::sync::Arc;

use ferrospeed_collective::ops;
use ferrospeed_comm::{Group, World};
use ferrospeed_tensor::store::{FromInitializers, PlainStore};
use ferrospeed_tensor::{DType, Initializer, Param, Tensor, autograd, ops as plain};

type Operation = fn(&Tensor, &Group) -> ferrospeed_collective::Result<Tensor>;

/// What each operation does to a `[4, 6]` on two ranks, or a `[6, 12]` on three.
const TRANSPOSED: [(&str, Operation); 8] = [
    ("all_reduce", |x, group| ops::all_reduce(x, group)),
    ("all_gather along 0", |x, group| ops::all_gather(x, 0, group)),
    ("all_gather along 1", |x, group| ops::all_gather(x, 1, group)),
    ("reduce_scatter along 0", |x, group| ops::reduce_scatter(x, 0, group)),
    ("reduce_scatter along 1", |x, group| ops::reduce_scatter(x, 1, group)),
    ("all_to_all", |x, group| ops::all_to_all(x, 1, 0, group)),
    ("all_to_all_parts", |x, group| {
        // The last rank gets all columns but one for each of the others, and nothing where there are three.
        let (ranks, columns) = (group.size(), x.sizes()[1]);
        let mut sizes = vec![1; ranks];
        sizes[if ranks == 3 { 0 } else { ranks - 1 }] = columns - if ranks == 3 { 1 } else { ranks - 1 };
        if ranks == 3 {
            sizes[2] = 0;
        }
        let joined = ops::Parts { dim: 0, sizes: vec![x.sizes()[0]; ranks] };
        ops::all_to_all_parts(x, &ops::Parts { dim: 1, sizes }, &joined, group)
    }),
    ("broadcast", |x, group| ops::broadcast(x, 1, group)),
];

fn on_ranks<R: Send + 'static>(ranks: usize, work: impl Fn(World) -> R + Send + Sync + 'static) -> Vec<R> {
    let work = Arc::new(work);
    let start = |world| {
        let work = work.clone();
        std::thread::spawn(move || work(world))
    };
    let threads: Vec<_> = World::threads(ranks).into_iter().map(start).collect();
    threads.into_iter().map(|thread| thread.join().expect("a rank panicked")).collect()
}

/// Numbers that differ between ranks and elements.
fn numbers(len: usize, salt: usize) -> Vec<f32> {
    (0..len).map(|at| ((at * 37 + salt * 101) as f32 * 0.61).sin()).collect()
}

/// Each rank's loss: its result times numbers of its own, summed.
fn loss(y: &Tensor, rank: usize) -> f64 {
    let weights = numbers(y.numel(), rank + 7);
    y.to_vec_f32().unwrap().iter().zip(weights).map(|(y, w)| f64::from(*y) * f64::from(w)).sum()
}

/// The gradient of the sum of all ranks' losses with respect to this rank's input, by backward.
fn by_backward(x: &[f32], sizes: [usize; 2], operation: Operation, group: &Group) -> Vec<f32> {
    let device = ferrospeed_cpu::with_threads(1);
    let param = Param::new("x", sizes, Initializer::Constant(0.0));
    let store =
        PlainStore::attach(std::slice::from_ref(&param), DType::F32, &device, &FromInitializers { seed: 0 })
            .unwrap();
    let value = Tensor::from_slice(x, sizes, &device).unwrap();
    let y = operation(&plain::add(&param, &value).unwrap(), group).unwrap();
    let weights = Tensor::from_slice(&numbers(y.numel(), group.rank() + 7), *y.shape(), &device).unwrap();
    let loss = plain::sum(plain::mul(&y, &weights).unwrap()).unwrap();
    autograd::backward(&loss).unwrap();
    store.gradient(0).unwrap().to_vec_f32().unwrap()
}

#[test]
fn backward_is_the_transpose_of_forward() {
    for (ranks, sizes) in [(1, [4, 6]), (2, [4, 6]), (3, [6, 12])] {
        for (name, operation) in TRANSPOSED {
            if name == "broadcast" && ranks == 1 {
                continue;
            }
            on_ranks(ranks, move |world| {
                let (group, device) = (world.group(), ferrospeed_cpu::with_threads(1));
                let x = numbers(sizes[0] * sizes[1], group.rank());
                let gradient = by_backward(&x, sizes, operation, &group);
                // All collectives here are linear: one step of any length gives the exact difference.
                for owner in 0..ranks {
                    for at in [0, 5, x.len() - 1] {
                        let mut moved = x.clone();
                        if group.rank() == owner {
                            moved[at] += 0.5;
                        }
                        let forward = |x: &[f32]| {
                            let x = Tensor::from_slice(x, sizes, &device).unwrap();
                            loss(&operation(&x, &group).unwrap(), group.rank())
                        };
                        let mut difference = [forward(&moved) - forward(&x)];
                        group.all_reduce(&mut difference, ferrospeed_comm::ReduceOp::Sum).unwrap();
                        if group.rank() == owner {
                            let expected = difference[0] / 0.5;
                            let found = f64::from(gradient[at]);
                            assert!(
                                (found - expected).abs() < 1e-4,
                                "{name}, {ranks} ranks: {found} {expected}"
                            );
                        }
                    }
                }
            });
        }
    }
}

#[test]
fn rows_go_to_whom_they_are_for_and_their_gradients_come_back() {
    on_ranks(3, |world| {
        let (group, rank) = (world.group(), world.rank());
        // Rank r sends (r + to) % 3 rows to rank `to`: some nobody.
        let sends = |from: usize| -> Vec<usize> { (0..3).map(|to| (from + to) % 3).collect() };
        let (send, receive) = (sends(rank), (0..3).map(|from| sends(from)[rank]).collect::<Vec<_>>());
        let device = ferrospeed_cpu::with_threads(1);
        let rows: usize = send.iter().sum();
        let x: Vec<f32> = (0..rows * 2).map(|at| (rank * 100 + at) as f32).collect();
        let x = Tensor::from_slice(&x, [rows, 2], &device).unwrap();
        let y = ops::all_to_all_rows(&x, &send, &receive, &group).unwrap();
        assert_eq!(y.sizes(), [receive.iter().sum(), 2]);
        let mut expected = Vec::new();
        for (from, &count) in receive.iter().enumerate() {
            let before: usize = sends(from)[..rank].iter().sum();
            expected.extend((before * 2..(before + count) * 2).map(|at| (from * 100 + at) as f32));
        }
        assert_eq!(y.to_vec_f32().unwrap(), expected);
        let back = ops::all_to_all_rows(&y, &receive, &send, &group).unwrap();
        assert_eq!(back.to_vec_f32().unwrap(), x.to_vec_f32().unwrap(), "its transpose undoes it");
        let refused = ops::all_to_all_rows(&x, &[9, 9, 9], &receive, &group).unwrap_err().to_string();
        assert!(refused.contains("all_to_all_rows"), "{refused}");
    });
}

#[test]
fn parts_of_unequal_sizes_are_joined_in_order_of_rank_and_go_back() {
    on_ranks(3, |world| {
        let (group, rank) = (world.group(), world.rank());
        let device = ferrospeed_cpu::with_threads(1);
        let tokens = ops::Parts { dim: 1, sizes: vec![3, 1, 2] };
        let heads = ops::Parts { dim: 2, sizes: vec![2, 2, 1] };
        // Element (batch, token, head, channel) of the whole says where it is.
        let value = |b: usize, t: usize, h: usize, d: usize| (b * 1000 + t * 100 + h * 10 + d) as f32;
        let stretch = |parts: &ops::Parts| {
            let first: usize = parts.sizes[..rank].iter().sum();
            first..first + parts.sizes[rank]
        };
        let whole = |tokens: std::ops::Range<usize>, heads: std::ops::Range<usize>| {
            let mut values = Vec::new();
            for b in 0..2 {
                for t in tokens.clone() {
                    for h in heads.clone() {
                        values.extend((0..2).map(|d| value(b, t, h, d)));
                    }
                }
            }
            Tensor::from_slice(&values, [2, tokens.len(), heads.len(), 2], &device).unwrap()
        };
        let x = whole(stretch(&tokens), 0..5);
        let y = ops::all_to_all_parts(&x, &heads, &tokens, &group).unwrap();
        let expected = whole(0..6, stretch(&heads));
        assert_eq!(y.sizes(), expected.sizes());
        assert_eq!(y.to_vec_f32().unwrap(), expected.to_vec_f32().unwrap());
        let back = ops::all_to_all_parts(&y, &tokens, &heads, &group).unwrap();
        assert_eq!(back.to_vec_f32().unwrap(), x.to_vec_f32().unwrap(), "its transpose undoes it");
        let error = ops::all_to_all_parts(&y, &heads, &tokens, &group).unwrap_err().to_string();
        assert!(error.contains("all_to_all_parts") && error.contains("dim 2"), "{error}");
    });
}

/// Two linear layers, the first cut by columns and the second by rows, are the uncut ones: values and gradients.
#[test]
fn a_region_computed_together_has_the_gradients_of_one_computed_alone() {
    let alone = on_ranks(1, |world| region(world.group(), true)).remove(0);
    for ranks in [2, 4] {
        for (rank, found) in on_ranks(ranks, |world| region(world.group(), true)).into_iter().enumerate() {
            for (found, alone) in found.iter().zip(&alone) {
                assert!((found - alone).abs() < 1e-4, "rank {rank} of {ranks}: {found} {alone}");
            }
        }
        let wrong = on_ranks(ranks, |world| region(world.group(), false)).remove(0);
        assert!(
            wrong.iter().zip(&alone).any(|(a, b)| (a - b).abs() > 1e-3),
            "without the borders it is another"
        );
    }
}

/// The result's sum and the gradient of the input of `tanh(x·A)·B`, where the ranks hold columns of A and rows of B.
fn region(group: Group, with_borders: bool) -> Vec<f32> {
    let device = ferrospeed_cpu::with_threads(1);
    let full = |salt, sizes: [usize; 2]| {
        Tensor::from_slice(&numbers(sizes[0] * sizes[1], salt), sizes, &device).unwrap()
    };
    let (a, b) = (full(1, [4, 8]), full(2, [8, 3]));
    let (a, b) = (ops::split(&a, 1, &group).unwrap(), ops::split(&b, 0, &group).unwrap());
    let param = Param::new("x", [2, 4], Initializer::Constant(0.1));
    let store =
        PlainStore::attach(std::slice::from_ref(&param), DType::F32, &device, &FromInitializers { seed: 0 })
            .unwrap();
    let x = plain::affine(&param, 1.0, 0.0).unwrap();
    let x = if with_borders { ops::enter(&x, &group).unwrap() } else { x };
    let hidden = plain::tanh(plain::matmul(&x, &a).unwrap()).unwrap();
    let y = ops::leave(&plain::matmul(&hidden, &b).unwrap(), &group).unwrap();
    let loss = plain::sum(plain::square(&y).unwrap()).unwrap();
    autograd::backward(&loss).unwrap();
    let mut seen = vec![loss.item().unwrap()];
    seen.extend(store.gradient(0).unwrap().to_vec_f32().unwrap());
    seen
}

#[test]
fn what_cannot_be_cut_is_refused_by_name() {
    on_ranks(2, |world| {
        let x = Tensor::full([3, 4], 1.0, DType::F32, &ferrospeed_cpu::with_threads(1)).unwrap();
        for (error, op) in [
            (ops::reduce_scatter(&x, 0, &world.group()).unwrap_err(), "reduce_scatter"),
            (ops::split(&x, 0, &world.group()).unwrap_err(), "split"),
            (ops::all_to_all(&x, 0, 1, &world.group()).unwrap_err(), "all_to_all"),
            (ops::all_gather(&x, 5, &world.group()).unwrap_err(), "all_gather"),
        ] {
            let error = error.to_string();
            assert!(error.contains(op) && error.contains("cannot be cut"), "{error}");
        }
    });
}
