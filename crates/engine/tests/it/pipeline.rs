//! A model in stages trains as it does whole.
//!
//! Without tied weights every sum has the order it has on a rank that holds all layers, so losses, norms and weights are
//! the same to the last bit. A tied weight's gradient is summed over micro-batches on each stage first: equal within
//! [`TIED_TOLERANCE`].

#[path = "pipeline/ends.rs"]
mod ends;
#[path = "pipeline/models.rs"]
mod models;

use std::sync::Arc;

use super::common::{config, device, on_ranks, try_config};
use ferrospeed_comm::{ReduceOp, World};
use ferrospeed_engine::{
    Engine, EngineError, Format, LoadOptions, Options, SaveOptions, Setup, StepReport, divide,
    initialize_model, initialize_pipeline, measure_layers,
};
use ferrospeed_models::bert::{Bert, BertBatch};
use ferrospeed_models::{Decoder, ModelConfig, Tokens, WindowRule};
use ferrospeed_nn::{Carried, Dropout, Init, Linear, Mode, Parameters, Sequential, Stages, Trained};
use ferrospeed_pipeline::schedule::Schedule;
use ferrospeed_pipeline::validate::{Sends, validate};
use ferrospeed_tensor::{Activation, Category, Device, Tensor, TensorError, autograd, ops};
use ferrospeed_zero::access::Which as Access;
use models::*;
use serde_json::{Value, json};

/// Largest difference of f32 losses, norms and weights of models with tied weights, relative to 1 or the value.
const TIED_TOLERANCE: f32 = 2e-5;

#[test]
fn stages_give_the_bits_of_the_whole_model() {
    for which in [Which::Mlp, Which::Llama, Which::Mixtral] {
        for (precision, zero) in [("fp32", 0), ("fp32", 1), ("bf16", 0), ("bf16", 1), ("fp16", 1)] {
            for (stages, data, micro_steps) in [(2, 1, 4), (4, 1, 3), (2, 2, 4), (4, 2, 2), (2, 1, 1)] {
                let value = Arc::new(configuration(zero, precision, micro_steps));
                let expected = whole(which, data, &value);
                for (rank, found) in in_stages(which, stages, data, &value).into_iter().enumerate() {
                    let case = format!(
                        "{which:?} {precision} ZeRO {zero} pp {stages} dp {data} m {micro_steps} rank {rank}"
                    );
                    assert_eq!(bits(&found.losses), bits(&expected.losses), "{case}: losses");
                    assert_eq!(bits(&found.norms), bits(&expected.norms), "{case}: norms");
                    assert_eq!(found.evaluated.to_bits(), expected.evaluated.to_bits(), "{case}: evaluation");
                    assert_eq!(bits(&found.weights), bits(&expected.weights), "{case}: weights");
                }
            }
        }
    }
}

#[test]
fn layers_that_are_computed_again_give_the_same_bits() {
    for which in [Which::Mlp, Which::Llama] {
        let expected = whole(which, 1, &Arc::new(configuration(0, "fp32", 4)));
        for (schedule, interval) in
            [("1f1b", 1), ("1f1b", 3), ("zb-h1", 2), ("zb-v", 1), ("interleaved:2", 100)]
        {
            let mut value = scheduled(schedule, 0, "fp32", 4);
            Arc::make_mut(&mut value)["pipeline"]["activation_checkpoint_interval"] = json!(interval);
            for found in in_stages(which, 2, 1, &value) {
                let case = format!("{which:?} {schedule} every {interval}");
                assert_eq!(bits(&found.losses), bits(&expected.losses), "{case}: losses");
                assert_eq!(bits(&found.weights), bits(&expected.weights), "{case}: weights");
            }
        }
    }
}

#[test]
fn an_interval_keeps_nothing_but_inputs_until_backward() {
    let mut value = configuration(0, "fp32", 1);
    value["pipeline"] = json!({"partition": "uniform", "activation_checkpoint_interval": 3});
    let ran = on_ranks(2, move |world| {
        let model = build(Which::Llama);
        let mut engine = start(world, &value, &model, 2);
        let mut batch = Some(model.batch(&engine, 0));
        engine.train_batch(&model, |_| Ok::<_, EngineError>(batch.take().unwrap())).unwrap();
        model.ran.into_inner().unwrap()
    });
    assert_eq!(ran[0], [(0..3, false), (3..4, false), (3..4, true), (0..3, true)]);
    assert_eq!(ran[1], [(4..7, false), (7..8, false), (7..8, true), (4..7, true)]);
}

