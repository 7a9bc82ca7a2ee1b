//! Everything resident: all parameters are slices of one flat buffer.
//!
//! Parameters hold their store, so the store holds no parameters: with the last handle all memory is given back.

use std::sync::{Arc, Mutex};

use crate::backend::Device;
use crate::cpu;
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Category;
use crate::param::{Param, ParamStore, StoreError};
use crate::store::ParamSource;
use crate::tensor::Tensor;

/// Elements that are loaded at a time: copies of whole parameters would add to the peak, these stay in the cache.
const LOADED_AT_ONCE: usize = 256 << 10;

/// The store without a policy.
pub struct PlainStore {
    values: Vec<Tensor>,
    flat: Tensor,
    gradients: Mutex<Vec<Option<Tensor>>>,
}

impl PlainStore {
    /// Allocates one flat buffer for `params`, fills it from `source` and attaches the parameters.
    pub fn attach(
        params: &[Param],
        dtype: DType,
        device: &Device,
        source: &dyn ParamSource,
    ) -> Result<Arc<PlainStore>> {
        let store = Arc::new(PlainStore::detached(params, dtype, device, source)?);
        for (index, param) in params.iter().enumerate() {
            param.attach(store.clone(), index, dtype)?;
        }
        Ok(store)
    }

    /// The same without attaching: another store may stand in front.
    pub(crate) fn detached(
        params: &[Param],
        dtype: DType,
        device: &Device,
        source: &dyn ParamSource,
    ) -> Result<PlainStore> {
        let total = params.iter().map(Param::numel).sum::<usize>();
        let flat = Tensor::empty_in([total], dtype, device, Category::Parameters)?;
        let mut values = Vec::with_capacity(params.len());
        let mut start = 0;
        for param in params {
            let value = flat.slice(start, *param.shape())?;
            load(source, param, &value)?;
            values.push(value);
            start += param.numel();
        }
        Ok(PlainStore { values, flat, gradients: Mutex::new(vec![None; params.len()]) })
    }

    /// The whole flat buffer.
    pub fn flat(&self) -> &Tensor {
        &self.flat
    }

    /// The gradient of one parameter, if backward has produced one.
    pub fn gradient(&self, index: usize) -> Option<Tensor> {
        self.lock()[index].clone()
    }

    /// Takes all gradients out.
    pub fn take_gradients(&self) -> Vec<Option<Tensor>> {
        let mut gradients = self.lock();
        std::mem::replace(&mut *gradients, vec![None; self.values.len()])
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Option<Tensor>>> {
        self.gradients.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// Fills `value`: in place where it is f32 on the host, else by parts that are converted on their way.
fn load(source: &dyn ParamSource, param: &Param, value: &Tensor) -> Result<()> {
    let (numel, dtype, device) = (param.numel(), value.dtype(), value.device());
    if device.backend().is_host() && dtype == DType::F32 {
        return source.load(param, 0..numel, cpu::write::<f32>(value));
    }
    let flat = value.view([numel])?;
    let mut part = vec![0.0; numel.min(LOADED_AT_ONCE)];
    for first in (0..numel).step_by(LOADED_AT_ONCE) {
        let part = &mut part[..LOADED_AT_ONCE.min(numel - first)];
        source.load(param, first..first + part.len(), part)?;
        let staged = Tensor::from_f32(part, [part.len()], dtype, device)?;
        device.backend().copy(&staged, &flat.slice(first, [part.len()])?)?;
    }
    Ok(())
}

impl ParamStore for PlainStore {
    fn acquire(&self, index: usize) -> Result<Tensor, StoreError> {
        Ok(self.values[index].clone())
    }

    fn release(&self, _index: usize) {}

    fn push_grad(&self, index: usize, gradient: Tensor) -> Result<(), StoreError> {
        let slot = &mut self.lock()[index];
        match slot {
            None => *slot = Some(gradient),
            Some(held) => held.device().backend().add_assign(held, &gradient)?,
        }
        Ok(())
    }

    fn values_stay(&self) -> bool {
        true
    }
}
