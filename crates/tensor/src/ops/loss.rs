//! Cross-entropy, on logits or fused with the projection that makes them.

use crate::autograd::{Own, needs_grad, record};
pub use crate::backend::CrossEntropyOptions;
use crate::backend::{Device, Gemm, LossGradient, Matrix};
use crate::dtype::DType;
use crate::error::{Result, TensorError};
use crate::memory::Category;
use crate::ops::{WeightLayout, lent_place};
use crate::out::Out;
use crate::param::Operand;
use crate::profile;
use crate::shape::Shape;
use crate::tensor::Tensor;
use crate::with_category;

/// How the losses of rows of logits are taken: from logits of all classes ([`CrossEntropyOptions`]), or from those of one part
/// of them where others have the rest.
pub trait RowLoss {
    /// Targets with this value count for nothing.
    fn ignore_index(&self) -> i64;
    /// The number of classes by which it is chosen how many rows are held at once, where these logits have `own`: ranks that
    /// take a loss together must name the same.
    fn classes(&self, own: usize) -> usize {
        own
    }
    /// How many columns logits of so many classes are held in on a device.
    fn columns(&self, _device: &Device, classes: usize) -> usize {
        classes
    }
    /// As [`Losses::cross_entropy_rows`](crate::backend::Losses::cross_entropy_rows).
    fn rows(
        &self,
        logits: &mut Tensor,
        classes: usize,
        targets: &Tensor,
        losses: Out<'_>,
        gradient: LossGradient<'_>,
    ) -> Result<()>;
}

impl RowLoss for CrossEntropyOptions {
    fn ignore_index(&self) -> i64 {
        self.ignore_index
    }

    fn columns(&self, device: &Device, classes: usize) -> usize {
        device.backend().logits_columns(classes)
    }

    fn rows(
        &self,
        logits: &mut Tensor,
        classes: usize,
        targets: &Tensor,
        losses: Out<'_>,
        gradient: LossGradient<'_>,
    ) -> Result<()> {
        let device = logits.device().clone();
        device.backend().cross_entropy_rows(self, logits.out()?, classes, targets, losses, gradient)
    }
}

/// How many targets count, without waiting for the device.
fn counted(ignored: i64, targets: &Tensor) -> Result<Tensor> {
    let mut counted = Tensor::empty([], DType::I64, targets.device())?;
    targets.device().backend().count_targets(targets, ignored, counted.out()?)?;
    Ok(counted)
}

/// The mean over counted rows, summed in f64; zero when none counts. Of a gradient, it is each row's share.
fn mean_loss(losses: &Tensor, counted: &Tensor) -> Result<Tensor> {
    let mut mean = Tensor::empty([], DType::F32, losses.device())?;
    losses.device().backend().mean_loss(losses, counted, mean.out()?)?;
    Ok(mean)
}

/// An error that says where among all rows an index is, from one of the chunk that begins at `start`.
fn behind(start: usize, error: TensorError) -> TensorError {
    match error {
        TensorError::IndexOutOfRange { op, index, position, limit } => {
            TensorError::IndexOutOfRange { op, index, position: start + position, limit }
        }
        error => error,
    }
}

/// Mean cross-entropy of `logits [.., classes]` against `targets [..]`; an f32 scalar.
pub fn cross_entropy(
    logits: impl Into<Operand>,
    targets: &Tensor,
    losses_of: impl RowLoss,
) -> Result<Tensor> {
    let logits = logits.into();
    let (rows, classes) = (logits.shape().rows(), logits.shape().last());
    if targets.numel() != rows {
        return Err(TensorError::ShapeMismatch {
            op: "cross_entropy",
            left: *logits.shape(),
            right: *targets.shape(),
        });
    }
    let counted = counted(losses_of.ignore_index(), targets)?;
    let recording = needs_grad(&[&logits]);
    let value = logits.read()?;
    let device = value.device();
    let mut work = Tensor::empty([rows, classes], device.backend().logits_dtype(logits.dtype()), device)?;
    device.backend().cast(&value, work.out()?)?;
    let mut losses = Tensor::empty([rows], DType::F32, device)?;
    let gradient = if recording { LossGradient::OverLogits } else { LossGradient::Nowhere };
    losses_of.rows(&mut work, classes, targets, losses.out()?, gradient)?;
    let loss = mean_loss(&losses, &counted)?;
    if !recording {
        return Ok(loss);
    }
    let (shape, dtype) = (*logits.shape(), logits.dtype());
    Ok(record("cross_entropy", &[&logits], loss, move |dy| {
        let mut dlogits = Tensor::empty(shape, dtype, work.device())?;
        let share = mean_loss(&dy, &counted)?;
        work.device().backend().scale_by(&work.view(shape)?, &share, dlogits.out()?)?;
        Ok(vec![Some(dlogits)])
    }))
}

