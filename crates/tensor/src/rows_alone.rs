//! Products whose rows know nothing of each other.
//!
//! A product of one row and one of many use different kernels on most devices, and their sums are grouped differently. That
//! is no matter while training, where the number of rows is part of the problem. In serving it is chance: how many
//! requests share a pass must not change what any of them is told. Inside [`rows_alone`] the CPU sums every row in the order
//! in which it would sum it alone, to the last bit.

use std::cell::Cell;

thread_local! {
    static ALONE: Cell<bool> = const { Cell::new(false) };
}

/// Runs `work`; in products that this thread asks for meanwhile, a row's result does not depend on how many there are.
pub fn rows_alone<R>(work: impl FnOnce() -> R) -> R {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            ALONE.set(self.0);
        }
    }
    let _restore = Restore(ALONE.replace(true));
    work()
}

/// Whether this thread is inside [`rows_alone`].
pub fn are_rows_alone() -> bool {
    ALONE.get()
}
