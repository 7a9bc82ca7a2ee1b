//! ZeRO++: weights that travel as int8, weights that neighbours keep among themselves, and gradients that cross hosts as
//! int4; each alone and together.

use std::collections::BTreeMap;

use super::common::{Batch, Model, config, device, engine, on_ranks, on_worlds};
use ferrospeed_comm::{Limits, World};
use ferrospeed_engine::{Options, Setup, StepReport, initialize_model};
use ferrospeed_tensor::{DType, Device, Tensor, ops};
use ferrospeed_tune::crossing::{Hosts, crossings};
use ferrospeed_tune::estimate::ModelSize;
use ferrospeed_tune::plan::{Operands, Processor, Request};
use ferrospeed_zero::access::Which;
use serde_json::{Value, json};

const STEPS: usize = 12;

fn description() -> Value {
    json!({"kind": "lm", "vocab": 13, "dm": 24, "nh": 3, "nl": 2, "tmax": 7})
}

fn batch(step: usize, rank: usize, device: &Device) -> Batch {
    let which = (step + rank) % 4;
    let ids: Vec<i64> = (0..14).map(|i| ((i * 7 + which * 5 + i * i) % 13) as i64).collect();
    Batch::Tokens(Tensor::from_slice(&ids, [2, 7], device).unwrap())
}

/// What of ZeRO++ is on.
#[derive(Clone, Copy)]
struct Parts {
    quantized: bool,
    neighbours: usize,
    gradients: bool,
    micro_steps: usize,
    precision: &'static str,
}

const PLAIN: Parts =
    Parts { quantized: false, neighbours: 1, gradients: false, micro_steps: 1, precision: "bf16" };
const QUANTIZED: Parts = Parts { quantized: true, ..PLAIN };
const NEAR: Parts = Parts { neighbours: 2, ..PLAIN };
const GRADIENTS: Parts = Parts { gradients: true, ..PLAIN };
const ALL: Parts = Parts { quantized: true, neighbours: 2, gradients: true, ..PLAIN };

fn ds_config(parts: Parts) -> Value {
    let mut config = json!({
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": parts.micro_steps,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.003}},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 100,
            // Backward gathers again what forward has let go.
            "stage3_max_reuse_distance": 0,
            "zero_quantized_weights": parts.quantized,
            "zero_hpz_partition_size": parts.neighbours,
            "zero_quantized_gradients": parts.gradients,
        },
    });
    match parts.precision {
        "fp32" => {}
        "fp16" => config["fp16"] = json!({"enabled": true, "initial_scale_power": 7}),
        other => config[other] = json!({"enabled": true}),
    }
    config
}

struct Outcome {
    losses: Vec<f32>,
    masters: Vec<Vec<f32>>,
    exported: Vec<Vec<f32>>,
    gathered_bytes: u64,
    /// Gathers of the last step among all ranks, and among fewer.
    gathers: [usize; 2],
    /// Bytes that went to other hosts, by operation.
    crossed: BTreeMap<String, u64>,
}

/// How many gathers a rank took part in, among all and among fewer.
fn gathers(world: &World) -> [usize; 2] {
    let records = world.recorder().records();
    let gathers = records.iter().filter(|record| format!("{:?}", record.kind) == "AllGather");
    let (all, fewer): (Vec<_>, Vec<_>) = gathers.partition(|record| record.group_ranks.len() == world.size());
    [all.len(), fewer.len()]
}

fn train(ranks: usize, parts: Parts) -> Vec<Outcome> {
    train_on(&[ranks], parts)
}

/// The same with so many ranks on each host.
fn train_on(hosts: &[usize], parts: Parts) -> Vec<Outcome> {
    on_worlds(World::threads_on(hosts, &Limits::default()).unwrap(), move |world| {
        let (model, parameters) = Model::build(&description());
        let mut engine = engine(world, &ds_config(parts), &parameters, None, None, 1);
        let (device, rank) = (engine.device().clone(), engine.world().rank());
        engine.world().log().start();
        let (mut losses, mut before) = (Vec::new(), [0; 2]);
        for number in 0..STEPS {
            before = gathers(engine.world());
            for micro in 0..parts.micro_steps {
                let batch = batch(number * parts.micro_steps + micro, rank, &device);
                let loss = engine.forward(|_| model.loss(&batch)).unwrap();
                losses.push(loss.item().unwrap());
                engine.backward(&loss).unwrap();
                engine.step().unwrap();
            }
        }
        let rows = engine.world().log().summary();
        let after = gathers(engine.world());
        let gathers = [after[0] - before[0], after[1] - before[1]];
        let mut crossed = BTreeMap::new();
        rows.iter().for_each(|row| *crossed.entry(row.operation.clone()).or_default() += row.crossed_bytes);
        let gathered = rows.iter().filter(|row| row.operation.contains("gather"));
        let gathered_bytes = gathered.map(|row| row.bytes as u64 * row.count).sum();
        let (store, params) = (engine.store(), parameters.as_slice());
        let masters = params.iter().map(|param| store.full(param, Which::Weight).unwrap()).collect();
        let exported = params.iter().map(|param| store.full_as_read(param).unwrap()).collect();
        Outcome { losses, masters, exported, gathered_bytes, gathers, crossed }
    })
}

