//! One block of a decoder: attention and feed-forward around the residual stream.

use ferrospeed_nn::adapter::in_mode;
use ferrospeed_nn::moe::{ExpertRanks, Routing};
use ferrospeed_nn::sparse_attention::LayerLayouts;
use ferrospeed_nn::tensor_parallel::Cut;
use ferrospeed_nn::{
    AttentionConfig, GatedDeltaNet, GatedMlp, HeadProjections, Init, KeyValueCache, LatentProjections,
    LatentQuery, Linear, Mlp, Mode, MultiHeadAttention, Norm, NormConfig, OutputGate, PackedGatedMlp,
    RmsNorm, Scores, Visibility,
};
use ferrospeed_tensor::autograd::{self, Shelf};
use ferrospeed_tensor::ops::{PackedHeads, WeightLayout};
use ferrospeed_tensor::{Device, Initializer, Tensor, TensorError, ops, profile};

use super::config::{Declared, DecoderConfig, FeedForward, LatentRanks, QkvNames, Residual};
use crate::error::{Result, into_tensor_error};
use crate::families::mixture::{Mixture, MixtureConfig};

#[derive(Debug, Clone)]
enum FeedForwardLayer {
    Plain(Mlp),
    Gated(GatedMlp),
    GatedPacked(PackedGatedMlp),
    Mixture(Mixture),
}

/// What lets tokens meet.
#[derive(Debug, Clone)]
enum Mixer {
    Attention(MultiHeadAttention),
    Linear(GatedDeltaNet),
}

/// One block. Cloning copies handles.
#[derive(Debug, Clone)]
pub(super) struct Block {
    path: String,
    norm1: Norm,
    mixer: Mixer,
    norm2: Norm,
    /// Behind attention and feed-forward, of [`Residual::Sandwich`].
    branch_norms: Option<[Norm; 2]>,
    feed_forward: FeedForwardLayer,
    pub(super) residual: Residual,
    /// Multiplies what attention and feed-forward say.
    factor: f32,
    residual_dropout: f32,
}

/// The residual stream between blocks: its value is `stream + pending`, summed by whoever needs it next, so that
/// the sum and the following norm are one pass.
#[derive(Debug, Clone)]
pub(super) struct Stream {
    pub(super) stream: Tensor,
    pub(super) pending: Option<Tensor>,
}

impl Stream {
    pub(super) fn value(&self) -> Result<Tensor> {
        match &self.pending {
            Some(pending) => Ok(ops::add(pending, &self.stream)?),
            None => Ok(self.stream.clone()),
        }
    }

    /// Sequences, and tokens of each.
    pub(super) fn sizes(&self) -> [usize; 2] {
        [0, 1].map(|dim| self.stream.shape().sizes()[dim])
    }

    /// (value, norm of the value)
    pub(super) fn normed(self, norm: &Norm) -> Result<(Tensor, Tensor)> {
        Ok(match &self.pending {
            Some(pending) => norm.forward_add(pending, Some(&self.stream))?,
            None => norm.forward_add(&self.stream, None)?,
        })
    }
}

/// What routers of mixture layers said, for the balancing loss.
pub type RouterLogits = Vec<Tensor>;

