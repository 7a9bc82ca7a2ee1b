//! Rows by group against plain f64 arithmetic, value and gradient, and what groups without rows get.

use super::reference::Array;
use super::reference::check::{check, random};
use ferrospeed_tensor::ops::{self, GroupWeights, Routes, WeightLayout};
use ferrospeed_tensor::random::RandomKey;
use ferrospeed_tensor::store::{FromInitializers, PlainStore};
use ferrospeed_tensor::{DType, Device, Initializer, Operand, Param, Tensor, autograd};

const LAYOUTS: [WeightLayout; 2] = [WeightLayout::OutIn, WeightLayout::InOut];

fn device() -> Device {
    ferrospeed_cpu::with_threads(2)
}

fn numbers(values: &[i64]) -> Tensor {
    Tensor::from_slice(values, [values.len()], &device()).unwrap()
}

/// `x·W + b` of each group's rows; zero rows behind the last.
fn product(x: &Array, counts: &[i64], weights: &[Array], biases: &[Array], layout: WeightLayout) -> Array {
    let (rows, inputs) = (x.shape[0], x.shape[1]);
    let outputs = weights[0].data.len() / inputs;
    let mut y = vec![0.0; rows * outputs];
    let group_of = counts.iter().enumerate().flat_map(|(group, &count)| vec![group; count as usize]);
    for (row, group) in group_of.enumerate() {
        for out in 0..outputs {
            let weight = |i: usize| match layout {
                WeightLayout::OutIn => weights[group].data[out * inputs + i],
                WeightLayout::InOut => weights[group].data[i * outputs + out],
            };
            let sum: f64 = (0..inputs).map(|i| x.data[row * inputs + i] * weight(i)).sum();
            y[row * outputs + out] = sum + biases.get(group).map_or(0.0, |bias| bias.data[out]);
        }
    }
    Array::new(&[rows, outputs], y)
}

#[test]
fn products_of_each_groups_rows_with_its_own_weight() {
    let sizes: [(&[i64], usize, usize, usize); 5] = [
        (&[2, 3, 1], 6, 4, 5),
        (&[0, 4, 0, 1], 7, 3, 2),
        (&[0, 0], 3, 2, 2),
        (&[1], 1, 1, 1),
        (&[17, 0, 33], 50, 9, 6),
    ];
    for (counts, rows, inputs, outputs) in sizes {
        let groups = counts.len();
        for (layout, has_bias) in LAYOUTS.into_iter().flat_map(|layout| [(layout, true), (layout, false)]) {
            let shape = if layout == WeightLayout::OutIn { [outputs, inputs] } else { [inputs, outputs] };
            let mut inputs_of = vec![random(&[rows, inputs], 1)];
            inputs_of.extend((0..groups).map(|group| random(&shape, 2 + group as u32)));
            if has_bias {
                inputs_of.extend((0..groups).map(|group| random(&[outputs], 20 + group as u32)));
            }
            let each = |tensors: &[Tensor]| GroupWeights::Each(tensors.iter().map(Operand::from).collect());
            check(
                &format!(
                    "grouped_linear {counts:?} of {rows}, {inputs} to {outputs}, {layout:?}, bias {has_bias}"
                ),
                &inputs_of,
                |x| {
                    let biases = has_bias.then(|| each(&x[1 + groups..]));
                    let weights = each(&x[1..=groups]);
                    ops::grouped_linear(&x[0], &numbers(counts), &weights, biases.as_ref(), layout)
                },
                |x| product(&x[0], counts, &x[1..=groups], &x[1 + groups..], layout),
            );
        }
    }
}

