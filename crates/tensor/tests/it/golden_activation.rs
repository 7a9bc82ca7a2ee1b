//! Recorded activation checkpointing.
//!
//! | file | here |
//! | --- | --- |
//! | recompute_grads.json | both variants are our one `checkpoint`: value and gradients must agree |
//! | rng_seeds.json, pipeline_layer_seeds.json | no meaning here: random numbers are keyed by (seed, stream, step), no seed is tracked or reset |
//! | merge_tensors.json | no meaning here: segments take tensors; whatever else they need, their closure owns |
//! | partition.json, contiguous.json | slices per rank and their buffers: needs a process group |
//! | config.json, configure.json | parsed by the configuration, not by the tape |

use ferrospeed_tensor::{Device, Tensor, autograd, ops};
use ferrospeed_testkit::golden::golden;
use serde_json::Value;

fn matrix(value: &Value, device: &Device) -> Tensor {
    let rows = value.as_array().unwrap();
    let values: Vec<f32> =
        rows.iter().flat_map(|row| row.as_array().unwrap()).map(|x| x.as_f64().unwrap() as f32).collect();
    Tensor::from_slice(&values, [rows.len(), values.len() / rows.len().max(1)], device).unwrap()
}

#[test]
fn golden_recomputed_gradients_equal_the_recorded_ones() {
    let device = ferrospeed_cpu::with_threads(1);
    golden().each_case("activation/recompute_grads.json", 2, |case| {
        let [a, b, x] = ["a", "b", "x"].map(|name| matrix(&case[name], &device).tracked());
        let inputs = [x, a, b];
        let y = autograd::checkpoint(&inputs, |inputs| {
            let hidden = ops::tanh(&ops::matmul(&inputs[0], &inputs[1])?)?;
            Ok(vec![ops::matmul(&hidden, &inputs[2])?])
        })
        .unwrap()
        .remove(0);
        let close = |what: &str, ours: &Tensor| {
            let truth = matrix(&case[what], &device).to_vec::<f32>().unwrap();
            let ours = ours.to_vec::<f32>().unwrap();
            assert_eq!(ours.len(), truth.len());
            for (ours, truth) in ours.iter().zip(&truth) {
                assert!((ours - truth).abs() <= 1e-5 * truth.abs().max(1.0), "{what}: {ours} or {truth}");
            }
        };
        close("y", &y);
        autograd::backward(&ops::sum(&y).unwrap()).unwrap();
        for (what, input) in ["dx", "da", "db"].iter().zip(&inputs) {
            close(what, &input.grad().unwrap());
        }
    });
}
