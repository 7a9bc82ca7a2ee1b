//! Every operation, against a plain reference, with ranks as threads.

use ferrospeed_testkit::child;
use std::time::{Duration, Instant};

use super::support::{on_threads, script};
use ferrospeed_comm::{Backend, ConnectOptions, DType, Error, Limits, ReduceOp, Region, World, wait_all};

#[test]
fn random_operations_over_random_groups_give_the_reference_bits() {
    for (size, seed) in [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (8, 6)] {
        on_threads(size, |world| script::run(&world, seed, 60));
    }
}

#[test]
fn a_solo_world_needs_no_peer() {
    script::run(&World::solo(), 77, 60);
}

#[test]
fn operations_of_several_groups_may_be_in_flight_in_any_order() {
    on_threads(3, |world| {
        let pair = world.new_group(&[0, 1]).unwrap();
        let all = world.group();
        let (a, b) = (world.allocate(4096).unwrap().region(), world.allocate(4096).unwrap().region());
        let first = || all.all_reduce_async(&a, DType::F32, ReduceOp::Sum);
        let second = || pair.as_ref().map(|pair| pair.all_reduce_async(&b, DType::F32, ReduceOp::Sum));
        // Rank 1 starts the two the other way round.
        let works: Vec<_> = if world.rank() == 1 {
            second().into_iter().chain([first()]).collect()
        } else {
            [first()].into_iter().chain(second()).collect()
        };
        wait_all(works).unwrap();
    });
}

#[test]
fn ranks_that_disagree_are_all_told_both_call_sites() {
    type Call = fn(&World) -> Result<(), Error>;
    let operations: [Call; 4] = [
        |world| world.group().all_reduce(&mut [1.0f32; 8], ReduceOp::Sum),
        |world| world.group().all_reduce(&mut [1.0f64; 8], ReduceOp::Sum),
        |world| world.group().all_reduce(&mut [1.0f32; 9], ReduceOp::Sum),
        |world| world.group().barrier(),
    ];
    for other in &operations[1..] {
        on_threads(3, |world| {
            let operation = if world.rank() == 2 { other } else { &operations[0] };
            let error = operation(&world).unwrap_err();
            let text = error.to_string();
            assert!(matches!(error, Error::Mismatch { .. }), "{text}");
            assert_eq!(text.matches("operations.rs:").count(), 2, "{text}");
            assert!(text.contains("rank 2"), "{text}");
            let again = world.group().barrier().unwrap_err();
            assert!(again.to_string().contains("cannot be used any more"), "{again}");
        });
    }
}

#[test]
fn a_rank_that_never_arrives_is_named_at_the_deadline() {
    let limits = Limits { deadline: Duration::from_millis(300), ..Limits::default() };
    let worlds = World::threads_within(3, &limits).unwrap();
    let started = Instant::now();
    std::thread::scope(|scope| {
        for world in &worlds[..2] {
            scope.spawn(move || {
                let text = world.group().barrier().unwrap_err().to_string();
                assert!(text.contains("barrier() #0") && text.contains("rank 2"), "{text}");
                assert!(!text.contains("rank 1 (") && !text.contains("rank 0 ("), "{text}");
            });
        }
    });
    assert!(started.elapsed() < Duration::from_secs(5));
}

#[test]
fn a_rank_that_leaves_early_fails_the_others_at_once() {
    on_threads(2, |world| {
        if world.rank() == 1 {
            return;
        }
        let text = world.group().barrier().unwrap_err().to_string();
        assert!(text.contains("rank 1 left the job"), "{text}");
    });
}

#[test]
fn arguments_that_cannot_be_right_are_refused_on_the_spot() {
    let world = World::solo();
    let group = world.group();
    for (error, wanted) in [
        (group.all_reduce(&mut [1.0f32], ReduceOp::BitOr).unwrap_err(), "bit_or is not defined on f32"),
        (group.broadcast(&mut [1i32], 3).unwrap_err(), "root 3 is not a rank"),
        (
            group.all_gather(&[1u8, 2], &mut [0u8; 3]).unwrap_err(),
            "the input holds 2 elements, but 3 are needed",
        ),
        (group.send(&[1u8], 0, 0).unwrap_err(), "with itself"),
        (world.new_group(&[0, 0]).unwrap_err(), "rank 0 is named twice"),
        (world.new_group(&[1]).unwrap_err(), "rank 1 is not in a world of 1"),
    ] {
        assert!(error.to_string().contains(wanted), "{error}");
    }
}

