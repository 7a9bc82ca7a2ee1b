//! A model in stages whose layers are in slices, whose sequences are shared or whose experts are spread trains as it does
//! on the same mesh without stages.
//!
//! Stages sum in the order of one rank that holds all layers, so losses, norms and weights are the same bits; a tied
//! weight's gradients are summed in another order, which f32's rounding shows: [`TOLERANCE`]. The same holds between slices
//! and a rank that holds everything.

use std::sync::Arc;

use super::common::{config, device, on_ranks};
use ferrospeed_comm::layout::ExpertOrder;
use ferrospeed_comm::topology::{DATA, MODEL, PIPE};
use ferrospeed_comm::{Mesh, ProcessTopology, ReduceOp, SEQUENCE, World};
use ferrospeed_engine::{
    Engine, EngineError, LoadOptions, Options, SaveOptions, Setup, StepReport, initialize_model,
    initialize_pipeline,
};
use ferrospeed_models::decoder::Spread;
use ferrospeed_models::{Decoder, ModelConfig, Tokens, WindowRule};
use ferrospeed_nn::tensor_parallel::{Between, Slices};
use ferrospeed_nn::{Mode, SequenceMethod, SequenceParallel};
use ferrospeed_tensor::Tensor;
use serde_json::{Value, json};

/// Largest difference of losses, norms and weights, relative to the largest of the same kind.
const TOLERANCE: f32 = 5e-5;
const MICRO_BATCHES: usize = 4;
const TOKENS: usize = 8;

/// How many ranks there are on each axis; experts are spread over those of the data.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Axes {
    pipe: usize,
    data: usize,
    sequence: usize,
    tensor: usize,
    expert: usize,
}

const ALONE: Axes = Axes { pipe: 1, data: 1, sequence: 1, tensor: 1, expert: 1 };

impl Axes {
    fn ranks(self) -> usize {
        self.pipe * self.data * self.sequence * self.tensor
    }
}

fn gpt2() -> Value {
    json!({
        "model_type": "gpt2", "vocab_size": 19, "n_embd": 16, "n_layer": 4, "n_head": 4, "n_positions": 8,
        "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.0,
    })
}

/// With key-value heads that two of four ranks share, and dropout nowhere.
fn llama() -> Value {
    json!({
        "model_type": "llama", "vocab_size": 19, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8, "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "tie_word_embeddings": false, "attention_bias": true, "mlp_bias": true,
    })
}

/// With a balance of experts that is carried from stage to stage.
fn mixtral() -> Value {
    let mut config = llama();
    config["model_type"] = "mixtral".into();
    for (key, value) in [
        ("num_local_experts", json!(4)),
        ("num_experts_per_tok", json!(2)),
        ("output_router_logits", json!(true)),
        ("router_aux_loss_coef", json!(0.02)),
        ("attention_bias", json!(false)),
        ("mlp_bias", json!(false)),
    ] {
        config[key] = value;
    }
    config
}

fn configuration(zero: u8, precision: &str, schedule: &str) -> Value {
    let mut config = json!({
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": MICRO_BATCHES, "gradient_clipping": 0.05,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-4, "weight_decay": 0.01}},
        "zero_optimization": {"stage": zero, "reduce_bucket_size": 300},
        "pipeline": {"schedule": schedule, "partition": "uniform"},
    });
    if precision != "fp32" {
        config[precision] = json!({"enabled": true});
    }
    config
}

/// What a rank trains, and what it did.
struct Run {
    engine: Engine,
    model: Decoder,
}

impl Run {
    fn start(world: World, model: &Value, value: &Value, axes: Axes) -> Run {
        Run::start_with(world, model, value, axes, Between::AllTokens)
    }

