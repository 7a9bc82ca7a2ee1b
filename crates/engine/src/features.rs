//! What changes as training goes on besides the weights: layers and tokens that are dropped, sequences that grow; and what tokens
//! see of each other.
//!
//! The engine says how much, a model or a data loader does it: models ask [`ferrospeed_nn::layer_drop`] and
//! [`ferrospeed_nn::token_drop`] for each block, and whoever makes micro-batches asks the engine for the length of sequences. Who
//! makes a model asks for the layouts of its attention.

use ferrospeed_config::{CUTS_SEQUENCES, Config, CurriculumMetric};
use ferrospeed_nn::layer_drop::LayerDrop;
use ferrospeed_nn::sparse_attention::SparseAttention;
use ferrospeed_nn::token_drop::TokenDrop;
use ferrospeed_optim::OptimError;
use ferrospeed_optim::curriculum::{Curriculum, CurriculumScheduler};
use ferrospeed_optim::progressive_layer_drop::ProgressiveLayerDrop;
use ferrospeed_optim::random_ltd::TokenSchedule;
use serde_json::Value;

use crate::engine::Engine;
use crate::error::{EngineError, Result};
use crate::setup::Setup;

/// Progressive layer drop, random layer-token drop, the sequence-length curriculum and sparse attention of a run.
#[derive(Default)]
pub(crate) struct Features {
    layer_drop: Option<ProgressiveLayerDrop>,
    token_drop: Option<TokenSchedule>,
    sparse_attention: Option<SparseAttention>,
    curriculum: Option<CurriculumScheduler>,
    /// Whether the difficulty is the length of sequences.
    by_length: bool,
}

impl Features {
    pub(crate) fn from_config(config: &Config) -> Result<Features> {
        let enabled = |name: &str| config.section(name).filter(|section| section["enabled"] == true);
        let number = |section: &Value, key: &str, default: f64| section[key].as_f64().unwrap_or(default);
        let layer_drop = enabled("progressive_layer_drop").map(|section| {
            ProgressiveLayerDrop::new(number(section, "theta", 0.5), number(section, "gamma", 0.001))
        });
        let section = enabled("curriculum_learning");
        let cut = config.data_sampling.as_ref().and_then(|sampling| sampling.cut.as_ref());
        let cut = cut.map(|section| schedule_of(CUTS_SEQUENCES, section)).transpose()?;
        let by_length =
            cut.is_some() || section.is_some_and(|section| section["curriculum_type"] == "seqlen");
        let curriculum = match cut {
            Some(cut) => Some(cut),
            None => section.map(|section| Curriculum::from_section(section, None)).transpose()?,
        };
        metric_curricula(config)?;
        Ok(Features {
            layer_drop: layer_drop.transpose()?,
            token_drop: random_ltd(config)?,
            sparse_attention: sparse_attention(config)?,
            curriculum: curriculum.map(CurriculumScheduler::new),
            by_length,
        })
    }

    /// The same for an engine, which says so where nothing follows a curriculum.
    pub(crate) fn of_engine(setup: &Setup) -> Result<Features> {
        let config = &setup.config;
        let features = Features::from_config(config)?;
        if features.sparse_attention.is_some() && !setup.device.backend().attends_over_blocks() {
            let why = "attention over blocks runs on the CPU, and this rank computes on a GPU; train on the CPU, or remove the section";
            return Err(EngineError::Unsupported { key: "sparse_attention", why: why.to_owned() });
        }
        if let Some(section) = config.section("curriculum_learning")
            && features.curriculum.is_some()
            && !features.by_length
        {
            tracing::warn!(
                "curriculum_learning.curriculum_type {}: only \"seqlen\" changes what a model is fed with; ask Engine::curriculum_difficulty for the difficulty of any other",
                section["curriculum_type"]
            );
        }
        Ok(features)
    }
}

/// How layers drop tokens, where the configuration asks for it. As in DeepSpeed the inner switch decides, whatever the outer ones
/// say.
pub fn random_ltd(config: &Config) -> Result<Option<TokenSchedule>> {
    let section = config.section("data_efficiency").map(|section| &section["data_routing"]["random_ltd"]);
    let enabled = section.filter(|section| section["enabled"] == true);
    Ok(enabled.map(TokenSchedule::from_section).transpose()?)
}

/// The metrics by which samples are drawn, each with how its difficulty grows; none without such a curriculum.
pub fn metric_curricula(config: &Config) -> Result<Vec<(&CurriculumMetric, Curriculum)>> {
    let metrics = config.data_sampling.iter().flat_map(|sampling| &sampling.metrics);
    metrics.map(|metric| Ok((metric, schedule_of(&metric.name, &metric.schedule)?))).collect()
}

/// The schedule of one of `curriculum_metrics`.
fn schedule_of(name: &str, section: &Value) -> Result<Curriculum> {
    Curriculum::from_section(section, None).map_err(|error| {
        let why = match error {
            OptimError::Section { why, .. } => why,
            other => other.to_string(),
        };
        let key = "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics";
        EngineError::Unsupported { key, why: format!("{name}: {why}") }
    })
}

/// The kind of layout that attention of a run has, where the configuration asks for one.
pub fn sparse_attention(config: &Config) -> Result<Option<SparseAttention>> {
    let section = config.section("sparse_attention");
    Ok(section.map(SparseAttention::from_section).transpose()?)
}

impl Engine {
    /// With `sparse_attention`: the kind of layout that a model's attention has, its random blocks drawn from the run's seed. A model
    /// has to take it.
    pub fn sparse_attention(&self) -> Option<SparseAttention> {
        Some(self.features.sparse_attention.clone()?.with_seed(self.seed))
    }

    /// With `progressive_layer_drop`: the probability to keep a layer in the next forward pass. It follows the steps that
    /// are done, so that the first two steps keep every layer.
    pub fn pld_theta(&self) -> Option<f64> {
        let done = self.global_steps.saturating_sub(1);
        self.features.layer_drop.as_ref().map(|drop| drop.keep_probability(done))
    }

    /// Which blocks the next forward pass leaves out: the same on all ranks.
    pub(crate) fn layer_drop(&self) -> Option<LayerDrop> {
        self.pld_theta().map(|theta| LayerDrop { theta, seed: self.seed, pass: self.micro_steps })
    }

    /// With `random_ltd`: the tokens of a sequence that its layers see in the next forward pass.
    pub fn random_ltd_tokens(&self) -> Option<u64> {
        self.features.token_drop.as_ref().map(|schedule| schedule.tokens(self.global_steps))
    }

    /// Which tokens the next forward pass drops: the same on ranks that see the same samples.
    pub(crate) fn token_drop(&self) -> Option<TokenDrop> {
        let schedule = self.features.token_drop.as_ref()?;
        Some(TokenDrop {
            layers: schedule.layers().into(),
            kept: usize::try_from(schedule.tokens(self.global_steps)).unwrap_or(usize::MAX),
            seed: self.random_state().seed,
            pass: self.micro_steps,
        })
    }

    /// With `curriculum_learning` of the type `seqlen`, or the metric `seqlen_truncate`: the tokens to cut sequences of `whole` to in the next step. At
    /// least two, since one predicts nothing.
    pub fn curriculum_length(&mut self, whole: u64) -> u64 {
        match self.curriculum_difficulty() {
            Some(difficulty) if self.features.by_length => difficulty.max(2).min(whole),
            _ => whole,
        }
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
