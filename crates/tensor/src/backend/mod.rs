//! What a device must be able to do: one trait for each kind of thing, and [`Backend`] for all of them.
//!
//! It is object-safe: the ops above it know one `Device` and never a kernel. A call only *submits* work; results may be read
//! after [`Work::synchronize`], or through the copies to the host, which wait. Outputs are allocated by the caller, who shows
//! that nobody else sees them ([`Out`](crate::Out)), and fully overwritten, unless a method says that it accumulates.

mod attention;
mod broadcasts;
mod copies;
mod few_rows;
mod grouped;
mod images;
mod integers;
mod losses;
mod memory;
mod norms;
mod one_bit;
mod permutations;
mod pointwise;
mod products;
mod reductions;
mod rows;
mod updates;
mod work;

pub use attention::{Attention, AttentionSpec, HeadPlaces, Heads, HeadsOut, PagedAttention, WeightGrid};
pub use broadcasts::{Binary, Broadcasts, Comparison};
pub use copies::{Copies, ReadLater};
pub use few_rows::{FewRows, FewRowsProducts, FewRowsWeight, PackedLayer, PackedProducts};
pub use grouped::{Grouped, GroupedGemm, GroupedOuter, RoutedRows};
pub use images::{Images, Window2d};
pub use integers::{Integers, RunForm, Runs};
pub use losses::{ClassPart, CrossEntropyOptions, LossGradient, LossParts, Losses};
pub use memory::{Memory, RawBlock};
pub use norms::{NormKind, Norms};
pub use one_bit::{OneBit, OneBitOperands, OneBitPace, OneBitPass, Rounding, SignMessages, Signed};
pub use permutations::Permutations;
pub use pointwise::{Activation, Pointwise, Unary};
pub use products::{Gemm, Matrix, MatrixOut, Products, Screen};
pub use reductions::{Reduction, Reductions};
pub use rows::Rows;
pub use updates::{Clipping, Measured, Update, UpdateOperands, Updates, sum_of_words};
pub use work::{Mark, Work};

use std::cell::Cell;
use std::sync::{Arc, Mutex, PoisonError};

use crate::dtype::DType;
use crate::error::Result;
use crate::memory::{Category, MemoryUsage};
use crate::tensor::Tensor;

/// A device: memory and kernels.
pub trait Backend:
    Work
    + Copies
    + Products
    + FewRowsProducts
    + PackedProducts
    + Grouped
    + Attention
    + PagedAttention
    + Rows
    + Permutations
    + Images
    + Pointwise
    + Broadcasts
    + Norms
    + Losses
    + LossParts
    + Reductions
    + Updates
    + Integers
    + OneBit
{
}

impl<T> Backend for T where
    T: Work
        + Copies
        + Products
        + FewRowsProducts
        + PackedProducts
        + Grouped
        + Attention
        + PagedAttention
        + Rows
        + Permutations
        + Images
        + Pointwise
        + Broadcasts
        + Norms
        + Losses
        + LossParts
        + Reductions
        + Updates
        + Integers
        + OneBit
{
}

/// A handle to a backend; cheap to clone, equal when it is the same object.
#[derive(Clone)]
pub struct Device(Arc<dyn Backend>);

impl Device {
    /// Does something with each of some parts, on the host's threads that serve this device, and waits.
    pub fn each<P: Send>(&self, parts: impl Iterator<Item = P>, work: impl Fn(usize, P) + Send + Sync) {
        // Each task takes its own part out of the list, so none is shared.
        let parts: Vec<Mutex<Option<P>>> = parts.map(|part| Mutex::new(Some(part))).collect();
        self.backend().parallel(parts.len(), &|index| {
            let part = parts[index].lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(part) = part {
                work(index, part);
            }
        });
    }

    /// A device over any backend.
    pub fn new(backend: impl Backend + 'static) -> Device {
        Device(Arc::new(backend))
    }

    /// Its backend.
    pub fn backend(&self) -> &dyn Backend {
        &*self.0
    }

    /// The device of the host that this one works with: itself, where its memory is the host's.
    pub fn host(&self) -> &Device {
        self.0.host().unwrap_or(self)
    }

    /// Memory of the host that the device can copy to and from beside its other work: see [`crate::beside`].
    pub fn locked(&self, numel: usize, dtype: DType, category: Category) -> Result<Tensor> {
        match self.0.locked(numel, dtype, category)? {
            Some(locked) => Ok(locked),
            None => Tensor::empty_in([numel], dtype, self.host(), category),
        }
    }

    /// What it holds.
    pub fn memory_usage(&self) -> MemoryUsage {
        self.0.memory_usage()
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Device) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0.name())
    }
}

thread_local! {
    static CATEGORY: Cell<Category> = const { Cell::new(Category::Activations) };
}

/// The category that this thread's allocations are counted in.
pub fn current_category() -> Category {
    CATEGORY.get()
}

/// Runs `work` with this thread's allocations counted in `category`.
pub fn with_category<R>(category: Category, work: impl FnOnce() -> R) -> R {
    struct Restore(Category);
    impl Drop for Restore {
        fn drop(&mut self) {
            CATEGORY.set(self.0);
        }
    }
    let _restore = Restore(CATEGORY.replace(category));
    work()
}
