//! Optimizers that exchange momentum at one bit per value: they train, send less once they are frozen, and go on from a
//! checkpoint. With `FERROSPEED_TEST_DEVICE=cuda` all of it runs on a GPU, which the ranks share.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use super::common::{Batch, Model, config, device, engine, on_ranks};
use ferrospeed_comm::World;
use ferrospeed_engine::{Engine, LoadOptions, Options, SaveOptions, Setup, StepReport, initialize_model};
use ferrospeed_nn::Parameters;
use ferrospeed_tensor::{Device, Tensor, ops};
use ferrospeed_testkit::skip::skip;
use ferrospeed_zero::OwnNumbers;
use ferrospeed_zero::access::Which;
use serde_json::{Value, json};

/// The step after which nothing but signs is exchanged.
const FREEZE: u64 = 12;
const STEPS: usize = 40;

fn description() -> Value {
    json!({"kind": "lm", "vocab": 13, "dm": 12, "nh": 3, "nl": 2, "tmax": 7})
}

/// One of four batches, half of which each of two ranks has.
fn batch(step: usize, micro: usize, rank: usize, device: &Device) -> Batch {
    let which = (step * 2 + micro + rank) % 4;
    let ids: Vec<i64> = (0..14).map(|i| ((i * 7 + which * 5 + i * i) % 13) as i64).collect();
    Batch::Tokens(Tensor::from_slice(&ids, [2, 7], device).unwrap())
}

fn ds_config(optimizer: &str, precision: &str, micro_steps: usize) -> Value {
    let params = match optimizer {
        "ZeroOneAdam" => json!({
            "lr": 0.003, "var_freeze_step": FREEZE, "var_update_scaler": 3, "local_step_scaler": 8, "local_step_clipper": 4,
        }),
        "OneBitLamb" => json!({"lr": 0.02, "freeze_step": FREEZE}),
        _ => json!({"lr": 0.003, "freeze_step": FREEZE}),
    };
    let mut config = json!({
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": micro_steps,
        "gradient_clipping": 1.0,
        "optimizer": {"type": optimizer, "params": params},
    });
    match precision {
        "fp32" => {}
        // A scale that does not overflow.
        "fp16" => config["fp16"] = json!({"enabled": true, "initial_scale_power": 7}),
        other => config[other] = json!({"enabled": true}),
    }
    config
}

fn step(engine: &mut Engine, model: &Model, number: usize) -> f32 {
    let (device, rank) = (engine.device().clone(), engine.world().rank());
    let micro_steps = engine.gradient_accumulation_steps();
    let mut last = 0.0;
    for micro in 0..micro_steps as usize {
        let batch = batch(number, micro, rank, &device);
        let loss = engine.forward(|_| model.loss(&batch)).unwrap();
        last = loss.item().unwrap();
        engine.backward(&loss).unwrap();
        let report = engine.step().unwrap();
        assert!(!matches!(report, StepReport::Skipped { .. }), "{report:?}");
    }
    last
}

fn weights(engine: &Engine, parameters: &Parameters) -> Vec<u32> {
    let values = parameters.as_slice().iter().map(|param| engine.store().full(param, Which::Weight).unwrap());
    values.flatten().map(f32::to_bits).collect()
}

/// The losses of every step and the last weights, by rank.
fn train(ranks: usize, config: Value) -> Vec<(Vec<f32>, Vec<u32>)> {
    on_ranks(ranks, move |world| {
        let (model, parameters) = Model::build(&description());
        let mut engine = engine(world, &config, &parameters, None, None, 1);
        let losses = (0..STEPS).map(|number| step(&mut engine, &model, number)).collect();
        (losses, weights(&engine, &parameters))
    })
}

#[test]
fn losses_go_on_falling_after_the_freeze_on_one_rank_and_on_several() {
    for optimizer in ["OneBitAdam", "ZeroOneAdam", "OneBitLamb"] {
        for (ranks, precision, micro_steps) in
            [(1, "fp32", 1), (2, "fp32", 1), (2, "bf16", 1), (3, "bf16", 2), (2, "fp16", 1)]
        {
            let outcomes = train(ranks, ds_config(optimizer, precision, micro_steps));
            let case = format!("{optimizer}, {ranks} ranks, {precision}");
            let mean = |losses: &[f32]| losses.iter().sum::<f32>() / losses.len() as f32;
            for (losses, weights) in &outcomes {
                let (first, frozen, last) = (losses[0], mean(&losses[11..15]), mean(&losses[STEPS - 4..]));
                assert!(frozen < first && last < frozen, "{case}: {first} {frozen} {last}");
                // 0/1 Adam's ranks meet at the end of an interval only.
                if optimizer != "ZeroOneAdam" {
                    assert!(weights == &outcomes[0].1, "{case}: ranks differ");
                }
            }
        }
    }
}

