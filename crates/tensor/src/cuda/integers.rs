//! Values as small integers. See `kernels/integers.cu`.

use crate::backend::{Integers, RunForm, Runs};
use crate::cpu::quantize::Bits;
use crate::cuda::{CudaBackend, Kernel, Source, at, launch, real};
use crate::dtype::DType;
use crate::error::{Result, TensorError};
use crate::out::Out;
use crate::tensor::Tensor;

/// Values that a thread takes.
const PER_THREAD: usize = 8;
const THREADS: usize = 256;

/// What a form is compiled with, values of a group, and threads and blocks for so many values; `None` where the kernel does not
/// take it.
fn shape(
    backend: &CudaBackend,
    form: RunForm,
    numel: usize,
) -> Option<(&'static str, u64, [u32; 3], [u32; 3])> {
    let most = backend.driver.multiprocessors as usize * 64;
    match form {
        RunForm::Exact => {
            let blocks = numel.div_ceil(THREADS).clamp(1, most) as u32;
            Some(("BITS=32", 1, [blocks, 1, 1], [THREADS as u32, 1, 1]))
        }
        RunForm::Turned { bits, group } => {
            let threads = group / PER_THREAD;
            let fits = group.is_multiple_of(PER_THREAD * 32) && threads <= 1024;
            let define = if bits == Bits::Four { "BITS=4" } else { "BITS=8" };
            let blocks = numel.div_ceil(group).clamp(1, most) as u32;
            fits.then_some((define, group as u64, [blocks, 1, 1], [threads as u32, 1, 1]))
        }
    }
}

fn expect_bytes(bytes: &Tensor) -> Result<()> {
    if bytes.dtype() == DType::U8 {
        return Ok(());
    }
    Err(TensorError::argument("integers", format!("runs are bytes, not {}", bytes.dtype())))
}

impl Integers for CudaBackend {
    fn pack_run(&self, form: RunForm, values: &Tensor, out: Out<'_>, start: usize) -> Result<bool> {
        expect_bytes(out.tensor)?;
        let numel = values.numel();
        let Some((define, group, grid, block)) = shape(self, form, numel) else { return Ok(false) };
        if numel == 0 {
            return Ok(true);
        }
        let defines = [real("pack_run", values.dtype())?, define, ""];
        launch!(
            self,
            Kernel { source: Source::Integers, defines, name: "pack_run" },
            grid,
            block,
            0,
            numel as u64,
            group,
            at(values),
            at(out.tensor) + start as u64
        )?;
        Ok(true)
    }

    fn unpack_sum(&self, form: RunForm, runs: Runs<'_>, factor: f32, out: Out<'_>) -> Result<bool> {
        expect_bytes(runs.bytes)?;
        let numel = out.tensor.numel();
        let Some((define, group, grid, block)) = shape(self, form, numel) else { return Ok(false) };
        if numel == 0 {
            return Ok(true);
        }
        let defines = [real("unpack_sum", out.tensor.dtype())?, define, ""];
        launch!(
            self,
            Kernel { source: Source::Integers, defines, name: "unpack_sum" },
            grid,
            block,
            0,
            numel as u64,
            group,
            at(runs.bytes) + runs.first as u64,
            runs.stride as u64,
            runs.count as u32,
            factor,
            at(out.tensor)
        )?;
        Ok(true)
    }
}
