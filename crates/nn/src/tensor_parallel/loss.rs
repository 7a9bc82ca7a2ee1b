//! Cross-entropy over tokens that lie on several ranks.
//!
//! Each rank makes the logits of its own tokens, a chunk of rows at a time. All that ranks tell each other is two numbers per
//! row: the logarithm of their sum of exponentials, and the target's logit from whoever has it. With `lse` over all ranks and
//! `own` over this one's tokens, the gradient of the logits is `exp(own - lse)·softmax(own logits) - [target]`; the factor
//! belongs to a row, so it multiplies the narrow side of each product and the wide one is left as it is.

use ferrospeed_collective::ops::all_gather;
use ferrospeed_comm::Group;
use ferrospeed_tensor::autograd::{Own, needs_grad, no_grad, record};
use ferrospeed_tensor::backend::{Binary, Gemm, Matrix};
use ferrospeed_tensor::memory::Category;
use ferrospeed_tensor::{DType, Operand, Param, Result, Tensor, TensorError, ops, profile, with_category};

use super::Slices;

/// A row's target among this rank's tokens.
struct Targets {
    /// Its number here; 0 where another rank has it.
    here: Tensor,
    /// 1 where it is here, `[rows, 1]`.
    is_here: Tensor,
    /// 1 where the row counts at all, `[rows, 1]`.
    counts: Tensor,
    /// How many rows count.
    counted: Tensor,
}

/// An error for the first id that no rank holds: a sum over nothing would look like a value.
pub(crate) fn expect_entries(op: &'static str, ids: impl Iterator<Item = i64>, limit: usize) -> Result<()> {
    let is_outside = |id: i64| usize::try_from(id).map_or(true, |id| id >= limit);
    match ids.enumerate().find(|&(_, id)| is_outside(id)) {
        Some((position, index)) => Err(TensorError::IndexOutOfRange { op, index, position, limit }),
        None => Ok(()),
    }
}

impl Targets {
    /// Of a vocabulary of `all` tokens, of which this rank has `tokens` from `first` on.
    fn new(targets: &Tensor, [first, tokens, all]: [usize; 3], ignored: i64) -> Result<Targets> {
        let device = targets.device();
        let rows = targets.numel();
        let ids = targets.to_vec::<i64>()?;
        expect_entries("sliced loss", ids.iter().map(|&id| if id == ignored { 0 } else { id }), all)?;
        let here = |id: i64| usize::try_from(id).ok()?.checked_sub(first).filter(|&row| row < tokens);
        let flags = |is: &dyn Fn(i64) -> bool| {
            let flags: Vec<f32> = ids.iter().map(|&id| f32::from(u8::from(is(id)))).collect();
            Tensor::from_slice(&flags, [rows, 1], device)
        };
        let local: Vec<i64> = ids.iter().map(|&id| here(id).unwrap_or(0) as i64).collect();
        let counted = ids.iter().filter(|&&id| id != ignored).count() as i64;
        Ok(Targets {
            here: Tensor::from_slice(&local, [rows], device)?,
            is_here: flags(&|id| id != ignored && here(id).is_some())?,
            counts: flags(&|id| id != ignored)?,
            counted: Tensor::from_slice(&[counted], [], device)?,
        })
    }
}

/// The mean loss of predicting `targets [rows]` by `x·Wᵀ`, where this rank's rows of `W [tokens, width]` are `weight`, a slice
/// along dim 0; targets of `ignored` do not count. `x` is what ranks have between the cuts; all get the same loss.
pub fn linear_cross_entropy(
    x: &Tensor,
    weight: &Param,
    targets: &Tensor,
    ignored: i64,
    slices: &Slices,
) -> Result<Tensor> {
    let x = slices.enter(x)?;
    let (rows, width) = (x.shape().rows(), x.shape().last());
    let (Some(slice), &[tokens, inputs]) = (weight.slice(), weight.shape().sizes()) else {
        return Err(TensorError::shape(
            "sliced loss",
            "the weight",
            *weight.shape(),
            "a slice of [tokens, width]",
        ));
    };
    if inputs != width || targets.numel() != rows {
        return Err(TensorError::ShapeMismatch {
            op: "sliced loss",
            left: *x.shape(),
            right: *weight.shape(),
        });
    }
    let places = [slice.ranges()[0].start, tokens, slice.whole()[0]];
    let targets = Targets::new(targets, places, ignored)?;
    let x = Operand::from(ops::reshape(&x, [rows, width])?);
    let weight = Operand::from(weight);
    let recording = needs_grad(&[&x, &weight]);
    let wants = [recording && x.requires_grad(), recording && weight.requires_grad()];
    let work = Work { targets: &targets, weight: &weight, group: slices.group(), rows, width, tokens };
    let (losses, dx, dweight) = no_grad(|| work.run(&*x.read()?, wants))?;
    let loss = mean(&losses, &targets.counted)?;
    if !recording {
        return Ok(loss);
    }
    let (dtype, counted) = (x.dtype(), targets.counted);
    let (dx, dweight) = (dx.map(Own::new), dweight.map(Own::new));
    Ok(record("sliced_linear_cross_entropy", &[&x, &weight], loss, move |dy| {
        let share = mean(&dy, &counted)?;
        let finish = |gradient: &Option<Own>, category| {
            let Some(gradient) = gradient else { return Ok::<_, TensorError>(None) };
            let mut gradient = gradient.take()?;
            let device = gradient.device().clone();
            if gradient.dtype() == dtype {
                device.backend().scale_in_place(gradient.out()?, &share)?;
                return Ok(Some(gradient));
            }
            let mut target = with_category(category, || Tensor::empty(*gradient.shape(), dtype, &device))?;
            device.backend().scale_by(&gradient, &share, target.out()?)?;
            Ok(Some(target))
        };
        Ok(vec![finish(&dx, Category::Activations)?, finish(&dweight, Category::Gradients)?])
    }))
}

