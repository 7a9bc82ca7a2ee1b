//! The decoder that all causal families are.
//!
//! Embedding, blocks of attention and feed-forward around a residual stream, a final norm, a head. What differs
//! between families is data: [`DecoderConfig`] and the tensor names in [`Names`].

mod block;
mod checkpoint_times;
mod config;
mod head_loss;
mod judged;
mod labels;
mod mlp_chunks;
mod noise;
mod page_steps;
mod pages;
mod places;
mod run;
mod sequence;
mod sparse;
mod stages;

use std::sync::Arc;

use ferrospeed_nn::activation_bits::input_of;
use ferrospeed_nn::adapter::{Adapters, Found};
use ferrospeed_nn::moe::{ExpertRanks, Routing};
use ferrospeed_nn::tensor_parallel::{self, Cut, Slices};
use ferrospeed_nn::{
    AttentionState, Embedding, Init, KeyValueCache, Linear, Mode, Norm, Parameters, SequenceParallel,
    SequencePart,
};
use ferrospeed_tensor::autograd::{InPlace, Shelf};
use ferrospeed_tensor::ops::{self, CrossEntropyOptions, WeightLayout};
use ferrospeed_tensor::{DType, Device, Initializer, Operand, Param, Tensor, profile};

use crate::error::{ModelError, Result};
use block::{Block, Stream};
use labels::next_labels;
use places::longest;

pub use block::RouterLogits;
pub use checkpoint_times::{CheckpointTime, CheckpointTimes};
pub use config::{
    Declared, DecoderConfig, EmbeddingFactor, Factors, FeedForward, HeadRules, LatentRanks, LinearLayers,
    Names, Positions, QkvNames, Residual, ScoreRules, dtype_of_name, name_of_dtype,
};
pub use judged::Verdict;
pub use mlp_chunks::MlpChunks;
pub use page_steps::{NextTokens, PageSteps};
pub use places::alibi_slopes;
pub(crate) use places::{Places, StepTables};
pub use stages::Labelled;

/// Tokens to run a decoder on.
#[derive(Debug, Clone)]
pub struct Tokens {
    /// `[batch, tokens]` of `I64`.
    pub ids: Tensor,
    /// Per sequence, 1 where a token is real; covers cached tokens too. `None`: all are real.
    pub mask: Option<Vec<Vec<u8>>>,
    /// Per sequence, the positions; `None`: as the family counts them.
    pub positions: Option<Vec<Vec<usize>>>,
    /// Per sequence, the cumulative lengths of the documents that share it: `0`, then where each ends, the last with the
    /// sequence. A token sees its own document alone, positions start anew with each, and the first token of a document is
    /// predicted by nobody. `None`: each sequence is one text.
    pub documents: Option<Vec<Vec<usize>>>,
    /// By what their mean loss is multiplied: where the loss of a step is the mean over the labels of all its micro-batches, this
    /// one's share of them, of which 1 is the even one.
    pub weight: Option<f32>,
}

impl Tokens {
    /// Tokens that are all real.
    pub fn new(ids: Tensor) -> Tokens {
        Tokens { ids, mask: None, positions: None, documents: None, weight: None }
    }
}

/// The ranks that hold parts of a decoder.
#[derive(Debug, Clone, Default)]
pub struct Spread {
    /// Those that hold slices of its layers.
    pub slices: Option<Slices>,
    /// Those that hold different experts. Where these have the same tokens, they may be those of the slices.
    pub experts: Option<ExpertRanks>,
}

/// A causal language model.
#[derive(Debug)]
pub struct Decoder {
    config: DecoderConfig,
    parameters: Parameters,
    embedding: Embedding,
    embedding_norm: Option<Norm>,
    learned_positions: Option<Embedding>,
    projections: Option<[Linear; 2]>,
    /// What was asked of adapters, and which layers that meant.
    adapters: Option<(Adapters, Found)>,
    blocks: Vec<Block>,
    final_norm: Option<Norm>,
    head: Param,
    head_bias: Option<Param>,
    /// The ranks that hold slices of its layers.
    slices: Option<Slices>,
    /// Where the inputs of blocks wait that are computed again in backward; `None` keeps what blocks compute.
    checkpointing: Option<Arc<dyn Shelf>>,
    /// Where it is noted how long those blocks take.
    checkpoint_times: Option<Arc<CheckpointTimes>>,
    /// The ranks that share sequences with this one.
    sequence: Option<SequenceParallel>,
    /// How many tokens feed-forward layers take at a time.
    mlp_chunks: MlpChunks,
    /// How losses are taken that are trained on.
    training_loss: CrossEntropyOptions,
    /// How loud the noise is on embeddings in training.
    embedding_noise: Option<f32>,
}

