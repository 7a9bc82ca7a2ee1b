//! How sharply the loss bends in each block: the largest eigenvalue of its Hessian, by power iteration.
//!
//! The tape has no second derivatives, so the Hessian times a vector is the difference of two gradients, a small step
//! along the vector to either side. In 16 bits such a step is rounded away, so this is for fp32 alone. Gradients of other
//! micro-batches must not be in the way, so blocks are measured before the first backward of a step: the weights are
//! those of its end.

use std::collections::BTreeSet;

use ferrospeed_config::Config;
use ferrospeed_nn::Mode;
use ferrospeed_optim::eigenvalue::{PowerIteration, relative};
use ferrospeed_tensor::random::{RandomKey, stream_of_name};
use ferrospeed_tensor::{DType, Param, Tensor, autograd};
use ferrospeed_zero::access::Which;

use crate::engine::Engine;
use crate::error::{EngineError, Result};

/// The step to either side, relative to the block's norm: far above the rounding of f32, far below its weights.
const RELATIVE_STEP: f64 = 1e-3;

/// The section `eigenvalue`, and what was measured by it.
pub(crate) struct Eigenvalues {
    iteration: PowerIteration,
    verbose: bool,
    /// Steps from one measurement to the next.
    every: u64,
    layer_name: String,
    /// How many blocks; 0 for all there are.
    layer_num: usize,
    /// Relative to the largest, by block; empty before the first measurement.
    measured: Vec<f64>,
    /// The last step in which they were measured.
    measured_in: Option<u64>,
    /// Whether it was said that nobody measures.
    missed: bool,
}

impl Eigenvalues {
    fn from_section(config: &Config) -> Eigenvalues {
        let section = config.section("eigenvalue").cloned().unwrap_or_default();
        let number = |key: &str, default: f64| section[key].as_f64().unwrap_or(default);
        Eigenvalues {
            iteration: PowerIteration {
                max_iterations: number("max_iter", 100.0) as usize,
                tolerance: number("tol", 1e-2),
                stability: number("stability", 1e-6),
            },
            verbose: section["verbose"] == true,
            every: (number("gas_boundary_resolution", 1.0) as u64).max(1),
            layer_name: section["layer_name"].as_str().unwrap_or("bert.encoder.layer").to_owned(),
            layer_num: number("layer_num", 0.0) as usize,
            measured: Vec::new(),
            measured_in: None,
            missed: false,
        }
    }

    /// What a run measures. Asking for blocks that are not there is refused before anything runs.
    pub(crate) fn of_run(config: &Config, dtype: DType, params: &[Param]) -> Result<Option<Eigenvalues>> {
        // A small change of 16-bit weights is rounded away.
        if !is_asked_for(config) || dtype != DType::F32 {
            return Ok(None);
        }
        let eigenvalues = Eigenvalues::from_section(config);
        eigenvalues.blocks(params)?;
        Ok(Some(eigenvalues))
    }

    /// The trained parameters of each block: `layer_num` of them, or all there are for 0.
    fn blocks(&self, params: &[Param]) -> Result<Vec<Vec<Param>>> {
        let name = &self.layer_name;
        let of_block = |index: usize| -> Vec<Param> {
            let path = format!("{name}.{index}.");
            let is_of_block = |param: &&Param| param.is_trainable() && param.name().starts_with(&path);
            params.iter().filter(is_of_block).cloned().collect()
        };
        let mut blocks: Vec<Vec<Param>> =
            (0..).map(of_block).take_while(|params| !params.is_empty()).collect();
        if blocks.is_empty() {
            let why = format!("no trained parameter lies below '{name}.0'; {}", numbered_modules(params));
            return Err(EngineError::Argument { what: "eigenvalue.layer_name", why });
        }
        if self.layer_num > blocks.len() {
            let why = format!(
                "there are {} blocks below '{name}', not {}; 0 measures all there are",
                blocks.len(),
                self.layer_num
            );
            return Err(EngineError::Argument { what: "eigenvalue.layer_num", why });
        }
        if self.layer_num > 0 {
            blocks.truncate(self.layer_num);
        }
        Ok(blocks)
    }
}

