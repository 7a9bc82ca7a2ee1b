//! Experts on several ranks: any way of spreading them trains the same model, in every stage, and no choice of a router
//! makes ranks wait for ever.

use std::cell::RefCell;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use super::common::{config, device, on_ranks};
use ferrospeed_comm::layout::ExpertOrder;
use ferrospeed_comm::{Mesh, ProcessTopology, ReduceOp, World};
use ferrospeed_engine::{Engine, LoadOptions, Options, SaveOptions, Setup, StepReport, initialize_model};
use ferrospeed_nn::moe::{Capacity, GateNoise, Routing};
use ferrospeed_nn::{GatedMlp, Init, LayerState, Linear, Mode, Moe, MoeConfig, Parameters};
use ferrospeed_tensor::store::{FromInitializers, ParamSource};
use ferrospeed_tensor::{Activation, DType, Device, Param, Tensor, ops};
use ferrospeed_zero::access::Which;
use serde_json::{Value, json};

const WIDTH: usize = 16;
const EXPERTS: usize = 8;

struct Model {
    inwards: Linear,
    moe: Moe,
    outwards: Linear,
    /// Where the last loss's tokens went.
    routing: RefCell<Option<Routing>>,
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
        (Model { inwards, moe, outwards, routing: RefCell::default() }, init.parameters())
    }

    fn loss(&self, x: &Tensor, y: &Tensor) -> Tensor {
        let hidden = self.inwards.forward(x).unwrap();
        let mixed = self.moe.forward(&hidden, Mode::Train).unwrap();
        let found = self.outwards.forward(&ops::add(&hidden, &mixed.output).unwrap()).unwrap();
        let apart = ops::sub(ops::cast(&found, DType::F32).unwrap(), y).unwrap();
        let loss = ops::mean(ops::square(&apart).unwrap()).unwrap();
        *self.routing.borrow_mut() = Some(mixed.routing.clone());
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

/// First values under which a token's largest channel is its expert.
struct ByChannel;

impl ParamSource for ByChannel {
    fn load(&self, param: &Param, range: Range<usize>, out: &mut [f32]) -> ferrospeed_tensor::Result<()> {
        FromInitializers { seed: 42 }.load(param, range.clone(), out)?;
        let diagonal = match param.name() {
            "in.weight" => 1.0,
            "in.bias" => 0.0,
            name if name.ends_with("gate.wg.weight") => 4.0,
            _ => return Ok(()),
        };
        for (at, value) in range.zip(out) {
            *value = if at / WIDTH == at % WIDTH { diagonal } else { 0.0 };
        }
        Ok(())
    }
}

fn start(
    world: &World,
    value: &Value,
    ep: usize,
    numbers: MoeConfig,
    source: Option<&dyn ParamSource>,
) -> (Engine, Model, Parameters) {
    let topology = ProcessTopology::new([("data", world.size())]).unwrap();
    let mesh = Mesh::new(world.clone(), topology).unwrap();
    let groups = mesh.expert(ep, ExpertOrder::ExpertBeforeData).unwrap();
    let (model, parameters) = Model::build((ep > 1).then_some(&groups.expert), numbers);
    let setup = Setup::new(config(value, world.size()), world.clone(), device(1));
    let mut options = Options { source, ..Options::default() };
    options.spread_experts(&mesh, groups).unwrap();
    (initialize_model(&setup, &parameters, options).unwrap(), model, parameters)
}

/// Losses of all ranks and norms by step, and the dense weights at the end.
fn train(ep: usize, value: Value, numbers: MoeConfig, rows: fn(usize) -> usize) -> Vec<Vec<f32>> {
    let value = Arc::new(value);
    on_ranks(4, move |world| {
        let (mut engine, model, parameters) = start(&world, &value, ep, numbers.clone(), None);
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

/// Which tokens a rank has in a step, by the expert that each goes to.
type Tokens = fn(usize, usize) -> Vec<usize>;

/// Losses, norms and dense weights of every rank, where tokens go to chosen experts; and where the first step's went.
fn train_routed(ep: usize, stage: u8, tokens: Tokens) -> (Vec<Vec<f32>>, Vec<Vec<u64>>) {
    let all = on_ranks(4, move |world| {
        let numbers = MoeConfig::dropless(WIDTH, EXPERTS, 1);
        let (mut engine, model, parameters) =
            start(&world, &configuration(stage, "fp32"), ep, numbers, Some(&ByChannel));
        let device = engine.device().clone();
        let (mut seen, mut went) = (Vec::new(), Vec::new());
        for step in 0..4 {
            let experts = tokens(world.rank(), step);
            let (noise, y) = samples(step, world.rank(), experts.len(), DType::F32, &device);
            let mut x = noise.to_vec_f32().unwrap();
            for (row, expert) in x.chunks_mut(WIDTH).zip(&experts) {
                row.iter_mut().for_each(|value| *value *= 0.1);
                row[*expert] = 2.0;
            }
            let x = Tensor::from_slice(&x, [experts.len(), WIDTH], &device).unwrap();
            if step == 0 {
                let hidden = model.inwards.forward(&x).unwrap();
                let mixed = model.moe.forward(&hidden, Mode::Evaluate).unwrap();
                went = mixed.routing.statistics().unwrap().tokens_per_expert;
            }
            let loss =
                engine.forward(|_| Ok::<_, ferrospeed_tensor::TensorError>(model.loss(&x, &y))).unwrap();
            seen.push(loss.item().unwrap());
            engine.backward(&loss).unwrap();
            let StepReport::Applied { grad_norm } = engine.step().unwrap() else { panic!("not applied") };
            seen.push(grad_norm as f32);
        }
        for param in parameters.as_slice() {
            seen.extend(engine.weight_as_read(param).unwrap());
        }
        (seen, went)
    });
    all.into_iter().unzip()
}

#[test]
fn idle_experts_disjoint_choices_and_short_batches_train_as_on_one_rank_in_every_stage() {
    let even = |rank: usize| {
        let mut went = vec![0; EXPERTS];
        (went[2 * rank], went[2 * rank + 1]) = (6, 6);
        went
    };
    let patterns: [(&str, Tokens, Option<[Vec<u64>; 4]>); 3] = [
        (
            "one expert gets all tokens",
            |_, _| vec![5; 12],
            Some([0; 4].map(|_| vec![0, 0, 0, 0, 0, 12, 0, 0])),
        ),
        (
            "every rank chooses other experts",
            |rank, _| (0..12).map(|row| 2 * rank + row % 2).collect(),
            Some([0, 1, 2, 3].map(even)),
        ),
        (
            "one rank's last batch is shorter",
            |rank, step| (0..if rank == 2 && step == 3 { 1 } else { 12 }).map(|row| row % EXPERTS).collect(),
            None,
        ),
    ];
    for (what, tokens, wanted) in patterns {
        let (whole, went) = train_routed(1, 0, tokens);
        if let Some(wanted) = wanted {
            assert_eq!(went, wanted, "{what}");
        }
        for ep in [2, 4] {
            let (reference, _) = train_routed(ep, 0, tokens);
            let apart = furthest(&reference, &whole);
            assert!(apart < 2e-5, "{what}, experts over {ep} ranks: {apart} apart");
            for stage in 1..=3 {
                let (found, _) = train_routed(ep, stage, tokens);
                assert_eq!(bits(&found), bits(&reference), "{what}, experts over {ep} ranks, stage {stage}");
            }
        }
    }
}

/// Losses and the bias after each of some steps in which it is moved against the load. They go on from the checkpoint in
/// `folder` unless they are the first, and leave one there.
fn train_with_bias(ep: usize, stage: u8, steps: Range<usize>, folder: &Path) -> Vec<Vec<f32>> {
    let folder = folder.to_path_buf();
    on_ranks(4, move |world| {
        let numbers = MoeConfig {
            balancing_bias: true,
            noise: Some(GateNoise::Jitter),
            ..MoeConfig::dropless(WIDTH, EXPERTS, 2)
        };
        let (mut engine, model, _) = start(&world, &configuration(stage, "fp32"), ep, numbers, None);
        if steps.start > 0 {
            engine.load_checkpoint(&folder, &LoadOptions::default()).unwrap();
        }
        let device = engine.device().clone();
        let bias = model.moe.balancing_bias().unwrap();
        let mut seen = bias.values();
        for step in steps.clone() {
            let (x, y) = samples(step, world.rank(), 12, DType::F32, &device);
            let loss =
                engine.forward(|_| Ok::<_, ferrospeed_tensor::TensorError>(model.loss(&x, &y))).unwrap();
            seen.push(loss.item().unwrap());
            engine.backward(&loss).unwrap();
            engine.step().unwrap();
            let routing = model.routing.borrow_mut().take().unwrap();
            let mut tokens = routing.chosen().to_vec::<i64>().unwrap();
            world.group().all_reduce(&mut tokens, ReduceOp::Sum).unwrap();
            bias.update(&tokens.iter().map(|&count| count as u64).collect::<Vec<_>>(), 0.01);
            seen.extend(bias.values());
        }
        engine.save_checkpoint(&folder, &SaveOptions::default()).unwrap();
        seen
    })
}

#[test]
fn a_bias_that_balances_goes_on_from_a_checkpoint_on_any_ranks() {
    let [whole, parted] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let unbroken = train_with_bias(2, 2, 0..4, whole.path());
    let halfway = EXPERTS + 2 * (EXPERTS + 1);
    let (first, last) = (halfway - EXPERTS, unbroken[0].len());
    assert!(unbroken[0][first..halfway].iter().any(|value| *value != 0.0), "the bias moved");
    train_with_bias(2, 2, 0..2, parted.path());
    let then = train_with_bias(2, 3, 2..4, parted.path());
    let wanted: Vec<Vec<f32>> = unbroken.iter().map(|rank| rank[first..last].to_vec()).collect();
    assert_eq!(bits(&then), bits(&wanted));
    // On other ranks sums have another order; what was loaded has the same bits.
    for ep in [1, 4] {
        let again = tempfile::tempdir().unwrap();
        train_with_bias(2, 2, 0..2, again.path());
        let then = train_with_bias(ep, 1, 2..4, again.path());
        assert!(furthest(&then, &wanted) < 2e-5, "experts over {ep} ranks");
        let loaded: Vec<Vec<f32>> = then.iter().map(|rank| rank[..EXPERTS].to_vec()).collect();
        let saved: Vec<Vec<f32>> = wanted.iter().map(|rank| rank[..EXPERTS].to_vec()).collect();
        assert_eq!(bits(&loaded), bits(&saved));
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
