//! Memory that operations work on.
//!
//! A [`Region`] is a byte range that keeps its owner alive. It may lie anywhere; when it lies inside memory from
//! [`World::allocate`](crate::World::allocate), peers on the host have it mapped and collectives read and write it in
//! place, otherwise the bytes pass through the group's staging area. The crate finds out by address, so a tensor that
//! was carved out of registered memory is fast no matter how its `Region` was made.

use std::any::Any;
use std::ops::{Bound, RangeBounds};
use std::sync::{Arc, Mutex, PoisonError};

use crate::dtype::Element;
use crate::error::{Error, Result};

/// A byte range of memory, with whatever keeps that memory alive.
///
/// # The contract of operations in flight
/// From the call that starts an operation until its [`Work`](crate::Work) is done, nobody but this crate may write to
/// the operation's regions, and nobody may read those it writes. After an operation *failed*, peers may still touch
/// registered memory for a moment: do not use its contents again, end the job.
#[derive(Clone)]
pub struct Region {
    start: *mut u8,
    bytes: usize,
    /// What has yet to write the bytes. It ends before their owner does.
    arrival: Option<Arc<Arrival>>,
    _owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: a region is an address and a reference-counted owner; accesses through it happen only in operations, under
// the contract above, or in `unsafe` calls whose callers vouch for exclusivity.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl std::fmt::Debug for Region {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Region({:p}, {} bytes)", self.start, self.bytes)
    }
}

impl Region {
    /// A region over memory that `owner` keeps alive.
    ///
    /// # Safety
    /// `start..start + bytes` must be readable and writable for as long as `owner` lives, and the contract of
    /// operations in flight (see [`Region`]) must be kept.
    pub unsafe fn from_raw(start: *mut u8, bytes: usize, owner: Arc<dyn Any + Send + Sync>) -> Region {
        Region { start, bytes, _owner: owner, arrival: None }
    }

    /// The same bytes, which somebody else is still writing: an operation on them first calls `arrived`, once, which returns
    /// when they are there. It is called where the operation runs, so that whoever starts it need not wait.
    #[must_use]
    pub fn arriving(
        self,
        arrived: impl FnOnce() -> std::result::Result<(), String> + Send + 'static,
    ) -> Region {
        Region { arrival: Some(Arc::new(Arrival(Mutex::new(State::Awaited(Box::new(arrived)))))), ..self }
    }

    /// Waits for what has yet to write the bytes.
    pub(crate) fn await_arrival(&self) -> Result<()> {
        self.arrival.as_ref().map_or(Ok(()), |arrival| arrival.await_it())
    }

    /// A region that owns a copy of `values`; handy for small asynchronous operations.
    pub fn from_slice<T: Element + Send + Sync>(values: &[T]) -> Region {
        let owned: Arc<OwnedValues> = Arc::new(OwnedValues::new(bytemuck::cast_slice(values)));
        Region { start: owned.start(), bytes: size_of_val(values), _owner: owned, arrival: None }
    }

    /// A zero-filled region that owns its memory, aligned for every element type.
    pub fn zeroed(bytes: usize) -> Region {
        let owned = Arc::new(OwnedValues::zeroed(bytes));
        Region { start: owned.start(), bytes, _owner: owned, arrival: None }
    }

    /// Borrowed memory, for the length of one blocking call.
    ///
    /// # Safety
    /// The region must not outlive the borrow.
    pub(crate) unsafe fn borrowed(bytes: &mut [u8]) -> Region {
        Region { start: bytes.as_mut_ptr(), bytes: bytes.len(), _owner: nobody(), arrival: None }
    }

    /// Borrowed memory that the operation only reads.
    ///
    /// # Safety
    /// The region must not outlive the borrow, and no operation may write to it.
    pub(crate) unsafe fn borrowed_input(bytes: &[u8]) -> Region {
        Region { start: bytes.as_ptr().cast_mut(), bytes: bytes.len(), _owner: nobody(), arrival: None }
    }