#[test]
fn one_stacked_weight_is_the_same_as_one_for_each() {
    let (counts, rows, inputs, outputs) = ([3i64, 0, 2], 6, 4, 3);
    for layout in LAYOUTS {
        let shape = if layout == WeightLayout::OutIn { [3, outputs, inputs] } else { [3, inputs, outputs] };
        let parts = |all: &Array, size: usize| -> Vec<Array> {
            all.data.chunks(size).map(|part| Array::new(&[size], part.to_vec())).collect()
        };
        check(
            &format!("stacked {layout:?}"),
            &[random(&[rows, inputs], 1), random(&shape, 2), random(&[3, outputs], 3)],
            |x| {
                let [weights, biases] = [1, 2].map(|i| GroupWeights::Stacked(Operand::from(&x[i])));
                ops::grouped_linear(&x[0], &numbers(&counts), &weights, Some(&biases), layout)
            },
            |x| {
                let (weights, biases) = (parts(&x[1], inputs * outputs), parts(&x[2], outputs));
                product(&x[0], &counts, &weights, &biases, layout)
            },
        );
    }
}

#[test]
fn rows_go_to_their_groups_and_come_back_weighted() {
    // The last number of each is "nowhere" for so many groups.
    let choices: [(&[i64], usize, usize); 4] = [
        (&[2, 0, 0, 1, 0, 2, 1, 3], 2, 3),
        (&[1, 1, 1], 1, 2),
        (&[2, 2, 2, 2], 2, 2),
        (&[0, 1, 2, 2, 1, 0], 3, 3),
    ];
    for (choices, chosen, groups) in choices {
        let (tokens, width) = (choices.len() / chosen, 5);
        let ids = numbers(choices).view([tokens, chosen]).unwrap();
        let routes = Routes::new(&ids, groups).unwrap();
        let slots: Vec<usize> = (0..groups as i64)
            .flat_map(|group| (0..choices.len()).filter(move |&slot| choices[slot] == group))
            .collect();
        check(
            &format!("spread {choices:?}"),
            &[random(&[tokens, width], 1)],
            |x| routes.spread(&x[0]),
            |x| {
                let mut rows = vec![0.0; choices.len() * width];
                for (row, slot) in slots.iter().enumerate() {
                    let token = &x[0].data[slot / chosen * width..][..width];
                    rows[row * width..][..width].copy_from_slice(token);
                }
                Array::new(&[choices.len(), width], rows)
            },
        );
        check(
            &format!("collect {choices:?}"),
            &[random(&[choices.len(), width], 1), random(&[tokens, chosen], 2)],
            |x| routes.collect(&x[0], &x[1]),
            |x| {
                let mut sums = vec![0.0; tokens * width];
                for (row, slot) in slots.iter().enumerate() {
                    for i in 0..width {
                        sums[slot / chosen * width + i] += x[1].data[*slot] * x[0].data[row * width + i];
                    }
                }
                Array::new(&[tokens, width], sums)
            },
        );
    }
}

#[test]
fn a_group_without_rows_still_pushes_a_gradient_of_zeros() {
    let params: Vec<Param> = (0..3)
        .map(|i| Param::new(format!("w{i}"), [2, 4], Initializer::Normal { mean: 0.0, std: 1.0 }))
        .collect();
    let store = PlainStore::attach(&params, DType::F32, &device(), &FromInitializers { seed: 1 }).unwrap();
    let weights = GroupWeights::Each(params.iter().map(Operand::from).collect());
    let x = Tensor::full([5, 4], 1.0, DType::F32, &device()).unwrap();
    let y = ops::grouped_linear(&x, &numbers(&[3, 0, 2]), &weights, None, WeightLayout::OutIn).unwrap();
    autograd::backward(&ops::sum(&y).unwrap()).unwrap();
    let gradient = |index| store.gradient(index).expect("every weight gets one").to_vec_f32().unwrap();
    assert_eq!([gradient(0), gradient(1), gradient(2)], [[3.0; 8], [0.0; 8], [2.0; 8]]);
}

fn normal(shape: &[usize], stream: u32, dtype: DType, device: &Device) -> Tensor {
    let mut values = vec![0.0f32; shape.iter().product()];
    RandomKey::new(5, stream).fill_normal(0, &mut values);
    Tensor::from_f32(&values, shape, dtype, device).unwrap()
}

