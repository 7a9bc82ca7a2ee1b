//! Shapes of contiguous, row-major tensors.

use crate::error::{Result, TensorError};

/// The largest number of dimensions a tensor may have.
pub const MAX_DIMS: usize = 8;

/// The sizes of a tensor's dimensions, held inline.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    sizes: [usize; MAX_DIMS],
    dims: u8,
}

impl Shape {
    /// A shape from its sizes.
    ///
    /// # Panics
    /// With more than [`MAX_DIMS`] dimensions: no op of ours makes such a tensor, and file readers check before.
    pub fn new(sizes: &[usize]) -> Self {
        assert!(sizes.len() <= MAX_DIMS, "a tensor has at most {MAX_DIMS} dimensions, got {sizes:?}");
        let mut held = [1; MAX_DIMS];
        held[..sizes.len()].copy_from_slice(sizes);
        Shape { sizes: held, dims: sizes.len() as u8 }
    }

    /// The sizes, outermost first.
    #[inline]
    pub fn sizes(&self) -> &[usize] {
        &self.sizes[..usize::from(self.dims)]
    }

    /// How many dimensions there are.
    #[inline]
    pub fn dims(&self) -> usize {
        usize::from(self.dims)
    }

    /// How many elements there are (1 for a scalar).
    #[inline]
    pub fn numel(&self) -> usize {
        self.sizes().iter().product()
    }

    /// The size of the last dimension (1 for a scalar).
    #[inline]
    pub fn last(&self) -> usize {
        self.sizes().last().copied().unwrap_or(1)
    }

    /// The product of all but the last dimension.
    #[inline]
    pub fn rows(&self) -> usize {
        let dims = self.dims();
        if dims == 0 { 1 } else { self.sizes[..dims - 1].iter().product() }
    }

    /// Elements between neighbours along each dimension.
    pub fn strides(&self) -> Vec<usize> {
        let mut strides = vec![1; self.dims()];
        for dim in (1..self.dims()).rev() {
            strides[dim - 1] = strides[dim] * self.sizes[dim];
        }
        strides
    }

    /// The shape with its last dimension replaced.
    pub fn with_last(&self, size: usize) -> Shape {
        let mut shape = *self;
        let dims = shape.dims();
        assert!(dims > 0, "a scalar has no last dimension");
        shape.sizes[dims - 1] = size;
        shape
    }

    /// The common shape of two operands under broadcasting: aligned at the last dimension, sizes equal or 1.
    pub fn broadcast(op: &'static str, left: &Shape, right: &Shape) -> Result<Shape> {
        let dims = left.dims().max(right.dims());
        let mut sizes = [1; MAX_DIMS];
        for back in 1..=dims {
            let l = if back <= left.dims() { left.sizes[left.dims() - back] } else { 1 };
            let r = if back <= right.dims() { right.sizes[right.dims() - back] } else { 1 };
            sizes[dims - back] = match (l, r) {
                (l, r) if l == r => l,
                (1, r) => r,
                (l, 1) => l,
                _ => return Err(TensorError::ShapeMismatch { op, left: *left, right: *right }),
            };
        }
        Ok(Shape { sizes, dims: dims as u8 })
    }
}

impl std::fmt::Debug for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.sizes())
    }
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.sizes())
    }
}

impl From<&[usize]> for Shape {
    fn from(sizes: &[usize]) -> Self {
        Shape::new(sizes)
    }
}

impl<const N: usize> From<[usize; N]> for Shape {
    fn from(sizes: [usize; N]) -> Self {
        Shape::new(&sizes)
    }
}

impl From<&Vec<usize>> for Shape {
    fn from(sizes: &Vec<usize>) -> Self {
        Shape::new(sizes)
    }
}

impl std::ops::Index<usize> for Shape {
    type Output = usize;
    fn index(&self, dim: usize) -> &usize {
        &self.sizes()[dim]
    }
}
