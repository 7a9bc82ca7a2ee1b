//! Small integers on a GPU: the bits that the host gives them, from and to any byte. Where there is no GPU the tests are skipped.

use ferrospeed_tensor::backend::{RunForm, Runs};
use ferrospeed_tensor::dtype::{Element, Float};
use ferrospeed_tensor::quantize::{Bits, Format, Quantized};
use ferrospeed_tensor::random::RandomKey;
use ferrospeed_tensor::{Category, DType, Device, Out, Tensor};
use ferrospeed_testkit::skip::skip;
use half::{bf16, f16};

const GROUPS: [(Bits, usize); 3] = [(Bits::Eight, 2048), (Bits::Four, 512), (Bits::Eight, 256)];

fn gpu() -> Option<Device> {
    if ferrospeed_cuda::device_count() == 0 {
        skip("no CUDA device");
        return None;
    }
    Some(ferrospeed_cuda::device(0, &ferrospeed_cpu::device()).unwrap())
}

/// A run as the host packs it.
fn packed<T: Float>(bits: Bits, group: usize, values: &[T]) -> Vec<u8> {
    let format = Format { bits, symmetric: true };
    let mut integers = vec![0; format.packed_len(values.len())];
    let mut steps = vec![0.0; format.params_len(values.len(), group)];
    format.quantize_turned(values, group, &mut integers, &mut steps);
    steps.iter().flat_map(|step| step.to_le_bytes()).chain(integers).collect()
}

fn values<T: Float>(numel: usize, stream: u32) -> Vec<T> {
    let mut drawn = vec![0.0f32; numel];
    RandomKey::new(5, stream).fill_normal(0, &mut drawn);
    // Groups of zeros, of tiny and of large values are groups too.
    for (at, value) in drawn.iter_mut().enumerate() {
        *value *= [1.0, 0.0, 1e-30, 1e3][at / 700 % 4];
    }
    drawn.into_iter().map(T::narrow).collect()
}

fn runs_are_the_hosts<T: Float + Element>(device: &Device) {
    for (bits, group) in GROUPS {
        let form = RunForm::Turned { bits, group };
        // Runs of every length, behind a byte or none, from values at any place.
        for (numel, first, start) in
            [(1, 0, 0), (7, 1, 3), (group, 0, 1), (group + 9, 3, 2), (5 * group + 301, 5, 1), (40_000, 8, 4)]
        {
            let given: Vec<T> = values(first + numel, 1);
            let expected = packed(bits, group, &given[first..]);
            let there = Tensor::from_slice(&given, [given.len()], device).unwrap();
            let out =
                Tensor::zeros_in([start + expected.len() + 3], DType::U8, device, Category::Buffers).unwrap();
            let own = there.slice(first, [numel]).unwrap();
            let done = device.backend().pack_run(form, &own, Out::of_device(&out).unwrap(), start).unwrap();
            assert!(done, "{form:?}");
            let found = out.to_vec::<u8>().unwrap();
            assert!(
                found[start..start + expected.len()] == expected,
                "{form:?}, {numel} values from {first}"
            );
            let around = [&found[..start], &found[start + expected.len()..]].concat();
            assert!(around.iter().all(|byte| *byte == 0), "{form:?}: nothing else is written");
        }
    }
}

#[test]
fn a_gpus_runs_are_the_hosts_byte_for_byte() {
    let Some(device) = gpu() else { return };
    runs_are_the_hosts::<f32>(&device);
    runs_are_the_hosts::<bf16>(&device);
    runs_are_the_hosts::<f16>(&device);
}

