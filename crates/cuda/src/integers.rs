//! Values as small integers. See `kernels/integers.cu`.

use ferrospeed_tensor::backend::{Integers, RunForm, Runs};
use ferrospeed_tensor::quantize::Bits;
use ferrospeed_tensor::{DType, Out, Result, Tensor, TensorError};

use crate::compile::Shared;
use crate::{CudaBackend, Kernel, Source, at, at_out, launch, real};

/// Values that a warp takes at a time, eight by each of its threads.
const PER_WARP: usize = 256;
/// Times that it does so in a group, at most; longer groups are two warps'.
const MOST_HELD: usize = 4;
const THREADS: u32 = 256;
/// What the kernels are told of it.
pub(super) const SHARED: Shared = &[("PER_WARP", PER_WARP), ("MOST_HELD", MOST_HELD)];

/// What a form is compiled with, and values of a group; `None` where the kernels do not take it.
fn compiled(form: RunForm) -> Option<([&'static str; 2], usize)> {
    let RunForm::Turned { bits, group } = form else { return Some((["BITS=32", ""], PER_WARP)) };
    let packs = match group / PER_WARP {
        _ if !group.is_multiple_of(PER_WARP) => return None,
        1 => "PACKS=1",
        2 => "PACKS=2",
        4 => "PACKS=4",
        8 => "PACKS=8",
        _ => return None,
    };
    Some(([if bits == Bits::Four { "BITS=4" } else { "BITS=8" }, packs], group))
}

/// Blocks of threads for so many values, one or two warps to each group.
fn grid(backend: &CudaBackend, numel: usize, group: usize) -> [u32; 3] {
    let sharing = if group > MOST_HELD * PER_WARP { 2 } else { 1 };
    let wanted = (numel.div_ceil(group) * sharing).div_ceil(THREADS as usize / 32).max(1);
    [wanted.min(backend.driver.multiprocessors as usize * 64) as u32, 1, 1]
}

fn expect_bytes(bytes: &Tensor) -> Result<()> {
    if bytes.dtype() == DType::U8 {
        return Ok(());
    }
    Err(TensorError::argument("integers", format!("runs are bytes, not {}", bytes.dtype())))
}

impl Integers for CudaBackend {
    fn pack_run(&self, form: RunForm, values: &Tensor, out: Out<'_>, start: usize) -> Result<bool> {
        expect_bytes(out.on_device())?;
        let numel = values.numel();
        let Some(([bits, packs], group)) = compiled(form) else { return Ok(false) };
        if numel == 0 {
            return Ok(true);
        }
        let defines = [real("pack_run", values.dtype())?, bits, packs];
        launch!(
            self,
            Kernel { source: Source::Integers, defines, name: "pack_run" },
            grid(self, numel, group),
            [THREADS, 1, 1],
            0,
            numel as u64,
            group as u64,
            at(values),
            at_out(&out) + start as u64
        )?;
        Ok(true)
    }

    fn unpack_sum(&self, form: RunForm, runs: Runs<'_>, factor: f32, out: Out<'_>) -> Result<bool> {
        expect_bytes(runs.bytes)?;
        let numel = out.numel();
        let Some(([bits, packs], group)) = compiled(form) else { return Ok(false) };
        if numel == 0 {
            return Ok(true);
        }
        let defines = [real("unpack_sum", out.dtype())?, bits, packs];
        launch!(
            self,
            Kernel { source: Source::Integers, defines, name: "unpack_sum" },
            grid(self, numel, group),
            [THREADS, 1, 1],
            0,
            numel as u64,
            group as u64,
            at(runs.bytes) + runs.first as u64,
            runs.stride as u64,
            runs.count as u32,
            factor,
            at_out(&out)
        )?;
        Ok(true)
    }
}
