//! What a stage tells the next of the tensors it is about to send: how many, of which types and shapes.
//!
//! The numbers are those that DeepSpeed sends for a tuple of tensors, in one message in place of one for each. A single
//! tensor is a tuple of one here: DeepSpeed leaves out its type, and so loses it.

use crate::error::{PipelineError, Result};

/// The most tensors that cross a boundary together.
const MAX_TENSORS: i64 = 256;
/// The most dims of one.
const MAX_DIMS: i64 = 8;
/// What DeepSpeed writes before a tuple.
const TUPLE: i64 = 2;

/// Names of element types, by their numbers.
pub const TYPES: [&str; 12] = [
    "float32",
    "float64",
    "complex64",
    "complex128",
    "float16",
    "bfloat16",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "bool",
];

/// One tensor's type and shape.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Form {
    /// The name of its type, one of [`TYPES`].
    pub dtype: &'static str,
    /// Its sizes.
    pub sizes: Vec<usize>,
}

/// The numbers for some tensors.
pub fn encode(forms: &[Form]) -> Result<Vec<i64>> {
    let bad = |what: String| PipelineError::Boundary(what);
    let mut numbers = vec![TUPLE, forms.len() as i64];
    for form in forms {
        let dtype = TYPES.iter().position(|name| *name == form.dtype);
        let dtype = dtype.ok_or_else(|| bad(format!("'{}' is no type that can be sent", form.dtype)))?;
        numbers.extend([dtype as i64, form.sizes.len() as i64]);
        numbers.extend(form.sizes.iter().map(|size| *size as i64));
    }
    // What is refused there is refused here, where the message can still name the model's author.
    decode(&numbers)?;
    Ok(numbers)
}

/// The tensors that some numbers describe.
pub fn decode(numbers: &[i64]) -> Result<Vec<Form>> {
    let mut rest = numbers.iter().copied();
    let mut next = |what: &str, range: std::ops::RangeInclusive<i64>| {
        let number = rest.next().ok_or_else(|| PipelineError::Boundary(format!("{what} is missing")))?;
        if range.contains(&number) {
            Ok(number)
        } else {
            Err(PipelineError::Boundary(format!("{what} is {number}, not within {range:?}")))
        }
    };
    next("the kind", TUPLE..=TUPLE)?;
    let count = next("the number of tensors", 0..=MAX_TENSORS)?;
    let mut forms = Vec::with_capacity(count as usize);
    for _ in 0..count {
        let dtype = TYPES[next("a type", 0..=TYPES.len() as i64 - 1)? as usize];
        let dims = next("a number of dims", 0..=MAX_DIMS)?;
        let mut sizes = Vec::with_capacity(dims as usize);
        let mut elements = 1i64;
        for _ in 0..dims {
            let size = next("a size", 0..=1 << 40)?;
            elements = elements.checked_mul(size).filter(|all| *all <= 1 << 48).ok_or_else(|| {
                PipelineError::Boundary(format!("{sizes:?} × {size} has more elements than fit anywhere"))
            })?;
            sizes.push(size as usize);
        }
        forms.push(Form { dtype, sizes });
    }
    if rest.next().is_some() {
        return Err(PipelineError::Boundary("there are more numbers than it needs".into()));
    }
    Ok(forms)
}
