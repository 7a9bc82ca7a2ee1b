//! Weights of few bits in files: `NAME.q8_0`, `NAME.q4_0`, `NAME.q4_k`, `NAME.q6_k` or `NAME.f8_e4m3` in place of `NAME`, bytes
//! `[outputs, blocks, bytes of a block]`.

use std::ops::Range;

use ferrospeed_tensor::packed::{PackedBits, PackedWeight};
use ferrospeed_tensor::{DType, Param};

use crate::error::{ModelError, Result};
use crate::weights::blocks::BlockForm;
use crate::weights::read::{StoredTensor, WeightFiles};

/// The name under which a weight of so many bits is stored.
pub(crate) fn packed_name(name: &str, bits: PackedBits) -> String {
    format!("{name}{}", BlockForm::of_bits(bits).suffix())
}

/// The shape of a weight `[outputs, inputs]` in a file.
pub(crate) fn packed_shape(shape: &[usize], form: BlockForm) -> Option<Vec<usize>> {
    match shape {
        &[outputs, inputs] if inputs.is_multiple_of(form.values()) => {
            Some(vec![outputs, inputs / form.values(), form.bytes()])
        }
        _ => None,
    }
}

impl WeightFiles {
    /// The bits in which products hold a parameter that is stored in blocks.
    pub fn packed(&self, param: &Param) -> Option<PackedBits> {
        self.find_packed(param.name()).map(|(_, form)| form.held_in())
    }

    /// The type in which a parameter is stored whole.
    pub(crate) fn dtype_of(&self, param: &Param) -> Option<DType> {
        self.find(param.name()).map(|found| found.own.dtype)
    }

    pub(super) fn find_packed(&self, name: &str) -> Option<(&StoredTensor, BlockForm)> {
        let of_form = |form: BlockForm| Some((self.find(&format!("{name}{}", form.suffix()))?.whole, form));
        BlockForm::ALL.into_iter().find_map(of_form)
    }

    /// Whether a stored tensor is that of a packed weight of this shape.
    pub(super) fn is_packed_of(stored: &StoredTensor, form: BlockForm, shape: &[usize]) -> bool {
        stored.dtype == DType::U8 && packed_shape(shape, form).is_some_and(|shape| shape == stored.shape)
    }

    /// A parameter in the very bits that the files have, where it is stored so.
    pub(super) fn as_packed(&self, param: &Param, bits: PackedBits) -> Result<Option<PackedWeight>> {
        let form = BlockForm::of_bits(bits);
        let (None, Some((stored, found))) = (self.find(param.name()), self.find_packed(param.name())) else {
            return Ok(None);
        };
        let whole = param.whole_shape().sizes();
        let &[outputs, inputs] = whole else { return Ok(None) };
        if found != form || param.shape().sizes() != whole || !WeightFiles::is_packed_of(stored, form, whole)
        {
            return Ok(None);
        }
        Ok(Some(PackedWeight::from_file_bytes(bits, outputs, inputs, &self.bytes(stored)?)?))
    }

    /// Elements `range` of a packed weight.
    pub(super) fn packed_floats(
        &self,
        stored: &StoredTensor,
        form: BlockForm,
        range: Range<usize>,
        out: &mut [f32],
    ) -> Result<()> {
        let row = stored.shape.get(1).map_or(0, |blocks| blocks * form.values());
        if stored.shape.first().is_none_or(|rows| range.end > rows * row) || range.len() != out.len() {
            let why = format!("elements {range:?} were asked for of a packed tensor of {:?}", stored.shape);
            return Err(ModelError::config("packed weight", why));
        }
        stored.rows.each_run(row, range, out, |run, out| {
            let blocks = run.start / form.values()..run.end.div_ceil(form.values());
            let mut bytes = vec![0; blocks.len() * form.bytes()];
            self.read_bytes(stored, blocks.start * form.bytes(), &mut bytes)?;
            let mut values = vec![0.0; blocks.len() * form.values()];
            form.unpack(&bytes, &mut values);
            let first = run.start - blocks.start * form.values();
            out.copy_from_slice(&values[first..first + out.len()]);
            Ok(())
        })
    }
}