impl Decoder {
    /// Builds the model's handles. Attach `parameters()` to a store before running it.
    pub fn new(config: DecoderConfig) -> Decoder {
        Decoder::build(config, &Spread::default(), &Init::root())
    }

    /// The same in slices over the ranks of a group, which compute each loss together; or why it cannot be cut so. No rank
    /// holds whole logits in training; [`Decoder::page_logits`] brings all ranks those of a few rows.
    pub fn in_slices(config: DecoderConfig, slices: impl Into<Slices>) -> Result<Decoder> {
        Decoder::spread(config, &Spread { slices: Some(slices.into()), experts: None })
    }

    /// The same with slices or experts on several ranks. Where experts are, all ranks run every forward together, on the
    /// tokens that [`ExpertRanks`] says.
    pub fn spread(config: DecoderConfig, spread: &Spread) -> Result<Decoder> {
        Decoder::check_spread(&config, spread)?;
        Ok(Decoder::build(config, spread, &Init::root()))
    }

    /// The same with adapters: nothing else of the model is trained but what they name. [`Decoder::adapters`] tells which
    /// layers they meant; whoever wrote their names may want to hear which of them meant none ([`Found::problems`]).
    pub fn adapted(config: DecoderConfig, spread: &Spread, adapters: &Adapters) -> Result<Decoder> {
        Decoder::check_spread(&config, spread)?;
        let init = Init::root().adapted_by(adapters)?;
        let decoder = Decoder::build(config, spread, &init);
        let names = &decoder.config.names;
        let is_trained_whole = |path: &str| adapters.saves(path);
        if decoder.config.tied && (is_trained_whole(names.embedding) || is_trained_whole(names.head)) {
            let why = format!(
                "modules_to_save names '{}' or '{}', which are one weight in this model; PEFT would take them apart, and here they stay \
                 one: leave them out, or train a model whose config.json says \"tie_word_embeddings\": false",
                names.embedding, names.head
            );
            return Err(ModelError::config("adapters", why));
        }
        Ok(Decoder { adapters: init.adapters_found().map(|found| (adapters.clone(), found)), ..decoder })
    }

    /// What was asked of adapters, and which layers that meant; `None` where it has none.
    pub fn adapters(&self) -> Option<&(Adapters, Found)> {
        self.adapters.as_ref()
    }

    fn check_spread(config: &DecoderConfig, spread: &Spread) -> Result<()> {
        if let Some(slices) = &spread.slices {
            config.check_slices(slices.group().size(), slices.between())?;
        }
        config.check_experts(spread.experts.as_ref().map_or(1, |ranks| ranks.group.size()))
    }