impl Block {
    pub(super) fn new(
        init: &Init,
        config: &DecoderConfig,
        layer: usize,
        experts: Option<&ExpertRanks>,
    ) -> Block {
        let names = &config.names;
        let linear = |name: &str, cut, inputs, outputs, bias, std| {
            Linear::normal(&init.at(name).cut(cut), inputs, outputs, bias, config.layout, std)
        };
        let heads = |units| Cut::Outputs { sections: 1, units };
        let (inner_out, inner_in) = (
            Cut::Outputs { sections: 1, units: config.inner_width },
            Cut::Inputs { units: config.inner_width },
        );
        let (query_width, kv_width) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
        let std = config.init_std;
        let (width, inner) = (config.width, config.inner_width);
        let norm1 = || Norm::new(&init.at(names.norm1), width, config.norm);
        let norm2 = || match config.residual {
            Residual::ParallelOneNorm => None,
            _ => Some(Norm::new(&init.at(names.norm2), width, config.norm)),
        };
        let attention = || {
            let of_outputs = || {
                let cut = Cut::Inputs { units: config.heads };
                let mixed_width = match &names.qkv {
                    QkvNames::Latent(latent) => config.heads * latent.heads.value,
                    _ => query_width,
                };
                linear(names.output, cut, mixed_width, width, config.output_bias, config.output_init_std)
            };
            let first_output = (names.declared == Declared::OutputFirst).then(of_outputs);
            let projections = match &names.qkv {
                QkvNames::Packed(name, layout) => {
                    let sections = if *layout == PackedHeads::Thirds { 3 } else { 1 };
                    let cut = Cut::Outputs { sections, units: config.heads };
                    let packed = linear(name, cut, width, 3 * query_width, config.qkv_bias, std);
                    HeadProjections::Packed(packed, *layout)
                }
                QkvNames::Grouped(name) => {
                    let cut = Cut::Heads { heads: config.heads, kv_heads: config.kv_heads };
                    let outputs = query_width + 2 * kv_width;
                    HeadProjections::Grouped(linear(name, cut, width, outputs, config.qkv_bias, std))
                }
                QkvNames::Latent(latent) => {
                    HeadProjections::Latent(Box::new(latent_projections(init, config, latent)))
                }
                QkvNames::ByKeyHead(name) => {
                    let cut = Cut::Outputs { sections: 1, units: config.kv_heads };
                    let outputs = query_width + 2 * kv_width;
                    HeadProjections::ByKeyHead(linear(name, cut, width, outputs, config.qkv_bias, std))
                }
                QkvNames::Separate([query, key, value])
                | QkvNames::Normed { heads: [query, key, value], .. } => {
                    let gated =
                        matches!(&names.qkv, QkvNames::Normed { gate: OutputGate::BesideQueries, .. });
                    let outputs = if gated { 2 * query_width } else { query_width };
                    let of_queries =
                        || linear(query, heads(config.heads), width, outputs, config.qkv_bias, std);
                    let of_keys =
                        |name| linear(name, heads(config.kv_heads), width, kv_width, config.qkv_bias, std);
                    match names.declared {
                        Declared::NormsBehind => {
                            let (key, value) = (of_keys(key), of_keys(value));
                            HeadProjections::Separate { query: of_queries(), key, value }
                        }
                        _ => HeadProjections::Separate {
                            query: of_queries(),
                            key: of_keys(key),
                            value: of_keys(value),
                        },
                    }
                }
            };
            let output = first_output.unwrap_or_else(of_outputs);
            let sinks = |name| {
                let start = Initializer::Normal { mean: 0.0, std };
                init.param(name, [config.heads], start)
            };
            let scores = Scores { cap: config.scores.cap, sinks: config.scores.sinks.map(sinks) };
            let attention = MultiHeadAttention::new(projections, output, config.attention(layer))
                .with_turning(config.turns[layer])
                .with_scores(scores)
                .with_clip(config.scores.clip);
            let QkvNames::Normed { norms, per_head, gate, .. } = &names.qkv else { return attention };
            let attention = attention.with_output_gate(*gate);
            let of_width = |init: &Init, width: usize| match config.norm {
                NormConfig::RmsBeyondOne { eps } => RmsNorm::beyond_one(init, width, eps),
                NormConfig::Rms { eps }
                | NormConfig::Layer { eps, .. }
                | NormConfig::LayerWithoutBias { eps } => RmsNorm::new(init, width, eps),
            };
            let norm = |name: &str, count: usize| match per_head {
                true => of_width(&init.at(name).cut(Cut::Shared), config.head_dim),
                false => of_width(&init.at(name).cut(heads(count)), count * config.head_dim),
            };
            attention.with_head_norms(norm(norms[0], config.heads), norm(norms[1], config.kv_heads))
        };
        let mixer = || match config.linear.as_ref().filter(|_| config.is_linear(layer)) {
            Some(linear) => Mixer::Linear(GatedDeltaNet::new(&init.at(linear.name), linear.config.clone())),
            None => Mixer::Attention(attention()),
        };
        let feed_forward = || match &config.feed_forward {
            FeedForward::Plain { names: [up, down] } => FeedForwardLayer::Plain(Mlp::new(
                linear(up, inner_out, width, inner, config.mlp_bias, std),
                linear(down, inner_in, inner, width, config.mlp_bias, config.output_init_std),
                config.activation,
            )),
            FeedForward::Gated { names: [gate, up, down] } => FeedForwardLayer::Gated(GatedMlp::new(
                linear(gate, inner_out, width, inner, config.mlp_bias, std),
                linear(up, inner_out, width, inner, config.mlp_bias, std),
                linear(down, inner_in, inner, width, config.mlp_bias, config.output_init_std),
                config.activation,
            )),
            FeedForward::GatedPacked { names: [gate_up, down] } => {
                let both = Cut::Outputs { sections: 2, units: inner };
                FeedForwardLayer::GatedPacked(PackedGatedMlp::new(
                    linear(gate_up, both, width, 2 * inner, config.mlp_bias, std),
                    linear(down, inner_in, inner, width, config.mlp_bias, config.output_init_std),
                    config.activation,
                ))
            }
            FeedForward::Mixture(mixture) if mixture.is_dense(layer) => {
                let [gate, up, down] = MixtureConfig::DENSE;
                FeedForwardLayer::Gated(GatedMlp::new(
                    linear(gate, inner_out, width, inner, config.mlp_bias, std),
                    linear(up, inner_out, width, inner, config.mlp_bias, std),
                    linear(down, inner_in, inner, width, config.mlp_bias, config.output_init_std),
                    config.activation,
                ))
            }
            FeedForward::Mixture(mixture) => {
                FeedForwardLayer::Mixture(Mixture::new(init, mixture, width, config.activation, std, experts))
            }
        };
        // Parameters are listed in the order in which these are called.
        let (norm1, mixer, norm2, feed_forward) = match names.declared {
            Declared::AsComputed => (norm1(), mixer(), norm2(), feed_forward()),
            Declared::NormsFirst => {
                let (norm1, norm2) = (norm1(), norm2());
                (norm1, mixer(), norm2, feed_forward())
            }
            Declared::NormsLast | Declared::OutputFirst => {
                let (mixer, feed_forward) = (mixer(), feed_forward());
                (norm1(), mixer, norm2(), feed_forward)
            }
            Declared::NormsBehind => {
                let (mixer, norm1, feed_forward) = (mixer(), norm1(), feed_forward());
                (norm1, mixer, norm2(), feed_forward)
            }
        };
        let branch_norms = names.branch_norms.filter(|_| config.residual == Residual::Sandwich);
        let branch_norms =
            branch_norms.map(|norms| norms.map(|name| Norm::new(&init.at(name), width, config.norm)));
        Block {
            path: init.path().to_owned(),
            // Where one norm is of both halves, it is the first.
            norm2: norm2.unwrap_or_else(|| norm1.clone()),
            norm1,
            mixer,
            branch_norms,
            feed_forward,
            residual: config.residual,
            factor: config.factors.branch,
            residual_dropout: config.residual_dropout,
        }
    }

