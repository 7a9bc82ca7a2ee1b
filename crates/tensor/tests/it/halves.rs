//! A backward in two halves: weights' gradients come in the second, with the bits of a pass in one piece.

use std::collections::BTreeMap;
use std::sync::Arc;

use ferrospeed_tensor::ops::{self, CrossEntropyOptions, GroupWeights, WeightLayout};
use ferrospeed_tensor::random::RandomKey;
use ferrospeed_tensor::store::{FromInitializers, PlainStore};
use ferrospeed_tensor::{Activation, DType, Device, Initializer, Operand, Param, Result, Tensor, autograd};

const STD: Initializer = Initializer::Normal { mean: 0.0, std: 0.4 };
const WIDTH: usize = 8;
const CLASSES: usize = 9;

/// Weights of every kind of product, some of them used several times.
struct Model {
    params: BTreeMap<&'static str, Param>,
    store: Arc<PlainStore>,
    device: Device,
}

impl Model {
    fn new(dtype: DType) -> Model {
        let device = ferrospeed_cpu::with_threads(2);
        let square = [WIDTH, WIDTH];
        let mut params = BTreeMap::new();
        for name in
            ["shared", "q", "k", "v", "up", "down", "gate", "gated_up", "gated_down", "expert0", "expert1"]
        {
            params.insert(name, Param::new(name, square, STD));
        }
        for name in ["shared_bias", "up_bias", "down_bias", "norm"] {
            params.insert(name, Param::new(name, [WIDTH], STD));
        }
        params.insert("table", Param::new("table", [CLASSES, WIDTH], STD));
        let all: Vec<Param> = params.values().cloned().collect();
        let store = PlainStore::attach(&all, dtype, &device, &FromInitializers { seed: 4 }).unwrap();
        Model { params, store, device }
    }

    fn operand(&self, name: &str) -> Operand {
        Operand::from(&self.params[name])
    }

    fn loss(&self, stream: &Tensor, in_segments: bool) -> Result<Tensor> {
        let layout = WeightLayout::OutIn;
        let ids = Tensor::from_slice(&[0i64, 3, 3, 8, 1, 0], [6], &self.device)?;
        let x = ops::add(&ops::embedding(self.operand("table"), &ids)?, stream)?;
        let x = ops::rms_norm(&x, Some(self.operand("norm")), 1e-5)?;
        let (weight, bias) = (self.operand("shared"), self.operand("shared_bias"));
        // The same weight twice inside of what may be a segment, and once behind it.
        let twice = move |x: &[Tensor]| {
            let y = ops::linear(&x[0], weight.clone(), Some(bias.clone()), layout)?;
            Ok(vec![ops::linear_activation(
                &y,
                weight.clone(),
                Some(bias.clone()),
                layout,
                Some(Activation::Tanh),
            )?])
        };
        let y = if in_segments { autograd::checkpoint(&[x], twice)? } else { twice(&[x])? }.swap_remove(0);
        let y = ops::linear(&y, self.operand("shared"), None, layout)?;
        let [q, k, v] = ops::linears(&y, ["q", "k", "v"].map(|name| (self.operand(name), None)), layout)?;
        let y = ops::add(&ops::mul(&q, &k)?, &v)?;
        let with_bias = |name: &str, bias: &str| (self.operand(name), Some(self.operand(bias)));
        let y = ops::mlp(
            &y,
            with_bias("up", "up_bias"),
            with_bias("down", "down_bias"),
            layout,
            Activation::GeluTanh,
        )?;
        let gated = ["gate", "gated_up", "gated_down"].map(|name| (self.operand(name), None));
        let y = ops::gated_mlp(&y, gated, layout, Activation::Silu)?;
        let counts = Tensor::from_slice(&[4i64, 2], [2], &self.device)?;
        let experts = GroupWeights::Each(vec![self.operand("expert0"), self.operand("expert1")]);
        let y = ops::grouped_linear(&y, &counts, &experts, None, layout)?;
        let logits = ops::linear(&y, self.operand("table"), None, layout)?;
        ops::cross_entropy(&logits, &ids, CrossEntropyOptions::default())
    }

