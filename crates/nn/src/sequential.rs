//! Layers one after another.
//!
//! ```
//! use ferrospeed_nn::{Dropout, Init, Linear, Mode, Sequential};
//! use ferrospeed_tensor::Activation;
//!
//! let init = Init::root();
//! let model = Sequential::new(&init)
//!     .add(|init| Linear::new(init, 8, 16, true))
//!     .add(|_| Activation::Relu)
//!     .add(|_| Dropout { probability: 0.1 })
//!     .add(|init| Linear::new(init, 16, 2, false));
//! assert_eq!(init.parameters().names(), ["0.weight", "0.bias", "3.weight"]);
//! assert_eq!(model.len(), 4);
//! ```

use std::ops::Range;

use ferrospeed_tensor::{Activation, Param, Result, Tensor, ops, profile};

use crate::init::Init;
use crate::{Conv2d, Embedding, GatedMlp, LayerNorm, Linear, Mlp, Mode, Norm, RmsNorm, TiledLinear};

/// Something that makes one tensor of another.
pub trait Module: Send + Sync {
    /// The output for `x`.
    fn forward(&self, x: &Tensor, mode: Mode) -> Result<Tensor>;

    /// What a profile calls it.
    fn class(&self) -> &'static str {
        let name = std::any::type_name::<Self>();
        name.rsplit("::").next().unwrap_or(name)
    }
}

macro_rules! modules {
    ($($layer:ty),*) => {$(
        impl Module for $layer {
            fn forward(&self, x: &Tensor, _: Mode) -> Result<Tensor> {
                <$layer>::forward(self, x)
            }
        }
    )*};
}

modules!(Linear, Embedding, LayerNorm, RmsNorm, Norm, Mlp, GatedMlp, Conv2d, TiledLinear);

impl Module for Activation {
    fn forward(&self, x: &Tensor, _: Mode) -> Result<Tensor> {
        ops::activate(x, *self)
    }

    fn class(&self) -> &'static str {
        match self {
            Activation::Relu => "ReLU",
            Activation::Tanh => "Tanh",
            Activation::Sigmoid => "Sigmoid",
            Activation::Silu => "SiLU",
            _ => "GELU",
        }
    }
}

impl Module for Sequential {
    fn forward(&self, x: &Tensor, mode: Mode) -> Result<Tensor> {
        Sequential::forward(self, x, mode)
    }
}

impl<F: Fn(&Tensor, Mode) -> Result<Tensor> + Send + Sync> Module for F {
    fn forward(&self, x: &Tensor, mode: Mode) -> Result<Tensor> {
        self(x, mode)
    }

    fn class(&self) -> &'static str {
        "Function"
    }
}

/// Zeroes elements at random while training.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dropout {
    /// How likely an element is zeroed.
    pub probability: f32,
}

impl Module for Dropout {
    fn forward(&self, x: &Tensor, mode: Mode) -> Result<Tensor> {
        mode.dropout(x, self.probability)
    }
}

/// Layers one after another, named by their index.
pub struct Sequential {
    init: Init,
    layers: Vec<Box<dyn Module>>,
    /// The parameters of each layer.
    parameters: Vec<Vec<Param>>,
}

impl std::fmt::Debug for Sequential {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Sequential of {} layers", self.layers.len())
    }
}

impl Sequential {
    /// No layer yet; those to come have their parameters below `init`.
    pub fn new(init: &Init) -> Sequential {
        Sequential { init: init.clone(), layers: Vec::new(), parameters: Vec::new() }
    }

    /// Adds the layer that `build` makes at the place of the next index.
    #[allow(clippy::should_implement_trait)]
    pub fn add<M: Module + 'static>(self, build: impl FnOnce(&Init) -> M) -> Sequential {
        self.add_with(&[], build)
    }

    /// Adds a layer that also uses parameters of others, such as a head that is the embedding: whoever divides the layers
    /// over ranks has to know.
    pub fn add_with<M: Module + 'static>(
        mut self,
        shared: &[Param],
        build: impl FnOnce(&Init) -> M,
    ) -> Sequential {
        let before = self.init.parameters().as_slice().len();
        let layer = build(&self.init.at(self.layers.len()));
        let mut parameters = shared.to_vec();
        parameters.extend_from_slice(&self.init.parameters().as_slice()[before..]);
        self.layers.push(Box::new(layer));
        self.parameters.push(parameters);
        self
    }

    /// How many layers there are.
    pub fn len(&self) -> usize {
        self.layers.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    /// The parameters that a layer uses.
    pub fn parameters_of(&self, layer: usize) -> &[Param] {
        &self.parameters[layer]
    }

    /// The layers in order.
    pub fn layers(&self) -> impl Iterator<Item = &dyn Module> {
        self.layers.iter().map(|layer| &**layer)
    }

    /// All layers in order; without any, the input.
    pub fn forward(&self, x: &Tensor, mode: Mode) -> Result<Tensor> {
        self.forward_range(0..self.layers.len(), x, mode)
    }

    /// Some layers in order.
    pub fn forward_range(&self, range: Range<usize>, x: &Tensor, mode: Mode) -> Result<Tensor> {
        profile::scope_at(self.init.path(), "Sequential", || {
            let mut layers = self.layers.iter().enumerate().take(range.end).skip(range.start);
            layers.try_fold(x.clone(), |x, (index, layer)| {
                profile::scope_below(index, layer.class(), || layer.forward(&x, mode))
            })
        })
    }
}
