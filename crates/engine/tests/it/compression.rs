//! Training with compressed weights: the same bits in every stage, with checkpointing, accumulation and after a resume; weights
//! as they were promised; and what is refused.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use super::common::{config, device, on_ranks, try_config};
use ferrospeed_comm::World;
use ferrospeed_engine::{Engine, LoadOptions, Options, SaveOptions, Setup, initialize_model, refusals};
use ferrospeed_models::presets::{Preset, PresetSizes};
use ferrospeed_models::{Decoder, ModelConfig, Tokens, WindowRule};
use ferrospeed_tensor::{Device, Tensor};
use ferrospeed_zero::access::Which;
use serde_json::{Value, json};

const VOCABULARY: usize = 61;
const TOKENS: usize = 12;

fn decoder(preset: Preset) -> Decoder {
    let config = preset.config(&PresetSizes {
        layers: Some(2),
        width: Some(32),
        heads: Some(2),
        vocabulary: VOCABULARY as u64,
        sequence: 16,
        dropout: 0.0,
    });
    match ModelConfig::from_value(&config, WindowRule::default()).unwrap() {
        ModelConfig::Decoder(config) => Decoder::new(*config),
        ModelConfig::Bert(_) => panic!("a preset is a decoder"),
    }
}

fn configuration(stage: u8, precision: &str, micro_steps: usize) -> Value {
    let mut config = json!({
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": micro_steps,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": stage, "reduce_bucket_size": 500, "stage3_param_persistence_threshold": 20,
            "reduce_each_micro_batch": true,
        },
    });
    if precision != "fp32" {
        config[precision] = json!({"enabled": true});
    }
    config
}

fn technique(shared: Value, params: Value, modules: Value) -> Value {
    let mut shared = shared;
    shared["enabled"] = true.into();
    json!({"shared_parameters": shared, "different_groups": {"some": {"params": params, "modules": modules}}})
}

/// Eight bits that become four, and half of the weights of the feed-forward layers from the second step on.
fn compressed(mut config: Value) -> Value {
    config["compression_training"] = json!({
        "weight_quantization": technique(
            json!({"quantize_groups": 4}),
            json!({"start_bits": 8, "target_bits": 4, "quantization_period": 1}),
            json!(["*"]),
        ),
        "sparse_pruning": technique(
            json!({"method": "l1", "schedule_offset": 2}), json!({"dense_ratio": 0.5}), json!(["mlp"]),
        ),
    });
    config
}

fn start(world: World, value: &Value, model: &Decoder) -> Engine {
    let setup = Setup::new(config(value, world.size()), world, device(1));
    initialize_model(&setup, model.parameters(), Options::default()).unwrap_or_else(|error| panic!("{error}"))
}

fn batch(step: usize, micro: usize, rank: usize, device: &Device) -> Tensor {
    let id = |i: usize| ((i * 7 + step * 5 + micro * 3 + rank * 11 + i * i) % VOCABULARY) as i64;
    let ids: Vec<i64> = (0..2 * TOKENS).map(id).collect();
    Tensor::from_slice(&ids, [2, TOKENS], device).unwrap()
}

/// Losses of some steps, as bits.
fn train(
    engine: &mut Engine,
    model: &Decoder,
    steps: std::ops::Range<usize>,
    micro_steps: usize,
) -> Vec<u32> {
    let (rank, device) = (engine.world().rank(), engine.device().clone());
    let mut losses = Vec::new();
    for step in steps {
        for micro in 0..micro_steps {
            let ids = batch(step, micro, rank, &device);
            let loss = engine.forward(|mode| model.loss(&Tokens::new(ids.clone()), &ids, mode)).unwrap();
            losses.push(loss.item().unwrap().to_bits());
            engine.backward(&loss).unwrap();
            engine.step().unwrap();
        }
    }
    losses
}

fn masters(engine: &Engine, model: &Decoder) -> Vec<u32> {
    let all = model.parameters().as_slice().iter();
    all.flat_map(|param| engine.store().full(param, Which::Weight).unwrap()).map(f32::to_bits).collect()
}

