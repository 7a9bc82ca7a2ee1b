//! Copies between host and device.
//!
//! They go through page-locked buffers of the host, which the device reads and writes by itself at the full rate of the link.
//! Large ones go in pieces through two such buffers on a stream of their own: while the device has one piece, the host's
//! threads fill or empty the other, and what other threads submit to the stream of all work goes on meanwhile. The buffers
//! are host memory, and counted there.

use std::ptr::NonNull;
use std::sync::Mutex;

use cudarc::driver::result as cu;
use cudarc::driver::sys;
use ferrospeed_tensor::{Category, Device, Result};

use crate::driver::{Checked, Driver};

/// One buffer.
const PIECE_BYTES: usize = 8 << 20;
/// What the copy beside a small read may have.
const ASIDE_BYTES: usize = 64;
const LANE_BYTES: usize = 2 * PIECE_BYTES + ASIDE_BYTES;
/// Uploads up to this size travel inside the driver's commands.
const INLINE_BYTES: usize = 64 << 10;
/// What one of the host's threads copies at a time.
const SHARE_BYTES: usize = 1 << 20;

const OUT: &str = "copy from the device";
const IN: &str = "copy to the device";

/// Two buffers and the stream that works on them; one copy at a time has it.
struct Lane {
    /// The buffers, and room for the copy beside.
    memory: NonNull<u8>,
    /// When the device has done with each buffer.
    done: [sys::CUevent; 2],
    /// Where the stream of all work stood when a copy began.
    begun: sys::CUevent,
    stream: sys::CUstream,
}

// SAFETY: the driver's objects may be used from any thread, and a lane has one user at a time.
unsafe impl Send for Lane {}

impl Lane {
    fn open(driver: &Driver, host: &Device) -> Result<Lane> {
        const OP: &str = "open a copy stream";
        driver.bind()?;
        let event = || cu::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING).during(OP);
        let (done, begun) = ([event()?, event()?], event()?);
        let stream = cu::stream::create(cu::stream::StreamKind::NonBlocking).during(OP)?;
        // SAFETY: a plain allocation, given back by `close`.
        let memory = unsafe { cu::malloc_host(LANE_BYTES, 0) }.during(OP)?;
        let memory = NonNull::new(memory.cast()).expect("the driver gives no address zero");
        host.backend().count_external(LANE_BYTES, Category::Buffers);
        Ok(Lane { memory, done, begun, stream })
    }

    /// The memory of a buffer that the device has done with.
    fn buffer(&mut self, which: usize) -> Result<&mut [u8]> {
        // SAFETY: the event is this lane's own; one that was never recorded has happened.
        unsafe { cu::event::synchronize(self.done[which]) }.during("wait for a copy")?;
        // SAFETY: the lane's memory holds two pieces, nobody else has the lane, and the device has done with this one.
        Ok(unsafe {
            std::slice::from_raw_parts_mut(self.memory.as_ptr().add(which * PIECE_BYTES), PIECE_BYTES)
        })
    }

    /// The lane's stream goes on from where the stream of all work is now.
    fn follow(&self, driver: &Driver) -> Result<()> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: streams and event are open.
        unsafe {
            cu::event::record(self.begun, driver.stream()).during(OUT)?;
            cu::stream::wait_event(self.stream, self.begun, flags).during(OUT)
        }
    }

    /// Submits a copy into a buffer.
    fn fetch(&mut self, which: usize, source: u64, bytes: usize, stream: sys::CUstream) -> Result<()> {
        let done = self.done[which];
        let target = &mut self.buffer(which)?[..bytes];
        // SAFETY: the source has so many bytes; the buffer is not touched before the event.
        unsafe {
            if bytes > 0 {
                cu::memcpy_dtoh_async(target, source, stream).during(OUT)?;
            }
            cu::event::record(done, stream).during(OUT)
        }
    }

    /// Submits the copy beside one into a buffer, whose event it must come before.
    fn fetch_aside(&mut self, (source, bytes): (u64, usize), stream: sys::CUstream) -> Result<()> {
        let target = &mut self.aside()[..bytes];
        // SAFETY: the source has so many bytes; the room is not looked at before the event of the buffer that follows.
        unsafe { cu::memcpy_dtoh_async(target, source, stream) }.during(OUT)
    }

    fn aside(&mut self) -> &mut [u8] {
        // SAFETY: the lane's memory has room for it behind the buffers, and nobody else has the lane.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_ptr().add(2 * PIECE_BYTES), ASIDE_BYTES) }
    }

    fn close(self, host: &Device) {
        host.backend().uncount_external(LANE_BYTES, Category::Buffers);
        // SAFETY: all of it is the lane's own. What fails here fails because the process is ending.
        unsafe {
            let _ = cu::stream::synchronize(self.stream);
            let _ = cu::stream::destroy(self.stream);
            for event in [self.done[0], self.done[1], self.begun] {
                let _ = cu::event::destroy(event);
            }
            let _ = cu::free_host(self.memory.as_ptr().cast());
        }
    }
}

/// The lanes of a device: as many as there were copies at a time.
pub(crate) struct Transfers {
    idle: Mutex<Vec<Lane>>,
    host: Device,
}

