//! What kernels see in place of a parameter, where a model is trained to be compressed: its value in few bits, with zeros where it
//! is pruned.
//!
//! It lies between the store and whoever borrows a value, so that it holds for every use of a parameter alike, fused or not, in
//! forward, in backward and in what is computed again. What is kept, stepped and saved stays exact.

use std::sync::Arc;

use ferrospeed_tensor::{Param, Result, Tensor};

use crate::error::{Result as ZeroResult, ZeroError};
use crate::store::ZeroStore;

/// A view of a store's parameters, by their place among [`ZeroStore::params`]. It must not hold handles of them: they hold it.
pub trait Lens: Send + Sync {
    /// What is seen of a parameter with this value; `None`: the value itself.
    fn seen(&self, index: usize, exact: &Tensor) -> Result<Option<Tensor>>;
    /// Whether [`Lens::gradient`] makes something else of the gradients of a parameter. It stays so until the next step.
    fn changes_gradient(&self, index: usize) -> bool;
    /// The gradient of the value, from that of what is seen.
    fn gradient(&self, index: usize, gradient: Tensor) -> Result<Tensor>;
}

impl ZeroStore {
    /// From now on kernels see parameters through this; a second lens is refused.
    pub fn look_through(&self, lens: Arc<dyn Lens>) -> ZeroResult<()> {
        let taken = |_| ZeroError::Request("parameters are seen through a lens already".into());
        self.attached().lens.set(lens).map_err(taken)
    }

    /// The value of a parameter itself, in the type that kernels read. All ranks call it together.
    pub fn exact_as_read(&self, param: &Param) -> ZeroResult<Vec<f32>> {
        let index = self.index_of(param)?;
        self.attached().exact(index)
    }
}