#[test]
fn a_step_after_the_freeze_sends_a_fraction() {
    for optimizer in ["OneBitAdam", "OneBitLamb"] {
        let bytes = on_ranks(2, move |world| {
            let (model, parameters) = Model::build(&description());
            let value = ds_config(optimizer, "bf16", 1);
            let mut engine = engine(world, &value, &parameters, None, None, 1);
            let mut sent = Vec::new();
            for number in 0..FREEZE as usize + 2 {
                engine.world().log().clear();
                engine.world().log().start();
                step(&mut engine, &model, number);
                let rows = engine.world().log().summary();
                sent.push(rows.iter().map(|row| row.bytes as u64 * row.count).sum::<u64>());
            }
            (sent[0], sent[FREEZE as usize])
        });
        let (plain, compressed) = bytes[0];
        assert!(compressed * 4 < plain, "{optimizer}: {compressed} bytes after the freeze, {plain} before");
    }
}

/// Trains to the end, from a checkpoint or from the beginning; what each rank has then.
fn continued(
    (optimizer, precision, ranks): (&'static str, &'static str, usize),
    stop: usize,
    folder: &Path,
    loads: bool,
) -> Vec<Vec<u32>> {
    let folder = folder.to_path_buf();
    on_ranks(ranks, move |world| {
        let (model, parameters) = Model::build(&description());
        let mut engine = engine(world, &ds_config(optimizer, precision, 1), &parameters, None, None, 1);
        if loads {
            let loaded = engine.load_checkpoint(&folder, &LoadOptions::default()).unwrap();
            assert!(loaded.changes.is_empty(), "{:?}", loaded.changes);
        }
        for number in if loads { stop } else { 0 }..STEPS {
            if number == stop && !loads {
                engine.save_checkpoint_in_background(&folder, &SaveOptions::default()).unwrap();
            }
            step(&mut engine, &model, number);
        }
        engine.finish_checkpoint().unwrap();
        weights(&engine, &parameters)
    })
}

#[test]
fn a_run_goes_on_from_a_checkpoint_as_if_it_had_not_stopped() {
    let place = tempfile::tempdir().unwrap();
    for optimizer in ["OneBitAdam", "ZeroOneAdam", "OneBitLamb"] {
        // What compression has lost is each rank's own, and so is where 0/1 Adam's ranks are between two meetings.
        for (ranks, precision) in [(1, "bf16"), (2, "bf16"), (3, "fp32")] {
            // Before the freeze, behind it, and at every place of an interval.
            for stop in [5, FREEZE as usize + 2, 29, 30, 31, 32] {
                let folder = place.path().join(format!("{optimizer}-{ranks}-{stop}"));
                let case = (optimizer, precision, ranks);
                let whole = continued(case, stop, &folder, false);
                assert!(continued(case, stop, &folder, true) == whole, "{case:?} from step {stop}");
            }
        }
    }
}

#[test]
fn a_run_goes_on_with_another_number_of_ranks() {
    let place = Arc::new(tempfile::tempdir().unwrap());
    for optimizer in ["OneBitAdam", "ZeroOneAdam", "OneBitLamb"] {
        let folder = place.path().join(optimizer);
        let run = |ranks: usize, loads: bool| {
            let folder = folder.clone();
            on_ranks(ranks, move |world| {
                let (model, parameters) = Model::build(&description());
                let mut engine = engine(world, &ds_config(optimizer, "bf16", 1), &parameters, None, None, 1);
                if loads {
                    let loaded = engine.load_checkpoint(&folder, &LoadOptions::default()).unwrap();
                    let told = loaded.changes.iter().any(|change| change.contains("of use to 2 ranks alone"));
                    assert!(told, "{:?}", loaded.changes);
                }
                let losses: Vec<f32> = (0..20).map(|number| step(&mut engine, &model, number)).collect();
                if !loads {
                    engine.save_checkpoint(&folder, &SaveOptions::default()).unwrap();
                }
                losses
            })
        };
        let before = run(2, false);
        let after = run(3, true);
        assert!(after[0][19] < before[0][0], "{optimizer}: {} {}", before[0][0], after[0][19]);
        assert!(after[0][0] < before[0][0], "{optimizer}: it began anew");
    }
}

