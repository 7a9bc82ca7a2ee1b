//! Reshaping, permuting, joining and cutting.

use crate::autograd::{needs_grad, record};
use crate::error::{Result, TensorError};
use crate::moves;
use crate::param::Operand;
use crate::profile;
use crate::shape::Shape;
use crate::tensor::Tensor;

/// The same elements under another shape; no copy.
pub fn reshape(x: impl Into<Operand>, shape: impl Into<Shape>) -> Result<Tensor> {
    let (x, shape) = (x.into(), shape.into());
    let from = *x.shape();
    let y = match &x {
        Operand::Tensor(x) => x.view(shape)?,
        // A view of a borrowed weight must not outlive the borrow.
        Operand::Param(_) => {
            let value = x.read()?;
            let mut copy = Tensor::empty(shape, value.dtype(), value.device())?;
            value.device().backend().copy(&value.view(shape)?, copy.out()?)?;
            copy
        }
    };
    if !needs_grad(&[&x]) {
        return Ok(y);
    }
    Ok(record("reshape", &[&x], y, move |dy| Ok(vec![Some(dy.view(from)?)])))
}

/// Reorders dimensions: dimension `i` of the result is dimension `order[i]` of `x`. No copy where only those of size one move.
pub fn permute(x: impl Into<Operand>, order: &[usize]) -> Result<Tensor> {
    fn run(x: &Tensor, order: &[usize]) -> Result<Tensor> {
        let sizes: Vec<usize> = order.iter().map(|&dim| x.shape()[dim]).collect();
        let mut y = Tensor::empty(&sizes, x.dtype(), x.device())?;
        x.device().backend().permute(x, order, y.out()?)?;
        Ok(y)
    }
    let x = x.into();
    let mut inverse = vec![usize::MAX; x.shape().dims()];
    for (to, &from) in order.iter().enumerate() {
        if let Some(place) = inverse.get_mut(from) {
            *place = to;
        }
    }
    if order.len() != inverse.len() || inverse.contains(&usize::MAX) {
        return Err(TensorError::argument(
            "permute",
            format!("{order:?} does not order the dimensions of {}", x.shape()),
        ));
    }
    if moves::is_still(x.shape(), order) {
        let sizes: Vec<usize> = order.iter().map(|&dim| x.shape()[dim]).collect();
        return reshape(x, &sizes);
    }
    let y = run(&*x.read()?, order)?;
    if !needs_grad(&[&x]) {
        return Ok(y);
    }
    Ok(record("permute", &[&x], y, move |dy| Ok(vec![Some(run(&dy, &inverse)?)])))
}

/// Swaps two dimensions.
pub fn transpose(x: impl Into<Operand>, first: usize, second: usize) -> Result<Tensor> {
    let x = x.into();
    let dims = x.shape().dims();
    if first >= dims || second >= dims {
        return Err(TensorError::argument(
            "transpose",
            format!("{} has no dimensions {first} and {second}", x.shape()),
        ));
    }
    let mut order: Vec<usize> = (0..dims).collect();
    order.swap(first, second);
    permute(x, &order)
}

/// (product before `dim`, size of `dim`, product after it).
pub(super) fn around(op: &'static str, shape: &Shape, dim: usize) -> Result<(usize, usize, usize)> {
    if dim >= shape.dims() {
        return Err(TensorError::argument(op, format!("{shape} has no dimension {dim}")));
    }
    let sizes = shape.sizes();
    Ok((sizes[..dim].iter().product(), sizes[dim], sizes[dim + 1..].iter().product()))
}

fn with_size(shape: &Shape, dim: usize, size: usize) -> Shape {
    let mut sizes = shape.sizes().to_vec();
    sizes[dim] = size;
    Shape::new(&sizes)
}

/// Copies `count` entries of dimension `dim` from `start` on.
fn cut(x: &Tensor, dim: usize, start: usize, count: usize) -> Result<Tensor> {
    let (outer, size, inner) = around("narrow", x.shape(), dim)?;
    let mut y = Tensor::empty(with_size(x.shape(), dim, count), x.dtype(), x.device())?;
    let width = count * inner;
    x.device().backend().copy_blocks(x, start * inner, size * inner, y.out()?, 0, width, outer, width)?;
    Ok(y)
}

