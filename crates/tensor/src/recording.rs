//! Work that is recorded once and replayed: what CUDA calls a graph. It spares the host a launch per kernel.
//!
//! A replay does the same to the same memory as the recorded work did, so all that changes from one replay to the next lies
//! in tensors that the caller made before and holds on to: inputs are copied into them, results out of them.

use crate::backend::Device;
use crate::error::Result;

/// Recorded work of one device; forgotten when it is dropped.
#[derive(Debug)]
pub struct Recording {
    device: Device,
    number: u64,
}

impl Device {
    /// Records what `work` submits, without running it; `None` where the device cannot, or cannot this work: then
    /// `work` may have run in part or not at all, and has to be called each time.
    ///
    /// What `work` allocates it must drop; what else it touches must outlive the recording. It may not copy from or to
    /// the host, and nobody else may use the device while it runs.
    pub fn record(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Option<Recording>> {
        let number = self.backend().record(work)?;
        Ok(number.map(|number| Recording { device: self.clone(), number }))
    }
}

impl Recording {
    /// Submits the recorded work.
    pub fn replay(&self) -> Result<()> {
        self.device.backend().replay(self.number)
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        self.device.backend().forget(self.number);
    }
}
