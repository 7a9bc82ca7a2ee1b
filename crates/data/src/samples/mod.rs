//! Samples to learn from: conversations, instructions, completions and plain texts, in the files that people have them in.
//!
//! [`records`] reads objects from JSON lines, JSON arrays and Parquet, compressed or not; [`kind`] says what they are;
//! [`render`] makes tokens of them with a model's chat template; [`pack`] lays them into sequences that cut none of them, [`rows`]
//! two to a sequence where they are compared ([`pair`]).

mod kind;
mod pack;
mod pair;
mod records;
mod render;
mod rows;

pub use kind::{Layout, SampleKind};
pub(crate) use pack::Packer;
pub use pack::{Counted, TooLong};
pub(crate) use records::EXTENSIONS;
pub use records::{Record, each_record};
pub use render::Rendering;
pub use rows::Mark;
pub(crate) use rows::{Marked, Rows};

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use crate::error::{DataError, Result};

/// The kind of the first record of some files, which are to be laid out as is wanted.
pub(crate) fn kind_of(files: &[PathBuf], wanted: Layout) -> Result<SampleKind> {
    let mut found = None;
    each_record(files, &mut |record| {
        let kind = SampleKind::of(&record.value, wanted)
            .map_err(|why| DataError::bad_place(record.path, record.place(), why))?;
        found = Some(kind);
        Ok(ControlFlow::Break(()))
    })?;
    let nowhere = Path::new("");
    let first = files.first().map_or(nowhere, PathBuf::as_path);
    found.ok_or_else(|| DataError::bad_file(first, "is empty: there is no sample in it"))
}