/// The bits of result and gradients of a whole way through groups.
fn mixture(dtype: DType, device: &Device) -> Vec<Vec<f32>> {
    let choices: Vec<i64> = (0..80).map(|slot| [0, 3, 3, 1, 4, 0, 3][slot % 7]).collect();
    let choices = Tensor::from_slice(&choices, [40, 2], device).unwrap();
    let x = normal(&[40, 32], 1, dtype, device).tracked();
    let each: Vec<Tensor> = (0..4).map(|i| normal(&[48, 32], 2 + i, dtype, device).tracked()).collect();
    let gates = normal(&[40, 2], 9, DType::F32, device).tracked();
    let routes = Routes::new(&choices, 4).unwrap();
    let weights = GroupWeights::Each(each.iter().map(Operand::from).collect());
    let rows = routes.spread(&x).unwrap();
    let rows = ops::grouped_linear(&rows, routes.counts(), &weights, None, WeightLayout::OutIn).unwrap();
    let y = routes.collect(&rows, &gates).unwrap();
    let seed = normal(&[40, 48], 20, dtype, device);
    autograd::backward_with(&[(y.clone(), seed)]).unwrap();
    let gradients = [&x, &gates].into_iter().chain(&each).map(|leaf| leaf.grad().unwrap());
    std::iter::once(y.detach()).chain(gradients).map(|tensor| tensor.to_vec_f32().unwrap()).collect()
}

#[test]
fn every_type_gives_the_same_bits_with_any_number_of_threads() {
    let truth = mixture(DType::F32, &ferrospeed_cpu::with_threads(1));
    for (dtype, tolerance) in [(DType::F32, 0.0), (DType::BF16, 0.03), (DType::F16, 0.004)] {
        let one = mixture(dtype, &ferrospeed_cpu::with_threads(1));
        for threads in [2, 3] {
            assert_eq!(
                one,
                mixture(dtype, &ferrospeed_cpu::with_threads(threads)),
                "{dtype} with {threads} threads"
            );
        }
        for (index, (ours, truth)) in one.iter().zip(&truth).enumerate() {
            let scale = truth.iter().fold(0.0f32, |most, value| most.max(value.abs()));
            for (a, b) in ours.iter().zip(truth) {
                assert!((a - b).abs() <= tolerance * scale, "{dtype}, result {index}: {a} and in f32 {b}");
            }
        }
    }
}

#[test]
fn operands_that_do_not_fit_are_refused() {
    let device = device();
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &device).unwrap();
    let weights = GroupWeights::Stacked(Operand::from(zeros(&[2, 3, 4])));
    let product = |x: &Tensor, counts: &[i64]| {
        ops::grouped_linear(x, &numbers(counts), &weights, None, WeightLayout::OutIn).map(|_| ())
    };
    assert!(product(&zeros(&[5, 4]), &[2, 3]).is_ok());
    for (x, counts) in [
        (zeros(&[5, 3]), vec![2, 3]),
        (zeros(&[5, 4]), vec![2, 3, 0]),
        (zeros(&[5, 4]), vec![2, 4]),
        (zeros(&[5, 4]), vec![-1, 3]),
    ] {
        assert!(product(&x, &counts).is_err(), "{x:?} in groups of {counts:?}");
    }
    let mixed = GroupWeights::Each(vec![Operand::from(zeros(&[3, 4])), Operand::from(zeros(&[4, 4]))]);
    assert!(
        ops::grouped_linear(zeros(&[5, 4]), &numbers(&[2, 3]), &mixed, None, WeightLayout::OutIn).is_err()
    );
    let choices = numbers(&[0, 4]).view([1, 2]).unwrap();
    let error = Routes::new(&choices, 3).unwrap_err().to_string();
    assert!(error.contains('4'), "{error}");
}
