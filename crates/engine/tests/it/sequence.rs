//! Sequences that ranks share train like whole ones: the same objective, the same weights but for the order of sums.

use std::sync::Arc;

use super::common::{config, device, meaningful, on_ranks};
use ferrospeed_comm::topology::DATA;
use ferrospeed_comm::{Mesh, ProcessTopology, SEQUENCE, World};
use ferrospeed_engine::{Engine, LoadOptions, Options, SaveOptions, Setup, StepReport, initialize_model};
use ferrospeed_models::{Decoder, ModelConfig, Tokens, WindowRule};
use ferrospeed_nn::{SequenceMethod, SequenceParallel};
use ferrospeed_tensor::Tensor;
use ferrospeed_zero::access::Which;
use serde_json::{Value, json};

const METHODS: [SequenceMethod; 2] = [SequenceMethod::Ulysses, SequenceMethod::Ring];
const STEPS: usize = 3;
const VOCABULARY: usize = 29;
const BATCH: usize = 2;

/// Losses, and weights after three steps of at most 0.01 each.
const LOSS_TOLERANCE: f32 = 2e-5;
const WEIGHT_TOLERANCE: f32 = 5e-5;

/// A small model of a family, without dropout. Its heads divide by no number of ranks but one where the family allows it.
fn family(name: &str) -> Value {
    let sizes = json!({
        "vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 3, "max_position_embeddings": 32,
    });
    let with = |more: Value| {
        let mut all = sizes.as_object().unwrap().clone();
        all.extend(more.as_object().unwrap().clone());
        Value::Object(all)
    };
    match name {
        "gpt2" => json!({
            "model_type": "gpt2", "vocab_size": VOCABULARY, "n_embd": 12, "n_layer": 2, "n_head": 3, "n_positions": 32,
            "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0,
        }),
        "bloom" => json!({
            "model_type": "bloom", "vocab_size": VOCABULARY, "hidden_size": 20, "n_layer": 2, "n_head": 5, "seq_length": 32,
        }),
        "opt" => json!({
            "model_type": "opt", "vocab_size": VOCABULARY, "hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 32,
            "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 32, "dropout": 0.0,
        }),
        "gpt_neox" => json!({
            "model_type": "gpt_neox", "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32,
            "num_hidden_layers": 2, "num_attention_heads": 2, "rotary_pct": 0.5, "max_position_embeddings": 32,
        }),
        "mistral" => with(json!({ "model_type": "mistral", "sliding_window": 5 })),
        "mixtral" => with(json!({
            "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": true,
            "router_aux_loss_coef": 0.1,
        })),
        "smollm3" => with(json!({ "model_type": "smollm3", "no_rope_layers": [0, 1] })),
        other => with(json!({ "model_type": other })),
    }
}

fn configuration(stage: u8, precision: &str, micro_steps: usize) -> Value {
    let mut config = json!({
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": micro_steps,
        "gradient_clipping": 0.1,
        // Gradients that are zero but for rounding must not become whole steps.
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": stage, "reduce_bucket_size": 500, "stage3_param_persistence_threshold": 20,
            "stage3_prefetch_bucket_size": 2000,
        },
    });
    if precision != "fp32" {
        config[precision] = json!({"enabled": true});
    }
    config
}

/// What is trained, and on which ranks.
#[derive(Clone)]
struct Case {
    model: Value,
    config: Value,
    tokens: usize,
    data: usize,
    sequence: usize,
    method: SequenceMethod,
    padded: bool,
    checkpointing: bool,
}

impl Case {
    fn alone(family_name: &str) -> Case {
        Case {
            model: family(family_name),
            config: configuration(0, "fp32", 1),
            // A prime: no part is as long as another.
            tokens: if family_name == "mixtral" { 16 } else { 19 },
            data: 1,
            sequence: 1,
            method: SequenceMethod::Ulysses,
            padded: false,
            checkpointing: false,
        }
    }

    fn shared(self, sequence: usize, method: SequenceMethod) -> Case {
        Case { sequence, method, ..self }
    }

