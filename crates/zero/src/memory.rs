//! Tensors in memory that the ranks' peers can reach.

use std::ptr::NonNull;
use std::sync::Arc;

use ferrospeed_comm::{Group, Registered};
use ferrospeed_tensor::{Category, DType, Device, Tensor};

use crate::error::{Result, ZeroError};

/// Zeros that collectives read in place: registered memory when there are peers. All ranks of the group call this together.
pub(crate) fn reachable(
    group: &Group,
    numel: usize,
    dtype: DType,
    device: &Device,
    category: Category,
) -> Result<Tensor> {
    let bytes = numel * dtype.size_bytes();
    if group.size() == 1 || !device.backend().is_host() {
        return Ok(Tensor::zeros_in([numel], dtype, device, category)?);
    }
    // Collective, so every rank takes part even if its own share is empty.
    Ok(mapped(group.allocate(bytes.max(1))?, numel, dtype, device, category))
}

/// Zeros that every rank reads whole and of which each writes its own part: where all ranks are on one host they exist
/// once, so that gathering moves nothing. All ranks of the group call this together.
///
/// Whoever writes its part makes sure first that nobody reads any more: see [`Group::allocate_shared`].
pub(crate) fn common(
    group: &Group,
    numel: usize,
    dtype: DType,
    device: &Device,
    category: Category,
) -> Result<Tensor> {
    let bytes = numel * dtype.size_bytes();
    if !is_common(group, device) {
        return reachable(group, numel, dtype, device, category);
    }
    Ok(mapped(group.allocate_shared(bytes.max(1))?, numel, dtype, device, category))
}

/// Whether what [`common`] gives exists once for all ranks.
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