/// Mean cross-entropy of `x·W` against `targets`, holding only a chunk of logits at a time.
///
/// Since the loss is a scalar, its gradients are known up to one factor while forward still has the chunk at hand:
/// they are taken there and multiplied by the factor in backward, so the logits are computed once.
pub fn linear_cross_entropy(
    x: impl Into<Operand>,
    weight: impl Into<Operand>,
    layout: WeightLayout,
    targets: &Tensor,
    losses_of: impl RowLoss,
) -> Result<Tensor> {
    let (x, weight) = (x.into(), weight.into());
    let owner = weight.clone();
    let sizes = || format!("weight={}", owner.shape());
    let run = || recorded_linear_cross_entropy(x, weight, layout, targets, &losses_of);
    profile::in_module_of(Some(&owner), "Linear", sizes, run)
}

/// A table with rows of zeros behind it.
fn filled_up(table: &Tensor, rows: usize) -> Result<Tensor> {
    let (own, width) = (table.shape().rows(), table.shape().last());
    let (device, backend) = (table.device(), table.device().backend());
    let mut filled = Tensor::empty([rows, width], table.dtype(), device)?;
    backend.copy(table, filled.out()?.part(0, [own, width])?.out())?;
    backend.fill(filled.out()?.part(own * width, [rows - own, width])?.out(), 0.0)?;
    Ok(filled)
}

