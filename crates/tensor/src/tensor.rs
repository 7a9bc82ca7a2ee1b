//! The tensor: a shape over a slice of a reference-counted buffer, and its place on the tape.
//!
//! Tensors are contiguous and row-major. Cloning one is cheap and shares its bytes. Nothing here mutates a
//! tensor that somebody else can see ([`crate::out`]), with one exception: the owner of a flat buffer may write through
//! [`Tensor::host_mut`], which is `unsafe` for that reason.

use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::autograd::GradientSource;
use crate::backend::{Device, RawBlock};
use crate::borrow::Borrow;
use crate::dtype::{DType, Element, Float};
use crate::error::{Result, TensorError};
use crate::lent::Ticket;
use crate::memory::Category;
use crate::shape::Shape;

/// A block of device memory; freed, or given back to its owner, with the last tensor that looks at it.
pub(crate) struct Buffer {
    device: Device,
    block: RawBlock,
    category: Category,
    owner: Owner,
}

/// Whose the memory of a buffer is.
enum Owner {
    /// The device's pool's.
    Pool,
    /// Somebody else's, who is kept alive and may know others that look at it.
    External { _owner: Arc<dyn Any + Send + Sync> },
    /// A store's, which has lent it to this buffer alone and counts it itself.
    Store(Arc<Ticket>),
}

impl Drop for Buffer {
    fn drop(&mut self) {
        match self.owner {
            Owner::Pool => self.device.backend().free(self.block, self.category),
            Owner::External { .. } => {
                self.device.backend().uncount_external(self.block.capacity_bytes, self.category)
            }
            Owner::Store(_) => {}
        }
    }
}

/// An n-dimensional array. See the module's documentation.
#[derive(Clone)]
pub struct Tensor {
    buffer: Arc<Buffer>,
    offset_bytes: usize,
    shape: Shape,
    dtype: DType,
    source: Option<GradientSource>,
    /// Whose value it looks at, where a store has lent it.
    borrow: Option<Arc<Borrow>>,
}

