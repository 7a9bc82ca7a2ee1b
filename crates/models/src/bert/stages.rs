//! BERT as a list of layers: the embedding, the blocks, and the heads with their losses.

use std::ops::Range;

use ferrospeed_nn::{Carried, Layer, Mode, Stages};
use ferrospeed_tensor::{Param, Tensor, TensorError};

use super::{Bert, BertOutput};
use crate::error::{ModelError, Result, into_tensor_error};

/// A micro-batch of BERT: what it reads, and what it should say of it.
#[derive(Debug, Clone)]
pub struct BertBatch {
    /// Tokens `[batch, tokens]`.
    pub ids: Tensor,
    /// Which segment each belongs to; the first, where nothing is said.
    pub token_types: Option<Tensor>,
    /// Which tokens may be seen; all, where nothing is said.
    pub mask: Option<Tensor>,
    /// The token at each place, -100 where it does not count.
    pub token_labels: Option<Tensor>,
    /// The label of each text.
    pub text_labels: Option<Tensor>,
}

impl Bert {
    /// Some layers; `head` makes the result of what the heads of the last say.
    fn run_range(
        &self,
        range: Range<usize>,
        batch: &BertBatch,
        carried: Carried,
        mode: Mode,
        head: impl FnOnce(BertOutput) -> Result<Carried>,
    ) -> Result<Carried> {
        let x = match carried.into_iter().next() {
            None if range.start == 0 => self.embed(&batch.ids, batch.token_types.as_ref(), mode)?,
            None => {
                let why = "a stage behind the first got nothing from the one before";
                return Err(ModelError::config("stages", why));
            }
            Some(x) => x,
        };
        let last = self.layers.len() + 1;
        let blocks = range.start.max(1) - 1..range.end.min(last).max(1) - 1;
        let x = self.run_layers(blocks, x, batch.mask.as_ref(), mode, &mut |_, _| {})?;
        if range.end > last { head(self.finish(x, mode)?) } else { Ok(vec![x]) }
    }
}

impl Stages for Bert {
    type Batch = BertBatch;

    fn layers(&self) -> Vec<Layer> {
        let all = self.parameters.as_slice();
        let of = |class: &str, belongs: &dyn Fn(&Param) -> bool| Layer {
            class: class.to_owned(),
            parameters: all.iter().filter(|param| belongs(param)).cloned().collect(),
        };
        // The encoder alone names its tensors without a prefix.
        let below = |path: &str, param: &Param| {
            let name = param.name();
            name.strip_prefix("bert.").unwrap_or(name).starts_with(path)
        };
        let mut layers = vec![of("Embedding", &|param| below("embeddings.", param))];
        for index in 0..self.layers.len() {
            layers.push(of("Block", &|param| below(&format!("encoder.layer.{index}."), param)));
        }
        let is_tied = |param: &Param| self.token_head.is_some() && param.is_same(self.words.table());
        layers.push(of("Head", &|param| {
            is_tied(param) || !(below("embeddings.", param) || below("encoder.", param))
        }));
        layers
    }

    fn forward_range(
        &self,
        range: Range<usize>,
        batch: &BertBatch,
        carried: Carried,
        mode: Mode,
    ) -> Result<Carried, TensorError> {
        let loss = |output: BertOutput| {
            let loss = self.loss(&output, batch.token_labels.as_ref(), batch.text_labels.as_ref())?;
            Ok(vec![loss])
        };
        self.run_range(range, batch, carried, mode, loss).map_err(into_tensor_error)
    }

    /// The logits of each head, that for tokens first; without a head, the hidden states.
    fn output_range(
        &self,
        range: Range<usize>,
        batch: &BertBatch,
        carried: Carried,
        mode: Mode,
    ) -> Result<Carried, TensorError> {
        let said = |output: BertOutput| {
            let heads: Carried = output.token_logits.into_iter().chain(output.text_logits).collect();
            Ok(if heads.is_empty() { vec![output.hidden] } else { heads })
        };
        self.run_range(range, batch, carried, mode, said).map_err(into_tensor_error)
    }

    fn carries_alike(&self) -> bool {
        true
    }
}