/// Entries `start..start + count` of dimension `dim`.
pub fn narrow(x: impl Into<Operand>, dim: usize, start: usize, count: usize) -> Result<Tensor> {
    let x = x.into();
    let (outer, size, inner) = around("narrow", x.shape(), dim)?;
    if start.checked_add(count).is_none_or(|end| end > size) {
        return Err(TensorError::argument(
            "narrow",
            format!("{start}..{start}+{count} lies outside dimension {dim} of {}", x.shape()),
        ));
    }
    let y = cut(&*x.look()?, dim, start, count)?;
    profile::count_bytes(y.size_bytes());
    if !needs_grad(&[&x]) {
        return Ok(y);
    }
    let from = *x.shape();
    Ok(record("narrow", &[&x], y, move |dy| {
        let mut dx = Tensor::zeros(from, dy.dtype(), dy.device())?;
        let width = count * inner;
        dy.device().backend().copy_blocks(
            &dy,
            0,
            width,
            dx.out()?,
            start * inner,
            size * inner,
            outer,
            width,
        )?;
        Ok(vec![Some(dx)])
    }))
}

/// Cuts dimension `dim` into parts of the given sizes, which must add up.
pub fn split(x: impl Into<Operand>, dim: usize, sizes: &[usize]) -> Result<Vec<Tensor>> {
    let x = x.into();
    let (_, size, _) = around("split", x.shape(), dim)?;
    if sizes.iter().sum::<usize>() != size {
        return Err(TensorError::argument(
            "split",
            format!("parts {sizes:?} do not add up to dimension {dim} of {}", x.shape()),
        ));
    }
    let value = x.read()?;
    let mut parts = Vec::with_capacity(sizes.len());
    let mut start = 0;
    for &count in sizes {
        parts.push(cut(&value, dim, start, count)?);
        start += count;
    }
    if !needs_grad(&[&x]) {
        return Ok(parts);
    }
    let (device, dtype) = (value.device().clone(), value.dtype());
    let shapes: Vec<Shape> = parts.iter().map(|part| *part.shape()).collect();
    Ok(crate::autograd::record_many("split", &[&x], parts, move |gradients| {
        let filled = gradients
            .into_iter()
            .zip(&shapes)
            .map(|(gradient, &shape)| gradient.map_or_else(|| Tensor::zeros(shape, dtype, &device), Ok))
            .collect::<Result<Vec<Tensor>>>()?;
        Ok(vec![Some(join(&filled, dim)?)])
    }))
}

fn join(parts: &[Tensor], dim: usize) -> Result<Tensor> {
    let first = &parts[0];
    let total = parts.iter().map(|part| part.shape()[dim]).sum();
    let mut y = Tensor::empty(with_size(first.shape(), dim, total), first.dtype(), first.device())?;
    let (outer, _, inner) = around("concat", first.shape(), dim)?;
    let mut start = 0;
    for part in parts {
        let width = part.shape()[dim] * inner;
        part.device().backend().copy_blocks(part, 0, width, y.out()?, start, total * inner, outer, width)?;
        start += width;
    }
    Ok(y)
}

/// Joins tensors along `dim`; the other dimensions are equal.
pub fn concat(parts: &[Tensor], dim: usize) -> Result<Tensor> {
    let Some(first) = parts.first() else {
        return Err(TensorError::argument("concat", "there is nothing to join"));
    };
    around("concat", first.shape(), dim)?;
    for part in parts {
        if part.shape().dims() != first.shape().dims()
            || with_size(part.shape(), dim, 0) != with_size(first.shape(), dim, 0)
        {
            return Err(TensorError::ShapeMismatch {
                op: "concat",
                left: *first.shape(),
                right: *part.shape(),
            });
        }
        crate::ops::expect_same_dtype("concat", "a part", part.dtype(), first.dtype())?;
    }
    let y = join(parts, dim)?;
    let operands: Vec<Operand> = parts.iter().map(Operand::from).collect();
    let operands: Vec<&Operand> = operands.iter().collect();
    if !needs_grad(&operands) {
        return Ok(y);
    }
    let sizes: Vec<usize> = parts.iter().map(|part| part.shape()[dim]).collect();
    Ok(record("concat", &operands, y, move |dy| {
        let mut start = 0;
        sizes
            .iter()
            .map(|&count| {
                start += count;
                cut(&dy, dim, start - count, count).map(Some)
            })
            .collect()
    }))
}
