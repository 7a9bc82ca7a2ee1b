//! A store for tests: a value that nobody borrows turns into NaN.
//!
//! Whoever keeps a weight's tensor instead of its handle reads NaN here, and would read freed or foreign memory
//! under a partitioning store. Running a model on this store proves that it is fit for one.

use std::sync::{Arc, Mutex};

use crate::backend::Device;
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Category;
use crate::out::Out;
use crate::param::{Param, ParamStore, StoreError};
use crate::store::{ParamSource, PlainStore};
use crate::tensor::Tensor;

struct Resident {
    borrows: usize,
    value: Option<Tensor>,
}

/// See the module's documentation.
pub struct PoisonStore {
    vault: PlainStore,
    resident: Vec<Mutex<Resident>>,
}

impl PoisonStore {
    /// Attaches `params` to a new poisoning store.
    pub fn attach(
        params: &[Param],
        dtype: DType,
        device: &Device,
        source: &dyn ParamSource,
    ) -> Result<Arc<PoisonStore>> {
        let vault = PlainStore::detached(params, dtype, device, source)?;
        let resident = params.iter().map(|_| Mutex::new(Resident { borrows: 0, value: None })).collect();
        let store = Arc::new(PoisonStore { vault, resident });
        for (index, param) in params.iter().enumerate() {
            param.attach(store.clone(), index, dtype)?;
        }
        Ok(store)
    }

    /// The store underneath, with the true values and the gradients.
    pub fn vault(&self) -> &PlainStore {
        &self.vault
    }

    /// How many values are borrowed now; none between steps, or a guard has leaked.
    pub fn borrowed(&self) -> usize {
        (0..self.resident.len()).filter(|&index| self.lock(index).borrows > 0).count()
    }

    fn lock(&self, index: usize) -> std::sync::MutexGuard<'_, Resident> {
        self.resident[index].lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl ParamStore for PoisonStore {
    fn acquire(&self, index: usize) -> Result<Tensor, StoreError> {
        let truth = self.vault.acquire(index)?;
        let mut resident = self.lock(index);
        resident.borrows += 1;
        if let Some(value) = &resident.value {
            return Ok(value.clone());
        }
        let mut value =
            Tensor::empty_in(*truth.shape(), truth.dtype(), truth.device(), Category::Parameters)?;
        truth.device().backend().copy(&truth, value.out()?)?;
        resident.value = Some(value.clone());
        Ok(value)
    }

    fn release(&self, index: usize) {
        let mut resident = self.lock(index);
        resident.borrows -= 1;
        if resident.borrows == 0
            && let Some(value) = resident.value.take()
        {
            // SAFETY: no borrow is left. A handle that was kept against the rule is read later, if ever: that is the test.
            let target = unsafe { Out::vouched(&value) };
            let poisoned = value.device().backend().fill(target, f32::NAN);
            debug_assert!(poisoned.is_ok(), "filling a float tensor cannot fail");
        }
    }

    fn push_grad(&self, index: usize, gradient: Tensor) -> Result<(), StoreError> {
        self.vault.push_grad(index, gradient)
    }
}
