//! The way to a file, behind one seam.
//!
//! Threads move bytes through a [`Layer`]; tests put one that fails in the place of the [`System`].

use std::fs::File;
use std::os::unix::fs::FileExt;

/// Reads and writes at a place in a file, as much as it can at once.
pub trait Layer: Send + Sync {
    /// Fills the beginning of `bytes`; how much.
    fn read_at(&self, file: &File, bytes: &mut [u8], offset: u64) -> std::io::Result<usize>;
    /// Writes the beginning of `bytes`; how much.
    fn write_at(&self, file: &File, bytes: &[u8], offset: u64) -> std::io::Result<usize>;
}

/// The real one.
#[derive(Debug, Clone, Copy, Default)]
pub struct System;

impl Layer for System {
    fn read_at(&self, file: &File, bytes: &mut [u8], offset: u64) -> std::io::Result<usize> {
        file.read_at(bytes, offset)
    }

    fn write_at(&self, file: &File, bytes: &[u8], offset: u64) -> std::io::Result<usize> {
        file.write_at(bytes, offset)
    }
}
