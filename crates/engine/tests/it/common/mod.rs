//! The two models of the recorded trajectories, and a way to run ranks as threads.

pub(crate) mod disk;

use std::panic::resume_unwind;
use std::sync::Arc;

use ferrospeed_comm::World;
use ferrospeed_config::{AutoValues, Config};
use ferrospeed_engine::{Engine, Options, Setup, initialize_model};
use ferrospeed_nn::{Embedding, Init, LayerNorm, Linear, Parameters};
use ferrospeed_tensor::ops::{self, AttentionOptions, CrossEntropyOptions, PackedHeads};
use ferrospeed_tensor::store::ParamSource;
use ferrospeed_tensor::{DType, Device, Result, Tensor};
use ferrospeed_zero::ParamGroup;
use serde_json::Value;

/// One input of a model.
#[derive(Clone)]
pub(crate) enum Batch {
    /// For the perceptron.
    Regression { x: Tensor, y: Tensor },
    /// For the language model.
    Tokens(Tensor),
}

/// Either model.
#[derive(Clone)]
pub(crate) enum Model {
    Mlp(Arc<Mlp>),
    Lm(Arc<Lm>),
}

pub(crate) struct Mlp {
    layers: [Linear; 3],
}

pub(crate) struct Lm {
    tok: Embedding,
    pos: Embedding,
    blocks: Vec<Block>,
    lnf: LayerNorm,
    head: Linear,
    heads: usize,
}

struct Block {
    ln1: LayerNorm,
    qkv: Linear,
    proj: Linear,
    ln2: LayerNorm,
    up: Linear,
    down: Linear,
}

impl Model {
    /// From a recording's description.
    pub(crate) fn build(description: &Value) -> (Model, Parameters) {
        let init = Init::root();
        let size = |key: &str| description[key].as_u64().unwrap() as usize;
        let model = match description["kind"].as_str().unwrap() {
            "mlp" => {
                let d: Vec<usize> = description["d"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|v| v.as_u64().unwrap() as usize)
                    .collect();
                let layer = |i: usize| Linear::new(&init.at(format!("fc{}", i + 1)), d[i], d[i + 1], true);
                let layers = [layer(0), layer(1), layer(2)];
                if description["unused"].as_bool() == Some(true) {
                    Linear::new(&init.at("extra"), 3, 5, true);
                }
                Model::Mlp(Arc::new(Mlp { layers }))
            }
            "lm" => {
                let (vocab, dm) = (size("vocab"), size("dm"));
                let tok = Embedding::new(&init.at("tok"), vocab, dm, 0.1);
                let pos = Embedding::new(&init.at("pos"), size("tmax"), dm, 0.1);
                let norm = |init: &Init| LayerNorm::new(init, dm, 1e-5, true);
                let blocks = (0..size("nl"))
                    .map(|index| {
                        let at = init.at(format!("blocks.{index}"));
                        Block {
                            ln1: norm(&at.at("ln1")),
                            qkv: Linear::new(&at.at("qkv"), dm, 3 * dm, true),
                            proj: Linear::new(&at.at("proj"), dm, dm, true),
                            ln2: norm(&at.at("ln2")),
                            up: Linear::new(&at.at("up"), dm, 4 * dm, true),
                            down: Linear::new(&at.at("down"), 4 * dm, dm, true),
                        }
                    })
                    .collect();
                let lnf = norm(&init.at("lnf"));
                let head = Linear::new(&init.at("head"), dm, vocab, false);
                Model::Lm(Arc::new(Lm { tok, pos, blocks, lnf, head, heads: size("nh") }))
            }
            other => panic!("unknown model {other}"),
        };
        let parameters = init.parameters();
        if let Some(prefix) = description["freeze"].as_str() {
            assert!(parameters.freeze(&format!("{prefix}.*")) > 0);
        }
        (model, parameters)
    }

    pub(crate) fn loss(&self, batch: &Batch) -> Result<Tensor> {
        match (self, batch) {
            (Model::Mlp(mlp), Batch::Regression { x, y }) => mlp.loss(x, y),
            (Model::Lm(lm), Batch::Tokens(ids)) => lm.loss(ids),
            _ => panic!("the batch is for the other model"),
        }
    }
}

impl Mlp {
    fn loss(&self, x: &Tensor, y: &Tensor) -> Result<Tensor> {
        let [fc1, fc2, fc3] = &self.layers;
        let x = ops::cast(x, fc1.weight().dtype())?;
        let y = ops::cast(&ops::cast(y, fc1.weight().dtype())?, DType::F32)?;
        let hidden = ops::tanh(&fc2.forward(&ops::relu(&fc1.forward(&x)?)?)?)?;
        let out = ops::affine(&fc3.forward(&hidden)?, 1.5, 0.0)?;
        ops::mean(&ops::square(&ops::sub(&ops::cast(&out, DType::F32)?, &y)?)?)
    }
}

