//! When operations ran, for a timeline.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use crate::op::Kind;

/// When an operation ran.
#[derive(Debug, Clone, Copy)]
pub struct CommSpan {
    /// What.
    pub kind: Kind,
    /// Of how many bytes.
    pub bytes: usize,
    /// From.
    pub begin: Instant,
    /// To.
    pub end: Instant,
}

/// The operations of one rank while somebody wants to know, up to a limit.
#[derive(Debug, Default)]
pub(super) struct Spans {
    on: AtomicBool,
    kept: Mutex<(usize, Vec<CommSpan>)>,
}

impl Spans {
    pub(super) fn keep(&self, most: usize) {
        *self.kept.lock().unwrap_or_else(PoisonError::into_inner) = (most, Vec::new());
        self.on.store(true, Ordering::Relaxed);
    }

    pub(super) fn take(&self) -> Vec<CommSpan> {
        self.on.store(false, Ordering::Relaxed);
        std::mem::take(&mut self.kept.lock().unwrap_or_else(PoisonError::into_inner).1)
    }

    pub(super) fn add(&self, kind: Kind, bytes: usize, begin: Instant) {
        if !self.on.load(Ordering::Relaxed) {
            return;
        }
        let (most, kept) = &mut *self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() < *most {
            kept.push(CommSpan { kind, bytes, begin, end: Instant::now() });
        }
    }
}
