//! Layers.
//!
//! A layer is a handful of parameter handles and a `forward`. Building one takes an [`Init`], which names its
//! parameters by path and keeps the list; no value exists until a store gives it one. Where a
//! parameter's bytes are is its store's business; layers that are cut over ranks are those of [`tensor_parallel`].
//!
//! ```
//! use ferrospeed_nn::{Init, Linear};
//! use ferrospeed_tensor::store::{FromInitializers, PlainStore};
//! use ferrospeed_tensor::{DType, Tensor};
//!
//! # fn main() -> ferrospeed_tensor::Result<()> {
//! let init = Init::root();
//! let layer = Linear::new(&init.at("proj"), 4, 2, true);
//! assert_eq!(init.parameters().names(), ["proj.weight", "proj.bias"]);
//!
//! let device = ferrospeed_cpu::device();
//! let _store = PlainStore::attach(init.parameters().as_slice(), DType::F32, &device, &FromInitializers { seed: 1 })?;
//! let y = layer.forward(&Tensor::zeros([3, 4], DType::F32, &device)?)?;
//! assert_eq!(y.sizes(), [3, 2]);
//! # Ok(())
//! # }
//! ```

pub mod activation_bits;
pub mod adapter;
mod attention;
mod conv;
mod delta_net;
mod embedding;
mod init;
pub mod layer_drop;
mod linear;
mod mlp;
pub mod moe;
mod norm;
mod rotary;
mod sequence;
mod sequential;
pub mod sparse_attention;
mod stages;
pub mod tensor_parallel;
mod tiled;
pub mod token_drop;
mod transformer_layer;

pub use attention::{
    AttentionConfig, AttentionState, HeadProjections, KeyValueCache, LatentHeads, LatentProjections,
    LatentQuery, MultiHeadAttention, OutputGate, Scores, Turning, Visibility,
};
pub use conv::{Conv2d, Conv2dOptions};
pub use delta_net::{DeltaNetConfig, DeltaNetInputs, GatedDeltaNet};
pub use embedding::Embedding;
pub use init::{Holder, Init, LayerState, Parameters};
pub use linear::Linear;
pub use mlp::{GatedMlp, Mlp, PackedGatedMlp};
pub use moe::{Expert, Experts, Mixed, Moe, MoeConfig};
pub use norm::{LayerNorm, Norm, NormConfig, RmsNorm};
pub use rotary::{QueryGrowth, Rotary, RotaryScaling, RotaryTable};
pub use sequence::{SequenceMethod, SequenceParallel, SequencePart};
pub use sequential::{Dropout, Module, Sequential};
pub use stages::{Carried, Layer, Stages, Trained};
pub use tiled::{TiledLinear, TiledSource, Tiling};
pub use transformer_layer::{DropoutMasks, KeyVisibility, TransformerLayer, TransformerLayerConfig};

/// Whether a forward pass trains (dropout on) or evaluates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Dropout on.
    Train,
    /// Dropout off.
    Evaluate,
}

impl Mode {
    /// Dropout with probability `p` when training.
    pub fn dropout(
        self,
        x: &ferrospeed_tensor::Tensor,
        p: f32,
    ) -> ferrospeed_tensor::Result<ferrospeed_tensor::Tensor> {
        match self {
            Mode::Train if p > 0.0 => ferrospeed_tensor::ops::dropout(x, p),
            _ => Ok(x.clone()),
        }
    }
}

#[cfg(test)]
extern crate self as ferrospeed_nn;
#[cfg(test)]
#[path = "../tests/it/main.rs"]
mod it;