fn is_asked_for(config: &Config) -> bool {
    config.section("eigenvalue").is_some_and(|section| section["enabled"] == true)
}

/// Which modules of a model hold numbered blocks, as a hint.
fn numbered_modules(params: &[Param]) -> String {
    let mut found = BTreeSet::new();
    for param in params {
        let name = param.name();
        found.extend(name.match_indices(".0.").map(|(at, _)| &name[..at]));
    }
    if found.is_empty() {
        return "this model has no numbered blocks".to_owned();
    }
    let found: Vec<String> = found.iter().map(|module| format!("'{module}'")).collect();
    format!("numbered blocks lie below {}", found.join(", "))
}

impl Engine {
    /// With `eigenvalue` enabled, every `gas_boundary_resolution` steps: measures how sharply the loss bends in each block,
    /// as [`Engine::block_eigenvalues`], for [`Engine::eigenvalues`]. Otherwise does nothing, and returns `None`.
    ///
    /// All ranks call it before the first backward of every step, with the loss of the micro-batch that follows.
    pub fn update_eigenvalues<E: From<EngineError>>(
        &mut self,
        loss: impl FnMut(Mode) -> Result<Tensor, E>,
    ) -> Result<Option<&[f64]>, E> {
        if !self.eigenvalues_due() {
            return Ok(None);
        }
        let measured = self.block_eigenvalues(loss)?;
        let step = self.global_steps + 1;
        if self.world.rank() == 0 {
            tracing::debug!(step, ?measured, "eigenvalues of blocks");
        }
        Ok(self.eigenvalues.as_mut().map(|eigenvalues| {
            (eigenvalues.measured, eigenvalues.measured_in) = (measured, Some(step));
            eigenvalues.measured.as_slice()
        }))
    }

    /// Whether the step that is under way measures blocks and has not yet.
    fn eigenvalues_due(&self) -> bool {
        let step = self.global_steps + 1;
        self.eigenvalues.as_ref().is_some_and(|eigenvalues| {
            step.is_multiple_of(eigenvalues.every) && eigenvalues.measured_in != Some(step)
        })
    }

    /// Says once that a step should have measured blocks and did not.
    pub(crate) fn note_missed_eigenvalues(&mut self) {
        if !self.eigenvalues_due() {
            return;
        }
        let (step, rank) = (self.global_steps + 1, self.world.rank());
        if let Some(eigenvalues) = self.eigenvalues.as_mut().filter(|eigenvalues| !eigenvalues.missed) {
            eigenvalues.missed = true;
            if rank == 0 {
                tracing::warn!(
                    step,
                    "eigenvalue.enabled: nothing was measured; call Engine::update_eigenvalues before the first backward of a step"
                );
            }
        }
    }

    /// How sharply the loss bends in each block, relative to the sharpest: what [`Engine::update_eigenvalues`] found last.
    /// Empty before that, and when `eigenvalue` is not enabled.
    pub fn eigenvalues(&self) -> &[f64] {
        self.eigenvalues.as_ref().map_or(&[], |eigenvalues| &eigenvalues.measured)
    }

    /// The same, if it was measured in this step, counted from 1: what a monitor is told after the step.
    pub fn eigenvalues_of(&self, step: u64) -> &[f64] {
        let measured = self.eigenvalues.as_ref().filter(|eigenvalues| eigenvalues.measured_in == Some(step));
        measured.map_or(&[], |eigenvalues| &eigenvalues.measured)
    }