#[test]
fn a_load_gives_every_rank_what_it_had_whoever_loads() {
    let place = Arc::new(tempfile::tempdir().unwrap());
    for optimizer in ["OneBitAdam", "ZeroOneAdam", "OneBitLamb"] {
        let folder = place.path().join(optimizer);
        let outcomes = on_ranks(3, move |world| {
            let build = |world| {
                let (model, parameters) = Model::build(&description());
                let engine = engine(world, &ds_config(optimizer, "bf16", 1), &parameters, None, None, 1);
                (model, parameters, engine)
            };
            // One that has lost something by then, and one that has not.
            let mut used = build(world.clone());
            (0..20).for_each(|number| _ = step(&mut used.2, &used.0, number));
            used.2.save_checkpoint(&folder, &SaveOptions::default()).unwrap();
            (20..24).for_each(|number| _ = step(&mut used.2, &used.0, number));
            let fresh = build(world);
            [used, fresh].map(|(model, parameters, mut engine)| {
                engine.load_checkpoint(&folder, &LoadOptions::default()).unwrap();
                (20..24).for_each(|number| _ = step(&mut engine, &model, number));
                weights(&engine, &parameters)
            })
        });
        assert!(outcomes.iter().all(|[used, fresh]| used == fresh), "{optimizer}");
    }
}

#[test]
fn all_ranks_skip_when_the_gradients_of_one_overflow() {
    for optimizer in ["OneBitAdam", "ZeroOneAdam", "OneBitLamb"] {
        // Before the freeze gradients are averaged; after it each rank has its own.
        for bad in [3, FREEZE as usize + 3] {
            let outcomes = on_ranks(3, move |world| {
                let (model, parameters) = Model::build(&description());
                let mut engine = engine(world, &ds_config(optimizer, "fp16", 1), &parameters, None, None, 1);
                let (device, rank) = (engine.device().clone(), engine.world().rank());
                let (mut skipped, mut changed) = (Vec::new(), true);
                for number in 0..FREEZE as usize + 6 {
                    let before = weights(&engine, &parameters);
                    let loss = engine.forward(|_| model.loss(&batch(number, 0, rank, &device))).unwrap();
                    let factor = if number == bad && rank == 1 { 1e6 } else { 1.0 };
                    engine.backward(&ops::affine(&loss, factor, 0.0).unwrap()).unwrap();
                    if matches!(engine.step().unwrap(), StepReport::Skipped { .. }) {
                        skipped.push(number);
                        changed = before != weights(&engine, &parameters);
                    }
                }
                (skipped, changed, weights(&engine, &parameters))
            });
            for (skipped, changed, weights) in &outcomes {
                assert_eq!((&skipped[..], changed), (&[bad][..], &false), "{optimizer}");
                assert!(weights.iter().all(|bits| f32::from_bits(*bits).is_finite()), "{optimizer}");
                if optimizer != "ZeroOneAdam" {
                    assert!(weights == &outcomes[0].2, "{optimizer}: ranks differ");
                }
            }
        }
    }
}

#[test]
fn what_makes_no_sense_is_refused_with_the_reason() {
    let mut sparse = ds_config("OneBitAdam", "fp32", 1);
    sparse["sparse_gradients"] = true.into();
    let refused = on_ranks(1, move |world| {
        let (_, parameters) = Model::build(&description());
        let setup = Setup::new(config(&sparse, 1), world, device(1));
        initialize_model(&setup, &parameters, Options::default()).map(drop).unwrap_err().to_string()
    });
    assert!(refused[0].contains("onebitadam") && refused[0].contains("sparse_gradients"), "{}", refused[0]);
}

/// An engine on a GPU or on the CPU, whatever the environment says.
fn engine_on(on_gpu: bool, world: World, value: &Value, parameters: &Parameters) -> Engine {
    let device = if on_gpu {
        ferrospeed_cuda::device(0, &ferrospeed_cpu::device()).unwrap()
    } else {
        ferrospeed_cpu::with_threads(1)
    };
    let setup = Setup::new(config(value, world.size()), world, device);
    initialize_model(&setup, parameters, Options::default()).unwrap_or_else(|error| panic!("{error}"))
}

/// Steps after which 0/1 Adam's ranks have met, having walked apart for four.
const MET: usize = 23;

/// Slow enough for roundings not to grow before ranks have met.
fn slow_config(optimizer: &str, precision: &str) -> Value {
    let mut value = ds_config(optimizer, precision, 1);
    let params = &mut value["optimizer"]["params"];
    params["lr"] = if optimizer == "OneBitLamb" { 0.005 } else { 0.001 }.into();
    if optimizer == "ZeroOneAdam" {
        params["local_step_scaler"] = 2.into();
    }
    value
}

