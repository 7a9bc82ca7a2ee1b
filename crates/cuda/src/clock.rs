//! The device's own clock: events in the stream of all work, and the time between two of them.

use cudarc::driver::result as cu;
use cudarc::driver::sys;
use ferrospeed_tensor::Result;

use crate::driver::{Checked, Driver};

const OP: &str = "measure time on the device";

impl Driver {
    /// An event behind everything submitted so far.
    pub(super) fn mark(&self) -> Result<u64> {
        self.mark_in(self.stream())
    }

    /// The same in a stream of this device.
    pub(super) fn mark_in(&self, stream: sys::CUstream) -> Result<u64> {
        self.bind()?;
        let event = cu::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT).during(OP)?;
        // SAFETY: the event was just made, and the stream is this device's.
        let recorded = unsafe { cu::event::record(event, stream) }.during(OP);
        if recorded.is_err() {
            self.unmark(event as u64);
        }
        recorded.map(|()| event as u64)
    }

    /// Seconds between two events of [`Driver::mark`]. Waits for the later one.
    pub(super) fn seconds_between(&self, earlier: u64, later: u64) -> Result<f64> {
        self.bind()?;
        let (earlier, later) = (earlier as sys::CUevent, later as sys::CUevent);
        // SAFETY: both are events of this driver that were recorded and not yet destroyed.
        let milliseconds = unsafe {
            cu::event::synchronize(later).during(OP)?;
            cu::event::elapsed(earlier, later).during(OP)?
        };
        Ok(f64::from(milliseconds) / 1e3)
    }

    /// Waits for an event of [`Driver::mark`].
    pub(super) fn wait_for(&self, mark: u64) -> Result<()> {
        self.bind()?;
        // SAFETY: an event of this driver that was recorded and not yet destroyed.
        unsafe { cu::event::synchronize(mark as sys::CUevent) }.during("wait for the device")
    }

    /// The stream of all work goes on behind an event.
    pub(super) fn follow(&self, mark: u64) -> Result<()> {
        self.bind()?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: an event of this driver that was recorded and not yet destroyed.
        unsafe { cu::stream::wait_event(self.stream(), mark as sys::CUevent, flags) }.during("follow a copy")
    }

    /// Destroys an event.
    pub(super) fn unmark(&self, mark: u64) {
        if self.bind().is_ok() {
            // SAFETY: the event is one of [`Driver::mark`], and nobody has its number any more.
            let _ = unsafe { cu::event::destroy(mark as sys::CUevent) };
        }
    }
}
