//! `activation_checkpointing`: where the inputs of checkpointed segments wait for backward.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use ferrospeed_collective::shelf::Spread;
use ferrospeed_comm::Group;
use ferrospeed_config::ActivationCheckpointing;
use ferrospeed_tensor::autograd::{InPlace, OnHost, Restore, Shelf};
use ferrospeed_tensor::{Result, Tensor, TensorError};

/// The shelf that the section asks for. `alike` are the ranks of a tensor group, where those have the same activations
/// between layers.
pub fn activation_shelf(section: &ActivationCheckpointing, alike: Option<&Group>) -> Arc<dyn Shelf> {
    let mut shelf: Arc<dyn Shelf> =
        if section.cpu_checkpointing { Arc::new(OnHost::default()) } else { Arc::new(InPlace) };
    if let Some(group) = alike.filter(|group| section.partition_activations && group.size() > 1) {
        shelf = Arc::new(Spread::over(group, shelf));
    }
    if let Some(slots) = section.number_checkpoints.filter(|_| section.contiguous_memory_optimization) {
        shelf = Arc::new(Slotted { shelf, slots, taken: Taken::default() });
    }
    if section.synchronize_checkpoint_boundary {
        shelf = Arc::new(Synchronized(shelf));
    }
    shelf
}

/// By shape, how many tensors are put away now.
type Taken = Arc<Mutex<HashMap<Vec<usize>, u64>>>;

/// `contiguous_memory_optimization`: as many slots for tensors of one shape as the configuration has. They are counted and not
/// made: the arena has free memory in one piece anyhow.
#[derive(Debug)]
struct Slotted {
    shelf: Arc<dyn Shelf>,
    slots: u64,
    taken: Taken,
}

/// One slot, until backward is through with it.
struct Slot {
    shape: Vec<usize>,
    taken: Taken,
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = taken.get_mut(&self.shape) {
            *count -= 1;
        }
    }
}

impl Shelf for Slotted {
    fn put(&self, tensor: Tensor) -> Result<Restore> {
        let shape = tensor.sizes().to_vec();
        let slot = {
            let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
            let count = taken.entry(shape.clone()).or_default();
            if *count == self.slots {
                let why = format!(
                    "activation_checkpointing.number_checkpoints is {}, and one more input of shape {shape:?} is to be kept: write as many as blocks are recomputed, times the micro-batches that a stage of a pipeline has under way",
                    self.slots
                );
                return Err(TensorError::argument("checkpoint", why));
            }
            *count += 1;
            Slot { shape, taken: self.taken.clone() }
        };
        let restore = self.shelf.put(tensor)?;
        Ok(Box::new(move || {
            let _kept_with = &slot;
            restore()
        }))
    }
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

#[cfg(test)]
mod tests {

    use super::*;

    #[test]
    fn more_inputs_than_slots_are_refused_until_backward_has_let_go_of_one() {
        let section = ActivationCheckpointing {
            partition_activations: true,
            contiguous_memory_optimization: true,
            number_checkpoints: Some(2),
            synchronize_checkpoint_boundary: false,
            profile: false,
            cpu_checkpointing: false,
        };
        let shelf = activation_shelf(&section, None);
        let input =
            |len: usize| Tensor::from_slice(&vec![0.5f32; len], [len], &ferrospeed_cpu::device()).unwrap();
        let first = shelf.put(input(4)).unwrap();
        let _second = shelf.put(input(4)).unwrap();
        let refused = shelf.put(input(4)).err().unwrap().to_string();
        assert!(refused.contains("number_checkpoints is 2") && refused.contains("[4]"), "{refused}");
        // Another shape has slots of its own.
        let _other = shelf.put(input(3)).unwrap();
        assert_eq!(first().unwrap().to_vec::<f32>().unwrap(), [0.5; 4]);
        drop(first);
        assert!(shelf.put(input(4)).is_ok());
        let plain = ActivationCheckpointing { contiguous_memory_optimization: false, ..section };
        let shelf = activation_shelf(&plain, None);
        let kept: Vec<Restore> = (0..3).map(|_| shelf.put(input(4)).unwrap()).collect();
        assert_eq!(kept.len(), 3);
    }
}