#[test]
fn a_gpu_follows_the_processor() {
    if ferrospeed_cuda::device_count() == 0 {
        return skip("no CUDA device");
    }
    for optimizer in ["OneBitAdam", "ZeroOneAdam", "OneBitLamb"] {
        // Until values go as signs rounding is all that differs. A sign that is another's moves a value by its whole size, until what that
        // lost is fed back. 0/1 Adam sends signs between two updates of its second moment, from the third on.
        let compressed = if optimizer == "ZeroOneAdam" { 3 } else { FREEZE as usize };
        for (ranks, precision, before, after) in [
            (1, "fp32", 1e-4, 1e-3),
            (2, "fp32", 1e-4, 2e-2),
            (2, "bf16", 2e-2, 0.15),
            (2, "fp16", 5e-3, 0.15),
        ] {
            let run = |on_gpu: bool| {
                let value = slow_config(optimizer, precision);
                on_ranks(ranks, move |world| {
                    let (model, parameters) = Model::build(&description());
                    let mut engine = engine_on(on_gpu, world, &value, &parameters);
                    let losses: Vec<f32> = (0..MET).map(|number| step(&mut engine, &model, number)).collect();
                    (losses, weights(&engine, &parameters))
                })
            };
            let (ours, theirs) = (run(true), run(false));
            let case = format!("{optimizer}, {ranks} ranks, {precision}");
            for ((losses, weights), (expected, _)) in ours.iter().zip(&theirs) {
                for (number, (loss, expected)) in losses.iter().zip(expected).enumerate() {
                    let limit = if number < compressed { before } else { after };
                    assert!(
                        (loss - expected).abs() <= limit * expected,
                        "{case}: step {number} has a loss of {loss} on the GPU, {expected} on the processor"
                    );
                }
                let apart = weights.iter().zip(&ours[0].1);
                let apart = apart.map(|(a, b)| (f32::from_bits(*a) - f32::from_bits(*b)).abs());
                let most = apart.fold(0.0, f32::max);
                // 0/1 Adam's ranks go back before they meet, which is rounded.
                let limit = if optimizer == "ZeroOneAdam" { 1e-3 } else { 0.0 };
                assert!(most <= limit, "{case}: ranks are {most} apart");
            }
        }
    }
}

/// What a rank holds for a checkpoint beside weights and moments.
fn own(engine: &Engine) -> (OwnNumbers, BTreeMap<String, Vec<f64>>) {
    (engine.store().own_numbers().unwrap(), engine.store().per_parameter())
}

#[test]
fn a_checkpoint_moves_between_gpu_and_processor() {
    if ferrospeed_cuda::device_count() == 0 {
        return skip("no CUDA device");
    }
    let place = tempfile::tempdir().unwrap();
    for optimizer in ["OneBitAdam", "ZeroOneAdam", "OneBitLamb"] {
        for from_gpu in [true, false] {
            let folder = place.path().join(format!("{optimizer}-{from_gpu}"));
            let outcomes = on_ranks(2, move |world| {
                let value = slow_config(optimizer, "fp32");
                let (model, parameters) = Model::build(&description());
                let mut engine = engine_on(from_gpu, world.clone(), &value, &parameters);
                // 0/1 Adam's ranks are on their ways then.
                (0..MET - 5).for_each(|number| _ = step(&mut engine, &model, number));
                engine.save_checkpoint(&folder, &SaveOptions::default()).unwrap();
                let (saved, weighed) = (own(&engine), weights(&engine, &parameters));
                let (other, others) = Model::build(&description());
                let mut moved = engine_on(!from_gpu, world, &value, &others);
                moved.load_checkpoint(&folder, &LoadOptions::default()).unwrap();
                let same = own(&moved) == saved && weights(&moved, &others) == weighed;
                let losses = |engine: &mut Engine, model: &Model| -> Vec<f32> {
                    (MET - 5..MET).map(|number| step(engine, model, number)).collect()
                };
                (same, losses(&mut engine, &model), losses(&mut moved, &other), saved.0.len())
            });
            for (same, stayed, went_on, held) in outcomes {
                let case = format!("{optimizer}, from the {}", if from_gpu { "GPU" } else { "processor" });
                assert!(held > 0, "{case}: nothing is a rank's own");
                assert!(same, "{case}: what was saved and what was loaded differ");
                for (stayed, went_on) in stayed.iter().zip(&went_on) {
                    assert!((stayed - went_on).abs() <= 2e-2 * stayed, "{case}: {went_on}, not {stayed}");
                }
            }
        }
    }
}
