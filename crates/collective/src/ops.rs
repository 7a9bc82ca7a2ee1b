//! Collectives as differentiable operations.
//!
//! What is differentiated is the sum of all ranks' losses, so the backward of each operation is its transpose:
//!
//! | operation | forward | backward |
//! | --- | --- | --- |
//! | [`all_reduce`] | sum of all, to all | sum of all gradients, to all |
//! | [`all_gather`] | all parts along a dim | [`reduce_scatter`] |
//! | [`reduce_scatter`] | this rank's part of the sum | [`all_gather`] |
//! | [`all_to_all`] | cut along one dim, joined along another | the other way round |
//! | [`all_to_all_parts`] | the same with parts of unequal sizes | the other way round |
//! | [`all_to_all_rows`] | unequal numbers of rows | the same rows back |
//! | [`broadcast`] | the root's value | sum of all gradients, to the root |
//!
//! Where ranks compute the same loss from the same values (tensor parallelism), its gradient is the same on all, and
//! summing it would count it once per rank. Four more operations are for the borders of such regions, as Shoeybi et al.,
//! "Megatron-LM" (2019), section 3, has them: [`enter`] and [`leave`], [`split`] and [`join`].

use std::sync::{Arc, Mutex, PoisonError};

use ferrospeed_comm::{Group, ReduceOp};
use ferrospeed_tensor::autograd::{needs_grad, no_grad, record};
use ferrospeed_tensor::{Operand, Tensor, TensorError, ops as plain};

use crate::error::Result;
use crate::exchange;

/// The sum of every rank's tensor, on every rank.
pub fn all_reduce(x: &Tensor, group: &Group) -> Result<Tensor> {
    let y = summed(x, group)?;
    let group = group.clone();
    recorded("all_reduce", x, y, move |dy| summed(dy, &group))
}

/// The beginning of a region that ranks compute together from one value that all have: forward nothing happens, backward
/// the ranks' gradients are summed.
pub fn enter(x: &Tensor, group: &Group) -> Result<Tensor> {
    let group = group.clone();
    recorded("enter", x, x.detach(), move |dy| summed(dy, &group))
}

/// The end of such a region, where each rank has a summand: forward they are summed, backward nothing happens.
pub fn leave(x: &Tensor, group: &Group) -> Result<Tensor> {
    recorded("leave", x, summed(x, group)?, |dy| Ok(dy.clone()))
}

/// All ranks' tensors, joined along `dim` in order of rank; they are alike in shape.
pub fn all_gather(x: &Tensor, dim: usize, group: &Group) -> Result<Tensor> {
    let y = gathered(x, dim, group)?;
    let group = group.clone();
    recorded("all_gather", x, y, move |dy| scattered(dy, dim, &group))
}

/// This rank's part along `dim` of the sum of all ranks' tensors.
pub fn reduce_scatter(x: &Tensor, dim: usize, group: &Group) -> Result<Tensor> {
    let y = scattered(x, dim, group)?;
    let group = group.clone();
    recorded("reduce_scatter", x, y, move |dy| gathered(dy, dim, &group))
}

/// This rank's part along `dim` of a tensor that all ranks have alike; backward the parts' gradients are joined.
pub fn split(x: &Tensor, dim: usize, group: &Group) -> Result<Tensor> {
    let y = own_part(x, dim, group)?;
    let group = group.clone();
    recorded("split", x, y, move |dy| gathered(dy, dim, &group))
}

/// All ranks' parts joined along `dim`, for a region that all ranks compute alike; backward each takes its own part.
pub fn join(x: &Tensor, dim: usize, group: &Group) -> Result<Tensor> {
    let y = gathered(x, dim, group)?;
    let group = group.clone();
    recorded("join", x, y, move |dy| own_part(dy, dim, &group))
}

