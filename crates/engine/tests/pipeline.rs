//! A model in stages trains as it does whole.
//!
//! Without tied weights every sum has the order it has on a rank that holds all layers, so losses, norms and weights are
//! the same to the last bit. A tied weight's gradient is summed over micro-batches on each stage first: equal within
//! [`TIED_TOLERANCE`].

mod common;

use std::sync::Arc;

use common::{config, device, on_ranks};
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
use ferrospeed_tensor::{Activation, Device, Tensor, TensorError, autograd, ops};
use serde_json::{Value, json};

/// Largest difference of f32 losses, norms and weights of models with tied weights, relative to 1 or the value.
const TIED_TOLERANCE: f32 = 2e-5;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Which {
    Mlp,
    Gpt2Tied,
    Llama,
    Mixtral,
    Bert,
}

/// Any model of these tests, with its micro-batches.
enum Model {
    Mlp(Trained<fn(&Tensor, &Tensor) -> Result<Tensor, TensorError>>, Box<Parameters>),
    Decoder(Box<Decoder>),
    Bert(Box<Bert>),
}

enum Batch {
    Pair((Tensor, Tensor)),
    Labelled((Tokens, Tensor)),
    Bert(Box<BertBatch>),
}

fn labelled(device: &Device, seed: usize) -> (Tokens, Tensor) {
    let ids: Vec<i64> = (0..14).map(|i| ((i * 7 + seed + i * i) % 17) as i64).collect();
    let ids = Tensor::from_slice(&ids, [2, 7], device).unwrap();
    (Tokens::new(ids.clone()), ids)
}

fn mean_square(y: &Tensor, target: &Tensor) -> Result<Tensor, TensorError> {
    ops::mean(&ops::square(&ops::sub(y, target)?)?)
}

fn build(which: Which) -> Model {
    let decoder = |value: Value| match ModelConfig::from_value(&value, WindowRule::default()) {
        Ok(ModelConfig::Decoder(config)) => Model::Decoder(Box::new(Decoder::new(*config))),
        other => panic!("no decoder: {other:?}"),
    };
    match which {
        Which::Mlp => {
            let init = Init::root();
            let mut layers = Sequential::new(&init);
            for _ in 0..4 {
                layers = layers
                    .add(|init| Linear::new(init, 6, 6, true))
                    .add(|_| Activation::Tanh)
                    .add(|_| Dropout { probability: 0.2 });
            }
            Model::Mlp(Trained { layers, loss: mean_square }, Box::new(init.parameters()))
        }
        Which::Gpt2Tied => decoder(json!({
            "model_type": "gpt2", "vocab_size": 17, "n_embd": 12, "n_layer": 6, "n_head": 3, "n_positions": 8,
            "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1,
        })),
        Which::Llama => decoder(json!({
            "model_type": "llama", "vocab_size": 17, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 6,
            "num_attention_heads": 3, "num_key_value_heads": 3, "max_position_embeddings": 8, "hidden_act": "silu",
            "rms_norm_eps": 1e-5, "tie_word_embeddings": false,
        })),
        Which::Bert => match ModelConfig::from_value(
            &json!({
                "model_type": "bert", "architectures": ["BertForPreTraining"], "vocab_size": 17, "hidden_size": 12,
                "num_hidden_layers": 4, "num_attention_heads": 3, "intermediate_size": 20,
                "max_position_embeddings": 8,
            }),
            WindowRule::default(),
        ) {
            Ok(ModelConfig::Bert(config)) => Model::Bert(Box::new(Bert::new(config))),
            other => panic!("no BERT: {other:?}"),
        },
        Which::Mixtral => decoder(json!({
            "model_type": "mixtral", "vocab_size": 17, "hidden_size": 12, "intermediate_size": 20,
            "num_hidden_layers": 6, "num_attention_heads": 3, "num_key_value_heads": 3, "max_position_embeddings": 8,
            "hidden_act": "silu", "rms_norm_eps": 1e-5, "num_local_experts": 4, "num_experts_per_tok": 2,
            "output_router_logits": true, "router_aux_loss_coef": 0.02, "tie_word_embeddings": false,
        })),
    }
}

