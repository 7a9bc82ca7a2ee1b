//! Recorded tensors: a safetensors file read whole, every float widened to f32.

use std::collections::BTreeMap;
use std::path::Path;

use safetensors::{Dtype, SafeTensors};

/// One recorded tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct Recorded {
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its values.
    pub values: Values,
}

/// The values of a recorded tensor, widened to one of two types.
#[derive(Debug, Clone, PartialEq)]
pub enum Values {
    /// From F64, F32, F16 or BF16. (F64 is narrowed.)
    Float(Vec<f32>),
    /// From any integer or boolean type.
    Integer(Vec<i64>),
}

impl Recorded {
    /// The values as floats.
    ///
    /// # Panics
    /// When they are integers.
    pub fn floats(&self) -> &[f32] {
        match &self.values {
            Values::Float(values) => values,
            Values::Integer(_) => panic!("a float tensor was expected, an integer one was recorded"),
        }
    }

    /// The values as integers.
    ///
    /// # Panics
    /// When they are floats.
    pub fn integers(&self) -> &[i64] {
        match &self.values {
            Values::Integer(values) => values,
            Values::Float(_) => panic!("an integer tensor was expected, a float one was recorded"),
        }
    }
}

/// Reads every tensor of a safetensors file by name.
///
/// # Panics
/// When the file cannot be read or holds a type that recordings do not use.
pub fn read(path: &Path) -> BTreeMap<String, Recorded> {
    let bytes = std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let file = SafeTensors::deserialize(&bytes).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    file.tensors()
        .into_iter()
        .map(|(name, view)| {
            let values = widen(view.dtype(), view.data());
            (name, Recorded { shape: view.shape().to_vec(), values })
        })
        .collect()
}

fn widen(dtype: Dtype, data: &[u8]) -> Values {
    fn chunks<const N: usize>(data: &[u8]) -> impl Iterator<Item = [u8; N]> {
        data.chunks_exact(N).map(|chunk| chunk.try_into().expect("chunks_exact gives N bytes"))
    }
    match dtype {
        Dtype::F64 => Values::Float(chunks(data).map(|b| f64::from_le_bytes(b) as f32).collect()),
        Dtype::F32 => Values::Float(chunks(data).map(f32::from_le_bytes).collect()),
        Dtype::BF16 => Values::Float(chunks(data).map(|b| half::bf16::from_le_bytes(b).to_f32()).collect()),
        Dtype::F16 => Values::Float(chunks(data).map(|b| half::f16::from_le_bytes(b).to_f32()).collect()),
        Dtype::I64 => Values::Integer(chunks(data).map(i64::from_le_bytes).collect()),
        Dtype::I32 => Values::Integer(chunks(data).map(|b| i64::from(i32::from_le_bytes(b))).collect()),
        Dtype::I16 => Values::Integer(chunks(data).map(|b| i64::from(i16::from_le_bytes(b))).collect()),
        Dtype::I8 => Values::Integer(data.iter().map(|&b| i64::from(b as i8)).collect()),
        Dtype::U8 | Dtype::BOOL => Values::Integer(data.iter().map(|&b| i64::from(b)).collect()),
        other => panic!("recorded tensors do not use {other:?}"),
    }
}