/// The mean over rows that count, summed in f64; zero when none does. Of a gradient, it is each row's share.
fn mean(values: &Tensor, counted: &Tensor) -> Result<Tensor> {
    let mut mean = Tensor::empty([], DType::F32, values.device())?;
    values.device().backend().mean_loss(values, counted, mean.out()?)?;
    Ok(mean)
}

struct Work<'a> {
    targets: &'a Targets,
    weight: &'a Operand,
    group: &'a Group,
    rows: usize,
    width: usize,
    tokens: usize,
}

/// The loss of each row, and the gradients of their sum that are wanted, that of the weight in f32.
type Outcome = (Tensor, Option<Tensor>, Option<Tensor>);

impl Work<'_> {
    fn run(&self, x: &Tensor, wants: [bool; 2]) -> Result<Outcome> {
        let (device, dtype) = (x.device(), x.dtype());
        let backend = device.backend();
        let table = self.weight.read()?;
        let held = backend.logits_dtype(dtype);
        // Logits and their softmax in f32 are held at once.
        let row_bytes = 2 * self.tokens * DType::F32.size_bytes();
        let chunk = backend.logits_rows(row_bytes).clamp(16, self.rows.max(16));
        let mut dx = if wants[0] { Some(Tensor::empty(*x.shape(), dtype, device)?) } else { None };
        let mut dweight = if wants[1] { Some(self.of_targets(x)?) } else { None };
        let mut losses = Vec::new();
        for start in (0..self.rows).step_by(chunk) {
            let count = chunk.min(self.rows - start);
            let x_chunk = x.slice(start * self.width, [count, self.width])?;
            let column = |all: &Tensor| all.slice(start, [count, 1]);
            let mut logits = Tensor::empty([count, self.tokens], held, device)?;
            let w = Matrix { transposed: true, ..Matrix::whole(&table) };
            profile::count_product(1, count, self.tokens, self.width);
            backend.gemm(Gemm::plain(
                count,
                self.tokens,
                self.width,
                Matrix::whole(&x_chunk),
                w,
                logits.out()?,
            ))?;
            let here = self.targets.here.slice(start, [count])?;
            let (is_here, counts) = (column(&self.targets.is_here)?, column(&self.targets.counts)?);
            let Measured { softmax, own, lse, target } =
                measure(&ops::cast(&logits, DType::F32)?, &here, &is_here, self.group)?;
            drop(logits);
            losses.push(ops::mul(&ops::sub(&lse, &target)?, &counts)?);
            if !wants[0] && !wants[1] {
                continue;
            }
            profile::taking_gradients(|| -> Result<()> {
                let factor = ops::mul(&ops::exp(&ops::sub(&own, &lse)?)?, &counts)?;
                let softmax = ops::cast(&softmax, dtype)?;
                if let Some(dx) = &mut dx {
                    // As little as can be is held at once: each of these is as large as the stream.
                    let scaled = {
                        let mut product = Tensor::empty([count, self.width], DType::F32, device)?;
                        let (a, b) = (Matrix::whole(&softmax), Matrix::whole(&table));
                        profile::count_product(1, count, self.width, self.tokens);
                        backend.gemm(Gemm::plain(count, self.width, self.tokens, a, b, product.out()?))?;
                        ops::mul(&product, &factor)?
                    };
                    let taken = {
                        let found = ops::cast(&ops::embedding(&*table, &here)?, DType::F32)?;
                        ops::mul(&found, &is_here)?
                    };
                    let mut target = dx.out()?.part(start * self.width, [count, self.width])?;
                    match dtype {
                        DType::F32 => backend.binary(Binary::Sub, &scaled, &taken, target.out())?,
                        _ => backend.cast(&ops::sub(&scaled, &taken)?, target.out())?,
                    }
                }
                if let Some(dweight) = &mut dweight {
                    let scaled = ops::cast(&ops::mul(&ops::cast(&x_chunk, DType::F32)?, &factor)?, dtype)?;
                    let (a, b) = (Matrix::transposed(&softmax), Matrix::whole(&scaled));
                    profile::count_product(1, self.tokens, self.width, count);
                    let product = Gemm::plain(self.tokens, self.width, count, a, b, dweight.out()?);
                    backend.gemm(Gemm { accumulate: true, ..product })?;
                }
                Ok(())
            })?;
        }
        let losses = ops::reshape(&ops::concat(&losses, 0)?, [self.rows])?;
        Ok((losses, dx, dweight))
    }

    /// What rows take from the weights of their targets, in f32.
    fn of_targets(&self, x: &Tensor) -> Result<Tensor> {
        let taken = ops::mul(&ops::cast(x, DType::F32)?, &ops::neg(&self.targets.is_here)?)?;
        let shape = [self.tokens, self.width];
        let mut dweight =
            with_category(Category::Gradients, || Tensor::empty(shape, DType::F32, x.device()))?;
        x.device().backend().embedding_backward(&self.targets.here, &taken, dweight.out()?)?;
        Ok(dweight)
    }
}

