//! The average at one bit per value: as recorded (`optimizers/compressed_allreduce.json`), and what it promises.

use std::sync::Arc;

use ferrospeed_collective::one_bit::device::{self, DeviceAveraged, DeviceFeedback};
use ferrospeed_collective::one_bit::{self, Averaged, Feedback, Values, padded_numel};
use ferrospeed_comm::World;
use ferrospeed_tensor::Tensor;
use ferrospeed_testkit::close::assert_close;
use ferrospeed_testkit::golden::golden;
use serde_json::Value;

fn on_ranks<R: Send + 'static>(ranks: usize, work: impl Fn(World) -> R + Send + Sync + 'static) -> Vec<R> {
    let work = Arc::new(work);
    let start = |world| {
        let work = work.clone();
        std::thread::spawn(move || work(world))
    };
    let threads: Vec<_> = World::threads(ranks).into_iter().map(start).collect();
    threads.into_iter().map(|thread| thread.join().expect("a rank panicked")).collect()
}

fn floats(value: &Value) -> Vec<f32> {
    value.as_array().expect("a list").iter().map(|v| v.as_f64().expect("a number") as f32).collect()
}

fn size(value: &Value) -> usize {
    value.as_u64().expect("a count") as usize
}

#[test]
fn rounds_with_persistent_errors_are_as_recorded() {
    golden().each_case("optimizers/compressed_allreduce.json", 6, |case| {
        let (ranks, numel) = (size(&case["world_size"]), size(&case["numel"]));
        assert_eq!(padded_numel(numel, ranks), size(&case["corrected_numel"]));
        let rounds = case["rounds"].as_array().expect("rounds").clone();
        on_ranks(ranks, move |world| {
            let (group, rank) = (world.group(), world.rank());
            let mut feedback = Feedback::new(numel, ranks);
            for (index, round) in rounds.iter().enumerate() {
                let mut values = floats(&round["inputs"][rank]);
                one_bit::all_reduce(&group, &ferrospeed_cpu::device(), &mut values, &mut feedback).unwrap();
                let check = |what: &str, found: &[f32], expected: &Value| {
                    assert_close(&format!("round {index}: {what}"), found, &floats(expected), 2e-6, 0.0);
                };
                check("the average", &values, &round["output"]);
                check("worker error", &feedback.worker(), &round["worker_errors"][rank]);
                check("server error", &feedback.server(), &round["server_errors"][rank]);
            }
        });
    });
}

/// Signs of some values with what was lost of them before, in plain passes, one after the other: (scale, signs).
fn rounded(values: impl Iterator<Item = f32>, lost: &mut [f32]) -> (f32, Vec<bool>) {
    lost.iter_mut().zip(values).for_each(|(lost, value)| *lost += value);
    let mut lanes = [0.0f64; 8];
    lost.iter().enumerate().for_each(|(at, value)| lanes[at % 8] += f64::from(*value) * f64::from(*value));
    let scale = (lanes.iter().sum::<f64>() / lost.len() as f64).sqrt() as f32;
    let signs: Vec<bool> = lost.iter().map(|value| *value >= 0.0).collect();
    lost.iter_mut().zip(&signs).for_each(|(lost, sign)| *lost -= if *sign { scale } else { -scale });
    (scale, signs)
}

/// The average of ranks' values, of which `lost` is what each rank and each stretch has lost.
fn averaged(given: &[Vec<f32>], lost: &mut [[Vec<f32>; 2]]) -> Vec<f32> {
    let (ranks, signed) = (given.len(), |scale: f32, sign: bool| if sign { scale } else { -scale });
    let sent: Vec<_> =
        given.iter().zip(&mut *lost).map(|(own, lost)| rounded(own.iter().copied(), &mut lost[0])).collect();
    let mut averaged = Vec::new();
    for (stretch, lost) in lost.iter_mut().enumerate() {
        let first = stretch * lost[1].len();
        let sum = |at: usize| {
            let signs =
                sent.iter().map(|(scale, signs)| signed(scale * (1.0 / ranks as f32), signs[first + at]));
            signs.fold(0.0, |sum, value| sum + value)
        };
        let (scale, signs) = rounded((0..lost[1].len()).map(sum), &mut lost[1]);
        averaged.extend(signs.into_iter().map(|sign| signed(scale, sign)));
    }
    averaged.truncate(given[0].len());
    averaged
}

