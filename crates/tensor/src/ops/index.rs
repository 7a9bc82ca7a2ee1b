//! Looking things up: embedding, gather, index_select, top-k, one-hot.

use crate::autograd::{contribute_rows, has_contribution, needs_grad, record};
use crate::backend::Comparison;
use crate::dtype::DType;
use crate::error::{Result, TensorError};
use crate::ops::elementwise::{compare, select};
use crate::ops::shape::around;
use crate::ops::{expect_float, gradient_like};
use crate::param::Operand;
use crate::profile;
use crate::rows::RowGradient;
use crate::shape::Shape;
use crate::tensor::Tensor;

/// Rows of `table [entries, width]` for each id: `[ids.., width]`.
pub fn embedding(table: impl Into<Operand>, ids: &Tensor) -> Result<Tensor> {
    let table = table.into();
    if table.shape().dims() != 2 {
        return Err(TensorError::shape("embedding", "the table", *table.shape(), "[entries, width]"));
    }
    let sizes = || format!("{}, {}", table.shape()[0], table.shape()[1]);
    profile::in_module_of(Some(&table), "Embedding", sizes, || looked_up(&table, ids))
}

fn looked_up(table: &Operand, ids: &Tensor) -> Result<Tensor> {
    let mut sizes = ids.sizes().to_vec();
    sizes.push(table.shape()[1]);
    let out = {
        let table = table.look()?;
        let mut out = Tensor::empty(&sizes, table.dtype(), table.device())?;
        profile::count_bytes(out.size_bytes());
        table.device().backend().embedding(&table, ids, out.out()?)?;
        out
    };
    if !needs_grad(&[table]) {
        return Ok(out);
    }
    let (saved, ids) = (table.saved(), ids.detach());
    Ok(record("embedding", &[table], out, move |dout| {
        if let Operand::Param(param) = &saved
            && (param.wants_rows() || dout.device().backend().is_host() && has_contribution(param))
        {
            contribute_rows(param, RowGradient::of_lookup(&ids, &dout, param.shape()[0])?)?;
            return Ok(vec![None]);
        }
        let mut dtable = gradient_like(&saved, *saved.shape(), dout.dtype(), dout.device())?;
        dout.device().backend().embedding_backward(&ids, &dout, dtable.out()?)?;
        Ok(vec![Some(dtable)])
    }))
}

/// `x [ids.., width]`, whose rows of one id get no gradient.
pub fn without_gradient_of(x: &Tensor, ids: &Tensor, id: i64) -> Result<Tensor> {
    let ids = ids.detach();
    Ok(record("without_gradient_of", &[&Operand::from(x)], x.detach(), move |dx| {
        let id = match ids.dtype() {
            DType::I32 => Tensor::from_slice(&[id as i32], [1], ids.device())?,
            _ => Tensor::from_slice(&[id], [1], ids.device())?,
        };
        let is_id = compare(Comparison::Equal, &ids, &id)?;
        let mut sizes = ids.sizes().to_vec();
        sizes.push(1);
        let zero = Tensor::zeros([], dx.dtype(), dx.device())?;
        Ok(vec![Some(select(&is_id.view(&sizes)?, &zero, &dx)?)])
    }))
}

/// Entries of dimension `dim` in the order of `indices [n]`.
pub fn index_select(x: impl Into<Operand>, dim: usize, indices: &Tensor) -> Result<Tensor> {
    let x = x.into();
    let (outer, size, inner) = around("index_select", x.shape(), dim)?;
    let mut sizes = x.shape().sizes().to_vec();
    sizes[dim] = indices.numel();
    let y = {
        let x = x.look()?;
        let mut y = Tensor::empty(&sizes, x.dtype(), x.device())?;
        profile::count_bytes(y.size_bytes());
        x.device().backend().index_select(&x, indices, outer, size, inner, y.out()?)?;
        y
    };
    if !x.dtype().is_float() || !needs_grad(&[&x]) {
        return Ok(y);
    }
    let (shape, indices) = (*x.shape(), indices.detach());
    Ok(record("index_select", &[&x], y, move |dy| {
        let mut dx = Tensor::empty(shape, dy.dtype(), dy.device())?;
        dy.device().backend().index_add(&dy, &indices, outer, size, inner, dx.out()?)?;
        Ok(vec![Some(dx)])
    }))
}

/// `y[.., j] = x[.., indices[.., j]]` over the last dimension.
pub fn gather(x: impl Into<Operand>, indices: &Tensor) -> Result<Tensor> {
    let x = x.into();
    if x.shape().dims() == 0
        || x.shape().rows() != indices.shape().rows()
        || x.shape().dims() != indices.shape().dims()
    {
        return Err(TensorError::ShapeMismatch { op: "gather", left: *x.shape(), right: *indices.shape() });
    }
    let y = {
        let x = x.read()?;
        let mut y = Tensor::empty(*indices.shape(), x.dtype(), x.device())?;
        x.device().backend().gather(&x, indices, y.out()?)?;
        y
    };
    if !x.dtype().is_float() || !needs_grad(&[&x]) {
        return Ok(y);
    }
    let (shape, indices) = (*x.shape(), indices.detach());
    Ok(record("gather", &[&x], y, move |dy| {
        let mut dx = Tensor::empty(shape, dy.dtype(), dy.device())?;
        dy.device().backend().scatter_add(&dy, &indices, dx.out()?)?;
        Ok(vec![Some(dx)])
    }))
}

/// The `k` largest of each row, largest first (values, indices). Values carry a gradient.
pub fn top_k(x: &Tensor, k: usize) -> Result<(Tensor, Tensor)> {
    expect_float("top_k", "the operand", x.dtype())?;
    if x.shape().dims() == 0 || k > x.shape().last() {
        return Err(TensorError::argument("top_k", format!("{k} of a row of {}", x.shape())));
    }
    let shape = x.shape().with_last(k);
    let mut values = Tensor::empty(shape, x.dtype(), x.device())?;
    let mut indices = Tensor::empty(shape, DType::I64, x.device())?;
    x.device().backend().top_k(x, k, values.out()?, indices.out()?)?;
    // Gathering by the indices found records the gradient.
    let values = if x.requires_grad() { gather(x, &indices)? } else { values };
    Ok((values, indices))
}

/// Ones at each index along a new last dimension.
pub fn one_hot(indices: &Tensor, classes: usize, dtype: DType) -> Result<Tensor> {
    let values = indices.to_vec::<i64>()?;
    let mut ones = vec![0.0f32; values.len() * classes];
    for (position, &index) in values.iter().enumerate() {
        let column = usize::try_from(index)
            .ok()
            .filter(|&column| column < classes)
            .ok_or(TensorError::IndexOutOfRange { op: "one_hot", index, position, limit: classes })?;
        ones[position * classes + column] = 1.0;
    }
    let mut sizes = indices.sizes().to_vec();
    sizes.push(classes);
    Tensor::from_f32(&ones, Shape::new(&sizes), dtype, indices.device())
}
