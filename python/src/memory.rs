//! Memory that torch knows: types by name, DLPack capsules over ours, regions and tensors over theirs.
//!
//! An address that comes from Python is that of a contiguous tensor on the host, which the package has checked and keeps for as
//! long as the call, or which it hands over with the object that owns it.

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;
use std::sync::Arc;

use ferrospeed_comm::{DType as Sent, Region};
use ferrospeed_tensor::{DType, Tensor};
use pyo3::prelude::*;
use pyo3::{Py, PyAny, ffi};

use crate::errors::refused;

/// A type of numbers by torch's name, as what travels between ranks.
pub(crate) fn sent_type(name: &str) -> PyResult<Sent> {
    Ok(match name {
        "float32" => Sent::F32,
        "float64" => Sent::F64,
        "bfloat16" => Sent::BF16,
        "float16" => Sent::F16,
        "int8" => Sent::I8,
        "int16" => Sent::I16,
        "int32" => Sent::I32,
        "int64" => Sent::I64,
        "uint8" => Sent::U8,
        "bool" => Sent::Bool,
        _ => {
            return Err(refused(format!(
                "tensors of {name} do not travel between ranks; cast to a type that does"
            )));
        }
    })
}

/// A type of weights and gradients by torch's name.
pub(crate) fn weight_type(name: &str) -> PyResult<DType> {
    Ok(match name {
        "float32" => DType::F32,
        "bfloat16" => DType::BF16,
        "float16" => DType::F16,
        _ => {
            return Err(refused(format!(
                "a gradient of {name}: the model is in float32, bfloat16 or float16"
            )));
        }
    })
}

/// The same as torch has it.
pub(crate) fn torch_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "float32",
        DType::BF16 => "bfloat16",
        DType::F16 => "float16",
        DType::I64 => "int64",
        DType::I32 => "int32",
        DType::U8 => "uint8",
        DType::Bool => "bool",
    }
}

/// A tensor of torch's as a region that an operation works on.
///
/// # Safety
/// `address` is that of so many elements on the host, which stay and which nobody else touches until the operation is over.
pub(crate) unsafe fn region(address: usize, numel: usize, dtype: Sent) -> Region {
    // SAFETY: as the caller says.
    unsafe { Region::from_raw(address as *mut u8, numel * dtype.size(), Arc::new(())) }
}

/// Keeps an object of Python's alive. It is given back when the next call has Python's lock, not here.
struct Owner(#[expect(dead_code, reason = "it is kept, not looked at")] Py<PyAny>);

/// A gradient of torch's as one of ours, without a copy.
///
/// # Safety
/// `address` is that of a tensor of this shape and type on the host, which `owner` keeps and which nobody writes any more.
pub(crate) unsafe fn gradient(
    address: usize,
    like: &ferrospeed_tensor::Param,
    dtype: DType,
    device: &ferrospeed_tensor::Device,
    owner: Py<PyAny>,
) -> PyResult<Tensor> {
    let Some(pointer) = NonNull::new(address as *mut u8) else {
        // torch gives no memory to what has no elements.
        return Tensor::zeros(*like.shape(), dtype, device).map_err(crate::errors::of_tensor);
    };
    let category = ferrospeed_tensor::Category::Gradients;
    // SAFETY: as the caller says.
    Ok(unsafe {
        Tensor::from_external(pointer, *like.shape(), dtype, device, category, Arc::new(Owner(owner)))
    })
}

const CAPSULE: &CStr = c"dltensor";

/// `DLTensor` of DLPack 0.8 (Apache MXNet, TVM, PyTorch and others: github.com/dmlc/dlpack).
#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// `DLManagedTensor`.
#[repr(C)]
struct DlManaged {
    tensor: DlTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut DlManaged)>,
}

/// What a capsule holds: the header that others read, the shape it points to, and whatever keeps the memory.
struct Lending {
    managed: DlManaged,
    shape: Vec<i64>,
    _owner: Box<dyn Send>,
}

unsafe extern "C" fn delete(managed: *mut DlManaged) {
    // SAFETY: `context` is the box that this header lies in; whoever has the capsule calls this once.
    drop(unsafe { Box::from_raw((*managed).context.cast::<Lending>()) });
}

unsafe extern "C" fn end_capsule(capsule: *mut ffi::PyObject) {
    // SAFETY: Python ends a capsule of ours; one that was taken has another name, and belongs to who took it.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, CAPSULE.as_ptr()) == 1 {
            delete(ffi::PyCapsule_GetPointer(capsule, CAPSULE.as_ptr()).cast());
        }
    }
}

/// The memory of a tensor on the host as a DLPack capsule; `owner` goes when the last tensor over it has gone.
pub(crate) fn capsule(py: Python<'_>, tensor: &Tensor, owner: impl Send + 'static) -> PyResult<Py<PyAny>> {
    let (code, bits) = match tensor.dtype() {
        DType::F32 => (2, 32),
        DType::F16 => (2, 16),
        DType::BF16 => (4, 16),
        DType::I64 => (0, 64),
        DType::I32 => (0, 32),
        DType::U8 => (1, 8),
        DType::Bool => (6, 8),
    };
    let shape: Vec<i64> = tensor.shape().sizes().iter().map(|size| *size as i64).collect();
    let header = DlTensor {
        data: tensor.address().as_ptr().cast(),
        // The host.
        device_type: 1,
        device_id: 0,
        ndim: shape.len() as i32,
        code,
        bits,
        lanes: 1,
        shape: std::ptr::null_mut(),
        // None: contiguous.
        strides: std::ptr::null_mut(),
        byte_offset: 0,
    };
    let managed = DlManaged { tensor: header, context: std::ptr::null_mut(), deleter: Some(delete) };
    let lending = Box::into_raw(Box::new(Lending { managed, shape, _owner: Box::new(owner) }));
    // SAFETY: the box was just made, and nobody else knows it; the capsule takes it over.
    unsafe {
        (*lending).managed.tensor.shape = (*lending).shape.as_mut_ptr();
        (*lending).managed.context = lending.cast();
        let pointer = std::ptr::addr_of_mut!((*lending).managed).cast();
        let made = ffi::PyCapsule_New(pointer, CAPSULE.as_ptr(), Some(end_capsule));
        if made.is_null() {
            drop(Box::from_raw(lending));
        }
        Ok(Bound::from_owned_ptr_or_err(py, made)?.unbind())
    }
}
