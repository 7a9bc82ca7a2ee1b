//! How long blocks take that are run again in backward (`activation_checkpointing.profile`).
//!
//! Only who asks pays: the device is waited for where a block begins and ends, forward and backward, so that nothing of the
//! neighbours is counted. Backward is told with the second run in it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ferrospeed_tensor::autograd::{Restore, Shelf};
use ferrospeed_tensor::{Device, Result, Tensor};

/// Times of checkpointed blocks since they were last taken.
#[derive(Debug, Default)]
pub struct CheckpointTimes {
    forward_ns: AtomicU64,
    backward_ns: AtomicU64,
    calls: AtomicU64,
}

/// What they add up to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CheckpointTime {
    /// Blocks that ran forward.
    pub calls: u64,
    /// Forward.
    pub forward: Duration,
    /// Backward, with the second run.
    pub backward: Duration,
}

impl CheckpointTimes {
    /// What was measured; the count begins anew.
    pub fn take(&self) -> CheckpointTime {
        let ns = |count: &AtomicU64| Duration::from_nanos(count.swap(0, Ordering::Relaxed));
        CheckpointTime {
            calls: self.calls.swap(0, Ordering::Relaxed),
            forward: ns(&self.forward_ns),
            backward: ns(&self.backward_ns),
        }
    }

    /// A shelf for one block, which begins now.
    pub(super) fn around<'a>(self: &Arc<Self>, shelf: &'a dyn Shelf, device: &Device) -> Result<Timed<'a>> {
        device.backend().synchronize()?;
        Ok(Timed { shelf, times: Arc::clone(self), begin: Instant::now() })
    }
}

fn add(count: &AtomicU64, since: Instant) {
    count.fetch_add(u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
}

/// The shelf of one block: what is put there has run, and when it is let go of, backward is over.
#[derive(Debug)]
pub(super) struct Timed<'a> {
    shelf: &'a dyn Shelf,
    times: Arc<CheckpointTimes>,
    begin: Instant,
}

impl Shelf for Timed<'_> {
    fn put(&self, tensor: Tensor) -> Result<Restore> {
        let device = tensor.device().clone();
        device.backend().synchronize()?;
        self.times.calls.fetch_add(1, Ordering::Relaxed);
        add(&self.times.forward_ns, self.begin);
        let restore = self.shelf.put(tensor)?;
        let backward = Backward { times: Arc::clone(&self.times), device, begun: Mutex::default() };
        Ok(Box::new(move || {
            backward.begin()?;
            restore()
        }))
    }
}

/// One block's way back.
#[derive(Debug)]
struct Backward {
    times: Arc<CheckpointTimes>,
    device: Device,
    begun: Mutex<Option<Instant>>,
}

impl Backward {
    fn begin(&self) -> Result<()> {
        self.device.backend().synchronize()?;
        *self.begun.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        Ok(())
    }
}

impl Drop for Backward {
    fn drop(&mut self) {
        let begun = self.begun.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        // A device that fails says so to whoever uses it next.
        if let (Some(begun), Ok(())) = (begun, self.device.backend().synchronize()) {
            add(&self.times.backward_ns, begun);
        }
    }
}
