//! Adapters are trained as PEFT trains them, in every stage to the same bits, and what is frozen beside them costs its weights alone.

mod golden;
mod slices;

use std::sync::Arc;

use super::common::{device, on_ranks};
use ferrospeed_comm::World;
use ferrospeed_engine::{Engine, LoadOptions, Options, SaveOptions, Setup, StepReport, initialize_model};
use ferrospeed_models::decoder::Spread;
use ferrospeed_models::{Decoder, DecoderConfig, ModelConfig, Tokens, WindowRule};
use ferrospeed_nn::adapter::{Adapters, Scaling, Start, Targets};
use ferrospeed_tensor::store::FromInitializers;
use ferrospeed_tensor::{Category, Tensor};
use ferrospeed_zero::access::Which;
use serde_json::{Value, json};

fn decoder_config(value: &Value) -> DecoderConfig {
    match ModelConfig::from_value(value, WindowRule::default()).unwrap() {
        ModelConfig::Decoder(config) => *config,
        other => panic!("{other:?}"),
    }
}

fn llama(hidden: usize) -> Value {
    json!({
        "model_type": "llama", "vocab_size": 23, "hidden_size": hidden, "intermediate_size": 2 * hidden + 4, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16, "tie_word_embeddings": false,
        "attention_bias": true,
    })
}

fn lora(dropout: f32) -> Adapters {
    Adapters { rank: 3, alpha: 6.0, dropout, ..Adapters::default() }
}

fn dora(dropout: f32) -> Adapters {
    Adapters { magnitudes: true, scaling: Scaling::ByRootOfRank, ..lora(dropout) }
}

fn configuration(stage: u8, precision: &str) -> Value {
    let mut config = json!({
        "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": stage, "reduce_bucket_size": 300, "stage3_param_persistence_threshold": 20,
            "reduce_each_micro_batch": true, "stage3_prefetch_bucket_size": 500,
        },
    });
    if precision == "bf16" {
        config["bf16"] = json!({"enabled": true});
    }
    config
}

/// An engine and its model, whose own weights are drawn by a seed.
fn start(world: World, model: &Value, adapters: &Adapters, value: &Value) -> (Engine, Decoder) {
    let mut decoder = Decoder::adapted(decoder_config(model), &Spread::default(), adapters).unwrap();
    decoder.set_activation_checkpointing(value["recomputes"] == true);
    let mut value = value.clone();
    value.as_object_mut().unwrap().remove("recomputes");
    let setup = Setup::new(super::common::config(&value, world.size()), world, device(1));
    let base = FromInitializers { seed: 5 };
    let source = Start::new(&base, None, 9, decoder.parameters().as_slice());
    let options = Options { source: Some(&source), ..Default::default() };
    let engine = initialize_model(&setup, decoder.parameters(), options).unwrap();
    (engine, decoder)
}

fn step(engine: &mut Engine, model: &Decoder, number: usize) -> u32 {
    let rank = engine.world().rank();
    let ids: Vec<i64> = (0..16).map(|i| ((i * 7 + number * 5 + rank * 11 + i * i) % 23) as i64).collect();
    let ids = Tensor::from_slice(&ids, [2, 8], engine.device()).unwrap();
    let loss = engine.forward(|mode| model.loss(&Tokens::new(ids.clone()), &ids, mode)).unwrap();
    engine.backward(&loss).unwrap();
    assert!(matches!(engine.step().unwrap(), StepReport::Applied { .. }));
    loss.item().unwrap().to_bits()
}

/// Losses, and all weights.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Outcome {
    losses: Vec<u32>,
    trained: Vec<u32>,
    frozen: Vec<u32>,
}

impl Outcome {
    fn weigh(&mut self, engine: &Engine, model: &Decoder) {
        for param in model.parameters().as_slice() {
            let values = engine.store().full(param, Which::Weight).unwrap().into_iter().map(f32::to_bits);
            if param.is_trainable() { &mut self.trained } else { &mut self.frozen }.extend(values);
        }
    }
}

fn train(ranks: usize, adapters: &Adapters, value: Value, steps: usize) -> Vec<Outcome> {
    let adapters = Arc::new(adapters.clone());
    on_ranks(ranks, move |world| {
        let (mut engine, model) = start(world, &llama(16), &adapters, &value);
        let mut outcome = Outcome::default();
        for number in 0..steps {
            outcome.losses.push(step(&mut engine, &model, number));
        }
        outcome.weigh(&engine, &model);
        outcome
    })
}

