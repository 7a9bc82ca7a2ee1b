//! What the layers of a run's model take, for a division into stages that evens it out.

use ferrospeed_data::{Sequences, Split};
use ferrospeed_engine::{Setup, measure_layers};
use ferrospeed_models::{Decoder, Tokens};
use ferrospeed_pipeline::partition::Measured;
use ferrospeed_tensor::Tensor;

use crate::error::Result;
use crate::recipe::Recipe;

/// Measures the layers of a model on its first sequences. All ranks call it together.
pub(crate) fn measured(
    setup: &Setup,
    model: &Decoder,
    sequences: &Sequences,
    recipe: &Recipe,
) -> Result<Vec<Measured>> {
    // Handles have one store in their life, and the run's is another one.
    let scratch = Decoder::new(model.config().clone());
    let tokens = recipe.data.sequence as usize;
    let size = setup.config.batch.train_micro_batch_size_per_gpu.get();
    let mut ids = vec![0; tokens * size as usize];
    for (index, row) in ids.chunks_exact_mut(tokens).enumerate() {
        sequences.read(Split::Train, index as u64 % sequences.count(Split::Train).max(1), row)?;
    }
    let ids = Tensor::from_slice(&ids, [size as usize, tokens], &setup.device)?;
    Ok(measure_layers(setup, &scratch, &(Tokens::new(ids.clone()), ids))?)
}
