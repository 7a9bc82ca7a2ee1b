//! How sharply the loss bends in each block: the largest eigenvalue of its Hessian, by power iteration.
//!
//! The tape has no second derivatives, so the Hessian times a vector is the difference of two gradients, a small step
//! along the vector to either side. In 16 bits such a step is rounded away, so this is for fp32 alone.

use ferrospeed_nn::Mode;
use ferrospeed_optim::eigenvalue::{PowerIteration, relative};
use ferrospeed_tensor::random::{RandomKey, stream_of_name};
use ferrospeed_tensor::{DType, Param, Tensor, TensorError, autograd};
use ferrospeed_zero::access::Which;

use crate::engine::Engine;
use crate::error::{EngineError, Result};

/// The step to either side, relative to the block's norm: far above the rounding of f32, far below its weights.
const RELATIVE_STEP: f64 = 1e-3;

impl Engine {
    /// The largest eigenvalue of each block's Hessian relative to the largest of all, by the section `eigenvalue`: blocks
    /// are the modules `layer_name.0`, `layer_name.1` and so on. `loss` is run some dozens of times for each block, on the same
    /// micro-batch; weights are as before afterwards. All ranks call it together, between steps.
    pub fn block_eigenvalues<E: From<TensorError> + Into<EngineError>>(
        &mut self,
        mut loss: impl FnMut(Mode) -> Result<Tensor, E>,
    ) -> Result<Vec<f64>> {
        let section = self.config().section("eigenvalue").cloned().unwrap_or_default();
        let number = |key: &str, default: f64| section[key].as_f64().unwrap_or(default);
        let iteration = PowerIteration {
            max_iterations: number("max_iter", 100.0) as usize,
            tolerance: number("tol", 1e-2),
            stability: number("stability", 1e-6),
        };
        let name = section["layer_name"].as_str().unwrap_or("bert.encoder.layer").to_owned();
        if self.store().dtype() != DType::F32 {
            let why = "a small change of 16-bit weights is rounded away; measure in fp32".to_owned();
            return Err(EngineError::Unsupported { key: "eigenvalue", why });
        }
        if self.store().has_gradients() {
            return Err(EngineError::Order {
                call: "block_eigenvalues",
                why: "gradients wait for a step; call step or zero_grad first",
            });
        }
        let blocks = self.blocks_under(&name, number("layer_num", 0.0) as usize);
        if blocks.is_empty() {
            let why = format!("no trained parameter lies below '{name}.0'");
            return Err(EngineError::Argument { what: "eigenvalue.layer_name", why });
        }
        let mut eigenvalues = Vec::with_capacity(blocks.len());
        for (index, params) in blocks.iter().enumerate() {
            let weights = self.full_of(params, Which::Weight)?;
            let step = RELATIVE_STEP * norm(&weights).max(1.0);
            let key =
                RandomKey { step: index as u32, ..RandomKey::new(self.seed(), stream_of_name("eigenvalue")) };
            let found = iteration.largest(weights.len(), &key, |vector| -> Result<Vec<f32>> {
                let ahead = self.gradient_at(params, &weights, vector, step, &mut loss)?;
                let behind = self.gradient_at(params, &weights, vector, -step, &mut loss)?;
                let slope = |(a, b): (f32, f32)| ((f64::from(a) - f64::from(b)) / (2.0 * step)) as f32;
                Ok(ahead.into_iter().zip(behind).map(slope).collect())
            });
            // Whatever happened, the weights are what they were.
            self.set_weights(params, &weights)?;
            eigenvalues.push(found?);
        }
        Ok(relative(&eigenvalues))
    }

    /// The trained parameters of `name.0`, `name.1` and so on: `count` of them, or all there are for 0.
    fn blocks_under(&self, name: &str, count: usize) -> Vec<Vec<Param>> {
        let of_block = |index: usize| -> Vec<Param> {
            let path = format!("{name}.{index}.");
            let params = self.store().params().iter();
            params.filter(|param| param.is_trainable() && param.name().starts_with(&path)).cloned().collect()
        };
        let blocks = (0..).map(of_block).take_while(|params| !params.is_empty());
        if count == 0 { blocks.collect() } else { blocks.take(count).collect() }
    }

    fn full_of(&self, params: &[Param], which: Which<'_>) -> Result<Vec<f32>> {
        let mut all = Vec::new();
        for param in params {
            all.extend(self.store().full(param, which)?);
        }
        Ok(all)
    }

    fn set_weights(&self, params: &[Param], weights: &[f32]) -> Result<()> {
        let mut rest = weights;
        for param in params {
            let (now, later) = rest.split_at(param.numel());
            self.store().set_full(param, Which::Weight, now)?;
            rest = later;
        }
        Ok(())
    }

    /// The gradient of some parameters, averaged over ranks, at `weights + step × direction`.
    fn gradient_at<E: From<TensorError> + Into<EngineError>>(
        &mut self,
        params: &[Param],
        weights: &[f32],
        direction: &[f32],
        step: f64,
        loss: &mut impl FnMut(Mode) -> Result<Tensor, E>,
    ) -> Result<Vec<f32>> {
        let moved: Vec<f32> = weights
            .iter()
            .zip(direction)
            .map(|(&weight, &along)| (f64::from(weight) + step * f64::from(along)) as f32)
            .collect();
        self.set_weights(params, &moved)?;
        let loss = self.forward(loss).map_err(Into::into)?;
        autograd::backward(&loss)?;
        self.store().finish_backward()?;
        let gradient = self.full_of(params, Which::Gradient)?;
        self.zero_grad();
        Ok(gradient)
    }
}

fn norm(values: &[f32]) -> f64 {
    values.iter().map(|&value| f64::from(value).powi(2)).sum::<f64>().sqrt()
}
