//! BERT: the encoder alone, or with the heads of pre-training, of masked tokens or of a classifier.

mod config;
mod stages;

pub use config::{BertConfig, BertTop};
pub use stages::BertBatch;

use std::ops::Range;

use ferrospeed_comm::Group;
use ferrospeed_nn::layer_drop::layer_drop;
use ferrospeed_nn::sparse_attention::{Direction, SparseAttention};
use ferrospeed_nn::tensor_parallel::{self, Cut, Slices, enter};
use ferrospeed_nn::token_drop::token_drop;
use ferrospeed_nn::{
    AttentionConfig, Embedding, HeadProjections, Init, LayerNorm, Linear, Mlp, Mode, MultiHeadAttention,
    Parameters, Visibility,
};
use ferrospeed_tensor::ops::{self, CrossEntropyOptions, WeightLayout};
use ferrospeed_tensor::{Activation, Initializer, Operand, Param, Tensor};

use crate::error::{ModelError, Result};

#[derive(Debug, Clone)]
struct Layer {
    attention: MultiHeadAttention,
    attention_norm: LayerNorm,
    mlp: Mlp,
    output_norm: LayerNorm,
}

/// What BERT computes for a batch.
#[derive(Debug)]
pub struct BertOutput {
    /// The last hidden state.
    pub hidden: Tensor,
    /// The first token's through the pooler `[batch, width]`, where there is one.
    pub pooled: Option<Tensor>,
    /// Masked-token logits `[batch, tokens, vocab]`, where there is such a head; of a model in slices, those of this rank's
    /// tokens.
    pub token_logits: Option<Tensor>,
    /// Logits for the whole text `[batch, labels]`, where there is such a head: of the next sentence, or of the classifier.
    pub text_logits: Option<Tensor>,
}

/// What the head for tokens is called in messages.
const TOKENS: &str = "tokens";

/// From hidden states to tokens; the last product is with the embedding.
#[derive(Debug)]
struct TokenHead {
    bias: Param,
    transform: Linear,
    norm: LayerNorm,
}

/// The model.
#[derive(Debug)]
pub struct Bert {
    config: BertConfig,
    parameters: Parameters,
    words: Embedding,
    places: Embedding,
    types: Embedding,
    embedding_norm: LayerNorm,
    layers: Vec<Layer>,
    pooler: Option<Linear>,
    token_head: Option<TokenHead>,
    text_head: Option<Linear>,
    /// The ranks that hold slices of its layers.
    slices: Option<Slices>,
}

impl Bert {
    /// Builds the model's handles.
    pub fn new(config: BertConfig) -> Bert {
        Bert::build(config, None)
    }

    /// The same in slices over the ranks of a group, which compute each loss together; or why it cannot be cut so.
    pub fn in_slices(config: BertConfig, group: &Group) -> Result<Bert> {
        let (heads, inner, ranks) = (config.heads, config.inner_width, group.size());
        if !heads.is_multiple_of(ranks) || !inner.is_multiple_of(ranks) || config.vocab < ranks {
            let why = format!(
                "{heads} heads, {inner} channels and {} tokens cannot be shared by {ranks} ranks alike; use a tensor parallelism that divides heads and channels",
                config.vocab
            );
            return Err(ModelError::config("tensor parallelism", why));
        }
        Ok(Bert::build(config, Some(&Slices::from(group))))
    }

