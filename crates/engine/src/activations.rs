//! `activation_checkpointing`: where the inputs of checkpointed segments wait for backward.

use std::sync::Arc;

use ferrospeed_collective::shelf::Spread;
use ferrospeed_comm::Group;
use ferrospeed_config::ActivationCheckpointing;
use ferrospeed_tensor::autograd::{InPlace, OnHost, Restore, Shelf};
use ferrospeed_tensor::{Result, Tensor};

/// The shelf that the section asks for. `alike` are the ranks of a tensor group, where those have the same activations
/// between layers.
pub fn activation_shelf(section: &ActivationCheckpointing, alike: Option<&Group>) -> Arc<dyn Shelf> {
    let mut shelf: Arc<dyn Shelf> =
        if section.cpu_checkpointing { Arc::new(OnHost::default()) } else { Arc::new(InPlace) };
    if let Some(group) = alike.filter(|group| section.partition_activations && group.size() > 1) {
        shelf = Arc::new(Spread::over(group, shelf));
    }
    if section.synchronize_checkpoint_boundary {
        shelf = Arc::new(Synchronized(shelf));
    }
    shelf
}

/// Waits for the device wherever something is put away or brought back.
#[derive(Debug)]
struct Synchronized(Arc<dyn Shelf>);

impl Shelf for Synchronized {
    fn put(&self, tensor: Tensor) -> Result<Restore> {
        let device = tensor.device().clone();
        device.backend().synchronize()?;
        let restore = self.0.put(tensor)?;
        Ok(Box::new(move || {
            device.backend().synchronize()?;
            restore()
        }))
    }
}
