//! The order of a device's work: what was submitted, what is done, and what is kept to be submitted again.

use crate::backend::Memory;
use crate::error::Result;

/// A point in a device's work: see [`Work::mark`].
#[derive(Debug, PartialEq, Eq)]
pub struct Mark(u64);

impl Mark {
    /// A point by the number that its device knows it by.
    ///
    /// # Safety
    /// The device that is asked about it gave this number, and has not been told to [unmark](Work::unmark) it.
    pub unsafe fn new(number: u64) -> Mark {
        Mark(number)
    }

    /// The number that its device knows it by.
    pub fn number(&self) -> u64 {
        self.0
    }
}

/// What a device does in which order.
pub trait Work: Memory {
    /// Waits until everything submitted so far is done.
    fn synchronize(&self) -> Result<()>;
    /// Marks where its work now is, to be asked later how long lay between two such points; `None` where the host's clock does
    /// as well. Must be given back to [`Work::unmark`].
    fn mark(&self) -> Result<Option<Mark>> {
        Ok(None)
    }
    /// Seconds that passed on the device between two marks. Waits for the later one.
    fn seconds_between(&self, _earlier: &Mark, _later: &Mark) -> Result<f64> {
        Ok(0.0)
    }
    /// Ends a mark.
    fn unmark(&self, _mark: Mark) {}
    /// Waits until its work has come to a mark.
    fn wait_for(&self, _mark: &Mark) -> Result<()> {
        Ok(())
    }
    /// Lets what is submitted later wait for a mark, without keeping the host.
    fn follow(&self, _mark: &Mark) -> Result<()> {
        Ok(())
    }
    /// Of a GPU: its number, and the handle of the stream that its work goes to.
    fn stream(&self) -> Option<(usize, u64)> {
        None
    }
    /// Runs `task(0)` to `task(count - 1)` on the host's threads that serve this device, and waits.
    fn parallel(&self, count: usize, task: &(dyn Fn(usize) + Send + Sync)) {
        (0..count).for_each(task);
    }
    /// Keeps what `work` submits under a number, without running it; see [`Device::record`](crate::backend::Device::record).
    fn record(&self, _work: &mut dyn FnMut() -> Result<()>) -> Result<Option<u64>> {
        Ok(None)
    }
    /// Submits recorded work.
    fn replay(&self, _recorded: u64) -> Result<()> {
        Err(self.left_to_the_host("replay"))
    }
    /// Gives up what a recording holds.
    fn forget(&self, _recorded: u64) {}
}