    /// The largest eigenvalue of each block's Hessian relative to the largest of all, by the section `eigenvalue`: blocks
    /// are the modules `layer_name.0`, `layer_name.1` and so on. `loss` is run some dozens of times for each block, on the same
    /// micro-batch; weights are as before afterwards. All ranks call it together, between steps.
    pub fn block_eigenvalues<E: From<EngineError>>(
        &mut self,
        mut loss: impl FnMut(Mode) -> Result<Tensor, E>,
    ) -> Result<Vec<f64>, E> {
        let section = Eigenvalues::from_section(&self.config);
        let blocks = self.measurable_blocks(&section)?;
        let tells = section.verbose && self.world.rank() == 0;
        let mut eigenvalues = Vec::with_capacity(blocks.len());
        for (index, params) in blocks.iter().enumerate() {
            let weights = self.full_of(params, Which::Weight)?;
            let step = RELATIVE_STEP * norm(&weights).max(1.0);
            let key =
                RandomKey { step: index as u32, ..RandomKey::new(self.seed(), stream_of_name("eigenvalue")) };
            let product = |vector: &[f32]| -> Result<Vec<f32>, E> {
                let ahead = self.gradient_at(params, &weights, vector, step, &mut loss)?;
                let behind = self.gradient_at(params, &weights, vector, -step, &mut loss)?;
                let slope = |(a, b): (f32, f32)| ((f64::from(a) - f64::from(b)) / (2.0 * step)) as f32;
                Ok(ahead.into_iter().zip(behind).map(slope).collect())
            };
            let tell = |round: usize, estimate: f64| {
                if tells {
                    tracing::info!("eigenvalue of block {index}: iteration {round} gives {estimate:e}");
                }
            };
            let found = section.iteration.largest(weights.len(), &key, product, tell);
            // Whatever happened, the weights are what they were, and nothing is left of the gradients.
            self.zero_grad();
            self.set_weights(params, &weights)?;
            eigenvalues.push(found?);
        }
        Ok(relative(&eigenvalues))
    }

    /// The blocks, if they can be measured now.
    fn measurable_blocks(&self, section: &Eigenvalues) -> Result<Vec<Vec<Param>>> {
        self.check_whole("block_eigenvalues")?;
        if self.store.dtype() != DType::F32 {
            let why = "a small change of 16-bit weights is rounded away; measure in fp32".to_owned();
            return Err(EngineError::Unsupported { key: "eigenvalue", why });
        }
        if self.is_evaluating() {
            let why = "the engine is evaluating; call train() first";
            return Err(EngineError::Order { call: "block_eigenvalues", why });
        }
        if self.store.has_gradients() {
            let why =
                "gradients wait for a step; measure before the first backward of a step, or call zero_grad";
            return Err(EngineError::Order { call: "block_eigenvalues", why });
        }
        section.blocks(self.store.params())
    }

    fn full_of(&self, params: &[Param], which: Which<'_>) -> Result<Vec<f32>> {
        let mut all = Vec::new();
        for param in params {
            all.extend(self.store.full(param, which)?);
        }
        Ok(all)
    }

    fn set_weights(&self, params: &[Param], weights: &[f32]) -> Result<()> {
        let mut rest = weights;
        let values = params.iter().map(|param| {
            let (now, later) = rest.split_at(param.numel());
            rest = later;
            (param, now)
        });
        Ok(self.store.set_full_weights(values)?)
    }

    /// The gradient of some parameters, averaged over ranks, at `weights + step × direction`.
    fn gradient_at<E: From<EngineError>>(
        &mut self,
        params: &[Param],
        weights: &[f32],
        direction: &[f32],
        step: f64,
        loss: &mut impl FnMut(Mode) -> Result<Tensor, E>,
    ) -> Result<Vec<f32>, E> {
        let moved: Vec<f32> = weights
            .iter()
            .zip(direction)
            .map(|(&weight, &along)| (f64::from(weight) + step * f64::from(along)) as f32)
            .collect();
        self.set_weights(params, &moved)?;
        let loss = self.run(loss)?;
        autograd::backward(&loss).map_err(EngineError::from)?;
        self.store.finish_backward().map_err(EngineError::from)?;
        let gradient = self.full_of(params, Which::Gradient)?;
        self.zero_grad();
        Ok(gradient)
    }
}

fn norm(values: &[f32]) -> f64 {
    values.iter().map(|&value| f64::from(value).powi(2)).sum::<f64>().sqrt()
}
