//! A model as a list of layers over one carried value: what can be cut into stages.
//!
//! Whoever trains a model in stages builds all of its handles on every rank, which costs nothing, and gives values only to
//! those of its own stage. A stage runs a range of the layers on what the stage before carried over; the first takes its
//! input from the micro-batch, and the last gives the loss.

use std::ops::Range;

use ferrospeed_tensor::{Param, Result, Tensor, TensorError};

use crate::Mode;
use crate::sequential::Sequential;

/// What passes from one layer to the next. Floats among the tensors have gradients, which pass the other way.
pub type Carried = Vec<Tensor>;

/// A layer, as one who divides a model must know it.
#[derive(Debug, Clone)]
pub struct Layer {
    /// The name of its kind.
    pub class: String,
    /// The parameters it uses. One that several layers use is tied.
    pub parameters: Vec<Param>,
}

/// A model that can be run in parts.
pub trait Stages: Send + Sync {
    /// A micro-batch.
    type Batch;

    /// Its layers, in order; the last ends with the loss.
    fn layers(&self) -> Vec<Layer>;

    /// Runs some layers. With the first of all, `carried` is empty and the input is the micro-batch's; with the last, the
    /// result is the loss alone. Every stage is given the micro-batch, for what is not carried: masks, positions, labels.
    fn forward_range(
        &self,
        range: Range<usize>,
        batch: &Self::Batch,
        carried: Carried,
        mode: Mode,
    ) -> Result<Carried>;

    /// The same, but the last layer's result is what the model says (logits, say) and not the loss of it, so that a
    /// micro-batch needs no labels.
    fn output_range(
        &self,
        _range: Range<usize>,
        _batch: &Self::Batch,
        _carried: Carried,
        _mode: Mode,
    ) -> Result<Carried> {
        Err(TensorError::argument("inference", "this model gives its loss and nothing else".to_owned()))
    }

    /// Whether a micro-batch has anything to predict; the loss of one that has not does not count in the mean of a step.
    fn has_targets(&self, _batch: &Self::Batch) -> bool {
        true
    }

    /// Whether ranks that hold slices of its layers carry the same values from one to the next, so that each need send but a
    /// share of them.
    fn carries_alike(&self) -> bool {
        false
    }
}

/// Layers and the loss that they are trained with. A micro-batch is an input and a target.
#[derive(Debug)]
pub struct Trained<L> {
    /// The layers.
    pub layers: Sequential,
    /// Makes the loss of the output and the target.
    pub loss: L,
}

impl<L: Fn(&Tensor, &Tensor) -> Result<Tensor> + Send + Sync> Stages for Trained<L> {
    type Batch = (Tensor, Tensor);

    fn layers(&self) -> Vec<Layer> {
        let layer = |(index, layer): (usize, &dyn crate::Module)| Layer {
            class: layer.class().to_owned(),
            parameters: self.layers.parameters_of(index).to_vec(),
        };
        self.layers.layers().enumerate().map(layer).collect()
    }

    fn forward_range(
        &self,
        range: Range<usize>,
        (input, target): &Self::Batch,
        carried: Carried,
        mode: Mode,
    ) -> Result<Carried> {
        let is_last = range.end == self.layers.len();
        let x = carried.into_iter().next().unwrap_or_else(|| input.clone());
        let y = self.layers.forward_range(range, &x, mode)?;
        Ok(vec![if is_last { (self.loss)(&y, target)? } else { y }])
    }

    fn output_range(
        &self,
        range: Range<usize>,
        (input, _): &Self::Batch,
        carried: Carried,
        mode: Mode,
    ) -> Result<Carried> {
        let x = carried.into_iter().next().unwrap_or_else(|| input.clone());
        Ok(vec![self.layers.forward_range(range, &x, mode)?])
    }
}
