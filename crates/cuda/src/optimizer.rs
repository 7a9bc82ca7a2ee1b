//! Optimizer steps and exact norms: `kernels/optimizer.cu`.

use ferrospeed_tensor::backend::{Clipping, Measured, Update, UpdateOperands, Updates, sum_of_words};
use ferrospeed_tensor::{DType, Out, Result, Tensor, TensorError};

use crate::table::{Entry, Table};
use crate::{BLOCK, CudaBackend, Kernel, Source, at, at_option, launch, real};

/// Matches `Update` in the kernels, which say what each letter is.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct DeviceUpdate {
    kind: i32,
    flag: i32,
    a: f32,
    b: f32,
    c: f32,
    d: f32,
    e: f32,
    f: f32,
    g: f32,
    h: f32,
}

impl From<&Update> for DeviceUpdate {
    fn from(update: &Update) -> DeviceUpdate {
        let zero = DeviceUpdate::default();
        match *update {
            Update::Adam {
                decoupled,
                betas: [a, b],
                rest: [c, d],
                eps,
                decay,
                step_size,
                inverse_root_correction,
            } => {
                let kind = if decoupled { 1 } else { 0 };
                DeviceUpdate {
                    kind,
                    a,
                    b,
                    c,
                    d,
                    e: eps,
                    f: decay,
                    g: step_size,
                    h: inverse_root_correction,
                    ..zero
                }
            }
            Update::Sgd { lr, decay, momentum, entering, nesterov } => DeviceUpdate {
                kind: 2,
                flag: nesterov.into(),
                a: momentum,
                b: entering,
                c: decay,
                d: lr,
                ..zero
            },
            Update::Adagrad { lr, decay, eps } => DeviceUpdate { kind: 3, a: decay, b: lr, c: eps, ..zero },
            Update::Lion { lr, shrink, betas: [a, b], rest: [c, d] } => {
                DeviceUpdate { kind: 4, a, b, c, d, e: lr, f: shrink, ..zero }
            }
            Update::LambDirection { betas: [a, b], rest: [c, d], eps, eps_inside_sqrt, decay } => {
                DeviceUpdate { kind: 5, flag: eps_inside_sqrt.into(), a, b, c, d, e: eps, f: decay, ..zero }
            }
            Update::LambApply { step_size } => DeviceUpdate { kind: 6, a: step_size, ..zero },
        }
    }
}

/// Matches `Piece` in the kernels.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
struct Piece {
    first: u64,
    count: u64,
    weights: u64,
    gradient: u64,
    states: [u64; 3],
    copy: u64,
}

impl Entry for Piece {
    fn count(&self) -> u64 {
        self.count
    }
    fn set_first(&mut self, first: u64) {
        self.first = first;
    }
}

/// What measuring goes over.
fn gradients_table<'a>(backend: &'a CudaBackend, tensors: &[&Tensor]) -> Result<Table<'a>> {
    let piece = |x: &&Tensor| Piece { count: x.numel() as u64, gradient: at(x), ..Piece::default() };
    Table::new(backend, tensors.iter().map(piece).collect())
}

impl Updates for CudaBackend {
    fn update(&self, update: &Update, gradient_factor: f32, pieces: &[UpdateOperands]) -> Result<()> {
        submit(self, update, gradient_factor, 0, pieces)
    }

    fn largest_magnitude(&self, pieces: &[&Tensor]) -> Result<f32> {
        let result = self.scratch(4)?;
        self.zero_bytes(result.address(), 4)?;
        measure_largest(self, pieces, &gradients_table(self, pieces)?, result.address())?;
        let mut bits = [0u8; 4];
        self.read(result.address(), &mut bits)?;
        Ok(f32::from_bits(u32::from_le_bytes(bits)))
    }

    fn sum_of_squares(&self, pieces: &[&Tensor], grid: f64) -> Result<i128> {
        let result = self.scratch(16)?;
        self.zero_bytes(result.address(), 16)?;
        measure_squares(self, pieces, &gradients_table(self, pieces)?, grid, 0, result.address())?;
        let mut parts = [0u64; 2];
        self.read(result.address(), bytemuck::cast_slice_mut(&mut parts))?;
        Ok(sum_of_words(parts))
    }

    fn measure_more(&self, pieces: &[&Tensor], grids: &[f64], measures: Out<'_>) -> Result<()> {
        let measures = measures.into_tensor();
        if measures.dtype() != DType::I64 || measures.numel() != 1 + 2 * grids.len() {
            return Err(TensorError::argument(
                "measure_more",
                format!("{measures:?} for {} grids", grids.len()),
            ));
        }
        let table = gradients_table(self, pieces)?;
        measure_largest(self, pieces, &table, at(measures))?;
        for (index, &grid) in grids.iter().enumerate() {
            measure_squares(self, pieces, &table, grid, 0, at(measures) + 8 + 16 * index as u64)?;
        }
        Ok(())
    }

