//! Losses: `kernels/loss.cu`.

use ferrospeed_tensor::backend::{ClassPart, Copies, CrossEntropyOptions, LossGradient, LossParts, Losses};
use ferrospeed_tensor::{DType, Out, Result, Tensor};

use crate::compile::Shared;
use crate::{CudaBackend, Kernel, Source, at, launch, op_number, real};

/// Matches `LossSpec` in the kernels.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct LossSpec {
    ignore_index: i64,
    smoothing: f32,
    z_loss: f32,
}

/// Rows of logits begin where products and packs of eight want them to.
const COLUMNS: usize = 8;
/// Shared memory of `cross_entropy_held` beside the row.
const HELD_PARTS_BYTES: usize = 768;
/// What the kernels are told of it.
pub(super) const SHARED: Shared = &[("HELD_PARTS_BYTES", HELD_PARTS_BYTES)];

fn loss_kernel(dtype: DType, name: &'static str) -> Result<Kernel> {
    Ok(Kernel { source: Source::Loss, defines: [real("cross_entropy", dtype)?, "", ""], name })
}

pub(super) fn cross_entropy_rows(
    backend: &CudaBackend,
    options: &CrossEntropyOptions,
    logits: &Tensor,
    classes: usize,
    targets: &Tensor,
    losses: &Tensor,
    with_gradient: bool,
) -> Result<()> {
    let (rows, columns) = (logits.shape().rows(), logits.shape().last());
    if rows == 0 {
        return Ok(());
    }
    let spec = LossSpec {
        ignore_index: options.ignore_index,
        smoothing: options.label_smoothing,
        z_loss: options.z_loss,
    };
    // A row of 16-bit logits stays in the registers of a full block, and the next fits into shared memory.
    let row_bytes = columns * logits.dtype().size_bytes();
    let held = logits.dtype().size_bytes() == 2
        && columns.is_multiple_of(8)
        && columns < classes + 8
        && (4096..=57_344).contains(&columns)
        && row_bytes + HELD_PARTS_BYTES <= backend.driver.shared_bytes
        && at(logits).is_multiple_of(16);
    let (with_gradient, op) = (i32::from(with_gradient), op_number("cross_entropy"));
    if held {
        return launch!(
            backend,
            loss_kernel(logits.dtype(), "cross_entropy_held")?,
            [backend.driver.multiprocessors.min(rows as u32), 1, 1],
            [1024, 1, 1],
            row_bytes as u32,
            rows as u64,
            classes as u64,
            columns as u64,
            at(logits),
            at(targets),
            at(losses),
            spec,
            with_gradient,
            op,
            backend.fault
        );
    }
    launch!(
        backend,
        loss_kernel(logits.dtype(), "cross_entropy")?,
        [rows as u32, 1, 1],
        [row_threads(classes), 1, 1],
        0,
        classes as u64,
        columns as u64,
        at(logits),
        at(targets),
        at(losses),
        spec,
        with_gradient,
        op,
        backend.fault
    )
}

/// Threads for a block that walks a row, two packs each.
fn row_threads(classes: usize) -> u32 {
    (classes.div_ceil(16).next_multiple_of(32)).clamp(32, 1024) as u32
}

/// Matches `PartSpec` in the kernels.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct PartSpec {
    ignore_index: i64,
    first: u64,
    all: u64,
}

impl From<&ClassPart> for PartSpec {
    fn from(part: &ClassPart) -> PartSpec {
        PartSpec { ignore_index: part.ignore_index, first: part.first as u64, all: part.all as u64 }
    }
}

impl Losses for CudaBackend {
    fn logits_dtype(&self, dtype: DType) -> DType {
        dtype
    }

    fn logits_columns(&self, classes: usize) -> usize {
        classes.next_multiple_of(COLUMNS)
    }

    fn logits_rows(&self, row_bytes: usize) -> usize {
        (768 << 20) / row_bytes.max(1)
    }

    fn cross_entropy_rows(
        &self,
        options: &CrossEntropyOptions,
        logits: Out<'_>,
        classes: usize,
        targets: &Tensor,
        losses: Out<'_>,
        gradient: LossGradient<'_>,
    ) -> Result<()> {
        let (logits, with_gradient) = (logits.into_tensor(), !matches!(gradient, LossGradient::Nowhere));
        cross_entropy_rows(self, options, logits, classes, targets, losses.into_tensor(), with_gradient)?;
        match gradient {
            LossGradient::Into(target) => self.cast(logits, target),
            LossGradient::Nowhere | LossGradient::OverLogits => Ok(()),
        }
    }

    fn count_targets(&self, targets: &Tensor, ignore_index: i64, target: Out<'_>) -> Result<()> {
        let target = target.into_tensor();
        let kernel = loss_kernel(DType::F32, "count_targets")?;
        let count = targets.numel() as u64;
        launch!(self, kernel, [1, 1, 1], [1024, 1, 1], 0, count, at(targets), ignore_index, at(target))
    }

    fn mean_loss(&self, losses: &Tensor, counted: &Tensor, target: Out<'_>) -> Result<()> {
        let target = target.into_tensor();
        let kernel = loss_kernel(DType::F32, "sum_losses")?;
        let count = losses.numel() as u64;
        launch!(self, kernel, [1, 1, 1], [1024, 1, 1], 0, count, at(losses), at(target), at(counted))
    }
}

impl LossParts for CudaBackend {
    fn cross_entropy_part(
        &self,
        part: &ClassPart,
        logits: Out<'_>,
        targets: &Tensor,
        told: Out<'_>,
    ) -> Result<()> {
        let logits = logits.into_tensor();
        let told = told.into_tensor();
        let (rows, classes) = (logits.shape().rows(), logits.shape().last());
        if rows == 0 {
            return Ok(());
        }
        launch!(
            self,
            loss_kernel(logits.dtype(), "cross_entropy_part")?,
            [rows as u32, 1, 1],
            [row_threads(classes), 1, 1],
            0,
            classes as u64,
            at(logits),
            at(targets),
            at(told),
            PartSpec::from(part),
            op_number("cross_entropy"),
            self.fault
        )
    }

    fn cross_entropy_of_parts(
        &self,
        part: &ClassPart,
        told: &Tensor,
        logits: Out<'_>,
        targets: &Tensor,
        losses: Out<'_>,
        gradient: LossGradient<'_>,
    ) -> Result<()> {
        let (logits, with_gradient) = (logits.into_tensor(), !matches!(gradient, LossGradient::Nowhere));
        cross_entropy_of_parts(self, part, told, logits, targets, losses.into_tensor(), with_gradient)?;
        match gradient {
            LossGradient::Into(target) => self.cast(logits, target),
            LossGradient::Nowhere | LossGradient::OverLogits => Ok(()),
        }
    }
}

pub(super) fn cross_entropy_of_parts(
    backend: &CudaBackend,
    part: &ClassPart,
    told: &Tensor,
    logits: &Tensor,
    targets: &Tensor,
    losses: &Tensor,
    with_gradient: bool,
) -> Result<()> {
    let (rows, classes) = (logits.shape().rows(), logits.shape().last());
    if rows == 0 {
        return Ok(());
    }
    launch!(
        backend,
        loss_kernel(logits.dtype(), "cross_entropy_of_parts")?,
        [rows as u32, 1, 1],
        [row_threads(classes), 1, 1],
        0,
        classes as u64,
        (told.numel() / (rows * ClassPart::NUMBERS)) as u64,
        at(logits),
        at(targets),
        at(told),
        at(losses),
        PartSpec::from(part),
        i32::from(with_gradient)
    )
}
