//! Graphs that go backward more than once.
//!
//! A node's closure reads what it saved, so it can run again. Some write over it, which saves memory: what they write over is
//! an [`Own`] tensor, which they get themselves in the last pass and a copy of in the passes before.

use std::cell::Cell;
use std::sync::Mutex;

use crate::autograd::lock;
use crate::error::{Result, TensorError};
use crate::tensor::Tensor;

thread_local! {
    static RETAINING: Cell<bool> = const { Cell::new(false) };
}

/// Whether the pass under way on this thread leaves the graph as it is.
pub(super) fn is_retaining() -> bool {
    RETAINING.get()
}

/// Runs a pass that leaves the graph as it is, or does not; passes nest.
pub(super) fn with_retaining<R>(retaining: bool, pass: impl FnOnce() -> R) -> R {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            RETAINING.set(self.0);
        }
    }
    let _restore = Restore(RETAINING.replace(retaining));
    pass()
}

/// A tensor that its node alone holds, and writes over in backward.
pub struct Own(Mutex<Option<Tensor>>);

impl Own {
    /// Takes it in.
    pub fn new(tensor: Tensor) -> Own {
        Own(Mutex::new(Some(tensor)))
    }

    /// The tensor, to write over and to drop as soon as it is done with.
    pub fn take(&self) -> Result<Tensor> {
        let mut held = lock(&self.0);
        let Some(tensor) = held.take() else { return Err(TensorError::GraphFreed { node: "saved value" }) };
        if is_retaining() {
            let mut copy = Tensor::empty(*tensor.shape(), tensor.dtype(), tensor.device())?;
            tensor.device().backend().copy(&tensor, copy.out()?)?;
            *held = Some(tensor);
            return Ok(copy);
        }
        Ok(tensor)
    }
}