/// The weights that an export holds, by name.
fn exported(engine: &Engine, model: &Decoder) -> Vec<(String, Vec<f32>)> {
    let all = model.parameters().as_slice().iter();
    all.map(|param| (param.name().to_owned(), engine.weight_as_read(param).unwrap())).collect()
}

#[test]
fn every_stage_and_a_recomputed_block_see_the_same_compressed_weights() {
    for (preset, precision, micro_steps) in
        [(Preset::Gpt2, "fp32", 1), (Preset::Llama, "bf16", 2), (Preset::Gpt2, "fp16", 2)]
    {
        let run = |stage: u8, checkpointing: bool, value: fn(Value) -> Value| {
            let value = Arc::new(value(configuration(stage, precision, micro_steps)));
            on_ranks(2, move |world| {
                let mut model = decoder(preset);
                model.set_activation_checkpointing(checkpointing);
                let mut engine = start(world, &value, &model);
                (train(&mut engine, &model, 0..5, micro_steps), masters(&engine, &model))
            })
        };
        let reference = run(0, false, compressed);
        let plain = run(0, false, |config| config);
        assert_ne!(reference[0].0[0], plain[0].0[0], "the first forward sees eight bits");
        for (stage, checkpointing) in [(0, true), (1, false), (2, true), (3, false), (3, true)] {
            let case = format!("{preset:?} {precision}, stage {stage}, recomputed: {checkpointing}");
            assert_eq!(run(stage, checkpointing, compressed), reference, "{case}");
        }
    }
}

#[test]
fn exported_weights_have_their_share_of_zeros_and_no_more_levels_than_bits_say_and_masters_stay_exact() {
    on_ranks(2, |world| {
        let model = decoder(Preset::Gpt2);
        let mut value = compressed(configuration(2, "fp32", 1));
        // Only gradients move weights, so that those that are pruned stay where they are.
        value["optimizer"] = json!({"type": "SGD", "params": {"lr": 0.05}});
        value["zero_allow_untested_optimizer"] = true.into();
        let mut engine = start(world, &value, &model);
        train(&mut engine, &model, 0..2, 1);
        assert!(engine.kept_shares().is_empty(), "nothing is pruned before its step");
        let before = masters(&engine, &model);
        train(&mut engine, &model, 2..9, 1);
        let shares = engine.kept_shares();
        assert_eq!(shares.len(), 4, "{shares:?}");
        assert!(shares.iter().all(|(name, share)| name.contains("mlp") && *share == 0.5), "{shares:?}");
        let (after, seen) = (masters(&engine, &model), exported(&engine, &model));
        let mut at = 0;
        for (param, (name, values)) in model.parameters().as_slice().iter().zip(&seen) {
            let [before, after] = [&before, &after].map(|all| &all[at..at + values.len()]);
            at += values.len();
            if param.shape().dims() < 2 {
                assert!(values.iter().zip(after).all(|(a, b)| a.to_bits() == *b), "{name} is as it is");
                continue;
            }
            let groups = if param.is_table() { param.shape().sizes()[0] } else { 4 };
            for group in values.chunks(values.len() / groups) {
                let levels: BTreeSet<u32> = group.iter().map(|value| value.to_bits()).collect();
                assert!(levels.len() <= 16, "{name}: {} levels of 4 bits", levels.len());
            }
            let levels: BTreeSet<u32> = after.iter().copied().collect();
            assert!(levels.len() > values.len() / 2, "{name}: masters are exact");
            if name.contains("mlp") {
                let zeros = values.iter().filter(|value| **value == 0.0).count();
                assert!(2 * zeros >= values.len(), "{name}: {zeros} of {} are zeros", values.len());
                let moved = before.iter().zip(after).filter(|(before, after)| before != after).count();
                assert!(2 * moved <= values.len() && moved > 0, "{name}: {moved} moved");
            }
        }
        // An evaluation sees what training sees.
        let ids = batch(9, 0, engine.world().rank(), engine.device());
        let evaluate = |engine: &mut Engine| {
            engine.eval();
            let loss = engine.forward(|mode| model.loss(&Tokens::new(ids.clone()), &ids, mode)).unwrap();
            engine.train();
            loss.item().unwrap()
        };
        let trained = engine.forward(|mode| model.loss(&Tokens::new(ids.clone()), &ids, mode)).unwrap();
        assert_eq!(evaluate(&mut engine), trained.item().unwrap());
    });
}