impl Tensor {
    /// Memory with undefined content, counted in the thread's current category.
    pub fn empty(shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Tensor> {
        let tensor = Tensor::empty_in(shape, dtype, device, crate::backend::current_category())?;
        crate::profile::count_bytes(tensor.size_bytes());
        Ok(tensor)
    }

    /// Memory with undefined content, counted in `category`.
    pub fn empty_in(
        shape: impl Into<Shape>,
        dtype: DType,
        device: &Device,
        category: Category,
    ) -> Result<Tensor> {
        let shape = shape.into();
        let bytes = shape
            .sizes()
            .iter()
            .try_fold(dtype.size_bytes(), |bytes, &size| bytes.checked_mul(size))
            .ok_or_else(|| {
                TensorError::argument("allocate", format!("shape {shape} overflows the address space"))
            })?;
        let block = device.backend().allocate(bytes, category)?;
        let buffer = Buffer { device: device.clone(), block, category, owner: Owner::Pool };
        Ok(Tensor { buffer: Arc::new(buffer), offset_bytes: 0, shape, dtype, source: None, borrow: None })
    }

    /// Zeros.
    pub fn zeros(shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Tensor> {
        let mut tensor = Tensor::empty(shape, dtype, device)?;
        device.backend().fill(tensor.out()?, 0.0)?;
        Ok(tensor)
    }

    /// Zeros, counted in `category`.
    pub fn zeros_in(
        shape: impl Into<Shape>,
        dtype: DType,
        device: &Device,
        category: Category,
    ) -> Result<Tensor> {
        let mut tensor = Tensor::empty_in(shape, dtype, device, category)?;
        device.backend().fill(tensor.out()?, 0.0)?;
        Ok(tensor)
    }

    /// One value everywhere.
    pub fn full(shape: impl Into<Shape>, value: f32, dtype: DType, device: &Device) -> Result<Tensor> {
        let mut tensor = Tensor::empty(shape, dtype, device)?;
        device.backend().fill(tensor.out()?, value)?;
        Ok(tensor)
    }

    /// A tensor over memory that another crate owns (a communication segment, a mapped file).
    ///
    /// # Safety
    /// `pointer` is valid for reads and writes of the shape's bytes on `device` for as long as `owner` lives,
    /// aligned to the element, and written by nobody else while tensors over it are in use.
    pub unsafe fn from_external(
        pointer: NonNull<u8>,
        shape: impl Into<Shape>,
        dtype: DType,
        device: &Device,
        category: Category,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Tensor {
        let shape = shape.into();
        let bytes = shape.numel() * dtype.size_bytes();
        device.backend().count_external(bytes, category);
        // SAFETY: the caller's promise.
        unsafe { Tensor::over(pointer, bytes, shape, dtype, device, category, owner) }
    }

    /// The same over memory that is not the device's to count: what passes between it and a disk.
    ///
    /// # Safety
    /// As [`Tensor::from_external`].
    pub unsafe fn from_uncounted(
        pointer: NonNull<u8>,
        shape: impl Into<Shape>,
        dtype: DType,
        device: &Device,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Tensor {
        // SAFETY: the caller's promise.
        unsafe { Tensor::over(pointer, 0, shape.into(), dtype, device, Category::Buffers, owner) }
    }

    /// # Safety
    /// As [`Tensor::from_external`]; `counted_bytes` are counted already.
    unsafe fn over(
        pointer: NonNull<u8>,
        counted_bytes: usize,
        shape: Shape,
        dtype: DType,
        device: &Device,
        category: Category,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Tensor {
        let block = RawBlock { address: pointer, capacity_bytes: counted_bytes };
        let buffer =
            Buffer { device: device.clone(), block, category, owner: Owner::External { _owner: owner } };
        Tensor { buffer: Arc::new(buffer), offset_bytes: 0, shape, dtype, source: None, borrow: None }
    }

    /// Copies host values to a device.
    pub fn from_slice<T: Element>(values: &[T], shape: impl Into<Shape>, device: &Device) -> Result<Tensor> {
        let shape = shape.into();
        if shape.numel() != values.len() {
            return Err(TensorError::argument(
                "from_slice",
                format!("{} values do not fill the shape {shape}", values.len()),
            ));
        }
        let mut tensor = Tensor::empty(shape, T::DTYPE, device)?;
        device.backend().copy_from_host(bytemuck::cast_slice(values), tensor.out()?)?;
        Ok(tensor)
    }

    /// Copies f32 values to a device, rounding them to a float type.
    pub fn from_f32(
        values: &[f32],
        shape: impl Into<Shape>,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let tensor = Tensor::from_slice(values, shape, device)?;
        if dtype == DType::F32 { Ok(tensor) } else { crate::ops::cast(&tensor, dtype) }
    }

    /// A scalar.
    pub fn scalar(value: f32, device: &Device) -> Result<Tensor> {
        Tensor::from_slice(&[value], [], device)
    }

    /// The shape.
    #[inline]
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The sizes of the dimensions.
    #[inline]
    pub fn sizes(&self) -> &[usize] {
        self.shape.sizes()
    }

    /// The element type.
    #[inline]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The number of elements.
    #[inline]
    pub fn numel(&self) -> usize {
        self.shape.numel()
    }

    /// The number of bytes.
    #[inline]
    pub fn size_bytes(&self) -> usize {
        self.numel() * self.dtype.size_bytes()
    }

    /// Where it lives.
    #[inline]
    pub fn device(&self) -> &Device {
        &self.buffer.device
    }

    /// The same bytes, detached from the tape.
    pub fn detach(&self) -> Tensor {
        Tensor { source: None, ..self.clone() }
    }

    /// Whether backward would send a gradient here.
    pub fn requires_grad(&self) -> bool {
        self.source.is_some()
    }

    pub(crate) fn source(&self) -> Option<&GradientSource> {
        self.source.as_ref()
    }

    pub(crate) fn with_source(mut self, source: GradientSource) -> Tensor {
        self.source = Some(source);
        self
    }

    /// Whether no other tensor looks at this buffer, so that it may be overwritten.
    pub(crate) fn is_unshared(&self) -> bool {
        Arc::strong_count(&self.buffer) == 1 && !matches!(self.buffer.owner, Owner::External { .. })
    }

    /// The same bytes under a handle that knows no other: see [`crate::lent`].
    pub(crate) fn on_loan(&self, ticket: Arc<Ticket>) -> Tensor {
        let block = RawBlock { address: self.address(), capacity_bytes: self.size_bytes() };
        let (device, category) = (self.device().clone(), self.buffer.category);
        let buffer = Buffer { device, block, category, owner: Owner::Store(ticket) };
        Tensor {
            buffer: Arc::new(buffer),
            offset_bytes: 0,
            shape: self.shape,
            dtype: self.dtype,
            source: None,
            borrow: None,
        }
    }

    /// The same, and all that is made of it shares the borrow: see [`crate::borrow`].
    pub(crate) fn borrowed(self, borrow: Arc<Borrow>) -> Tensor {
        Tensor { borrow: Some(borrow), ..self }
    }

    /// The borrow that it shares.
    pub(crate) fn borrow(&self) -> Option<&Arc<Borrow>> {
        self.borrow.as_ref()
    }

    /// What was given with this memory, where it is lent.
    pub(crate) fn ticket(&self) -> Option<&Arc<Ticket>> {
        match &self.buffer.owner {
            Owner::Store(ticket) => Some(ticket),
            _ => None,
        }
    }

    /// The same bytes under another shape, off the tape. (`ops::reshape` is the recorded form.)
    pub fn view(&self, shape: impl Into<Shape>) -> Result<Tensor> {
        let shape = shape.into();
        if shape.numel() != self.numel() {
            return Err(TensorError::ShapeMismatch { op: "view", left: self.shape, right: shape });
        }
        Ok(Tensor { shape, source: None, ..self.clone() })
    }

    /// Elements `start..start + numel` of the flat tensor under a shape, sharing bytes, off the tape.
    pub fn slice(&self, start: usize, shape: impl Into<Shape>) -> Result<Tensor> {
        let shape = shape.into();
        if start.checked_add(shape.numel()).is_none_or(|end| end > self.numel()) {
            return Err(TensorError::argument(
                "slice",
                format!(
                    "elements {start}..{start}+{} lie outside a tensor of {}",
                    shape.numel(),
                    self.numel()
                ),
            ));
        }
        let offset_bytes = self.offset_bytes + start * self.dtype.size_bytes();
        Ok(Tensor { offset_bytes, shape, source: None, ..self.clone() })
    }

    /// Several tensors of one type that lie behind each other in one buffer, as one; `None` where they do not.
    pub(crate) fn joined(parts: &[&Tensor]) -> Option<Tensor> {
        let first = *parts.first()?;
        let mut end = first.offset_bytes;
        for part in parts {
            let follows = Arc::ptr_eq(&part.buffer, &first.buffer)
                && part.dtype == first.dtype
                && part.offset_bytes == end;
            if !follows {
                return None;
            }
            end += part.size_bytes();
        }
        let shape = Shape::from([parts.iter().map(|part| part.numel()).sum::<usize>()]);
        Some(Tensor { buffer: first.buffer.clone(), shape, source: None, ..first.clone() })
    }

    /// The address of the first element on its device.
    #[inline]
    pub fn address(&self) -> NonNull<u8> {
        // SAFETY: the offset lies inside the block: every constructor checks it.
        unsafe { self.buffer.block.address.add(self.offset_bytes) }
    }

    /// A handle that keeps the bytes alive, for a transfer in flight.
    pub fn keep_alive(&self) -> Arc<dyn Any + Send + Sync> {
        Arc::new(self.detach())
    }

    /// The values, copied to the host.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        self.expect_dtype::<T>("to_vec")?;
        let mut values = vec![T::zeroed(); self.numel()];
        self.device().backend().copy_to_host(self, bytemuck::cast_slice_mut(&mut values))?;
        Ok(values)
    }

    /// The values of a float tensor, copied to the host and widened.
    pub fn to_vec_f32(&self) -> Result<Vec<f32>> {
        match self.dtype {
            DType::F32 => self.to_vec::<f32>(),
            DType::BF16 => Ok(self.to_vec::<half::bf16>()?.into_iter().map(Float::widen).collect()),
            DType::F16 => Ok(self.to_vec::<half::f16>()?.into_iter().map(Float::widen).collect()),
            dtype => Err(TensorError::BadDType {
                op: "to_vec_f32",
                what: "the tensor",
                dtype,
                expected: "a float type",
            }),
        }
    }

    /// The single value of a float tensor with one element.
    pub fn item(&self) -> Result<f32> {
        match self.to_vec_f32()?.as_slice() {
            [value] => Ok(*value),
            _ => Err(TensorError::shape("item", "the tensor", self.shape, "one element")),
        }
    }

    /// [`Tensor::item`] begun now: what is returned waits for what was submitted before this call, no more.
    pub fn item_later(&self) -> Result<impl FnOnce() -> Result<f32> + '_> {
        if self.numel() != 1 {
            return Err(TensorError::shape("item", "the tensor", self.shape, "one element"));
        }
        let (dtype, read) = (self.dtype, self.device().backend().read_later(self)?);
        Ok(move || {
            let bytes = read()?;
            match dtype {
                DType::F32 => Ok(bytemuck::pod_read_unaligned(&bytes)),
                DType::BF16 => Ok(bytemuck::pod_read_unaligned::<half::bf16>(&bytes).widen()),
                DType::F16 => Ok(bytemuck::pod_read_unaligned::<half::f16>(&bytes).widen()),
                dtype => Err(TensorError::BadDType {
                    op: "item",
                    what: "the tensor",
                    dtype,
                    expected: "a float type",
                }),
            }
        })
    }

    /// The values in place. Waits for the device.
    #[inline]
    pub fn host<T: Element>(&self) -> Result<&[T]> {
        self.expect_dtype::<T>("host")?;
        self.expect_host("host")?;
        // SAFETY: the block holds numel elements of this type on the host, aligned by construction.
        Ok(unsafe { std::slice::from_raw_parts(self.address().as_ptr().cast(), self.numel()) })
    }

    /// The values in place, for writing.
    ///
    /// # Safety
    /// While the slice lives, nobody else reads or writes these elements: the caller owns this part of the
    /// buffer, and no kernel or transfer over it is in flight.
    #[expect(
        clippy::mut_from_ref,
        reason = "tensors share their buffer; the contract above is the borrow rule"
    )]
    #[inline]
    pub unsafe fn host_mut<T: Element>(&self) -> Result<&mut [T]> {
        self.expect_dtype::<T>("host_mut")?;
        self.expect_host("host_mut")?;
        // SAFETY: as for `host`; exclusiveness is the caller's promise.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.address().as_ptr().cast(), self.numel()) })
    }

    fn expect_dtype<T: Element>(&self, op: &'static str) -> Result<()> {
        // Booleans are stored as bytes.
        if self.dtype == T::DTYPE || (self.dtype == DType::Bool && T::DTYPE == DType::U8) {
            return Ok(());
        }
        Err(TensorError::BadDType { op, what: "the tensor", dtype: self.dtype, expected: T::DTYPE.name() })
    }

    fn expect_host(&self, op: &'static str) -> Result<()> {
        let backend = self.device().backend();
        if backend.is_host() {
            return Ok(());
        }
        Err(TensorError::Unsupported {
            op,
            device: backend.name(),
            why: "its memory is not the host's".into(),
        })
    }
}

impl std::fmt::Debug for Tensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tensor({}{} on {})", self.dtype, self.shape, self.device().backend().name())?;
        if let Some(source) = &self.source {
            write!(f, " from {}", source.name())?;
        }
        Ok(())
    }
}
