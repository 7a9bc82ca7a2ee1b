//! The gated perceptrons of all groups as one node: what separate layers give, without what these keep.

use super::devices::devices;
use ferrospeed_tensor::ops::{self, GroupWeights, GroupedLayer, Routes, WeightLayout};
use ferrospeed_tensor::random::RandomKey;
use ferrospeed_tensor::{Activation, Category, DType, Device, Operand, Result, Tensor, autograd};

const TOKENS: usize = 64;
const CHOSEN: usize = 2;
const WIDTH: usize = 32;
const INNER: usize = 48;
const GROUPS: usize = 4;

fn normal(shape: &[usize], stream: u32, dtype: DType, device: &Device) -> Tensor {
    let mut values = vec![0.0f32; shape.iter().product()];
    RandomKey::new(5, stream).fill_normal(0, &mut values);
    values.iter_mut().for_each(|value| *value *= 0.5);
    Tensor::from_f32(&values, shape, dtype, device).unwrap()
}

/// The weights of gate, up and down, and their biases.
struct Layers {
    weights: [Vec<Tensor>; 3],
    biases: Option<[Vec<Tensor>; 3]>,
    layout: WeightLayout,
}

impl Layers {
    fn new(layout: WeightLayout, has_biases: bool, dtype: DType, device: &Device) -> Layers {
        let sizes = [(INNER, WIDTH), (INNER, WIDTH), (WIDTH, INNER)];
        let of = |shape: &[usize], first: u32| -> Vec<Tensor> {
            (0..GROUPS as u32).map(|group| normal(shape, first + group, dtype, device).tracked()).collect()
        };
        let weight = |index: usize| {
            let (outputs, inputs) = sizes[index];
            let shape = if layout == WeightLayout::OutIn { [outputs, inputs] } else { [inputs, outputs] };
            of(&shape, 10 * (1 + index as u32))
        };
        let bias = |index: usize| of(&[sizes[index].0], 100 * (1 + index as u32));
        Layers { weights: [0, 1, 2].map(weight), biases: has_biases.then(|| [0, 1, 2].map(bias)), layout }
    }

    fn grouped(&self) -> [(GroupWeights, Option<GroupWeights>); 3] {
        let each = |tensors: &[Tensor]| GroupWeights::Each(tensors.iter().map(Operand::from).collect());
        let biases = |index: usize| self.biases.as_ref().map(|biases| each(&biases[index]));
        [0, 1, 2].map(|index| (each(&self.weights[index]), biases(index)))
    }

    fn leaves(&self) -> impl Iterator<Item = &Tensor> {
        self.weights.iter().chain(self.biases.iter().flatten()).flatten()
    }

    /// One node, or a product, a product, what is gated and a product, of rows that are kept.
    fn forward(&self, rows: &Tensor, counts: &Tensor, apart: bool) -> Tensor {
        let layers = self.grouped();
        let layout = self.layout;
        if apart {
            let rows = ops::reshape(rows, *rows.shape()).unwrap();
            let product = |x: &Tensor, index: usize| {
                let (weights, biases) = &layers[index];
                ops::grouped_linear(x, counts, weights, biases.as_ref(), layout).unwrap()
            };
            let (gate, up) = (product(&rows, 0), product(&rows, 1));
            return product(&ops::gated(Activation::Silu, &gate, &up).unwrap(), 2);
        }
        let layers = layers.each_ref().map(|(weights, biases)| GroupedLayer {
            weights,
            biases: biases.as_ref(),
            layout,
        });
        ops::grouped_gated_mlp(rows, counts, layers, Activation::Silu).unwrap()
    }
}

/// The result and all gradients, and the bytes of activations held between forward and backward.
fn run_by(
    dtype: DType,
    device: &Device,
    layers: &Layers,
    forward: impl Fn(&Tensor, &Tensor, &Routes) -> Result<Tensor>,
) -> (Vec<Vec<f32>>, usize) {
    // Group 2 has no rows, and some choices go nowhere.
    let choices: Vec<i64> = (0..TOKENS * CHOSEN).map(|slot| [0, 3, 3, 1, 4, 0, 3][slot % 7]).collect();
    let choices = Tensor::from_slice(&choices, [TOKENS, CHOSEN], device).unwrap();
    let routes = Routes::new(&choices, GROUPS).unwrap();
    let x = normal(&[TOKENS, WIDTH], 1, dtype, device).tracked();
    let gates = normal(&[TOKENS, CHOSEN], 2, DType::F32, device).tracked();
    let before = device.memory_usage().current(Category::Activations);
    let y = forward(&x, &gates, &routes).unwrap();
    let held = device.memory_usage().current(Category::Activations) - before;
    let seed = normal(&[TOKENS, WIDTH], 3, dtype, device);
    autograd::backward_with(&[(y.clone(), seed)]).unwrap();
    let gradients = [&x, &gates].into_iter().chain(layers.leaves()).map(|leaf| leaf.grad().unwrap());
    let all = std::iter::once(y.detach()).chain(gradients);
    (all.map(|tensor| tensor.to_vec_f32().unwrap()).collect(), held)
}