#[test]
fn a_message_of_another_length_is_an_error_on_both_sides() {
    on_threads(2, |world| {
        let group = world.group();
        let outcome = if world.rank() == 0 {
            // More than the channel holds, so that the sender has to wait for the receiver.
            group.send(&vec![0u8; 4 << 20], 1, 5)
        } else {
            group.recv(&mut [0u8; 16], 0, 5)
        };
        let text = outcome.unwrap_err().to_string();
        assert!(
            text.contains("send(u8, 4194304 bytes, tag 5)") && text.contains("recv(u8, 16 bytes"),
            "{text}"
        );
    });
}

#[test]
fn registered_memory_is_given_back_when_dropped() {
    if !child::has_process_alone(module_path!(), "registered_memory_is_given_back_when_dropped") {
        return;
    }
    on_threads(2, |world| {
        for _ in 0..200 {
            let memory = world.allocate(8 << 20).unwrap();
            let region = memory.region();
            drop(memory);
            // SAFETY: nobody else uses it.
            unsafe { region.as_mut_slice::<u8>() }.fill(1);
            assert_eq!(region.as_ptr() as usize % 64, 0);
        }
        world.group().barrier().unwrap();
    });
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let shared = status.lines().find_map(|line| line.strip_prefix("RssShmem:")).unwrap();
    let kilobytes: usize = shared.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(kilobytes < 512 << 10, "{kilobytes} kB of shared memory are still resident");
}

#[test]
fn an_all_gather_into_shared_memory_is_seen_by_all_wherever_the_parts_lay() {
    on_threads(4, |world| {
        let (me, size, part) = (world.rank(), world.size(), 5000);
        let shared = world.allocate_shared(size * part).unwrap().region();
        let apart = world.allocate(part).unwrap().region();
        let plain = Region::zeroed(part);
        let own = shared.slice(me * part..(me + 1) * part);
        // All in place; all elsewhere; each rank as it likes.
        for (round, inputs) in
            [[&own; 4], [&apart; 4], [&plain; 4], [&own, &apart, &plain, &own]].iter().enumerate()
        {
            let input = inputs[me];
            let value = |rank: usize| (round * 16 + rank + 1) as u8;
            world.group().barrier().unwrap();
            // SAFETY: nothing is in flight, and the barrier says that nobody reads this rank's part any more.
            unsafe { input.as_mut_slice::<u8>() }.fill(value(me));
            world.group().all_gather_async(input, &shared, DType::U8).wait().unwrap();
            // SAFETY: the operation is done, and nobody writes before the next barrier.
            let seen = unsafe { shared.as_slice::<u8>() };
            assert!((0..size * part).all(|at| seen[at] == value(at / part)), "round {round}");
        }
        // A few bytes, in parts that differ in size.
        let counts = [3, 0, 2, 1];
        let place = shared.slice(64..70);
        world.group().barrier().unwrap();
        let input = Region::from_slice(&vec![me as u8 + 1; counts[me]]);
        world.group().all_gather_unequal_async(&input, &place, &counts, DType::U8).wait().unwrap();
        // SAFETY: as above.
        assert_eq!(unsafe { place.as_slice::<u8>() }, [1, 1, 1, 3, 3, 4]);
    });
}

#[test]
fn shared_memory_refuses_what_would_mix_up_ranks() {
    on_threads(2, |world| {
        let shared = world.allocate_shared(1 << 20).unwrap().region();
        let refused = world.group().all_reduce_async(&shared, DType::F32, ReduceOp::Sum).wait().unwrap_err();
        assert!(refused.to_string().contains("have in common"), "{refused}");
        world.group().barrier().unwrap();
        // Rank 1 names another place.
        let place = shared.slice(world.rank() * 4096..world.rank() * 4096 + 128);
        let part = Region::zeroed(64);
        let error = world.group().all_gather_async(&part, &place, DType::U8).wait().unwrap_err().to_string();
        assert!(
            error.contains("into byte 0 of shared memory") && error.contains("into byte 4096"),
            "{error}"
        );
    });
    on_threads(2, |world| {
        let outcome = world.allocate_shared(8192 << world.rank());
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains("rank 0 asked for another size") || error.contains("rank 1 left"), "{error}");
    });
}

