//! State on a disk: the same bits as in memory, in every combination, through checkpoints, and with errors that name it.

use std::path::Path;
use std::sync::Arc;

use super::common::disk::{COMBINATIONS, configuration, in_memory, offloaded, start, state, steps, train};
use super::common::{Model, config, device, on_ranks};
use ferrospeed_engine::{LoadOptions, Options, SaveOptions, Setup, initialize_model};
use ferrospeed_tensor::Category;
use ferrospeed_zero::access::Which;
use serde_json::{Value, json};

#[test]
fn state_on_a_disk_trains_to_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    for ranks in [1, 2, 3] {
        for precision in ["fp32", "bf16"] {
            for (micro_steps, optimizer) in [(1, "AdamW"), (2, "AdamW"), (1, "Lamb"), (2, "Lamb")] {
                let plain = configuration(precision, micro_steps, optimizer);
                let reference = train(ranks, in_memory(plain.clone()));
                for sections in COMBINATIONS {
                    let found = train(ranks, offloaded(plain.clone(), sections, folder.path()));
                    assert_eq!(
                        found, reference,
                        "{optimizer}, {ranks} ranks, {precision}, {micro_steps} micro-batches, {sections:?}"
                    );
                }
            }
        }
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "swap files stayed");
}

/// How far the weights of two runs are from each other.
fn apart(one: &(Vec<u64>, Vec<u32>), other: &(Vec<u64>, Vec<u32>)) -> f32 {
    let difference = |(a, b): (&u32, &u32)| (f32::from_bits(*a) - f32::from_bits(*b)).abs();
    one.1.iter().zip(&other.1).map(difference).fold(0.0, f32::max)
}

/// How far three steps of Adam at a rate of 0.01 may be apart when a GPU or its host makes them. On a host, where both are one
/// memory, there is no difference at all.
fn rounding() -> f32 {
    if device(1).backend().is_host() { 0.0 } else { 1e-2 }
}

#[test]
fn states_in_host_memory_are_updated_as_on_the_device() {
    let plain = configuration("bf16", 1, "AdamW");
    let apart = apart(&train(2, plain.clone())[0], &train(2, in_memory(plain))[0]);
    assert!(apart <= rounding(), "{apart} apart");
}

#[test]
fn state_in_host_memory_gives_the_same_bits_in_every_stage_and_wherever_weights_are() {
    for (ranks, optimizer) in [(1, "AdamW"), (2, "AdamW"), (1, "Lamb"), (2, "Lamb"), (2, "Muon")] {
        for precision in ["fp32", "bf16"] {
            let plain = in_memory(configuration(precision, 1, optimizer));
            let reference = train(ranks, plain.clone());
            for stage in [1, 2] {
                let mut value = plain.clone();
                value["zero_optimization"]["stage"] = json!(stage);
                assert_eq!(train(ranks, value), reference, "{ranks} ranks, {precision}, stage {stage}");
            }
            for pinned in [false, true] {
                let mut value = plain.clone();
                value["zero_optimization"]["offload_param"] = json!({"device": "cpu", "pin_memory": pinned});
                assert_eq!(train(ranks, value), reference, "{ranks} ranks, {precision}, pinned: {pinned}");
            }
        }
    }
}

#[test]
fn gradients_that_leave_while_backward_goes_on_give_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    for (ranks, micro_steps, precision) in [(1, 1, "bf16"), (1, 3, "bf16"), (2, 1, "fp32"), (2, 2, "bf16")] {
        for optimizer in ["AdamW", "Lamb", "Muon"] {
            for stage in [1, 2, 3] {
                let mut plain = in_memory(configuration(precision, micro_steps, optimizer));
                plain["zero_optimization"]["stage"] = json!(stage);
                let reference = train(ranks, plain.clone());
                // Only stage 3 has states on a disk.
                for tier in if stage == 3 { &["cpu", "nvme"][..] } else { &["cpu"] } {
                    let mut leaving = plain.clone();
                    leaving["zero_optimization"]["offload_optimizer"] =
                        json!({"device": tier, "nvme_path": folder.path(), "pin_memory": true});
                    let what = format!(
                        "{optimizer}, {ranks} ranks, {micro_steps} micro-batches, stage {stage}, {tier}"
                    );
                    assert_eq!(train(ranks, leaving), reference, "{what}");
                }
            }
        }
    }
}

