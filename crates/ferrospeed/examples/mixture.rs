//! A mixture of experts, spread over ranks: four experts of which each token uses two.
//!
//! Alone:         cargo run --example mixture -p ferrospeed --features examples
//! On two ranks:  ferrospeed launch -n 2 -- target/debug/examples/mixture

use ferrospeed::comm::{Group, Mesh, ProcessTopology};
use ferrospeed::moe::{ExpertOrder, Moe, MoeConfig};
use ferrospeed::nn::{Init, Linear, Mlp, Mode};
use ferrospeed::tensor::random::RandomKey;
use ferrospeed::tensor::{Activation, Result as TensorResult};
use ferrospeed::{Device, Failure, Options, Setup, Tensor, World, init_distributed, initialize_model, ops};

const CONFIG: &str = r#"{
    "train_micro_batch_size_per_gpu": 64,
    "optimizer": { "type": "AdamW", "params": { "lr": 0.01 } },
    "zero_optimization": { "stage": 2 }
}"#;
const WIDTH: usize = 16;
const EXPERTS: usize = 4;

struct Model {
    inwards: Linear,
    mixture: Moe,
    outwards: Linear,
}

impl Model {
    /// With experts on the ranks of a group.
    fn new(init: &Init, experts: &Group) -> TensorResult<Model> {
        let expert = |init: &Init, _: usize| {
            let linear = |name, inputs, outputs| Linear::new(&init.at(name), inputs, outputs, true);
            Mlp::new(linear("up", WIDTH, 32), linear("down", 32, WIDTH), Activation::Relu)
        };
        Ok(Model {
            inwards: Linear::new(&init.at("in"), 2, WIDTH, true),
            mixture: Moe::over(&init.at("moe"), MoeConfig::dropless(WIDTH, EXPERTS, 2), experts, expert)?,
            outwards: Linear::new(&init.at("out"), WIDTH, 1, true),
        })
    }

    /// The error, and a little for experts that are used unevenly; and how many rows each expert had.
    fn loss(&self, x: &Tensor, y: &Tensor, mode: Mode) -> TensorResult<(Tensor, Vec<u64>)> {
        let hidden = ops::tanh(&self.inwards.forward(x)?)?;
        let mixed = self.mixture.forward(&hidden, mode)?;
        let guess = self.outwards.forward(&ops::add(&hidden, &mixed.output)?)?;
        let error = ops::mean(&ops::square(&ops::sub(&guess, y)?)?)?;
        let rows = mixed.routing.statistics()?.tokens_per_expert;
        Ok((ops::add(&error, &ops::affine(&mixed.balance_loss()?, 0.01, 0.0)?)?, rows))
    }
}

fn batch(rank: usize, step: u64, device: &Device) -> TensorResult<(Tensor, Tensor)> {
    let key = RandomKey::new(step, rank as u32);
    let x: Vec<f32> = (0..128).map(|i| 2.0 * key.uniform(i) - 1.0).collect();
    let y: Vec<f32> = x.chunks(2).map(|pair| (3.0 * pair[0]).sin() * pair[1]).collect();
    Ok((Tensor::from_slice(&x, [64, 2], device)?, Tensor::from_slice(&y, [64, 1], device)?))
}

fn run(world: World) -> Result<(), Failure> {
    let (rank, ranks) = (world.rank(), world.size());
    let mesh = Mesh::new(world.clone(), ProcessTopology::new([("data", ranks)])?)?;
    let groups = mesh.expert(ranks, ExpertOrder::ExpertBeforeData)?;
    let init = Init::root();
    let model = Model::new(&init, &groups.expert)?;
    let mut options = Options::default();
    options.spread_experts(&mesh, groups)?;
    let setup = Setup::from_config(CONFIG, world, ferrospeed::cpu::device())?;
    let mut engine = initialize_model(&setup, &init.parameters(), options)?;
    let (mut first, mut last) = (None, f32::NAN);
    let mut rows = Vec::new();
    for step in 0..200 {
        let (x, y) = batch(rank, step, engine.device())?;
        let loss = engine.forward(|mode| {
            let (loss, used) = model.loss(&x, &y, mode)?;
            rows = used;
            Ok::<_, ferrospeed::tensor::TensorError>(loss)
        })?;
        engine.backward(&loss)?;
        engine.step()?;
        last = loss.item()?;
        first.get_or_insert(last);
    }
    println!("rank {rank}: loss {last:.4}, rows of each expert {rows:?}");
    // Without a capacity no token is dropped: 64 tokens with two experts each.
    let dropped = rows.iter().sum::<u64>() != 128;
    if dropped || last > first.unwrap_or(f32::NAN) / 3.0 {
        return Err(format!("the loss went from {first:?} to {last}, rows are {rows:?}").into());
    }
    Ok(())
}

fn main() -> Result<(), Failure> {
    run(init_distributed()?)
}

#[test]
fn experts_learn_on_one_rank_and_on_two() -> Result<(), Failure> {
    main()?;
    World::on_threads(2, run).into_iter().collect()
}
