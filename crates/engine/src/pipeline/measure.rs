//! What layers take: the time and the memory that a division by `profile` or by `memory` evens out.
//!
//! Rank 0 runs a micro-batch through one layer of each kind, forward and backward, a few times; the others are told. Layers
//! are of one kind where class, shapes of parameters and shapes of what comes in are the same. So no more than one layer of
//! each kind need fit on a rank.

use std::time::Instant;

use ferrospeed_config::{Config, Stage};
use ferrospeed_nn::{Carried, Layer, Mode, Stages};
use ferrospeed_pipeline::partition::Measured;
use ferrospeed_tensor::store::{FromInitializers, PlainStore};
use ferrospeed_tensor::{Category, Device, Param, Shape, Tensor, autograd, random};

use crate::error::{EngineError, Result};
use crate::setup::{Setup, kept_type, model_type};

/// Runs of a layer; the fastest counts.
const RUNS: usize = 3;

/// What tells kinds of layers apart.
type Kind = (String, Vec<Shape>, Vec<Shape>);

/// Measures the layers of a model for [`Options::measured`](crate::Options::measured). All ranks call it together.
///
/// `scratch` is a model of the same configuration that is built for this alone, whole, and dropped afterwards; `batch` is a
/// micro-batch as the run will have them.
pub fn measure_layers<M: Stages>(setup: &Setup, scratch: &M, batch: &M::Batch) -> Result<Vec<Measured>> {
    let layers = scratch.layers();
    let mut numbers = vec![f64::NAN; 2 * layers.len()];
    let mut failed = None;
    if setup.world.rank() == 0 {
        let random = random::state();
        match measured(setup, scratch, &layers, batch) {
            Ok(found) => numbers = found.into_iter().flatten().collect(),
            Err(error) => failed = Some(error),
        }
        random::set_state(random);
    }
    setup.world.group().broadcast(&mut numbers, 0)?;
    if let Some(error) = failed {
        return Err(error);
    }
    if numbers.iter().any(|number| !number.is_finite()) {
        let why = "rank 0 could not measure the layers; see what it says".to_owned();
        return Err(EngineError::Argument { what: "pipeline.partition", why });
    }
    let state = |layer: &Layer| state_bytes(&setup.config, layer, setup.world.size());
    let measured = |(layer, numbers): (&Layer, &[f64])| Measured {
        seconds: numbers[0],
        state_bytes: state(layer),
        activation_bytes: numbers[1],
    };
    Ok(layers.iter().zip(numbers.chunks_exact(2)).map(measured).collect())
}

/// Bytes of weights, gradients and states of a layer on one rank, of `ranks`.
fn state_bytes(config: &Config, layer: &Layer, ranks: usize) -> f64 {
    let width = model_type(config).size_bytes();
    let kept = kept_type(config, model_type(config), true).size_bytes();
    let states = config.optimizer.as_ref().and_then(|optimizer| optimizer.states_per_parameter());
    let master = if width < 4 { 4.0 } else { 0.0 };
    let shares = if config.zero.stage == Stage::Off { 1 } else { ranks.max(1) };
    let states = (master + 4.0 * states.unwrap_or(2) as f64) / shares as f64;
    let of = |param: &Param| {
        let trained = if param.is_trainable() { kept as f64 + states } else { 0.0 };
        param.whole_shape().numel() as f64 * (width as f64 + trained)
    };
    layer.parameters.iter().map(of).sum()
}

/// Seconds and bytes of each layer.
fn measured<M: Stages>(
    setup: &Setup,
    model: &M,
    layers: &[Layer],
    batch: &M::Batch,
) -> Result<Vec<[f64; 2]>> {
    let mut kinds: Vec<(Kind, [f64; 2], Carried)> = Vec::new();
    let mut attached: Vec<Param> = Vec::new();
    let (mut carried, mut all) = (Carried::new(), Vec::with_capacity(layers.len()));
    for (index, layer) in layers.iter().enumerate() {
        let shapes = layer.parameters.iter().map(|param| *param.shape()).collect();
        let kind = (layer.class.clone(), shapes, carried.iter().map(|tensor| *tensor.shape()).collect());
        if let Some((_, numbers, outputs)) = kinds.iter().find(|(known, ..)| *known == kind) {
            all.push(*numbers);
            carried.clone_from(outputs);
            continue;
        }
        let is_new = |param: &&Param| !attached.iter().any(|known| known.is_same(param));
        let new: Vec<Param> = layer.parameters.iter().filter(is_new).cloned().collect();
        let source = FromInitializers { seed: setup.seed };
        let _ = PlainStore::attach(&new, model_type(&setup.config), &setup.device, &source)?;
        attached.extend(new);
        let (mut best, mut outputs) = ([f64::INFINITY; 2], Carried::new());
        for _ in 0..RUNS {
            let (numbers, made) = run(model, index, batch, &carried, &setup.device)?;
            best = [best[0].min(numbers[0]), numbers[1]];
            outputs = made;
        }
        all.push(best);
        kinds.push((kind, best, outputs.clone()));
        carried = outputs;
    }
    Ok(all)
}

/// One layer, there and back.
fn run<M: Stages>(
    model: &M,
    layer: usize,
    batch: &M::Batch,
    carried: &Carried,
    device: &Device,
) -> Result<([f64; 2], Carried)> {
    let track =
        |tensor: &Tensor| if tensor.dtype().is_float() { tensor.detach().tracked() } else { tensor.clone() };
    let inputs: Carried = carried.iter().map(track).collect();
    let before = device.memory_usage().current(Category::Activations);
    device.backend().synchronize()?;
    let start = Instant::now();
    let outputs = model.forward_range(layer..layer + 1, batch, inputs, Mode::Train)?;
    let kept = device.memory_usage().current(Category::Activations).saturating_sub(before);
    let roots = outputs.iter().filter(|output| output.requires_grad());
    let roots =
        roots.map(|output| Ok((output.clone(), Tensor::full(*output.shape(), 1.0, output.dtype(), device)?)));
    let roots: Vec<(Tensor, Tensor)> = roots.collect::<Result<_>>()?;
    autograd::backward_with(&roots)?;
    device.backend().synchronize()?;
    let seconds = start.elapsed().as_secs_f64();
    Ok(([seconds, kept as f64], outputs.iter().map(Tensor::detach).collect()))
}
