//! Muon against DeepSpeed 0.19.8's: `scripts/record-muon` made the recording.

use std::num::NonZeroU64;

use ferrospeed_config::{AutoValues, Config};
use ferrospeed_optim::muon::{Matrices, Muon, orthogonal};
use ferrospeed_optim::{Copy16, Gradient, GroupOptions, Optimizer, Stretch};
use ferrospeed_tensor::{Device, Tensor};
use serde_json::{Value, json};

fn configured(params: &Value) -> (Muon, GroupOptions) {
    let value = json!({ "train_batch_size": 1, "optimizer": { "type": "muon", "params": params } });
    let config = Config::from_value("golden", &value).unwrap();
    let config = config.resolve(NonZeroU64::MIN, &AutoValues::new()).unwrap().0;
    match Optimizer::from_config(&config.optimizer.unwrap()).unwrap() {
        (Optimizer::Muon(muon), options) => (muon, options),
        (other, _) => panic!("{other:?}"),
    }
}

/// As the recorder makes them.
fn first(seed: usize, numel: usize) -> Vec<f32> {
    (0..numel).map(|i| ((((i * 7919 + seed * 613) % 1013) as f64 - 506.0) / 1000.0) as f32).collect()
}

fn gradient(seed: usize, step: usize, weights: &[f32]) -> Vec<f32> {
    let pattern =
        |i: usize| ((((i * 104_729 + seed * 7 + step * step * 31) % 997) as f64 - 498.0) / 300.0) as f32;
    weights.iter().enumerate().map(|(i, weight)| pattern(i) + 0.5 * weight).collect()
}

fn pass(
    device: &Device,
    weights: &mut [f32],
    gradient: (&[f32], f32),
    states: &mut [Vec<f32>],
    pass: &ferrospeed_optim::Pass,
) {
    let mut stretch = Stretch {
        weights,
        gradient: Gradient::F32(gradient.0),
        gradient_factor: gradient.1,
        states: states.iter_mut().map(Vec::as_mut_slice).collect(),
        copy: Copy16::None,
        device,
    };
    stretch.pass(pass);
}

/// One step over the matrices of a parameter.
fn step(
    muon: &Muon,
    options: &GroupOptions,
    sizes: &[usize],
    weights: &mut [f32],
    gradient: &[f32],
    momentum: &mut Vec<f32>,
) {
    let device = ferrospeed_cpu::with_threads(1);
    let mut directions = vec![0.0; weights.len()];
    let states = std::slice::from_mut(momentum);
    pass(
        &device,
        &mut directions,
        (gradient, muon.entering(options)),
        states,
        &muon.direction(options).into(),
    );
    let of = Matrices::of(sizes);
    let numel = of.rows * of.columns;
    for directions in directions.chunks_mut(numel) {
        let x = Tensor::from_slice(directions, [numel], &device).unwrap();
        directions.copy_from_slice(&orthogonal(&x, &of).unwrap().to_vec_f32().unwrap());
    }
    pass(&device, weights, (&directions, 1.0), &mut [], &muon.apply(options).into());
}

#[test]
fn twenty_steps_are_deepspeeds() {
    let recorded: Value = serde_json::from_str(include_str!("../golden-torch/muon.json")).unwrap();
    let (muon, options) = configured(&recorded["params"]);
    let of_matrices = muon.of_matrices(&options, &options);
    assert_eq!((of_matrices.lr, options.lr), (0.02, 0.003));
    for (seed, sizes) in recorded["shapes"].as_array().unwrap().iter().enumerate() {
        let sizes: Vec<usize> =
            sizes.as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as usize).collect();
        let mut weights = first(seed, sizes.iter().product());
        let mut states = vec![vec![0.0; weights.len()]; 2];
        for number in 1..=20 {
            let gradient = gradient(seed, number, &weights);
            if sizes.len() > 1 {
                step(&muon, &of_matrices, &sizes, &mut weights, &gradient, &mut states[0]);
            } else {
                let update = Optimizer::Muon(muon).pass(&options, number as u64);
                let device = ferrospeed_cpu::with_threads(1);
                pass(&device, &mut weights, (&gradient, 1.0), &mut states, &update);
            }
            // Both orders of its products are DeepSpeed's.
            for method in ["standard", "gram"] {
                let Some(want) = recorded["weights"][method][number.to_string()].as_array() else { continue };
                for (index, want) in want[seed].as_array().unwrap().iter().enumerate() {
                    let (got, want) = (weights[index], want.as_f64().unwrap() as f32);
                    assert!(
                        (got - want).abs() <= 1e-5,
                        "{sizes:?}, step {number}, {method}, [{index}]: {got}, not {want}"
                    );
                }
            }
        }
    }
}

#[test]
fn each_kind_of_weights_has_its_own_rate_or_the_common_one() {
    let rates = |params: Value| {
        let (muon, options) = configured(&params);
        (muon.lr, options.lr)
    };
    assert_eq!(rates(json!({})), (0.02, 3e-4));
    assert_eq!(rates(json!({"lr": 0.1})), (0.1, 0.1));
    assert_eq!(rates(json!({"lr": 0.1, "adam_lr": 0.2})), (0.1, 0.2));
    assert_eq!(rates(json!({"muon_lr": 0.3, "adam_lr": 0.2})), (0.3, 0.2));
}
