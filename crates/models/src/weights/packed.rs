//! Weights of few bits in files: `NAME.q8_0`, `NAME.q4_0`, `NAME.q4_k`, `NAME.q6_k` or `NAME.f8_e4m3` in place of `NAME`, bytes
//! `[outputs, blocks, bytes of a block]`.
//!
//! Blocks are neighbours along the inputs. A parameter that lies as `[inputs, outputs]` is stored the other way round, and its name
//! says so: `NAME.turned.q8_0`. A square one could not be told apart otherwise.

use std::ops::Range;

use ferrospeed_tensor::ops::WeightLayout;
use ferrospeed_tensor::packed::{PackedBits, PackedWeight, Packing};
use ferrospeed_tensor::{DType, Param};

use crate::error::{ModelError, Result};
use crate::weights::blocks::BlockForm;
use crate::weights::read::{StoredTensor, WeightFiles};

/// Stands behind the name of a parameter that lies as `[inputs, outputs]`.
const TURNED: &str = ".turned";

/// A parameter that the files hold in blocks.
#[derive(Clone, Copy)]
pub(super) struct StoredPacked<'a> {
    pub(super) stored: &'a StoredTensor,
    form: BlockForm,
    /// How the parameter itself lies.
    layout: WeightLayout,
}

/// The name under which a weight is stored so.
pub(crate) fn packed_name(name: &str, packing: Packing) -> String {
    named(name, BlockForm::of_bits(packing.bits), packing.layout)
}

fn named(name: &str, form: BlockForm, layout: WeightLayout) -> String {
    let turned = if layout == WeightLayout::InOut { TURNED } else { "" };
    format!("{name}{turned}{}", form.suffix())
}

/// The shape that a parameter of this shape has in a file.
pub(crate) fn packed_shape(shape: &[usize], packing: Packing) -> Option<Vec<usize>> {
    shape_in(shape, BlockForm::of_bits(packing.bits), packing.layout)
}

fn shape_in(shape: &[usize], form: BlockForm, layout: WeightLayout) -> Option<Vec<usize>> {
    let (outputs, inputs) = match (shape, layout) {
        (&[outputs, inputs], WeightLayout::OutIn) | (&[inputs, outputs], WeightLayout::InOut) => {
            (outputs, inputs)
        }
        _ => return None,
    };
    inputs.is_multiple_of(form.values()).then(|| vec![outputs, inputs / form.values(), form.bytes()])
}

impl StoredPacked<'_> {
    /// Whether it is that of a parameter of this shape.
    pub(super) fn is_of(&self, shape: &[usize]) -> bool {
        self.stored.dtype == DType::U8
            && shape_in(shape, self.form, self.layout).is_some_and(|shape| shape == self.stored.shape)
    }

    /// Values of a row of blocks.
    fn inputs(&self) -> usize {
        self.stored.shape.get(1).map_or(0, |blocks| blocks * self.form.values())
    }
}

impl WeightFiles {
    /// The bits in which products hold a parameter that is stored in blocks.
    pub fn packed(&self, param: &Param) -> Option<PackedBits> {
        self.find_packed(param.name()).map(|packed| packed.form.held_in())
    }

    /// The type in which a parameter is stored whole.
    pub(crate) fn dtype_of(&self, param: &Param) -> Option<DType> {
        self.find(param.name()).map(|found| found.own.dtype)
    }

    pub(super) fn find_packed(&self, name: &str) -> Option<StoredPacked<'_>> {
        let ways = [WeightLayout::OutIn, WeightLayout::InOut];
        let all = BlockForm::ALL.into_iter().flat_map(|form| ways.map(|layout| (form, layout)));
        all.into_iter().find_map(|(form, layout)| {
            let stored = self.find(&named(name, form, layout))?.whole;
            Some(StoredPacked { stored, form, layout })
        })
    }

    /// A parameter in the very bits that the files have, where it is stored so.
    pub(super) fn as_packed(&self, param: &Param, packing: Packing) -> Result<Option<PackedWeight>> {
        let (None, Some(found)) = (self.find(param.name()), self.find_packed(param.name())) else {
            return Ok(None);
        };
        let whole = param.whole_shape().sizes();
        let is_so = found.form == BlockForm::of_bits(packing.bits) && found.layout == packing.layout;
        if !is_so || param.shape().sizes() != whole || !found.is_of(whole) {
            return Ok(None);
        }
        let (outputs, inputs) = (found.stored.shape[0], found.inputs());
        Ok(Some(PackedWeight::from_file_bytes(packing.bits, outputs, inputs, &self.bytes(found.stored)?)?))
    }

    /// Elements `range` of a parameter that is stored so, in the order in which it lies itself.
    pub(super) fn packed_floats(
        &self,
        packed: StoredPacked<'_>,
        param: &Param,
        range: Range<usize>,
        out: &mut [f32],
    ) -> Result<()> {
        match packed.layout {
            WeightLayout::OutIn => param.each_run(range, out, |run, out| {
                packed
                    .stored
                    .rows
                    .each_run(packed.inputs(), run, out, |run, out| self.unpacked_run(packed, run, out))
            }),
            WeightLayout::InOut => self.turned_floats(packed, param, range, out),
        }
    }

    /// Values of a stored tensor that lie side by side.
    fn unpacked_run(&self, packed: StoredPacked<'_>, run: Range<usize>, out: &mut [f32]) -> Result<()> {
        let StoredPacked { stored, form, .. } = packed;
        let all = stored.shape.first().map_or(0, |rows| rows * packed.inputs());
        if run.end > all || run.len() != out.len() {
            let why = format!("elements {run:?} were asked for of a packed tensor of {:?}", stored.shape);
            return Err(ModelError::config("packed weight", why));
        }
        let blocks = run.start / form.values()..run.end.div_ceil(form.values());
        let mut bytes = vec![0; blocks.len() * form.bytes()];
        self.read_bytes(stored, blocks.start * form.bytes(), &mut bytes)?;
        let mut values = vec![0.0; blocks.len() * form.values()];
        form.unpack(&bytes, &mut values);
        let first = run.start - blocks.start * form.values();
        out.copy_from_slice(&values[first..first + out.len()]);
        Ok(())
    }

    /// Elements of a parameter `[inputs, outputs]`: the inputs that they are of are unpacked for all outputs, then turned.
    fn turned_floats(
        &self,
        packed: StoredPacked<'_>,
        param: &Param,
        range: Range<usize>,
        out: &mut [f32],
    ) -> Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        let outputs = packed.stored.shape[0];
        let (mut first, mut end) = (usize::MAX, 0);
        param.each_run(range.clone(), out, |run, _| {
            (first, end) = (first.min(run.start / outputs), end.max(run.end.div_ceil(outputs)));
            Ok::<_, ModelError>(())
        })?;
        let inputs = first..end;
        let mut turned = vec![0.0; inputs.len() * outputs];
        let mut row = vec![0.0; inputs.len()];
        for output in 0..outputs {
            let first = output * packed.inputs();
            self.unpacked_run(packed, first + inputs.start..first + inputs.end, &mut row)?;
            for (value, line) in row.iter().zip(turned.chunks_mut(outputs)) {
                line[output] = *value;
            }
        }
        let before = inputs.start * outputs;
        param.each_run(range, out, |run, out| {
            out.copy_from_slice(&turned[run.start - before..run.end - before]);
            Ok(())
        })
    }
}