    /// Its attention, where it has one.
    pub(super) fn attention_mut(&mut self) -> Option<&mut MultiHeadAttention> {
        match &mut self.mixer {
            Mixer::Attention(attention) => Some(attention),
            Mixer::Linear(_) => None,
        }
    }

    fn attention(&self) -> Option<&MultiHeadAttention> {
        match &self.mixer {
            Mixer::Attention(attention) => Some(attention),
            Mixer::Linear(_) => None,
        }
    }

    /// Its layer in linear time, where it has one.
    pub(super) fn linear(&self) -> Option<&GatedDeltaNet> {
        match &self.mixer {
            Mixer::Attention(_) => None,
            Mixer::Linear(linear) => Some(linear),
        }
    }

    /// Whether its scores are composed of products on this device.
    pub(super) fn is_composed(&self, device: &Device) -> bool {
        self.attention().is_some_and(|attention| attention.is_composed(device))
    }

    /// The layouts that it attends over, where it does not attend over all.
    pub(super) fn layouts(&self) -> Option<&LayerLayouts> {
        self.attention().and_then(MultiHeadAttention::layouts)
    }

    /// The numbers of its attention; of the heads, those that this rank has.
    pub(super) fn attention_config(&self) -> Option<&AttentionConfig> {
        self.attention().map(MultiHeadAttention::config)
    }

    /// Who its router sent where in the last forward, if it has one.
    pub(super) fn routing(&self) -> Option<Routing> {
        match &self.feed_forward {
            FeedForwardLayer::Mixture(mixture) => mixture.routing(),
            FeedForwardLayer::Plain(_) | FeedForwardLayer::Gated(_) | FeedForwardLayer::GatedPacked(_) => {
                None
            }
        }
    }

    /// `mlp_chunk`: how many tokens the feed-forward layer takes at a time, where that is not all.
    pub(super) fn forward(
        &self,
        x: Stream,
        visibility: &Visibility,
        cache: Option<&mut KeyValueCache>,
        mlp_chunk: Option<usize>,
        mode: Mode,
        routers: &mut RouterLogits,
    ) -> Result<Stream> {
        let compute = || self.compute(x, visibility, cache, mlp_chunk, mode, routers);
        profile::scope_at(&self.path, "Block", || in_mode(mode, compute))
    }

