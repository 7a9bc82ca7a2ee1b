//! Work on several threads with results that do not depend on how many there are.
//!
//! A kernel cuts its work into tasks by its shapes alone and writes each task's result to its own place. Which
//! thread runs a task, and how many threads there are, then changes nothing but the time.

use std::sync::Arc;

use crate::cpu::crew::Crew;
use crate::cpu::write;
use crate::dtype::Element;
use crate::out::Out;

/// How many threads a CPU device uses: the caller's, and those that help it.
#[derive(Clone)]
pub(crate) struct Threads {
    crew: Option<Arc<Crew>>,
}

impl Threads {
    pub(crate) fn new(count: usize) -> Self {
        Threads { crew: (count > 1).then(|| Arc::new(Crew::new(count - 1))) }
    }

    pub(crate) fn count(&self) -> usize {
        1 + self.crew.as_ref().map_or(0, |crew| crew.helpers())
    }

    /// Runs `task(0)`, …, `task(count - 1)`, in any order, at once where there are threads.
    pub(crate) fn run(&self, count: usize, task: impl Fn(usize) + Send + Sync) {
        match &self.crew {
            Some(crew) if count > 1 => crew.run(count, &task),
            _ => (0..count).for_each(task),
        }
    }

    /// Cuts `0..length` into blocks of `block` and runs `task` on each range.
    pub(crate) fn blocks(
        &self,
        length: usize,
        block: usize,
        task: impl Fn(std::ops::Range<usize>) + Send + Sync,
    ) {
        let block = block.max(1);
        self.run(length.div_ceil(block), |index| task(index * block..((index + 1) * block).min(length)));
    }
}

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
        Shared::new(write(Out { tensor: out.tensor }))
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