    fn build(config: BertConfig, slices: Option<&Slices>) -> Bert {
        let root = Init::root().over(slices);
        // Files of the encoder alone name its tensors without a prefix.
        let init = root.at(if config.top == BertTop::Nothing { "" } else { "bert" });
        let std = config.init_std;
        let width = config.width;
        let linear = |init: &Init, inputs, outputs| {
            Linear::normal(init, inputs, outputs, true, WeightLayout::OutIn, std)
        };
        let norm = |init: &Init| LayerNorm::new(init, width, config.eps, true);
        let embeddings = init.at("embeddings");
        let words =
            Embedding::new(&embeddings.at("word_embeddings").cut(Cut::Entries), config.vocab, width, std)
                .with_padding(config.padding);
        let places = Embedding::new(&embeddings.at("position_embeddings"), config.max_tokens, width, std);
        let types = Embedding::new(&embeddings.at("token_type_embeddings"), config.token_types, width, std);
        let embedding_norm = norm(&embeddings.at("LayerNorm"));
        let layers = (0..config.layers)
            .map(|index| {
                let at = init.at(format!("encoder.layer.{index}"));
                let heads = at.at("attention.self").cut(Cut::Outputs { sections: 1, units: config.heads });
                let projections = HeadProjections::Separate {
                    query: linear(&heads.at("query"), width, width),
                    key: linear(&heads.at("key"), width, width),
                    value: linear(&heads.at("value"), width, width),
                };
                let head_dim = width / config.heads;
                let attention = AttentionConfig {
                    heads: config.heads,
                    kv_heads: config.heads,
                    head_dim,
                    scale: 1.0 / (head_dim as f32).sqrt(),
                    causal: false,
                    window: None,
                    dropout: config.attention_dropout,
                };
                let cut = Cut::Inputs { units: config.heads };
                let output = linear(&at.at("attention.output.dense").cut(cut), width, width);
                let inner = config.inner_width;
                let (up, down) = (Cut::Outputs { sections: 1, units: inner }, Cut::Inputs { units: inner });
                Layer {
                    attention: MultiHeadAttention::new(projections, output, attention),
                    attention_norm: norm(&at.at("attention.output.LayerNorm")),
                    mlp: Mlp::new(
                        linear(&at.at("intermediate.dense").cut(up), width, inner),
                        linear(&at.at("output.dense").cut(down), inner, width),
                        config.activation,
                    ),
                    output_norm: norm(&at.at("output.LayerNorm")),
                }
            })
            .collect();
        let pooler = config.top.has_pooler().then(|| linear(&init.at("pooler.dense"), width, width));
        let predictions = root.at("cls.predictions");
        let token_head = config.top.has_token_head().then(|| TokenHead {
            bias: predictions.cut(Cut::Entries).param("bias", [config.vocab], Initializer::Constant(0.0)),
            transform: linear(&predictions.at("transform.dense"), width, width),
            norm: norm(&predictions.at("transform.LayerNorm")),
        });
        if let Some(head) = &token_head {
            predictions.tie("decoder.weight", words.table());
            predictions.tie("decoder.bias", &head.bias);
        }
        let text_head = match config.top {
            BertTop::PreTraining => Some(linear(&root.at("cls.seq_relationship"), width, 2)),
            BertTop::Classifier { labels, .. } => Some(linear(&root.at("classifier"), width, labels)),
            BertTop::Nothing | BertTop::MaskedTokens => None,
        };
        Bert {
            pooler,
            token_head,
            text_head,
            parameters: root.parameters(),
            words,
            places,
            types,
            embedding_norm,
            layers,
            slices: slices.filter(|slices| slices.group().size() > 1).cloned(),
            config,
        }
    }

    /// Its numbers.
    pub fn config(&self) -> &BertConfig {
        &self.config
    }

    /// Its parameters.
    pub fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    /// Lets all layers attend over the active blocks of a kind of layout, or over all tokens again. It refuses one that hides later
    /// tokens, which an encoder must see.
    pub fn set_sparse_attention(&mut self, kind: Option<&SparseAttention>) -> Result<()> {
        if kind.is_some_and(|kind| kind.direction() == Direction::Unidirectional) {
            let why = "a unidirectional layout hides later tokens, which an encoder sees; take bidirectional";
            return Err(ModelError::config("sparse_attention.attention", why));
        }
        for (index, layer) in self.layers.iter_mut().enumerate() {
            layer.attention.set_sparse_attention(kind.map(|kind| kind.clone().of_layer(index)));
        }
        Ok(())
    }

    /// Runs a batch; `observe` is called with the embedding as 0 and each block's result.
    pub fn forward(
        &self,
        ids: &Tensor,
        token_types: Option<&Tensor>,
        mask: Option<&Tensor>,
        mode: Mode,
        observe: &mut dyn FnMut(usize, &Tensor),
    ) -> Result<BertOutput> {
        let x = self.embed(ids, token_types, mode)?;
        observe(0, &x);
        let x = self.run_layers(0..self.layers.len(), x, mask, mode, observe)?;
        self.finish(x, mode)
    }