    fn build(config: DecoderConfig, spread: &Spread, init: &Init) -> Decoder {
        let slices = spread.slices.as_ref();
        let experts = spread.experts.as_ref().filter(|ranks| ranks.group.size() > 1);
        let init = init.over(slices);
        let names = &config.names;
        let embedding = Embedding::new(
            &init.at(names.embedding).cut(Cut::Entries),
            config.vocab,
            config.embedding_width,
            config.init_std,
        )
        .with_padding(config.padding);
        let embedding_norm =
            names.embedding_norm.map(|name| Norm::new(&init.at(name), config.width, config.norm));
        let learned_positions = match (&config.positions, names.positions) {
            (&Positions::Learned { offset, .. }, Some(name)) => Some(Embedding::new(
                &init.at(name),
                config.max_tokens + offset,
                config.width,
                config.init_std,
            )),
            _ => None,
        };
        let projections = names.projections.map(|[inwards, outwards]| {
            let plain = |name, inputs, outputs| {
                Linear::normal(&init.at(name), inputs, outputs, false, WeightLayout::OutIn, config.init_std)
            };
            let outwards = plain(outwards, config.width, config.embedding_width);
            [plain(inwards, config.embedding_width, config.width), outwards]
        });
        let blocks = || {
            let block =
                |layer| Block::new(&init.at(format!("{}.{layer}", names.blocks)), &config, layer, experts);
            (0..config.layers).map(block).collect()
        };
        let final_norm = || names.final_norm.map(|name| Norm::new(&init.at(name), config.width, config.norm));
        let (blocks, final_norm) = match names.declared {
            Declared::NormsBehind => {
                let final_norm = final_norm();
                (blocks(), final_norm)
            }
            _ => (blocks(), final_norm()),
        };
        let head_bias = || {
            let at = init.at(names.head);
            config.head.bias.then(|| at.param("bias", [config.vocab], Initializer::Constant(0.0)))
        };
        let head = if config.tied {
            init.at(names.head).tie("weight", embedding.table());
            embedding.table().clone()
        } else {
            let why = "is the output head, which has no adapters here; name it in modules_to_save to train it whole";
            Linear::normal(
                &init
                    .at(names.head)
                    .without_adapters(why)
                    .cut(Cut::Outputs { sections: 1, units: config.vocab }),
                config.embedding_width,
                config.vocab,
                false,
                WeightLayout::OutIn,
                config.init_std,
            )
            .weight()
            .clone()
        };
        let head_bias = head_bias();
        Decoder {
            parameters: init.parameters(),
            config,
            embedding,
            embedding_norm,
            learned_positions,
            projections,
            adapters: None,
            blocks,
            final_norm,
            head,
            head_bias,
            slices: slices.filter(|slices| slices.group().size() > 1).cloned(),
            checkpointing: None,
            checkpoint_times: None,
            sequence: None,
            mlp_chunks: MlpChunks::default(),
            training_loss: CrossEntropyOptions::default(),
            embedding_noise: None,
        }
    }

    /// Its numbers.
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// Its parameters.
    pub fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    /// `[vocab, width]`: makes logits of hidden states; `None` where logits are more than its product.
    pub(crate) fn plain_head(&self) -> Option<&Param> {
        self.config.head.are_plain().then_some(&self.head)
    }

    /// The type of its activations.
    pub(crate) fn dtype(&self) -> DType {
        self.head.dtype()
    }

    /// Recompute blocks in backward: less memory, a third more arithmetic, the same bits but where [`MlpChunks::Automatic`]
    /// cuts long inputs.
    pub fn set_activation_checkpointing(&mut self, on: bool) {
        self.checkpointing = if on { Some(Arc::new(InPlace)) } else { None };
    }

    /// The same with the blocks' inputs on a shelf until then.
    pub fn checkpoint_activations_on(&mut self, shelf: Arc<dyn Shelf>) {
        self.checkpointing = Some(shelf);
    }

    /// How many tokens feed-forward layers take at a time; mixtures of experts take all.
    pub fn set_mlp_chunks(&mut self, chunks: MlpChunks) {
        self.mlp_chunks = chunks;
    }

    /// How losses are taken in training, with label smoothing or a z-loss; in evaluation they are what they are.
    pub fn set_training_loss(&mut self, options: CrossEntropyOptions) {
        self.training_loss = options;
    }

    /// Adds noise to embeddings in training (NEFTune); 5 is usual.
    pub fn set_embedding_noise(&mut self, alpha: Option<f32>) {
        self.embedding_noise = alpha;
    }

    /// Times blocks that are recomputed, forward and backward; the device is waited for at each.
    pub fn time_checkpoints(&mut self) -> Arc<CheckpointTimes> {
        Arc::clone(self.checkpoint_times.get_or_insert_default())
    }

    /// Empty caches for decoding up to `capacity` tokens.
    pub fn new_state(&self, batch: usize, capacity: usize, device: &Device) -> Result<AttentionState> {
        let dtype = self.dtype();
        let layer = |(layer, block): (usize, &Block)| match block.linear() {
            Some(linear) => linear.new_state(batch, dtype, device),
            None => KeyValueCache::new(batch, capacity, &self.config.attention(layer), dtype, device),
        };
        Ok(AttentionState { layers: self.blocks.iter().enumerate().map(layer).collect::<Result<_, _>>()? })
    }

    /// The last hidden state `[batch, tokens, width]`, ready for the head.
    pub fn hidden(&self, tokens: &Tokens, state: Option<&mut AttentionState>, mode: Mode) -> Result<Tensor> {
        Ok(self.run(tokens, state, mode, None)?.0)
    }