    fn start_with(world: World, model: &Value, value: &Value, axes: Axes, between: Between) -> Run {
        let sizes = [(PIPE, axes.pipe), (DATA, axes.data), (SEQUENCE, axes.sequence), (MODEL, axes.tensor)];
        let mesh = Mesh::new(world.clone(), ProcessTopology::new(sizes).unwrap()).unwrap();
        let mut options = Options::default();
        options.spread_over(&mesh).unwrap();
        let mut spread = Spread::default();
        if axes.tensor > 1 {
            spread.slices = Some(Slices::over(&mesh.tensor().unwrap(), between));
        }
        if axes.expert > 1 {
            let groups = mesh.expert(axes.expert, ExpertOrder::ExpertBeforeData).unwrap();
            spread.experts = Some((&groups.expert).into());
            options.spread_experts(&mesh, groups).unwrap();
        }
        let ModelConfig::Decoder(parsed) = ModelConfig::from_value(model, WindowRule::default()).unwrap()
        else {
            panic!("a decoder")
        };
        let mut model = Decoder::spread(*parsed, &spread).unwrap();
        if axes.sequence > 1 {
            let group = mesh.sequence().unwrap();
            model.set_sequence_parallel(Some(SequenceParallel::new(group, SequenceMethod::Ulysses)));
        }
        let setup = Setup::new(config(value, axes.data), world, device(1));
        let engine = match axes.pipe {
            1 => initialize_model(&setup, model.parameters(), options),
            stages => {
                let stages = stages.try_into().unwrap();
                initialize_pipeline(&setup, stages, &model, model.parameters(), options)
            }
        };
        Run { engine: engine.unwrap(), model }
    }

    fn batch(&self, step: usize, micro: usize) -> Tensor {
        let seed = step * 5 + micro * 3 + self.engine.data_rank() * 11;
        let ids: Vec<i64> = (0..TOKENS).map(|i| ((i * 7 + seed + i * i) % 19) as i64).collect();
        Tensor::from_slice(&ids, [1, TOKENS], self.engine.device()).unwrap()
    }

    /// The mean loss over ranks and the norm of a step.
    fn step(&mut self, number: usize) -> [f32; 2] {
        let batches: Vec<Tensor> = (0..MICRO_BATCHES).map(|micro| self.batch(number, micro)).collect();
        let Run { engine, model } = self;
        let (loss, report) = if engine.stage().1 > 1 {
            let labelled = |micro: usize| {
                Ok::<_, EngineError>((Tokens::new(batches[micro].clone()), batches[micro].clone()))
            };
            engine.train_batch(model, labelled).unwrap()
        } else {
            let (mut sum, mut report) = (0.0, StepReport::Accumulating);
            for ids in &batches {
                let run = |mode: Mode| model.loss(&Tokens::new(ids.clone()), ids, mode);
                let loss = engine.forward(run).unwrap();
                sum += loss.item().unwrap();
                engine.backward(&loss).unwrap();
                report = engine.step().unwrap();
            }
            let mut mean = [sum / MICRO_BATCHES as f32];
            engine.store().sharding().shard.all_reduce(&mut mean, ReduceOp::Avg).unwrap();
            (mean[0], report)
        };
        match report {
            StepReport::Applied { grad_norm } => [loss, grad_norm as f32],
            other => panic!("{other:?}"),
        }
    }

    fn weights(&self) -> Vec<f32> {
        let all = self.model.parameters().as_slice().iter();
        all.flat_map(|param| self.engine.weight_as_read(param).unwrap()).collect()
    }
}

#[derive(Debug, Clone, PartialEq)]
struct Outcome {
    /// Losses and norms of all steps.
    numbers: Vec<f32>,
    weights: Vec<f32>,
}

fn train(model: &Value, value: &Value, axes: Axes) -> Vec<Outcome> {
    train_with(model, value, axes, Between::AllTokens)
}