    fn start(&self, world: World) -> (Engine, Decoder) {
        let ModelConfig::Decoder(parsed) =
            ModelConfig::from_value(&self.model, WindowRule::default()).unwrap()
        else {
            panic!("a decoder")
        };
        let mut model = Decoder::new(*parsed);
        model.set_activation_checkpointing(self.checkpointing);
        let axes = [(DATA, self.data), (SEQUENCE, self.sequence)];
        let mesh = Mesh::new(world.clone(), ProcessTopology::new(axes).unwrap()).unwrap();
        let setup = Setup::new(config(&self.config, self.data), world, device(1));
        let mut options = Options::default();
        options.spread_over(&mesh).unwrap();
        let engine = initialize_model(&setup, model.parameters(), options).unwrap();
        if self.sequence > 1 {
            model.set_sequence_parallel(Some(SequenceParallel::new(mesh.sequence().unwrap(), self.method)));
        }
        (engine, model)
    }

    /// A micro-batch of the ranks that see `sample`: tokens, and labels of which some do not count.
    fn batch(&self, sample: usize, engine: &Engine) -> (Tokens, Tensor) {
        let count = BATCH * self.tokens;
        let ids: Vec<i64> =
            (0..count).map(|at| ((at * 7 + at * at + sample * 11) % VOCABULARY) as i64).collect();
        let ignored = |at: usize| at % self.tokens < 4 || at % 7 == 5;
        let labels: Vec<i64> =
            ids.iter().enumerate().map(|(at, &id)| if ignored(at) { -100 } else { id }).collect();
        let tensor =
            |values: &[i64]| Tensor::from_slice(values, [BATCH, self.tokens], engine.device()).unwrap();
        let mut tokens = Tokens::new(tensor(&ids));
        if self.padded {
            // The first sequence starts late, the second ends early.
            let real = |row: usize, at: usize| if row == 0 { at >= 3 } else { at < self.tokens - 4 };
            let row = |row: usize| (0..self.tokens).map(|at| u8::from(real(row, at))).collect();
            tokens.mask = Some((0..BATCH).map(row).collect());
        }
        (tokens, tensor(&labels))
    }

    fn steps(&self, engine: &mut Engine, model: &Decoder, range: std::ops::Range<usize>) -> Vec<f32> {
        let mut losses = Vec::new();
        for step in range {
            for micro in 0..engine.gradient_accumulation_steps() as usize {
                let (tokens, labels) = self.batch(step * 5 + micro * 3 + engine.data_rank() * 2, engine);
                let loss = engine.forward(|mode| model.loss(&tokens, &labels, mode)).unwrap();
                losses.push(loss.item().unwrap());
                engine.backward(&loss).unwrap();
                if let StepReport::Applied { grad_norm } = engine.step().unwrap() {
                    assert!(grad_norm > 0.1, "nothing is clipped at a norm of {grad_norm}");
                    losses.push(grad_norm as f32);
                }
            }
        }
        losses
    }

    /// Per rank, the losses and norms of all steps and the weights after them.
    fn train(&self) -> Vec<(Vec<f32>, Vec<f32>)> {
        let case = Arc::new(self.clone());
        on_ranks(self.data * self.sequence, move |world| {
            let (mut engine, model) = case.start(world);
            let seen = case.steps(&mut engine, &model, 0..STEPS);
            (seen, weights(&engine, &model))
        })
    }
}

fn weights(engine: &Engine, model: &Decoder) -> Vec<f32> {
    let full = |param: &ferrospeed_tensor::Param| {
        let values = engine.store().full(param, Which::Weight).unwrap();
        meaningful(&param.name().replace("attn.c_attn", "qkv"), &values)
    };
    model.parameters().as_slice().iter().flat_map(full).collect()
}

fn apart(found: &[f32], wanted: &[f32]) -> f32 {
    assert_eq!(found.len(), wanted.len());
    found.iter().zip(wanted).map(|(a, b)| (a - b).abs() / b.abs().max(1.0)).fold(0.0, f32::max)
}

