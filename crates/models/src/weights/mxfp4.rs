//! Stacks of experts in MXFP4, as gpt-oss's files have them: `NAME_blocks`, `[experts, outputs, groups, 16]`, two values of four bits
//! in a byte, the first in the lower half, and `NAME_scales`, `[experts, outputs, groups]`, the exponent of each group of 32. (Open
//! Compute Project: "OCP microscaling formats", 2023, section 5.) The parameter lies the other way round, `[experts, inputs, outputs]`,
//! and its values are widened exactly.

use std::ops::Range;

use ferrospeed_tensor::{DType, Param};

use crate::error::{ModelError, Result};
use crate::weights::read::{StoredTensor, WeightFiles};

/// Values that share an exponent.
const GROUP: usize = 32;
/// What stands for an exponent of zero.
const BIAS: i32 = 127;
/// The values of four bits: a sign, two bits of exponent, one of mantissa.
const VALUES: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// A parameter that is stored so.
#[derive(Clone, Copy)]
pub(super) struct StoredStack<'a> {
    pub(super) blocks: &'a StoredTensor,
    pub(super) scales: &'a StoredTensor,
}

impl StoredStack<'_> {
    /// Whether it is that of a parameter of this shape.
    pub(super) fn is_of(&self, shape: &[usize]) -> bool {
        let &[experts, inputs, outputs] = shape else { return false };
        let groups = inputs / GROUP;
        inputs.is_multiple_of(GROUP)
            && [self.blocks, self.scales].iter().all(|stored| stored.dtype == DType::U8)
            && self.blocks.shape == [experts, outputs, groups, GROUP / 2]
            && self.scales.shape == [experts, outputs, groups]
    }
}

impl WeightFiles {
    /// A stack that is stored in blocks and scales.
    pub(super) fn find_stack(&self, name: &str) -> Option<StoredStack<'_>> {
        let [blocks, scales] = ["blocks", "scales"].map(|part| self.find(&format!("{name}_{part}")));
        Some(StoredStack { blocks: blocks?.whole, scales: scales?.whole })
    }

    /// Elements `range` of a parameter that is stored so and whose shape it has: expert by expert.
    pub(super) fn stack_floats(
        &self,
        stack: StoredStack<'_>,
        param: &Param,
        range: Range<usize>,
        out: &mut [f32],
    ) -> Result<()> {
        let &[_, inputs, outputs] = param.whole_shape().sizes() else {
            return Err(ModelError::config("MXFP4", "a stack of experts has three dimensions"));
        };
        let of_expert = inputs * outputs;
        let mut held: Option<(usize, Vec<f32>)> = None;
        param.each_run(range, out, |run, out| {
            let (mut start, mut written) = (run.start, 0);
            while start < run.end {
                let expert = start / of_expert;
                let end = run.end.min((expert + 1) * of_expert);
                if held.as_ref().is_none_or(|(number, _)| *number != expert) {
                    held = Some((expert, self.expert(stack, expert, [inputs, outputs])?));
                }
                if let Some((_, values)) = &held {
                    let first = start - expert * of_expert;
                    out[written..written + end - start].copy_from_slice(&values[first..first + end - start]);
                }
                (start, written) = (end, written + end - start);
            }
            Ok(())
        })
    }

    /// An expert's values `[inputs, outputs]`.
    fn expert(
        &self,
        stack: StoredStack<'_>,
        expert: usize,
        [inputs, outputs]: [usize; 2],
    ) -> Result<Vec<f32>> {
        let groups = inputs / GROUP;
        let (mut blocks, mut scales) = (vec![0u8; outputs * inputs / 2], vec![0u8; outputs * groups]);
        self.read_bytes(stack.blocks, expert * blocks.len(), &mut blocks)?;
        self.read_bytes(stack.scales, expert * scales.len(), &mut scales)?;
        let mut values = vec![0.0f32; inputs * outputs];
        for output in 0..outputs {
            let row = &blocks[output * inputs / 2..(output + 1) * inputs / 2];
            for (place, byte) in row.iter().enumerate() {
                let scale = f64::from(i32::from(scales[output * groups + 2 * place / GROUP]) - BIAS).exp2();
                for (half, bits) in [byte & 0xf, byte >> 4].into_iter().enumerate() {
                    let value = f64::from(VALUES[usize::from(bits)]) * scale;
                    values[(2 * place + half) * outputs + output] = value as f32;
                }
            }
        }
        Ok(values)
    }
}
