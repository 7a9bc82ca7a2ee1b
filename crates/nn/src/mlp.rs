//! The feed-forward halves of transformer blocks.

use ferrospeed_tensor::{Activation, Result, Tensor, ops, profile};

use crate::linear::Linear;
use crate::tensor_parallel::enter;

/// `down(f(up(x)))`.
#[derive(Debug, Clone)]
pub struct Mlp {
    up: Linear,
    down: Linear,
    activation: Activation,
}

impl Mlp {
    /// From its two layers, which share a weight layout.
    pub fn new(up: Linear, down: Linear, activation: Activation) -> Mlp {
        Mlp { up, down, activation }
    }

    /// Up and down.
    pub(crate) fn layers(&self) -> [&Linear; 2] {
        [&self.up, &self.down]
    }

    pub(crate) fn activation(&self) -> Activation {
        self.activation
    }

    /// One node on the tape, and where its inside is cut over ranks, one at either end.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        profile::scope("Mlp", [self.up.weight(), self.down.weight()], || {
            let x = enter(x, self.down.summed_over())?;
            let (up, down) = (self.up.operands(), self.down.operands());
            self.down.finish(ops::mlp(&x, up, down, self.up.layout(), self.activation)?)
        })
    }
}

/// `down(f(gate(x)) · up(x))`: SwiGLU, GeGLU and their kin.
#[derive(Debug, Clone)]
pub struct GatedMlp {
    gate: Linear,
    up: Linear,
    down: Linear,
    activation: Activation,
}

impl GatedMlp {
    /// From its three layers, which share a weight layout.
    pub fn new(gate: Linear, up: Linear, down: Linear, activation: Activation) -> GatedMlp {
        GatedMlp { gate, up, down, activation }
    }

    /// Gate, up and down.
    pub(crate) fn layers(&self) -> [&Linear; 3] {
        [&self.gate, &self.up, &self.down]
    }

    pub(crate) fn activation(&self) -> Activation {
        self.activation
    }

    /// The gated product, projected down: one node on the tape.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        profile::scope("GatedMlp", [&self.gate, &self.up, &self.down].map(Linear::weight), || {
            let x = enter(x, self.down.summed_over())?;
            let layers = self.layers().map(Linear::operands);
            self.down.finish(ops::gated_mlp(&x, layers, self.gate.layout(), self.activation)?)
        })
    }
}