/// Cuts the tensor along `cut` into one part per rank, gives each its part, and joins what it gets along `joined`.
/// (Jacobs et al.: "DeepSpeed Ulysses", 2023, goes from parts of a sequence to parts of the heads so.)
pub fn all_to_all(x: &Tensor, cut: usize, joined: usize, group: &Group) -> Result<Tensor> {
    let y = exchanged(x, cut, joined, group)?;
    let group = group.clone();
    recorded("all_to_all", x, y, move |dy| exchanged(dy, joined, cut, &group))
}

/// The sizes of all ranks' parts along a dim of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parts {
    /// Along which dim.
    pub dim: usize,
    /// How much of it each rank has.
    pub sizes: Vec<usize>,
}

impl Parts {
    fn check(&self, op: &'static str, x: &Tensor, whole: usize, ranks: usize) -> Result<()> {
        let found = x.sizes().get(self.dim).copied();
        if self.sizes.len() == ranks && found == Some(whole) {
            return Ok(());
        }
        let why = format!(
            "dim {} of {} should be {whole}, for parts of {:?} on {ranks} ranks",
            self.dim,
            x.shape(),
            self.sizes
        );
        Err(TensorError::argument(op, why).into())
    }
}

/// [`all_to_all`] with parts of unequal sizes: this rank holds all of `cut` and its own part of `joined`, and afterwards its own
/// part of `cut` and all of `joined`.
pub fn all_to_all_parts(x: &Tensor, cut: &Parts, joined: &Parts, group: &Group) -> Result<Tensor> {
    let y = parts_exchanged(x, cut, joined, group)?;
    let (cut, joined, group) = (cut.clone(), joined.clone(), group.clone());
    recorded("all_to_all_parts", x, y, move |dy| parts_exchanged(dy, &joined, &cut, &group))
}

/// Rank `r` gets `send[r]` rows of this rank's tensor `[rows, …]`, and this rank `receive[r]` rows of rank `r`'s, in order.
pub fn all_to_all_rows(x: &Tensor, send: &[usize], receive: &[usize], group: &Group) -> Result<Tensor> {
    Ok(all_to_all_rows_beside(x, send, receive, group, || Ok(()))?.0)
}

/// The same, with other work done while the rows are on their way, before anything that follows; in backward what that work
/// has recorded is walked while the rows' gradients are on their way back. Whatever `beside` exchanges, all ranks must
/// exchange likewise.
pub fn all_to_all_rows_beside<T>(
    x: &Tensor,
    send: &[usize],
    receive: &[usize],
    group: &Group,
    beside: impl FnOnce() -> ferrospeed_tensor::Result<T>,
) -> Result<(Tensor, T)> {
    // Backward walks from the youngest node to the oldest: what is recorded last sends gradients off, and what is recorded
    // first waits for them. Nobody looks at them in between, since nothing else knows this `x`.
    let under_way = Arc::new(Mutex::new(None::<exchange::Pending>));
    let awaited = under_way.clone();
    let x = &recorded("all_to_all_rows (arriving)", x, x.detach(), move |dx| {
        if let Some(pending) = awaited.lock().unwrap_or_else(PoisonError::into_inner).take() {
            pending.wait()?;
        }
        Ok(dx.clone())
    })?;
    let (pending, y) = rows_leaving(x, send, receive, group)?;
    let made = beside();
    // What travels is waited for in any case: it reads and writes these tensors.
    pending.wait()?;
    let (send, receive, group) = (send.to_vec(), receive.to_vec(), group.clone());
    let y = recorded("all_to_all_rows", x, y, move |dy| {
        let (pending, dx) = rows_leaving(dy, &receive, &send, &group)?;
        *under_way.lock().unwrap_or_else(PoisonError::into_inner) = Some(pending);
        Ok(dx)
    })?;
    Ok((y, made?))
}

