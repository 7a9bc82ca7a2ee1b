//! A small transformer written with raw ops: it must train to the same bits whatever holds its parameters, with
//! and without activation checkpointing, and on any number of threads.

use std::sync::Arc;

use ferrospeed_tensor::ops::{self, AttentionOptions, CrossEntropyOptions, PackedHeads, WeightLayout};
use ferrospeed_tensor::random::{self, RandomState};
use ferrospeed_tensor::store::{FromInitializers, PlainStore, PoisonStore};
use ferrospeed_tensor::{Activation, DType, Initializer, Operand, Out, Param, Result, Tensor, autograd};

const VOCAB: usize = 37;
const WIDTH: usize = 24;
const HEADS: usize = 3;
const TOKENS: usize = 19;

#[derive(Clone)]
struct Block {
    norm1: [Param; 2],
    qkv: [Param; 2],
    projection: [Param; 2],
    norm2: [Param; 2],
    up: [Param; 2],
    down: [Param; 2],
}

struct Model {
    table: Param,
    positions: Param,
    blocks: Vec<Block>,
    norm: [Param; 2],
    params: Vec<Param>,
}

impl Model {
    fn new() -> Model {
        let mut params = Vec::new();
        let mut make = |name: String, shape: &[usize], initializer: Initializer| {
            let param = Param::new(name, shape, initializer);
            params.push(param.clone());
            param
        };
        let normal = Initializer::Normal { mean: 0.0, std: 0.2 };
        let mut pair = |name: &str, weight: &[usize], bias: usize, initializer: Initializer| {
            [
                make(format!("{name}.weight"), weight, initializer),
                make(format!("{name}.bias"), &[bias], Initializer::Constant(0.01)),
            ]
        };
        let one = Initializer::Constant(1.0);
        let blocks = (0..2)
            .map(|i| Block {
                norm1: pair(&format!("{i}.norm1"), &[WIDTH], WIDTH, one),
                qkv: pair(&format!("{i}.qkv"), &[3 * WIDTH, WIDTH], 3 * WIDTH, normal),
                projection: pair(&format!("{i}.projection"), &[WIDTH, WIDTH], WIDTH, normal),
                norm2: pair(&format!("{i}.norm2"), &[WIDTH], WIDTH, one),
                up: pair(&format!("{i}.up"), &[4 * WIDTH, WIDTH], 4 * WIDTH, normal),
                down: pair(&format!("{i}.down"), &[WIDTH, 4 * WIDTH], WIDTH, normal),
            })
            .collect();
        let norm = pair("norm", &[WIDTH], WIDTH, one);
        let table = make("table".into(), &[VOCAB, WIDTH], normal);
        let positions = make("positions".into(), &[TOKENS, WIDTH], normal);
        Model { table, positions, blocks, norm, params }
    }

    fn loss(&self, ids: &Tensor, targets: &Tensor, checkpointed: bool) -> Result<Tensor> {
        let batch = ids.sizes()[0];
        let tokens = ops::embedding(&self.table, ids)?;
        let mut hidden = ops::dropout(&ops::add(&tokens, &self.positions)?, 0.1)?;
        for block in &self.blocks {
            hidden = if checkpointed {
                let block = block.clone();
                let mut outputs =
                    autograd::checkpoint(&[hidden], move |inputs| Ok(vec![block.forward(&inputs[0])?]))?;
                outputs.pop().unwrap()
            } else {
                block.forward(&hidden)?
            };
        }
        let hidden = layer_norm(&hidden, &self.norm)?;
        let flat = ops::reshape(&hidden, [batch * TOKENS, WIDTH])?;
        // The table is tied: it is used at both ends.
        ops::linear_cross_entropy(
            &flat,
            &self.table,
            WeightLayout::OutIn,
            targets,
            CrossEntropyOptions::default(),
        )
    }
}

fn layer_norm(x: &Tensor, [weight, bias]: &[Param; 2]) -> Result<Tensor> {
    ops::layer_norm(x, Some(weight.into()), Some(bias.into()), 1e-5)
}

impl Block {
    fn forward(&self, hidden: &Tensor) -> Result<Tensor> {
        let linear = |x: &Tensor, [weight, bias]: &[Param; 2]| {
            ops::linear(x, weight, Some(Operand::from(bias)), WeightLayout::OutIn)
        };
        let qkv = linear(&layer_norm(hidden, &self.norm1)?, &self.qkv)?;
        let options = AttentionOptions { causal: true, dropout: 0.1, ..Default::default() };
        let mixed = ops::attention_packed(&qkv, HEADS, PackedHeads::Thirds, &options)?;
        let mixed = ops::dropout(&linear(&mixed, &self.projection)?, 0.1)?;
        let [weight, bias] = &self.norm2;
        let (hidden, normed) =
            ops::add_layer_norm(&mixed, Some(hidden.into()), Some(weight.into()), Some(bias.into()), 1e-5)?;
        let up = (Operand::from(&self.up[0]), Some(Operand::from(&self.up[1])));
        let down = (Operand::from(&self.down[0]), Some(Operand::from(&self.down[1])));
        ops::add(&hidden, &ops::mlp(&normed, up, down, WeightLayout::OutIn, Activation::GeluTanh)?)
    }
}

