//! First values: those that a module's parameters have when it is handed over.

use std::collections::HashMap;
use std::ops::Range;

use ferrospeed_comm::{DType, World};
use ferrospeed_nn::LayerState;
use ferrospeed_tensor::store::ParamSource;
use ferrospeed_tensor::{Param, Result, TensorError};
use half::{bf16, f16};
use pyo3::{Py, PyAny, PyResult};

use crate::errors::of_comm;
use crate::memory::region;

/// A parameter of the module: its name, and where its values are.
pub(crate) struct Given {
    pub(crate) name: String,
    pub(crate) address: usize,
    pub(crate) numel: usize,
    pub(crate) dtype: DType,
}

/// All of them. The module keeps their memory until the engine is made.
pub(crate) struct FromModule(HashMap<String, Given>);

impl FromModule {
    /// # Safety
    /// Each address is that of so many elements on the host, which nobody touches while this lives.
    pub(crate) unsafe fn new(given: impl IntoIterator<Item = Given>) -> FromModule {
        FromModule(given.into_iter().map(|given| (given.name.clone(), given)).collect())
    }
}

/// Gives all ranks the values of rank 0, as DeepSpeed does: modules are made by each rank for itself.
///
/// # Safety
/// As [`FromModule::new`].
pub(crate) unsafe fn broadcast(world: &World, given: &[Given]) -> PyResult<()> {
    if world.size() == 1 {
        return Ok(());
    }
    let group = world.group();
    for of_type in [DType::F32, DType::F64, DType::BF16, DType::F16] {
        let those = given.iter().filter(|given| given.dtype == of_type && given.numel > 0);
        // SAFETY: as the caller says; every operation is over when this returns.
        let regions: Vec<_> =
            those.map(|given| unsafe { region(given.address, given.numel, of_type) }).collect();
        if !regions.is_empty() {
            group.broadcast_coalesced(&regions, of_type, 0).wait().map_err(of_comm)?;
        }
    }
    Ok(())
}

impl ParamSource for FromModule {
    fn load(&self, param: &Param, range: Range<usize>, out: &mut [f32]) -> Result<()> {
        let given = self.0.get(param.name()).filter(|given| given.numel == param.numel());
        let Some(given) = given else {
            return Err(TensorError::argument(
                "initialize",
                format!("the module has no parameter '{}'", param.name()),
            ));
        };
        if range.is_empty() {
            return Ok(());
        }
        // SAFETY: the range lies within the parameter, whose memory stays: see `FromModule::new`.
        unsafe {
            match given.dtype {
                DType::F32 => copy(given.address, range, out, |value: f32| value),
                DType::F64 => copy(given.address, range, out, |value: f64| value as f32),
                DType::BF16 => copy(given.address, range, out, bf16::to_f32),
                DType::F16 => copy(given.address, range, out, f16::to_f32),
                other => {
                    let why = format!(
                        "parameter '{}' is of {other}; parameters are of floating-point numbers",
                        given.name
                    );
                    return Err(TensorError::argument("initialize", why));
                }
            }
        }
        Ok(())
    }
}

/// # Safety
/// Elements `range` behind `address` are there, on the host.
unsafe fn copy<T: Copy>(address: usize, range: Range<usize>, out: &mut [f32], widen: impl Fn(T) -> f32) {
    // SAFETY: as the caller says.
    let values = unsafe { std::slice::from_raw_parts((address as *const T).add(range.start), range.len()) };
    values.iter().zip(out).for_each(|(value, out)| *out = widen(*value));
}

/// Numbers of a module that are no parameter, and are saved with it: a buffer's, as the package lays them down in f32.
#[derive(Debug)]
pub(crate) struct Buffer {
    address: usize,
    numel: usize,
    _owner: Py<PyAny>,
}

impl Buffer {
    /// # Safety
    /// `address` is that of so many f32 on the host, which `owner` keeps where they are. Whoever saves or loads does not touch them
    /// meanwhile.
    pub(crate) unsafe fn new(address: usize, numel: usize, owner: Py<PyAny>) -> Buffer {
        Buffer { address, numel, _owner: owner }
    }
}

impl LayerState for Buffer {
    fn values(&self) -> Vec<f32> {
        match self.numel {
            0 => Vec::new(),
            // SAFETY: see `Buffer::new`.
            numel => unsafe { std::slice::from_raw_parts(self.address as *const f32, numel) }.to_vec(),
        }
    }

    fn set(&self, values: &[f32]) -> Result<()> {
        if values.len() != self.numel {
            let why = format!("a buffer of {} numbers was saved with {}", self.numel, values.len());
            return Err(TensorError::argument("load_checkpoint", why));
        }
        if self.numel > 0 {
            // SAFETY: see `Buffer::new`.
            unsafe { std::slice::from_raw_parts_mut(self.address as *mut f32, self.numel) }
                .copy_from_slice(values);
        }
        Ok(())
    }
}