#[test]
fn work_in_blocks_changes_no_bit() {
    let value =
        |at: usize, rank: usize, round: usize| ((at * 37 + rank * 101 + round * 7) as f32 * 0.61).sin();
    for (ranks, numel) in [(2, 5), (3, 700), (4, 40_000), (2, 9_000), (5, 2_048 * 5 * 8 + 1)] {
        let found = on_ranks(ranks, move |world| {
            let mut feedback = Feedback::new(numel, ranks);
            let round = |round: usize| {
                let mut values: Vec<f32> = (0..numel).map(|at| value(at, world.rank(), round)).collect();
                one_bit::all_reduce(&world.group(), &ferrospeed_cpu::device(), &mut values, &mut feedback)
                    .unwrap();
                (values, feedback.worker(), feedback.server())
            };
            (0..3).map(round).collect::<Vec<_>>()
        });
        let padded = padded_numel(numel, ranks);
        let mut lost = vec![[vec![0.0f32; padded], vec![0.0f32; padded / ranks]]; ranks];
        for round in 0..3 {
            let given: Vec<Vec<f32>> =
                (0..ranks).map(|rank| (0..numel).map(|at| value(at, rank, round)).collect()).collect();
            let average = averaged(&given, &mut lost);
            for (rank, found) in found.iter().enumerate() {
                let (values, worker, server) = &found[round];
                let case = format!("rank {rank} of {ranks}, {numel} values, round {round}");
                assert!(*values == average, "{case}: the average");
                assert!(*worker == lost[rank][0] && *server == lost[rank][1], "{case}: what was lost");
            }
        }
    }
}

#[test]
fn all_ranks_get_the_same_bits_and_nothing_is_lost_for_good() {
    for (ranks, numel) in [(2, 1), (2, 100), (3, 50), (4, 7), (5, 333)] {
        let outcomes = on_ranks(ranks, move |world| {
            let own: Vec<f32> =
                (0..numel).map(|at| ((at * 37 + world.rank() * 101) as f32 * 0.61).sin()).collect();
            let mut feedback = Feedback::new(numel, ranks);
            let mut total = vec![0.0f64; numel];
            for _ in 0..400 {
                let mut values = own.clone();
                one_bit::all_reduce(&world.group(), &ferrospeed_cpu::device(), &mut values, &mut feedback)
                    .unwrap();
                total.iter_mut().zip(&values).for_each(|(sum, value)| *sum += f64::from(*value));
            }
            (own, total)
        });
        let mut mean = vec![0.0f64; numel];
        for (own, total) in &outcomes {
            assert!(total == &outcomes[0].1, "{ranks} ranks of {numel}: they differ");
            mean.iter_mut().zip(own).for_each(|(sum, value)| *sum += f64::from(*value) / ranks as f64);
        }
        for (mean, total) in mean.iter().zip(&outcomes[0].1) {
            assert!(
                (mean - total / 400.0).abs() < 0.05,
                "{ranks} ranks of {numel}: {mean} {}",
                total / 400.0
            );
        }
    }
}

#[test]
fn a_rank_without_peers_keeps_its_values() {
    let mut values = [0.5, -3.0, 0.25];
    one_bit::all_reduce(
        &World::solo().group(),
        &ferrospeed_cpu::device(),
        &mut values,
        &mut Feedback::new(3, 1),
    )
    .unwrap();
    assert_eq!(values, [0.5, -3.0, 0.25]);
}

