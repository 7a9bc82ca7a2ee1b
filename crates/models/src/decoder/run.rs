//! From tokens to the last hidden state: embedding, blocks, final norm.
//!
//! Here stands what a pass may do to a block from outside: recompute it in backward, leave it out (progressive layer
//! dropping) or give it some of the tokens alone (random layer-token dropping).

use std::ops::Range;

use ferrospeed_nn::layer_drop::layer_drop;
use ferrospeed_nn::token_drop::token_drop;
use ferrospeed_nn::{AttentionState, KeyValueCache, Mode, Visibility};
use ferrospeed_tensor::{Tensor, autograd, ops};

use super::Decoder;
use super::block::{Block, RouterLogits, Stream, checkpointed};
use super::config::{FeedForward, Residual};
use super::noise::with_noise;
use super::places::Places;
use crate::error::{ModelError, Result};

impl Decoder {
    /// The embedding and all that stands before the first block.
    pub(super) fn embed(&self, ids: &Tensor, places: &Places, mode: Mode) -> Result<Tensor> {
        let mut embedded = match &places.visibility.sequence {
            Some(part) => self.embedding.forward(&part.take(ids)?)?,
            None => self.embedding.forward(ids)?,
        };
        if let (Some(alpha), Mode::Train) = (self.embedding_noise, mode) {
            embedded = with_noise(&embedded, alpha)?;
        }
        let factor = self.config.factors.embedding.of(embedded.dtype());
        if factor != 1.0 {
            embedded = ops::affine(&embedded, factor, 0.0)?;
        }
        if let Some([inwards, _]) = &self.projections {
            embedded = inwards.forward(&embedded)?;
        }
        if let (Some(table), Some(rows)) = (&self.learned_positions, &places.rows) {
            let rows = self.slices.as_ref().map_or(Ok(rows.clone()), |slices| slices.own_tokens(rows))?;
            embedded = ops::add(&embedded, &table.forward(&rows)?)?;
        }
        if let Some(norm) = &self.embedding_norm {
            embedded = norm.forward(&embedded)?;
        }
        Ok(places.visibility.dropout(mode, &embedded, self.config.embedding_dropout)?)
    }

    /// Some blocks.
    pub(super) fn run_blocks(
        &self,
        range: Range<usize>,
        mut stream: Stream,
        places: &Places,
        state: Option<&mut AttentionState>,
        mode: Mode,
        mut observe: Option<&mut dyn FnMut(usize, &Tensor)>,
        routers: &mut RouterLogits,
    ) -> Result<Stream> {
        let visibility = &places.visibility;
        let mut caches = state.map(|state| state.layers.iter_mut());
        let dropping = layer_drop().filter(|_| mode == Mode::Train);
        let dropping_tokens = token_drop().filter(|_| mode == Mode::Train && caches.is_none());
        if dropping_tokens.is_some() {
            self.check_token_drop(visibility)?;
        }
        for (index, block) in self.blocks.iter().enumerate().take(range.end).skip(range.start) {
            let cache = caches.as_mut().and_then(Iterator::next);
            if dropping.is_some_and(|drop| !drop.keeps(index, self.blocks.len())) {
                continue;
            }
            // Only where a block adds to the stream is there a part of its own to rescale.
            let rescaling = dropping.filter(|drop| {
                let adds =
                    matches!(block.residual, Residual::PreNorm | Residual::BranchNorm | Residual::Sandwich);
                adds && drop.keep_probability(index, self.blocks.len()) < 1.0
            });
            let before = rescaling.map(|_| stream.value()).transpose()?;
            if let Some(before) = &before {
                stream = Stream { stream: before.clone(), pending: None };
            }
            let chosen = match &dropping_tokens {
                Some(drop) => drop.of_layer(index, stream.sizes(), stream.stream.device())?,
                None => None,
            };
            stream = match chosen {
                Some(chosen) => {
                    let whole = stream.value()?;
                    let part = Stream { stream: chosen.take(&whole)?, pending: None };
                    let seen = chosen.visibility(visibility)?;
                    let part = self.run_block(block, part, &seen, None, mode, routers)?.value()?;
                    Stream { stream: chosen.put_back(&whole, &part)?, pending: None }
                }
                None => self.run_block(block, stream, visibility, cache, mode, routers)?,
            };
            if let (Some(drop), Some(before)) = (rescaling, &before) {
                let value = drop.rescaled(before, &stream.value()?, index, self.blocks.len())?;
                stream = Stream { stream: value, pending: None };
            }
            // The sum is made for the observer alone: the next block fuses it with its norm.
            if let Some(observe) = &mut observe {
                observe(index + 1, &autograd::no_grad(|| stream.value())?);
            }
        }
        Ok(stream)
    }

    /// One block, whose activations are kept or made again.
    fn run_block(
        &self,
        block: &Block,
        stream: Stream,
        visibility: &Visibility,
        cache: Option<&mut KeyValueCache>,
        mode: Mode,
        routers: &mut RouterLogits,
    ) -> Result<Stream> {
        let tokens = stream.stream.shape().rows();
        match &self.checkpointing {
            Some(shelf) if cache.is_none() && autograd::is_recording() => {
                let chunk = self.mlp_chunks.of_checkpointed(tokens);
                match &self.checkpoint_times {
                    Some(times) => {
                        let timed = times.around(&**shelf, stream.stream.device())?;
                        checkpointed(&timed, block, stream, visibility, chunk, mode, routers)
                    }
                    None => checkpointed(&**shelf, block, stream, visibility, chunk, mode, routers),
                }
            }
            _ => block.forward(stream, visibility, cache, self.mlp_chunks.of(tokens), mode, routers),
        }
    }

    /// Refuses to drop tokens where layers need all of them.
    fn check_token_drop(&self, visibility: &Visibility) -> Result<()> {
        let why = if visibility.sequence.is_some() || self.slices.is_some() {
            "a layer that ranks share needs all tokens; leave out tensor and sequence parallelism"
        } else if self.attends_sparsely() {
            "a layout of blocks is of all tokens of a sequence; leave out sparse_attention"
        } else if visibility.documents.is_some() {
            "documents that share a sequence fill it; leave out data.documents"
        } else if matches!(self.config.feed_forward, FeedForward::Mixture(_)) {
            "the balance of experts is measured over all tokens; a mixture drops none"
        } else {
            return Ok(());
        };
        Err(ModelError::config("random_ltd", why))
    }

    /// All that stands between the last block and the head.
    pub(super) fn finish(&self, stream: Stream) -> Result<Tensor> {
        let mut hidden = match &self.final_norm {
            Some(norm) => stream.normed(norm)?.1,
            None => stream.value()?,
        };
        if let Some([_, outwards]) = &self.projections {
            hidden = outwards.forward(&hidden)?;
        }
        if self.config.factors.logits != 1.0 {
            hidden = ops::affine(&hidden, self.config.factors.logits, 0.0)?;
        }
        Ok(hidden)
    }
}