impl Model {
    fn parameters(&self) -> &Parameters {
        match self {
            Model::Mlp(_, parameters) => parameters,
            Model::Decoder(decoder) => decoder.parameters(),
            Model::Bert(bert) => bert.parameters(),
        }
    }

    fn batch(&self, engine: &Engine, number: usize) -> Batch {
        let (device, seed) = (engine.device(), number * 5 + engine.data_rank() * 11);
        match self {
            Model::Mlp(..) => {
                let values = |shift: usize| -> Tensor {
                    let values: Vec<f32> =
                        (0..12).map(|i| ((i * 7 + seed + shift) % 13) as f32 / 6.0 - 1.0).collect();
                    let values = Tensor::from_slice(&values, [2, 6], device).unwrap();
                    ops::cast(&values, engine.store().dtype()).unwrap()
                };
                Batch::Pair((values(0), values(3)))
            }
            Model::Decoder(_) => Batch::Labelled(labelled(device, seed)),
            Model::Bert(_) => {
                let ids: Vec<i64> = (0..14).map(|i| ((i * 7 + seed + i * i) % 17) as i64).collect();
                let labels: Vec<i64> =
                    ids.iter().enumerate().map(|(i, id)| if i % 3 == 0 { *id } else { -100 }).collect();
                let texts = [seed as i64 % 2, 1];
                Batch::Bert(Box::new(BertBatch {
                    ids: Tensor::from_slice(&ids, [2, 7], device).unwrap(),
                    token_types: None,
                    mask: None,
                    token_labels: Some(Tensor::from_slice(&labels, [2, 7], device).unwrap()),
                    text_labels: Some(Tensor::from_slice(&texts, [2], device).unwrap()),
                }))
            }
        }
    }
}

impl Stages for Model {
    type Batch = Batch;

    fn layers(&self) -> Vec<ferrospeed_nn::Layer> {
        match self {
            Model::Mlp(model, _) => model.layers(),
            Model::Decoder(model) => model.layers(),
            Model::Bert(model) => model.layers(),
        }
    }

    fn forward_range(
        &self,
        range: std::ops::Range<usize>,
        batch: &Batch,
        carried: Carried,
        mode: Mode,
    ) -> Result<Carried, TensorError> {
        self.run(true, range, batch, carried, mode)
    }

    fn output_range(
        &self,
        range: std::ops::Range<usize>,
        batch: &Batch,
        carried: Carried,
        mode: Mode,
    ) -> Result<Carried, TensorError> {
        self.run(false, range, batch, carried, mode)
    }
}

impl Model {
    /// Some layers of whichever model it is, to its loss or to what it says.
    fn run(
        &self,
        to_loss: bool,
        range: std::ops::Range<usize>,
        batch: &Batch,
        carried: Carried,
        mode: Mode,
    ) -> Result<Carried, TensorError> {
        fn of<M: Stages>(
            model: &M,
            to_loss: bool,
            range: std::ops::Range<usize>,
            batch: &M::Batch,
            carried: Carried,
            mode: Mode,
        ) -> Result<Carried, TensorError> {
            match to_loss {
                true => model.forward_range(range, batch, carried, mode),
                false => model.output_range(range, batch, carried, mode),
            }
        }
        match (self, batch) {
            (Model::Mlp(model, _), Batch::Pair(batch)) => of(model, to_loss, range, batch, carried, mode),
            (Model::Decoder(model), Batch::Labelled(batch)) => {
                of(&**model, to_loss, range, batch, carried, mode)
            }
            (Model::Bert(model), Batch::Bert(batch)) => of(&**model, to_loss, range, batch, carried, mode),
            _ => panic!("another model's batch"),
        }
    }
}