/// What is known of a chunk of rows, `[rows, 1]` each but the first.
struct Measured {
    /// The softmax over this rank's tokens.
    softmax: Tensor,
    /// The logarithms of this rank's sums of exponentials, and of all ranks'.
    own: Tensor,
    lse: Tensor,
    /// The targets' logits.
    target: Tensor,
}

fn measure(logits: &Tensor, here: &Tensor, is_here: &Tensor, group: &Group) -> Result<Measured> {
    let rows = logits.shape().rows();
    // Losses count no operations, so neither does this part of one.
    let mut softmax = Tensor::empty(*logits.shape(), DType::F32, logits.device())?;
    logits.device().backend().softmax(logits, softmax.out()?, false)?;
    // The largest logit less the logarithm of its probability is that of the sum of exponentials.
    let largest = ops::reshape(&ops::max(logits, 1)?, [rows, 1])?;
    let share = ops::reshape(&ops::max(&softmax, 1)?, [rows, 1])?;
    let own = ops::sub(&largest, &ops::log(&share)?)?;
    let target = ops::mul(&ops::gather(logits, &ops::reshape(here, [rows, 1])?)?, is_here)?;
    let told = ops::concat(&[own.clone(), target], 1)?;
    let all = all_gather(&ops::reshape(&told, [1, rows, 2])?, 0, group)?;
    let column = |which| ops::narrow(&all, 2, which, 1);
    let sums = column(0)?;
    let largest = ops::reshape(&ops::max(&sums, 0)?, [1, rows, 1])?;
    let exponentials = ops::reshape(&ops::sum_dim(&ops::exp(&ops::sub(&sums, &largest)?)?, 0)?, [rows, 1])?;
    let lse = ops::add(&ops::log(&exponentials)?, &ops::reshape(&largest, [rows, 1])?)?;
    let target = ops::reshape(&ops::sum_dim(&column(1)?, 0)?, [rows, 1])?;
    Ok(Measured { softmax, own, lse, target })
}

/// The mean loss of logits `[.., tokens]` of this rank's tokens, the first of which is `first` among `all`; as
/// [`linear_cross_entropy`], for heads that make their logits by themselves.
pub fn cross_entropy(
    logits: &Tensor,
    [first, all]: [usize; 2],
    targets: &Tensor,
    ignored: i64,
    group: &Group,
) -> Result<Tensor> {
    let (rows, tokens) = (logits.shape().rows(), logits.shape().last());
    if targets.numel() != rows {
        return Err(TensorError::ShapeMismatch {
            op: "sliced loss",
            left: *logits.shape(),
            right: *targets.shape(),
        });
    }
    let targets = Targets::new(targets, [first, tokens, all], ignored)?;
    let logits = Operand::from(ops::reshape(logits, [rows, tokens])?);
    let (losses, gradient) = no_grad(|| -> Result<_> {
        let values = ops::cast(&*logits.read()?, DType::F32)?;
        let measured = measure(&values, &targets.here, &targets.is_here, group)?;
        let Measured { softmax, own, lse, target } = measured;
        let losses = ops::mul(&ops::sub(&lse, &target)?, &targets.counts)?;
        let factor = ops::mul(&ops::exp(&ops::sub(&own, &lse)?)?, &targets.counts)?;
        let mut ones = Tensor::empty([rows, tokens], DType::F32, values.device())?;
        let places = ops::reshape(&targets.here, [rows, 1])?;
        values.device().backend().scatter_add(&targets.is_here, &places, ones.out()?)?;
        Ok((losses, ops::sub(&ops::mul(&softmax, &factor)?, &ones)?))
    })?;
    let loss = mean(&losses, &targets.counted)?;
    if !needs_grad(&[&logits]) {
        return Ok(loss);
    }
    let (dtype, counted) = (logits.dtype(), targets.counted);
    Ok(record("sliced_cross_entropy", &[&logits], loss, move |dy| {
        let share = mean(&dy, &counted)?;
        let mut scaled = Tensor::empty(*gradient.shape(), dtype, gradient.device())?;
        gradient.device().backend().scale_by(&gradient, &share, scaled.out()?)?;
        Ok(vec![Some(scaled)])
    }))
}
