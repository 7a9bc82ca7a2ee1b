//! The decoder as a list of layers: the embedding, the blocks, and the final norm with the head and the loss.
//!
//! Between them passes the residual stream, summed up, and behind it what routers said so far.

use std::ops::Range;

use ferrospeed_nn::tensor_parallel::Between;
use ferrospeed_nn::{Carried, Layer, Mode, Stages};
use ferrospeed_tensor::{Param, Tensor, TensorError};

use super::block::Stream;
use super::{Decoder, Tokens};
use crate::error::{Result, into_tensor_error};

/// A micro-batch of a decoder: tokens, and what they should predict.
pub type Labelled = (Tokens, Tensor);

impl Decoder {
    /// Some layers; `head` makes the result of the last of what the blocks give.
    fn run_range(
        &self,
        range: Range<usize>,
        tokens: &Tokens,
        carried: Carried,
        mode: Mode,
        head: impl FnOnce(&Tensor, &Carried) -> Result<Tensor>,
    ) -> Result<Carried> {
        let run = || self.run_range_here(range, tokens, carried, mode, head);
        match &self.slices {
            Some(slices) => slices.between_cuts(run),
            None => run(),
        }
    }

    fn run_range_here(
        &self,
        range: Range<usize>,
        tokens: &Tokens,
        mut carried: Carried,
        mode: Mode,
        head: impl FnOnce(&Tensor, &Carried) -> Result<Tensor>,
    ) -> Result<Carried> {
        let places = self.places(tokens, None)?;
        let last = self.blocks.len() + 1;
        let (stream, mut routers) = if range.start == 0 {
            (self.embed(&tokens.ids, &places, mode)?, Carried::new())
        } else if carried.is_empty() {
            let why = "a stage behind the first got nothing from the one before".to_owned();
            return Err(TensorError::argument("decoder stage", why).into());
        } else {
            let routers = carried.split_off(1);
            (carried.swap_remove(0), routers)
        };
        let blocks = range.start.max(1) - 1..range.end.min(last) - 1;
        let stream = Stream { stream, pending: None };
        let stream = self.run_blocks(blocks, stream, &places, None, mode, None, &mut routers)?;
        if range.end > last {
            let hidden = self.finish(stream)?;
            return Ok(vec![head(&hidden, &routers)?]);
        }
        let mut carried = vec![stream.value()?];
        carried.append(&mut routers);
        Ok(carried)
    }
}

impl Stages for Decoder {
    type Batch = Labelled;

    fn layers(&self) -> Vec<Layer> {
        // A block's parameters are those below its path; what is before and behind belongs to one end or the other.
        let below = |path: &str, param: &Param| {
            param.name().strip_prefix(path).is_some_and(|rest| rest.starts_with('.'))
        };
        let names = &self.config.names;
        let all = self.parameters.as_slice();
        let in_block = |param: &Param| below(names.blocks, param);
        let behind = [names.final_norm, names.projections.map(|[_, outwards]| outwards)];
        let is_behind = |param: &Param| {
            behind.iter().flatten().any(|path| below(path, param))
                || (!self.config.tied && param.is_same(&self.head))
                || self.head_bias.as_ref().is_some_and(|bias| param.is_same(bias))
        };
        let layer = |class: &str, parameters: Vec<Param>| Layer { class: class.to_owned(), parameters };
        let first = all.iter().filter(|param| !in_block(param) && !is_behind(param)).cloned().collect();
        let mut layers = vec![layer("Embedding", first)];
        for index in 0..self.blocks.len() {
            let path = format!("{}.{index}", names.blocks);
            layers.push(layer("Block", all.iter().filter(|param| below(&path, param)).cloned().collect()));
        }
        let mut last: Vec<Param> = all.iter().filter(|param| is_behind(param)).cloned().collect();
        if self.config.tied {
            last.push(self.head.clone());
        }
        layers.push(layer("Head", last));
        layers
    }

    fn forward_range(
        &self,
        range: Range<usize>,
        (tokens, labels): &Labelled,
        carried: Carried,
        mode: Mode,
    ) -> Result<Carried, TensorError> {
        let loss =
            |hidden: &Tensor, routers: &Carried| self.whole_loss(hidden, routers, tokens, labels, mode);
        self.run_range(range, tokens, carried, mode, loss).map_err(into_tensor_error)
    }

    fn output_range(
        &self,
        range: Range<usize>,
        (tokens, _): &Labelled,
        carried: Carried,
        mode: Mode,
    ) -> Result<Carried, TensorError> {
        let logits = |hidden: &Tensor, _: &Carried| self.logits(hidden);
        self.run_range(range, tokens, carried, mode, logits).map_err(into_tensor_error)
    }

    fn has_targets(&self, (tokens, _): &Labelled) -> bool {
        // What has a weight counts by it.
        tokens.weight.is_some() || tokens.predicted() > 0
    }

    fn carries_alike(&self) -> bool {
        self.slices.as_ref().is_some_and(|slices| slices.between() == Between::AllTokens)
    }
}
