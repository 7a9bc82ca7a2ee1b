//! What a run is expected to need and to reach: the plan of its memory, and how fast each limit of the machine lets it go.
//!
//! Both are for whoever watches, to hold against what is measured. A model whose shape is not known has neither, nor has one in
//! stages.

use std::collections::BTreeMap;

use ferrospeed_engine::machine::Peak;
use ferrospeed_tensor::Category;
use ferrospeed_tune::cost::{Limit, Rates, StepWork, step_work};
use ferrospeed_tune::model::Model;
use ferrospeed_tune::plan::{Operands, Plan, Processor, Purpose, Request, Tier, plan};
use serde_json::{Value, json};

use crate::adapter::frozen_and_adapters;
use crate::recipe::Recipe;
use crate::shape::shape_of;

/// What a recipe needs of each rank, and what each does in a step.
#[derive(Debug, Clone)]
pub struct Expected {
    /// Bytes.
    pub plan: Plan,
    /// Operations, and bytes that move.
    pub work: StepWork,
}

impl Expected {
    /// Of a recipe that trains a model with this `config.json`. `operands` says what products of the host copy first.
    pub fn of(recipe: &Recipe, model: &Value, processor: Processor, operands: Operands) -> Option<Expected> {
        let (config, _) = recipe.config().ok()?;
        let mesh = recipe.mesh();
        if mesh.pipe.get() > 1 {
            return None;
        }
        let (frozen, adapters) = frozen_and_adapters(recipe, model);
        let shape = shape_of(model).ok()?.with_adapters(frozen, adapters);
        let shape = shape.in_slices(mesh.tensor.get() as u64);
        let shape = shape.with_experts_over(mesh.expert.get() as u64)?;
        let sequence_ranks = mesh.sequence.get() as u64;
        let request = Request {
            model: &Model::Transformer(shape),
            config: &config,
            data_parallel_size: recipe.data_ranks().get().saturating_mul(sequence_ranks),
            sequence_ranks,
            sequence_length: recipe.row_tokens(),
            checkpoint_activations: recipe.model.activation_checkpointing,
            mlp_chunk: recipe.model.mlp_chunk,
            keeps_attention_matrix: false,
            processor,
            operands,
        };
        Some(Expected { plan: plan(&request), work: step_work(&request) })
    }

    /// Bytes of a rank's device by the categories of the allocator, and of all together.
    pub(crate) fn memory_bytes(&self) -> BTreeMap<&'static str, u64> {
        let mut bytes: BTreeMap<&str, u64> = BTreeMap::new();
        for row in self.plan.rows.iter().filter(|row| row.tier == Tier::Device) {
            let category = match row.purpose {
                Purpose::Parameters => Category::Parameters,
                Purpose::Gradients => Category::Gradients,
                Purpose::OptimizerStates => Category::Optimizer,
                Purpose::Activations => Category::Activations,
                Purpose::CommunicationBuffers => Category::Buffers,
            };
            let entry = bytes.entry(category.name()).or_default();
            *entry = entry.saturating_add(row.bytes);
        }
        bytes.insert("total", self.plan.total(Tier::Device));
        bytes
    }

    /// Tokens per second of all ranks that each limit alone would allow, where a step has so many, and each rank these peaks.
    pub(crate) fn tokens_per_s(&self, tokens: f64, rank: Peak, wire: Option<f64>) -> Value {
        let rates = Rates {
            flops_per_s: rank.flops_per_s,
            memory_bytes_per_s: rank.bytes_per_s,
            // A rank alone sends nothing, and what it keeps elsewhere has no limit that was measured.
            wire_bytes_per_s: wire.unwrap_or(f64::INFINITY),
            link_bytes_per_s: None,
            ranks_per_host: 1,
            host_bytes_per_s: f64::INFINITY,
            disk_bytes_per_s: f64::INFINITY,
            half_speed_tokens: 0.0,
        };
        let time = self.work.time(&rates);
        let limits = time
            .limits()
            .into_iter()
            .filter(|(limit, seconds)| *limit != Limit::Offload && seconds.is_finite() && *seconds > 0.0);
        limits.map(|(limit, seconds)| (limit.to_string(), json!(tokens / seconds))).collect()
    }
}