#[test]
fn a_device_holds_no_gradients_that_have_left() {
    if device(1).backend().is_host() {
        return ferrospeed_testkit::skip::skip("no CUDA device");
    }
    let gradients = |pinned: bool, micro_steps: usize| {
        let mut value = in_memory(configuration("bf16", micro_steps, "AdamW"));
        value["zero_optimization"]["offload_optimizer"]["pin_memory"] = json!(pinned);
        on_ranks(1, move |world| {
            let (mut engine, model, _) = start(world, &value);
            steps(&mut engine, &model, 0, 1);
            engine.device().memory_usage().current(Category::Gradients)
        })
        .remove(0)
    };
    assert!(gradients(false, 2) > 0, "sums that stay are on the device");
    assert_eq!(gradients(true, 2), 0);
}

#[test]
fn every_optimizer_works_on_a_disk() {
    let folder = tempfile::tempdir().unwrap();
    for optimizer in ["Adam", "SGD", "Adagrad", "Lion", "Lamb", "Muon", "ScheduleFreeAdamW"] {
        let plain = configuration("bf16", 1, optimizer);
        let away = offloaded(plain.clone(), COMBINATIONS[2], folder.path());
        assert_eq!(train(2, away), train(2, in_memory(plain)), "{optimizer}");
    }
}

#[test]
fn state_on_a_disk_goes_through_checkpoints() {
    let folder = tempfile::tempdir().unwrap();
    let (swap, saved) = (folder.path().join("swap"), folder.path().join("saved"));
    let plain = in_memory(configuration("bf16", 1, "AdamW"));
    let away = offloaded(plain.clone(), COMBINATIONS[2], &swap);
    let straight = train(2, plain.clone());
    // Saved from a disk, loaded into memory, and the other way round.
    for (first, second) in
        [(away.clone(), plain.clone()), (plain.clone(), away.clone()), (away.clone(), away.clone())]
    {
        let (first, second, saved) = (Arc::new(first), Arc::new(second), saved.clone());
        let _ = std::fs::remove_dir_all(&saved);
        let found = on_ranks(2, move |world| {
            let (mut engine, model, _) = start(world.clone(), &first);
            let mut seen = steps(&mut engine, &model, 0, 2);
            engine.save_checkpoint(&saved, &SaveOptions::default()).unwrap();
            drop((engine, model));
            let (mut engine, model, parameters) = start(world, &second);
            engine.load_checkpoint(&saved, &LoadOptions::default()).unwrap();
            seen.extend(steps(&mut engine, &model, 2, 3));
            (seen, state(&engine, &parameters))
        });
        assert_eq!(found, straight);
    }
}

#[test]
fn memory_holds_a_few_tiles_instead_of_the_states() {
    let folder = tempfile::tempdir().unwrap();
    let measured = |value: Value| {
        let value = Arc::new(value);
        on_ranks(1, move |world| {
            let (mut engine, model, _) = start(world, &value);
            steps(&mut engine, &model, 0, 2);
            engine.store().empty_partition_cache().unwrap();
            let usage = engine.device().memory_usage();
            let bytes = [Category::Parameters, Category::Optimizer].map(|category| usage.current(category));
            (bytes, engine.store().disk_traffic())
        })
        .remove(0)
    };
    let plain = configuration("bf16", 1, "AdamW");
    let (_, nothing) = measured(plain.clone());
    assert_eq!((nothing.read, nothing.written), (0, 0));
    let (bytes, traffic) = measured(offloaded(plain, COMBINATIONS[2], folder.path()));
    assert_eq!(bytes, [0, 0]);
    assert!(traffic.read > 0 && traffic.written > 0);
}

