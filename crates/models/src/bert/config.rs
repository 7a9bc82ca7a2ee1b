//! BERT in numbers, and what stands on top of it.

use ferrospeed_tensor::Activation;

use crate::error::{ModelError, Result};
use crate::fields::Fields;
use crate::limits::Sizes;

/// The heads of a BERT, by the architecture that its `config.json` names.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum BertTop {
    /// `BertModel`, also where none is named: hidden states, and the first token's through the pooler.
    Nothing,
    /// `BertForPreTraining`: masked tokens, and whether the second sentence follows the first.
    PreTraining,
    /// `BertForMaskedLM`: masked tokens.
    MaskedTokens,
    /// `BertForSequenceClassification`: one of several labels for the whole text.
    Classifier {
        /// How many.
        labels: usize,
        /// Dropout before it.
        dropout: f32,
    },
}

impl BertTop {
    fn from_fields(fields: &Fields<'_>, hidden_dropout: f32) -> Result<BertTop> {
        let dropout = fields.dropout("classifier_dropout", hidden_dropout.into())?;
        let names = fields.optional_strings("architectures")?.unwrap_or_default();
        let top = match names.first().map_or("BertModel", String::as_str) {
            "BertModel" => BertTop::Nothing,
            "BertForPreTraining" => BertTop::PreTraining,
            "BertForMaskedLM" => BertTop::MaskedTokens,
            "BertForSequenceClassification" => {
                fields.fixed("problem_type", "single_label_classification".into())?;
                BertTop::Classifier { labels: labels(fields)?, dropout }
            }
            other => {
                let why = format!(
                    "'{other}' is not supported; BertModel, BertForPreTraining, BertForMaskedLM and \
                     BertForSequenceClassification are"
                );
                return Err(fields.error("architectures", why));
            }
        };
        if top.has_token_head() {
            fields.fixed("tie_word_embeddings", true.into())?;
        } else {
            fields.harmless(&["tie_word_embeddings"]);
        }
        Ok(top)
    }

    /// Whether it says which token stands at each place.
    pub fn has_token_head(self) -> bool {
        matches!(self, BertTop::PreTraining | BertTop::MaskedTokens)
    }

    /// Whether the first token goes through the pooler.
    pub fn has_pooler(self) -> bool {
        self != BertTop::MaskedTokens
    }
}

/// As many as are named in `id2label`; two where nothing is said.
fn labels(fields: &Fields<'_>) -> Result<usize> {
    let named = fields.object("id2label")?.map(|names| names.keys().count());
    let labels = match named {
        Some(labels) => labels,
        None => fields.size("num_labels", Some(2))?,
    };
    if labels < 2 {
        let why = format!("{labels} is no choice: one label means a regression, which is not supported");
        return Err(fields.error("id2label", why));
    }
    Ok(labels)
}

/// BERT in numbers.
#[derive(Debug, Clone, PartialEq)]
pub struct BertConfig {
    /// Tokens.
    pub vocab: usize,
    /// The token whose row no lookup trains.
    pub padding: Option<usize>,
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
    /// What stands on top.
    pub top: BertTop,
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
        fields.harmless(&["directionality", "pooler_fc_size", "pooler_num_attention_heads"]);
        fields.harmless(&["pooler_num_fc_layers", "pooler_size_per_head", "pooler_type"]);
        let (width, heads) =
            (fields.size("hidden_size", Some(768))?, fields.size("num_attention_heads", Some(12))?);
        if heads == 0 || width == 0 || !width.is_multiple_of(heads) {
            let why = format!("{width} channels cannot be cut into {heads} heads");
            return Err(ModelError::config("num_attention_heads", why));
        }
        let hidden_dropout = fields.dropout("hidden_dropout_prob", 0.1)?;
        let top = BertTop::from_fields(fields, hidden_dropout)?;
        let vocab = fields.size("vocab_size", Some(30522))?;
        let config = BertConfig {
            top,
            vocab,
            padding: fields.padding_row(vocab, Some(0))?,
            width,
            layers: fields.size("num_hidden_layers", Some(12))?,
            heads,
            inner_width: fields.size("intermediate_size", Some(3072))?,
            max_tokens: fields.size("max_position_embeddings", Some(512))?,
            token_types: fields.size("type_vocab_size", Some(2))?,
            activation: fields.activation("hidden_act", "gelu")?,
            eps: fields.epsilon("layer_norm_eps", 1e-12)?,
            hidden_dropout,
            attention_dropout: fields.dropout("attention_probs_dropout_prob", 0.1)?,
            init_std: fields.number("initializer_range", Some(0.02))? as f32,
        };
        Sizes {
            layers: config.layers,
            experts: 1,
            width,
            inner_width: config.inner_width,
            qkv_width: 3 * width,
            rows: config.vocab + config.max_tokens + config.token_types,
        }
        .check()?;
        Ok(config)
    }
}
