//! Matrix products, alone, side by side and by group of rows.

use crate::backend::{Activation, Memory};
use crate::error::Result;
use crate::out::{Out, Part};
use crate::shape::Shape;
use crate::tensor::Tensor;

/// A matrix operand of a product: `tensor` read from `offset` on, row-major with `row_stride`, or transposed.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a> {
    /// Where the elements are.
    pub tensor: &'a Tensor,
    /// The first element.
    pub offset: usize,
    /// Elements between rows as stored.
    pub row_stride: usize,
    /// Elements between matrices of a batch.
    pub batch_stride: usize,
    /// Whether the product uses the transpose of what is stored.
    pub transposed: bool,
}

impl<'a> Matrix<'a> {
    /// A whole tensor as one matrix of its last dimension's width.
    pub fn whole(tensor: &'a Tensor) -> Self {
        Matrix { tensor, offset: 0, row_stride: tensor.shape().last(), batch_stride: 0, transposed: false }
    }

    /// The same, transposed.
    pub fn transposed(tensor: &'a Tensor) -> Self {
        Matrix { transposed: true, ..Matrix::whole(tensor) }
    }
}

/// Where a product goes: memory from `offset` on, row-major with `row_stride`.
#[derive(Debug)]
pub struct MatrixOut<'a> {
    /// The memory.
    pub out: Out<'a>,
    /// The first element.
    pub offset: usize,
    /// Elements between rows.
    pub row_stride: usize,
    /// Elements between matrices of a batch.
    pub batch_stride: usize,
}

impl<'a> MatrixOut<'a> {
    /// All of an output as one matrix of its last dimension's width.
    pub fn whole(out: Out<'a>) -> Self {
        MatrixOut { offset: 0, row_stride: out.shape().last(), batch_stride: 0, out }
    }

    /// `count` matrices that follow each other in an output.
    pub fn each(out: Out<'a>, count: usize) -> Vec<Self> {
        let size = out.numel() / count.max(1);
        // SAFETY: one matrix ends where the next begins.
        let matrix = |at| MatrixOut { offset: at * size, ..MatrixOut::whole(unsafe { out.shared() }) };
        (0..count).map(matrix).collect()
    }

    /// As many elements from its first on as a shape has.
    pub fn part(self, shape: impl Into<Shape>) -> Result<Part<'a>> {
        self.out.part(self.offset, shape)
    }
}

/// `c = [c +] a·b`, then `+ bias` along rows, then an activation, then `+ residual`.
#[derive(Debug)]
pub struct Gemm<'a> {
    /// Rows of the result.
    pub m: usize,
    /// Columns of the result.
    pub n: usize,
    /// The summed dimension.
    pub k: usize,
    /// How many products.
    pub batch: usize,
    /// The left operand, m×k.
    pub a: Matrix<'a>,
    /// The right operand, k×n.
    pub b: Matrix<'a>,
    /// The result, m×n. Its type may be the operands' or f32.
    pub c: MatrixOut<'a>,
    /// Multiplies the product.
    pub alpha: f32,
    /// Whether the product is added to what `c` holds.
    pub accumulate: bool,
    /// Added to each row.
    pub bias: Option<&'a Tensor>,
    /// Applied after the bias; the value before it goes to `before_activation`.
    pub activation: Option<Activation>,
    /// Where the value before the activation is kept for backward.
    pub before_activation: Option<Out<'a>>,
}

impl<'a> Gemm<'a> {
    /// `c = a·b`, one product with nothing fused; `c` is contiguous.
    pub fn plain(m: usize, n: usize, k: usize, a: Matrix<'a>, b: Matrix<'a>, c: Out<'a>) -> Self {
        Gemm {
            m,
            n,
            k,
            batch: 1,
            a,
            b,
            c: MatrixOut { row_stride: n, ..MatrixOut::whole(c) },
            alpha: 1.0,
            accumulate: false,
            bias: None,
            activation: None,
            before_activation: None,
        }
    }
}

/// Finds the largest products of a vector with the rows of a matrix, without reading all of them; see [`Products::screen`].
pub trait Screen: Send {
    /// The rows of `weight`, the matrix that this was made of, whose products with `x` can be among the `count` largest:
    /// in order, each with its product, to the bits that the whole product by [`Products::gemm`] has in their type. All
    /// other products are less than at least `count` of these, and none is NaN.
    ///
    /// `None` where that cannot be told, or not of few rows: then the whole product has to be made.
    fn largest(&mut self, weight: &Tensor, x: &Tensor, count: usize) -> Result<Option<Vec<(usize, f32)>>>;
}

/// Matrix products of a device.
pub trait Products: Memory {
    /// Matrix product with fused epilogue.
    fn gemm(&self, gemm: Gemm<'_>) -> Result<()>;
    /// Several products; a device may compute those with the same few rows on the left at once.
    fn gemms(&self, products: Vec<Gemm<'_>>) -> Result<()> {
        products.into_iter().try_for_each(|product| self.gemm(product))
    }
    /// How many rows on the left are worth computing products with neighbouring weights as one, and taking its result apart; more
    /// than the first, at most the second. `None`: it never is.
    fn joined_rows(&self) -> Option<[usize; 2]> {
        None
    }
    /// A small copy of `weight`, `[rows, width]`, for finding its largest products with one vector at a time; the rows of
    /// `examples` are vectors such as will come. `None` where the device knows no better way than the whole product.
    fn screen(&self, _weight: &Tensor, _examples: &Tensor) -> Result<Option<Box<dyn Screen>>> {
        Ok(None)
    }
}