    fn compute(
        &self,
        x: Stream,
        visibility: &Visibility,
        mut cache: Option<&mut KeyValueCache>,
        mlp_chunk: Option<usize>,
        mode: Mode,
        routers: &mut RouterLogits,
    ) -> Result<Stream> {
        let attend = |x: &Tensor, cache: Option<&mut KeyValueCache>| -> Result<Tensor> {
            let attended = match &self.mixer {
                Mixer::Attention(attention) => attention.forward(x, visibility, cache, mode)?,
                Mixer::Linear(linear) => match (&visibility.pages, cache) {
                    (Some(pages), Some(texts)) => linear.forward_pages(x, &pages.rows, texts)?,
                    (_, cache) => linear.forward(x, visibility.key_mask.as_ref(), cache)?,
                },
            };
            self.scaled(visibility.dropout(mode, &attended, self.residual_dropout)?)
        };
        let mut feed = |x: &Tensor| -> Result<Tensor> {
            let y = match &self.feed_forward {
                FeedForwardLayer::Plain(mlp) => mlp.forward_in_chunks(x, mlp_chunk)?,
                FeedForwardLayer::Gated(mlp) => mlp.forward_in_chunks(x, mlp_chunk)?,
                FeedForwardLayer::GatedPacked(mlp) => mlp.forward_in_chunks(x, mlp_chunk)?,
                FeedForwardLayer::Mixture(mixture) => {
                    let (y, logits) = mixture.forward(x, mode)?;
                    routers.push(logits);
                    y
                }
            };
            self.scaled(visibility.dropout(mode, &y, self.residual_dropout)?)
        };
        match self.residual {
            Residual::PreNorm => {
                if let Some(stream) = self.attended_few_rows(&x, visibility, cache.as_deref_mut(), mode)? {
                    if let Some(stream) = self.fed_few_rows(&stream)? {
                        return Ok(Stream { stream, pending: None });
                    }
                    let normed = self.norm2.forward(&stream)?;
                    return Ok(Stream { stream, pending: Some(feed(&normed)?) });
                }
                let (stream, normed) = x.normed(&self.norm1)?;
                let attended = attend(&normed, cache)?;
                let (stream, normed) = self.norm2.forward_add(&attended, Some(&stream))?;
                Ok(Stream { stream, pending: Some(feed(&normed)?) })
            }
            Residual::PreNormResidual => {
                let (_, normed) = x.normed(&self.norm1)?;
                let stream = ops::add(&attend(&normed, cache)?, &normed)?;
                let normed = self.norm2.forward(&stream)?;
                let fed = feed(&normed)?;
                Ok(Stream { stream: normed, pending: Some(fed) })
            }
            Residual::PostNorm => {
                let value = x.value()?;
                let (_, normed) = self.norm1.forward_add(&attend(&value, cache)?, Some(&value))?;
                let (_, stream) = self.norm2.forward_add(&feed(&normed)?, Some(&normed))?;
                Ok(Stream { stream, pending: None })
            }
            Residual::BranchNorm => {
                let value = x.value()?;
                let stream = ops::add(&self.norm1.forward(&attend(&value, cache)?)?, &value)?;
                let fed = self.norm2.forward(&feed(&stream)?)?;
                Ok(Stream { stream, pending: Some(fed) })
            }
            Residual::Sandwich => {
                let (stream, normed) = x.normed(&self.norm1)?;
                let [behind_attention, behind_feed] = self.branch_norms()?;
                let attended = behind_attention.forward(&attend(&normed, cache)?)?;
                let (stream, normed) = self.norm2.forward_add(&attended, Some(&stream))?;
                let fed = behind_feed.forward(&feed(&normed)?)?;
                Ok(Stream { stream, pending: Some(fed) })
            }
            Residual::ParallelOneNorm => {
                let (stream, normed) = x.normed(&self.norm1)?;
                let attended = attend(&normed, cache)?;
                let fed = feed(&normed)?;
                Ok(Stream { stream, pending: Some(ops::add(&fed, &attended)?) })
            }
            Residual::Parallel => {
                let (stream, normed) = x.normed(&self.norm1)?;
                let attended = attend(&normed, cache)?;
                let fed = feed(&self.norm2.forward(&stream)?)?;
                Ok(Stream { stream, pending: Some(ops::add(&fed, &attended)?) })
            }
        }
    }