    /// The same; also tells an observer of the embedding (0) and of the result of each block (from 1), and returns router logits.
    pub fn run(
        &self,
        tokens: &Tokens,
        state: Option<&mut AttentionState>,
        mode: Mode,
        observe: Option<&mut dyn FnMut(usize, &Tensor)>,
    ) -> Result<(Tensor, RouterLogits)> {
        let places = self.places(tokens, state.as_deref())?;
        let run = || self.run_at(&tokens.ids, &places, state, mode, observe);
        profile::scope_at("", "Decoder", || match &self.slices {
            Some(slices) => slices.between_cuts(run),
            None => run(),
        })
    }

    /// Where tokens stand that follow those of a cache. Where there is none, ranks may share the sequences.
    fn places(&self, tokens: &Tokens, state: Option<&AttentionState>) -> Result<Places> {
        let past = state.map_or(0, AttentionState::len);
        let &[batch, count] = tokens.ids.sizes() else {
            return Err(ModelError::config(
                "input",
                format!("ids of shape {} are not [batch, tokens]", tokens.ids.shape()),
            ));
        };
        let device = tokens.ids.device();
        let documents = self.documents(tokens, state.is_some())?;
        // Only within a document do positions go on.
        self.check_length(documents.as_ref().map_or(past + count, longest))?;
        if self.config.linear.is_some() && (documents.is_some() || self.sequence.is_some()) {
            let why = "layers in linear time go through whole sequences of one text; leave out documents that share one, and ranks that do";
            return Err(ModelError::config("documents", why));
        }
        let part = match (&self.sequence, state) {
            (Some(sequence), None) => Some(sequence.divide(count)?),
            _ => None,
        };
        let mut positions = self.positions(tokens, documents.as_ref(), [batch, count], past)?;
        if let Some(part) = &part {
            positions = positions.iter().map(|row| part.take_row(row)).collect::<Result<_, _>>()?;
        }
        let keys = past + count;
        let length = documents.as_ref().map_or(keys, longest);
        let mut visibility = self.visibility(tokens, &positions, [batch, keys], length, device)?;
        let rows = match &self.learned_positions {
            Some(_) => {
                let rows: Vec<i64> = positions.iter().flatten().map(|&row| row as i64).collect();
                let own = part.as_ref().map_or(count, SequencePart::count);
                Some(Tensor::from_slice(&rows, [positions.len(), own], device)?)
            }
            None => None,
        };
        (visibility.sequence, visibility.documents) = (part, documents);
        Ok(Places { rows, visibility })
    }

    /// The same where all that it needs to know of places is on the device already.
    pub(crate) fn run_at(
        &self,
        ids: &Tensor,
        places: &Places,
        state: Option<&mut AttentionState>,
        mode: Mode,
        mut observe: Option<&mut dyn FnMut(usize, &Tensor)>,
    ) -> Result<(Tensor, RouterLogits)> {
        let embedded = self.embed(ids, places, mode)?;
        if let Some(observe) = &mut observe {
            observe(0, &embedded);
        }
        let mut routers = RouterLogits::new();
        let stream = Stream { stream: embedded, pending: None };
        let stream =
            self.run_blocks(0..self.blocks.len(), stream, places, state, mode, observe, &mut routers)?;
        Ok((self.finish(stream)?, routers))
    }

    /// Who the routers sent where in the last forward, by block; nothing of blocks without a mixture. Reading its numbers waits
    /// for the device: for logs and monitors.
    pub fn routing(&self) -> Vec<(usize, Routing)> {
        let of_block = |(index, block): (usize, &Block)| Some((index, block.routing()?));
        self.blocks.iter().enumerate().filter_map(of_block).collect()
    }