/// Every rank's losses and weights are those of `reference`, rank by rank of the data.
fn assert_alike(what: &str, case: &Case, reference: &[(Vec<f32>, Vec<f32>)]) {
    for (rank, (seen, weights)) in case.train().iter().enumerate() {
        let wanted = &reference[rank / case.sequence];
        let (loss, weight) = (apart(seen, &wanted.0), apart(weights, &wanted.1));
        assert!(loss < LOSS_TOLERANCE, "{what}, rank {rank}: losses {loss} apart: {seen:?} {:?}", wanted.0);
        assert!(weight < WEIGHT_TOLERANCE, "{what}, rank {rank}: weights {weight} apart");
    }
}

#[test]
fn parts_on_two_and_four_ranks_train_like_the_whole_in_every_family() {
    for name in [
        "gpt2", "llama", "bloom", "mistral", "qwen2", "qwen3", "phi3", "smollm3", "olmo2", "opt", "gpt_neox",
        "mixtral",
    ] {
        let alone = Case::alone(name);
        let reference = alone.train();
        for method in METHODS {
            for ranks in [2, 4] {
                // Of sixteen tokens, a ring of four has pieces of two.
                let case = alone.clone().shared(ranks, method);
                assert_alike(&format!("{name}, {method:?} on {ranks}"), &case, &reference);
            }
        }
    }
}

#[test]
fn every_stage_agrees_with_accumulation_and_with_ranks_that_see_other_samples() {
    for micro_steps in [1, 2] {
        let alone = Case { config: configuration(0, "fp32", micro_steps), data: 2, ..Case::alone("llama") };
        let reference = alone.train();
        for method in METHODS {
            for stage in 0..=3 {
                let config = configuration(stage, "fp32", micro_steps);
                let case = Case { config, ..alone.clone().shared(2, method) };
                assert_alike(
                    &format!("stage {stage}, {method:?}, {micro_steps} micro-batches"),
                    &case,
                    &reference,
                );
            }
        }
    }
}

#[test]
fn padding_and_recomputed_blocks_change_nothing() {
    for name in ["llama", "bloom", "opt"] {
        let alone = Case { padded: true, ..Case::alone(name) };
        let reference = alone.train();
        for method in METHODS {
            for checkpointing in [false, true] {
                let case = Case { checkpointing, ..alone.clone().shared(2, method) };
                assert_alike(&format!("padded {name}, {method:?}, {checkpointing}"), &case, &reference);
            }
        }
    }
}

#[test]
fn parts_lose_to_dropout_what_the_whole_loses() {
    let mut alone = Case::alone("gpt2");
    for key in ["embd_pdrop", "attn_pdrop", "resid_pdrop"] {
        alone.model[key] = 0.2.into();
    }
    let reference = alone.train();
    let undropped = Case::alone("gpt2").train();
    assert!(apart(&reference[0].0, &undropped[0].0) > 1e-3, "nothing was dropped");
    for method in METHODS {
        for ranks in [2, 4] {
            for checkpointing in [false, true] {
                let case = Case { checkpointing, ..alone.clone().shared(ranks, method) };
                assert_alike(&format!("dropout, {method:?} on {ranks}, {checkpointing}"), &case, &reference);
            }
        }
    }
}

#[test]
fn bf16_follows_the_whole_within_its_rounding() {
    let alone = Case { config: configuration(2, "bf16", 2), ..Case::alone("llama") };
    let reference = alone.train();
    for method in METHODS {
        for stage in 0..=3 {
            let case = Case { config: configuration(stage, "bf16", 2), ..alone.clone().shared(2, method) };
            for (seen, _) in case.train() {
                let loss = apart(&seen, &reference[0].0);
                assert!(loss < 2e-2, "stage {stage}, {method:?}: {loss} apart: {seen:?}");
            }
        }
    }
}