fn run(layers: &Layers, apart: bool, dtype: DType, device: &Device) -> (Vec<Vec<f32>>, usize) {
    run_by(dtype, device, layers, |x, gates, routes| {
        routes.collect(layers.forward(&routes.spread(x)?, routes.counts(), apart), gates)
    })
}

#[test]
fn one_node_gives_the_bits_of_separate_layers_and_keeps_neither_product_nor_sorted_rows() {
    for device in devices() {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            for (layout, has_biases) in [
                (WeightLayout::OutIn, false),
                (WeightLayout::OutIn, true),
                (WeightLayout::InOut, false),
                (WeightLayout::InOut, true),
            ] {
                let made =
                    |apart| run(&Layers::new(layout, has_biases, dtype, &device), apart, dtype, &device);
                let ((separate, separate_bytes), (one, one_bytes)) = (made(true), made(false));
                let what = format!("{dtype} {layout:?} biases {has_biases} on {}", device.backend().name());
                assert!(separate == one, "{what}");
                assert!(one[0].iter().any(|value| *value != 0.0), "{what}");
                let row_bytes = TOKENS * CHOSEN * dtype.size_bytes();
                assert_eq!(separate_bytes - one_bytes, row_bytes * (INNER + WIDTH), "{what}");
            }
        }
    }
}

/// As [`run`], with the way to the groups and back in the same node.
fn run_routed(layers: &Layers, dtype: DType, device: &Device) -> (Vec<Vec<f32>>, usize) {
    run_by(dtype, device, layers, |x, gates, routes| {
        let grouped = layers.grouped();
        let layers = grouped.each_ref().map(|(weights, biases)| GroupedLayer {
            weights,
            biases: biases.as_ref(),
            layout: layers.layout,
        });
        ops::routed_gated_mlp(x, gates, routes, layers, Activation::Silu)
    })
}

#[test]
fn the_way_to_groups_and_back_gives_the_same_and_keeps_no_results() {
    for device in devices() {
        for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::BF16, 2e-2), (DType::F16, 3e-3)] {
            for layout in [WeightLayout::OutIn, WeightLayout::InOut] {
                let layers = || Layers::new(layout, false, dtype, &device);
                let (apart, apart_bytes) = run(&layers(), false, dtype, &device);
                let (routed, routed_bytes) = run_routed(&layers(), dtype, &device);
                let what = format!("{dtype} {layout:?} on {}", device.backend().name());
                assert!(apart[0] == routed[0], "{what}: forward has other bits");
                for (index, (ours, truth)) in routed.iter().zip(&apart).enumerate() {
                    let size = truth.iter().fold(1e-3f32, |size, value| size.max(value.abs()));
                    for (a, b) in ours.iter().zip(truth) {
                        assert!((a - b).abs() <= tolerance * size, "{what}, result {index}: {a}, not {b}");
                    }
                }
                let again = run_routed(&layers(), dtype, &device).0;
                assert!(routed == again, "{what}: a second run gave other bits");
                assert_eq!(
                    apart_bytes - routed_bytes,
                    TOKENS * CHOSEN * WIDTH * dtype.size_bytes(),
                    "{what}"
                );
            }
        }
    }
}

