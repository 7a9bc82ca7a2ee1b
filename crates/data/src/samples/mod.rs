//! Samples to learn from: conversations, instructions, completions and plain texts, in the files that people have them in.
//!
//! [`records`] reads objects from JSON lines, JSON arrays and Parquet, compressed or not; [`kind`] says what they are;
//! [`render`] makes tokens of them with a model's chat template; [`pack`] lays them into sequences that cut none of them.

mod kind;
mod pack;
mod records;
mod render;

pub use kind::SampleKind;
pub(crate) use pack::Packer;
pub use pack::{Counted, TooLong};
pub(crate) use records::{EXTENSIONS, each_record};
pub use render::Rendering;

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use crate::error::{DataError, Result};

/// The kind of the first record of some files.
pub(crate) fn kind_of(files: &[PathBuf]) -> Result<SampleKind> {
    let mut found = None;
    each_record(files, &mut |record| {
        let kind = SampleKind::of(&record.value)
            .map_err(|why| DataError::bad_place(record.path, record.place(), why))?;
        found = Some(kind);
        Ok(ControlFlow::Break(()))
    })?;
    let nowhere = Path::new("");
    let first = files.first().map_or(nowhere, PathBuf::as_path);
    found.ok_or_else(|| DataError::bad_file(first, "is empty: there is no sample in it"))
}