#[test]
fn inference_gives_what_the_whole_model_says() {
    for which in [Which::Mlp, Which::Gpt2Tied, Which::Bert] {
        for (schedule, of_output) in [("1f1b", 1), ("zb-v", 0)] {
            let value = scheduled(schedule, 0, "fp32", 4);
            let outputs = on_ranks(2, move |world| {
                let model = build(which);
                let mut engine = start(world, &value, &model, 2);
                let batches: Vec<Batch> = (0..3).map(|micro| model.batch(&engine, micro)).collect();
                let mut batches = batches.into_iter();
                let said =
                    engine.inference(&model, 3, |_| Ok::<_, EngineError>(batches.next().unwrap())).unwrap();
                said.iter().flatten().flat_map(|t| t.to_vec_f32().unwrap()).collect::<Vec<f32>>()
            });
            let expected = {
                let model = build(which);
                let setup = Setup::new(config(&configuration(0, "fp32", 4), 1), World::solo(), device(1));
                let engine = initialize_model(&setup, model.parameters(), Options::default()).unwrap();
                let said = (0..3).flat_map(|micro| {
                    let batch = model.batch(&engine, micro);
                    let layers = 0..model.layers().len();
                    autograd::no_grad(|| model.output_range(layers, &batch, Carried::new(), Mode::Evaluate))
                        .unwrap()
                });
                said.flat_map(|tensor| tensor.to_vec_f32().unwrap()).collect::<Vec<f32>>()
            };
            assert_eq!(bits(&outputs[of_output]), bits(&expected), "{which:?} {schedule}");
            assert!(outputs[1 - of_output].is_empty(), "{which:?} {schedule}: no output on the other stage");
        }
    }
}

#[test]
fn tied_weights_train_as_one() {
    for which in [Which::Gpt2Tied, Which::Bert] {
        tied_weights_of_a_model_train_as_one(which);
    }
}

fn tied_weights_of_a_model_train_as_one(which: Which) {
    let ways = [
        (0, "1f1b", "AdamW"),
        (0, "1f1b", "Lamb"),
        (1, "1f1b", "Lamb"),
        (0, "1f1b", "Muon"),
        (1, "1f1b", "Muon"),
        (1, "1f1b", "AdamW"),
        (1, "interleaved:2", "AdamW"),
        (1, "zb-h1", "AdamW"),
        (0, "zb-v", "AdamW"),
    ];
    for (zero, schedule, optimizer) in ways {
        let with_optimizer = |value: &mut Arc<Value>| {
            Arc::make_mut(value)["optimizer"]["type"] = json!(optimizer);
            Arc::make_mut(value)["zero_allow_untested_optimizer"] = json!(true);
        };
        for (stages, data) in [(2, 1), (4, 1), (2, 2), (4, 2)] {
            // The small BERT has layers for four chunks alone.
            if which == Which::Bert && stages == 4 && schedule != "1f1b" && schedule != "zb-h1" {
                continue;
            }
            let [mut plain, mut value] =
                [Arc::new(configuration(zero, "fp32", 4)), scheduled(schedule, zero, "fp32", 4)];
            [&mut plain, &mut value].into_iter().for_each(with_optimizer);
            let expected = whole(which, data, &plain);
            for found in in_stages(which, stages, data, &value) {
                let close = |what: &str, found: &[f32], expected: &[f32]| {
                    assert_eq!(found.len(), expected.len());
                    for (found, expected) in found.iter().zip(expected) {
                        let off = (found - expected).abs() / expected.abs().max(1.0);
                        let case = format!(
                            "{which:?} {what} {optimizer} {schedule} ZeRO {zero} pp {stages} dp {data}"
                        );
                        assert!(off <= TIED_TOLERANCE, "{case}: {found} and not {expected}");
                    }
                };
                close("losses", &found.losses, &expected.losses);
                close("norms", &found.norms, &expected.norms);
                close("weights", &found.weights, &expected.weights);
            }
        }
    }
}

/// Schedules besides 1F1B; layers are in chunks of equal numbers, of which there are up to eight.
const SCHEDULES: [&str; 3] = ["interleaved:2", "zb-h1", "zb-v"];

fn scheduled(schedule: &str, zero: u8, precision: &str, micro_steps: usize) -> Arc<Value> {
    let mut value = configuration(zero, precision, micro_steps);
    value["pipeline"] = json!({"schedule": schedule, "partition": "uniform"});
    Arc::new(value)
}

