//! What torch sees of parameters: views of the store's own memory.
//!
//! Below stage 3 a parameter's values stay where they are, and the module looks at them for as long as it lives. The store cannot
//! know when it reads, so it is not told of a borrow, which would forbid every step: what keeps this sound is that steps, loads
//! and sets are calls of this module that end before Python goes on ([`crate::engine`] settles what a step has queued), and that all
//! ranks are in them together where they have the values in common.
//!
//! In stage 3 a view is a borrow: it is made when a module begins or a saved tensor is unpacked, the value is whole while any tensor
//! over it lives, and a step meanwhile is refused by the parameter's name.

use ferrospeed_tensor::{Param, Tensor, TensorError};
use ferrospeed_zero::ZeroStore;
use pyo3::prelude::*;

use crate::errors::{of_store, of_tensor};
use crate::memory::capsule;
use crate::waiting::detached;

/// The value of a parameter where it stays; `None` where it comes and goes.
pub(crate) fn lasting(py: Python<'_>, store: &ZeroStore, param: &Param) -> PyResult<Option<Py<PyAny>>> {
    // SAFETY: see the module's documentation; the package changes values through the engine alone, and its manual says so.
    let value = unsafe { store.unguarded(param) }.map_err(of_store)?;
    value.map(|value| capsule(py, &value, value.clone())).transpose()
}

/// The value of a parameter, borrowed for as long as a tensor over it lives.
pub(crate) fn borrowed(py: Python<'_>, param: &Param) -> PyResult<Py<PyAny>> {
    let value = detached(py, || param.read()).map_err(of_tensor)?;
    let tensor: Tensor = value.detach();
    capsule(py, &tensor, value)
}

/// Numbers that were computed for Python, in memory of their own.
pub(crate) fn owned(py: Python<'_>, values: Vec<f32>, shape: &[usize]) -> PyResult<Py<PyAny>> {
    let device = ferrospeed_cpu::device();
    let made = detached(py, || Tensor::from_slice(&values, shape_of(shape)?, &device)).map_err(of_tensor)?;
    capsule(py, &made, made.clone())
}

/// A shape that our tensors can have.
pub(crate) fn shape_of(sizes: &[usize]) -> Result<ferrospeed_tensor::Shape, TensorError> {
    if sizes.len() > ferrospeed_tensor::shape::MAX_DIMS {
        let most = ferrospeed_tensor::shape::MAX_DIMS;
        let why = format!("a parameter has {} dimensions, and there may be {most}: reshape it", sizes.len());
        return Err(TensorError::argument("initialize", why));
    }
    Ok(ferrospeed_tensor::Shape::new(sizes))
}
