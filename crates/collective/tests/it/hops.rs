//! A reduction in small integers: near the exact one, and the same on every run.

use ferrospeed_collective::hops::{Hops, Parcels, Run, reduce_scatter};
use ferrospeed_collective::packing::Packing;
use ferrospeed_comm::{Limits, ReduceOp, World};
use ferrospeed_tensor::{DType, Tensor, ops};

/// Runs of every rank: unlike each other, odd, and none for one rank of four.
fn parcels(ranks: usize) -> Vec<Vec<Run>> {
    let of_rank = |rank: usize| match rank {
        3 => Vec::new(),
        _ => vec![
            Run { numel: 5 + rank, packing: Packing::Exact },
            Run { numel: 1025 * (rank + 1), packing: Packing::Four },
            Run { numel: 3, packing: Packing::Four },
        ],
    };
    (0..ranks).map(of_rank).collect()
}

fn values(rank: usize, numel: usize) -> Vec<f32> {
    (0..numel).map(|i| ((i * (rank + 3)) as f32 * 0.61).sin()).collect()
}

fn hops(world: &World, per_host: Option<usize>) -> Hops {
    let Some(count) = per_host else { return Hops { host: None, across: world.group() } };
    let (ranks, own) = (world.size(), world.rank());
    let make = |members: Vec<usize>| world.new_group(&members).unwrap();
    let host = (0..ranks / count).map(|host| make((host * count..(host + 1) * count).collect()));
    let host = host.collect::<Vec<_>>().swap_remove(own / count);
    let across = (0..count).map(|place| make((place..ranks).step_by(count).collect()));
    let across = across.collect::<Vec<_>>().swap_remove(own % count);
    Hops { host, across: across.unwrap() }
}

/// What each rank ends with, in f32.
fn reduced(hosts: &[usize], per_host: Option<usize>, dtype: DType, op: ReduceOp) -> Vec<Vec<f32>> {
    let worlds = World::threads_on(hosts, &Limits::default()).unwrap();
    let ranks: Vec<_> = worlds
        .into_iter()
        .map(|world| {
            std::thread::spawn(move || {
                let hops = hops(&world, per_host);
                let runs = parcels(world.size());
                let numel = |runs: &Vec<Run>| runs.iter().map(|run| run.numel).sum::<usize>();
                let (all, own) = (runs.iter().map(numel).sum(), numel(&runs[world.rank()]));
                let data =
                    Tensor::from_slice(&values(world.rank(), all), [all], &ferrospeed_cpu::device()).unwrap();
                let data = ops::cast(&data, dtype).unwrap();
                let result = Tensor::zeros([own], dtype, &ferrospeed_cpu::device()).unwrap();
                let pending = reduce_scatter(&hops, &Parcels::new(runs), &data, &result, op).unwrap();
                pending.wait().unwrap();
                result.to_vec_f32().unwrap()
            })
        })
        .collect();
    ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
}

#[test]
fn every_rank_gets_its_part_of_the_average_in_one_hop_or_two() {
    for (hosts, per_host) in [
        (&[2, 2][..], Some(2)),
        (&[1, 1, 1], None),
        (&[3, 1], None),
        (&[2, 2, 2], Some(2)),
        (&[4], None),
        (&[1], None),
    ] {
        let ranks: usize = hosts.iter().sum();
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let found = reduced(hosts, per_host, dtype, ReduceOp::Avg);
            assert!(found == reduced(hosts, per_host, dtype, ReduceOp::Avg), "{hosts:?} {dtype}: bits vary");
            let sums = reduced(hosts, per_host, dtype, ReduceOp::Sum);
            let all: usize = found.iter().map(Vec::len).sum();
            let given: Vec<Vec<f32>> = (0..ranks).map(|rank| values(rank, all)).collect();
            let mut start = 0;
            for (rank, runs) in parcels(ranks).iter().enumerate() {
                let numel = found[rank].len();
                assert_eq!(numel, runs.iter().map(|run| run.numel).sum::<usize>());
                for at in 0..numel {
                    let exact = given.iter().map(|values| values[start + at]).sum::<f32>() / ranks as f32;
                    let is_exact = runs.first().is_some_and(|run| at < run.numel);
                    let near = if is_exact { 0.01 } else { 0.3 };
                    let (found, sum) = (found[rank][at], sums[rank][at]);
                    assert!(
                        (exact - found).abs() < near,
                        "{hosts:?} {dtype} rank {rank} at {at}: {exact} {found}"
                    );
                    let mean = sum / ranks as f32;
                    assert!(
                        (mean - found).abs() <= 0.01 * found.abs() + 1e-6,
                        "{hosts:?} {dtype}: {found} {mean}"
                    );
                }
                start += numel;
            }
        }
    }
}