    fn branch_norms(&self) -> Result<&[Norm; 2]> {
        let why = "a block with norms behind its halves was made without them";
        self.branch_norms.as_ref().ok_or_else(|| TensorError::argument("decoder block", why).into())
    }

    /// What a half of the block says, as it joins the stream.
    fn scaled(&self, said: Tensor) -> Result<Tensor> {
        if self.factor == 1.0 { Ok(said) } else { Ok(ops::affine(&said, self.factor, 0.0)?) }
    }

    /// The stream behind attention, where a device computes few rows of a pass over pages by kernels that do more than one layer.
    fn attended_few_rows(
        &self,
        x: &Stream,
        visibility: &Visibility,
        cache: Option<&mut KeyValueCache>,
        mode: Mode,
    ) -> Result<Option<Tensor>> {
        match (x, cache, self.attention()) {
            (Stream { stream, pending: None }, Some(cache), Some(attention))
                if mode == Mode::Evaluate && self.factor == 1.0 =>
            {
                Ok(attention.forward_onto(stream, &self.norm1, visibility, cache)?)
            }
            _ => Ok(None),
        }
    }

    /// The stream behind the feed-forward layer, likewise.
    fn fed_few_rows(&self, stream: &Tensor) -> Result<Option<Tensor>> {
        match &self.feed_forward {
            FeedForwardLayer::Gated(mlp) if self.factor == 1.0 => Ok(mlp.forward_onto(stream, &self.norm2)?),
            FeedForwardLayer::Gated(_)
            | FeedForwardLayer::Plain(_)
            | FeedForwardLayer::GatedPacked(_)
            | FeedForwardLayer::Mixture(_) => Ok(None),
        }
    }
}

/// DeepSeek's norms of latents have this whatever the configuration says.
const LATENT_EPS: f32 = 1e-6;

/// The layers of latent attention; slices of them are refused before.
fn latent_projections(init: &Init, config: &DecoderConfig, latent: &LatentRanks) -> LatentProjections {
    let std = config.init_std;
    let linear = |name: &str, inputs, outputs, bias| {
        Linear::normal(&init.at("self_attn").at(name), inputs, outputs, bias, WeightLayout::OutIn, std)
    };
    let norm = |name: &str, width| RmsNorm::new(&init.at("self_attn").at(name), width, LATENT_EPS);
    let (width, heads) = (config.width, latent.heads);
    let of_queries = config.heads * heads.width();
    let query = match latent.query {
        None => LatentQuery::Whole(linear("q_proj", width, of_queries, false)),
        Some(rank) => LatentQuery::ByLatent {
            inwards: linear("q_a_proj", width, rank, latent.bias),
            norm: norm("q_a_layernorm", rank),
            outwards: linear("q_b_proj", rank, of_queries, false),
        },
    };
    LatentProjections {
        query,
        inwards: linear("kv_a_proj_with_mqa", width, latent.key_value + heads.turning, latent.bias),
        norm: norm("kv_a_layernorm", latent.key_value),
        outwards: linear("kv_b_proj", latent.key_value, config.heads * (heads.still + heads.value), false),
        heads,
    }
}

/// A block that is run again in backward. Its input and output are one tensor each; the input waits on the shelf.
pub(super) fn checkpointed(
    shelf: &dyn Shelf,
    block: &Block,
    stream: Stream,
    visibility: &Visibility,
    mlp_chunk: Option<usize>,
    mode: Mode,
    routers: &mut RouterLogits,
) -> Result<Stream> {
    let (block, visibility) = (block.clone(), visibility.clone());
    let has_router = matches!(block.feed_forward, FeedForwardLayer::Mixture(_));
    let mut outputs = autograd::checkpoint_on(shelf, &[stream.value()?], move |inputs| {
        let mut routers = RouterLogits::new();
        let stream = Stream { stream: inputs[0].clone(), pending: None };
        let stream = block
            .forward(stream, &visibility, None, mlp_chunk, mode, &mut routers)
            .map_err(into_tensor_error)?;
        let mut outputs = vec![stream.value().map_err(into_tensor_error)?];
        outputs.extend(routers);
        Ok(outputs)
    })?;
    if has_router {
        routers.extend(outputs.pop());
    }
    Ok(Stream { stream: outputs.swap_remove(0), pending: None })
}