impl Lm {
    fn loss(&self, ids: &Tensor) -> Result<Tensor> {
        let (batch, tokens) = (ids.sizes()[0], ids.sizes()[1]);
        let device = ids.device();
        let places: Vec<i64> = (0..tokens as i64).collect();
        let places = Tensor::from_slice(&places, [tokens], device)?;
        let mut x = ops::add(&self.tok.forward(ids)?, &self.pos.forward(&places)?)?;
        for block in &self.blocks {
            let qkv = block.qkv.forward(&block.ln1.forward(&x)?)?;
            let options = AttentionOptions { causal: true, ..Default::default() };
            let mixed = ops::attention_packed(&qkv, self.heads, PackedHeads::Thirds, &options)?;
            x = ops::add(&x, &block.proj.forward(&mixed)?)?;
            let up = ops::gelu(&block.up.forward(&block.ln2.forward(&x)?)?)?;
            x = ops::add(&x, &block.down.forward(&up)?)?;
        }
        let logits = self.head.forward(&self.lnf.forward(&x)?)?;
        let logits = ops::narrow(&logits, 1, 0, tokens - 1)?;
        let all = ids.to_vec::<i64>()?;
        let targets: Vec<i64> = all.chunks(tokens).flat_map(|row| row[1..].to_vec()).collect();
        let targets = Tensor::from_slice(&targets, [batch * (tokens - 1)], device)?;
        ops::cross_entropy(&logits, &targets, CrossEntropyOptions::default())
    }
}

/// Runs `work` on every rank of a world of threads and returns what each gave, in order of rank.
pub(crate) fn on_ranks<R: Send + 'static>(
    ranks: usize,
    work: impl Fn(World) -> R + Send + Sync + 'static,
) -> Vec<R> {
    on_worlds(World::threads(ranks), work)
}

/// The same for ranks that are connected already.
pub(crate) fn on_worlds<R: Send + 'static>(
    worlds: Vec<World>,
    work: impl Fn(World) -> R + Send + Sync + 'static,
) -> Vec<R> {
    let work = Arc::new(work);
    let threads: Vec<_> = worlds
        .into_iter()
        .map(|world| {
            let work = work.clone();
            std::thread::spawn(move || work(world))
        })
        .collect();
    let outcome =
        |thread: std::thread::JoinHandle<R>| thread.join().unwrap_or_else(|panic| resume_unwind(panic));
    threads.into_iter().map(outcome).collect()
}

/// A resolved configuration for this many ranks.
pub(crate) fn config(value: &Value, ranks: usize) -> Config {
    try_config(value, ranks).unwrap_or_else(|error| panic!("{error}"))
}

/// The same, or why there is none.
pub(crate) fn try_config(value: &Value, ranks: usize) -> Result<Config, String> {
    let unresolved = Config::from_value("test", value).map_err(|error| error.to_string())?;
    let ranks = std::num::NonZeroU64::new(ranks as u64).unwrap();
    Ok(unresolved.resolve(ranks, &AutoValues::new()).map_err(|error| error.to_string())?.0)
}

/// A device of one's own: the CPU, or the first GPU with `FERROSPEED_TEST_DEVICE=cuda` in the environment.
pub(crate) fn device(threads: usize) -> Device {
    match std::env::var("FERROSPEED_TEST_DEVICE").as_deref() {
        Ok("cuda") => {
            ferrospeed_cuda::device(0, &ferrospeed_cpu::device()).unwrap_or_else(|error| panic!("{error}"))
        }
        _ => ferrospeed_cpu::with_threads(threads),
    }
}

/// An engine on one rank, with a device of its own so that memory is counted apart.
pub(crate) fn engine(
    world: World,
    value: &Value,
    parameters: &Parameters,
    groups: Option<Vec<ParamGroup>>,
    source: Option<&dyn ParamSource>,
    threads: usize,
) -> Engine {
    let config = config(value, world.size());
    let setup = Setup::new(config, world, device(threads));
    initialize_model(&setup, parameters, Options { groups, source, ..Default::default() })
        .unwrap_or_else(|error| panic!("{error}"))
}

/// What is compared of a tensor: all of it but the gradient of a key's bias, which is zero but for rounding, and which
/// Adam blows up to the size of a step.
pub(crate) fn meaningful(name: &str, values: &[f32]) -> Vec<f32> {
    let third = values.len() / 3;
    match name.ends_with("qkv.bias") {
        true => [&values[..third], &values[2 * third..]].concat(),
        false => values.to_vec(),
    }
}