    /// The first byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start
    }

    /// The length in bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether the region is empty.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// A part of this region, by byte range.
    ///
    /// # Panics
    /// When the range does not lie inside the region.
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Region {
        let start = match range.start_bound() {
            Bound::Included(start) => *start,
            Bound::Excluded(before) => before + 1,
            Bound::Unbounded => 0,
        };
        let end = match range.end_bound() {
            Bound::Included(last) => last + 1,
            Bound::Excluded(end) => *end,
            Bound::Unbounded => self.bytes,
        };
        assert!(start <= end && end <= self.bytes, "bytes {start}..{end} of a region of {}", self.bytes);
        Region { start: self.start.wrapping_add(start), bytes: end - start, ..self.clone() }
    }

    /// The contents as elements.
    ///
    /// # Safety
    /// No operation that writes to this region is in flight, and nobody else writes to it while the slice lives.
    ///
    /// # Panics
    /// When the region is not aligned for `T` or holds a fraction of an element.
    pub unsafe fn as_slice<T: Element>(&self) -> &[T] {
        // SAFETY: alive through `owner`, exclusive by the caller's contract.
        bytemuck::cast_slice(unsafe { std::slice::from_raw_parts(self.start, self.bytes) })
    }

    /// The contents as elements, to change.
    ///
    /// # Safety
    /// No operation on this region is in flight, and nobody else touches it while the slice lives.
    ///
    /// # Panics
    /// When the region is not aligned for `T` or holds a fraction of an element.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn as_mut_slice<T: Element>(&self) -> &mut [T] {
        // SAFETY: alive through `owner`, exclusive by the caller's contract.
        bytemuck::cast_slice_mut(unsafe { std::slice::from_raw_parts_mut(self.start, self.bytes) })
    }
}

/// Bytes on their way into a region.
struct Arrival(Mutex<State>);

enum State {
    Awaited(Box<dyn FnOnce() -> std::result::Result<(), String> + Send>),
    Ended(std::result::Result<(), String>),
}

impl Arrival {
    fn await_it(&self) -> Result<()> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let outcome = match std::mem::replace(&mut *state, State::Ended(Err("it was given up".to_owned()))) {
            State::Awaited(arrived) => arrived(),
            State::Ended(outcome) => outcome,
        };
        *state = State::Ended(outcome.clone());
        outcome.map_err(|why| Error::Backend {
            backend: "host memory",
            problem: format!("what should be sent did not arrive from the device: {why}"),
        })
    }
}

fn nobody() -> Arc<dyn Any + Send + Sync> {
    static NOBODY: std::sync::OnceLock<Arc<()>> = std::sync::OnceLock::new();
    NOBODY.get_or_init(|| Arc::new(())).clone()
}

/// Heap memory behind [`Region::from_slice`], in words so that every element type is aligned.
struct OwnedValues {
    words: Box<[std::cell::UnsafeCell<u64>]>,
}

// SAFETY: only ever accessed through regions, under their contract.
unsafe impl Send for OwnedValues {}
// SAFETY: as above.
unsafe impl Sync for OwnedValues {}

impl OwnedValues {
    fn zeroed(bytes: usize) -> Self {
        // SAFETY: words of zeroes are words.
        OwnedValues { words: unsafe { Box::new_zeroed_slice(bytes.div_ceil(8)).assume_init() } }
    }

    fn new(bytes: &[u8]) -> Self {
        let owned = OwnedValues::zeroed(bytes.len());
        // SAFETY: so many bytes were just allocated, and nobody else knows them.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), owned.start(), bytes.len()) };
        owned
    }

    fn start(&self) -> *mut u8 {
        self.words.as_ptr().cast::<u8>().cast_mut()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_keeps_the_memory_alive_and_sees_the_same_bytes() {
        let part = Region::from_slice(&[1.0f32, 2.0, 3.0]).slice(4..12);
        // SAFETY: nothing else uses the region.
        assert_eq!(unsafe { part.as_slice::<f32>() }, [2.0, 3.0]);
        assert_eq!(part.slice(4..).len(), 4);
    }

    #[test]
    fn what_writes_the_bytes_is_awaited_once_and_its_failure_is_remembered() {
        let calls = Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let counted = Arc::clone(&calls);
        let region = Region::zeroed(8).arriving(move || {
            counted.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            Err("the device is gone".to_owned())
        });
        for part in [region.slice(..4), region] {
            assert!(part.await_arrival().unwrap_err().to_string().contains("the device is gone"));
        }
        assert_eq!(calls.load(std::sync::atomic::Ordering::Relaxed), 1);
    }

    #[test]
    #[should_panic(expected = "of a region of 12")]
    fn a_slice_beyond_the_end_is_refused() {
        Region::from_slice(&[0.0f32; 3]).slice(8..16);
    }
}
