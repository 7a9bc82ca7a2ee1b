//! Ops of one's own.

use std::sync::Arc;

use crate::autograd::{needs_grad, record_many};
use crate::error::Result;
use crate::param::{Operand, Value};
use crate::tensor::Tensor;

/// An op with its own backward.
///
/// Both methods see the inputs as borrowed values; what backward needs beyond inputs and results it recomputes.
pub trait CustomOp: Send + Sync {
    /// The name in messages.
    fn name(&self) -> &'static str;
    /// Computes the results.
    fn forward(&self, inputs: &[Value]) -> Result<Vec<Tensor>>;
    /// One gradient per input, `None` where there is none.
    fn backward(
        &self,
        inputs: &[Value],
        outputs: &[Tensor],
        gradients: &[Option<Tensor>],
    ) -> Result<Vec<Option<Tensor>>>;
}

/// Runs and records a custom op.
pub fn apply(op: Arc<dyn CustomOp>, inputs: &[Operand]) -> Result<Vec<Tensor>> {
    let read = |inputs: &[Operand]| inputs.iter().map(Operand::read).collect::<Result<Vec<Value>>>();
    let outputs = op.forward(&read(inputs)?)?;
    let operands: Vec<&Operand> = inputs.iter().collect();
    if !needs_grad(&operands) {
        return Ok(outputs);
    }
    let saved: Vec<Operand> = inputs.iter().map(Operand::saved).collect();
    let kept: Vec<Tensor> = outputs.iter().map(Tensor::detach).collect();
    let recorded = op.clone();
    Ok(record_many(op.name(), &operands, outputs, move |gradients| {
        recorded.backward(&read(&saved)?, &kept, &gradients)
    }))
}
