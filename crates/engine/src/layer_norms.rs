//! The norm of each layer's gradient, in steps that somebody watches.
//!
//! Off, a step does nothing for it. In a step that is watched, every rank reads its gradients once more, and ranks exchange two
//! numbers per layer. A model in stages is refused: its ranks hold different layers.

use crate::engine::Engine;
use crate::error::{EngineError, Result};

/// Which steps are watched, and what the last of them found.
#[derive(Debug, Default)]
pub(crate) struct LayerNorms {
    every: u64,
    found: Vec<(String, f64)>,
}

impl Engine {
    /// Takes the norm of each layer's gradient in every `every`-th step; 0 ends it. All ranks say the same.
    pub fn watch_gradients(&mut self, every: u64) -> Result<()> {
        if every > 0 && self.pipeline.is_some() {
            return Err(EngineError::Order {
                call: "watch_gradients",
                why: "ranks of a model in stages hold different layers; watch one that is not",
            });
        }
        self.layer_norms = LayerNorms { every, found: Vec::new() };
        Ok(())
    }

    /// The norm of each layer's averaged gradient in the last step, before clipping, in the order of the model; empty where
    /// that step was not watched or was skipped.
    pub fn layer_norms(&self) -> &[(String, f64)] {
        &self.layer_norms.found
    }

    /// Before an update, while gradients are whole.
    pub(crate) fn measure_layer_norms(&mut self) -> Result<()> {
        let LayerNorms { every, found } = &mut self.layer_norms;
        found.clear();
        if *every == 0 || !(self.global_steps + 1).is_multiple_of(*every) {
            return Ok(());
        }
        *found = self.store.layer_norms()?;
        let scale = self.loss_scale();
        self.layer_norms.found.iter_mut().for_each(|(_, norm)| *norm /= scale);
        Ok(())
    }
}
