//! Where tasks of a kernel write, and how much of it is one task.

use ferrospeed_tensor::Out;
use ferrospeed_tensor::dtype::Element;

use crate::write;

/// A pointer that tasks share, each writing its own part.
#[derive(Clone, Copy)]
pub(crate) struct Shared<T>(*mut T, usize);

// SAFETY: it is only an address; `range` and `at` state what their callers must keep apart.
unsafe impl<T: Send> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    pub(crate) fn new(slice: &mut [T]) -> Self {
        Shared(slice.as_mut_ptr(), slice.len())
    }

    /// The elements of an output, which stays where it is while tasks write.
    pub(crate) fn of(out: &Out<'_>) -> Self
    where
        T: Element,
    {
        // SAFETY: `out` is not written while this lives but by tasks, of which each has its own elements.
        Shared::new(write(unsafe { out.shared() }))
    }

    /// # Safety
    /// No two live slices overlap.
    #[inline(always)]
    #[expect(clippy::mut_from_ref, reason = "tasks write disjoint parts")]
    pub(crate) unsafe fn range(&self, range: std::ops::Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.1, "{range:?} lies outside 0..{}", self.1);
        // SAFETY: inside the slice this was made from; disjointness is the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(range.start), range.len()) }
    }

    pub(crate) fn len(&self) -> usize {
        self.1
    }

    #[inline(always)]
    pub(crate) fn pointer(&self) -> *mut T {
        self.0
    }
}

/// Elements per task of a pointwise kernel: enough to be worth a thread, small enough to stay in its cache.
pub(crate) const POINTWISE_BLOCK: usize = 16 * 1024;

/// Rows per task of a row-wise kernel of this width.
pub(crate) fn row_block(width: usize) -> usize {
    (POINTWISE_BLOCK / width.max(1)).max(1)
}