#[test]
fn quantised_gathers_cost_about_half_and_hardly_change_the_losses() {
    for ranks in [2, 3] {
        let (plain, quantized) = (train(ranks, PLAIN), train(ranks, QUANTIZED));
        for (rank, (plain, own)) in plain.iter().zip(&quantized).enumerate() {
            assert_ne!(plain.losses, own.losses, "{ranks} ranks: nothing was quantised");
            for (step, (plain, own)) in plain.losses.iter().zip(&own.losses).enumerate() {
                assert!((plain - own).abs() < 0.02 * plain, "{ranks} ranks, step {step}: {plain} {own}");
            }
            assert!(own.masters == quantized[0].masters, "{ranks} ranks: rank {rank} differs");
            let share = own.gathered_bytes as f64 / plain.gathered_bytes as f64;
            assert!((0.4..0.65).contains(&share), "{ranks} ranks: {share} of the bytes");
        }
    }
}

#[test]
fn a_rank_without_peers_quantises_nothing() {
    let (plain, quantized) = (train(1, PLAIN), train(1, QUANTIZED));
    assert!(plain[0].losses == quantized[0].losses && plain[0].masters == quantized[0].masters);
}

#[test]
fn an_exported_model_holds_weights_that_were_never_quantised() {
    for outcome in train(2, QUANTIZED) {
        for (master, exported) in outcome.masters.iter().zip(&outcome.exported) {
            let exact = Tensor::from_slice(master, [master.len()], &ferrospeed_cpu::device()).unwrap();
            let rounded = ops::cast(&exact, DType::BF16).unwrap().to_vec_f32().unwrap();
            assert!(&rounded == exported);
        }
    }
}

#[test]
fn neighbours_spare_the_others_backward_gathers_and_change_no_bit() {
    for quantized in [false, true] {
        let far = train(4, Parts { quantized, ..PLAIN });
        let near = train(4, Parts { quantized, ..NEAR });
        for (far, near) in far.iter().zip(&near) {
            assert!(far.losses == near.losses && far.masters == near.masters, "quantised: {quantized}");
            assert_eq!(far.gathers[1], 0);
            assert!(near.gathers[1] > 0, "nothing was gathered among neighbours");
            assert!(near.gathers[0] < far.gathers[0], "{:?} {:?}", near.gathers, far.gathers);
        }
    }
}

#[test]
fn neighbours_must_divide_the_ranks() {
    let refused = on_ranks(3, |world| {
        let (_, parameters) = Model::build(&description());
        let setup = Setup::new(config(&ds_config(NEAR), 3), world, device(1));
        initialize_model(&setup, &parameters, Options::default()).map(drop).unwrap_err().to_string()
    });
    assert!(refused.iter().all(|why| why.contains("zero_hpz_partition_size")), "{refused:?}");
}

/// Every rank's losses are near those of the plain run, and all ranks have the same weights.
fn assert_near(plain: &[Outcome], own: &[Outcome], case: &str) {
    for (rank, (plain, other)) in plain.iter().zip(own).enumerate() {
        assert_ne!(plain.losses, other.losses, "{case}: nothing was quantised");
        for (step, (plain, own)) in plain.losses.iter().zip(&other.losses).enumerate() {
            assert!((plain - own).abs() < 0.08 * plain, "{case}, step {step}: {plain} {own}");
        }
        assert!(other.masters == own[0].masters, "{case}: rank {rank} differs");
    }
}

fn crossed(outcomes: &[Outcome], operation: &str) -> u64 {
    outcomes.iter().filter_map(|outcome| outcome.crossed.get(operation)).sum()
}