fn recorded_linear_cross_entropy(
    x: Operand,
    weight: Operand,
    layout: WeightLayout,
    targets: &Tensor,
    losses_of: &impl RowLoss,
) -> Result<Tensor> {
    const OP: &str = "linear_cross_entropy";
    let (rows, width) = (x.shape().rows(), x.shape().last());
    let (inputs, classes) = match (layout, weight.shape().sizes()) {
        (WeightLayout::OutIn, &[classes, inputs]) | (WeightLayout::InOut, &[inputs, classes]) => {
            (inputs, classes)
        }
        _ => return Err(TensorError::shape(OP, "the weight", *weight.shape(), "two dimensions")),
    };
    if inputs != width {
        return Err(TensorError::ShapeMismatch { op: OP, left: *x.shape(), right: *weight.shape() });
    }
    if targets.numel() != rows {
        return Err(TensorError::ShapeMismatch { op: OP, left: *x.shape(), right: *targets.shape() });
    }
    let counted = counted(losses_of.ignore_index(), targets)?;
    let recording = needs_grad(&[&x, &weight]);
    let wants = [recording && x.requires_grad(), recording && weight.requires_grad()];

    let input = x.read()?;
    let device = input.device().clone();
    let backend = device.backend();
    let dtype = x.dtype();
    let table = weight.read()?;
    let mut losses = Tensor::empty([rows], DType::F32, &device)?;
    let held = backend.logits_dtype(dtype);
    // Where logits have more columns than classes, so has the weight rows: every product then begins where units like it.
    let columns = match layout {
        WeightLayout::OutIn => losses_of.columns(&device, classes),
        WeightLayout::InOut => classes,
    };
    let filled_up = (columns > classes).then(|| filled_up(&table, columns)).transpose()?;
    let table_rows = filled_up.as_ref().unwrap_or(&table);
    let most = backend.logits_rows(losses_of.classes(classes) * held.size_bytes()).clamp(16, rows.max(16));
    // Of equal size: a small rest would keep few of the device's units busy.
    let chunk = rows.div_ceil(rows.div_ceil(most).max(1)).next_multiple_of(16).max(16);
    let mut dx = if wants[0] { Some(Tensor::empty(*x.shape(), dtype, &device)?) } else { None };
    // Sums over chunks stay in f32 and are rounded once, in backward.
    let mut dweight = if wants[1] {
        let shape = if columns > classes { Shape::from([columns, width]) } else { *weight.shape() };
        Some(with_category(Category::Gradients, || Tensor::empty(shape, DType::F32, &device))?)
    } else {
        None
    };
    let flat = input.view([rows, width])?;
    let transposed = layout == WeightLayout::OutIn;
    for start in (0..rows).step_by(chunk) {
        let count = chunk.min(rows - start);
        let x_chunk = flat.slice(start * width, [count, width])?;
        let mut logits = Tensor::empty([count, columns], held, &device)?;
        let w = Matrix { transposed, ..Matrix::whole(table_rows) };
        profile::count_product(1, count, classes, width);
        backend.gemm(Gemm::plain(count, columns, width, Matrix::whole(&x_chunk), w, logits.out()?))?;
        let target_chunk = targets.view([rows])?.slice(start, [count])?;
        let mut loss_chunk = losses.out()?.part(start, [count])?;
        let mut loss = |logits: &mut Tensor, gradient: LossGradient<'_>| {
            losses_of
                .rows(logits, classes, &target_chunk, loss_chunk.out(), gradient)
                .map_err(|error| behind(start, error))
        };
        if !recording {
            loss(&mut logits, LossGradient::Nowhere)?;
            continue;
        }
        let gradient = if held == dtype {
            loss(&mut logits, LossGradient::OverLogits)?;
            logits
        } else {
            let mut narrow = Tensor::empty(*logits.shape(), dtype, &device)?;
            loss(&mut logits, LossGradient::Into(narrow.out()?))?;
            narrow
        };
        if let Some(dx) = &mut dx {
            let mut target = dx.out()?.part(start * width, [count, width])?;
            let w = Matrix { transposed: !transposed, ..Matrix::whole(table_rows) };
            profile::taking_gradients(|| {
                profile::count_product(1, count, width, classes);
                backend.gemm(Gemm::plain(count, width, columns, Matrix::whole(&gradient), w, target.out()))
            })?;
        }
        if let Some(dweight) = &mut dweight {
            let (left, right, m, n) = match layout {
                WeightLayout::OutIn => (&gradient, &x_chunk, columns, width),
                WeightLayout::InOut => (&x_chunk, &gradient, width, classes),
            };
            let (a, b) = (Matrix::transposed(left), Matrix::whole(right));
            profile::taking_gradients(|| {
                profile::count_product(1, m, n, count);
                backend.gemm(Gemm { accumulate: start > 0, ..Gemm::plain(m, n, count, a, b, dweight.out()?) })
            })?;
        }
    }
    drop((table, filled_up));
    let dweight = match dweight {
        Some(all) if columns > classes => Some(all.slice(0, *weight.shape())?),
        all => all,
    };
    let loss = mean_loss(&losses, &counted)?;
    if !recording {
        return Ok(loss);
    }
    let param = Some(weight.clone()).filter(|weight| matches!(weight, Operand::Param(_)));
    let (dx, dweight) = (dx.map(Own::new), dweight.map(Own::new));
    Ok(record(OP, &[&x, &weight], loss, move |dy| {
        let share = mean_loss(&dy, &counted)?;
        // Nobody else sees these tensors: they are scaled where they lie, or on the way to where they belong.
        let finish = |gradient: &Option<Own>, param: Option<&Operand>, category: Category| {
            let Some(gradient) = gradient else { return Ok(None) };
            let mut gradient = gradient.take()?;
            let (shape, device) = (*gradient.shape(), gradient.device().clone());
            let place = param.map(|param| lent_place(param, shape, dtype)).transpose()?.flatten();
            let mut target = match place {
                Some(place) => place,
                None if gradient.dtype() == dtype => {
                    device.backend().scale_in_place(gradient.out()?, &share)?;
                    return Ok(Some(gradient));
                }
                None => with_category(category, || Tensor::empty(shape, dtype, &device))?,
            };
            device.backend().scale_by(&gradient, &share, target.out()?)?;
            Ok(Some(target))
        };
        Ok(vec![
            finish(&dx, None, Category::Activations)?,
            finish(&dweight, param.as_ref(), Category::Gradients)?,
        ])
    }))
}
