//! Memory that packed operands are loaded from and sums are stored to.
//!
//! A row of a tile, like a register of AVX-512, is a line of the cache. One that lies across two lines takes twice the
//! time, so these buffers start where a line does, which vectors of small elements do not.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use bytemuck::{Pod, Zeroable};

#[derive(Clone, Copy, Default, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([u32; 16]);

/// A growing buffer that starts on a line of the cache.
pub(crate) struct Aligned<T> {
    lines: Vec<Line>,
    length: usize,
    elements: PhantomData<T>,
}

impl<T> Default for Aligned<T> {
    fn default() -> Self {
        Aligned { lines: Vec::new(), length: 0, elements: PhantomData }
    }
}

impl<T: Pod> Aligned<T> {
    /// Makes it `length` elements long; what they are is whatever was there before.
    pub(crate) fn resize(&mut self, length: usize) {
        let lines = (length * size_of::<T>()).div_ceil(size_of::<Line>());
        if self.lines.len() < lines {
            self.lines.resize(lines, Line::default());
        }
        self.length = length;
    }

    /// The first `length` elements, whatever they are.
    pub(crate) fn at_least(&mut self, length: usize) -> &mut [T] {
        self.resize(length);
        self
    }
}

impl<T: Pod> Deref for Aligned<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &bytemuck::cast_slice(&self.lines)[..self.length]
    }
}

impl<T: Pod> DerefMut for Aligned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..self.length]
    }
}