#[test]
fn quantised_gradients_hardly_change_the_losses_whatever_the_hosts_and_the_type() {
    for hosts in [&[2, 2][..], &[1, 1], &[2, 1], &[3, 3]] {
        for (precision, micro_steps) in [("bf16", 1), ("fp16", 2), ("fp32", 1)] {
            let case = format!("{hosts:?}, {precision}");
            let plain = train_on(hosts, Parts { precision, micro_steps, ..PLAIN });
            let parts = Parts { precision, micro_steps, ..GRADIENTS };
            let (own, again) = (train_on(hosts, parts), train_on(hosts, parts));
            assert_near(&plain, &own, &case);
            assert!(own[0].masters == again[0].masters, "{case}: bits vary");
        }
    }
}

#[test]
fn ranks_of_one_host_reduce_gradients_as_they_are() {
    let (plain, own) = (train(3, PLAIN), train(3, GRADIENTS));
    assert!(plain[0].losses == own[0].losses && plain[0].masters == own[0].masters);
}

#[test]
fn all_of_it_together_crosses_hosts_with_a_fraction_of_the_bytes() {
    let (plain, own) = (train_on(&[2, 2], PLAIN), train_on(&[2, 2], ALL));
    assert_near(&plain, &own, "all");
    assert!(crossed(&plain, "reduce_scatter") > 0 && crossed(&own, "reduce_scatter") == 0);
    let sent = |parts| sent_by_a_host(large(parts)).0 as f64;
    // Gathers and reductions of 2 M become 0.25 M and 0.125 M, where M is the 16-bit model.
    let share = sent(ALL) / sent(PLAIN);
    assert!(share < 0.2, "{share} of the bytes");
}

/// A model beside which small messages do not count.
const LARGE: &str = r#"{"kind": "lm", "vocab": 13, "dm": 384, "nh": 3, "nl": 2, "tmax": 7}"#;

fn large(parts: Parts) -> Value {
    let mut value = ds_config(parts);
    value["zero_optimization"]["stage3_param_persistence_threshold"] = 0.into();
    value
}

/// What the ranks of the first host sent to the other in the last of some steps.
fn sent_by_a_host(value: Value) -> (u64, u64) {
    let outcomes = on_worlds(World::threads_on(&[2, 2], &Limits::default()).unwrap(), move |world| {
        let (model, parameters) = Model::build(&serde_json::from_str(LARGE).unwrap());
        let mut engine = engine(world, &value, &parameters, None, None, 1);
        let (device, rank) = (engine.device().clone(), engine.world().rank());
        for number in 0..4 {
            engine.world().log().clear();
            engine.world().log().start();
            let batch = batch(number, rank, &device);
            let loss = engine.forward(|_| model.loss(&batch)).unwrap();
            engine.backward(&loss).unwrap();
            engine.step().unwrap();
        }
        let numel = parameters.as_slice().iter().map(|param| param.numel() as u64).sum::<u64>();
        (engine.world().log().summary().iter().map(|row| row.crossed_bytes).sum::<u64>(), numel)
    });
    (outcomes[0].0 + outcomes[1].0, outcomes[0].1)
}

#[test]
fn a_plan_predicts_what_a_host_sends_within_a_tenth() {
    let mut cases: Vec<Value> = [PLAIN, QUANTIZED, NEAR, GRADIENTS, ALL].map(large).to_vec();
    let (mut whole, mut one_bit) = (ds_config(PLAIN), ds_config(PLAIN));
    whole["zero_optimization"] = json!({"stage": 0});
    one_bit["zero_optimization"] = json!({"stage": 0});
    one_bit["optimizer"] = json!({"type": "OneBitAdam", "params": {"lr": 0.003, "freeze_step": 2}});
    cases.push(whole);
    match device(1).backend().is_host() {
        true => cases.push(one_bit),
        false => {
            ferrospeed_testkit::skip::skip("1-bit optimizers step on the host: their exchange from a GPU")
        }
    }
    for value in cases {
        let (sent, total_params) = sent_by_a_host(value.clone());
        let request = Request {
            model: &ferrospeed_tune::model::Model::Counts(ModelSize {
                total_params,
                largest_layer_params: 0,
            }),
            config: &config(&value, 4),
            data_parallel_size: 4,
            sequence_ranks: 1,
            sequence_length: 7,
            checkpoint_activations: false,
            mlp_chunk: None,
            keeps_attention_matrix: false,
            processor: Processor::Cpu,
            operands: Operands::InPlace,
        };
        let found = crossings(&request, Hosts::of(2)).unwrap();
        let off = sent as f64 / found.configured.sent_bytes as f64;
        assert!((0.9..1.1).contains(&off), "{value}: sent {sent}, {off} of {:?}", found.configured);
    }
}

