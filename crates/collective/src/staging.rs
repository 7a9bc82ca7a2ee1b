//! Page-locked memory of the host through which a device's tensors travel.
//!
//! A tensor leaves beside the device's other work, into a room of its own; the exchange begins when it is there, on the thread
//! that carries it, so that whoever started it goes on submitting work. What arrives goes back the same way, and what the
//! device does next follows it. Rooms are used again: to lock memory takes longer than to fill it.

use std::sync::{Arc, Mutex, PoisonError};

use ferrospeed_comm::Region;
use ferrospeed_tensor::beside::{Beside, Moment};
use ferrospeed_tensor::memory::Category;
use ferrospeed_tensor::{DType, Device, Out, Tensor};

use crate::error::Result;

/// Rooms that wait to be used again take at most so much of the host.
const KEPT_BYTES: usize = 4 << 30;
/// Rooms come in sizes of which each is larger than the last by a part in so many, so that like tensors share them.
const SIZES_PER_DOUBLING: usize = 8;

/// Rooms that wait.
static KEPT: Mutex<Vec<Free>> = Mutex::new(Vec::new());

/// A room that nobody uses, but for a copy that may still read it.
struct Free {
    device: Device,
    memory: Tensor,
    reader: Option<Beside>,
}

/// Memory of the host for the bytes of one tensor. It goes back to the others when the last handle is dropped.
#[derive(Clone)]
pub(crate) struct Room(Arc<Inner>);

struct Inner {
    device: Device,
    memory: Tensor,
    bytes: usize,
    reader: Mutex<Option<Beside>>,
}

impl Room {
    /// For so many bytes that travel from or to a device.
    fn of(device: &Device, bytes: usize) -> Result<Room> {
        let size = rounded(bytes);
        let found = {
            let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
            let place =
                kept.iter().position(|free| free.device == *device && free.memory.size_bytes() == size);
            place.map(|place| kept.remove(place))
        };
        let memory = match found {
            Some(Free { memory, reader, .. }) => {
                reader.map_or(Ok(()), Beside::wait)?;
                memory
            }
            // What cannot be locked is copied all the same, only not beside other work.
            None => match device.locked(size, DType::U8, Category::Buffers) {
                Ok(memory) => memory,
                Err(_) => Tensor::empty_in([size], DType::U8, device.host(), Category::Buffers)?,
            },
        };
        Ok(Room(Arc::new(Inner { device: device.clone(), memory, bytes, reader: Mutex::new(None) })))
    }

    /// With a tensor's bytes on their way into it: operations on [`Room::region`] wait for them.
    pub(crate) fn filled_from(tensor: &Tensor) -> Result<(Room, Region)> {
        let room = Room::of(tensor.device(), tensor.size_bytes())?;
        let region = room.region();
        let Some(now) = Moment::now(tensor.device())? else {
            // SAFETY: nobody else has this room.
            tensor.device().backend().copy_to_host(tensor, unsafe { region.as_mut_slice::<u8>() })?;
            return Ok((room, region));
        };
        // SAFETY: the room is this exchange's own, and whoever started it does not touch the tensor before it is over.
        let leaving = unsafe { Beside::begin(tensor, &room.tensor()?, &now)? };
        let region = region.arriving(move || leaving.wait().map_err(|error| error.to_string()));
        Ok((room, region))
    }

    /// In which the bytes for a tensor will arrive.
    pub(crate) fn awaiting(tensor: &Tensor) -> Result<(Room, Region)> {
        let room = Room::of(tensor.device(), tensor.size_bytes())?;
        let region = room.region();
        Ok((room, region))
    }

    /// Its bytes, for the exchange.
    fn region(&self) -> Region {
        let keep: Arc<dyn std::any::Any + Send + Sync> = Arc::clone(&self.0) as _;
        // SAFETY: the room's memory lives as long as the region keeps the room, and the room is used by one exchange at a time.
        unsafe { Region::from_raw(self.0.memory.address().as_ptr(), self.0.bytes, keep) }
    }

    fn tensor(&self) -> Result<Tensor> {
        Ok(self.0.memory.slice(0, [self.0.bytes])?)
    }

    /// Sends what has arrived in it to a tensor of its device: what is submitted to the device from now on follows.
    pub(crate) fn land(self, target: &Tensor) -> Result<()> {
        let Some(now) = Moment::now(&self.0.device)? else {
            let arrived = self.region();
            // SAFETY: the exchange is over, and nobody else has this room.
            let bytes = unsafe { arrived.as_slice() };
            return Ok(self.0.device.backend().copy_from_host(bytes, Out::of_device(target)?)?);
        };
        // SAFETY: what has arrived stays in the room until the copy was waited for, and the target is its exchange's until this
        // returns; what the device does from then on follows the copy.
        let landing = unsafe { Beside::begin(&self.tensor()?, target, &now)? };
        landing.lead()?;
        *self.0.reader.lock().unwrap_or_else(PoisonError::into_inner) = Some(landing);
        Ok(())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let reader = self.reader.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        let free = Free { device: self.device.clone(), memory: self.memory.clone(), reader };
        let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
        kept.push(free);
        // The ones that waited longest are of sizes that are not asked for any more.
        let mut bytes: usize = kept.iter().map(|free| free.memory.size_bytes()).sum();
        let given_up = kept.iter().take_while(|free| {
            let is_over = bytes > KEPT_BYTES;
            bytes -= if is_over { free.memory.size_bytes() } else { 0 };
            is_over
        });
        let count = given_up.count();
        let given_up: Vec<Free> = kept.drain(..count).collect();
        drop(kept);
        drop(given_up);
    }
}

/// The size of the room for so many bytes.
fn rounded(bytes: usize) -> usize {
    let step = (bytes.max(4096).next_power_of_two() / SIZES_PER_DOUBLING / 2).max(512);
    bytes.max(1).next_multiple_of(step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_room_is_at_most_an_eighth_too_large() {
        for bytes in (1..100_000).step_by(97).chain([1 << 20, (1 << 20) + 1, 3 << 28]) {
            let size = rounded(bytes);
            assert!(
                size >= bytes && (size - bytes) * SIZES_PER_DOUBLING <= bytes.max(4096),
                "{bytes}: {size}"
            );
        }
    }
}
