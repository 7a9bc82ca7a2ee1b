//! A pass over the tokens of many sequences at once, whose keys and values lie in blocks of one cache.
//!
//! The rows of a pass are tokens of any sequences, each at any place: a piece of a prompt beside the next token of a text.
//! Inside [`rows_alone`] what comes out of a row depends on its sequence alone.

use std::sync::Arc;

use ferrospeed_nn::tensor_parallel;
use ferrospeed_nn::{AttentionState, KeyValueCache, Mode, Visibility};
use ferrospeed_tensor::ops::WeightLayout;
use ferrospeed_tensor::packed::BLOCK;
use ferrospeed_tensor::{Device, PackedBits, Packing, PagedRows, Pages, Param, Tensor, autograd, rows_alone};

use super::block::Block;
use super::config::Positions;
use super::{Decoder, Places};
use crate::error::{ModelError, Result};

impl Decoder {
    /// An empty cache of `blocks` blocks of `block_tokens` tokens.
    pub fn new_pages(&self, blocks: usize, block_tokens: usize, device: &Device) -> Result<AttentionState> {
        let layer = |block: &Block| match (block.linear(), block.attention_config()) {
            (Some(_), _) => Some(KeyValueCache::of_texts(device)),
            (None, config) => Some(KeyValueCache::paged(blocks, block_tokens, config?, self.dtype(), device)),
        };
        Ok(AttentionState { layers: self.blocks.iter().filter_map(layer).collect::<Result<_, _>>()? })
    }

    /// How a parameter is held in so many bits, if it may: the weight of a linear layer. Tables that are looked up and routers,
    /// which choose among experts by small differences, stay whole.
    pub fn packing(&self, param: &Param, bits: PackedBits) -> Option<Packing> {
        let is_router = [".gate.weight", ".router.weight"].iter().any(|name| param.name().ends_with(name));
        // Heads lie as `[outputs, inputs]` in every family.
        let layout = if param.name() == self.head.name() { WeightLayout::OutIn } else { self.config.layout };
        let inputs = match (param.shape().sizes(), layout) {
            (&[_, inputs], WeightLayout::OutIn) | (&[inputs, _], WeightLayout::InOut) => inputs,
            _ => return None,
        };
        let can = !param.is_table() && !is_router && inputs.is_multiple_of(BLOCK);
        can.then_some(Packing { bits, layout })
    }

    /// Bytes of the cache that a token takes on this rank.
    pub fn page_bytes_per_token(&self) -> usize {
        let of_block = |block: &Block| block.attention_config().map_or(0, |own| own.kv_heads * own.head_dim);
        2 * self.blocks.iter().map(of_block).sum::<usize>() * self.dtype().size_bytes()
    }

    /// Bytes that layers in linear time keep of a text beside the cache, however long it is; nothing where all layers attend.
    pub fn page_bytes_per_text(&self) -> usize {
        let linear = self.blocks.iter().filter_map(Block::linear);
        linear.map(|linear| linear.text_bytes(self.dtype())).sum()
    }

    /// How many of this rank's heads read the same keys.
    fn heads_per_key(&self) -> usize {
        let config = self.blocks.iter().find_map(Block::attention_config);
        config.map_or(1, |config| config.heads / config.kv_heads)
    }

    /// How many tokens a sequence of [`Decoder::run_pages`] may have.
    pub fn longest_paged(&self) -> usize {
        self.config.longest_paged()
    }

    /// The hidden states `[rows, width]` of the tokens `ids`, one for each of `rows`, ready for the head.
    pub fn run_pages(
        &self,
        ids: &[i64],
        rows: &Arc<PagedRows>,
        state: &mut AttentionState,
    ) -> Result<Tensor> {
        let (places, longest) = self.check_pages(ids, rows)?;
        let device = self.device_of(state)?;
        let pages = Pages::new(Arc::clone(rows), self.heads_per_key(), &device)?;
        let mut visibility = Visibility { pages: Some(pages), ..Default::default() };
        let mut table_rows = None;
        match &self.config.positions {
            Positions::Learned { offset, .. } => {
                let places: Vec<i64> = places.iter().map(|place| (place + offset) as i64).collect();
                table_rows = Some(Tensor::from_slice(&places, [1, places.len()], &device)?);
            }
            Positions::Rotary(rotary) => self.turn(&mut visibility, rotary, &[places], longest, &device)?,
            Positions::Alibi => visibility.alibi_slopes = Some(self.slopes(&device)?),
        }
        let places = Places { rows: table_rows, visibility };
        let count = ids.len();
        let ids = Tensor::from_slice(ids, [1, count], &device)?;
        let pass = || self.run_at(&ids, &places, Some(state), Mode::Evaluate, None);
        let (hidden, _) = autograd::no_grad(|| rows_alone(|| tensor_parallel::with_all_tokens(pass)))?;
        Ok(hidden.view([count, self.config.embedding_width])?)
    }

    /// Logits `[rows, vocab]` of hidden states `[rows, width]`; each row's depend on itself alone. Ranks that have slices of the
    /// head all get them, as f32 on the host.
    pub fn page_logits(&self, hidden: &Tensor) -> Result<Tensor> {
        autograd::no_grad(|| {
            rows_alone(|| match &self.slices {
                Some(slices) => {
                    let own = self.own_logits(hidden)?;
                    Ok(tensor_parallel::joined_entries(&own, self.config.vocab, slices)?)
                }
                None => self.logits(hidden),
            })
        })
    }

    /// Refuses what [`Decoder::run_pages`] would. Gives the place of every row, and how long the longest text is.
    pub fn check_pages(&self, ids: &[i64], rows: &PagedRows) -> Result<(Vec<usize>, usize)> {
        let places = rows.places();
        let longest = places.iter().max().map_or(0, |place| place + 1);
        self.check_rows(ids, &places, longest)?;
        Ok((places, longest))
    }

    /// Refuses passes without rows, tokens that the model does not know, and texts that are too long.
    pub(super) fn check_rows(&self, ids: &[i64], places: &[usize], longest: usize) -> Result<()> {
        if places.len() != ids.len() || ids.is_empty() {
            let why = format!("{} tokens are not those of {} rows", ids.len(), places.len());
            return Err(ModelError::config("input", why));
        }
        if let Some(id) = ids.iter().find(|&&id| !(0..self.config.vocab as i64).contains(&id)) {
            let why = format!("token {id} is none of the model's {}", self.config.vocab);
            return Err(ModelError::config("input", why));
        }
        if longest > self.longest_paged() {
            let why = format!("a text of {longest} tokens is longer than {}", self.longest_paged());
            return Err(ModelError::config("max positions", why));
        }
        Ok(())
    }

    pub(super) fn device_of(&self, state: &AttentionState) -> Result<Device> {
        match state.layers.as_slice() {
            layers if layers.len() == self.config.layers => Ok(layers[0].device().clone()),
            layers => {
                let why = format!("{} layers of cache, the model has {}", layers.len(), self.config.layers);
                Err(ModelError::config("cache", why))
            }
        }
    }
}
