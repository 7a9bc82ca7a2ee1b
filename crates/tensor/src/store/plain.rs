//! Everything resident: all parameters are slices of one flat buffer.
//!
//! Parameters hold their store, so the store holds no parameters: with the last handle all memory is given back.

use std::sync::{Arc, Mutex};

use crate::autograd::accumulate;
use crate::backend::Device;
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Category;
use crate::out::Out;
use crate::param::{Param, ParamStore, StoreError};
use crate::store::ParamSource;
use crate::tensor::Tensor;

/// Elements that are converted at a time: copies of whole parameters would add to the peak, these stay in the cache, and
/// two threads have enough to do.
const CONVERTED_AT_ONCE: usize = 1 << 20;

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
            // SAFETY: the buffer is new, and parameters do not overlap.
            unsafe { load(source, param, &value)? };
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
///
/// # Safety
/// Nobody else reads or writes `value`.
unsafe fn load(source: &dyn ParamSource, param: &Param, value: &Tensor) -> Result<()> {
    let (numel, dtype, device) = (param.numel(), value.dtype(), value.device());
    if device.backend().is_host() && dtype == DType::F32 {
        // SAFETY: as the caller says.
        return source.load(param, 0..numel, unsafe { value.host_mut::<f32>()? });
    }
    let flat = value.view([numel])?;
    let mut staged = Tensor::empty([numel.min(CONVERTED_AT_ONCE)], DType::F32, device.host())?;
    for first in (0..numel).step_by(CONVERTED_AT_ONCE) {
        let count = CONVERTED_AT_ONCE.min(numel - first);
        let target = flat.slice(first, [count])?;
        // SAFETY: as the caller says.
        let target = unsafe { Out::vouched(&target) };
        let part = &mut staged.out()?.into_host::<f32>()?[..count];
        source.load(param, first..first + count, part)?;
        if device.backend().is_host() {
            device.backend().cast(&staged.slice(0, [count])?, target)?;
        } else {
            device.backend().copy(&Tensor::from_f32(part, [count], dtype, device)?, target)?;
        }
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
        // Whoever has taken the sum so far keeps it as it is.
        *slot = Some(match slot.take() {
            None => gradient,
            Some(held) => accumulate(held, gradient)?,
        });
        Ok(())
    }

    fn values_stay(&self) -> bool {
        true
    }
}