    fn stream(&self, dtype: DType) -> Tensor {
        let mut values = vec![0.0; 6 * WIDTH];
        RandomKey::new(3, 1).fill_normal(0, &mut values);
        Tensor::from_f32(&values, [6, WIDTH], dtype, &self.device).unwrap().tracked()
    }

    fn gradients(&self) -> BTreeMap<&'static str, Vec<f32>> {
        let taken = self.store.take_gradients();
        let values = |gradient: Tensor| gradient.to_vec_f32().unwrap();
        let all = self.params.keys().zip(taken);
        all.filter_map(|(name, gradient)| Some((*name, values(gradient?)))).collect()
    }
}

fn one(loss: &Tensor) -> Tensor {
    Tensor::full(*loss.shape(), 1.0, loss.dtype(), loss.device()).unwrap()
}

#[test]
fn both_halves_give_the_bits_of_one_pass() {
    for dtype in [DType::F32, DType::BF16] {
        for in_segments in [false, true] {
            let model = Model::new(dtype);
            let stream = model.stream(dtype);
            let loss = model.loss(&stream, in_segments).unwrap();
            autograd::backward(&loss).unwrap();
            let (input, expected) = (stream.grad().unwrap().to_vec_f32().unwrap(), model.gradients());
            assert_eq!(expected.len(), model.params.len());

            let stream = model.stream(dtype);
            let loss = model.loss(&stream, in_segments).unwrap();
            let left = autograd::backward_inputs(&[(loss.clone(), one(&loss))]).unwrap();
            assert!(!left.is_empty());
            let case = format!("{dtype}, in segments: {in_segments}");
            assert_eq!(stream.grad().unwrap().to_vec_f32().unwrap(), input, "{case}");
            let first = model.gradients();
            assert_eq!(first.keys().collect::<Vec<_>>(), [&"norm", &"up_bias"], "{case}: the rest is left");
            left.finish().unwrap();
            let mut all = model.gradients();
            all.extend(first);
            for (name, gradient) in expected {
                assert_eq!(all[name], gradient, "{case}: {name}");
            }
        }
    }
}

#[test]
fn a_weight_that_is_computed_from_others_gets_its_gradient_at_once() {
    let model = Model::new(DType::F32);
    let stream = model.stream(DType::F32);
    let weight = ops::add(&model.params["shared"], &model.params["q"]).unwrap();
    let loss = ops::sum(ops::linear(&stream, &weight, None, WeightLayout::OutIn).unwrap()).unwrap();
    let left = autograd::backward_inputs(&[(loss.clone(), one(&loss))]).unwrap();
    assert!(left.is_empty());
    left.finish().unwrap();
    assert_eq!(model.gradients().keys().collect::<Vec<_>>(), [&"q", &"shared"]);
}

#[test]
fn two_passes_may_wait_at_the_same_time() {
    let model = Model::new(DType::F32);
    let pass = |factor: f32| {
        let loss = ops::affine(model.loss(&model.stream(DType::F32), false).unwrap(), factor, 0.0).unwrap();
        autograd::backward_inputs(&[(loss.clone(), one(&loss))]).unwrap()
    };
    let alone = |factor| {
        pass(factor).finish().unwrap();
        model.gradients()
    };
    let (first, second) = (alone(1.0), alone(2.0));
    let waiting = [pass(1.0), pass(2.0)];
    model.store.take_gradients();
    let found = waiting.map(|left| {
        left.finish().unwrap();
        model.gradients()
    });
    for (found, expected) in found.iter().zip([&first, &second]) {
        assert_eq!(found["shared"], expected["shared"]);
        assert_eq!(found["table"], expected["table"]);
    }
    assert_ne!(first["table"], second["table"]);
}