#[test]
fn the_logger_counts_operations_by_kind_and_size() {
    on_threads(2, |world| {
        world.group().barrier().unwrap();
        world.log().start();
        for _ in 0..3 {
            world.group().all_reduce(&mut [0.0f32; 256], ReduceOp::Sum).unwrap();
        }
        world.group().all_gather(&[1u8; 10], &mut [0u8; 20]).unwrap();
        world.log().stop();
        let rows = world.log().summary_across(&world.group()).unwrap();
        let seen: Vec<_> = rows.iter().map(|row| (row.operation.as_str(), row.bytes, row.count)).collect();
        assert_eq!(seen, [("all_gather", 10, 1), ("all_reduce", 1024, 3)]);
        assert!(
            rows.iter()
                .all(|row| row.stragglers.as_ref().unwrap().total_straggler_ms >= 0.0 && row.bus_gbps > 0.0)
        );
    });
}

#[test]
fn the_logger_counts_what_it_is_asked_to_and_by_caller() {
    use ferrospeed_comm::Kind;
    use ferrospeed_comm::logger::LogOptions;
    on_threads(2, |world| {
        let only = Some(vec![Kind::AllReduce]);
        world.log().start_with(LogOptions { only, by_caller: true, ..LogOptions::default() });
        world.group().barrier().unwrap();
        world.group().all_reduce(&mut [0u8; 3], ReduceOp::Sum).unwrap();
        let rows = world.log().summary();
        assert_eq!(rows.len(), 1, "{rows:?}");
        let name = &rows[0].operation;
        assert!(name.starts_with("all_reduce | [Caller Func: ") && name.contains("operations.rs:"), "{name}");
    });
}

#[test]
fn ranks_that_did_unlike_things_are_compared_in_what_they_share() {
    on_threads(3, |world| {
        let pair = world.new_group(&[0, 1]).unwrap();
        world.log().start();
        world.group().all_reduce(&mut [0.0f32; 4], ReduceOp::Sum).unwrap();
        if let Some(pair) = pair {
            pair.broadcast(&mut [0u8; 5], 0).unwrap();
        }
        let rows = world.log().summary_across(&world.group()).unwrap();
        let compared: Vec<_> =
            rows.iter().map(|row| (row.operation.as_str(), row.stragglers.is_some())).collect();
        let expected: &[_] = match world.rank() {
            2 => &[("all_reduce", true)],
            _ => &[("all_reduce", true), ("broadcast", false)],
        };
        assert_eq!(compared, expected);
        // What the comparison itself sent is not in it, and counting goes on.
        assert_eq!(world.log().summary().len(), rows.len());
        assert!(world.log().is_on());
    });
}

#[test]
fn summaries_are_laid_out_as_deepspeed_has_them() {
    use ferrospeed_comm::logger::{LogRow, Stragglers, straggler_table, table};
    let row = |bytes, stragglers| LogRow {
        crossed_bytes: 0,
        operation: "all_reduce".into(),
        bytes,
        count: 3,
        total_latency_ms: 1.5,
        average_latency_ms: 0.5,
        algorithm_gbps: 2.0,
        bus_gbps: 1.25,
        stragglers,
    };
    let waited = Stragglers {
        total_latency_ms: 1.0,
        total_straggler_ms: 0.5,
        average_latency_ms: 0.25,
        average_straggler_ms: 0.125,
    };
    let rows = [row(1024, Some(waited)), row(1 << 21, None)];
    let cells = |text: &str| -> Vec<Vec<String>> {
        let cell = |line: &str, at: usize| line.get(at..at + 20).unwrap_or_default().trim().to_owned();
        text.lines().map(|line| (0..7).map(|column| cell(line, column * 20)).collect()).collect()
    };
    let first = table(&rows);
    let found = cells(&first);
    assert_eq!(found[0][4..], ["Avg Latency(ms)", "tput_avg (Gbps)", "busbw_avg (Gbps)"]);
    assert_eq!(first.lines().nth(1), Some("all_reduce"));
    assert_eq!(found[2], ["", "1.0 KB", "3", "1.50", "0.50", "2.00", "1.25"]);
    assert_eq!(found[3][1], "2.0 MB");
    assert_eq!(first.lines().count(), 4);
    let second = straggler_table(&rows);
    assert_eq!(second.lines().nth(1), Some("Breakdown with straggler effect"));
    let found = cells(&second);
    assert_eq!(found[3][3..5], ["Total comm lat(ms)", "Total straggler(ms)"]);
    assert_eq!(found[5], ["", "1.0 KB", "3", "1.00", "0.50", "0.25", "0.12"]);
    assert_eq!(found[6][3..], ["-", "-", "-", "-"]);
}