#[test]
fn a_step_writes_as_much_to_the_disk_as_was_said() {
    let folder = tempfile::tempdir().unwrap();
    for sections in COMBINATIONS {
        let value = offloaded(configuration("bf16", 1, "AdamW"), sections, folder.path());
        on_ranks(1, move |world| {
            let (mut engine, model, parameters) = start(world, &value);
            let written = |engine: &ferrospeed_engine::Engine| {
                // Reading a state waits for what is queued.
                engine.store().full(&parameters.as_slice()[0], Which::Weight).unwrap();
                engine.store().disk_traffic().written
            };
            let before = written(&engine);
            steps(&mut engine, &model, 0, 2);
            let (found, said) = (written(&engine) - before, engine.store().disk_bytes_per_step());
            // Of each of four values, the last page may not be full.
            assert!((2 * said..=2 * (said + 4 * 4096)).contains(&found), "{found} and twice {said}");
        });
    }
}

#[test]
fn a_disk_without_room_is_named_before_training() {
    let value = offloaded(configuration("bf16", 1, "AdamW"), COMBINATIONS[0], Path::new("/proc/nowhere"));
    on_ranks(1, move |world| {
        let (_, parameters) =
            Model::build(&json!({"kind": "lm", "vocab": 29, "dm": 32, "nh": 2, "nl": 2, "tmax": 7}));
        let setup = Setup::new(config(&value, 1), world, device(1));
        let refused = initialize_model(&setup, &parameters, Options::default()).err().unwrap().to_string();
        assert!(refused.contains("/proc/nowhere") && refused.contains("offload_optimizer"), "{refused}");
    });
}

/// How many bytes of the optimizer are in memory, what went through the disk, and what came out.
fn held(value: Value) -> ([usize; 2], u64, (Vec<u64>, Vec<u32>)) {
    let value = Arc::new(value);
    let measured = on_ranks(2, move |world| {
        let (mut engine, model, parameters) = start(world, &value);
        let seen = steps(&mut engine, &model, 0, 3);
        engine.store().empty_partition_cache().unwrap();
        let usage = engine.device().memory_usage();
        let bytes = [Category::Parameters, Category::Optimizer].map(|category| usage.current(category));
        let written = engine.store().disk_traffic().written;
        (bytes, written, (seen, state(&engine, &parameters)))
    });
    measured.into_iter().next().unwrap()
}

#[test]
fn a_ratio_keeps_the_rest_of_the_states_with_the_device() {
    let folder = tempfile::tempdir().unwrap();
    for (precision, optimizer) in [("fp32", "AdamW"), ("bf16", "AdamW"), ("fp32", "Lamb"), ("bf16", "Lamb")] {
        for sections in [COMBINATIONS[0], COMBINATIONS[2]] {
            let plain = configuration(precision, 1, optimizer);
            let reference = train(2, in_memory(plain.clone())).remove(0);
            let with = |ratio: f64| {
                let mut value = offloaded(plain.clone(), sections, folder.path());
                value["zero_optimization"]["offload_optimizer"]["ratio"] = json!(ratio);
                held(value)
            };
            let (whole, half, none) = (with(1.0), with(0.5), with(0.0));
            // What stays is updated by the device: of a GPU, with its own rounding.
            let by_the_host =
                if device(1).backend().is_host() { &[&whole, &half, &none][..] } else { &[&whole] };
            for (_, _, outcome) in by_the_host {
                assert_eq!(*outcome, reference, "{precision}, {sections:?}");
            }
            for (_, _, outcome) in [&half, &none] {
                let apart = apart(outcome, &reference);
                assert!(apart <= rounding(), "{precision}, {sections:?}: {apart} apart");
            }
            let of_optimizer = [&whole, &half, &none].map(|(bytes, ..)| bytes[1]);
            let share = of_optimizer[1] as f64 / of_optimizer[2] as f64;
            // Where nothing moves, a GPU updates f32 weights where kernels read them: one column of three less.
            let in_place =
                precision == "fp32" && sections == COMBINATIONS[0] && !device(1).backend().is_host();
            let expected = if in_place { 0.70..0.85 } else { 0.45..0.65 };
            assert!(of_optimizer[0] == 0 && expected.contains(&share), "{of_optimizer:?}");
            assert!(whole.1 > half.1 && half.1 > none.1, "{} {} {}", whole.1, half.1, none.1);
        }
    }
}