enum Store {
    Plain(Arc<PlainStore>),
    Poison(Arc<PoisonStore>),
}

impl Store {
    fn values(&self) -> &PlainStore {
        match self {
            Store::Plain(store) => store,
            Store::Poison(store) => store.vault(),
        }
    }
}

/// Losses and final weights of a few steps of plain gradient descent.
fn train(poisoned: bool, checkpointed: bool, threads: usize, dtype: DType) -> (Vec<f32>, Vec<f32>) {
    let device = ferrospeed_cpu::with_threads(threads);
    let model = Model::new();
    let source = FromInitializers { seed: 11 };
    let store = if poisoned {
        Store::Poison(PoisonStore::attach(&model.params, dtype, &device, &source).unwrap())
    } else {
        Store::Plain(PlainStore::attach(&model.params, dtype, &device, &source).unwrap())
    };
    let ids: Vec<i64> = (0..2 * TOKENS as i64).map(|i| i * i % VOCAB as i64).collect();
    let mut targets: Vec<i64> = ids.iter().map(|id| (id * 5 + 1) % VOCAB as i64).collect();
    targets[3] = -100;
    let ids = Tensor::from_slice(&ids, [2, TOKENS], &device).unwrap();
    let targets = Tensor::from_slice(&targets, [2 * TOKENS], &device).unwrap();
    let mut losses = Vec::new();
    for step in 0..8 {
        random::set_state(RandomState { seed: 5, step, next_stream: 0 });
        let loss = model.loss(&ids, &targets, checkpointed).unwrap();
        losses.push(loss.item().unwrap());
        autograd::backward(&loss).unwrap();
        if let Store::Poison(store) = &store {
            assert_eq!(store.borrowed(), 0, "a borrow outlived its op");
        }
        let gradients = store.values().take_gradients();
        let mut flat = store.values().flat().to_vec_f32().unwrap();
        let mut start = 0;
        for (param, gradient) in model.params.iter().zip(gradients) {
            let gradient =
                gradient.unwrap_or_else(|| panic!("{param:?} got no gradient")).to_vec_f32().unwrap();
            for (value, gradient) in flat[start..start + param.numel()].iter_mut().zip(gradient) {
                *value -= 0.2 * gradient;
            }
            start += param.numel();
        }
        let updated = Tensor::from_f32(&flat, [flat.len()], dtype, &device).unwrap();
        // SAFETY: between steps nobody borrows a value.
        let flat = unsafe { Out::vouched(store.values().flat()) };
        device.backend().copy(&updated, flat).unwrap();
    }
    (losses, store.values().flat().to_vec_f32().unwrap())
}

#[test]
fn any_store_and_checkpointing_train_to_the_same_bits() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let plain = train(false, false, 1, dtype);
        assert!(plain.0[7] < 0.8 * plain.0[0], "the loss must fall: {:?}", plain.0);
        assert_eq!(plain, train(true, false, 1, dtype), "{dtype}: poisoned store");
        assert_eq!(plain, train(false, true, 1, dtype), "{dtype}: checkpointed");
        assert_eq!(plain, train(true, true, 1, dtype), "{dtype}: poisoned and checkpointed");
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    for dtype in [DType::F32, DType::BF16] {
        let one = train(false, false, 1, dtype);
        for threads in [2, 3, 8] {
            assert_eq!(one, train(false, false, threads, dtype), "{dtype} on {threads} threads");
        }
    }
}

#[test]
fn a_tied_table_gets_the_sum_of_what_its_two_uses_give() {
    let device = ferrospeed_cpu::with_threads(2);
    let ids = Tensor::from_slice(&[3i64, 1, 3, 7, 0, 3], [6], &device).unwrap();
    let targets = Tensor::from_slice(&[1i64, 3, 7, 0, 3, 3], [6], &device).unwrap();
    for dtype in [DType::F32, DType::BF16] {
        let gradients = |tied: bool| -> Vec<Vec<f32>> {
            // The values of a parameter follow from its name: here both have the same.
            let table = || Param::new("table", [9, 33], Initializer::Normal { mean: 0.0, std: 1.0 });
            let params = if tied { vec![table()] } else { vec![table(), table()] };
            let store = PlainStore::attach(&params, dtype, &device, &FromInitializers { seed: 1 }).unwrap();
            let (input, head) = (&params[0], params.last().unwrap());
            let hidden = ops::embedding(input, &ids).unwrap();
            let options = CrossEntropyOptions::default();
            let loss =
                ops::linear_cross_entropy(&hidden, head, WeightLayout::OutIn, &targets, options).unwrap();
            autograd::backward(&loss).unwrap();
            let gradients = store.take_gradients().into_iter();
            gradients.map(|gradient| gradient.unwrap().to_vec_f32().unwrap()).collect()
        };
        let (tied, apart) = (gradients(true), gradients(false));
        let round = |sum: f32| if dtype == DType::F32 { sum } else { half::bf16::from_f32(sum).to_f32() };
        let sum: Vec<f32> = apart[0].iter().zip(&apart[1]).map(|(a, b)| round(a + b)).collect();
        assert!(apart[0].iter().any(|value| *value != 0.0));
        assert_eq!(tied, [sum], "{dtype}");
    }
}
