//! Copies: between host and device, within a device, and between types.

use crate::backend::{Mark, Memory};
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Category;
use crate::out::Out;
use crate::tensor::Tensor;

/// A copy to the host that was begun: call it for the bytes.
pub type ReadLater<'a> = Box<dyn FnOnce() -> Result<Vec<u8>> + 'a>;

/// Copies of a device.
pub trait Copies: Memory {
    /// Copies bytes in; `source` may be reused at once.
    fn copy_from_host(&self, source: &[u8], target: Out<'_>) -> Result<()>;
    /// Copies bytes out, after everything submitted before.
    fn copy_to_host(&self, source: &Tensor, target: &mut [u8]) -> Result<()>;
    /// Begins to copy a small tensor out. What is returned waits for what was submitted before this call, no more.
    fn read_later<'a>(&'a self, source: &Tensor) -> Result<ReadLater<'a>> {
        let mut bytes = vec![0; source.size_bytes()];
        self.copy_to_host(source, &mut bytes)?;
        Ok(Box::new(move || Ok(bytes)))
    }
    /// Memory of the host that the device can copy to and from beside its other work; `None` where any will do. See
    /// [`Device::locked`](crate::backend::Device::locked).
    fn locked(&self, _numel: usize, _dtype: DType, _category: Category) -> Result<Option<Tensor>> {
        Ok(None)
    }
    /// Begins a copy between a tensor of this device and one of [`Device::locked`](crate::backend::Device::locked), behind what was submitted before a mark;
    /// gives a mark behind the copy. See [`crate::beside::Beside`].
    fn copy_beside(&self, _source: &Tensor, _target: Out<'_>, _after: &Mark) -> Result<Mark> {
        Err(self.left_to_the_host("copy_beside"))
    }
    /// Copies between tensors of this device, same type and size.
    fn copy(&self, source: &Tensor, target: Out<'_>) -> Result<()>;
    /// Sets every element.
    fn fill(&self, target: Out<'_>, value: f32) -> Result<()>;
    /// Converts between types.
    fn cast(&self, source: &Tensor, target: Out<'_>) -> Result<()>;
}