#[test]
fn every_schedule_gives_the_bits_of_the_whole_model() {
    for which in [Which::Mlp, Which::Llama, Which::Mixtral] {
        for (precision, zero) in [("fp32", 0), ("bf16", 1), ("fp16", 1)] {
            for (stages, data) in [(2, 1), (4, 1), (2, 2), (4, 2)] {
                let expected = whole(which, data, &Arc::new(configuration(zero, precision, 4)));
                for schedule in SCHEDULES {
                    let value = scheduled(schedule, zero, precision, 4);
                    for (rank, found) in in_stages(which, stages, data, &value).into_iter().enumerate() {
                        let case = format!(
                            "{which:?} {schedule} {precision} ZeRO {zero} pp {stages} dp {data} rank {rank}"
                        );
                        assert_eq!(bits(&found.losses), bits(&expected.losses), "{case}: losses");
                        assert_eq!(bits(&found.norms), bits(&expected.norms), "{case}: norms");
                        assert_eq!(found.evaluated.to_bits(), expected.evaluated.to_bits(), "{case}");
                        assert_eq!(bits(&found.weights), bits(&expected.weights), "{case}: weights");
                    }
                }
            }
        }
    }
}

#[test]
fn both_copies_of_a_tied_weight_stay_equal() {
    for schedule in ["1f1b"].into_iter().chain(SCHEDULES) {
        let value = scheduled(schedule, 1, "bf16", 4);
        let copies = on_ranks(4, move |world| {
            let model = build(Which::Gpt2Tied);
            let mut engine = start(world, &value, &model, 2);
            train(&mut engine, &model, 0..3);
            let tied = model.parameters().as_slice()[0].clone();
            assert!(tied.name().ends_with("wte.weight"), "{}", tied.name());
            // With zb-v both uses lie on the first stage, and the other has no copy.
            let holds = schedule != "zb-v" || engine.stage().0 == 0;
            holds.then(|| bits(&engine.store().full_as_read(&tied).unwrap()))
        });
        let copies: Vec<_> = copies.into_iter().flatten().collect();
        assert!(copies.iter().all(|copy| *copy == copies[0]), "{schedule}");
    }
}

#[test]
fn stages_divide_the_states_of_a_tied_weight() {
    for (zero, data) in [(0, 1), (0, 2), (1, 1), (1, 2)] {
        let value = Arc::new(configuration(zero, "bf16", 2));
        let parts = on_ranks(2 * data, move |world| {
            let model = build(Which::Gpt2Tied);
            let mut engine = start(world, &value, &model, 2);
            train(&mut engine, &model, 0..2);
            let tied = &model.parameters().as_slice()[0];
            let held = |which| engine.store().local(tied, which).unwrap().1.len();
            let whole = engine.store().full(tied, Access::State("exp_avg")).unwrap();
            (held(Access::State("exp_avg")), held(Access::Weight), bits(&whole))
        });
        // In stage 0 the data-parallel ranks of a stage have all that the stage has.
        let shared_by = if zero == 0 { 2 } else { 2 * data };
        let numel = parts[0].2.len();
        for (states, masters, whole) in &parts {
            // Parts are alike and even, so the last is shorter.
            let off = states.abs_diff(numel / shared_by);
            assert!(off <= shared_by, "{states} of {numel}, ZeRO {zero} dp {data}");
            assert_eq!(states, masters, "ZeRO {zero} dp {data}");
            assert!(*whole == parts[0].2, "ZeRO {zero} dp {data}");
        }
    }
}

#[test]
fn zero_0_and_1_give_a_tied_model_the_same_bits() {
    for (precision, data) in [("fp32", 1), ("fp32", 2), ("bf16", 2)] {
        let [off, on] = [0, 1]
            .map(|zero| in_stages(Which::Gpt2Tied, 2, data, &Arc::new(configuration(zero, precision, 2))));
        for (off, on) in off.iter().zip(&on) {
            assert_eq!(bits(&off.losses), bits(&on.losses), "{precision} dp {data}");
            assert_eq!(bits(&off.norms), bits(&on.norms), "{precision} dp {data}");
            assert_eq!(bits(&off.weights), bits(&on.weights), "{precision} dp {data}");
        }
    }
}

