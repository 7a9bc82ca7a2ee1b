//! Optimizer steps and exact norms: `kernels/optimizer.cu`.

use crate::backend::{Update, UpdateOperands};
use crate::cuda::{BLOCK, CudaBackend, Kernel, Source, at, at_option, launch, real};
use crate::dtype::DType;
use crate::error::Result;
use crate::tensor::Tensor;

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

pub(super) fn update(backend: &CudaBackend, update: &Update, operands: &UpdateOperands<'_>) -> Result<()> {
    const STATES: [&str; 4] = ["STATES=0", "STATES=1", "STATES=2", "STATES=3"];
    let copy_type = match operands.copy.map(Tensor::dtype) {
        Some(DType::F16) => "COPY=f16",
        Some(DType::F32) => "COPY=float",
        _ => "COPY=bf16",
    };
    let defines =
        [real("optimizer step", operands.gradient.dtype())?, copy_type, STATES[operands.states.len()]];
    let kernel = Kernel { source: Source::Optimizer, defines, name: "optimizer_step" };
    let state = |index: usize| at_option(operands.states.get(index));
    let count = operands.weights.numel();
    launch!(
        backend,
        kernel,
        backend.grid(count),
        [BLOCK, 1, 1],
        0,
        count as u64,
        DeviceUpdate::from(update),
        operands.gradient_factor,
        at(operands.weights),
        at(operands.gradient),
        state(0),
        state(1),
        state(2),
        at_option(operands.copy)
    )
}

fn measure(x: &Tensor, name: &'static str) -> Result<Kernel> {
    let defines = [real("gradient norm", x.dtype())?, "COPY=bf16", "STATES=0"];
    Ok(Kernel { source: Source::Optimizer, defines, name })
}

pub(super) fn largest_magnitude(backend: &CudaBackend, x: &Tensor) -> Result<f32> {
    let result = backend.scratch(4)?;
    backend.zero_bytes(result.address(), 4)?;
    let kernel = measure(x, "largest_magnitude")?;
    let grid = backend.grid(x.numel());
    launch!(backend, kernel, grid, [BLOCK, 1, 1], 0, x.numel() as u64, at(x), result.address())?;
    let mut bits = [0u8; 4];
    backend.read(result.address(), &mut bits)?;
    Ok(f32::from_bits(u32::from_le_bytes(bits)))
}

pub(super) fn sum_of_squares(backend: &CudaBackend, x: &Tensor, grid: f64) -> Result<i128> {
    let result = backend.scratch(16)?;
    backend.zero_bytes(result.address(), 16)?;
    let kernel = measure(x, "sum_squares")?;
    let blocks = backend.grid(x.numel());
    launch!(backend, kernel, blocks, [BLOCK, 1, 1], 0, x.numel() as u64, at(x), grid, result.address())?;
    let mut parts = [0u64; 2];
    backend.read(result.address(), bytemuck::cast_slice_mut(&mut parts))?;
    Ok((i128::from(parts[1]) << 32) + i128::from(parts[0]))
}
