//! Activation checkpointing: keep a segment's inputs, run it again in backward.
//!
//! (Chen, Xu, Zhang, Guestrin: "Training deep nets with sublinear memory cost", 2016.) The second run draws the
//! same random numbers as the first. Segments nest. Inputs need not require a gradient: parameters inside the
//! segment get theirs all the same.

use crate::autograd::{TOUCHED, backward_with, is_recording, no_grad, record_node, with_recording};
use crate::error::{Result, TensorError};
use crate::param::{Operand, Param};
use crate::profile;
use crate::random;
use crate::tensor::Tensor;

/// Runs `segment` on `inputs`, saving only the inputs; backward runs it again.
///
/// The segment must compute the same thing both times: it may depend on its inputs, on parameters and on this
/// thread's random state, on nothing else that changes.
pub fn checkpoint(
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
    // What is kept between forward and backward. Moving it elsewhere (host memory, a slice per rank) is a change
    // of these two lines only.
    let saved: Vec<(Tensor, bool)> =
        inputs.iter().map(|input| (input.detach(), input.requires_grad())).collect();
    let restore = move || -> Vec<(Tensor, bool)> { saved };

    let backward = move |gradients: Vec<Option<Tensor>>| {
        let inputs: Vec<Tensor> = restore()
            .into_iter()
            .map(|(input, wanted)| if wanted { input.tracked() } else { input })
            .collect();
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
