//! Convolution over images `[batch, channels, height, width]`.

use ferrospeed_tensor::{Initializer, Operand, Param, Result, Tensor, ops};

use crate::init::Init;

/// The window of a convolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Conv2dOptions {
    /// Height and width of the kernel.
    pub kernel: [usize; 2],
    /// Steps between windows.
    pub stride: [usize; 2],
    /// Zeros around the image.
    pub padding: [usize; 2],
    /// Whether a number is added per output channel.
    pub bias: bool,
}

impl Conv2dOptions {
    /// A square kernel that moves by one, without padding, with bias.
    pub fn square(kernel: usize) -> Conv2dOptions {
        Conv2dOptions { kernel: [kernel; 2], stride: [1; 2], padding: [0; 2], bias: true }
    }
}

/// A two-dimensional convolution.
#[derive(Debug, Clone)]
pub struct Conv2d {
    weight: Param,
    bias: Option<Param>,
    options: Conv2dOptions,
}

impl Conv2d {
    /// A layer with a weight `[outputs, inputs, height, width]`, started uniformly in ±1/√(inputs·height·width).
    pub fn new(init: &Init, inputs: usize, outputs: usize, options: Conv2dOptions) -> Conv2d {
        let [height, width] = options.kernel;
        let fan_in = (inputs * height * width).max(1);
        let start = Initializer::Uniform { bound: 1.0 / (fan_in as f32).sqrt() };
        Conv2d {
            weight: init.param("weight", [outputs, inputs, height, width], start),
            bias: options.bias.then(|| init.param("bias", [outputs], start)),
            options,
        }
    }

    /// The weight's handle.
    pub fn weight(&self) -> &Param {
        &self.weight
    }

    /// The bias's handle.
    pub fn bias(&self) -> Option<&Param> {
        self.bias.as_ref()
    }

    /// `[batch, outputs, height', width']`.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let bias = self.bias.as_ref().map(Operand::from);
        ops::conv2d(x, &self.weight, bias, self.options.stride, self.options.padding)
    }
}
