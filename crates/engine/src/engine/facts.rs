//! What an engine says of itself.

use super::*;

impl Engine {
    /// The store with the model's state.
    pub fn store(&self) -> &Arc<ZeroStore> {
        &self.store
    }

    /// Whether this rank trains one stage of a model.
    pub fn is_pipeline(&self) -> bool {
        self.pipeline.is_some()
    }

    /// The ranks that hold slices of the same layers as this one.
    pub fn slices(&self) -> Option<&Group> {
        self.slices.as_ref()
    }

    /// Whether a forward of this rank waits for those of others: they hold parts of what it reads.
    pub fn passes_meet(&self) -> bool {
        let apart = self.slices.is_some() || self.expert_ranks > 1;
        self.world.size() > 1 && (apart || self.config.zero.stage == Stage::Parameters)
    }

    /// Where this rank computes.
    pub fn device(&self) -> &Device {
        self.store.device()
    }

    /// The ranks.
    pub fn world(&self) -> &World {
        &self.world
    }

    /// This rank's number among those that see samples of their own.
    pub fn data_rank(&self) -> usize {
        self.data_rank
    }

    /// How many ranks see samples of their own.
    pub fn data_ranks(&self) -> usize {
        self.data_parallel_size
    }

    /// Where random numbers start: after a load, where they started in the run that was saved.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// The configuration in force.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Steps taken, skipped ones included.
    pub fn global_steps(&self) -> u64 {
        self.global_steps
    }

    /// Samples seen by all ranks.
    pub fn global_samples(&self) -> u64 {
        self.global_samples
    }

    /// Micro-batches seen by this rank.
    pub fn micro_steps(&self) -> u64 {
        self.micro_steps
    }

    /// Steps that changed nothing.
    pub fn skipped_steps(&self) -> u64 {
        self.skipped_steps
    }

    /// Whether the last step changed the weights.
    pub fn was_step_applied(&self) -> bool {
        self.last_step_applied
    }

    /// The norm of the last applied step's averaged gradient, before clipping.
    pub fn global_grad_norm(&self) -> Option<f64> {
        self.last_grad_norm
    }

    /// Where the time of the last whole step went.
    pub fn last_step_times(&self) -> StepTimes {
        self.last_times
    }

    /// Samples per step over all ranks.
    pub fn train_batch_size(&self) -> u64 {
        self.train_micro_batch_size_per_gpu() * self.accumulation_steps * self.data_parallel_size as u64
    }

    /// Samples per micro-batch and rank.
    pub fn train_micro_batch_size_per_gpu(&self) -> u64 {
        self.config.batch.train_micro_batch_size_per_gpu.get()
    }

    /// Micro-batches per step.
    pub fn gradient_accumulation_steps(&self) -> u64 {
        self.accumulation_steps
    }

    /// The learning rate of each group.
    pub fn get_lr(&self) -> Vec<f64> {
        self.store.group_options().iter().map(|options| options.lr).collect()
    }

    /// The decay rates of each group.
    pub fn get_mom(&self) -> Vec<[f64; 2]> {
        self.store.group_options().iter().map(|options| options.betas).collect()
    }

    /// What the loss is multiplied by before backward; 1 outside fp16.
    pub fn loss_scale(&self) -> f64 {
        self.loss_scale_override.unwrap_or_else(|| self.scaler.scale())
    }

    /// Sets the learning rate of each group, as a schedule of one's own does.
    pub fn set_lr(&mut self, rates: &[f64]) {
        for (group, (options, &lr)) in self.store.group_options().into_iter().zip(rates).enumerate() {
            self.store.set_group_options(group, GroupOptions { lr, ..options });
        }
    }
}