fn train_with(model: &Value, value: &Value, axes: Axes, between: Between) -> Vec<Outcome> {
    let (model, value) = (Arc::new(model.clone()), Arc::new(value.clone()));
    on_ranks(axes.ranks(), move |world| {
        let mut run = Run::start_with(world, &model, &value, axes, between);
        let numbers = (0..3).flat_map(|number| run.step(number)).collect();
        Outcome { numbers, weights: run.weights() }
    })
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn assert_near(found: &[f32], wanted: &[f32], what: &str) {
    assert_eq!(found.len(), wanted.len(), "{what}");
    let size = wanted.iter().fold(1e-4f32, |size, value| size.max(value.abs()));
    for (index, (a, b)) in found.iter().zip(wanted).enumerate() {
        assert!((a - b).abs() <= TOLERANCE * size, "{what}, element {index}: {a}, not {b}");
    }
}

/// All ranks in stages against those of the same mesh without.
fn assert_same_bits(model: &Value, value: &Value, axes: Axes, between: Between) {
    let expected = train_with(model, value, Axes { pipe: 1, ..axes }, between).swap_remove(0);
    for (rank, found) in train_with(model, value, axes, between).into_iter().enumerate() {
        let what = format!("{} {axes:?} {between:?} {value} rank {rank}", model["model_type"]);
        assert_eq!(bits(&found.numbers), bits(&expected.numbers), "{what}: losses and norms");
        assert_eq!(bits(&found.weights), bits(&expected.weights), "{what}: weights");
    }
}

#[test]
fn stages_of_slices_give_the_bits_of_the_slices_alone() {
    for (precision, zero) in [("fp32", 0), ("bf16", 1)] {
        for schedule in ["1f1b", "zb-v"] {
            let value = configuration(zero, precision, schedule);
            for (data, tensor) in [(1, 2), (2, 2), (1, 4)] {
                let axes = Axes { pipe: 2, data, tensor, ..ALONE };
                assert_same_bits(&llama(), &value, axes, Between::AllTokens);
            }
        }
    }
    let value = configuration(1, "fp32", "interleaved:2");
    assert_same_bits(&mixtral(), &value, Axes { pipe: 2, tensor: 2, ..ALONE }, Between::AllTokens);
    // With tokens of their own, ranks carry different values, and each sends all that it has.
    assert_same_bits(&llama(), &value, Axes { pipe: 2, tensor: 2, ..ALONE }, Between::OwnTokens);
}

#[test]
fn stages_of_slices_train_as_a_rank_that_holds_everything() {
    for model in [gpt2(), llama()] {
        for (schedule, zero) in [("1f1b", 0), ("zb-v", 1)] {
            for (pipe, data, tensor) in [(2, 1, 2), (2, 2, 2), (3, 1, 2), (2, 1, 4)] {
                if schedule == "zb-v" && pipe == 3 {
                    continue;
                }
                let value = configuration(zero, "fp32", schedule);
                let wanted = train(&model, &value, Axes { data, ..ALONE }).swap_remove(0);
                assert!(wanted.numbers.chunks(2).all(|step| step[1] > 0.05), "clipping is active");
                let axes = Axes { pipe, data, tensor, ..ALONE };
                for (rank, found) in train(&model, &value, axes).into_iter().enumerate() {
                    let what = format!("{} {schedule} {axes:?} rank {rank}", model["model_type"]);
                    assert_near(&found.numbers, &wanted.numbers, &format!("{what}: losses and norms"));
                    assert_near(&found.weights, &wanted.weights, &format!("{what}: weights"));
                }
            }
        }
    }
}

#[test]
fn stages_whose_ranks_share_sequences_give_the_bits_of_those_alone() {
    for (precision, zero, schedule) in [("fp32", 0, "1f1b"), ("bf16", 1, "zb-h1")] {
        let value = configuration(zero, precision, schedule);
        let axes = Axes { pipe: 2, sequence: 2, ..ALONE };
        assert_same_bits(&llama(), &value, axes, Between::AllTokens);
        assert_same_bits(&llama(), &value, Axes { data: 2, ..axes }, Between::AllTokens);
        assert_same_bits(&mixtral(), &value, axes, Between::AllTokens);
    }
    let value = configuration(1, "fp32", "1f1b");
    let axes = Axes { pipe: 2, sequence: 2, tensor: 2, ..ALONE };
    assert_same_bits(&llama(), &value, axes, Between::AllTokens);
}

#[test]
fn stages_whose_ranks_hold_different_experts_give_the_bits_of_those_alone() {
    for (precision, zero, schedule) in [("fp32", 0, "1f1b"), ("bf16", 1, "zb-v")] {
        let value = configuration(zero, precision, schedule);
        for (data, expert) in [(2, 2), (4, 2)] {
            let axes = Axes { pipe: 2, data, expert, ..ALONE };
            assert_same_bits(&mixtral(), &value, axes, Between::AllTokens);
        }
    }
}

/// The bytes of all messages between stages that a rank sent in a step.
fn sent_bytes(partitioned: bool, tensor: usize) -> usize {
    let mut value = configuration(0, "fp32", "1f1b");
    value["pipeline"]["pipe_partitioned"] = partitioned.into();
    value["pipeline"]["grad_partitioned"] = partitioned.into();
    let all = on_ranks(2 * tensor, move |world| {
        let counting = world.clone();
        let mut run = Run::start(world, &llama(), &value, Axes { pipe: 2, tensor, ..ALONE });
        // The first step tells the forms of tensors too.
        run.step(0);
        counting.log().start();
        run.step(1);
        counting.log().stop();
        let rows = counting.log().summary().into_iter();
        // A message of two numbers stands before each activation.
        rows.filter(|row| row.operation == "send" && row.bytes > 16)
            .map(|row| row.bytes * row.count as usize)
            .sum()
    });
    all.into_iter().max().unwrap()
}

#[test]
fn ranks_of_a_slice_send_each_its_share_of_what_crosses_a_boundary() {
    let stream = TOKENS * 16 * 4 * MICRO_BATCHES;
    assert_eq!(sent_bytes(true, 1), stream);
    assert_eq!(sent_bytes(true, 2), stream / 2);
    assert_eq!(sent_bytes(true, 4), stream / 4);
    assert_eq!(sent_bytes(false, 2), stream);
}

#[test]
fn a_checkpoint_goes_on_on_any_mesh() {
    let folder = tempfile::tempdir().unwrap();
    for (name, model) in [("gpt2", gpt2()), ("llama", llama()), ("mixtral", mixtral())] {
        let value = Arc::new(configuration(1, "fp32", "1f1b"));
        let (model, dir) = (Arc::new(model), folder.path().join(name));
        // Two steps, a save, one more: the last step again from the save, in other layouts.
        let run = |axes: Axes, resume: bool| {
            let (model, value, dir) = (model.clone(), value.clone(), dir.clone());
            on_ranks(axes.ranks(), move |world| {
                let mut run = Run::start(world, &model, &value, axes);
                if resume {
                    run.engine.load_checkpoint(&dir, &LoadOptions::default()).unwrap();
                } else {
                    run.step(0);
                    run.step(1);
                    run.engine.save_checkpoint(&dir, &SaveOptions::default()).unwrap();
                }
                Outcome { numbers: run.step(2).to_vec(), weights: run.weights() }
            })
            .swap_remove(0)
        };
        let three_ways = Axes { pipe: 2, data: 2, tensor: 2, ..ALONE };
        let saved = run(three_ways, false);
        assert_eq!(run(three_ways, true), saved, "{name}: the same mesh gives the same bits");
        let mut others = vec![
            Axes { data: 2, ..ALONE },
            Axes { pipe: 3, data: 2, ..ALONE },
            Axes { data: 2, tensor: 4, ..ALONE },
            Axes { pipe: 2, data: 2, sequence: 2, ..ALONE },
        ];
        if name == "mixtral" {
            others.push(Axes { pipe: 2, data: 2, expert: 2, ..ALONE });
        }
        for axes in others {
            let found = run(axes, true);
            assert_near(&found.numbers, &saved.numbers, &format!("{name} on {axes:?}"));
            assert_near(&found.weights, &saved.weights, &format!("{name} on {axes:?}: weights"));
        }
    }
}
