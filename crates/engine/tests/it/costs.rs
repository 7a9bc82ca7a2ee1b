//! What the model of costs says a rank sends in a step, against what its communication log counts; and the norms of layers,
//! which ranks take together.

use std::sync::Arc;

use super::common::{config, on_ranks};
use ferrospeed_comm::topology::{DATA, MODEL};
use ferrospeed_comm::{Mesh, ProcessTopology, SEQUENCE, World};
use ferrospeed_engine::{Engine, Options, Setup, StepReport, initialize_model};
use ferrospeed_models::decoder::Spread;
use ferrospeed_models::{Decoder, ModelConfig, Tokens, WindowRule};
use ferrospeed_nn::tensor_parallel::{Between, Slices};
use ferrospeed_nn::{Mode, SequenceMethod, SequenceParallel};
use ferrospeed_tensor::Tensor;
use ferrospeed_tune::cost::step_work;
use ferrospeed_tune::model::{Model, from_hugging_face};
use ferrospeed_tune::plan::{Operands, Processor, Request};
use serde_json::{Value, json};

/// How far counted bytes may be from the formulas: small parameters that stage 3 keeps whole, norms, agreements.
const TOLERANCE: f64 = 0.05;
const BATCH: usize = 2;
const TOKENS: usize = 64;

#[derive(Debug, Clone)]
struct Case {
    stage: u8,
    micro_batches: usize,
    data: usize,
    tensor: usize,
    sequence: usize,
    recompute: bool,
}

impl Case {
    fn model(&self) -> Value {
        json!({
            "model_type": "llama", "vocab_size": 512, "hidden_size": 128, "intermediate_size": 384,
            "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
            "max_position_embeddings": TOKENS, "hidden_act": "silu", "rms_norm_eps": 1e-5,
            "tie_word_embeddings": false,
        })
    }

    fn config(&self) -> Value {
        json!({
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_accumulation_steps": self.micro_batches,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
            "zero_optimization": {
                "stage": self.stage, "stage3_param_persistence_threshold": 0,
                "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0,
            },
        })
    }

    fn ranks(&self) -> usize {
        self.data * self.tensor * self.sequence
    }

    fn expected_bytes(&self) -> f64 {
        let shape = from_hugging_face(&self.model()).unwrap().in_slices(self.tensor as u64);
        let work = step_work(&Request {
            model: &Model::Transformer(shape),
            config: &config(&self.config(), self.data),
            data_parallel_size: (self.data * self.sequence) as u64,
            sequence_ranks: self.sequence as u64,
            sequence_length: TOKENS as u64,
            checkpoint_activations: self.recompute,
            mlp_chunk: None,
            keeps_attention_matrix: false,
            processor: Processor::Cpu,
            operands: Operands::InPlace,
        });
        work.sent_bytes()
    }

    fn start(&self, world: World) -> (Engine, Decoder) {
        let axes = [(DATA, self.data), (SEQUENCE, self.sequence), (MODEL, self.tensor)];
        let mesh = Mesh::new(world.clone(), ProcessTopology::new(axes).unwrap()).unwrap();
        let mut options = Options::default();
        if self.tensor * self.sequence > 1 {
            options.spread_over(&mesh).unwrap();
        }
        let slices = (self.tensor > 1).then(|| Slices::over(&mesh.tensor().unwrap(), Between::AllTokens));
        let parsed = ModelConfig::from_value(&self.model(), WindowRule::default()).unwrap();
        let ModelConfig::Decoder(parsed) = parsed else { panic!("a decoder") };
        let mut model = Decoder::spread(*parsed, &Spread { slices, experts: None }).unwrap();
        model.set_activation_checkpointing(self.recompute);
        if self.sequence > 1 {
            let group = mesh.sequence().unwrap();
            model.set_sequence_parallel(Some(SequenceParallel::new(group, SequenceMethod::Ulysses)));
        }
        let setup = Setup::new(config(&self.config(), self.data), world, ferrospeed_cpu::with_threads(1));
        (initialize_model(&setup, model.parameters(), options).unwrap(), model)
    }
}

fn step(engine: &mut Engine, model: &Decoder, seed: usize) -> StepReport {
    let mut report = StepReport::Accumulating;
    for micro in 0..engine.gradient_accumulation_steps() as usize {
        let rank = engine.data_rank();
        let ids: Vec<i64> = (0..BATCH * TOKENS)
            .map(|at| ((at * 7 + at * at + seed * 11 + micro * 5 + rank) % 100) as i64)
            .collect();
        let ids = Tensor::from_slice(&ids, [BATCH, TOKENS], engine.device()).unwrap();
        let loss = engine.forward(|_| model.loss(&Tokens::new(ids.clone()), &ids, Mode::Train)).unwrap();
        engine.backward(&loss).unwrap();
        report = engine.step().unwrap();
    }
    report
}

