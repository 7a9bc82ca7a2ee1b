//! What a mixture of experts does beyond DeepSpeed's recordings.

use std::sync::Arc;

use ferrospeed_nn::moe::{Capacity, GateNoise, balance_loss, z_loss};
use ferrospeed_nn::{GatedMlp, Init, LayerState, Linear, Mixed, Mode, Module, Moe, MoeConfig};
use ferrospeed_tensor::random::{self, RandomKey, RandomState};
use ferrospeed_tensor::store::{FromInitializers, PlainStore};
use ferrospeed_tensor::{Activation, DType, Tensor, autograd, ops};

const WIDTH: usize = 8;

fn expert(init: &Init) -> GatedMlp {
    let linear = |name, inputs, outputs| Linear::new(&init.at(name), inputs, outputs, false);
    GatedMlp::new(
        linear("gate", WIDTH, 12),
        linear("up", WIDTH, 12),
        linear("down", 12, WIDTH),
        Activation::Silu,
    )
}

/// Together, or one by one.
fn layer(config: MoeConfig, grouped: bool) -> (Moe, Init, Arc<PlainStore>) {
    let init = Init::root();
    let moe = match grouped {
        true => Moe::new(&init, config, |init, _| expert(init)),
        false => Moe::new(&init, config, |init, _| Arc::new(expert(init)) as Arc<dyn Module>),
    }
    .unwrap();
    let params = init.parameters();
    let source = FromInitializers { seed: 5 };
    let store =
        PlainStore::attach(params.as_slice(), DType::F32, &ferrospeed_cpu::device(), &source).unwrap();
    (moe, init, store)
}

fn input(tokens: usize) -> Tensor {
    let mut values = vec![0.0; tokens * WIDTH];
    RandomKey::new(9, 1).fill_normal(0, &mut values);
    Tensor::from_slice(&values, [tokens, WIDTH], &ferrospeed_cpu::device()).unwrap()
}

fn run(moe: &Moe, store: &PlainStore, x: &Tensor) -> (Vec<f32>, Vec<Vec<f32>>) {
    let x = x.tracked();
    let mixed = moe.forward(&x, Mode::Train).unwrap();
    let loss =
        ops::add(ops::sum(ops::square(&mixed.output).unwrap()).unwrap(), mixed.balance_loss().unwrap())
            .unwrap();
    autograd::backward(&loss).unwrap();
    let floats = |gradient: Tensor| gradient.to_vec_f32().unwrap();
    let mut gradients = vec![floats(x.grad().unwrap())];
    gradients
        .extend(store.take_gradients().into_iter().map(|gradient| floats(gradient.expect("one for each"))));
    (mixed.output.to_vec_f32().unwrap(), gradients)
}

fn assert_near(ours: &[f32], other: &[f32], what: &str) {
    assert_eq!(ours.len(), other.len(), "{what}");
    for (a, b) in ours.iter().zip(other) {
        assert!((a - b).abs() <= 1e-5 * (1.0 + b.abs()), "{what}: {a} and {b}");
    }
}

#[test]
fn experts_together_and_one_by_one_give_the_same() {
    for (tokens, experts, chosen) in [(17, 4, 1), (17, 4, 2), (5, 6, 3), (3, 8, 2), (1, 2, 2)] {
        let config = MoeConfig::dropless(WIDTH, experts, chosen);
        let [(one, _, one_store), (all, _, all_store)] =
            [false, true].map(|grouped| layer(config.clone(), grouped));
        let x = input(tokens);
        let (one, all) = (run(&one, &one_store, &x), run(&all, &all_store, &x));
        assert_near(&all.0, &one.0, "outputs");
        assert_eq!(all.1.len(), one.1.len(), "every expert gets a gradient, also those without tokens");
        for (index, (a, b)) in all.1.iter().zip(&one.1).enumerate() {
            assert_near(a, b, &format!("gradient {index}"));
        }
    }
}

#[test]
fn without_a_capacity_no_token_is_dropped_and_weights_sum_to_one() {
    // With all experts chosen the mixture is the weighted sum over all of them.
    let (moe, init, _store) = layer(MoeConfig::dropless(WIDTH, 3, 3), true);
    let x = input(6);
    let mixed = moe.forward(&x, Mode::Train).unwrap();
    let weights = ops::softmax(&mixed.logits).unwrap();
    let mut sum = Tensor::zeros([6, WIDTH], DType::F32, &ferrospeed_cpu::device()).unwrap();
    let params = init.parameters();
    for index in 0..3 {
        let at = |name: &str| {
            params.get(&format!("deepspeed_moe.experts.deepspeed_experts.{index}.{name}.weight")).unwrap()
        };
        let linear =
            |x: &Tensor, name: &str| ops::linear(x, at(name), None, ops::WeightLayout::OutIn).unwrap();
        let hidden = ops::gated(Activation::Silu, linear(&x, "gate"), linear(&x, "up")).unwrap();
        let weight = ops::narrow(&weights, 1, index, 1).unwrap();
        sum = ops::add(&sum, ops::mul(linear(&hidden, "down"), &weight).unwrap()).unwrap();
    }
    assert_near(&mixed.output.to_vec_f32().unwrap(), &sum.to_vec_f32().unwrap(), "the sum over all experts");
    let statistics = mixed.routing.statistics().unwrap();
    assert_eq!((statistics.tokens_per_expert, statistics.dropped_share), (vec![6, 6, 6], 0.0));
    assert!((statistics.imbalance - 1.0).abs() < 1e-9);
}

