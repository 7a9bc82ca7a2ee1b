//! Experts on several ranks: any way of spreading them trains the same model, in every stage, and no choice of a router
//! makes ranks wait for ever.

mod common;

use std::sync::Arc;

use common::{config, device, on_ranks};
use ferrospeed_comm::layout::ExpertOrder;
use ferrospeed_comm::{Mesh, ProcessTopology, World};
use ferrospeed_engine::{Engine, Options, Setup, StepReport, initialize_model};
use ferrospeed_nn::moe::Capacity;
use ferrospeed_nn::{GatedMlp, Init, Linear, Mode, Moe, MoeConfig, Parameters};
use ferrospeed_tensor::{Activation, DType, Device, Tensor, ops};
use ferrospeed_zero::access::Which;
use ferrospeed_zero::{Elsewhere, Sharding};
use serde_json::{Value, json};

const WIDTH: usize = 16;
const EXPERTS: usize = 8;

struct Model {
    inwards: Linear,
    moe: Moe,
    outwards: Linear,
}

impl Model {
    fn build(group: Option<&ferrospeed_comm::Group>, numbers: MoeConfig) -> (Model, Parameters) {
        let init = Init::root();
        let inwards = Linear::new(&init.at("in"), WIDTH, WIDTH, true);
        let expert = |init: &Init, _: usize| {
            let linear = |name, inputs, outputs| Linear::new(&init.at(name), inputs, outputs, true);
            GatedMlp::new(
                linear("gate", WIDTH, 24),
                linear("up", WIDTH, 24),
                linear("down", 24, WIDTH),
                Activation::Silu,
            )
        };
        let place = init.at("moe");
        let moe = match group {
            Some(group) => Moe::over(&place, numbers, group, expert).unwrap(),
            None => Moe::new(&place, numbers, expert).unwrap(),
        };
        let outwards = Linear::new(&init.at("out"), WIDTH, 1, true);
        (Model { inwards, moe, outwards }, init.parameters())
    }

    fn loss(&self, x: &Tensor, y: &Tensor) -> Tensor {
        let hidden = self.inwards.forward(x).unwrap();
        let mixed = self.moe.forward(&hidden, Mode::Train).unwrap();
        let found = self.outwards.forward(&ops::add(&hidden, &mixed.output).unwrap()).unwrap();
        let apart = ops::sub(ops::cast(&found, DType::F32).unwrap(), y).unwrap();
        let loss = ops::mean(ops::square(&apart).unwrap()).unwrap();
        let balance = ops::affine(mixed.balance_loss().unwrap(), 0.01, 0.0).unwrap();
        ops::add(&loss, &balance).unwrap()
    }
}

fn samples(step: usize, rank: usize, rows: usize, dtype: DType, device: &Device) -> (Tensor, Tensor) {
    let value = |at: usize| ((at * 37 + step * 11 + rank * 101 + at * at % 97) % 64) as f32 / 32.0 - 1.0;
    let x: Vec<f32> = (0..rows * WIDTH).map(value).collect();
    let y: Vec<f32> = (0..rows).map(|row| x[row * WIDTH..][..4].iter().sum()).collect();
    let x = Tensor::from_slice(&x, [rows, WIDTH], device).unwrap();
    (ops::cast(&x, dtype).unwrap(), Tensor::from_slice(&y, [rows, 1], device).unwrap())
}

fn configuration(stage: u8, precision: &str) -> Value {
    let mut config = json!({
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_allow_untested_optimizer": true,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 600, "stage3_param_persistence_threshold": 20},
    });
    if precision != "fp32" {
        config[precision] = json!({"enabled": true});
    }
    config
}

fn start(world: &World, value: &Value, ep: usize, numbers: MoeConfig) -> (Engine, Model, Parameters) {
    let topology = ProcessTopology::new([("data", world.size())]).unwrap();
    let mesh = Mesh::new(world.clone(), topology).unwrap();
    let groups = mesh.expert(ep, ExpertOrder::ExpertBeforeData).unwrap();
    let (model, parameters) = Model::build((ep > 1).then_some(&groups.expert), numbers);
    let (experts, _) = parameters.partition(|param| param.name().contains("deepspeed_experts"));
    let sharding = Sharding::over(&groups.expert_data).divided_by(world.size());
    let elsewhere = vec![Elsewhere { params: experts.as_slice().to_vec(), sharding }];
    let setup = Setup::new(config(value, world.size()), world.clone(), device(1));
    let options = Options { elsewhere, agreement: Some(world.group()), ..Default::default() };
    (initialize_model(&setup, &parameters, options).unwrap(), model, parameters)
}