    fn clipped_updates(
        &self,
        clipping: Clipping,
        gradients: &[&Tensor],
        updates: &[(Update, Vec<UpdateOperands>)],
    ) -> Result<Option<Measured>> {
        clipped_updates(self, clipping, gradients, updates).map(Some)
    }
}

/// Matches `Verdict` in the kernels.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
struct Verdict {
    largest: u32,
    is_bad: u32,
    parts: [u64; 2],
    factor: f32,
    unused: u32,
}

pub(super) fn clipped_updates(
    backend: &CudaBackend,
    clipping: Clipping,
    gradients: &[&Tensor],
    updates: &[(Update, Vec<UpdateOperands>)],
) -> Result<Measured> {
    let verdict = backend.scratch(size_of::<Verdict>())?;
    let [largest, parts] = [std::mem::offset_of!(Verdict, largest), std::mem::offset_of!(Verdict, parts)]
        .map(|offset| verdict.address() + offset as u64);
    backend.zero_bytes(verdict.address(), size_of::<Verdict>())?;
    let table = gradients_table(backend, gradients)?;
    measure_largest(backend, gradients, &table, largest)?;
    measure_squares(backend, gradients, &table, 0.0, largest, parts)?;
    let limit = clipping.limit.unwrap_or(f64::INFINITY);
    let judge = measure(gradients, "judge")?;
    launch!(backend, judge, [1, 1, 1], [1, 1, 1], 0, verdict.address(), clipping.loss_scale, limit)?;
    let reading = backend.begin_read(verdict.address(), size_of::<Verdict>())?;
    for (update, pieces) in updates {
        submit(backend, update, 0.0, verdict.address(), pieces)?;
    }
    let known: Verdict = bytemuck::pod_read_unaligned(&reading()?);
    Ok(Measured { largest: f32::from_bits(known.largest), squares: sum_of_words(known.parts) })
}

/// Submits an optimizer step, with the factor of a [`Verdict`] on the device where there is one.
fn submit(
    backend: &CudaBackend,
    update: &Update,
    gradient_factor: f32,
    verdict: u64,
    pieces: &[UpdateOperands],
) -> Result<()> {
    const STATES: [&str; 4] = ["STATES=0", "STATES=1", "STATES=2", "STATES=3"];
    let Some(example) = pieces.first() else { return Ok(()) };
    let copy_type = match example.copy.as_ref().map(Tensor::dtype) {
        Some(DType::F16) => "COPY=f16",
        Some(DType::F32) => "COPY=float",
        _ => "COPY=bf16",
    };
    let defines =
        [real("optimizer step", example.gradient.dtype())?, copy_type, STATES[example.states.len()]];
    let kernel = Kernel { source: Source::Optimizer, defines, name: "optimizer_step" };
    let piece = |operands: &UpdateOperands| Piece {
        first: 0,
        count: operands.weights.numel() as u64,
        weights: at(&operands.weights),
        gradient: at(&operands.gradient),
        states: std::array::from_fn(|index| at_option(operands.states.get(index))),
        copy: at_option(operands.copy.as_ref()),
    };
    let table = Table::new(backend, pieces.iter().map(piece).collect())?;
    launch!(
        backend,
        kernel,
        table.grid(backend),
        [BLOCK, 1, 1],
        0,
        table.memory.address(),
        table.number,
        table.chunks,
        DeviceUpdate::from(update),
        gradient_factor,
        verdict
    )
}

fn measure(pieces: &[&Tensor], name: &'static str) -> Result<Kernel> {
    let dtype = pieces.first().map_or(DType::F32, |piece| piece.dtype());
    let defines = [real("gradient norm", dtype)?, "COPY=bf16", "STATES=0"];
    Ok(Kernel { source: Source::Optimizer, defines, name })
}

/// Submits the search for the largest magnitude, which is at `largest` if it is larger than what was there.
fn measure_largest(backend: &CudaBackend, pieces: &[&Tensor], table: &Table<'_>, largest: u64) -> Result<()> {
    let kernel = measure(pieces, "largest_magnitude")?;
    let (memory, grid) = (table.memory.address(), table.grid(backend));
    launch!(backend, kernel, grid, [BLOCK, 1, 1], 0, memory, table.number, table.chunks, largest)
}

/// Submits the sum of squares on a grid, or on that of the magnitude at `largest`; it is added to `parts`.
fn measure_squares(
    backend: &CudaBackend,
    pieces: &[&Tensor],
    table: &Table<'_>,
    grid: f64,
    largest: u64,
    parts: u64,
) -> Result<()> {
    let kernel = measure(pieces, "sum_squares")?;
    let (memory, blocks) = (table.memory.address(), table.grid(backend));
    launch!(
        backend,
        kernel,
        blocks,
        [BLOCK, 1, 1],
        0,
        memory,
        table.number,
        table.chunks,
        grid,
        largest,
        parts
    )
}