#[test]
fn dropped_tokens_get_zeros_and_are_counted() {
    let capacity = Capacity { factor: 0.5, min: 1, random_selection: false, ..Capacity::default() };
    let (moe, _, _store) = layer(MoeConfig::with_capacity(WIDTH, 2, 1, capacity), true);
    let mixed = moe.forward(&input(16), Mode::Train).unwrap();
    assert_eq!(mixed.routing.capacity(), Some(4));
    let statistics = mixed.routing.statistics().unwrap();
    let kept: u64 = statistics.tokens_per_expert.iter().map(|&tokens| tokens.min(4)).sum();
    assert!((statistics.dropped_share - (16 - kept) as f64 / 16.0).abs() < 1e-9, "{statistics:?}");
    let rows = mixed.output.to_vec_f32().unwrap();
    let zeros = rows.chunks(WIDTH).filter(|row| row.iter().all(|&value| value == 0.0)).count();
    assert_eq!(zeros as u64, 16 - kept);
}

#[test]
fn entropy_is_that_of_the_router() {
    let (moe, _, _store) = layer(MoeConfig::dropless(WIDTH, 4, 2), true);
    let mixed = moe.forward(&input(9), Mode::Evaluate).unwrap();
    let probabilities = ops::softmax(&mixed.logits).unwrap().to_vec_f32().unwrap();
    let truth = -probabilities.iter().map(|&p| f64::from(p) * f64::from(p).ln()).sum::<f64>() / 9.0;
    let entropy = mixed.routing.statistics().unwrap().entropy;
    assert!((entropy - truth).abs() < 1e-5, "{entropy} and {truth}");
}

fn outputs(moe: &Moe, mode: Mode, step: u32) -> Vec<f32> {
    random::set_state(RandomState { seed: 1, step, next_stream: 0 });
    moe.forward(&input(64), mode).unwrap().output.to_vec_f32().unwrap()
}

#[test]
fn noise_is_drawn_while_training_and_never_in_evaluation() {
    let second = Capacity { factor: 4.0, evaluation_factor: 4.0, ..Capacity::default() };
    let selecting = Capacity { factor: 0.3, evaluation_factor: 0.3, ..Capacity::default() };
    let noisy = |noise| MoeConfig { noise: Some(noise), ..MoeConfig::dropless(WIDTH, 4, 2) };
    for config in [
        noisy(GateNoise::Jitter),
        noisy(GateNoise::RSample),
        MoeConfig::with_capacity(WIDTH, 4, 2, second),
        MoeConfig::with_capacity(WIDTH, 4, 1, selecting),
    ] {
        let (moe, _, _store) = layer(config.clone(), true);
        assert_ne!(outputs(&moe, Mode::Train, 1), outputs(&moe, Mode::Train, 2), "{config:?}");
        assert_eq!(outputs(&moe, Mode::Train, 1), outputs(&moe, Mode::Train, 1), "{config:?}");
        assert_eq!(outputs(&moe, Mode::Evaluate, 1), outputs(&moe, Mode::Evaluate, 2), "{config:?}");
    }
}

#[test]
fn the_balancing_bias_moves_choices_and_no_weights() {
    let (moe, _, _store) =
        layer(MoeConfig { balancing_bias: true, ..MoeConfig::dropless(WIDTH, 4, 1) }, true);
    let bias = moe.balancing_bias().expect("asked for");
    let imbalance = |mixed: &Mixed| mixed.routing.statistics().unwrap().imbalance;
    let x = input(256);
    let first = imbalance(&moe.forward(&x, Mode::Train).unwrap());
    for _ in 0..200 {
        let tokens = moe.forward(&x, Mode::Train).unwrap().routing.statistics().unwrap().tokens_per_expert;
        bias.update(&tokens, 0.005);
    }
    let mixed = moe.forward(&x, Mode::Train).unwrap();
    assert!(imbalance(&mixed) < 1.1 && first > 1.2, "{first}, then {}", imbalance(&mixed));
    assert!(bias.set(&[0.0; 3]).is_err() && bias.set(&[f32::NAN; 4]).is_err());
    bias.set(&[100.0, 0.0, 0.0, 0.0]).unwrap();
    let all = moe.forward(&x, Mode::Train).unwrap().routing.statistics().unwrap().tokens_per_expert;
    assert_eq!(all, [256, 0, 0, 0]);
}

#[test]
fn losses_of_the_router_are_their_formulas() {
    let device = ferrospeed_cpu::device();
    let logits = Tensor::from_slice(&[0.0f32, 0.0, 1.0, 3.0], [2, 2], &device).unwrap();
    let log_sums = [2f64.ln(), (1f64.exp() + 3f64.exp()).ln()];
    let truth = log_sums.iter().map(|value| value * value).sum::<f64>() / 2.0;
    assert!((f64::from(z_loss(&logits).unwrap().item().unwrap()) - truth).abs() < 1e-5);
    // Evenly spread: as many as each token chose.
    let even = Tensor::full([4, 2], 0.5, DType::F32, &device).unwrap();
    let counts = Tensor::from_slice(&[2i64, 2], [2], &device).unwrap();
    assert_eq!(balance_loss(&even, &counts).unwrap().item().unwrap(), 1.0);
}

#[test]
fn what_makes_no_sense_is_refused() {
    let refused = |config: MoeConfig| Moe::new(&Init::root(), config, |init, _| expert(init)).is_err();
    assert!(refused(MoeConfig::dropless(WIDTH, 2, 3)) && refused(MoeConfig::dropless(WIDTH, 0, 1)));
    assert!(refused(MoeConfig::dropless(WIDTH, 2, 0)));
    let capacity = Capacity { factor: f32::NAN, ..Capacity::default() };
    assert!(refused(MoeConfig::with_capacity(WIDTH, 2, 1, capacity)));
    let sampled = MoeConfig::with_capacity(WIDTH, 4, 2, Capacity::default());
    assert!(refused(MoeConfig { noise: Some(GateNoise::RSample), ..sampled }));
}