#[test]
fn a_choice_of_weight_zero_has_the_gradient_of_its_weight() {
    for device in devices() {
        let layers = Layers::new(WeightLayout::OutIn, false, DType::F32, &device);
        let gradient = |apart: bool| {
            let x = normal(&[2, WIDTH], 1, DType::F32, &device);
            let choices = Tensor::from_slice(&[0i64, 1, 1, 3], [2, 2], &device).unwrap();
            let routes = Routes::new(&choices, GROUPS).unwrap();
            let gates = Tensor::from_slice(&[0.0f32, 1.0, 1.0, 0.0], [2, 2], &device).unwrap().tracked();
            let y = if apart {
                let rows = layers.forward(&routes.spread(&x).unwrap(), routes.counts(), true);
                routes.collect(&rows, &gates).unwrap()
            } else {
                let grouped = layers.grouped();
                let of = grouped.each_ref().map(|(weights, _)| GroupedLayer {
                    weights,
                    biases: None,
                    layout: WeightLayout::OutIn,
                });
                ops::routed_gated_mlp(&x, &gates, &routes, of, Activation::Silu).unwrap()
            };
            autograd::backward(&ops::sum(&y).unwrap()).unwrap();
            gates.grad().unwrap().to_vec_f32().unwrap()
        };
        let (apart, routed) = (gradient(true), gradient(false));
        assert!(apart.iter().all(|value| *value != 0.0), "{apart:?}");
        for (a, b) in routed.iter().zip(&apart) {
            assert!((a - b).abs() <= 1e-5 * b.abs().max(1.0), "{routed:?}, not {apart:?}");
        }
    }
}

#[test]
fn backward_can_run_twice() {
    let device = ferrospeed_cpu::with_threads(1);
    let layers = Layers::new(WeightLayout::OutIn, false, DType::F32, &device);
    let x = normal(&[5, WIDTH], 1, DType::F32, &device).tracked();
    let counts = Tensor::from_slice(&[2i64, 0, 3, 0], [GROUPS], &device).unwrap();
    let loss = ops::sum(layers.forward(&x, &counts, false)).unwrap();
    let roots = [(loss, Tensor::scalar(1.0, &device).unwrap())];
    autograd::backward_retaining(&roots).unwrap();
    let once = x.grad().unwrap().to_vec_f32().unwrap();
    autograd::backward_with(&roots).unwrap();
    let twice: Vec<f32> = once.iter().map(|value| 2.0 * value).collect();
    assert_eq!(x.grad().unwrap().to_vec_f32().unwrap(), twice);
}

#[test]
fn layers_that_do_not_fit_are_refused() {
    let device = ferrospeed_cpu::with_threads(1);
    let zeros = |shape: &[usize]| {
        GroupWeights::Stacked(Operand::from(Tensor::zeros(shape, DType::F32, &device).unwrap()))
    };
    let counts = Tensor::from_slice(&[2i64, 3], [2], &device).unwrap();
    let x = Tensor::zeros([5, 4], DType::F32, &device).unwrap();
    let try_with = |shapes: [[usize; 3]; 3]| {
        let weights = shapes.map(|shape| zeros(&shape));
        let layers = weights.each_ref().map(|weights| GroupedLayer {
            weights,
            biases: None,
            layout: WeightLayout::OutIn,
        });
        ops::grouped_gated_mlp(&x, &counts, layers, Activation::Silu).map(|_| ())
    };
    assert!(try_with([[2, 6, 4], [2, 6, 4], [2, 4, 6]]).is_ok());
    let weights = [[2, 6, 4], [2, 6, 4], [2, 4, 6]].map(|shape: [usize; 3]| zeros(&shape));
    let (biases, layout) = (zeros(&[2, 4]), WeightLayout::OutIn);
    let mut layers = weights.each_ref().map(|weights| GroupedLayer { weights, biases: None, layout });
    layers[2].biases = Some(&biases);
    let choices = Tensor::from_slice(&[0i64, 1], [2, 1], &device).unwrap();
    let routes = Routes::new(&choices, 2).unwrap();
    let tokens = Tensor::zeros([2, 4], DType::F32, &device).unwrap();
    let gates = ops::cast(&choices, DType::F32).unwrap();
    let refused = ops::routed_gated_mlp(&tokens, &gates, &routes, layers, Activation::Silu).unwrap_err();
    assert!(refused.to_string().contains("has a bias"), "{refused}");
    for shapes in [
        [[2, 6, 4], [2, 7, 4], [2, 4, 6]],
        [[2, 6, 4], [2, 6, 4], [2, 4, 7]],
        [[2, 6, 3], [2, 6, 4], [2, 4, 6]],
        [[2, 6, 4], [3, 6, 4], [2, 4, 6]],
    ] {
        assert!(try_with(shapes).is_err(), "{shapes:?}");
    }
}
