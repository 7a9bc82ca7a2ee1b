//! A mixture whose experts are on several ranks, beside a layer that every token passes: tokens travel while that computes.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ferrospeed_comm::World;
use ferrospeed_nn::{GatedMlp, Init, Linear, Mode, Module, Moe, MoeConfig};
use ferrospeed_tensor::random::RandomKey;
use ferrospeed_tensor::store::{FromInitializers, PlainStore};
use ferrospeed_tensor::{Activation, DType, Device, Param, Result, Tensor, autograd, ops};

const WIDTH: usize = 8;
const TOKENS: usize = 24;
const RANKS: usize = 2;

/// A layer that is done when the tokens are where they go, and says how many exchanges had ended by then.
struct Watching {
    layer: Linear,
    world: World,
    ended: Arc<Mutex<Vec<u64>>>,
}

impl Module for Watching {
    fn forward(&self, x: &Tensor, _: Mode) -> Result<Tensor> {
        let made = self.layer.forward(x)?;
        let (mut ended, deadline) = (0, Instant::now() + Duration::from_secs(20));
        // How many tokens go where, and the tokens: nobody waits for them yet, and still they arrive.
        while ended < 2 && Instant::now() < deadline {
            let rows = self.world.log().summary();
            let rows = rows.iter().filter(|row| row.operation.starts_with("all_to_all"));
            ended = rows.map(|row| row.count).sum();
            std::thread::yield_now();
        }
        self.ended.lock().unwrap().push(ended);
        Ok(made)
    }
}

/// The mixture of a rank's tokens and a dense layer of them, and the gradient of these: the layer beside the exchange, where
/// somebody wants to know how many had `ended`, or behind it.
fn mixed(world: World, ended: Option<Arc<Mutex<Vec<u64>>>>) -> [Vec<u32>; 2] {
    let (init, device, rank) = (Init::root(), Device::cpu(), world.rank());
    let expert = |init: &Init, _: usize| {
        let linear = |name, inputs, outputs| Linear::new(&init.at(name), inputs, outputs, false);
        let [gate, up] = ["gate", "up"].map(|name| linear(name, WIDTH, 12));
        GatedMlp::new(gate, up, linear("down", 12, WIDTH), Activation::Silu)
    };
    let mut moe = Moe::over(&init, MoeConfig::dropless(WIDTH, 4, 2), &world.group(), expert).unwrap();
    let layer = Linear::new(&init.at("mlp"), WIDTH, WIDTH, true);
    world.log().start();
    let behind = match ended {
        Some(ended) => {
            moe = moe.beside(&init, Watching { layer, world, ended });
            None
        }
        None => Some((layer, Linear::new(&init.at("coefficient"), WIDTH, 2, true))),
    };
    let params = init.parameters();
    let is_own = |param: &&Param| params.holder(param).is_none_or(|holder| holder.rank == rank);
    let own: Vec<Param> = params.as_slice().iter().filter(is_own).cloned().collect();
    let _store = PlainStore::attach(&own, DType::F32, &device, &FromInitializers { seed: 5 }).unwrap();
    let mut values = vec![0.0; TOKENS * WIDTH];
    RandomKey::new(9, rank as u32).fill_normal(0, &mut values);
    let x = Tensor::from_slice(&values, [TOKENS, WIDTH], &device).unwrap().tracked();
    let mut output = moe.forward(&x, Mode::Train).unwrap().output;
    if let Some((layer, coefficient)) = behind {
        let shares = ops::softmax(coefficient.forward(&x).unwrap()).unwrap();
        let dense = layer.forward(&x).unwrap();
        let shared =
            |made: &Tensor, index| ops::mul(made, ops::narrow(&shares, 1, index, 1).unwrap()).unwrap();
        output = ops::add(shared(&output, 0), shared(&dense, 1)).unwrap();
    }
    autograd::backward(&ops::mean(ops::square(&output).unwrap()).unwrap()).unwrap();
    [output, x.grad().unwrap()].map(|t| t.to_vec::<f32>().unwrap().iter().map(|v| v.to_bits()).collect())
}

#[test]
fn tokens_travel_to_their_experts_while_the_dense_layer_computes_to_the_same_bits() {
    let on_ranks = |ended: Option<Arc<Mutex<Vec<u64>>>>| -> Vec<[Vec<u32>; 2]> {
        let start = |world: World| {
            let ended = ended.clone();
            std::thread::spawn(move || mixed(world, ended))
        };
        let started: Vec<_> = World::threads(RANKS).into_iter().map(start).collect();
        started.into_iter().map(|rank| rank.join().unwrap()).collect()
    };
    let ended = Arc::new(Mutex::new(Vec::new()));
    let beside = on_ranks(Some(ended.clone()));
    // Results come back behind the dense layer: counts and tokens were all that had travelled.
    assert_eq!(*ended.lock().unwrap(), [2; RANKS]);
    assert!(beside == on_ranks(None), "other bits than one after the other");
}