/// The root's tensor, on every rank.
pub fn broadcast(x: &Tensor, root: usize, group: &Group) -> Result<Tensor> {
    let y = copied(x)?;
    exchange::broadcast(group, &y, root)?.wait()?;
    let group = group.clone();
    recorded("broadcast", x, y, move |dy| {
        let sum = summed(dy, &group)?;
        if group.rank() == root {
            return Ok(sum);
        }
        Ok(Tensor::zeros(*dy.shape(), dy.dtype(), dy.device())?)
    })
}

/// Records an operation of one tensor where a gradient is wanted.
fn recorded(
    name: &'static str,
    x: &Tensor,
    y: Tensor,
    backward: impl Fn(&Tensor) -> Result<Tensor> + Send + 'static,
) -> Result<Tensor> {
    let x: Operand = x.into();
    if !needs_grad(&[&x]) {
        return Ok(y);
    }
    Ok(record(name, &[&x], y, move |dy| Ok(vec![Some(backward(&dy).map_err(TensorError::from)?)])))
}

fn copied(x: &Tensor) -> Result<Tensor> {
    let mut copy = Tensor::empty(*x.shape(), x.dtype(), x.device())?;
    x.device().backend().copy(x, copy.out()?)?;
    Ok(copy)
}

fn summed(x: &Tensor, group: &Group) -> Result<Tensor> {
    let y = copied(x)?;
    exchange::all_reduce(group, &y, ReduceOp::Sum)?.wait()?;
    Ok(y)
}

fn check_dim(op: &'static str, x: &Tensor, dim: usize, ranks: usize) -> Result<()> {
    if dim >= x.shape().dims() || !x.sizes()[dim].is_multiple_of(ranks) {
        let why = format!("{} cannot be cut into {ranks} equal parts along dim {dim}", x.shape());
        return Err(TensorError::argument(op, why).into());
    }
    Ok(())
}

fn own_part(x: &Tensor, dim: usize, group: &Group) -> Result<Tensor> {
    check_dim("split", x, dim, group.size())?;
    let len = x.sizes()[dim] / group.size();
    // What is cut out must not keep the whole alive.
    no_grad(|| copied(&plain::narrow(x.detach(), dim, group.rank() * len, len)?))
}

/// `[parts, …]`, the parts along `dim` one after the other, from a tensor in its own order.
fn parts_first(x: &Tensor, dim: usize, parts: usize) -> Result<Tensor> {
    let mut sizes = x.sizes().to_vec();
    sizes[dim] /= parts;
    sizes.insert(dim, parts);
    let order: Vec<usize> = std::iter::once(dim).chain((0..sizes.len()).filter(|&d| d != dim)).collect();
    Ok(no_grad(|| plain::permute(&plain::reshape(x.detach(), &sizes)?, &order))?)
}

/// The other way round: parts that lie one after the other, each of the rest's shape, joined along `dim`.
fn joined_along(parts: &Tensor, dim: usize) -> Result<Tensor> {
    let count = parts.sizes()[0];
    let mut order: Vec<usize> = (1..parts.shape().dims()).collect();
    order.insert(dim, 0);
    let mut sizes = parts.sizes()[1..].to_vec();
    sizes[dim] *= count;
    Ok(no_grad(|| plain::reshape(&plain::permute(parts.detach(), &order)?, &sizes))?)
}

fn gathered(x: &Tensor, dim: usize, group: &Group) -> Result<Tensor> {
    check_dim("all_gather", x, dim, 1)?;
    let mut sizes = x.sizes().to_vec();
    sizes.insert(0, group.size());
    let all = Tensor::empty(&sizes, x.dtype(), x.device())?;
    for pending in exchange::all_gather(group, &[(x.detach(), all.clone())], 0)? {
        pending.wait()?;
    }
    joined_along(&all, dim)
}

fn scattered(x: &Tensor, dim: usize, group: &Group) -> Result<Tensor> {
    check_dim("reduce_scatter", x, dim, group.size())?;
    let parts = parts_first(x, dim, group.size())?;
    let own = Tensor::empty(&parts.sizes()[1..], x.dtype(), x.device())?;
    let counts = vec![own.numel(); group.size()];
    exchange::reduce_scatter(group, &parts, &own, &counts, ReduceOp::Sum)?.wait()?;
    Ok(own)
}