#[test]
fn gradients_travel_in_the_type_that_is_asked_for() {
    let bytes = |wire: Option<&'static str>| {
        let mut case = Case { config: configuration(2, "bf16", 1), ..Case::alone("llama") };
        if let Some(wire) = wire {
            case.config["seq_parallel_comm_data_type"] = wire.into();
        }
        let case = Arc::new(case.shared(2, SequenceMethod::Ulysses));
        let seen = on_ranks(2, move |world| {
            let (mut engine, model) = case.start(world.clone());
            world.log().start();
            case.steps(&mut engine, &model, 0..1);
            let rows = world.log().summary();
            rows.iter()
                .filter(|row| row.operation == "reduce_scatter")
                .map(|row| row.bytes as u64 * row.count)
                .sum::<u64>()
        });
        seen[0]
    };
    let (plain, narrow) = (bytes(None), bytes(Some("bf16")));
    assert!(
        narrow > 0 && plain == 2 * narrow,
        "fp32 unless it is said otherwise: {plain} and {narrow} bytes"
    );
}

#[test]
fn a_checkpoint_goes_to_any_other_mesh_and_back() {
    let folder = tempfile::tempdir().unwrap();
    let whole = Case { config: configuration(1, "fp32", 1), ..Case::alone("llama") };
    let reference = whole.train();
    let meshes = [(1, 1, 1), (2, 1, 2), (3, 1, 4), (0, 1, 2)];
    for method in METHODS {
        for (stage, _, sequence) in meshes {
            let dir = folder.path().join(format!("{method:?}-{stage}-{sequence}"));
            let case = |stage, sequence| Case {
                config: configuration(stage, "fp32", 1),
                ..whole.clone().shared(sequence, method)
            };
            let (saving, to) = (Arc::new(case(stage, sequence)), dir.clone());
            on_ranks(sequence, move |world| {
                let (mut engine, model) = saving.start(world);
                saving.steps(&mut engine, &model, 0..1);
                engine.save_checkpoint(&to, &SaveOptions::default()).unwrap();
            });
            for (other_stage, _, others) in meshes {
                let (loading, from) = (Arc::new(case(other_stage, others)), dir.clone());
                let outcome = on_ranks(others, move |world| {
                    let (mut engine, model) = loading.start(world);
                    engine.load_checkpoint(&from, &LoadOptions::default()).unwrap();
                    loading.steps(&mut engine, &model, 1..STEPS);
                    weights(&engine, &model)
                });
                let apart = apart(&outcome[0], &reference[0].1);
                assert!(apart < WEIGHT_TOLERANCE, "{method:?} {sequence} -> {others}: {apart} apart");
            }
        }
    }
}

/// What one rank sends in a forward and backward of one attention layer, by the formulas of docs/sequence-parallel.md.
#[test]
fn the_wire_carries_what_the_manual_says() {
    let (tokens, width) = (32, 32);
    for method in METHODS {
        for ranks in [2, 4] {
            let mut case = Case { tokens, ..Case::alone("llama").shared(ranks, method) };
            for (key, value) in [
                ("hidden_size", 32),
                ("num_attention_heads", 8),
                ("num_key_value_heads", 4),
                ("num_hidden_layers", 3),
            ] {
                case.model[key] = value.into();
            }
            let case = Arc::new(case);
            let sent = on_ranks(ranks, move |world| {
                let (mut engine, model) = case.start(world.clone());
                let (batch, labels) = case.batch(0, &engine);
                world.log().start();
                let loss = engine.forward(|mode| model.loss(&batch, &labels, mode)).unwrap();
                engine.backward(&loss).unwrap();
                let rows = world.log().summary();
                let of = |kind: &str| -> u64 {
                    let rows = rows.iter().filter(|row| row.operation == kind);
                    rows.map(|row| row.bytes as u64 * row.count).sum()
                };
                [of("all_to_all"), of("send"), of("recv")]
            });
            // Elements of queries and of keys that a rank holds, in f32.
            let (layers, part) = (3, (BATCH * tokens / ranks) as u64);
            let (queries, keys) = (part * width, part * width / 2);
            let expected = match method {
                // Queries, keys and values there, results back; the same for gradients. The log counts what stays, too.
                SequenceMethod::Ulysses => [layers * 2 * 4 * (2 * queries + 2 * keys), 0, 0],
                // Keys and values round in forward and in backward, and their gradients.
                SequenceMethod::Ring => {
                    let round = layers * (ranks as u64 - 1) * 3 * 4 * 2 * keys;
                    [0, round, round]
                }
            };
            for found in sent {
                assert_eq!(found, expected, "{method:?} on {ranks} ranks");
            }
        }
    }
}

