//! How large a model may be asked for. A slip of the finger in a `config.json` is refused before anything of its size is
//! allocated, and no product of sizes overflows.

use crate::error::{ModelError, Result};

/// Channels, heads, tokens and positions.
pub(crate) const MAX_SIZE: usize = 1 << 24;
/// Blocks, and experts in each: each of them has tensors and names of its own.
pub(crate) const MAX_LAYERS: usize = 1 << 14;
/// The keys that [`MAX_LAYERS`] bounds.
pub(crate) const PER_LAYER_KEYS: [&str; 7] = [
    "n_layer",
    "n_layers",
    "num_layers",
    "num_hidden_layers",
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
];
/// Blocks of feed-forward in all, experts counted one by one.
const MAX_EXPERTS: u128 = 1 << 18;
/// Weights in all: a thousand times the largest model there is.
const MAX_WEIGHTS: u128 = 1 << 50;

/// What the number of weights follows from.
pub(crate) struct Sizes {
    pub(crate) layers: usize,
    pub(crate) experts: usize,
    pub(crate) width: usize,
    pub(crate) inner_width: usize,
    /// Of queries, keys and values together.
    pub(crate) qkv_width: usize,
    /// Rows of tables: tokens and learned positions.
    pub(crate) rows: usize,
}

impl Sizes {
    /// Refuses what no machine can hold.
    pub(crate) fn check(&self) -> Result<()> {
        let wide = |size: usize| size as u128;
        let experts = wide(self.layers) * wide(self.experts.max(1));
        if experts > MAX_EXPERTS {
            let why = format!(
                "{} in each of {} layers are too many: at most {MAX_EXPERTS} in all",
                self.experts, self.layers
            );
            return Err(ModelError::config("num_local_experts", why));
        }
        let attention = wide(self.layers) * wide(self.width) * (wide(self.qkv_width) + wide(self.width));
        let feed_forward = experts * 2 * wide(self.width) * wide(self.inner_width);
        let weights = attention + feed_forward + wide(self.rows) * wide(self.width);
        if weights > MAX_WEIGHTS {
            let why = format!(
                "{} layers of {} channels have about {weights} weights: at most {MAX_WEIGHTS} can be asked for",
                self.layers, self.width
            );
            return Err(ModelError::config("the sizes together", why));
        }
        Ok(())
    }
}
