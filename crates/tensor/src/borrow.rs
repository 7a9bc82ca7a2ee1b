//! Who looks at a parameter's value.
//!
//! [`Param::read`](crate::Param::read) lends a tensor, and tensors can be cloned: a clone outlives the guard that it was taken
//! from. So the borrow is carried by the tensor itself, through every clone, view and slice of it, and a store that is about to
//! write new values asks its [`Borrows`] first. What would change under a reader is refused, with the line that reads.

use std::panic::Location;
use std::sync::{Arc, Mutex, PoisonError};

use crate::tensor::Tensor;

/// What every tensor over one parameter's value carries.
#[derive(Debug, Default)]
pub(crate) struct Borrow {
    /// Where the oldest of those that are out was read.
    read_at: Mutex<Option<&'static Location<'static>>>,
}

impl Borrow {
    /// Remembers where a value was read that nobody else looks at.
    pub(crate) fn note(self: &Arc<Borrow>, place: &'static Location<'static>) {
        // The store has one, the tensor that was just read the other.
        if Arc::strong_count(self) <= 2 {
            *self.read_at.lock().unwrap_or_else(PoisonError::into_inner) = Some(place);
        }
    }
}

/// What a store keeps of one parameter to know whether anybody looks at its value.
#[derive(Debug, Default)]
pub struct Borrows(Arc<Borrow>);

impl Borrows {
    /// The value for a reader.
    pub fn lend(&self, value: Tensor) -> Tensor {
        value.borrowed(Arc::clone(&self.0))
    }

    /// Where the value was read, if a tensor over it is still there.
    pub fn read_at(&self) -> Option<String> {
        if Arc::strong_count(&self.0) == 1 {
            return None;
        }
        let place = *self.0.read_at.lock().unwrap_or_else(PoisonError::into_inner);
        Some(place.map_or_else(|| "a place that is not known".into(), Location::to_string))
    }
}
