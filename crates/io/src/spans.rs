//! When transfers ran, for a timeline. Off, it costs one load per transfer.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// One transfer, from the call that began it to its last byte.
#[derive(Debug, Clone, Copy)]
pub struct IoSpan {
    /// Whether bytes came from the disk; else they went there.
    pub is_read: bool,
    /// How many.
    pub bytes: u64,
    /// From.
    pub begin: Instant,
    /// To.
    pub end: Instant,
}

/// The transfers of a queue while somebody wants to know, up to a limit.
#[derive(Debug, Default)]
pub(crate) struct Spans {
    on: AtomicBool,
    kept: Mutex<(usize, Vec<IoSpan>)>,
}

impl Spans {
    pub(crate) fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    pub(crate) fn keep(&self, most: usize) {
        *self.kept.lock().unwrap_or_else(PoisonError::into_inner) = (most, Vec::new());
        self.on.store(true, Ordering::Relaxed);
    }

    pub(crate) fn take(&self) -> Vec<IoSpan> {
        self.on.store(false, Ordering::Relaxed);
        std::mem::take(&mut self.kept.lock().unwrap_or_else(PoisonError::into_inner).1)
    }

    pub(crate) fn add(&self, is_read: bool, bytes: u64, begin: Instant) {
        let (most, kept) = &mut *self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if self.is_on() && kept.len() < *most {
            kept.push(IoSpan { is_read, bytes, begin, end: Instant::now() });
        }
    }
}
