//! Gradients that leave a GPU while backward goes on: `offload_optimizer` with `pin_memory`.
//!
//! What this rank keeps of the reduced gradients is then in page-locked memory of the host, where the update works. Each
//! piece goes there as soon as it is reduced, beside the kernels of backward, so that the device holds only what is under
//! way. With accumulation the sum so far comes back for a moment and the device adds to it: its bits are those of a sum that
//! never left. The device also measures what leaves (see `measures`).

use std::collections::VecDeque;

use ferrospeed_config::GRADIENT_BYTES_UNDER_WAY;
use ferrospeed_tensor::beside::{Beside, Moment};
use ferrospeed_tensor::{Category, DType, Device, Out, Tensor, TensorError};

use super::Segment;
use super::measures::Measures;
use crate::error::Result;
use crate::memory::part;

/// Gradients on the host, and those on their way there.
pub(super) struct Leaving {
    device: Device,
    /// What is kept, by group.
    kept: Vec<Tensor>,
    /// The copies under way, oldest first, with their bytes.
    under_way: VecDeque<(Beside, usize)>,
    bytes: usize,
    pub(super) measures: Measures,
}

impl Leaving {
    /// Room on the host for parts of so many elements; `None` where a device has no host beside it, or memory cannot be
    /// locked.
    pub(super) fn open(device: &Device, numels: &[usize], dtype: DType) -> Result<Option<Leaving>> {
        if device.backend().is_host() {
            return Ok(None);
        }
        let room = |&numel: &usize| -> Result<Tensor, TensorError> {
            let room = device.locked(numel, dtype, Category::Gradients)?;
            // SAFETY: the memory was just taken, and nobody else knows it.
            device.host().backend().fill(unsafe { Out::vouched(&room) }, 0.0)?;
            Ok(room)
        };
        match numels.iter().map(room).collect::<Result<Vec<_>, _>>() {
            Ok(kept) => {
                let (device, measures) = (device.clone(), Measures::new(kept.len(), device)?);
                Ok(Some(Leaving { device, kept, under_way: VecDeque::new(), bytes: 0, measures }))
            }
            Err(why) => {
                tracing::warn!("offload_optimizer: gradients stay on the device until the update: {why}");
                Ok(None)
            }
        }
    }

    /// Sends a reduced piece of a group's part off, which is nobody else's: no other micro-batch comes to it.
    pub(super) fn give(&mut self, group: usize, in_part: usize, values: Tensor) -> Result<()> {
        let place = part(&self.kept[group], in_part, values.numel())?;
        self.begin(group, &values, &place)
    }

    /// Sends a reduced piece off; without `first` it is added to what earlier micro-batches left. `values` may be written
    /// again by later work of the device.
    pub(super) fn send(&mut self, group: usize, in_part: usize, values: &Tensor, first: bool) -> Result<()> {
        let place = part(&self.kept[group], in_part, values.numel())?;
        let mut parcel = Tensor::empty_in([values.numel()], place.dtype(), &self.device, Category::Buffers)?;
        if first {
            self.device.backend().cast(values, parcel.out()?)?;
        } else {
            // SAFETY: what was sent to this place arrives before this micro-batch's work (see `end`), and the parcel is
            // this call's own.
            unsafe { Beside::begin(&place, &parcel, &self.moment()?) }?.follow()?;
            self.device.backend().add_assign(parcel.out()?, values)?;
        }
        self.begin(group, &parcel, &place)
    }

    fn begin(&mut self, group: usize, parcel: &Tensor, place: &Tensor) -> Result<()> {
        self.measures.add(group, parcel)?;
        // SAFETY: nobody writes the parcel any more, and the host looks at the place only when it has waited.
        let copy = unsafe { Beside::begin(parcel, place, &self.moment()?) }?;
        self.bytes += parcel.size_bytes();
        self.under_way.push_back((copy, parcel.size_bytes()));
        while self.bytes as u64 > GRADIENT_BYTES_UNDER_WAY
            && let Some((oldest, bytes)) = self.under_way.pop_front()
        {
            oldest.follow()?;
            self.bytes -= bytes;
        }
        Ok(())
    }

    fn moment(&self) -> Result<Moment> {
        let none = || TensorError::argument("copy_beside", "the device has no copies beside its work");
        Ok(Moment::now(&self.device)?.ok_or_else(none)?)
    }

    /// Lets the device's next work wait for all that is under way, which ends a micro-batch.
    pub(super) fn end(&mut self) -> Result<()> {
        self.bytes = 0;
        self.measures.end();
        Ok(self.under_way.drain(..).try_for_each(|(copy, _)| copy.follow())?)
    }

    /// What has arrived, when all has.
    pub(super) fn segments(&self) -> Result<Vec<Segment>> {
        self.device.backend().synchronize()?;
        let segment =
            |(group, values): (usize, &Tensor)| Segment { group, in_part: 0, values: values.clone() };
        Ok(self.kept.iter().enumerate().map(segment).collect())
    }
}