#[test]
fn operations_go_by_our_names_and_by_deepspeeds() {
    use ferrospeed_comm::Kind;
    use ferrospeed_comm::logger::kind_named;
    let named =
        ["all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "isend"];
    let kinds = [Kind::AllReduce, Kind::AllGather, Kind::ReduceScatter, Kind::AllToAll, Kind::Send];
    assert_eq!(named.map(kind_named), kinds.map(Some));
    assert_eq!(kind_named("all_redcue"), None);
}

#[test]
fn the_benchmark_measures_every_row_of_its_matrix() {
    use ferrospeed_comm::Kind;
    use ferrospeed_comm::bench::{Matrix, Memory, run, table};
    on_threads(2, |world| {
        let matrix = Matrix {
            operations: vec![
                Kind::AllReduce,
                Kind::AllGather,
                Kind::ReduceScatter,
                Kind::AllToAll,
                Kind::Barrier,
            ],
            sizes_bytes: vec![4096, 100_000],
            dtypes: vec![DType::F32],
            memories: vec![Memory::Registered, Memory::InPlace, Memory::Shared, Memory::Staged],
            time_per_row: Duration::from_millis(2),
        };
        let rows = run(&world, &matrix).unwrap();
        // In place there are two operations, in shared memory there is one.
        assert_eq!(rows.len(), 26);
        assert!(rows.iter().all(|row| row.median_us > 0.0 && row.iterations >= 5));
        assert_eq!(table(&rows).lines().count(), 27);
    });
}

#[test]
fn nccl_by_name_without_a_gpu_is_an_error_that_names_the_rank() {
    let alone = ConnectOptions { backend: Backend::Nccl, ..ConnectOptions::new(0, 1, "127.0.0.1", 0) };
    let world = World::connect(alone).unwrap();
    let error = world.attach_device(None).unwrap_err().to_string();
    assert!(error.contains("backend nccl: rank 0 has no GPU, or no NCCL"), "{error}");
    // Where nobody asked for it, the host carries everything.
    let world = World::solo();
    world.attach_device(None).unwrap();
    assert!(world.group().on_devices().unwrap().is_none());
}

#[test]
fn groups_allocate_by_themselves_and_their_memory_serves_other_groups_too() {
    on_threads(4, |world| {
        let (me, count) = (world.rank(), 5000);
        let pair = [world.new_group(&[0, 1]).unwrap(), world.new_group(&[2, 3]).unwrap()];
        let across = [world.new_group(&[0, 2]).unwrap(), world.new_group(&[1, 3]).unwrap()];
        let own = |groups: [Option<ferrospeed_comm::Group>; 2]| groups.into_iter().flatten().next().unwrap();
        let (pair, across) = (own(pair), own(across));
        // The second pair allocates more, and less, than the first.
        let extra = if me >= 2 { 3 } else { 0 };
        let _more: Vec<_> = (0..extra).map(|_| pair.allocate(4096).unwrap()).collect();
        let region = pair.allocate(4 * count).unwrap().region();
        let shared = (me < 2).then(|| pair.allocate_shared(2 * 64).unwrap().region());
        for (group, sum) in [(&pair, [1, 1, 5, 5][me]), (&across, [2, 4, 2, 4][me]), (&world.group(), 6)] {
            group.barrier().unwrap();
            // SAFETY: nothing is in flight.
            unsafe { region.as_mut_slice::<i32>() }.fill(me as i32);
            group.all_reduce_async(&region, DType::I32, ReduceOp::Sum).wait().unwrap();
            // SAFETY: the operation is done.
            let seen = unsafe { region.as_slice::<i32>() };
            assert!(seen.iter().all(|value| *value == sum), "{group:?}: {}", seen[0]);
        }
        if let Some(shared) = shared {
            let own = Region::from_slice(&[me as u8 + 1; 64]);
            pair.all_gather_async(&own, &shared, DType::U8).wait().unwrap();
            // SAFETY: as above.
            let seen = unsafe { shared.as_slice::<u8>() };
            assert!((0..128).all(|at| seen[at] == (at / 64) as u8 + 1));
            pair.barrier().unwrap();
        }
    });
}