/// Losses of all ranks and norms by step, and the dense weights at the end.
fn train(ep: usize, value: Value, numbers: MoeConfig, rows: fn(usize) -> usize) -> Vec<Vec<f32>> {
    let value = Arc::new(value);
    on_ranks(4, move |world| {
        let (mut engine, model, parameters) = start(&world, &value, ep, numbers.clone());
        let (dtype, device) = (engine.store().dtype(), engine.device().clone());
        let mut seen = Vec::new();
        for step in 0..4 {
            let (x, y) = samples(step, world.rank(), rows(world.rank()), dtype, &device);
            let loss =
                engine.forward(|_| Ok::<_, ferrospeed_tensor::TensorError>(model.loss(&x, &y))).unwrap();
            seen.push(loss.item().unwrap());
            engine.backward(&loss).unwrap();
            let StepReport::Applied { grad_norm } = engine.step().unwrap() else { panic!("not applied") };
            seen.push(grad_norm as f32);
        }
        for param in parameters.as_slice().iter().filter(|param| !param.name().contains("experts")) {
            seen.extend(engine.store().full(param, Which::Weight).unwrap());
        }
        seen
    })
}

fn bits(outcome: &[Vec<f32>]) -> Vec<Vec<u32>> {
    outcome.iter().map(|rank| rank.iter().map(|value| value.to_bits()).collect()).collect()
}

fn furthest(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    let pairs = a.iter().flatten().zip(b.iter().flatten());
    pairs.map(|(a, b)| (a - b).abs() / (1.0 + a.abs())).fold(0.0, f32::max)
}

#[test]
fn every_way_of_spreading_experts_trains_the_same_model_in_every_stage() {
    for (kind, numbers) in [
        ("dropless", MoeConfig::dropless(WIDTH, EXPERTS, 2)),
        (
            "with capacity",
            MoeConfig::with_capacity(
                WIDTH,
                EXPERTS,
                1,
                Capacity { random_selection: false, ..Capacity::default() },
            ),
        ),
    ] {
        let whole = train(1, configuration(0, "fp32"), numbers.clone(), |_| 12);
        for ep in [1, 2, 4] {
            let reference = train(ep, configuration(0, "fp32"), numbers.clone(), |_| 12);
            let apart = furthest(&reference, &whole);
            // Four clipped steps; sums over ranks have another order.
            assert!(apart < 2e-5, "{kind}, experts over {ep} ranks: {apart} apart");
            for stage in 1..=3 {
                let found = train(ep, configuration(stage, "fp32"), numbers.clone(), |_| 12);
                assert_eq!(bits(&found), bits(&reference), "{kind}, experts over {ep} ranks, stage {stage}");
            }
        }
    }
    let numbers = MoeConfig::dropless(WIDTH, EXPERTS, 2);
    let reference = train(2, configuration(0, "bf16"), numbers.clone(), |_| 12);
    for stage in 1..=3 {
        let found = train(2, configuration(stage, "bf16"), numbers.clone(), |_| 12);
        assert_eq!(bits(&found), bits(&reference), "bf16, stage {stage}");
    }
}

#[test]
fn ranks_with_few_tokens_and_experts_without_any_keep_nobody_waiting() {
    // One token and one choice on three ranks: most experts get none, and batches differ in length.
    let numbers = MoeConfig::dropless(WIDTH, EXPERTS, 1);
    for stage in [0, 2, 3] {
        let found =
            train(4, configuration(stage, "fp32"), numbers.clone(), |rank| if rank == 2 { 9 } else { 1 });
        assert!(found.iter().flatten().all(|value| value.is_finite()), "stage {stage}");
    }
}

#[test]
fn experts_that_do_not_divide_are_refused() {
    on_ranks(4, |world| {
        let init = Init::root();
        let numbers = MoeConfig::dropless(WIDTH, 6, 1);
        let expert = |init: &Init, _: usize| {
            let linear = |name| Linear::new(&init.at(name), WIDTH, WIDTH, false);
            GatedMlp::new(linear("gate"), linear("up"), linear("down"), Activation::Silu)
        };
        let refused = Moe::over(&init, numbers, &world.group(), expert).unwrap_err().to_string();
        assert!(refused.contains("6 experts cannot be divided over 4 ranks"), "{refused}");
    });
}
