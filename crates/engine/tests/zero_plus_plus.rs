//! ZeRO++: weights that travel as int8, and weights that neighbours keep among themselves.

mod common;

use common::{Batch, Model, config, device, engine, on_ranks};
use ferrospeed_comm::World;
use ferrospeed_engine::{Options, Setup, initialize_model};
use ferrospeed_tensor::{DType, Device, Tensor, ops};
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
}

const PLAIN: Parts = Parts { quantized: false, neighbours: 1 };
const QUANTIZED: Parts = Parts { quantized: true, ..PLAIN };
const NEAR: Parts = Parts { neighbours: 2, ..PLAIN };

fn ds_config(parts: Parts) -> Value {
    json!({
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.003}},
        "bf16": {"enabled": true},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 100,
            // Backward gathers again what forward has let go.
            "stage3_max_reuse_distance": 0,
            "zero_quantized_weights": parts.quantized,
            "zero_hpz_partition_size": parts.neighbours,
        },
    })
}

struct Outcome {
    losses: Vec<f32>,
    masters: Vec<Vec<f32>>,
    exported: Vec<Vec<f32>>,
    gathered_bytes: u64,
    /// Gathers of the last step among all ranks, and among fewer.
    gathers: [usize; 2],
}

/// How many gathers a rank took part in, among all and among fewer.
fn gathers(world: &World) -> [usize; 2] {
    let records = world.recorder().records();
    let gathers = records.iter().filter(|record| format!("{:?}", record.kind) == "AllGather");
    let (all, fewer): (Vec<_>, Vec<_>) = gathers.partition(|record| record.group_ranks.len() == world.size());
    [all.len(), fewer.len()]
}

fn train(ranks: usize, parts: Parts) -> Vec<Outcome> {
    on_ranks(ranks, move |world| {
        let (model, parameters) = Model::build(&description());
        let mut engine = engine(world, &ds_config(parts), &parameters, None, None, 1);
        let (device, rank) = (engine.device().clone(), engine.world().rank());
        engine.world().log().start();
        let (mut losses, mut before) = (Vec::new(), [0; 2]);
        for number in 0..STEPS {
            before = gathers(engine.world());
            let batch = batch(number, rank, &device);
            let loss = engine.forward(|_| model.loss(&batch)).unwrap();
            losses.push(loss.item().unwrap());
            engine.backward(&loss).unwrap();
            engine.step().unwrap();
        }
        let rows = engine.world().log().summary();
        let after = gathers(engine.world());
        let gathers = [after[0] - before[0], after[1] - before[1]];
        let gathered = rows.iter().filter(|row| row.operation.contains("gather"));
        let gathered_bytes = gathered.map(|row| row.bytes as u64 * row.count).sum();
        let (store, params) = (engine.store(), parameters.as_slice());
        let masters = params.iter().map(|param| store.full(param, Which::Weight).unwrap()).collect();
        let exported = params.iter().map(|param| store.full_as_read(param).unwrap()).collect();
        Outcome { losses, masters, exported, gathered_bytes, gathers }
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
            let exact = Tensor::from_slice(master, [master.len()], &Device::cpu()).unwrap();
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