#[test]
fn max_in_cpu_keeps_as_many_weights_in_memory() {
    let folder = tempfile::tempdir().unwrap();
    let plain = configuration("bf16", 2, "AdamW");
    let reference = train(2, in_memory(plain.clone())).remove(0);
    let with = |elements: u64| {
        let mut value = offloaded(plain.clone(), COMBINATIONS[1], folder.path());
        value["zero_optimization"]["offload_param"]["max_in_cpu"] = json!(elements);
        let (bytes, _, outcome) = held(value);
        assert_eq!(outcome, reference, "{elements}");
        bytes[0]
    };
    let kept = [0, 5000, 1_000_000_000].map(with);
    // Whole units of 2048 elements of two bytes each; a GPU's memory has none of them.
    if device(1).backend().is_host() {
        assert_eq!(kept[..2], [0, 2 * 4096]);
        assert!(kept[2] > kept[1], "{kept:?}");
    }
}

#[test]
fn buffers_that_are_locked_and_requests_that_go_one_by_one_change_no_bit() {
    let folder = tempfile::tempdir().unwrap();
    let plain = configuration("bf16", 1, "AdamW");
    let mut away = offloaded(plain.clone(), COMBINATIONS[2], folder.path());
    away["zero_optimization"]["offload_optimizer"]["pin_memory"] = json!(true);
    away["zero_optimization"]["offload_param"]["buffer_count"] = json!(2);
    away["aio"] = json!({"single_submit": true, "block_size": 4096, "queue_depth": 2, "thread_count": 2});
    assert_eq!(train(2, away), train(2, in_memory(plain)));
}

#[test]
fn the_plan_counts_each_tier_as_training_fills_it() {
    use ferrospeed_tune::plan::{Operands, Processor, Purpose, Request, Tier, plan};
    let folder = tempfile::tempdir().unwrap();
    let processor = if device(1).backend().is_host() { Processor::Cpu } else { Processor::Gpu };
    for precision in ["fp32", "bf16"] {
        for (sections, ratio, in_host) in
            [(COMBINATIONS[0], 0.5, 0), (COMBINATIONS[1], 1.0, 5000), (COMBINATIONS[2], 0.25, 9000)]
        {
            let mut value = offloaded(configuration(precision, 1, "AdamW"), sections, folder.path());
            if sections.contains(&"offload_optimizer") {
                value["zero_optimization"]["offload_optimizer"]["ratio"] = json!(ratio);
            }
            if sections.contains(&"offload_param") {
                value["zero_optimization"]["offload_param"]["max_in_cpu"] = json!(in_host);
            }
            let shared = Arc::new(value.clone());
            let (numel, in_memory, on_disk) = on_ranks(1, move |world| {
                let (mut engine, model, parameters) = start(world, &shared);
                steps(&mut engine, &model, 0, 1);
                engine.store().empty_partition_cache().unwrap();
                let usage = engine.device().memory_usage();
                let held = usage.current(Category::Parameters) + usage.current(Category::Optimizer);
                (parameters.numel() as u64, held as u64, engine.store().disk_bytes_per_step())
            })
            .remove(0);
            let size = ferrospeed_tune::estimate::ModelSize { total_params: numel, largest_layer_params: 0 };
            let planned = plan(&Request {
                model: &ferrospeed_tune::model::Model::Counts(size),
                config: &config(&value, 1),
                data_parallel_size: 1,
                sequence_length: 7,
                checkpoint_activations: false,
                mlp_chunk: None,
                keeps_attention_matrix: false,
                processor,
                sequence_ranks: 1,
                operands: Operands::InPlace,
            });
            let state = [Purpose::Parameters, Purpose::OptimizerStates];
            let of = |tier: Tier| -> u64 {
                let rows = planned.rows.iter().filter(|row| row.tier == tier && state.contains(&row.purpose));
                rows.map(|row| row.bytes).sum()
            };
            for (name, planned, found) in
                [("memory", of(Tier::Device), in_memory), ("disk", of(Tier::Nvme), on_disk)]
            {
                assert!(
                    planned.abs_diff(found) * 20 <= found,
                    "{precision}, {sections:?}: {planned} planned and {found} found in {name}"
                );
            }
        }
    }
}