#[test]
fn rows_heads_and_inputs_are_compressed_in_either_layout_of_weights() {
    for preset in [Preset::Gpt2, Preset::Llama] {
        on_ranks(1, move |world| {
            let model = decoder(preset);
            let mut value = configuration(0, "fp32", 1);
            let [up, output] = match preset {
                Preset::Gpt2 => ["mlp.c_fc", "attn.c_proj"],
                _ => ["mlp.up_proj", "self_attn.o_proj"],
            };
            value["compression_training"] = json!({
                "row_pruning": technique(json!({"schedule_offset": 1}), json!({"dense_ratio": 0.25}), json!([up])),
                "head_pruning": technique(
                    json!({"method": "l1", "num_heads": 2, "schedule_offset": 0}), json!({"dense_ratio": 0.5}), json!([output]),
                ),
                "activation_quantization": technique(
                    json!({"schedule_offset": 2, "quantization_type": "asymmetric"}), json!({"bits": 4}), json!(["mlp", "attn"]),
                ),
            });
            let mut engine = start(world, &value, &model);
            train(&mut engine, &model, 0..2, 1);
            let parameters = model.parameters();
            for param in parameters.as_slice() {
                let name = param.name();
                let values = engine.weight_as_read(param).unwrap();
                let (is_up, is_output) = (name.contains(up), name.contains(output));
                if !is_up && !is_output {
                    assert!(values.iter().any(|value| *value != 0.0) || name.ends_with("bias"), "{name}");
                    continue;
                }
                let zero = |at: usize| values[at] == 0.0;
                match *param.shape().sizes() {
                    [_] if is_up => {
                        assert!(values.iter().filter(|v| **v == 0.0).count() >= values.len() / 4 * 3)
                    }
                    [rows, columns] => {
                        // Outputs of one layer, inputs of the other.
                        let by_rows = is_up != param.is_inputs_first();
                        let (lines, length) = if by_rows { (rows, columns) } else { (columns, rows) };
                        let element = |line: usize, at: usize| {
                            if by_rows { line * columns + at } else { at * columns + line }
                        };
                        let pruned = (0..lines).filter(|&line| (0..length).all(|at| zero(element(line, at))));
                        let pruned: Vec<usize> = pruned.collect();
                        let expected = if is_up { lines / 4 * 3 } else { lines / 2 };
                        assert_eq!(pruned.len(), expected, "{name}");
                        if is_output {
                            let one_head =
                                pruned.iter().all(|line| line / (lines / 2) == pruned[0] / (lines / 2));
                            assert!(one_head, "{name}: {pruned:?}");
                        }
                    }
                    _ => {}
                }
            }
            // Inputs are in four bits from here on, as an evaluation shows: the weights stay.
            let ids = batch(5, 0, 0, engine.device());
            let loss = |engine: &mut Engine| {
                engine.forward(|mode| model.loss(&Tokens::new(ids.clone()), &ids, mode)).unwrap()
            };
            let coarse = loss(&mut engine);
            engine.backward(&coarse).unwrap();
            engine.step().unwrap();
            let value = coarse.item().unwrap();
            assert!(value.is_finite() && value < 6.0, "{value}");
        });
    }
}

#[test]
fn inputs_in_few_bits_change_the_loss_and_recomputing_them_does_not() {
    let run = |bits: Option<u64>, checkpointing: bool, stage: u8| {
        on_ranks(1, move |world| {
            let mut model = decoder(Preset::Llama);
            model.set_activation_checkpointing(checkpointing);
            let mut value = configuration(stage, "fp32", 1);
            if let Some(bits) = bits {
                value["compression_training"] = json!({
                    "activation_quantization": technique(json!({"schedule_offset": 1}), json!({"bits": bits}), json!("*")),
                });
            }
            let mut engine = start(world, &value, &model);
            let losses = train(&mut engine, &model, 0..4, 1);
            (losses, masters(&engine, &model))
        })
    };
    let (plain, coarse) = (run(None, false, 0), run(Some(4), false, 0));
    assert_eq!(plain[0].0[0], coarse[0].0[0], "it begins after a step");
    assert_ne!(plain[0].0[1], coarse[0].0[1]);
    assert_eq!(run(Some(4), true, 0), coarse);
    assert_eq!(run(Some(4), true, 3), coarse);
}