fn sums_are_the_hosts<T: Float + Element>(device: &Device) {
    for (bits, group) in GROUPS {
        let (form, format) = (RunForm::Turned { bits, group }, Format { bits, symmetric: true });
        for (numel, first) in [(1, 0), (group + 9, 3), (5 * group + 301, 1), (40_000, 4)] {
            let runs: Vec<Vec<u8>> =
                (0..3).map(|stream| packed(bits, group, &values::<T>(numel, stream))).collect();
            let steps = format.params_len(numel, group) * 4;
            let numbers = |run: &Vec<u8>| -> Vec<f32> {
                run[..steps].chunks(4).map(|word| f32::from_le_bytes(word.try_into().unwrap())).collect()
            };
            let params: Vec<Vec<f32>> = runs.iter().map(numbers).collect();
            let sources: Vec<Quantized<'_>> = runs
                .iter()
                .zip(&params)
                .map(|(run, params)| Quantized { packed: &run[steps..], params })
                .collect();
            let mut expected: Vec<T> = vec![T::narrow(0.0); numel];
            format.dequantize_exact_sum(&sources, group, 0.25, &mut expected);
            let stride = runs[0].len() + 1;
            let mut bytes = vec![0u8; first];
            runs.iter().for_each(|run| bytes.extend(run.iter().chain(&[9])));
            let bytes = Tensor::from_slice(&bytes, [bytes.len()], device).unwrap();
            let out = Tensor::zeros_in([numel], T::DTYPE, device, Category::Buffers).unwrap();
            let runs = Runs { bytes: &bytes, first, stride, count: 3 };
            let done = device.backend().unpack_sum(form, runs, 0.25, Out::of_device(&out).unwrap()).unwrap();
            assert!(done, "{form:?}");
            let widened: Vec<f32> = expected.iter().map(|value| value.widen()).collect();
            assert!(out.to_vec_f32().unwrap() == widened, "{form:?}, {numel} values");
        }
    }
}

#[test]
fn a_gpus_sums_of_runs_are_the_hosts_to_the_bit() {
    let Some(device) = gpu() else { return };
    sums_are_the_hosts::<f32>(&device);
    sums_are_the_hosts::<bf16>(&device);
    sums_are_the_hosts::<f16>(&device);
}

#[test]
fn exact_runs_are_f32_and_what_is_no_number_reaches_the_sum() {
    let Some(device) = gpu() else { return };
    let given: Vec<bf16> = values(1001, 3);
    let there = Tensor::from_slice(&given, [1001], &device).unwrap();
    let out = Tensor::zeros_in([1 + 4 * 1001], DType::U8, &device, Category::Buffers).unwrap();
    let backend = device.backend();
    assert!(backend.pack_run(RunForm::Exact, &there, Out::of_device(&out).unwrap(), 1).unwrap());
    let expected: Vec<u8> = given.iter().flat_map(|value| value.to_f32().to_le_bytes()).collect();
    assert!(out.to_vec::<u8>().unwrap()[1..] == expected);
    let back = Tensor::zeros_in([1001], DType::F32, &device, Category::Buffers).unwrap();
    let runs = Runs { bytes: &out, first: 1, stride: 0, count: 2 };
    assert!(backend.unpack_sum(RunForm::Exact, runs, 0.5, Out::of_device(&back).unwrap()).unwrap());
    assert!(back.to_vec_f32().unwrap().iter().zip(&given).all(|(found, value)| *found == value.to_f32()));

    let mut bad = vec![1.0f32; 600];
    bad[3] = f32::INFINITY;
    let form = RunForm::Turned { bits: Bits::Four, group: 512 };
    let bad = Tensor::from_slice(&bad, [600], &device).unwrap();
    let out = Tensor::zeros_in([8 + 300], DType::U8, &device, Category::Buffers).unwrap();
    assert!(backend.pack_run(form, &bad, Out::of_device(&out).unwrap(), 0).unwrap());
    let back = Tensor::zeros_in([600], DType::F32, &device, Category::Buffers).unwrap();
    let runs = Runs { bytes: &out, first: 0, stride: 0, count: 1 };
    assert!(backend.unpack_sum(form, runs, 1.0, Out::of_device(&back).unwrap()).unwrap());
    let found = back.to_vec_f32().unwrap();
    assert!(
        found[..512].iter().all(|value| value.is_nan()) && found[512..].iter().all(|value| *value == 1.0)
    );
}