    /// The embedding and its norm.
    fn embed(&self, ids: &Tensor, token_types: Option<&Tensor>, mode: Mode) -> Result<Tensor> {
        let &[_, tokens] = ids.sizes() else {
            return Err(ModelError::config(
                "input",
                format!("ids of shape {} are not [batch, tokens]", ids.shape()),
            ));
        };
        if tokens > self.config.max_tokens {
            let why = format!(
                "a sequence of {tokens} tokens is longer than the model's {}",
                self.config.max_tokens
            );
            return Err(ModelError::config("max_position_embeddings", why));
        }
        let rows: Vec<i64> = (0..tokens as i64).collect();
        let rows = Tensor::from_slice(&rows, [tokens], ids.device())?;
        let types = match token_types {
            Some(types) => self.types.forward(types)?,
            None => {
                let first = Tensor::zeros([1], ferrospeed_tensor::DType::I64, ids.device())?;
                ops::reshape(&self.types.forward(&first)?, [1, 1, self.config.width])?
            }
        };
        let embedded = ops::add(&ops::add(&self.words.forward(ids)?, &types)?, &self.places.forward(&rows)?)?;
        Ok(mode.dropout(&self.embedding_norm.forward(&embedded)?, self.config.hidden_dropout)?)
    }

    /// Some blocks.
    fn run_layers(
        &self,
        range: Range<usize>,
        mut x: Tensor,
        mask: Option<&Tensor>,
        mode: Mode,
        observe: &mut dyn FnMut(usize, &Tensor),
    ) -> Result<Tensor> {
        let visibility = Visibility { key_mask: mask.cloned(), ..Default::default() };
        if mode == Mode::Train && token_drop().is_some() {
            return Err(ModelError::config("random_ltd", "decoders drop tokens, BERT does not; turn it off"));
        }
        let dropping = layer_drop().filter(|_| mode == Mode::Train);
        for (index, layer) in self.layers.iter().enumerate().take(range.end).skip(range.start) {
            if dropping.is_some_and(|drop| !drop.keeps(index, self.layers.len())) {
                continue;
            }
            let attended = layer.attention.forward(&x, &visibility, None, mode)?;
            let attended = mode.dropout(&attended, self.config.hidden_dropout)?;
            let (_, normed) = layer.attention_norm.forward_add(&attended, Some(&x))?;
            let fed = mode.dropout(&layer.mlp.forward(&normed)?, self.config.hidden_dropout)?;
            x = layer.output_norm.forward_add(&fed, Some(&normed))?.1;
            observe(index + 1, &x);
        }
        Ok(x)
    }

    /// The heads.
    fn finish(&self, x: Tensor, mode: Mode) -> Result<BertOutput> {
        let token_logits = match &self.token_head {
            Some(head) => {
                let transformed = head.transform.forward_activated(&x, self.config.activation)?;
                let bias = Some(Operand::from(&head.bias));
                let normed = enter(&head.norm.forward(&transformed)?, self.slices.as_ref())?;
                Some(ops::linear(&normed, self.words.table(), bias, WeightLayout::OutIn)?)
            }
            None => None,
        };
        let pooled = match &self.pooler {
            Some(pooler) => {
                let first = ops::reshape(&ops::narrow(&x, 1, 0, 1)?, [x.sizes()[0], self.config.width])?;
                Some(pooler.forward_activated(&first, Activation::Tanh)?)
            }
            None => None,
        };
        let text_logits = match (&self.text_head, &pooled) {
            (Some(head), Some(pooled)) => {
                let dropout =
                    if let BertTop::Classifier { dropout, .. } = self.config.top { dropout } else { 0.0 };
                Some(head.forward(&mode.dropout(pooled, dropout)?)?)
            }
            _ => None,
        };
        Ok(BertOutput { hidden: x, pooled, token_logits, text_logits })
    }

    /// The mean loss of each head that there are labels for, added up. Labels of -100 do not count.
    pub fn loss(
        &self,
        output: &BertOutput,
        tokens: Option<&Tensor>,
        texts: Option<&Tensor>,
    ) -> Result<Tensor> {
        let heads = [(TOKENS, &output.token_logits, tokens), ("texts", &output.text_logits, texts)];
        let mut total: Option<Tensor> = None;
        for (what, logits, labels) in heads {
            let Some(labels) = labels else { continue };
            let Some(logits) = logits else {
                let why = format!("this model has no head for {what}");
                return Err(ModelError::config("labels", why));
            };
            let options = CrossEntropyOptions::default();
            let loss = match (&self.slices, self.words.table().slice()) {
                (Some(slices), Some(slice)) if what == TOKENS => {
                    let places = [slice.ranges()[0].start, slice.whole()[0]];
                    tensor_parallel::cross_entropy(
                        logits,
                        places,
                        labels,
                        options.ignore_index,
                        slices.group(),
                    )?
                }
                _ => ops::cross_entropy(logits, labels, options)?,
            };
            total = Some(match total {
                Some(total) => ops::add(&total, &loss)?,
                None => loss,
            });
        }
        total.ok_or_else(|| ModelError::config("labels", "there are none, so there is no loss"))
    }
}
