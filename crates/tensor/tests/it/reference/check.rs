//! An op beside its reference: the value, and the gradient by central differences of the reference.

use ferrospeed_tensor::random::RandomKey;
use ferrospeed_tensor::{Device, Result, Tensor, autograd};

use super::Array;

/// Normal numbers of a fixed seed.
pub(crate) fn random(shape: &[usize], stream: u32) -> Array {
    let mut values = vec![0.0f32; shape.iter().product()];
    RandomKey::new(3, stream).fill_normal(0, &mut values);
    Array::new(shape, values.into_iter().map(f64::from).collect())
}

pub(crate) fn tensor(array: &Array, device: &Device) -> Tensor {
    let values: Vec<f32> = array.data.iter().map(|&x| x as f32).collect();
    Tensor::from_slice(&values, &array.shape[..], device).unwrap()
}

fn close(ours: &[f32], truth: &[f64], tolerance: f64, what: &str) {
    assert_eq!(ours.len(), truth.len(), "{what}: size");
    let scale = truth.iter().fold(1.0, |a: f64, b| a.max(b.abs()));
    for (i, (a, b)) in ours.iter().zip(truth).enumerate() {
        assert!(
            (f64::from(*a) - b).abs() <= tolerance * scale,
            "{what}: element {i} is {a}, the reference says {b}"
        );
    }
}

/// Compares value and gradients of `op` with `truth`.
pub(crate) fn check(
    what: &str,
    inputs: &[Array],
    op: impl Fn(&[Tensor]) -> Result<Tensor>,
    truth: impl Fn(&[Array]) -> Array,
) {
    let device = ferrospeed_cpu::with_threads(2);
    let tracked: Vec<Tensor> = inputs.iter().map(|input| tensor(input, &device).tracked()).collect();
    let y = op(&tracked).unwrap_or_else(|error| panic!("{what}: {error}"));
    let expected = truth(inputs);
    close(&y.to_vec_f32().unwrap(), &expected.data, 2e-5, &format!("{what}: value"));
    let cotangent = random(y.sizes(), 99);
    let roots = [(y, tensor(&cotangent, &device))];
    autograd::backward_retaining(&roots).unwrap();
    let once: Vec<Option<Vec<f32>>> = tracked.iter().map(|x| Some(x.grad()?.to_vec_f32().unwrap())).collect();
    autograd::backward_with(&roots).unwrap();
    for (i, (input, once)) in tracked.iter().zip(&once).enumerate() {
        let twice = input.grad().map(|gradient| gradient.to_vec_f32().unwrap());
        let doubled = once.as_ref().map(|once| once.iter().map(|g| g + g).collect::<Vec<f32>>());
        assert_eq!(
            twice, doubled,
            "{what}: a second pass over a retained graph gives other bits for input {i}"
        );
    }
    assert!(autograd::backward_with(&roots).is_err(), "{what}: the last pass frees the graph");
    let objective = |inputs: &[Array]| -> f64 {
        truth(inputs).data.iter().zip(&cotangent.data).map(|(y, c)| y * c).sum()
    };
    for (i, input) in inputs.iter().enumerate() {
        let mut moved = inputs.to_vec();
        let step = 1e-5;
        let slopes: Vec<f64> = (0..input.data.len())
            .map(|j| {
                moved[i].data[j] = input.data[j] + step;
                let above = objective(&moved);
                moved[i].data[j] = input.data[j] - step;
                let below = objective(&moved);
                moved[i].data[j] = input.data[j];
                (above - below) / (2.0 * step)
            })
            .collect();
        let gradient = once[i].clone().unwrap_or_else(|| vec![0.0; slopes.len()]);
        close(&gradient, &slopes, 1e-4, &format!("{what}: gradient of input {i}"));
    }
}