#[test]
fn a_resumed_run_goes_on_bit_for_bit_with_the_weights_that_were_pruned_before() {
    let folder = tempfile::tempdir().unwrap();
    let path: Arc<Path> = folder.path().into();
    for (stage, precision) in [(1, "bf16"), (3, "fp32")] {
        let mut value = compressed(configuration(stage, precision, 1));
        value["compression_training"]["weight_quantization"]["shared_parameters"]["rounding"] =
            "stochastic".into();
        let value = Arc::new(value);
        let (whole, path, halves) = (value.clone(), path.clone(), value.clone());
        let expected = on_ranks(2, move |world| {
            let model = decoder(Preset::Gpt2);
            let mut engine = start(world, &whole, &model);
            (train(&mut engine, &model, 0..8, 1), masters(&engine, &model))
        });
        let found = on_ranks(2, move |world| {
            let place = path.join(precision);
            let first = decoder(Preset::Gpt2);
            let mut engine = start(world.clone(), &halves, &first);
            let mut losses = train(&mut engine, &first, 0..4, 1);
            engine.save_checkpoint(&place, &SaveOptions::default()).unwrap();
            drop(engine);
            let second = decoder(Preset::Gpt2);
            let mut engine = start(world, &halves, &second);
            engine.load_checkpoint(&place, &LoadOptions::default()).unwrap();
            assert_eq!(engine.kept_shares().len(), 4, "what was pruned is in the checkpoint");
            losses.extend(train(&mut engine, &second, 4..8, 1));
            (losses, masters(&engine, &second))
        });
        assert_eq!(found, expected, "stage {stage}");
    }
}

#[test]
fn what_cannot_be_compressed_is_refused_before_anything_runs() {
    let model = decoder(Preset::Gpt2);
    let ratio = json!({"dense_ratio": 0.5});
    for (name, shared, params, modules, expected) in [
        ("sparse_pruning", json!({}), ratio.clone(), json!(["nowhere"]), "is found in the name of no module"),
        ("sparse_pruning", json!({}), ratio.clone(), json!(["mlp", "c_fc"]), "is named twice"),
        ("channel_pruning", json!({}), ratio.clone(), json!("*"), "no module that it is for"),
        (
            "head_pruning",
            json!({"method": "l1", "num_heads": 5}),
            ratio.clone(),
            json!(["attn.c_proj"]),
            "not those of 5 heads",
        ),
        (
            "weight_quantization",
            json!({"quantize_groups": 7}),
            json!({"start_bits": 8, "target_bits": 8}),
            json!(["mlp"]),
            "7 groups alike",
        ),
        ("row_pruning", json!({"method": "topk"}), ratio, json!("*"), "use \"l1\""),
    ] {
        let mut value = configuration(0, "fp32", 1);
        value["compression_training"] = json!({name: technique(shared, params, modules)});
        let refused = refusals(&config(&value, 1), Some(model.parameters()));
        let said: Vec<String> = refused.iter().map(ToString::to_string).collect();
        assert!(said.iter().any(|line| line.contains(expected)), "{name}: {said:?}");
    }
    for (key, more, expected) in [
        ("tensor_parallel", json!({"autotp_size": 2}), "ranks hold parts of the model"),
        ("eigenvalue", json!({"enabled": true}), "follow from the step alone"),
        (
            "optimizer",
            json!({"type": "OneBitAdam", "params": {"lr": 0.1, "freeze_step": 2}}),
            "1-bit optimizer",
        ),
    ] {
        let mut value = compressed(configuration(0, "fp32", 1));
        value[key] = more;
        let said = try_config(&value, 2).expect_err(key);
        assert!(said.contains(expected), "{key}: {said}");
    }
}