fn configuration(zero: u8, precision: &str, micro_steps: usize) -> Value {
    let mut config = json!({
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": micro_steps,
        "gradient_clipping": 0.05,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.01}},
        "zero_optimization": {"stage": zero},
    });
    match precision {
        "fp16" => config["fp16"] = json!({"enabled": true, "initial_scale_power": 8}),
        "bf16" => config["bf16"] = json!({"enabled": true}),
        _ => {}
    }
    config
}

/// Losses and norms of steps, then all weights: of a rank of a pipeline, or of a rank that holds everything.
#[derive(Debug, Clone, PartialEq)]
struct Outcome {
    losses: Vec<f32>,
    norms: Vec<f32>,
    evaluated: f32,
    weights: Vec<f32>,
}

fn start(world: World, value: &Value, model: &Model, stages: usize) -> Engine {
    let data = world.size() / stages;
    let setup = Setup::new(config(value, data), world, device(1));
    let parameters = model.parameters();
    let stages = stages.try_into().unwrap();
    initialize_pipeline(&setup, stages, model, parameters, Options::default()).unwrap()
}

fn train(engine: &mut Engine, model: &Model, steps: std::ops::Range<usize>) -> (Vec<f32>, Vec<f32>) {
    let micro_batches = engine.gradient_accumulation_steps() as usize;
    let in_stages = engine.stage().1 > 1;
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for step in steps {
        let report = if in_stages {
            let batches: Vec<Batch> =
                (0..micro_batches).map(|m| model.batch(engine, step * micro_batches + m)).collect();
            let mut batches = batches.into_iter();
            let next = |_| Ok::<_, EngineError>(batches.next().unwrap());
            let (loss, report) = engine.train_batch(model, next).unwrap();
            losses.push(loss);
            report
        } else {
            let (mut sum, mut last) = (0.0, StepReport::Accumulating);
            for micro in 0..micro_batches {
                let batch = model.batch(engine, step * micro_batches + micro);
                let layers = model.layers().len();
                let loss = engine
                    .forward(|mode| {
                        let mut carried = model.forward_range(0..layers, &batch, Carried::new(), mode)?;
                        Ok::<_, TensorError>(carried.swap_remove(0))
                    })
                    .unwrap();
                sum += loss.item().unwrap();
                engine.backward(&loss).unwrap();
                last = engine.step().unwrap();
            }
            let mut mean = [sum / micro_batches as f32];
            engine.world().group().all_reduce(&mut mean, ReduceOp::Avg).unwrap();
            losses.push(mean[0]);
            last
        };
        match report {
            StepReport::Applied { grad_norm } => norms.push(grad_norm as f32),
            other => panic!("step {step}: {other:?}"),
        }
    }
    (losses, norms)
}

fn weights(engine: &Engine, model: &Model) -> Vec<f32> {
    let all = model.parameters().as_slice().iter();
    all.flat_map(|param| engine.weight_as_read(param).unwrap()).collect()
}

fn outcome(engine: &mut Engine, model: &Model) -> Outcome {
    let (losses, norms) = train(engine, model, 0..3);
    let evaluated = if engine.stage().1 > 1 {
        let batch = model.batch(engine, 99);
        let mut batch = Some(batch);
        engine.eval_batch(model, 1, |_| Ok::<_, EngineError>(batch.take().unwrap())).unwrap()
    } else {
        let batch = model.batch(engine, 99);
        engine.eval();
        let layers = model.layers().len();
        let loss = engine
            .forward(|mode| {
                let mut carried = model.forward_range(0..layers, &batch, Carried::new(), mode)?;
                Ok::<_, TensorError>(carried.swap_remove(0))
            })
            .unwrap();
        engine.train();
        let mut mean = [loss.item().unwrap()];
        engine.world().group().all_reduce(&mut mean, ReduceOp::Avg).unwrap();
        mean[0]
    };
    Outcome { losses, norms, evaluated, weights: weights(engine, model) }
}