/// Bytes that a rank passes to others in its third step, by the conventions of the log.
fn sent_bytes(case: &Case) -> f64 {
    let case = Arc::new(case.clone());
    // All groups of a case that exchange much have as many ranks.
    let ranks = if case.data > 2 { case.data } else { 2 } as f64;
    let all = on_ranks(case.ranks(), move |world| {
        let (mut engine, model) = case.start(world.clone());
        step(&mut engine, &model, 0);
        step(&mut engine, &model, 1);
        world.log().start();
        step(&mut engine, &model, 2);
        world.log().stop();
        let sent = world.log().summary().into_iter().map(|row| {
            let bytes = row.bytes as f64 * row.count as f64;
            match row.operation.as_str() {
                "all_reduce" => bytes * 2.0 * (ranks - 1.0) / ranks,
                // Of these the log has a rank's own part.
                "all_gather" | "reduce_scatter" => bytes * (ranks - 1.0),
                "all_to_all" => bytes * (ranks - 1.0) / ranks,
                _ => bytes,
            }
        });
        sent.sum::<f64>()
    });
    all.into_iter().fold(0.0, f64::max)
}

#[test]
fn a_rank_sends_what_the_model_of_costs_says() {
    let plain = Case { stage: 0, micro_batches: 1, data: 2, tensor: 1, sequence: 1, recompute: false };
    let mut cases = Vec::new();
    for stage in 0..=3 {
        for (data, micro_batches) in [(2, 1), (2, 2), (4, 1)] {
            cases.push(Case { stage, micro_batches, data, ..plain });
        }
    }
    for recompute in [false, true] {
        cases.push(Case { data: 1, tensor: 2, recompute, ..plain });
        cases.push(Case { data: 1, sequence: 2, recompute, ..plain });
    }
    cases.push(Case { stage: 1, data: 2, tensor: 2, ..plain });
    cases.push(Case { stage: 2, data: 1, tensor: 2, sequence: 2, ..plain });
    let mut wrong = Vec::new();
    for case in &cases {
        let (expected, sent) = (case.expected_bytes(), sent_bytes(case));
        if (expected / sent - 1.0).abs() > TOLERANCE {
            wrong.push(format!("{case:?}: {expected} expected, {sent} sent ({:.3})", expected / sent));
        }
    }
    assert!(wrong.is_empty(), "{} of {} are off:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}

/// The norm of all, and by layer, in steps of which every second is watched.
fn norms(case: &Case, every: u64) -> Vec<(f64, Vec<(String, f64)>)> {
    let case = Arc::new(case.clone());
    let all = on_ranks(case.ranks(), move |world| {
        let (mut engine, model) = case.start(world);
        engine.watch_gradients(every).unwrap();
        let mut steps = Vec::new();
        for seed in 0..4 {
            let StepReport::Applied { grad_norm } = step(&mut engine, &model, seed) else {
                panic!("skipped")
            };
            steps.push((grad_norm, engine.layer_norms().to_vec()));
        }
        steps
    });
    assert!(all.iter().all(|rank| *rank == all[0]), "ranks say different things");
    all.into_iter().next().unwrap()
}

#[test]
fn norms_of_layers_add_up_to_the_norm_of_all_on_every_mesh_and_only_where_asked() {
    let plain = Case { stage: 0, micro_batches: 1, data: 2, tensor: 1, sequence: 1, recompute: false };
    let whole = norms(&plain, 2);
    for case in [
        plain.clone(),
        Case { stage: 1, ..plain.clone() },
        Case { stage: 3, ..plain.clone() },
        Case { data: 1, tensor: 2, ..plain.clone() },
    ] {
        for (index, (norm, layers)) in norms(&case, 2).into_iter().enumerate() {
            assert_eq!(layers.is_empty(), index % 2 == 0, "{case:?}: every second step is watched");
            if layers.is_empty() {
                continue;
            }
            let squares: f64 = layers.iter().map(|(_, norm)| norm * norm).sum();
            assert!((squares.sqrt() / norm - 1.0).abs() < 1e-9, "{case:?}: {} of {norm}", squares.sqrt());
            let names: Vec<&str> = layers.iter().map(|(name, _)| name.as_str()).collect();
            for name in ["model.embed_tokens", "model.layers.0", "model.layers.2", "lm_head"] {
                assert!(names.contains(&name), "{name} of {names:?}");
            }
            if case.data == plain.data {
                assert_eq!(layers, whole[index].1, "{case:?}: one mesh, the same bits");
            }
        }
    }
    assert!(norms(&plain, 0).iter().all(|(_, layers)| layers.is_empty()));
}
