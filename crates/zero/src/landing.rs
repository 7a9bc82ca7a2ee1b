//! Gradients on their way from a device to the host that updates, and new weights on their way back.
//!
//! Both go through page-locked memory, a tile at a time, beside the device's work: while a tile is updated, the gradient of
//! the next one comes and the weights of the last one leave. Rooms are kept from step to step, since locking pages is slow.

use std::sync::{Arc, Mutex, PoisonError};

use ferrospeed_tensor::beside::{Beside, Moment};
use ferrospeed_tensor::{Category, DType, Device, Tensor};

use crate::error::Result;

/// Page-locked rooms that nobody uses now. Clones are the same.
#[derive(Clone, Default)]
pub(crate) struct Rooms {
    free: Arc<Mutex<Vec<Tensor>>>,
}

impl Rooms {
    fn take(&self, numel: usize, dtype: DType, device: &Device) -> Result<Tensor> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |room: &Tensor| room.numel() == numel && room.dtype() == dtype;
        match free.iter().position(fits) {
            Some(index) => Ok(free.swap_remove(index)),
            None => Ok(device.locked(numel, dtype, Category::Buffers)?),
        }
    }

    fn give(&self, room: Tensor) {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).push(room);
    }
}

/// The way between a device and the host during one update.
pub(crate) struct Way {
    /// When gradients are there, and nobody reads old weights any more.
    after: Moment,
    rooms: Rooms,
    /// Elements of a room.
    numel: usize,
}

/// A tile in a room, with the copies that bring it there or take it away.
pub(crate) struct Landing {
    room: Option<Tensor>,
    rooms: Rooms,
    copies: Vec<Beside>,
}

impl Way {
    /// From and to a device that is not the host; `None` for the host, which needs no way.
    pub(crate) fn open(device: &Device, rooms: &Rooms, numel: usize) -> Result<Option<Way>> {
        if device.backend().is_host() {
            return Ok(None);
        }
        let after = Moment::now(device)?;
        Ok(after.map(|after| Way { after, rooms: rooms.clone(), numel }))
    }

    /// A room for a tile of this type.
    pub(crate) fn room(&self, dtype: DType) -> Result<Landing> {
        let room = self.rooms.take(self.numel, dtype, self.after.device())?;
        Ok(Landing { room: Some(room), rooms: self.rooms.clone(), copies: Vec::new() })
    }

    /// Begins to bring values of the device to a place in a room, or the other way.
    pub(crate) fn begin(&self, landing: &mut Landing, source: &Tensor, target: &Tensor) -> Result<()> {
        // SAFETY: a landing's room is its own, and the device's side is a tile of a step, which nobody else touches before
        // the landing was waited for.
        landing.copies.push(unsafe { Beside::begin(source, target, &self.after)? });
        Ok(())
    }
}

impl Landing {
    /// Its memory.
    pub(crate) fn room(&self) -> &Tensor {
        self.room.as_ref().expect("a room is given back once, at the end")
    }

    /// Waits for what is on its way.
    pub(crate) fn wait(&mut self) -> Result<()> {
        Ok(self.copies.drain(..).try_for_each(Beside::wait)?)
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        self.copies.clear();
        if let Some(room) = self.room.take() {
            self.rooms.give(room);
        }
    }
}
