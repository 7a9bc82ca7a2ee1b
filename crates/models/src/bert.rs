//! BERT with its masked-token and next-sentence heads.

use ferrospeed_nn::layer_drop::layer_drop;
use ferrospeed_nn::{
    AttentionConfig, Embedding, HeadProjections, Init, LayerNorm, Linear, Mlp, Mode, MultiHeadAttention,
    Parameters, Visibility,
};
use ferrospeed_tensor::ops::{self, CrossEntropyOptions, WeightLayout};
use ferrospeed_tensor::{Activation, Initializer, Operand, Param, Tensor};

use crate::error::{ModelError, Result};
use crate::fields::Fields;

/// BERT in numbers.
#[derive(Debug, Clone, PartialEq)]
pub struct BertConfig {
    /// Tokens.
    pub vocab: usize,
    /// Channels.
    pub width: usize,
    /// Blocks.
    pub layers: usize,
    /// Heads.
    pub heads: usize,
    /// Channels inside the feed-forward.
    pub inner_width: usize,
    /// The longest sequence.
    pub max_tokens: usize,
    /// Segment kinds.
    pub token_types: usize,
    /// The feed-forward's function.
    pub activation: Activation,
    /// Added to variances.
    pub eps: f32,
    /// Dropout of hidden states.
    pub hidden_dropout: f32,
    /// Dropout of attention weights.
    pub attention_dropout: f32,
    /// Standard deviation of new weights.
    pub init_std: f32,
}

impl BertConfig {
    pub(crate) fn from_fields(fields: &Fields<'_>) -> Result<BertConfig> {
        let kind = fields.string("position_embedding_type", Some("absolute"))?;
        if kind != "absolute" {
            return Err(ModelError::config(
                "position_embedding_type",
                format!("'{kind}' is not supported; absolute is"),
            ));
        }
        fields.fixed("is_decoder", false.into())?;
        fields.fixed("tie_word_embeddings", true.into())?;
        fields.harmless(&[
            "classifier_dropout",
            "directionality",
            "pooler_fc_size",
            "pooler_num_attention_heads",
        ]);
        fields.harmless(&["pooler_num_fc_layers", "pooler_size_per_head", "pooler_type"]);
        let (width, heads) =
            (fields.size("hidden_size", Some(768))?, fields.size("num_attention_heads", Some(12))?);
        if heads == 0 || width == 0 || !width.is_multiple_of(heads) {
            let why = format!("{width} channels cannot be cut into {heads} heads");
            return Err(ModelError::config("num_attention_heads", why));
        }
        Ok(BertConfig {
            vocab: fields.size("vocab_size", Some(30522))?,
            width,
            layers: fields.size("num_hidden_layers", Some(12))?,
            heads,
            inner_width: fields.size("intermediate_size", Some(3072))?,
            max_tokens: fields.size("max_position_embeddings", Some(512))?,
            token_types: fields.size("type_vocab_size", Some(2))?,
            activation: fields.activation("hidden_act", "gelu")?,
            eps: fields.number("layer_norm_eps", Some(1e-12))? as f32,
            hidden_dropout: fields.number("hidden_dropout_prob", Some(0.1))? as f32,
            attention_dropout: fields.number("attention_probs_dropout_prob", Some(0.1))? as f32,
            init_std: fields.number("initializer_range", Some(0.02))? as f32,
        })
    }
}

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
    /// Masked-token logits `[batch, tokens, vocab]`.
    pub token_logits: Tensor,
    /// Next-sentence logits `[batch, 2]`.
    pub sentence_logits: Tensor,
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
    pooler: Linear,
    transform: Linear,
    transform_norm: LayerNorm,
    token_bias: Param,
    sentence: Linear,
}

