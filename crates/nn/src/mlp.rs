//! The feed-forward halves of transformer blocks.

use ferrospeed_tensor::ops::{self, Inwards, MlpWeights, WeightLayout};
use ferrospeed_tensor::{Activation, Result, Tensor, profile};

use crate::linear::Linear;
use crate::norm::Norm;
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
        self.forward_in_chunks(x, None)
    }

    /// The same over at most so many rows at a time, whose inside is computed again in backward.
    pub fn forward_in_chunks(&self, x: &Tensor, chunk: Option<usize>) -> Result<Tensor> {
        profile::scope("Mlp", [self.up.weight(), self.down.weight()], || {
            let x = enter(x, self.down.summed_over())?;
            if self.layers().iter().any(|layer| layer.stands_alone()) {
                return self.down.forward(&self.up.forward_activated(&x, self.activation)?);
            }
            let (up, down, layout) = (self.up.operands(), self.down.operands(), self.up.layout());
            self.down.finish(match chunk {
                None => ops::mlp(&x, up, down, layout, self.activation)?,
                Some(chunk) => {
                    let weights = MlpWeights { inwards: Inwards::Up(up), down };
                    ops::mlp_in_chunks(&x, weights, layout, self.activation, chunk)?
                }
            })
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
        self.forward_in_chunks(x, None)
    }

    /// `x + forward(norm(x))` for few rows, where the device has kernels for that and nothing is recorded; `None` where not.
    pub fn forward_onto(&self, x: &Tensor, norm: &Norm) -> Result<Option<Tensor>> {
        let stand_alone = self.layers().iter().any(|layer| layer.stands_alone());
        let plain =
            self.gate.layout() == WeightLayout::OutIn && self.down.summed_over().is_none() && !stand_alone;
        let Some(norm) = norm.of_few_rows().filter(|_| plain) else { return Ok(None) };
        let [gate, up, down] = self.layers().map(Linear::operands);
        let Some(hidden) = ops::normed_gate(x, norm, [gate, up], self.activation)? else { return Ok(None) };
        match ops::linear_onto(&hidden, down, x)? {
            Some(y) => Ok(Some(y)),
            None => Ok(Some(ops::add(&self.down.forward(&hidden)?, x)?)),
        }
    }

    /// The same over at most so many rows at a time, whose inside is computed again in backward.
    pub fn forward_in_chunks(&self, x: &Tensor, chunk: Option<usize>) -> Result<Tensor> {
        profile::scope("GatedMlp", [&self.gate, &self.up, &self.down].map(Linear::weight), || {
            let x = enter(x, self.down.summed_over())?;
            if self.layers().iter().any(|layer| layer.stands_alone()) {
                let (gate, up) = (self.gate.forward(&x)?, self.up.forward(&x)?);
                return self.down.forward(&ops::gated(self.activation, &gate, &up)?);
            }
            let (layers, layout) = (self.layers().map(Linear::operands), self.gate.layout());
            self.down.finish(match (chunk, layers) {
                (None, layers) => ops::gated_mlp(&x, layers, layout, self.activation)?,
                (Some(chunk), [gate, up, down]) => {
                    let weights = MlpWeights { inwards: Inwards::Gated { gate, up }, down };
                    ops::mlp_in_chunks(&x, weights, layout, self.activation, chunk)?
                }
            })
        })
    }
}

/// The same where one layer makes both, all of the gate before all of up.
#[derive(Debug, Clone)]
pub struct PackedGatedMlp {
    gate_up: Linear,
    down: Linear,
    activation: Activation,
}

impl PackedGatedMlp {
    /// From its two layers, which share a weight layout.
    pub fn new(gate_up: Linear, down: Linear, activation: Activation) -> PackedGatedMlp {
        PackedGatedMlp { gate_up, down, activation }
    }

    /// Over at most so many rows at a time, where that is not all; their inside is computed again in backward then.
    pub fn forward_in_chunks(&self, x: &Tensor, chunk: Option<usize>) -> Result<Tensor> {
        profile::scope("GatedMlp", [&self.gate_up, &self.down].map(Linear::weight), || {
            let x = enter(x, self.down.summed_over())?;
            let stand_alone = [&self.gate_up, &self.down].iter().any(|layer| layer.stands_alone());
            self.down.finish(match chunk.filter(|_| !stand_alone) {
                None => self.product(&x)?,
                Some(chunk) => {
                    let (both, down, layout) =
                        (self.gate_up.operands(), self.down.operands(), self.gate_up.layout());
                    let weights = MlpWeights { inwards: Inwards::Packed(both), down };
                    ops::mlp_in_chunks(&x, weights, layout, self.activation, chunk)?
                }
            })
        })
    }

    /// The gated product, projected down; of inputs that are cut, this rank's summand.
    fn product(&self, x: &Tensor) -> Result<Tensor> {
        let both = self.gate_up.forward(x)?;
        let (dim, inner) = (both.shape().dims() - 1, both.shape().last() / 2);
        let parts = ops::split(&both, dim, &[inner, inner])?;
        self.down.product(&ops::gated(self.activation, &parts[0], &parts[1])?)
    }
}
