//! A mixture whose experts are on several ranks, beside a layer that every token passes: tokens travel while that computes,
//! and their gradients while its gradients are computed.

use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use ferrospeed_comm::World;
use ferrospeed_nn::{GatedMlp, Init, Linear, Mode, Module, Moe, MoeConfig};
use ferrospeed_tensor::autograd::{self, CustomOp, apply};
use ferrospeed_tensor::random::RandomKey;
use ferrospeed_tensor::store::{FromInitializers, PlainStore};
use ferrospeed_tensor::{Activation, DType, Param, Result, Tensor, Value, ops};

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

fn tokens(rank: usize) -> Tensor {
    let mut values = vec![0.0; TOKENS * WIDTH];
    RandomKey::new(9, rank as u32).fill_normal(0, &mut values);
    Tensor::from_slice(&values, [TOKENS, WIDTH], &ferrospeed_cpu::device()).unwrap().tracked()
}

/// The mixture of a rank's tokens and a dense layer of them, and the gradient of these: the layer beside the exchange, where
/// somebody wants to know how many had `ended`, or behind it.
fn mixed(world: World, ended: Option<Arc<Mutex<Vec<u64>>>>) -> [Vec<u32>; 2] {
    let (init, device, rank) = (Init::root(), ferrospeed_cpu::device(), world.rank());
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
    let x = tokens(rank);
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

/// What happens on a rank in backward, for all ranks to see.
#[derive(Default)]
struct Events {
    happened: Mutex<Vec<&'static str>>,
    changed: Condvar,
}

impl Events {
    fn tell(&self, event: &'static str) {
        self.happened.lock().unwrap().push(event);
        self.changed.notify_all();
    }

    /// Whether it happens in time.
    fn wait_for(&self, event: &str) -> bool {
        let lacks = |happened: &mut Vec<&str>| !happened.contains(&event);
        let waited =
            self.changed.wait_timeout_while(self.happened.lock().unwrap(), Duration::from_secs(20), lacks);
        !waited.unwrap().1.timed_out()
    }
}

/// Nothing but what is done when its gradient comes.
struct InBackward<F>(F);

impl<F: Fn() + Send + Sync> CustomOp for InBackward<F> {
    fn name(&self) -> &'static str {
        "in backward"
    }

    fn forward(&self, inputs: &[Value]) -> Result<Vec<Tensor>> {
        Ok(vec![inputs[0].detach()])
    }

    fn backward(
        &self,
        _: &[Value],
        _: &[Tensor],
        gradients: &[Option<Tensor>],
    ) -> Result<Vec<Option<Tensor>>> {
        (self.0)();
        Ok(gradients.to_vec())
    }
}

/// A layer with that at its end.
struct Told<F>(Linear, Arc<InBackward<F>>);

impl<F: Fn() + Send + Sync + 'static> Module for Told<F> {
    fn forward(&self, x: &Tensor, _: Mode) -> Result<Tensor> {
        Ok(apply(self.1.clone(), &[(&self.0.forward(x)?).into()])?.remove(0))
    }
}

#[test]
fn gradients_travel_back_from_their_experts_while_those_of_the_dense_layer_are_computed() {
    let events = Arc::new(Events::default());
    let start = |world: World| {
        let events = events.clone();
        std::thread::spawn(move || {
            let (init, device, rank) = (Init::root(), ferrospeed_cpu::device(), world.rank());
            let expert = |init: &Init, _: usize| -> Arc<dyn Module> {
                let events = events.clone();
                // The first rank has its gradients of tokens to send, and this one has not, until that works on its dense
                // layer: it would never come to it if it waited for the exchange.
                let wait = move || assert!(rank == 0 || events.wait_for("rank 0 is at its dense layer"));
                Arc::new(Told(Linear::new(init, WIDTH, WIDTH, false), Arc::new(InBackward(wait))))
            };
            let told = events.clone();
            let tell = move || {
                if rank == 0 {
                    told.tell("rank 0 is at its dense layer");
                }
            };
            let dense = Told(Linear::new(&init.at("mlp"), WIDTH, WIDTH, true), Arc::new(InBackward(tell)));
            let config = MoeConfig::dropless(WIDTH, RANKS, 1);
            let moe = Moe::over(&init, config, &world.group(), expert).unwrap().beside(&init, dense);
            let params = init.parameters();
            let is_own = |param: &&Param| params.holder(param).is_none_or(|holder| holder.rank == rank);
            let own: Vec<Param> = params.as_slice().iter().filter(is_own).cloned().collect();
            let _store =
                PlainStore::attach(&own, DType::F32, &device, &FromInitializers { seed: 5 }).unwrap();
            let x = tokens(rank);
            let output = moe.forward(&x, Mode::Train).unwrap().output;
            autograd::backward(&ops::mean(ops::square(&output).unwrap()).unwrap()).unwrap();
        })
    };
    let started: Vec<_> = World::threads(RANKS).into_iter().map(start).collect();
    started.into_iter().for_each(|rank| rank.join().unwrap());
}