fn exchanged(x: &Tensor, cut: usize, joined: usize, group: &Group) -> Result<Tensor> {
    check_dim("all_to_all", x, cut, group.size())?;
    check_dim("all_to_all", x, joined, 1)?;
    let equal = |dim: usize, size: usize| Parts { dim, sizes: vec![size; group.size()] };
    let (cut, joined) = (equal(cut, x.sizes()[cut] / group.size()), equal(joined, x.sizes()[joined]));
    parts_exchanged(x, &cut, &joined, group)
}

fn parts_exchanged(x: &Tensor, cut: &Parts, joined: &Parts, group: &Group) -> Result<Tensor> {
    const OP: &str = "all_to_all_parts";
    let me = group.rank();
    cut.check(OP, x, cut.sizes.iter().sum(), group.size())?;
    joined.check(OP, x, joined.sizes.get(me).copied().unwrap_or(0), group.size())?;
    let (device, dtype) = (x.device(), x.dtype());
    // Elements before and behind the dim of one row along it.
    let around = |sizes: &[usize], dim: usize| -> (usize, usize) {
        (sizes[..dim].iter().product(), sizes[dim + 1..].iter().product())
    };
    let (outer, inner) = around(x.sizes(), cut.dim);
    let send: Vec<usize> = cut.sizes.iter().map(|size| outer * size * inner).collect();
    let mut sent = Tensor::empty([x.numel()], dtype, device)?;
    let (mut from, mut to) = (0, 0);
    for size in &cut.sizes {
        let width = size * inner;
        let stride = x.sizes()[cut.dim] * inner;
        device.backend().copy_blocks(x, from, stride, sent.out()?, to, width, outer, width)?;
        (from, to) = (from + width, to + outer * width);
    }
    let mut sizes = x.sizes().to_vec();
    (sizes[cut.dim], sizes[joined.dim]) = (cut.sizes[me], joined.sizes.iter().sum());
    let mut y = Tensor::empty(&sizes, dtype, device)?;
    let (outer, inner) = around(&sizes, joined.dim);
    let receive: Vec<usize> = joined.sizes.iter().map(|size| outer * size * inner).collect();
    let arrived = Tensor::empty([y.numel()], dtype, device)?;
    exchange::all_to_all(group, &sent, &arrived, &send, &receive)?.wait()?;
    drop(sent);
    let (mut from, mut to) = (0, 0);
    for size in &joined.sizes {
        let width = size * inner;
        let stride = sizes[joined.dim] * inner;
        device.backend().copy_blocks(&arrived, from, width, y.out()?, to, stride, outer, width)?;
        (from, to) = (from + outer * width, to + width);
    }
    Ok(y)
}

/// Rows on their way, and where they arrive.
fn rows_leaving(
    x: &Tensor,
    send: &[usize],
    receive: &[usize],
    group: &Group,
) -> Result<(exchange::Pending, Tensor)> {
    let rows = x.sizes().first().copied().unwrap_or(0);
    if send.len() != group.size() || receive.len() != group.size() || send.iter().sum::<usize>() != rows {
        let why = format!("{} cannot be sent as {send:?} rows to {} ranks", x.shape(), group.size());
        return Err(TensorError::argument("all_to_all_rows", why).into());
    }
    let width = x.numel() / rows.max(1);
    let width = if rows == 0 { x.sizes()[1..].iter().product() } else { width };
    let mut sizes = x.sizes().to_vec();
    sizes[0] = receive.iter().sum();
    let y = Tensor::empty(&sizes, x.dtype(), x.device())?;
    let elements = |counts: &[usize]| -> Vec<usize> { counts.iter().map(|count| count * width).collect() };
    let pending = exchange::all_to_all(group, &x.detach(), &y, &elements(send), &elements(receive))?;
    Ok((pending, y))
}
