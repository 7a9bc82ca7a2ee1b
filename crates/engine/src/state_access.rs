//! Weights, gradients and optimizer states that are spread over ranks, under the names that DeepSpeed has for looking at them.
//!
//! What is full is the same on every rank, and all ranks call these together; what is local is this rank's own part.

use ferrospeed_tensor::Param;
use ferrospeed_zero::access::Which;

use crate::engine::Engine;
use crate::error::Result;

/// The f32 weights of a parameter, whole.
pub fn safe_get_full_fp32_param(engine: &Engine, param: &Param) -> Result<Vec<f32>> {
    Ok(engine.store().full(param, Which::Weight)?)
}

/// The averaged gradient of a parameter, whole, between the last backward of a step and the step. It is multiplied by the
/// loss scale.
pub fn safe_get_full_grad(engine: &Engine, param: &Param) -> Result<Vec<f32>> {
    Ok(engine.store().full(param, Which::Gradient)?)
}

/// A state of the optimizer, such as `exp_avg`, whole.
pub fn safe_get_full_optimizer_state(engine: &Engine, param: &Param, state: &str) -> Result<Vec<f32>> {
    Ok(engine.store().full(param, Which::State(state))?)
}

/// Replaces the weights of a parameter by a whole value, which is the same on every rank.
pub fn safe_set_full_fp32_param(engine: &Engine, param: &Param, value: &[f32]) -> Result<()> {
    Ok(engine.store().set_full(param, Which::Weight, value)?)
}

/// Replaces a state of the optimizer by a whole value, which is the same on every rank.
pub fn safe_set_full_optimizer_state(
    engine: &Engine,
    param: &Param,
    value: &[f32],
    state: &str,
) -> Result<()> {
    Ok(engine.store().set_full(param, Which::State(state), value)?)
}

/// This rank's part of a parameter's f32 weights: the element that it begins with, and its values.
pub fn safe_get_local_fp32_param(engine: &Engine, param: &Param) -> Result<(usize, Vec<f32>)> {
    Ok(engine.store().local(param, Which::Weight)?)
}

/// This rank's part of a parameter's averaged gradient.
pub fn safe_get_local_grad(engine: &Engine, param: &Param) -> Result<(usize, Vec<f32>)> {
    Ok(engine.store().local(param, Which::Gradient)?)
}

/// This rank's part of a state of the optimizer.
pub fn safe_get_local_optimizer_state(
    engine: &Engine,
    param: &Param,
    state: &str,
) -> Result<(usize, Vec<f32>)> {
    Ok(engine.store().local(param, Which::State(state))?)
}

/// Replaces this rank's part of a parameter's f32 weights. All ranks call it together, each with its own part, and kernels see
/// the new weights at once.
pub fn safe_set_local_fp32_param(engine: &Engine, param: &Param, value: &[f32]) -> Result<()> {
    Ok(engine.store().set_local(param, Which::Weight, value)?)
}

/// Replaces this rank's part of a state of the optimizer.
pub fn safe_set_local_optimizer_state(
    engine: &Engine,
    param: &Param,
    value: &[f32],
    state: &str,
) -> Result<()> {
    Ok(engine.store().set_local(param, Which::State(state), value)?)
}
