//! Copies that run beside all other work of a device.
//!
//! They go between the device and page-locked memory of the host, which the device reads and writes by itself, on streams of
//! their own, one each way: neither the host's threads nor the device's kernels take part. A copy waits for what had been
//! submitted when its [`Moment`] was taken, and for nothing later.

use crate::backend::{Device, Mark};
use crate::error::{Result, TensorError};
use crate::out::Out;
use crate::tensor::Tensor;

/// A point in the work of a device that is no host.
pub struct Moment {
    device: Device,
    mark: Option<Mark>,
}

impl Moment {
    /// Behind everything submitted to the device so far; `None` where work is done when its call returns.
    pub fn now(device: &Device) -> Result<Option<Moment>> {
        let mark = device.backend().mark()?;
        Ok(mark.map(|mark| Moment { device: device.clone(), mark: Some(mark) }))
    }

    /// The device whose work it is in.
    pub fn device(&self) -> &Device {
        &self.device
    }
}

impl Drop for Moment {
    fn drop(&mut self) {
        if let Some(mark) = self.mark.take() {
            self.device.backend().unmark(mark);
        }
    }
}

/// A copy under way. It keeps what it reads and writes, and dropping it waits for its end.
#[must_use]
pub struct Beside {
    end: Moment,
    _source: Tensor,
    _target: Tensor,
}

impl Beside {
    /// Begins a copy between a tensor of the moment's device and one of [`Device::locked`], either
    /// way, of the same size.
    ///
    /// # Safety
    /// Until the copy has come to its end, nobody writes the source, and nobody reads or writes the target, but work of the
    /// device that follows it.
    pub unsafe fn begin(source: &Tensor, target: &Tensor, after: &Moment) -> Result<Beside> {
        if source.size_bytes() != target.size_bytes() {
            let what = format!("{source:?} and {target:?} differ in size");
            return Err(TensorError::argument("copy_beside", what));
        }
        let earlier = after.mark.as_ref().expect("a moment has its mark until it is dropped");
        // SAFETY: as the caller says.
        let mark = after.device.backend().copy_beside(source, unsafe { Out::vouched(target) }, earlier)?;
        let end = Moment { device: after.device.clone(), mark: Some(mark) };
        Ok(Beside { end, _source: source.clone(), _target: target.clone() })
    }

    /// Waits for its end.
    pub fn wait(self) -> Result<()> {
        self.wait_here()
    }

    /// Lets what is submitted to the device later wait for it, instead of the caller. The host may change what was copied
    /// only after it has waited for such later work.
    pub fn follow(mut self) -> Result<()> {
        let followed = self.lead();
        if let Some(mark) = self.end.mark.take() {
            self.end.device.backend().unmark(mark);
        }
        followed
    }

    /// The same for a copy that the caller will wait for, too.
    pub fn lead(&self) -> Result<()> {
        self.end.mark.as_ref().map_or(Ok(()), |mark| self.end.device.backend().follow(mark))
    }

    fn wait_here(&self) -> Result<()> {
        match &self.end.mark {
            Some(mark) => self.end.device.backend().wait_for(mark),
            None => Ok(()),
        }
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        // What the device failed of is told by the next call to it.
        let _ = self.wait_here();
    }
}
