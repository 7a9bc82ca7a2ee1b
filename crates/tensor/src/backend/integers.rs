//! Values that travel as small integers.

use crate::backend::Memory;
use crate::error::Result;
use crate::out::Out;
use crate::quantize::Bits;
use crate::tensor::Tensor;

/// How a run of values lies in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunForm {
    /// As f32.
    Exact,
    /// The steps of its groups, then their integers, as [`Format::quantize_turned`](crate::quantize::Format::quantize_turned)
    /// makes them.
    Turned {
        /// How large the integers are.
        bits: Bits,
        /// Values that share a step.
        group: usize,
    },
}

/// Several runs of as many values in one tensor of bytes.
#[derive(Debug, Clone, Copy)]
pub struct Runs<'a> {
    /// The bytes.
    pub bytes: &'a Tensor,
    /// Where the first run begins, and how far it is from one to the next.
    pub first: usize,
    /// The distance.
    pub stride: usize,
    /// How many there are.
    pub count: usize,
}

/// Small integers on a device, with the bits that the host gives them. The host's own are functions of slices
/// ([`crate::quantize`]).
pub trait Integers: Memory {
    /// Packs a run to `out`, from byte `start` on. `false`: the device has no kernel for it, and nothing was done.
    fn pack_run(&self, _form: RunForm, _values: &Tensor, _out: Out<'_>, _start: usize) -> Result<bool> {
        Ok(false)
    }
    /// `out` becomes the sum of runs, in f32 and in their order, times `factor`. `false`: as above.
    fn unpack_sum(&self, _form: RunForm, _runs: Runs<'_>, _factor: f32, _out: Out<'_>) -> Result<bool> {
        Ok(false)
    }
}