#[test]
fn stages_train_adapters_to_the_same_bits_and_leave_the_rest_alone() {
    for precision in ["fp32", "bf16"] {
        for adapters in [lora(0.0), lora(0.2), dora(0.0), dora(0.2)] {
            let what = format!("{precision}, {adapters:?}");
            let of = |stage| train(2, &adapters, configuration(stage, precision), 4);
            let before = train(2, &adapters, configuration(0, precision), 0);
            let reference = of(0);
            assert_eq!(reference[0].frozen, before[0].frozen, "{what}: what is frozen has moved");
            assert_ne!(reference[0].trained, before[0].trained, "{what}");
            let losses: Vec<f32> = reference[0].losses.iter().map(|bits| f32::from_bits(*bits)).collect();
            assert!(losses.windows(2).any(|pair| pair[0] != pair[1]), "{what}: {losses:?}");
            for stage in 1..=3 {
                assert_eq!(of(stage), reference, "stage {stage}: {what}");
            }
        }
    }
}

#[test]
fn blocks_that_are_computed_again_drop_the_same() {
    for adapters in [lora(0.3), dora(0.3)] {
        let of = |recomputes: bool| {
            let mut value = configuration(2, "fp32");
            value["recomputes"] = recomputes.into();
            train(2, &adapters, value, 3)
        };
        let kept = of(false);
        assert_eq!(of(true), kept);
        assert_ne!(kept[0].losses, train(2, &lora(0.0), configuration(2, "fp32"), 3)[0].losses);
    }
}

#[test]
fn adapters_begin_by_changing_nothing() {
    let ids = Tensor::from_slice(&[1i64, 5, 2, 22, 7, 3], [1, 6], &device(1)).unwrap();
    let loss = |adapters: Option<Adapters>| {
        let config = decoder_config(&llama(16));
        let model = match &adapters {
            Some(adapters) => Decoder::adapted(config, &Spread::default(), adapters).unwrap(),
            None => Decoder::new(config),
        };
        let base = FromInitializers { seed: 5 };
        let source = Start::new(&base, None, 9, model.parameters().as_slice());
        let params = model.parameters().as_slice();
        let _store = ferrospeed_tensor::store::PlainStore::attach(
            params,
            ferrospeed_tensor::DType::F32,
            ids.device(),
            &source,
        )
        .unwrap();
        model.loss(&Tokens::new(ids.clone()), &ids, ferrospeed_nn::Mode::Evaluate).unwrap().item().unwrap()
    };
    let own = loss(None);
    assert_eq!(loss(Some(lora(0.5))), own);
    let lengths = loss(Some(dora(0.5)));
    assert!((lengths - own).abs() < 1e-5, "{lengths}, not {own}");
}

#[test]
fn what_is_frozen_takes_its_own_bytes_once_and_nothing_else() {
    for stage in 0..=3u8 {
        let held = on_ranks(2, move |world| {
            let model = llama(64);
            let (mut engine, model) = start(world, &model, &lora(0.0), &configuration(stage, "bf16"));
            (0..2).for_each(|number| {
                step(&mut engine, &model, number);
            });
            let usage = engine.device().memory_usage();
            let of = |category| usage.current(category);
            let count = |trained| {
                let params = model.parameters().as_slice().iter();
                params
                    .filter(|param| param.is_trainable() == trained)
                    .map(|param| param.numel())
                    .sum::<usize>()
            };
            let categories = [Category::Parameters, Category::Gradients, Category::Optimizer].map(of);
            (categories, count(true), count(false))
        });
        let ([parameters, gradients, optimizer], trained, frozen) = held[0];
        assert!(frozen > 10 * trained, "{frozen} and {trained}");
        let shares = |from: u8| if stage >= from { 2 } else { 1 };
        let near = |what: &str, found: usize, wanted: usize| {
            let excess = found as f64 / wanted as f64 - 1.0;
            assert!(excess.abs() < 0.05, "stage {stage}: {what} takes {found} bytes, not {wanted}");
        };
        near("weights", parameters, 2 * (trained + frozen) / shares(3));
        near("optimizer states", optimizer, 12 * trained / shares(1));
        assert!(
            gradients <= 4 * trained,
            "stage {stage}: {gradients} bytes of gradients of {trained} weights"
        );
    }
}