#[test]
fn all_ranks_skip_when_the_quantised_gradients_of_one_overflow() {
    for parts in [GRADIENTS, ALL] {
        let outcomes = on_worlds(World::threads_on(&[2, 2], &Limits::default()).unwrap(), move |world| {
            let (model, parameters) = Model::build(&description());
            let parts = Parts { precision: "fp16", ..parts };
            let mut engine = engine(world, &ds_config(parts), &parameters, None, None, 1);
            let (device, rank) = (engine.device().clone(), engine.world().rank());
            let mut reports = Vec::new();
            for number in 0..3 {
                let batch = batch(number, rank, &device);
                // In the second step the gradients of rank 2 alone are too large for f16.
                let factor = if number == 1 && rank == 2 { 1e6 } else { 1.0 };
                let loss = engine.forward(|_| model.loss(&batch)).unwrap();
                engine.backward(&ops::affine(&loss, factor, 0.0).unwrap()).unwrap();
                reports.push(matches!(engine.step().unwrap(), StepReport::Skipped { .. }));
            }
            let store = engine.store();
            let masters: Vec<Vec<f32>> =
                parameters.as_slice().iter().map(|param| store.full(param, Which::Weight).unwrap()).collect();
            (reports, masters)
        });
        for (reports, masters) in &outcomes {
            assert_eq!(reports, &[false, true, false]);
            assert!(masters == &outcomes[0].1, "ranks differ");
            assert!(masters.iter().flatten().all(|weight| weight.is_finite()));
        }
    }
}

/// Ranks that train the last layer alone, with all else frozen.
fn train_frozen(packed: bool, weights_in_int8: bool) -> Vec<(Vec<f32>, Vec<Vec<f32>>, u64, u64)> {
    on_ranks(2, move |world| {
        let (model, parameters) = Model::build(&description());
        let all = parameters.as_slice();
        for param in &all[..all.len() - 4] {
            param.set_trainable(false);
        }
        let mut value = ds_config(Parts { quantized: weights_in_int8, ..PLAIN });
        value["zero_optimization"]["zero_quantized_nontrainable_weights"] = packed.into();
        let mut engine = engine(world, &value, &parameters, None, None, 1);
        let kept = engine.device().memory_usage().current(ferrospeed_tensor::Category::Parameters) as u64;
        let (device, rank) = (engine.device().clone(), engine.world().rank());
        engine.world().log().start();
        let mut losses = Vec::new();
        for number in 0..6 {
            let batch = batch(number, rank, &device);
            let loss = engine.forward(|_| model.loss(&batch)).unwrap();
            losses.push(loss.item().unwrap());
            engine.backward(&loss).unwrap();
            engine.step().unwrap();
        }
        let gathered = engine.world().log().summary().into_iter().filter(|row| row.operation == "all_gather");
        let gathered = gathered.map(|row| row.bytes as u64 * row.count).sum();
        let weights = all.iter().map(|param| engine.store().full(param, Which::Weight).unwrap()).collect();
        (losses, weights, gathered, kept)
    })
}

#[test]
fn frozen_weights_are_kept_and_gathered_as_int8() {
    let plain = train_frozen(false, false);
    for weights_in_int8 in [false, true] {
        let packed = train_frozen(true, weights_in_int8);
        for ((losses, weights, gathered, kept), plain) in packed.iter().zip(&plain) {
            for (own, plain) in losses.iter().zip(&plain.0) {
                assert!((own - plain).abs() < 0.02 * plain, "{losses:?} {:?}", plain);
            }
            assert_ne!(losses, &plain.0, "nothing was quantised");
            assert!(weights == &packed[0].1, "ranks differ");
            for (own, plain) in weights.iter().flatten().zip(plain.1.iter().flatten()) {
                assert!((own - plain).abs() < 0.02, "{own} {plain}");
            }
            let share = *gathered as f64 / plain.2 as f64;
            assert!((0.4..0.7).contains(&share), "{share} of the gathered bytes");
            assert!(*kept < plain.3 * 3 / 4, "{kept} bytes of weights, not {}", plain.3);
        }
    }
}
