//! What each parameter is for, by its name.

use std::fmt;

use crate::config::ModelConfig;
use crate::decoder::{FeedForward, Names, QkvNames};
use crate::families::mixture::MixtureConfig;

/// A part of a transformer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Role {
    /// Tokens, positions, segments, and projections around the blocks.
    Embedding,
    /// Queries, keys, values and the attention output.
    Attention,
    /// The feed-forward half of a block.
    FeedForward,
    /// The experts of a mixture.
    Experts,
    /// What chooses experts.
    Router,
    /// Norms.
    Norm,
    /// Heads that are not tied.
    Head,
}

impl Role {
    /// All of them, in the order reports list them.
    pub const ALL: [Role; 7] = [
        Role::Embedding,
        Role::Attention,
        Role::FeedForward,
        Role::Experts,
        Role::Router,
        Role::Norm,
        Role::Head,
    ];

    /// The name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Role::Embedding => "embedding",
            Role::Attention => "attention",
            Role::FeedForward => "feed-forward",
            Role::Experts => "experts",
            Role::Router => "router",
            Role::Norm => "norms",
            Role::Head => "head",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl ModelConfig {
    /// What the parameter of this name is for.
    pub fn role_of(&self, parameter: &str) -> Role {
        match self {
            ModelConfig::Decoder(config) => {
                let linear = config.linear.as_ref().map(|linear| linear.name);
                decoder_role(&config.names, linear, &config.feed_forward, parameter)
            }
            ModelConfig::Bert(_) => bert_role(parameter),
        }
    }
}

fn decoder_role(names: &Names, linear: Option<&str>, feed_forward: &FeedForward, parameter: &str) -> Role {
    let module = parameter.rsplit_once('.').map_or(parameter, |(module, _)| module);
    let Some((_, within)) =
        module.strip_prefix(names.blocks).and_then(|rest| rest.strip_prefix('.')?.split_once('.'))
    else {
        let is_norm = [names.embedding_norm, names.final_norm].contains(&Some(module));
        return match (is_norm, module == names.head) {
            (true, _) => Role::Norm,
            (_, true) => Role::Head,
            _ => Role::Embedding,
        };
    };
    let behind = names.branch_norms.is_some_and(|norms| norms.contains(&within));
    if within == names.norm1 || within == names.norm2 || behind {
        return Role::Norm;
    }
    let of_linear = linear.is_some_and(|name| within.split('.').next() == Some(name));
    if of_linear {
        return if within.ends_with(".norm") { Role::Norm } else { Role::Attention };
    }
    let is_attention = within == names.output
        || match &names.qkv {
            QkvNames::Packed(name, _) | QkvNames::Grouped(name) | QkvNames::ByKeyHead(name) => {
                within == *name
            }
            QkvNames::Latent(_) => within.starts_with("self_attn.") && !within.ends_with("layernorm"),
            QkvNames::Separate(each) | QkvNames::Normed { heads: each, .. } => each.contains(&within),
        };
    let is_head_norm = match &names.qkv {
        QkvNames::Normed { norms, .. } => norms.contains(&within),
        QkvNames::Latent(_) => within.starts_with("self_attn."),
        _ => false,
    };
    match feed_forward {
        _ if is_attention => Role::Attention,
        _ if is_head_norm => Role::Norm,
        FeedForward::Mixture(_) if MixtureConfig::DENSE.contains(&within) => Role::FeedForward,
        FeedForward::Mixture(mixture) if within.ends_with(mixture.names.router) => Role::Router,
        FeedForward::Mixture(mixture)
            if mixture.names.shared_gate.is_some_and(|gate| within.ends_with(gate)) =>
        {
            Role::Router
        }
        FeedForward::Mixture(_) if within.contains(".experts") || within.contains(".shared_expert") => {
            Role::Experts
        }
        FeedForward::Mixture(_) => Role::Router,
        FeedForward::Plain { .. } | FeedForward::Gated { .. } | FeedForward::GatedPacked { .. } => {
            Role::FeedForward
        }
    }
}

fn bert_role(parameter: &str) -> Role {
    let parameter = parameter.strip_prefix("bert.").unwrap_or(parameter);
    if parameter.contains("LayerNorm") {
        Role::Norm
    } else if parameter.starts_with("embeddings.") {
        Role::Embedding
    } else if parameter.contains(".attention.") {
        Role::Attention
    } else if parameter.starts_with("encoder.") {
        Role::FeedForward
    } else {
        Role::Head
    }
}