impl Bert {
    /// Builds the model's handles.
    pub fn new(config: BertConfig) -> Bert {
        let init = Init::root();
        let std = config.init_std;
        let width = config.width;
        let linear = |init: &Init, inputs, outputs| {
            Linear::normal(init, inputs, outputs, true, WeightLayout::OutIn, std)
        };
        let norm = |init: &Init| LayerNorm::new(init, width, config.eps, true);
        let embeddings = init.at("bert.embeddings");
        let words = Embedding::new(&embeddings.at("word_embeddings"), config.vocab, width, std);
        let places = Embedding::new(&embeddings.at("position_embeddings"), config.max_tokens, width, std);
        let types = Embedding::new(&embeddings.at("token_type_embeddings"), config.token_types, width, std);
        let embedding_norm = norm(&embeddings.at("LayerNorm"));
        let layers = (0..config.layers)
            .map(|index| {
                let at = init.at(format!("bert.encoder.layer.{index}"));
                let heads = at.at("attention.self");
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
                let output = linear(&at.at("attention.output.dense"), width, width);
                Layer {
                    attention: MultiHeadAttention::new(projections, output, attention),
                    attention_norm: norm(&at.at("attention.output.LayerNorm")),
                    mlp: Mlp::new(
                        linear(&at.at("intermediate.dense"), width, config.inner_width),
                        linear(&at.at("output.dense"), config.inner_width, width),
                        config.activation,
                    ),
                    output_norm: norm(&at.at("output.LayerNorm")),
                }
            })
            .collect();
        let predictions = init.at("cls.predictions");
        let token_bias = predictions.param("bias", [config.vocab], Initializer::Constant(0.0));
        predictions.tie("decoder.weight", words.table());
        predictions.tie("decoder.bias", &token_bias);
        Bert {
            pooler: linear(&init.at("bert.pooler.dense"), width, width),
            token_bias,
            transform: linear(&predictions.at("transform.dense"), width, width),
            transform_norm: norm(&predictions.at("transform.LayerNorm")),
            sentence: linear(&init.at("cls.seq_relationship"), width, 2),
            parameters: init.parameters(),
            words,
            places,
            types,
            embedding_norm,
            layers,
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

    /// Runs a batch; `observe` is called with the embedding as 0 and each block's result.
    pub fn forward(
        &self,
        ids: &Tensor,
        token_types: Option<&Tensor>,
        mask: Option<&Tensor>,
        mode: Mode,
        observe: &mut dyn FnMut(usize, &Tensor),
    ) -> Result<BertOutput> {
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
        let mut x = mode.dropout(&self.embedding_norm.forward(&embedded)?, self.config.hidden_dropout)?;
        observe(0, &x);
        let visibility = Visibility { key_mask: mask.cloned(), ..Default::default() };
        let dropping = layer_drop().filter(|_| mode == Mode::Train);
        for (index, layer) in self.layers.iter().enumerate() {
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
        let transformed = self.transform.forward_activated(&x, self.config.activation)?;
        let transformed = self.transform_norm.forward(&transformed)?;
        let bias = Some(Operand::from(&self.token_bias));
        let token_logits = ops::linear(&transformed, self.words.table(), bias, WeightLayout::OutIn)?;
        let first = ops::narrow(&x, 1, 0, 1)?;
        let first = ops::reshape(&first, [x.sizes()[0], self.config.width])?;
        let pooled = self.pooler.forward_activated(&first, Activation::Tanh)?;
        Ok(BertOutput { sentence_logits: self.sentence.forward(&pooled)?, hidden: x, token_logits })
    }

    /// Masked-token loss plus next-sentence loss.
    pub fn loss(&self, output: &BertOutput, labels: &Tensor, next_sentence: &Tensor) -> Result<Tensor> {
        let options = CrossEntropyOptions::default();
        let tokens = ops::cross_entropy(&output.token_logits, labels, options)?;
        let sentences = ops::cross_entropy(&output.sentence_logits, next_sentence, options)?;
        Ok(ops::add(&tokens, &sentences)?)
    }
}
