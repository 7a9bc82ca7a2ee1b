//! Progressive layer dropping: which blocks a forward pass leaves out (Zhang, He, "Accelerating training of
//! transformer-based language models with progressive layer dropping", 2020, algorithm 1).
//!
//! An engine says how many ([`with_layer_drop`]), a model asks for each block ([`layer_drop`]). The choice follows from
//! the seed, the number of the pass and the block alone, so all ranks leave out the same blocks. A block that is kept
//! with probability `p` counts `1 / p` times, so that on average nothing is missing.

use std::cell::Cell;

use ferrospeed_tensor::random::{RandomKey, stream_of_name};
use ferrospeed_tensor::{Result, Tensor, ops};

/// How a pass leaves out blocks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerDrop {
    /// The share of blocks to keep towards the end of the model: the schedule's theta of this step.
    pub theta: f64,
    /// Where random numbers start; the same on all ranks.
    pub seed: u64,
    /// The number of the pass; the same on all ranks.
    pub pass: u64,
}

impl LayerDrop {
    /// The probability to keep block `layer` (from 0) of `layers`: 1 for the first, less for each that follows.
    pub fn keep_probability(&self, layer: usize, layers: usize) -> f64 {
        1.0 - layer as f64 / layers.max(1) as f64 * (1.0 - self.theta)
    }

    /// Whether this pass runs block `layer` of `layers`.
    pub fn keeps(&self, layer: usize, layers: usize) -> bool {
        let key =
            RandomKey { step: self.pass as u32, ..RandomKey::new(self.seed, stream_of_name("layer drop")) };
        f64::from(key.uniform(layer as u64)) < self.keep_probability(layer, layers)
    }

    /// What a kept block makes of `x`, with its own part counted `1 / p` times.
    pub fn rescaled(&self, x: &Tensor, y: &Tensor, layer: usize, layers: usize) -> Result<Tensor> {
        let p = self.keep_probability(layer, layers);
        if p == 1.0 {
            return Ok(y.clone());
        }
        ops::add(&ops::affine(y, (1.0 / p) as f32, 0.0)?, &ops::affine(x, (1.0 - 1.0 / p) as f32, 0.0)?)
    }
}

thread_local! {
    static DROPPING: Cell<Option<LayerDrop>> = const { Cell::new(None) };
}

/// Runs a forward pass that leaves out blocks as `drop` says; `None` runs all.
pub fn with_layer_drop<R>(drop: Option<LayerDrop>, work: impl FnOnce() -> R) -> R {
    struct Restore(Option<LayerDrop>);
    impl Drop for Restore {
        fn drop(&mut self) {
            DROPPING.set(self.0);
        }
    }
    let _restore = Restore(DROPPING.replace(drop));
    work()
}

/// How the forward pass under way on this thread leaves out blocks. A model that recomputes asks outside of what it
/// recomputes.
pub fn layer_drop() -> Option<LayerDrop> {
    DROPPING.get()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_kept_as_often_as_their_probability_says() {
        let layers = 4;
        let kept = |layer: usize| {
            let drop = |pass| LayerDrop { theta: 0.5, seed: 3, pass };
            (0..20_000).filter(|&pass| drop(pass).keeps(layer, layers)).count() as f64 / 20_000.0
        };
        for (layer, probability) in [1.0, 0.875, 0.75, 0.625].into_iter().enumerate() {
            let drop = LayerDrop { theta: 0.5, seed: 3, pass: 0 };
            assert_eq!(drop.keep_probability(layer, layers), probability);
            assert!((kept(layer) - probability).abs() < 0.015, "block {layer}: {}", kept(layer));
        }
        assert!((0..100).all(|pass| LayerDrop { theta: 1.0, seed: 3, pass }.keeps(3, layers)));
    }

    #[test]
    fn it_holds_for_the_pass_alone() {
        let drop = LayerDrop { theta: 0.5, seed: 1, pass: 2 };
        assert_eq!(with_layer_drop(Some(drop), layer_drop), Some(drop));
        assert_eq!(layer_drop(), None);
    }
}