/// A GPT-2 with as large a share of its parameters in the table as the smallest has.
fn small_gpt2() -> Decoder {
    let model = json!({
        "model_type": "gpt2", "vocab_size": 840, "n_embd": 12, "n_layer": 12, "n_head": 3, "n_positions": 8,
    });
    match ModelConfig::from_value(&model, WindowRule::default()) {
        Ok(ModelConfig::Decoder(config)) => Decoder::new(*config),
        other => panic!("no decoder: {other:?}"),
    }
}

#[test]
fn two_stages_have_six_tenths_of_the_state_of_a_rank_that_has_all() {
    let held = |stages: usize| {
        let value = Arc::new(configuration(0, "bf16", 8));
        let held = on_ranks(2, move |world| {
            let (model, device) = (Model::from(Family::Decoder(Box::new(small_gpt2()))), device(1));
            let mut engine = match stages {
                1 => {
                    let setup = Setup::new(config(&value, world.size()), world, device.clone());
                    initialize_model(&setup, model.parameters(), Options::default()).unwrap()
                }
                _ => {
                    let setup = Setup::new(config(&value, 1), world, device.clone());
                    let stages = stages.try_into().unwrap();
                    initialize_pipeline(&setup, stages, &model, model.parameters(), Options::default())
                        .unwrap()
                }
            };
            train(&mut engine, &model, 0..1);
            let usage = device.memory_usage();
            let kinds = [Category::Parameters, Category::Gradients, Category::Optimizer];
            kinds.map(|kind| usage.current(kind)).iter().sum::<usize>()
        });
        *held.iter().max().unwrap() as f64
    };
    let share = held(2) / held(1);
    assert!(share <= 0.6, "{share}");
}

#[test]
fn a_tied_weight_counts_once_where_one_stage_has_both_ends() {
    let mut value = configuration(0, "fp32", 4);
    let tied = small_gpt2();
    let most = |value: &Value| {
        let division = divide(&config(value, 1), 2.try_into().unwrap(), &tied, None).unwrap();
        let layers = tied.layers();
        let held = |stage: usize| {
            let own = division.chunks_of(stage).flat_map(|chunk| &layers[division.layers_of_chunk(chunk)]);
            let mut params: Vec<_> = own.flat_map(|layer| layer.parameters.clone()).collect();
            params.sort_by_key(ferrospeed_tensor::Param::id);
            params.dedup_by_key(|param| param.id());
            params.iter().map(ferrospeed_tensor::Param::numel).sum::<usize>()
        };
        held(0).max(held(1)) as f64 / tied.parameters().numel() as f64
    };
    let on_both = most(&value);
    value["pipeline"] = json!({"schedule": "zb-v"});
    assert!(most(&value) < 0.6 && on_both > 0.6, "{} and {on_both} of the model", most(&value));
}

#[test]
fn a_stage_holds_what_its_schedule_claims() {
    for schedule in ["1f1b"].into_iter().chain(SCHEDULES) {
        let value = scheduled(schedule, 0, "fp32", 8);
        let held = on_ranks(4, move |world| {
            let model = build(Which::Mlp);
            let mut engine = start(world, &value, &model, 4);
            train(&mut engine, &model, 0..1);
            engine.stage_times().unwrap().held_chunks
        });
        let schedule = Schedule::new(schedule.parse().unwrap(), 4, 8).unwrap();
        let claimed = validate(&schedule, Sends::Buffered).unwrap();
        let claimed: Vec<usize> = claimed.iter().map(|stage| stage.activations).collect();
        assert_eq!(held, claimed, "{}", schedule.kind);
    }
}

#[test]
fn recomputed_blocks_put_their_weights_off_too() {
    let plain = configuration(0, "fp32", 4);
    let run = |in_stages: bool| {
        let value = if in_stages { scheduled("zb-h1", 0, "fp32", 4) } else { Arc::new(plain.clone()) };
        on_ranks(if in_stages { 2 } else { 1 }, move |world| {
            let Family::Decoder(mut decoder) = build(Which::Llama).family else { panic!("a decoder") };
            decoder.set_activation_checkpointing(true);
            let model = Model::from(Family::Decoder(decoder));
            if in_stages {
                let mut engine = start(world, &value, &model, 2);
                return outcome(&mut engine, &model);
            }
            let setup = Setup::new(config(&value, 1), world, device(1));
            let mut engine = initialize_model(&setup, model.parameters(), Options::default()).unwrap();
            outcome(&mut engine, &model)
        })
    };
    let (found, expected) = (run(true), run(false).swap_remove(0));
    assert!(found.iter().all(|found| bits(&found.weights) == bits(&expected.weights)));
}
