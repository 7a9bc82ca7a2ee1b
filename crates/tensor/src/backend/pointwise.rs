//! Element by element: activations, arithmetic, comparisons, dropout.

use crate::backend::Memory;
use crate::error::Result;
use crate::out::Out;
use crate::random::RandomKey;
use crate::tensor::Tensor;

/// The pointwise functions that are fused into products and gates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Activation {
    /// `x·Φ(x)` by the error function.
    GeluErf,
    /// GELU by the tanh approximation.
    GeluTanh,
    /// `x·sigmoid(1.702·x)`.
    QuickGelu,
    /// `x·sigmoid(x)`.
    Silu,
    /// `max(x, 0)`.
    Relu,
    /// Hyperbolic tangent.
    Tanh,
    /// Logistic function.
    Sigmoid,
}

impl Activation {
    /// Every one, in order.
    pub const ALL: [Activation; 7] = [
        Activation::GeluErf,
        Activation::GeluTanh,
        Activation::QuickGelu,
        Activation::Silu,
        Activation::Relu,
        Activation::Tanh,
        Activation::Sigmoid,
    ];
}

/// Elementwise functions of one operand.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Unary {
    /// One of the fused activations.
    Activation(Activation),
    /// `-x`
    Neg,
    /// `exp(x)`
    Exp,
    /// Natural logarithm.
    Log,
    /// Square root.
    Sqrt,
    /// `x²`
    Square,
    /// `|x|`
    Abs,
    /// `1/x`
    Reciprocal,
    /// `scale·x + shift`
    Affine {
        /// The factor.
        scale: f32,
        /// The summand.
        shift: f32,
    },
    /// `xⁿ`
    Power(f32),
}

/// Element by element.
pub trait Pointwise: Memory {
    /// `dx = dy · f'(x)`, `x` the value before the activation.
    fn activation_backward(&self, activation: Activation, x: &Tensor, dy: &Tensor, dx: Out<'_>)
    -> Result<()>;
    /// The same where both may be overwritten: `before` becomes `f(before)`, `gradient` is multiplied by `f'(before)`.
    fn activation_backward_in_place(
        &self,
        activation: Activation,
        before: Out<'_>,
        gradient: Out<'_>,
    ) -> Result<()>;
    /// Widest rows of which a perceptron keeps the values after its activation beside those before it, so that backward
    /// need not make them again: memory for time.
    fn kept_activation_width(&self) -> usize {
        0
    }
    /// `gradient` is multiplied by `f'(before)` where it lies, and the sums of its columns go to `sums`. With `rebuilds`,
    /// `before` becomes `f(before)`.
    fn activation_backward_sums(
        &self,
        activation: Activation,
        before: Out<'_>,
        gradient: Out<'_>,
        rebuilds: bool,
        sums: Option<Out<'_>>,
    ) -> Result<()>;
    /// `y = f(gate) · up`.
    fn gated(&self, activation: Activation, gate: &Tensor, up: &Tensor, y: Out<'_>) -> Result<()>;
    /// Gradients of [`Pointwise::gated`] where its operands lie: `gate` and `up` become theirs. With `rebuilds`, the gradient
    /// `dy` of the result becomes the result.
    fn gated_backward_in_place(
        &self,
        activation: Activation,
        gate: Out<'_>,
        up: Out<'_>,
        dy: Out<'_>,
        rebuilds: bool,
    ) -> Result<()>;
    /// Gradients of [`Pointwise::gated`].
    fn gated_backward(
        &self,
        activation: Activation,
        gate: &Tensor,
        up: &Tensor,
        dy: &Tensor,
        dgate: Out<'_>,
        dup: Out<'_>,
    ) -> Result<()>;
    /// `target = target · factor`, `factor` one f32.
    fn scale_in_place(&self, target: Out<'_>, factor: &Tensor) -> Result<()>;
    /// `target = source · factor`, `factor` one f32, rounded to the target's type.
    fn scale_by(&self, source: &Tensor, factor: &Tensor, target: Out<'_>) -> Result<()>;
    /// Zeroes elements with probability `p`, scales the others by `1/(1-p)`.
    fn dropout(&self, x: &Tensor, y: Out<'_>, p: f32, key: RandomKey) -> Result<()>;
    /// The same for rows of a larger tensor: row `i` begins at element `starts[i]` of it.
    fn dropout_rows(&self, x: &Tensor, y: Out<'_>, p: f32, key: RandomKey, starts: &[u64]) -> Result<()>;
    /// Elementwise.
    fn unary(&self, op: Unary, x: &Tensor, y: Out<'_>) -> Result<()>;
    /// Elementwise, over what is there.
    fn unary_in_place(&self, op: Unary, x: Out<'_>) -> Result<()>;
    /// `dx = dy · f'(x)`.
    fn unary_backward(&self, op: Unary, x: &Tensor, dy: &Tensor, dx: Out<'_>) -> Result<()>;
    /// `target += source`, same shape, rounded once.
    fn add_assign(&self, target: Out<'_>, source: &Tensor) -> Result<()>;
}