#[test]
fn a_run_goes_on_from_a_checkpoint_without_frozen_weights_to_the_same_bits() {
    for (stage, precision) in [(0, "fp32"), (2, "bf16"), (3, "bf16")] {
        let place = tempfile::tempdir().unwrap();
        let run = |steps: std::ops::Range<usize>, load: bool, save: bool| {
            let dir = place.path().to_path_buf();
            on_ranks(2, move |world| {
                let value = configuration(stage, precision);
                let (mut engine, model) = start(world, &llama(16), &dora(0.1), &value);
                if load {
                    let options = LoadOptions { frozen_may_be_missing: true, ..Default::default() };
                    engine.load_checkpoint(&dir, &options).unwrap();
                    let strict =
                        engine.load_checkpoint(&dir, &LoadOptions::default()).unwrap_err().to_string();
                    assert!(strict.contains("missing     model.embed_tokens.weight"), "{strict}");
                    engine.load_checkpoint(&dir, &options).unwrap();
                }
                let mut outcome = Outcome::default();
                for number in steps.clone() {
                    outcome.losses.push(step(&mut engine, &model, number));
                }
                if save {
                    let options = SaveOptions { exclude_frozen_parameters: true, ..Default::default() };
                    engine.save_checkpoint(&dir, &options).unwrap();
                }
                outcome.weigh(&engine, &model);
                outcome
            })
        };
        let whole = run(0..6, false, false);
        run(0..3, false, true);
        let resumed = run(3..6, true, false);
        for (resumed, whole) in resumed.iter().zip(&whole) {
            assert_eq!(resumed.losses, whole.losses[3..], "stage {stage}");
            assert_eq!((&resumed.trained, &resumed.frozen), (&whole.trained, &whole.frozen), "stage {stage}");
        }
    }
}

#[test]
fn names_that_mean_nothing_are_told_with_what_there_is() {
    let problems = |adapters: Adapters| {
        let model = Decoder::adapted(decoder_config(&llama(16)), &Spread::default(), &adapters).unwrap();
        let (adapters, found) = model.adapters().unwrap();
        found.problems(adapters)
    };
    let names = |names: &[&str]| Targets::Names(names.iter().map(|&name| name.to_owned()).collect());
    assert_eq!(problems(lora(0.0)), [""; 0]);
    let found = problems(Adapters { targets: names(&["q_proj", "v_porj"]), ..lora(0.0) });
    assert_eq!(
        found,
        [
            "target_modules: 'v_porj' means no linear layer of this model; there are: down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
        ]
    );
    for (name, why) in [("lm_head", "is the output head"), ("embed_tokens", "is a table of embeddings")] {
        let found = problems(Adapters { targets: names(&[name]), ..lora(0.0) });
        assert!(found.len() == 1 && found[0].contains(why), "{found:?}");
    }
    let found = problems(Adapters { saved_modules: vec!["head_of_lm".into()], ..lora(0.0) });
    assert!(
        found[0].contains("modules_to_save: no module of this model has a path that ends with 'head_of_lm'"),
        "{found:?}"
    );
    let found = problems(Adapters { targets: Targets::Pattern("q_proj".into()), ..lora(0.0) });
    assert!(found[0].contains("matches no whole path"), "{found:?}");
    let tied = json!({ "model_type": "gpt2", "vocab_size": 23, "n_embd": 16, "n_layer": 1, "n_head": 2 });
    let adapters = Adapters { saved_modules: vec!["wte".into()], ..lora(0.0) };
    let error =
        Decoder::adapted(decoder_config(&tied), &Spread::default(), &adapters).unwrap_err().to_string();
    assert!(error.contains("which are one weight in this model"), "{error}");
}

#[test]
fn layers_that_are_adapted_are_named_as_briefly_as_can_be() {
    let names = |value: &Value, adapters: &Adapters| {
        let model = Decoder::adapted(decoder_config(value), &Spread::default(), adapters).unwrap();
        model.adapters().unwrap().1.names()
    };
    let llama = llama(16);
    assert_eq!(
        names(&llama, &lora(0.0)).join(" "),
        "down_proj gate_proj k_proj o_proj q_proj up_proj v_proj"
    );
    let single = Adapters { targets: Targets::Pattern(r".*\.1\..*q_proj".into()), ..lora(0.0) };
    assert_eq!(names(&llama, &single), ["model.layers.1.self_attn.q_proj"]);
    let mixture = json!({
        "model_type": "mixtral", "vocab_size": 19, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 3, "num_experts_per_tok": 2,
        "max_position_embeddings": 8, "tie_word_embeddings": false,
    });
    assert_eq!(names(&mixture, &lora(0.0)).join(" "), "k_proj o_proj q_proj v_proj");
    let experts = Adapters { targets: Targets::Names(vec!["w1".into()]), ..lora(0.0) };
    let model = Decoder::adapted(decoder_config(&mixture), &Spread::default(), &experts).unwrap();
    let problems = model.adapters().unwrap().1.problems(&experts);
    assert!(problems[0].contains("experts.0.w1' is of a mixture's router or experts"), "{problems:?}");
}
