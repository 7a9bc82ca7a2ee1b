//! Tensors in memory that the ranks' peers can reach.

use std::ptr::NonNull;
use std::sync::Arc;

use ferrospeed_comm::{Group, Registered};
use ferrospeed_placement::Memory;
use ferrospeed_tensor::{Category, DType, Device, Tensor};

use crate::error::{Result, ZeroError};

/// Zeros in memory that others know as told. All ranks of the group call this together, so every rank takes part even if its
/// own share is empty.
///
/// Of what is common each rank writes its own part, and makes sure first that nobody reads any more: see
/// [`Group::allocate_shared`].
pub(crate) fn zeros(
    memory: Memory,
    group: &Group,
    numel: usize,
    dtype: DType,
    device: &Device,
    category: Category,
) -> Result<Tensor> {
    let bytes = (numel * dtype.size_bytes()).max(1);
    // Only memory of a host can be known to others.
    let memory = if device.backend().is_host() { memory } else { Memory::Own };
    let registered = match memory {
        Memory::Own => return Ok(Tensor::zeros_in([numel], dtype, device, category)?),
        Memory::Reached => group.allocate(bytes)?,
        Memory::Common => group.allocate_shared(bytes)?,
    };
    Ok(mapped(registered, numel, dtype, device, category))
}

/// Whether values that all of these ranks read exist once for all of them.
pub(crate) fn is_common(group: &Group, device: &Device) -> bool {
    group.size() > 1 && group.is_on_one_host() && device.backend().is_host()
}

/// A tensor over registered memory of its size.
fn mapped(registered: Registered, numel: usize, dtype: DType, device: &Device, category: Category) -> Tensor {
    let address = NonNull::new(registered.as_ptr()).expect("a mapping is never at address zero");
    // SAFETY: the registration gives at least as many zeroed, page-aligned bytes, which live as long as the owner, and
    // only this crate writes them: kernels between collectives, collectives between kernels.
    unsafe { Tensor::from_external(address, [numel], dtype, device, category, Arc::new(registered)) }
}

/// The part `start..start + len` of a flat tensor.
pub(crate) fn part(tensor: &Tensor, start: usize, len: usize) -> Result<Tensor> {
    tensor.slice(start, [len]).map_err(ZeroError::from)
}
