//! Weights in torch's own files (`pytorch_model.bin`): a dictionary of tensors, read as data.
//!
//! The tensors' places in the file are taken, so that they are read on demand as those of safetensors are. A dictionary may be
//! the file itself, or what it holds under `module`, `model` or `state_dict`, as checkpoints of training do. A tensor whose elements do
//! not lie end to end is refused, and so is anything that is no tensor. An array's checksum is compared before the first of its elements is
//! used.

use std::path::Path;

use ferrospeed_checkpoint::Dtype;
use ferrospeed_checkpoint::pt::PtFile;
use ferrospeed_tensor::DType;
use ferrospeed_tensor::shape::MAX_DIMS;

use crate::error::{ModelError, Result};
use crate::weights::checksums::Checksums;
use crate::weights::file::WeightFile;
use crate::weights::read::Placed;
use crate::weights::rows::RowOrder;

/// Under what names checkpoints of training hold the weights.
const INSIDE: [&str; 3] = ["module", "model", "state_dict"];

/// Whether a file's name says that torch wrote it.
pub(super) fn is_torch(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ["bin", "pt", "pth"].iter().any(|known| ending == *known))
}

/// Opens a file and finds its tensors.
pub(super) fn open(path: &Path) -> Result<(WeightFile, Vec<(String, Placed)>)> {
    let refuse = |why: String| ModelError::file(path, why);
    let told = |error: &dyn std::fmt::Display| {
        let (text, own) = (error.to_string(), format!("{}: ", path.display()));
        ModelError::file(path, text.strip_prefix(&own).unwrap_or(&text))
    };
    let file = PtFile::open(path).map_err(|error| told(&error))?;
    let dictionary = |name: &&str| file.value().get(name).filter(|value| value.pairs().is_some());
    let inside: Vec<_> = INSIDE.iter().filter_map(dictionary).collect();
    let own = file.value().pairs().unwrap_or_default();
    let value = match inside[..] {
        [] => file.value(),
        [only] if own.iter().all(|(_, value)| value.as_tensor().is_none()) => only,
        _ => return Err(refuse("holds weights in several places; save one dictionary of tensors".into())),
    };
    let pairs = value.pairs();
    let pairs =
        pairs.ok_or_else(|| refuse(format!("holds {} and no weights by name", file.value().kind())))?;
    let mut placed = Vec::with_capacity(pairs.len());
    let mut arrays = Vec::with_capacity(pairs.len());
    for (name, value) in pairs {
        let name =
            name.as_str().ok_or_else(|| refuse("names a tensor by something else than text".into()))?;
        let Some(tensor) = value.as_tensor() else {
            return Err(refuse(format!("'{name}' is {} and no tensor", value.kind())));
        };
        let Some(dtype) = dtype_of(tensor.dtype) else {
            return Err(refuse(format!("'{name}' has the type {:?}, which is not supported", tensor.dtype)));
        };
        if tensor.shape.len() > MAX_DIMS {
            return Err(refuse(format!("'{name}' has {} dimensions", tensor.shape.len())));
        }
        if !tensor.is_contiguous() {
            return Err(refuse(format!(
                "the elements of '{name}' do not lie end to end; save the model anew, as safetensors"
            )));
        }
        let start = file.start_of(tensor).map_err(|error| told(&error))?;
        arrays.push(file.entry_of(tensor).map_err(|error| told(&error))?.clone());
        let size = tensor.numel() * tensor.dtype.size_bytes();
        let numbers = (usize::try_from(start), usize::try_from(size));
        let (Ok(start), Ok(size)) = numbers else { return Err(refuse(format!("'{name}' is too large"))) };
        let shape = tensor.shape.iter().map(|&length| length as usize).collect();
        placed.push((
            name.to_owned(),
            Placed { dtype, shape, bytes: start..start + size, rows: RowOrder::Same },
        ));
    }
    let data = ferrospeed_files::open(path).map_err(ModelError::io(path))?;
    let data = WeightFile::of_data(path, data, 0).checked_by(Checksums::of_entries(arrays));
    Ok((data, placed))
}

fn dtype_of(dtype: Dtype) -> Option<DType> {
    Some(match dtype {
        Dtype::F32 => DType::F32,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        Dtype::I64 => DType::I64,
        Dtype::I32 => DType::I32,
        Dtype::U8 => DType::U8,
        Dtype::BOOL => DType::Bool,
        Dtype::F64 | Dtype::I16 | Dtype::I8 => return None,
    })
}