    /// Logits `[batch, tokens, vocab]` from a hidden state.
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        if self.slices.is_some() {
            let why = "no rank holds all logits of a model in slices; generate from its exported weights";
            return Err(ModelError::config("tensor parallelism", why));
        }
        self.own_logits(&input_of(&self.head, hidden)?)
    }

    /// Logits of the entries of the head that this rank holds.
    fn own_logits(&self, hidden: &Tensor) -> Result<Tensor> {
        let bias = self.head_bias.as_ref().map(Operand::from);
        let logits = self.as_head(|| ops::linear(hidden, &self.head, bias, WeightLayout::OutIn))?;
        match self.config.head.cap {
            Some(cap) => {
                let bounded = ops::tanh(&ops::affine(&logits, 1.0 / cap, 0.0)?)?;
                Ok(ops::affine(&bounded, cap, 0.0)?)
            }
            None => Ok(logits),
        }
    }

    /// The mean loss of predicting each next label; labels of -100 do not count. Of sequences that ranks share, all of them
    /// get the whole loss, and each the gradients of its part: summed over the ranks, they are the whole's.
    pub fn loss(&self, tokens: &Tokens, labels: &Tensor, mode: Mode) -> Result<Tensor> {
        let (hidden, routers) = self.run(tokens, None, mode, None)?;
        self.whole_loss(&hidden, &routers, tokens, labels, mode)
    }

    /// The loss of the next tokens and, in a mixture, of the balance of its experts.
    fn whole_loss(
        &self,
        hidden: &Tensor,
        routers: &RouterLogits,
        tokens: &Tokens,
        labels: &Tensor,
        mode: Mode,
    ) -> Result<Tensor> {
        let options = match mode {
            Mode::Train => self.training_loss,
            Mode::Evaluate => CrossEntropyOptions::default(),
        };
        let loss = self.document_loss(hidden, labels, tokens.documents.as_deref(), options)?;
        // An even share leaves all bits as they are.
        let loss = match tokens.weight.filter(|&weight| weight != 1.0) {
            Some(weight) => ops::affine(&loss, weight, 0.0)?,
            None => loss,
        };
        self.with_balance(loss, routers, tokens, labels)
    }

    /// A loss, and in a mixture that of the balance of its experts.
    fn with_balance(
        &self,
        loss: Tensor,
        routers: &RouterLogits,
        tokens: &Tokens,
        labels: &Tensor,
    ) -> Result<Tensor> {
        match &self.config.feed_forward {
            FeedForward::Mixture(mixture) if mixture.balance_loss > 0.0 => {
                let balance = match self.shared(labels)? {
                    Some(part) => {
                        mixture.balance(&sequence::joined_routers(&part, routers, tokens)?, None)?
                    }
                    None => mixture.balance(routers, tokens.mask.as_deref())?,
                };
                Ok(ops::add(&loss, &ops::affine(&balance, mixture.balance_loss, 0.0)?)?)
            }
            _ => Ok(loss),
        }
    }

    /// The loss from a hidden state. The last token predicts nothing, so its row does not count. Labels are those of whole
    /// sequences, whichever part of them the hidden state has.
    pub fn next_token_loss(&self, hidden: &Tensor, labels: &Tensor) -> Result<Tensor> {
        self.document_loss(hidden, labels, None, CrossEntropyOptions::default())
    }

    /// The same where documents share sequences: the last token of each predicts nothing.
    fn document_loss(
        &self,
        hidden: &Tensor,
        labels: &Tensor,
        documents: Option<&[Vec<usize>]>,
        options: CrossEntropyOptions,
    ) -> Result<Tensor> {
        let ignored = options.ignore_index;
        let targets = next_labels(labels, ignored, documents)?;
        let part = self.shared(labels)?;
        let own = part.as_ref().map(|part| part.take(&targets)).transpose()?;
        let own = own.as_ref().unwrap_or(&targets);
        let hidden = &input_of(&self.head, hidden)?;
        let loss = self.as_head(|| -> Result<Tensor> {
            if let Some(slices) = &self.slices {
                let own = own.view([own.numel()])?;
                return Ok(tensor_parallel::linear_cross_entropy(hidden, &self.head, &own, ignored, slices)?);
            }
            let flat = ops::reshape(hidden, [hidden.shape().rows(), hidden.shape().last()])?;
            self.head_loss(&flat, own, options)
        })?;
        match &part {
            Some(part) => sequence::whole_mean(part, &loss, own, &targets, ignored),
            None => Ok(loss),
        }
    }

    /// Runs `work` as the head's own, whose weight may be that of the embedding.
    fn as_head<R>(&self, work: impl FnOnce() -> R) -> R {
        let (inputs, outputs) = (self.config.embedding_width, self.config.vocab);
        let sizes = || format!("in_features={inputs}, out_features={outputs}, bias=False");
        profile::scope_of_tied(self.config.names.head, "Linear", sizes, work)
    }
}
