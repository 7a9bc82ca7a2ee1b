//! Looking at and changing state that is spread over ranks. All ranks call these together, but for what is local.

use ferrospeed_tensor::Param;
use ferrospeed_zero::access::Which;
use pyo3::prelude::*;

use crate::engine::Engine;
use crate::errors::{of_store, refused};
use crate::views::owned;
use crate::waiting::detached;

/// Adds what is here to the module.
pub(crate) fn add(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(get_full, module)?)?;
    module.add_function(wrap_pyfunction!(set_full, module)?)?;
    module.add_function(wrap_pyfunction!(get_local, module)?)?;
    module.add_function(wrap_pyfunction!(set_local, module)?)
}

/// `weight`, `grad`, or the name of an optimizer's state.
fn which(name: &str) -> Which<'_> {
    match name {
        "weight" => Which::Weight,
        "grad" => Which::Gradient,
        state => Which::State(state),
    }
}

/// A whole value in f32, as a DLPack capsule.
#[pyfunction]
fn get_full(py: Python<'_>, engine: &Engine, index: usize, name: &str) -> PyResult<Py<PyAny>> {
    let param = engine.param(index)?;
    let values = detached(py, || engine.store.full(param, which(name))).map_err(of_store)?;
    owned(py, values, param.shape().sizes())
}

/// This rank's part of a value: where it begins in the parameter, and its numbers.
#[pyfunction]
fn get_local(py: Python<'_>, engine: &Engine, index: usize, name: &str) -> PyResult<(usize, Py<PyAny>)> {
    let param = engine.param(index)?;
    let (start, values) = detached(py, || engine.store.local(param, which(name))).map_err(of_store)?;
    let numel = values.len();
    Ok((start, owned(py, values, &[numel])?))
}

/// Numbers in f32 behind an address.
fn given(address: usize, numel: usize) -> PyResult<Vec<f32>> {
    if numel == 0 {
        return Ok(Vec::new());
    }
    if address == 0 {
        return Err(refused("a value needs memory"));
    }
    // SAFETY: the package gives the address of a contiguous f32 tensor of so many elements, which it keeps.
    Ok(unsafe { std::slice::from_raw_parts(address as *const f32, numel) }.to_vec())
}

/// Replaces a whole value by f32 numbers, the same on all ranks.
#[pyfunction]
fn set_full(
    py: Python<'_>,
    engine: &Engine,
    index: usize,
    name: &str,
    address: usize,
    numel: usize,
) -> PyResult<()> {
    let (param, values): (&Param, Vec<f32>) = (engine.param(index)?, given(address, numel)?);
    detached(py, || engine.store.set_full(param, which(name), &values)).map_err(of_store)
}

/// Replaces this rank's part of it.
#[pyfunction]
fn set_local(
    py: Python<'_>,
    engine: &Engine,
    index: usize,
    name: &str,
    address: usize,
    numel: usize,
) -> PyResult<()> {
    let (param, values): (&Param, Vec<f32>) = (engine.param(index)?, given(address, numel)?);
    detached(py, || engine.store.set_local(param, which(name), &values)).map_err(of_store)
}
