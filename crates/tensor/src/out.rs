//! Where a kernel writes: memory of which the caller has shown that nobody else looks at it.
//!
//! Tensors share their bytes, and [`Tensor::host`] lends them as a slice. A kernel that wrote through a `&Tensor` could change
//! such a slice under its reader. So kernels take an [`Out`] for each result, which can be had
//! - of a tensor that nobody else has a handle to, by [`Tensor::out`], which holds it by `&mut`;
//! - of any tensor in memory that is not the host's, by [`Out::of_device`]: no reference of this program leads there, and the
//!   device does its work in order;
//! - by [`Out::vouched`] for those who keep the rule themselves: stores that cut one buffer into parts.
//!
//! An `Out` is used up by the call that writes. What is given away twice does not compile:
//!
//! ```compile_fail
//! use ferrospeed_tensor::{DType, Tensor};
//!
//! let device = ferrospeed_cpu::device();
//! let mut x = Tensor::zeros([4], DType::F32, &device).unwrap();
//! let values = x.host::<f32>().unwrap();
//! device.backend().fill(x.out().unwrap(), 1.0).unwrap();
//! println!("{values:?}");
//! ```
//!
//! and a tensor that is seen by another handle is refused:
//!
//! ```
//! use ferrospeed_tensor::{DType, Tensor, TensorError};
//!
//! # fn main() -> ferrospeed_tensor::Result<()> {
//! let device = ferrospeed_cpu::device();
//! let mut x = Tensor::zeros([4], DType::F32, &device)?;
//! let other = x.clone();
//! assert!(matches!(x.out(), Err(TensorError::SharedOutput { .. })));
//! drop(other);
//! device.backend().fill(x.out()?, 1.0)?;
//! assert_eq!(x.host::<f32>()?, [1.0; 4]);
//! # Ok(())
//! # }
//! ```

use std::marker::PhantomData;
use std::ptr::NonNull;

use crate::backend::Device;
use crate::dtype::{DType, Element};
use crate::error::{Result, TensorError};
use crate::shape::Shape;
use crate::tensor::Tensor;

/// Memory for a kernel's result. See the module's documentation.
#[must_use]
pub struct Out<'a> {
    tensor: &'a Tensor,
}

impl<'a> Out<'a> {
    /// Any tensor of a device whose memory is not the host's.
    pub fn of_device(tensor: &'a Tensor) -> Result<Out<'a>> {
        let backend = tensor.device().backend();
        if backend.is_host() {
            let why = "others may be reading its memory; ask the tensor itself, by `Tensor::out`".into();
            return Err(TensorError::Unsupported { op: "write in place", device: backend.name(), why });
        }
        Ok(Out { tensor })
    }

    /// A tensor of which the caller knows what [`Tensor::out`] cannot see.
    ///
    /// # Safety
    /// Until the call that this is given to has returned, nobody else reads or writes these elements, and no slice of
    /// [`Tensor::host`] over them is used again. Two outputs of one call have no element in common.
    pub unsafe fn vouched(tensor: &'a Tensor) -> Out<'a> {
        Out { tensor }
    }

    /// The same memory for another output of one call.
    ///
    /// # Safety
    /// The outputs of a call have no element in common.
    pub unsafe fn shared(&self) -> Out<'a> {
        Out { tensor: self.tensor }
    }

    /// The same for one of several calls.
    pub fn again(&mut self) -> Out<'_> {
        Out { tensor: self.tensor }
    }

    /// Gives the right to write up: what has been written may be read.
    pub fn into_tensor(self) -> &'a Tensor {
        self.tensor
    }

    /// The tensor, where its memory is not the host's: no reference of this program leads there.
    ///
    /// # Panics
    /// When it is the host's: a bug of the kernel.
    pub fn on_device(&self) -> &'a Tensor {
        assert!(!self.tensor.device().backend().is_host(), "{self:?} may be read by others");
        self.tensor
    }

    /// Elements `start..start + numel` of the flat output, under a shape.
    pub fn part(self, start: usize, shape: impl Into<Shape>) -> Result<Part<'a>> {
        Ok(Part { view: self.tensor.slice(start, shape)?, whole: PhantomData })
    }

    /// The shape.
    pub fn shape(&self) -> &'a Shape {
        self.tensor.shape()
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.tensor.dtype()
    }

    /// The number of elements.
    pub fn numel(&self) -> usize {
        self.tensor.numel()
    }

    /// The number of bytes.
    pub fn size_bytes(&self) -> usize {
        self.tensor.size_bytes()
    }

    /// Where it lives.
    pub fn device(&self) -> &'a Device {
        self.tensor.device()
    }

    /// The address of the first element on its device.
    pub fn address(&self) -> NonNull<u8> {
        self.tensor.address()
    }

    /// The elements, where they are the host's.
    pub fn into_host<T: Element>(self) -> Result<&'a mut [T]> {
        // SAFETY: that nobody else reads or writes them is what this type says.
        unsafe { self.tensor.host_mut() }
    }
}

/// Some elements of an output: see [`Out::part`].
pub struct Part<'a> {
    view: Tensor,
    whole: PhantomData<Out<'a>>,
}

impl Part<'_> {
    /// As the place of a kernel's result.
    pub fn out(&mut self) -> Out<'_> {
        Out { tensor: &self.view }
    }
}

impl std::fmt::Debug for Out<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Out({:?})", self.tensor)
    }
}

impl Tensor {
    /// This tensor as the place of a kernel's result; an error where another handle sees the memory it lies in.
    pub fn out(&mut self) -> Result<Out<'_>> {
        if !self.is_unshared() {
            return Err(TensorError::SharedOutput { tensor: format!("{self:?}") });
        }
        Ok(Out { tensor: self })
    }
}
