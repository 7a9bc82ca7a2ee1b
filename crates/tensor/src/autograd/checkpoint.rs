//! Activation checkpointing: keep a segment's inputs, run it again in backward.
//!
//! (Chen, Xu, Zhang, Guestrin: "Training deep nets with sublinear memory cost", 2016.) The second run draws the
//! same random numbers as the first. Segments nest. Inputs need not require a gradient: parameters inside the
//! segment get theirs all the same. Until then the inputs wait where a [`Shelf`] puts them.

use std::sync::{Arc, Mutex};

use crate::autograd::{TOUCHED, backward_with, is_recording, no_grad, record_node, with_recording};
use crate::error::{Result, TensorError};
use crate::param::{Operand, Param};
use crate::profile;
use crate::random;
use crate::tensor::Tensor;

/// Brings back what was put away, as often as it is asked; dropped, it lets go of it.
pub type Restore = Box<dyn Fn() -> Result<Tensor> + Send>;

/// Where the inputs of checkpointed segments wait for backward.
pub trait Shelf: std::fmt::Debug + Send + Sync {
    /// Puts a tensor away; what comes back has the same bits.
    fn put(&self, tensor: Tensor) -> Result<Restore>;
}

/// They stay where they are.
#[derive(Debug, Clone, Copy, Default)]
pub struct InPlace;

impl Shelf for InPlace {
    fn put(&self, tensor: Tensor) -> Result<Restore> {
        Ok(Box::new(move || Ok(tensor.clone())))
    }
}

/// They wait in host memory; a device's memory then holds those of one segment at a time.
#[derive(Debug, Clone, Default)]
pub struct OnHost {
    /// Buffers that wait for their next use: memory that is asked for anew is cleared page by page.
    free: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl OnHost {
    fn buffer(&self, bytes: usize) -> Vec<u8> {
        let mut free = self.free.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let fitting = free.iter().position(|buffer| buffer.len() == bytes);
        fitting.map_or_else(|| vec![0; bytes], |index| free.swap_remove(index))
    }
}

/// A buffer in use, which goes back to the free ones.
struct Waiting {
    buffer: Vec<u8>,
    free: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let buffer = std::mem::take(&mut self.buffer);
        self.free.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push(buffer);
    }
}

impl Shelf for OnHost {
    fn put(&self, tensor: Tensor) -> Result<Restore> {
        if tensor.device().backend().is_host() {
            return InPlace.put(tensor);
        }
        let mut buffer = self.buffer(tensor.size_bytes());
        tensor.device().backend().copy_to_host(&tensor, &mut buffer)?;
        let (shape, dtype, device) = (*tensor.shape(), tensor.dtype(), tensor.device().clone());
        let waiting = Waiting { buffer, free: self.free.clone() };
        Ok(Box::new(move || {
            let mut again = Tensor::empty(shape, dtype, &device)?;
            device.backend().copy_from_host(&waiting.buffer, again.out()?)?;
            Ok(again)
        }))
    }
}

/// Runs `segment` on `inputs`, saving only the inputs; backward runs it again.
///
/// The segment must compute the same thing both times: it may depend on its inputs, on parameters and on this
/// thread's random state, on nothing else that changes.
pub fn checkpoint(
    inputs: &[Tensor],
    segment: impl Fn(&[Tensor]) -> Result<Vec<Tensor>> + Send + 'static,
) -> Result<Vec<Tensor>> {
    checkpoint_on(&InPlace, inputs, segment)
}

/// The same with the inputs on a shelf meanwhile.
pub fn checkpoint_on(
    shelf: &dyn Shelf,
    inputs: &[Tensor],
    segment: impl Fn(&[Tensor]) -> Result<Vec<Tensor>> + Send + 'static,
) -> Result<Vec<Tensor>> {
    if !is_recording() {
        return segment(inputs);
    }
    let random_state = random::state();
    let (outputs, touched) = run_collecting(inputs, &segment)?;
    let operands: Vec<Operand> = inputs.iter().map(Operand::from).collect();
    if touched.is_empty() && !operands.iter().any(Operand::requires_grad) {
        return Ok(outputs);
    }
    let put = |input: &Tensor| Ok((shelf.put(input.detach())?, input.requires_grad()));
    let saved = inputs.iter().map(put).collect::<Result<Vec<(Restore, bool)>>>()?;

    let backward = move |gradients: Vec<Option<Tensor>>| {
        let mut inputs = Vec::with_capacity(saved.len());
        for (restore, wanted) in &saved {
            let input = restore()?;
            inputs.push(if *wanted { input.tracked() } else { input });
        }
        let outer_state = random::set_state(random_state);
        let again =
            profile::during(profile::Pass::Recomputation, || with_recording(true, || segment(&inputs)));
        random::set_state(outer_state);
        let again = again?;
        if again.len() != gradients.len() {
            return Err(TensorError::argument(
                "checkpoint",
                format!("the recomputation gave {} results, the first run {}", again.len(), gradients.len()),
            ));
        }
        let roots: Vec<(Tensor, Tensor)> = again
            .into_iter()
            .zip(gradients)
            .filter_map(|(output, gradient)| Some((output, gradient?)))
            .filter(|(output, _)| output.requires_grad())
            .collect();
        if !roots.is_empty() {
            backward_with(&roots)?;
        }
        Ok(inputs.iter().map(Tensor::grad).collect())
    };
    let operands: Vec<&Operand> = operands.iter().collect();
    Ok(record_node("checkpoint", &operands, touched, outputs, Box::new(backward)))
}

/// The first run, unrecorded, with the trainable parameters it used.
fn run_collecting(
    inputs: &[Tensor],
    segment: &impl Fn(&[Tensor]) -> Result<Vec<Tensor>>,
) -> Result<(Vec<Tensor>, Vec<Param>)> {
    struct Restore(Option<Vec<Param>>);
    impl Drop for Restore {
        fn drop(&mut self) {
            TOUCHED.set(self.0.take());
        }
    }
    let _restore = Restore(TOUCHED.replace(Some(Vec::new())));
    let outputs = no_grad(|| segment(inputs))?;
    let touched = TOUCHED.with_borrow_mut(Option::take).unwrap_or_default();
    Ok((outputs, touched))
}