fn whole(which: Which, data: usize, value: &Arc<Value>) -> Outcome {
    let value = value.clone();
    let mut outcomes = on_ranks(data, move |world| {
        let model = build(which);
        let setup = Setup::new(config(&value, world.size()), world, device(1));
        let mut engine = initialize_model(&setup, model.parameters(), Options::default()).unwrap();
        outcome(&mut engine, &model)
    });
    outcomes.swap_remove(0)
}

fn in_stages(which: Which, stages: usize, data: usize, value: &Arc<Value>) -> Vec<Outcome> {
    let value = value.clone();
    on_ranks(stages * data, move |world| {
        let model = build(which);
        let mut engine = start(world, &value, &model, stages);
        outcome(&mut engine, &model)
    })
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

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

/// A model that writes down which of its layers ran, and whether anything was recorded.
struct Noting(Model, std::sync::Mutex<Vec<(std::ops::Range<usize>, bool)>>);

impl Stages for Noting {
    type Batch = Batch;

    fn layers(&self) -> Vec<ferrospeed_nn::Layer> {
        self.0.layers()
    }

    fn forward_range(
        &self,
        range: std::ops::Range<usize>,
        batch: &Batch,
        carried: Carried,
        mode: Mode,
    ) -> Result<Carried, TensorError> {
        self.1.lock().unwrap().push((range.clone(), autograd::is_recording()));
        self.0.forward_range(range, batch, carried, mode)
    }
}

#[test]
fn an_interval_keeps_nothing_but_inputs_until_backward() {
    let mut value = configuration(0, "fp32", 1);
    value["pipeline"] = json!({"partition": "uniform", "activation_checkpoint_interval": 3});
    let ran = on_ranks(2, move |world| {
        let model = Noting(build(Which::Llama), Default::default());
        let setup = Setup::new(config(&value, 1), world, device(1));
        let parameters = model.0.parameters();
        let stages = 2.try_into().unwrap();
        let mut engine = initialize_pipeline(&setup, stages, &model, parameters, Options::default()).unwrap();
        let mut batch = Some(model.0.batch(&engine, 0));
        engine.train_batch(&model, |_| Ok::<_, EngineError>(batch.take().unwrap())).unwrap();
        model.1.into_inner().unwrap()
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
    for (zero, schedule) in [(0, "1f1b"), (1, "1f1b"), (1, "interleaved:2"), (1, "zb-h1"), (0, "zb-v")] {
        for (stages, data) in [(2, 1), (4, 1), (2, 2), (4, 2)] {
            // The small BERT has layers for four chunks alone.
            if which == Which::Bert && stages == 4 && schedule != "1f1b" && schedule != "zb-h1" {
                continue;
            }
            let expected = whole(which, data, &Arc::new(configuration(zero, "fp32", 4)));
            let value = scheduled(schedule, zero, "fp32", 4);
            for found in in_stages(which, stages, data, &value) {
                let close = |what: &str, found: &[f32], expected: &[f32]| {
                    assert_eq!(found.len(), expected.len());
                    for (found, expected) in found.iter().zip(expected) {
                        let off = (found - expected).abs() / expected.abs().max(1.0);
                        let case = format!("{which:?} {what} {schedule} ZeRO {zero} pp {stages} dp {data}");
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
fn a_tied_weight_counts_once_where_one_stage_has_both_ends() {
    let mut value = configuration(0, "fp32", 4);
    // With as large a share of its parameters in the table as the smallest GPT-2 has.
    let model = json!({
        "model_type": "gpt2", "vocab_size": 840, "n_embd": 12, "n_layer": 12, "n_head": 3, "n_positions": 8,
    });
    let Ok(ModelConfig::Decoder(model)) = ModelConfig::from_value(&model, WindowRule::default()) else {
        panic!("a decoder")
    };
    let tied = Decoder::new(*model);
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
            let Model::Decoder(mut decoder) = build(Which::Llama) else { panic!("a decoder") };
            decoder.set_activation_checkpointing(true);
            let model = Model::Decoder(decoder);
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

#[test]
fn all_stages_skip_a_step_whose_gradient_overflows_on_one() {
    let mut value = configuration(1, "fp32", 2);
    value["fp16"] = json!({"enabled": true, "initial_scale_power": 32, "hysteresis": 1});
    let value = Arc::new(value);
    let reports = on_ranks(4, move |world| {
        let model = build(Which::Llama);
        let mut engine = start(world, &value, &model, 2);
        let before = weights(&engine, &model);
        let batches: Vec<Batch> = (0..2).map(|micro| model.batch(&engine, micro)).collect();
        let mut batches = batches.into_iter();
        let (_, report) =
            engine.train_batch(&model, |_| Ok::<_, EngineError>(batches.next().unwrap())).unwrap();
        assert_eq!(bits(&weights(&engine, &model)), bits(&before));
        (report, engine.loss_scale(), engine.skipped_steps())
    });
    assert!(matches!(&reports[0].0, StepReport::Skipped { .. }), "{:?}", reports[0]);
    assert!(reports.iter().all(|report| *report == reports[0]), "{reports:?}");
    assert_eq!(reports[0].2, 1);
}

#[test]
fn a_checkpoint_goes_on_with_any_number_of_stages() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().to_path_buf();
    for which in [Which::Llama, Which::Gpt2Tied] {
        let value = Arc::new(configuration(1, "bf16", 2));
        // Two steps, a save, one more: the last step again from the save, in other layouts.
        let run = |stages: usize, data: usize, resume: bool| {
            let (value, dir) = (value.clone(), dir.join(format!("{which:?}")));
            on_ranks(stages * data, move |world| {
                let model = build(which);
                let mut engine = if stages > 1 {
                    start(world, &value, &model, stages)
                } else {
                    let setup = Setup::new(config(&value, world.size()), world, device(1));
                    initialize_model(&setup, model.parameters(), Options::default()).unwrap()
                };
                if resume {
                    let loaded = engine.load_checkpoint(&dir, &LoadOptions::default()).unwrap();
                    assert_eq!(loaded.tag, "global_step2");
                } else {
                    train(&mut engine, &model, 0..2);
                    engine.save_checkpoint(&dir, &SaveOptions::default()).unwrap();
                }
                let (losses, _) = train(&mut engine, &model, 2..3);
                (losses, weights(&engine, &model))
            })
            .swap_remove(0)
        };
        let saved = run(2, 2, false);
        assert_eq!(run(2, 2, true), saved, "{which:?}: the same layout gives the same bits");
        for (stages, data) in [(1, 2), (3, 2)] {
            let found = run(stages, data, true);
            if which == Which::Llama {
                assert_eq!(bits(&found.1), bits(&saved.1), "{which:?} pp {stages} dp {data}");
            }
            assert!((found.0[0] - saved.0[0]).abs() < 0.02, "{which:?} pp {stages}: {found:?} {saved:?}");
        }
    }
}

#[test]
fn a_list_of_layers_is_saved_in_the_layout_of_deepspeeds_pipelines_and_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().to_path_buf();
    let value = scheduled("zb-h1", 1, "fp32", 4);
    let run = |stages: usize, data: usize, resume: bool| {
        let (value, dir) = (value.clone(), dir.clone());
        on_ranks(stages * data, move |world| {
            let model = build(Which::Mlp);
            let mut engine = start(world, &value, &model, stages);
            if resume {
                engine.load_checkpoint(&dir, &LoadOptions::default()).unwrap();
            } else {
                train(&mut engine, &model, 0..2);
                let options = SaveOptions { format: Format::DeepSpeed, ..Default::default() };
                engine.save_checkpoint(&dir, &options).unwrap();
            }
            train(&mut engine, &model, 2..3);
            bits(&weights(&engine, &model))
        })
    };
    let expected = run(2, 2, false);
    let saved = dir.join(std::fs::read_to_string(dir.join("latest")).unwrap().trim());
    for name in [
        "layer_00-model_states.pt",
        "layer_09-model_states.pt",
        "mp_rank_01_model_states.pt",
        "zero_pp_rank_1_mp_rank_01_optim_states.pt",
    ] {
        assert!(saved.join(name).is_file(), "{name}");
    }
    for stages in [2, 4] {
        let found = run(stages, 2, true);
        assert!(found.iter().all(|found| *found == expected[0]), "{stages} stages");
    }
}

#[test]
fn what_makes_no_pipeline_is_refused_with_the_reason() {
    let told = on_ranks(2, |world| {
        let model = build(Which::Llama);
        let try_with = |value: &Value, stages: usize| {
            let setup = Setup::new(config(value, 1), world.clone(), device(1));
            let made = initialize_pipeline(
                &setup,
                stages.try_into().unwrap(),
                &build(Which::Llama),
                &Parameters::default(),
                Options::default(),
            );
            made.err().map(|error| error.to_string()).unwrap_or_default()
        };
        let plain = configuration(0, "fp32", 2);
        let mut by_type = plain.clone();
        by_type["pipeline"] = json!({"partition": "type:nothing"});
        let with_schedule = |name: &str| try_with(&scheduled(name, 0, "fp32", 3), 2);
        let refused = [
            try_with(&configuration(2, "fp32", 2), 2),
            try_with(&plain, 3),
            try_with(&by_type, 2),
            with_schedule("zigzag"),
            with_schedule("inference"),
            with_schedule("interleaved:2"),
            try_with(&scheduled("interleaved:9", 0, "fp32", 2), 2),
        ];
        let mut engine = start(world, &plain, &model, 2);
        let forward = engine.forward(|_| Err::<Tensor, _>(TensorError::argument("x", String::new())));
        let step = engine.step().unwrap_err().to_string();
        (refused, forward.unwrap_err().to_string(), step)
    });
    let (refused, forward, step) = &told[0];
    assert!(refused[0].contains("zero_optimization.stage: stage 2 cannot be combined"), "{}", refused[0]);
    assert!(refused[1].contains("2 ranks cannot be divided over 3 stages"), "{}", refused[1]);
    assert!(refused[2].contains("no layer has such a name"), "{}", refused[2]);
    assert!(refused[3].contains("pipeline.schedule") && refused[3].contains("'zigzag'"), "{}", refused[3]);
    assert!(refused[4].contains("'inference' does not train"), "{}", refused[4]);
    assert!(refused[5].contains("3 micro-batches are not a multiple of 2 stages"), "{}", refused[5]);
    assert!(refused[6].contains("chunk 8 of 18 gets none of 8 layers"), "{}", refused[6]);
    assert!(forward.contains("call train_batch"), "{forward}");
    assert!(step.contains("call train_batch"), "{step}");
}

#[test]
fn a_stage_that_dies_is_named_by_those_that_wait_for_it() {
    for schedule in ["1f1b"].into_iter().chain(SCHEDULES) {
        for dying in 0..2 {
            let value = scheduled(schedule, 0, "fp32", 4);
            let told = on_ranks(2, move |world| {
                let model = build(Which::Llama);
                let mut engine = start(world, &value, &model, 2);
                // One that dies in the middle of a batch: it asks for micro-batches in order.
                let (is_dying, batches) = (engine.stage().0 == dying, 0..4);
                let batches: Vec<Batch> = batches.map(|micro| model.batch(&engine, micro)).collect();
                let mut batches = batches.into_iter();
                let run = engine.train_batch(&model, |micro| match is_dying && micro == 2 {
                    true => Err(EngineError::Order { call: "batch", why: "this rank dies" }),
                    false => Ok(batches.next().unwrap()),
                });
                run.unwrap_err().to_string()
            });
            let (other, told) = (1 - dying, &told[1 - dying]);
            // Who, doing what, on which micro-batch, with whom; and why.
            assert!(told.starts_with(&format!("stage {other} (")), "{schedule}, stage {dying} dies: {told}");
            assert!(told.contains("ing ") && told.contains(" of micro-batch "), "{schedule}: {told}");
            assert!(told.contains(&format!(" stage {dying}): rank {dying} ")), "{schedule}: {told}");
        }
    }
}

#[test]
fn a_stage_that_dies_behind_the_last_message_is_named_by_those_that_wait_for_losses() {
    // With zb-v the first stage has the loss: it fails there, when the other has nothing more to send.
    let value = scheduled("zb-v", 0, "fp32", 4);
    let told = on_ranks(2, move |world| {
        let model = build(Which::Llama);
        let mut engine = start(world, &value, &model, 2);
        let (tokens, labels) = labelled(&device(1), 0);
        let labels = match engine.stage().0 {
            0 => ops::narrow(&labels, 1, 0, 3).unwrap(),
            _ => labels,
        };
        let batch = |_| Ok::<_, EngineError>(Batch::Labelled((tokens.clone(), labels.clone())));
        engine.eval_batch(&model, 1, batch).unwrap_err().to_string()
    });
    assert!(
        told[1].starts_with("stage 1 (receiving losses up to micro-batch 0 from stage 0): rank 0 "),
        "{}",
        told[1]
    );
}

#[test]
fn layers_are_divided_by_what_they_take() {
    let divided = |partition: &'static str| {
        let mut value = configuration(0, "fp32", 2);
        value["pipeline"] = json!({"partition": partition});
        let divisions = on_ranks(2, move |world| {
            let model = build(Which::Llama);
            let setup = Setup::new(config(&value, 1), world, device(1));
            let refused = initialize_pipeline(
                &setup,
                2.try_into().unwrap(),
                &model,
                model.parameters(),
                Options::default(),
            );
            let refused = refused.err().map(|error| error.to_string()).unwrap_or_default();
            let (scratch, batch) = (build(Which::Llama), Batch::Labelled(labelled(&device(1), 3)));
            let measured = measure_layers(&setup, &scratch, &batch).unwrap();
            assert_eq!(measured.len(), 8);
            let options = Options { measured: Some(measured.clone()), ..Default::default() };
            let engine =
                initialize_pipeline(&setup, 2.try_into().unwrap(), &model, model.parameters(), options);
            (engine.unwrap().division().unwrap().clone(), measured, refused)
        });
        // Rank 0 has measured, and all divide by what it found.
        assert_eq!(divisions[0], divisions[1]);
        divisions[0].clone()
    };
    let (by_time, measured, refused) = divided("profile");
    assert!(
        refused.contains("pipeline.partition: ") && refused.contains("was not: measure them first"),
        "{refused}"
    );
    // Blocks are of one kind, which is measured once.
    assert!(measured.iter().all(|layer| layer.seconds > 0.0 && layer.activation_bytes > 0.0), "{measured:?}");
    assert!(measured[1..7].iter().all(|block| *block == measured[1]), "{measured:?}");
    let times =
        |layers: std::ops::Range<usize>| -> f64 { measured[layers].iter().map(|layer| layer.seconds).sum() };
    let apart = |cut: usize| (times(0..cut) - times(cut..8)).abs();
    let best = (1..8).map(apart).fold(f64::INFINITY, f64::min);
    assert!((apart(by_time.boundaries[1]) - best).abs() < 1e-12, "{by_time}: {measured:?}");
    let (by_memory, _, _) = divided("memory");
    // The first stage holds two micro-batches, the last one.
    assert!(by_memory.boundaries[1] <= 4, "{by_memory}");
}
