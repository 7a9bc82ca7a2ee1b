//! The same op on the GPU and on the CPU, with its gradients. Without a device there is nothing to compare.

use ferrospeed_tensor::random::{self, RandomKey, RandomState};
use ferrospeed_tensor::{DType, Device, Result, Tensor, autograd};

pub(crate) const TYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// The device, or `None` with a word about it.
pub(crate) fn device() -> Option<Device> {
    if ferrospeed_cuda::device_count() == 0 {
        ferrospeed_testkit::skip::skip("no CUDA device");
        return None;
    }
    Some(ferrospeed_cuda::device(0, &ferrospeed_cpu::device()).expect("a device is there"))
}

pub(crate) fn normal(shape: &[usize], stream: u32) -> Vec<f32> {
    let mut values = vec![0.0f32; shape.iter().product()];
    RandomKey::new(5, stream).fill_normal(0, &mut values);
    values
}

/// Inputs that remember their gradients.
pub(crate) struct Inputs<'a> {
    pub(crate) device: &'a Device,
    pub(crate) dtype: DType,
    pub(crate) tracked: Vec<Tensor>,
}

impl Inputs<'_> {
    pub(crate) fn input(&mut self, shape: &[usize]) -> Tensor {
        self.input_by(shape, |value| value)
    }

    pub(crate) fn input_by(&mut self, shape: &[usize], map: impl Fn(f32) -> f32) -> Tensor {
        let values: Vec<f32> = normal(shape, self.tracked.len() as u32 + 1).into_iter().map(map).collect();
        let tensor = Tensor::from_f32(&values, shape, self.dtype, self.device).unwrap().tracked();
        self.tracked.push(tensor.clone());
        tensor
    }

    pub(crate) fn constant<T: ferrospeed_tensor::dtype::Element>(
        &self,
        values: &[T],
        shape: &[usize],
    ) -> Tensor {
        Tensor::from_slice(values, shape, self.device).unwrap()
    }
}

pub(crate) type Op<'a> = &'a dyn Fn(&mut Inputs<'_>) -> Result<Vec<Tensor>>;

/// Results and the gradients of all inputs, from one fixed gradient of the results.
pub(crate) fn run(op: Op<'_>, dtype: DType, device: &Device) -> Vec<Vec<f32>> {
    random::set_state(RandomState { seed: 3, step: 1, next_stream: 0 });
    let mut inputs = Inputs { device, dtype, tracked: Vec::new() };
    let outputs = op(&mut inputs).unwrap();
    let seeds: Vec<(Tensor, Tensor)> = outputs
        .iter()
        .filter(|output| output.requires_grad())
        .enumerate()
        .map(|(index, output)| {
            let values = normal(output.sizes(), 100 + index as u32);
            let seed = Tensor::from_f32(&values, *output.shape(), output.dtype(), device).unwrap();
            (output.clone(), seed)
        })
        .collect();
    if !seeds.is_empty() {
        autograd::backward_with(&seeds).unwrap();
    }
    let gradients = inputs.tracked.iter().filter_map(Tensor::grad);
    let floats = |tensor: Tensor| match tensor.dtype() {
        dtype if dtype.is_float() => tensor.to_vec_f32().unwrap(),
        DType::I64 => tensor.to_vec::<i64>().unwrap().into_iter().map(|value| value as f32).collect(),
        _ => tensor.to_vec::<u8>().unwrap().into_iter().map(f32::from).collect(),
    };
    outputs.iter().map(Tensor::detach).chain(gradients).map(floats).collect()
}

/// How far apart results may be, relative to the largest: a few roundings of the type.
pub(crate) fn tolerance(dtype: DType) -> f32 {
    match dtype {
        DType::F32 => 1e-5,
        DType::BF16 => 2e-2,
        _ => 3e-3,
    }
}

pub(crate) fn compare_in(types: &[DType], what: &str, op: Op<'_>) {
    let Some(gpu) = device() else { return };
    let cpu = ferrospeed_cpu::device();
    for &dtype in types {
        let (ours, truth) = (run(op, dtype, &gpu), run(op, dtype, &cpu));
        assert_eq!(ours.len(), truth.len(), "{what} {dtype}: number of results and gradients");
        for (index, (ours, truth)) in ours.iter().zip(&truth).enumerate() {
            assert_eq!(ours.len(), truth.len(), "{what} {dtype} result {index}");
            let scale = truth.iter().filter(|v| v.is_finite()).fold(0.1f32, |most, v| most.max(v.abs()));
            for (i, (a, b)) in ours.iter().zip(truth).enumerate() {
                let close = (a - b).abs() <= tolerance(dtype) * scale || a == b || (a.is_nan() && b.is_nan());
                assert!(
                    close,
                    "{what} {dtype}: result {index}, element {i} is {a} on the GPU and {b} on the CPU"
                );
            }
        }
        // The same bits again.
        assert!(bits(&ours) == bits(&run(op, dtype, &gpu)), "{what} {dtype}: a second run gave other bits");
    }
}

pub(crate) fn bits(results: &[Vec<f32>]) -> Vec<Vec<u32>> {
    results.iter().map(|values| values.iter().map(|value| value.to_bits()).collect()).collect()
}

pub(crate) fn compare(what: &str, op: Op<'_>) {
    compare_in(&TYPES, what, op);
}
