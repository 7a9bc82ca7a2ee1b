//! Weights in safetensors files, single or sharded, read and written as a stream; those of torch's own and of GGUF files are read
//! likewise.

mod blocks;
mod check;
mod checksums;
mod file;
mod fingerprint;
mod mxfp4;
mod packed;
mod read;
mod rows;
mod stacked;
mod torch;
mod write;

pub use blocks::BlockForm;
pub(crate) use file::WeightFile;
pub(crate) use packed::{packed_name, packed_shape};
pub(crate) use read::Placed;
pub use read::{StoredTensor, WeightFiles};
pub(crate) use rows::RowOrder;
pub(crate) use write::write_counted;
pub use write::{TensorToWrite, Written, write_directory, write_file};

use ferrospeed_tensor::DType;
use safetensors::Dtype;

/// Our type for a stored one, where there is one.
pub(crate) fn dtype_from_file(dtype: Dtype) -> Option<DType> {
    Some(match dtype {
        Dtype::F32 => DType::F32,
        Dtype::BF16 => DType::BF16,
        Dtype::F16 => DType::F16,
        Dtype::I64 => DType::I64,
        Dtype::I32 => DType::I32,
        Dtype::U8 => DType::U8,
        Dtype::BOOL => DType::Bool,
        _ => return None,
    })
}

/// The name of a type in safetensors headers.
pub(crate) fn dtype_in_header(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "F32",
        DType::BF16 => "BF16",
        DType::F16 => "F16",
        DType::I64 => "I64",
        DType::I32 => "I32",
        DType::U8 => "U8",
        DType::Bool => "BOOL",
    }
}
