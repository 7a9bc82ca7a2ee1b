//! Products of tensors, one for each of their leading dimensions.

use crate::autograd::{needs_grad, record};
use crate::backend::{Gemm, Matrix};
use crate::error::{Result, TensorError};
use crate::ops::expect_same_dtype;
use crate::ops::linear::{WeightLayout, linear};
use crate::out::Out;
use crate::param::Operand;
use crate::profile;
use crate::tensor::Tensor;

/// Matrix product of the last two dimensions; the dimensions before are equal, or absent on the right.
pub fn matmul(a: impl Into<Operand>, b: impl Into<Operand>) -> Result<Tensor> {
    let (a, b) = (a.into(), b.into());
    let (left, right) = (*a.shape(), *b.shape());
    let mismatch = || TensorError::ShapeMismatch { op: "matmul", left, right };
    expect_same_dtype("matmul", "the right operand", b.dtype(), a.dtype())?;
    crate::ops::expect_float("matmul", "the operands", a.dtype())?;
    if left.dims() < 2 || right.dims() < 2 || left.last() != right[right.dims() - 2] {
        return Err(mismatch());
    }
    if right.dims() == 2 {
        return linear(a, b, None, WeightLayout::InOut);
    }
    let dims = left.dims();
    if dims != right.dims() || left.sizes()[..dims - 2] != right.sizes()[..dims - 2] {
        return Err(mismatch());
    }
    let (m, k, n) = (left[dims - 2], left.last(), right.last());
    let batch = left.sizes()[..dims - 2].iter().product::<usize>();
    let y = {
        let (a, b) = (a.read()?, b.read()?);
        let mut y = Tensor::empty(left.with_last(n), a.dtype(), a.device())?;
        batched(batch, m, n, k, &a, false, &b, false, y.out()?)?;
        y
    };
    if !needs_grad(&[&a, &b]) {
        return Ok(y);
    }
    let (saved_a, saved_b) = (a.saved(), b.saved());
    Ok(record("matmul", &[&a, &b], y, move |dy| {
        let (a, b) = (saved_a.read()?, saved_b.read()?);
        let mut da = Tensor::empty(*a.shape(), a.dtype(), a.device())?;
        batched(batch, m, k, n, &dy, false, &b, true, da.out()?)?;
        let mut db = Tensor::empty(*b.shape(), b.dtype(), b.device())?;
        batched(batch, k, n, m, &a, true, &dy, false, db.out()?)?;
        Ok(vec![Some(da), Some(db)])
    }))
}

fn batched(
    batch: usize,
    m: usize,
    n: usize,
    k: usize,
    a: &Tensor,
    a_transposed: bool,
    b: &Tensor,
    b_transposed: bool,
    c: Out<'_>,
) -> Result<()> {
    let device = c.device();
    let a = Matrix { batch_stride: m * k, transposed: a_transposed, ..Matrix::whole(a) };
    let b = Matrix { batch_stride: k * n, transposed: b_transposed, ..Matrix::whole(b) };
    let mut gemm = Gemm::plain(m, n, k, a, b, c);
    gemm.batch = batch;
    gemm.c.batch_stride = m * n;
    profile::count_product(batch, m, n, k);
    device.backend().gemm(gemm)
}