impl Transfers {
    pub(crate) fn new(host: &Device) -> Transfers {
        Transfers { idle: Mutex::default(), host: host.clone() }
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<Lane>> {
        self.idle.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn take(&self, driver: &Driver) -> Result<Lane> {
        driver.bind()?;
        let idle = self.idle().pop();
        idle.map_or_else(|| Lane::open(driver, &self.host), Ok)
    }

    /// Begins to read up to [`PIECE_BYTES`], and up to [`ASIDE_BYTES`] from another place, after everything submitted before.
    pub(crate) fn begin_read(
        &self,
        driver: &Driver,
        source: u64,
        bytes: usize,
        aside: (u64, usize),
    ) -> Result<OnLane<'_>> {
        let mut copy = OnLane { transfers: self, lane: Some(self.take(driver)?) };
        let stream = driver.stream();
        let lane = copy.lane();
        lane.fetch_aside(aside, stream)?;
        lane.fetch(0, source, bytes, stream)?;
        Ok(copy)
    }

    /// Reads device memory, after everything submitted before, and up to [`ASIDE_BYTES`] from another place.
    pub(crate) fn read(
        &self,
        driver: &Driver,
        source: u64,
        target: &mut [u8],
        (aside_source, aside): (u64, &mut [u8]),
    ) -> Result<()> {
        let total = target.len();
        if total <= PIECE_BYTES {
            // Nothing to overlap: it goes with all other work.
            return self
                .begin_read(driver, source, total, (aside_source, aside.len()))?
                .finish(target, aside);
        }
        let mut copy = OnLane { transfers: self, lane: Some(self.take(driver)?) };
        let lane = copy.lane();
        let stream = lane.stream;
        lane.follow(driver)?;
        lane.fetch_aside((aside_source, aside.len()), stream)?;
        let pieces = total.div_ceil(PIECE_BYTES);
        let range = |piece: usize| piece * PIECE_BYTES..((piece + 1) * PIECE_BYTES).min(total);
        let submit = |lane: &mut Lane, piece: usize| {
            let range = range(piece);
            lane.fetch(piece % 2, source + range.start as u64, range.len(), stream)
        };
        (0..2).try_for_each(|piece| submit(lane, piece))?;
        for piece in 0..pieces {
            let arrived = &lane.buffer(piece % 2)?[..range(piece).len()];
            copy_by_threads(&self.host, arrived, &mut target[range(piece)]);
            if piece + 2 < pieces {
                submit(lane, piece + 2)?;
            }
        }
        aside.copy_from_slice(&lane.aside()[..aside.len()]);
        Ok(())
    }

    /// Writes device memory, after everything submitted before and before everything submitted later. `source` may be
    /// reused at once.
    pub(crate) fn write(&self, driver: &Driver, source: &[u8], target: u64) -> Result<()> {
        if source.len() <= INLINE_BYTES {
            driver.bind()?;
            // SAFETY: the target holds these bytes. The driver has taken pageable memory over when the call returns.
            return unsafe { cu::memcpy_htod_async(target, source, driver.stream()) }.during(IN);
        }
        let mut copy = OnLane { transfers: self, lane: Some(self.take(driver)?) };
        let lane = copy.lane();
        lane.follow(driver)?;
        for (piece, values) in source.chunks(PIECE_BYTES).enumerate() {
            let (which, stream, done) = (piece % 2, lane.stream, lane.done[piece % 2]);
            let buffer = &mut lane.buffer(which)?[..values.len()];
            copy_by_threads(&self.host, values, buffer);
            let place = target + (piece * PIECE_BYTES) as u64;
            let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
            // SAFETY: the target holds these bytes; the buffer is not touched before its event.
            unsafe {
                cu::memcpy_htod_async(place, buffer, stream).during(IN)?;
                cu::event::record(done, stream).during(IN)?;
                cu::stream::wait_event(driver.stream(), done, flags).during(IN)?;
            }
        }
        Ok(())
    }

    /// Gives all lanes back. Nobody may be copying.
    pub(crate) fn close(&self) {
        self.idle().drain(..).for_each(|lane| lane.close(&self.host));
    }
}

/// Why a copy has its lane.
const ONCE: &str = "a lane is given back once, at the end";

/// A copy under way; its lane goes back when it ends, however it ends.
pub(crate) struct OnLane<'a> {
    transfers: &'a Transfers,
    lane: Option<Lane>,
}

impl OnLane<'_> {
    fn lane(&mut self) -> &mut Lane {
        self.lane.as_mut().expect(ONCE)
    }

    /// Waits for a read that was begun.
    pub(crate) fn finish(mut self, target: &mut [u8], aside: &mut [u8]) -> Result<()> {
        let host = &self.transfers.host;
        let lane = self.lane.as_mut().expect(ONCE);
        copy_by_threads(host, &lane.buffer(0)?[..target.len()], target);
        aside.copy_from_slice(&lane.aside()[..aside.len()]);
        Ok(())
    }
}

impl Drop for OnLane<'_> {
    fn drop(&mut self) {
        self.transfers.idle().extend(self.lane.take());
    }
}

/// Copies with all threads of the host where it is worth waking them.
fn copy_by_threads(host: &Device, source: &[u8], target: &mut [u8]) {
    let shares: Vec<Mutex<(&[u8], &mut [u8])>> =
        source.chunks(SHARE_BYTES).zip(target.chunks_mut(SHARE_BYTES)).map(Mutex::new).collect();
    let copy = |share: usize| {
        let mut share = shares[share].lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let (source, target) = &mut *share;
        target.copy_from_slice(source);
    };
    match shares.len() {
        0 => {}
        1 => copy(0),
        count => host.backend().parallel(count, &copy),
    }
}
