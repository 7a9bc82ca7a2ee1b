//! What changes as training goes on besides the weights: layers that are dropped, sequences that grow.
//!
//! The engine says how much, a model or a data loader does it: both are numbers to ask for before a forward pass.

use ferrospeed_config::Config;
use ferrospeed_optim::curriculum::{Curriculum, CurriculumScheduler};
use ferrospeed_optim::progressive_layer_drop::ProgressiveLayerDrop;
use serde_json::Value;

use crate::engine::Engine;
use crate::error::Result;

/// Progressive layer drop and the sequence-length curriculum of a run.
#[derive(Default)]
pub(crate) struct Features {
    layer_drop: Option<ProgressiveLayerDrop>,
    curriculum: Option<CurriculumScheduler>,
}

impl Features {
    pub(crate) fn from_config(config: &Config) -> Result<Features> {
        let enabled = |name: &str| config.section(name).filter(|section| section["enabled"] == true);
        let number = |section: &Value, key: &str, default: f64| section[key].as_f64().unwrap_or(default);
        let layer_drop = enabled("progressive_layer_drop").map(|section| {
            ProgressiveLayerDrop::new(number(section, "theta", 0.5), number(section, "gamma", 0.001))
        });
        let curriculum =
            enabled("curriculum_learning").map(|section| Curriculum::from_section(section, None));
        Ok(Features {
            layer_drop: layer_drop.transpose()?,
            curriculum: curriculum.transpose()?.map(CurriculumScheduler::new),
        })
    }
}

impl Engine {
    /// With `progressive_layer_drop`: the probability to keep a layer in the next forward pass. It follows the steps that
    /// are done, so that the first two steps keep every layer.
    pub fn pld_theta(&self) -> Option<f64> {
        let done = self.global_steps.saturating_sub(1);
        self.features.layer_drop.as_ref().map(|drop| drop.keep_probability(done))
    }

    /// With `curriculum_learning`: the difficulty of the next step, which for the type `seqlen` is the length to cut
    /// sequences to.
    pub fn curriculum_difficulty(&mut self) -> Option<u64> {
        let next = self.global_steps + 1;
        self.features.curriculum.as_mut().map(|curriculum| curriculum.update(next))
    }

    /// Replaces the configured curriculum, as a schedule of one's own does.
    pub fn set_curriculum(&mut self, curriculum: Curriculum) {
        self.features.curriculum = Some(CurriculumScheduler::new(curriculum));
    }
}
