//! The average at one bit per value of tensors on a GPU, which makes the messages and reads them.
//!
//! All tensors are rounded by one kernel, and by one more when the signs of all ranks are there. Nothing waits but for the
//! exchange itself; sums have a fixed order, so that a run gives the same bits again.

use ferrospeed_comm::Group;
use ferrospeed_tensor::backend::{Rounding, SignMessages, Signed, with_category};
use ferrospeed_tensor::{Category, DType, Device, Tensor};

use super::{Feedback, PER_BYTE, Rounded, SCALE_BYTES, padded_numel};
use crate::error::Result;
use crate::exchange;

/// What rounding to signs has lost so far of one tensor on a device: see [`Feedback`].
#[derive(Debug)]
pub struct DeviceFeedback {
    worker: DeviceRounded,
    server: DeviceRounded,
}

/// Values that went as signs, as they were, and the size of the signs.
#[derive(Debug)]
struct DeviceRounded {
    values: Tensor,
    scale: Tensor,
}

impl DeviceRounded {
    fn nothing(numel: usize, device: &Device) -> Result<DeviceRounded> {
        let zeros = |numel: usize| Tensor::zeros_in([numel], DType::F32, device, Category::Optimizer);
        Ok(DeviceRounded { values: zeros(numel)?, scale: zeros(1)? })
    }

    fn of(rounded: &Rounded, device: &Device) -> Result<DeviceRounded> {
        let copied = |values: &[f32]| {
            with_category(Category::Optimizer, || Tensor::from_slice(values, [values.len()], device))
        };
        Ok(DeviceRounded { values: copied(&rounded.values)?, scale: copied(&[rounded.scale])? })
    }

    fn to_host(&self) -> Result<Rounded> {
        let scale = self.scale.to_vec::<f32>()?;
        Ok(Rounded { values: self.values.to_vec()?, scale: scale[0] })
    }

    /// With what is given, or else the mean of what was received, as a message from byte `at` on.
    fn rounding<'a>(&'a self, given: Option<&'a Tensor>, at: usize) -> Rounding<'a> {
        Rounding { values: &self.values, scale: &self.scale, given, at }
    }
}

impl DeviceFeedback {
    /// Nothing lost yet, of a tensor of so many elements on so many ranks.
    pub fn new(numel: usize, ranks: usize, device: &Device) -> Result<DeviceFeedback> {
        let padded = padded_numel(numel, ranks);
        let nothing = |numel| DeviceRounded::nothing(numel, device);
        Ok(DeviceFeedback { worker: nothing(padded)?, server: nothing(padded / ranks)? })
    }

    /// What the host has lost, on a device.
    pub fn of(feedback: &Feedback, device: &Device) -> Result<DeviceFeedback> {
        let of = |rounded| DeviceRounded::of(rounded, device);
        Ok(DeviceFeedback { worker: of(&feedback.worker)?, server: of(&feedback.server)? })
    }

    /// The same on the host.
    pub fn to_host(&self) -> Result<Feedback> {
        Ok(Feedback { worker: self.worker.to_host()?, server: self.server.to_host()? })
    }
}

/// One f32 tensor of several that are averaged in one exchange; it may include some or all of the padding.
#[derive(Debug, Clone, Copy)]
pub struct DeviceAveraged<'a> {
    /// Its values, which become their average.
    pub values: &'a Tensor,
    /// What it has lost so far.
    pub feedback: &'a DeviceFeedback,
}

/// As [`super::all_reduce_each`], of tensors on a device that is not the host.
///
/// # Panics
/// When a feedback is not of its tensor's size or of this group: a bug of the caller.
pub fn all_reduce_each(group: &Group, device: &Device, tensors: &[DeviceAveraged<'_>]) -> Result<()> {
    let ranks = group.size();
    if ranks == 1 || tensors.is_empty() {
        return Ok(());
    }
    let (mut places, mut total) = (Vec::with_capacity(tensors.len()), 0);
    for DeviceAveraged { values, feedback: DeviceFeedback { worker, server } } in tensors {
        let (worker, server) = (worker.values.numel(), server.values.numel());
        assert_eq!(worker, padded_numel(values.numel(), ranks), "feedback of another tensor");
        assert_eq!(server * ranks, worker, "feedback of another group");
        places.push(total);
        total += SCALE_BYTES + server / PER_BYTE;
    }
    let bytes = |count: usize| Tensor::empty_in([count], DType::U8, device, Category::Buffers);
    let (sent, received, own) = (bytes(total * ranks)?, bytes(total * ranks)?, bytes(total)?);
    let of_all = |bytes| SignMessages { bytes, ranks };
    let each = || tensors.iter().zip(&places);
    let backend = device.backend();

    let leaving: Vec<Rounding<'_>> =
        each().map(|(tensor, &at)| tensor.feedback.worker.rounding(Some(tensor.values), at)).collect();
    backend.round_to_signs(&leaving, None, of_all(&sent))?;
    let counts = vec![total; ranks];
    exchange::all_to_all(group, &sent, &received, &counts, &counts)?.wait()?;

    let made: Vec<Rounding<'_>> =
        each().map(|(tensor, &at)| tensor.feedback.server.rounding(None, at)).collect();
    backend.round_to_signs(&made, Some(of_all(&received)), SignMessages { bytes: &own, ranks: 1 })?;
    for pending in exchange::all_gather(group, &[(own, received.clone())], 0)? {
        pending.wait()?;
    }

    let taken: Vec<Signed<'_>> = each()
        .map(|(tensor, &at)| {
            let stretch = tensor.feedback.server.values.numel();
            Signed { values: tensor.values, stretch, at }
        })
        .collect();
    Ok(backend.take_signs(&taken, of_all(&received))?)
}
