//! Where a mixture's routers sent tokens, over all ranks: read once per logged step.
//!
//! All layers are read from the device together and summed over ranks in one exchange, so that looking costs no wait per
//! layer. It is the last micro-batch that is told of. A layer that another stage of a pipeline has counts as zeros here.

use ferrospeed_comm::ReduceOp;
use ferrospeed_engine::Engine;
use ferrospeed_models::Decoder;
use ferrospeed_models::decoder::FeedForward;
use ferrospeed_nn::moe::{Routing, RoutingTally};
use ferrospeed_observe::LayerRouting;

use crate::error::Result;

/// By layer; nothing of a model without mixtures. `copies` ranks see each token. All ranks call it together.
pub(crate) fn over_ranks(model: &Decoder, engine: &Engine, copies: usize) -> Result<Vec<LayerRouting>> {
    let FeedForward::Mixture(mixture) = &model.config().feed_forward else { return Ok(Vec::new()) };
    let (layers, own): (Vec<usize>, Vec<Routing>) = model.routing().into_iter().unzip();
    let width = mixture.experts + 3;
    let mut sums = vec![0.0f64; model.config().layers * width];
    for (layer, tally) in layers.into_iter().zip(RoutingTally::read(&own)?) {
        let row = tally.chosen.into_iter().chain([tally.kept, tally.entropy, tally.tokens]);
        sums[layer * width..][..width].iter_mut().zip(row).for_each(|(sum, value)| *sum = value);
    }
    engine.world().group().all_reduce(&mut sums, ReduceOp::Sum)?;
    let of_layer = |(layer, row): (usize, &[f64])| {
        let value = |index: usize| row[index] / copies as f64;
        let (chosen, [kept, entropy, tokens]) = (
            (0..mixture.experts).map(value).collect(),
            [0, 1, 2].map(|behind| value(mixture.experts + behind)),
        );
        let found = RoutingTally { chosen, kept, entropy, tokens }.statistics();
        LayerRouting {
            layer: layer as u64,
            tokens_per_expert: found.tokens_per_expert,
            dropped_share: found.dropped_share,
            entropy: found.entropy,
        }
    };
    Ok(sums.chunks(width).enumerate().map(of_layer).collect())
}

/// Tells the monitors: the three numbers of a summary, and each expert's tokens over all layers.
pub(crate) fn monitor(engine: &mut Engine, layers: &[LayerRouting]) {
    let Some(summary) = ferrospeed_observe::RoutingSummary::of(layers) else { return };
    engine.monitor("Train/Routing/entropy", summary.entropy);
    engine.monitor("Train/Routing/dropped_share", summary.dropped_share);
    engine.monitor("Train/Routing/imbalance", summary.imbalance);
    for expert in 0..layers[0].tokens_per_expert.len() {
        let tokens: u64 = layers.iter().filter_map(|layer| layer.tokens_per_expert.get(expert)).sum();
        engine.monitor(&format!("Train/Routing/tokens_of_expert_{expert}"), tokens as f64);
    }
}