#[test]
fn what_cannot_be_shared_is_refused_with_a_reason() {
    on_ranks(4, |world| {
        let refused = |case: Case| {
            let (mut engine, model) = case.start(world.clone());
            let (tokens, labels) = case.batch(0, &engine);
            engine.forward(|mode| model.loss(&tokens, &labels, mode)).unwrap_err().to_string()
        };
        let short = Case { tokens: 7, ..Case::alone("llama").shared(4, SequenceMethod::Ring) };
        let error = refused(short);
        assert!(error.contains("7 tokens cannot be cut into 8 pieces for 4 ranks"), "{error}");
        let alone = Case::alone("llama");
        let mut value = alone.config.clone();
        value["sequence_parallel_size"] = 4.into();
        let setup = Setup::new(config(&value, 4), world.clone(), device(1));
        let (_, model) = alone.shared(4, SequenceMethod::Ring).start(world.clone());
        let refused_setup = initialize_model(&setup, model.parameters(), Options::default());
        let error = refused_setup.err().unwrap().to_string();
        assert!(error.contains("Options::spread_over"), "{error}");
        let mesh = || {
            let axes = [(DATA, 1), (SEQUENCE, 4)];
            Mesh::new(world.clone(), ProcessTopology::new(axes).unwrap()).unwrap()
        };
        // A mesh of the program's own, of which the configuration knows nothing.
        value.as_object_mut().unwrap().shift_remove("sequence_parallel_size");
        let mut in_shards = value.clone();
        in_shards["zero_optimization"] = json!({"stage": 3, "mics_shard_size": 2});
        let setup = Setup::new(config(&in_shards, 1), world.clone(), device(1));
        let mut options = Options::default();
        options.spread_over(&mesh()).unwrap();
        let error = initialize_model(&setup, model.parameters(), options).err().unwrap().to_string();
        assert!(error.contains("mics_shard_size"), "{error}");
        value["optimizer"] = json!({"type": "OneBitAdam", "params": {"lr": 0.01, "freeze_step": 2}});
        let setup = Setup::new(config(&value, 1), world.clone(), device(1));
        let mut options = Options::default();
        options.spread_over(&mesh()).unwrap();
        let error = initialize_model(&setup, model.parameters(), options).err().unwrap().to_string();
        assert!(error.contains("ranks that share sequences bring summands"), "{error}");
        let mixture = Case { tokens: 18, ..Case::alone("mixtral").shared(4, SequenceMethod::Ulysses) };
        let error = refused(mixture);
        assert!(error.contains("balance of experts"), "{error}");
    });
}

#[test]
fn evaluation_measures_the_whole_loss_on_every_rank() {
    let alone = Case::alone("llama");
    let measure = |case: Case| {
        let case = Arc::new(case);
        on_ranks(case.sequence, move |world| {
            let (mut engine, model) = case.start(world);
            let (tokens, labels) = case.batch(0, &engine);
            engine.eval();
            engine.forward(|mode| model.loss(&tokens, &labels, mode)).unwrap().item().unwrap()
        })
    };
    let whole = measure(alone.clone())[0];
    for method in METHODS {
        for found in measure(alone.clone().shared(3, method)) {
            assert!((found - whole).abs() < LOSS_TOLERANCE * whole, "{method:?}: {found}, not {whole}");
        }
    }
}
