//! Saving and loading a training run: the engine's state as pieces of a checkpoint, and back.
//!
//! A load asks for the elements this rank owns now, so ranks, stage and precision may differ from those of the save.
//! What a checkpoint lacks is an error, never a fresh start: only the options say what may be left out.

mod load;
mod save;
mod snapshot;
mod weights;

pub use ferrospeed_checkpoint::deepspeed::Spelling;
pub use load::{FindParameter, LoadOptions, Loaded};
pub(crate) use save::Background;
pub use save::{Format, SaveOptions};

use ferrospeed_checkpoint::{Dtype, Kind, Part};
use ferrospeed_tensor::{DType, Param};
use ferrospeed_zero::{Saved, SavedPiece};

fn stored_type(dtype: DType) -> Dtype {
    match dtype {
        DType::F32 => Dtype::F32,
        DType::BF16 => Dtype::BF16,
        DType::F16 => Dtype::F16,
        DType::I64 => Dtype::I64,
        DType::I32 => Dtype::I32,
        DType::U8 => Dtype::U8,
        DType::Bool => Dtype::BOOL,
    }
}

/// Which part of its whole a parameter is; `None` where it is all of it.
fn part_of(param: &Param) -> Option<Part> {
    let slice = param.slice().filter(|slice| slice.shape() != *slice.whole())?;
    let ranges = slice.ranges().iter().map(|range| [range.start as u64, range.end as u64]).collect();
    Some(Part { dim: slice.dim(), ranges })
}

fn kind_of(piece: &SavedPiece) -> Kind {
    match piece.value {
        Saved::Weight if piece.trained => Kind::Master,
        Saved::Weight => Kind::Weight,
        Saved::State(_, name) => Kind::State(name.to_owned()),
    }
}