/// Rounds of a rank on a GPU; before each the host begins with what the GPU has lost. (The GPU's averages, the host's), and
/// the same of what was lost.
fn rounds_on_gpu(world: &World, numels: &[usize], ranks: usize) -> Vec<[Vec<f32>; 2]> {
    let gpu = ferrospeed_cuda::device(0, &ferrospeed_cpu::device()).unwrap();
    let feedback = |numel: &usize| DeviceFeedback::new(*numel, ranks, &gpu).unwrap();
    let feedbacks: Vec<DeviceFeedback> = numels.iter().map(feedback).collect();
    let mut rounds = Vec::new();
    for round in 0..3 {
        let value = |at: usize, tensor: usize| {
            ((at * 37 + world.rank() * 101 + round * 7 + tensor) as f32 * 0.61).sin()
        };
        let given = |(tensor, &numel): (usize, &usize)| (0..numel).map(|at| value(at, tensor)).collect();
        let mut host: Vec<Vec<f32>> = numels.iter().enumerate().map(given).collect();
        let mut lost: Vec<Feedback> = feedbacks.iter().map(|own| own.to_host().unwrap()).collect();
        let there: Vec<Tensor> =
            host.iter().map(|values| Tensor::from_slice(values, [values.len()], &gpu).unwrap()).collect();
        let averaged = |(values, feedback)| DeviceAveraged { values, feedback };
        let averaged: Vec<DeviceAveraged<'_>> = there.iter().zip(&feedbacks).map(averaged).collect();
        device::all_reduce_each(&world.group(), &gpu, &averaged).unwrap();
        let mut lent: Vec<&mut [f32]> = host.iter_mut().map(|values| &mut values[..]).collect();
        let each = lent.iter_mut().zip(&mut lost);
        let mut each: Vec<Averaged<'_>> =
            each.map(|(values, feedback)| Averaged { values: values as &mut dyn Values, feedback }).collect();
        one_bit::all_reduce_each(&world.group(), &ferrospeed_cpu::device(), &mut each).unwrap();
        drop(each);
        rounds
            .push([there.iter().flat_map(|values| values.to_vec::<f32>().unwrap()).collect(), host.concat()]);
        let of = |feedback: &Feedback| [feedback.worker(), feedback.server()].concat();
        let kept = feedbacks.iter().flat_map(|own| of(&own.to_host().unwrap())).collect();
        rounds.push([kept, lost.iter().flat_map(of).collect()]);
    }
    rounds
}

#[test]
fn a_gpu_rounds_as_the_host_does_and_ranks_get_the_same_bits() {
    if ferrospeed_cuda::device_count() == 0 {
        return ferrospeed_testkit::skip::skip("no CUDA device");
    }
    for ranks in [1, 2, 4] {
        let outcomes =
            on_ranks(ranks, move |world| rounds_on_gpu(&world, &[5, 700, 1, 16_385, 40_000, 9], ranks));
        for (rank, rounds) in outcomes.iter().enumerate() {
            for (index, [found, expected]) in rounds.iter().enumerate() {
                let what = format!("rank {rank} of {ranks}, after {index} halves of rounds");
                assert_close(&what, found, expected, 2e-6, 2e-6);
            }
            let averages = |rounds: &[[Vec<f32>; 2]]| -> Vec<Vec<f32>> {
                rounds.iter().step_by(2).map(|[found, _]| found.clone()).collect()
            };
            // A rank without peers keeps its own.
            assert!(averages(rounds) == averages(&outcomes[0]), "rank {rank} of {ranks} has other bits");
        }
    }
}

#[test]
fn what_was_lost_moves_between_host_and_gpu() {
    if ferrospeed_cuda::device_count() == 0 {
        return ferrospeed_testkit::skip::skip("no CUDA device");
    }
    let numbers: Vec<f32> = (0..2 + 32 + 16).map(|at| (at as f32 * 0.37).sin()).collect();
    let feedback = Feedback::of_numbers(&numbers, 27, 2).unwrap();
    let there =
        DeviceFeedback::of(&feedback, &ferrospeed_cuda::device(0, &ferrospeed_cpu::device()).unwrap())
            .unwrap();
    assert_eq!(there.to_host().unwrap(), feedback);
    assert_eq!(there.to_host().unwrap().numbers(), numbers);
}
