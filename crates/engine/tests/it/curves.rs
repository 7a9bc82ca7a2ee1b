//! Losses of runs whose ranks say less to each other end near those of runs that say all.
//!
//! A small language model learns the bytes of documents on two hosts of two ranks. By default it takes few
//! steps; `FERROSPEED_CURVE_STEPS=200` takes as many.

use super::common::{Batch, Model, engine, on_worlds};
use ferrospeed_comm::{Limits, World};
use ferrospeed_tensor::Tensor;
use serde_json::{Value, json};

const SEQUENCE: usize = 64;
/// The last losses of which a run's end is the mean.
const LAST: usize = 10;

fn steps() -> usize {
    std::env::var("FERROSPEED_CURVE_STEPS").map_or(40, |steps| steps.parse().unwrap())
}

/// Some of the project's documents as they once were: curves must not change with every sentence.
fn text() -> Vec<i64> {
    include_bytes!("../data/curves.txt").iter().map(|byte| i64::from((*byte).min(127))).collect()
}

/// The mean of all ranks' last losses.
fn end(config: &Value) -> f64 {
    let (config, text, steps) = (config.clone(), text(), steps());
    let losses = on_worlds(World::threads_on(&[2, 2], &Limits::default()).unwrap(), move |world| {
        let description = json!({"kind": "lm", "vocab": 128, "dm": 96, "nh": 4, "nl": 2, "tmax": SEQUENCE});
        let (model, parameters) = Model::build(&description);
        let mut engine = engine(world, &config, &parameters, None, None, 1);
        let (device, rank) = (engine.device().clone(), engine.world().rank());
        let mut losses = Vec::new();
        for number in 0..steps {
            let first = (number * 4 + rank) * 2;
            let row = |at: usize| &text[at * 7919 % (text.len() - SEQUENCE)..][..SEQUENCE];
            let ids = [row(first), row(first + 1)].concat();
            let batch = Batch::Tokens(Tensor::from_slice(&ids, [2, SEQUENCE], &device).unwrap());
            let loss = engine.forward(|_| model.loss(&batch)).unwrap();
            losses.push(f64::from(loss.item().unwrap()));
            engine.backward(&loss).unwrap();
            engine.step().unwrap();
        }
        losses[steps - LAST..].iter().sum::<f64>() / LAST as f64
    });
    losses.iter().sum::<f64>() / losses.len() as f64
}

fn base(optimizer: Value) -> Value {
    json!({
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": true},
        "optimizer": optimizer,
    })
}

fn assert_near(name: &str, plain: f64, own: f64, band: f64) {
    println!("{name}: {own:.4}, plain {plain:.4}: {:+.2} %", 100.0 * (own / plain - 1.0));
    assert!((own / plain - 1.0).abs() < band, "{name}: {own} instead of {plain}");
}

#[test]
fn all_of_zero_plus_plus_ends_within_a_hundredth_of_the_plain_loss() {
    let zero = |on: bool| {
        let mut config = base(json!({"type": "AdamW", "params": {"lr": 0.002}}));
        config["zero_optimization"] = json!({
            "stage": 3,
            "stage3_param_persistence_threshold": 100,
            "stage3_max_reuse_distance": 0,
            "zero_quantized_weights": on,
            "zero_hpz_partition_size": if on { 2 } else { 1 },
            "zero_quantized_gradients": on,
        });
        config
    };
    assert_near("qwZ + hpZ + qgZ", end(&zero(false)), end(&zero(true)), 0.01);
}

#[test]
fn one_bit_optimizers_end_within_a_fiftieth_of_the_loss_without_compression() {
    for (optimizer, lr) in [("OneBitAdam", 0.002), ("ZeroOneAdam", 0.002), ("OneBitLamb", 0.01)] {
        // What never freezes sends averaged gradients to the end.
        let config = |freeze: usize| {
            let key = if optimizer == "ZeroOneAdam" { "var_freeze_step" } else { "freeze_step" };
            let mut params = json!({"lr": lr});
            params[key] = freeze.into();
            base(json!({"type": optimizer, "params": params}))
        };
        assert_near(optimizer, end(&config(1_000_000)), end(&config(steps() / 2)), 0.02);
    }
}
