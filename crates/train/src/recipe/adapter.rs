//! `[adapter]`: what a recipe trains beside the weights of a model that stay as they are. The keys are PEFT's, by the names that
//! people say: `rank` and `alpha` for `r` and `lora_alpha`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use ferrospeed_nn::adapter::{Adapters, Scaling, Targets, TrainedBiases};
use serde::{Deserialize, Serialize};

/// The section.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdapterRecipe {
    /// `lora`, the default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// A directory with an adapter that is trained further: it says all but `dropout`.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "crate::hub::write_path")]
    pub path: Option<PathBuf>,
    /// How wide the middle of an adapter is; default 8.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank: Option<u64>,
    /// How much adapters weigh: their product is multiplied by `alpha / rank`; default: twice the rank.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alpha: Option<f64>,
    /// What an adapter does not see of its input while it is trained; default 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dropout: Option<f64>,
    /// Which linear layers: names or ends of paths, `"all-linear"` (the default), or a regular expression over whole paths.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target_modules: Option<TargetsRecipe>,
    /// Modules that are trained whole, by the ends of their paths.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub modules_to_save: Vec<String>,
    /// Ranks of single layers, by the ends of their paths.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub rank_pattern: BTreeMap<String, u64>,
    /// Alphas of single layers.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub alpha_pattern: BTreeMap<String, f64>,
    /// Whether the factor is `alpha / √rank`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub use_rslora: Option<bool>,
    /// Whether the length of each output's weights is learnt apart.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub use_dora: Option<bool>,
    /// Biases that are trained too: `none` (the default), `all` or `lora_only`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bias: Option<String>,
}

/// Which linear layers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum TargetsRecipe {
    /// `"all-linear"`, or a regular expression.
    One(String),
    /// Names, or ends of paths.
    Several(Vec<String>),
}

/// What else people call adapters, and what to write for it.
const OTHER_KINDS: [(&str, &str); 4] = [
    ("rslora", "write kind = \"lora\" and use_rslora = true"),
    ("dora", "write kind = \"lora\" and use_dora = true"),
    (
        "qlora",
        "weights of four bits are not trained on yet; write kind = \"lora\", and bf16 = true in [training], which holds the model once in 16 bits, in shards with zero_optimization.stage = 3",
    ),
    ("full", "leave out [adapter] to train all weights"),
];

impl AdapterRecipe {
    /// What is wrong with the section by itself.
    pub(super) fn problems(&self, refuse: &mut impl FnMut(bool, String)) {
        let kind = self.kind.as_deref().unwrap_or("lora");
        if kind != "lora" {
            let help = OTHER_KINDS.iter().find(|(name, _)| *name == kind).map(|(_, help)| *help);
            let help =
                help.unwrap_or("write kind = \"lora\"; with use_rslora or use_dora it is rsLoRA or DoRA");
            refuse(true, format!("adapter.kind: '{kind}' is not known; {help}"));
        }
        if let Some(word) = &self.bias {
            let known = ["none", "all", "lora_only"].contains(&word.as_str());
            refuse(!known, format!("adapter.bias: '{word}' is not known; use none, all or lora_only"));
        }
        if let Some(TargetsRecipe::Several(names)) = &self.target_modules {
            refuse(
                names.is_empty(),
                "adapter.target_modules: names no layer; leave it out to adapt all linear ones".into(),
            );
        }
        if self.path.is_some() {
            for key in self.said_by_path() {
                refuse(
                    true,
                    format!("adapter.{key}: the adapter in adapter.path says it; take one of the two away"),
                );
            }
            return;
        }
        for (key, why) in self.adapters().problems() {
            refuse(true, format!("adapter.{key}: {why}"));
        }
    }

    /// The keys that are given and that a directory says.
    fn said_by_path(&self) -> impl Iterator<Item = &'static str> {
        let given = [
            ("rank", self.rank.is_some()),
            ("alpha", self.alpha.is_some()),
            ("target_modules", self.target_modules.is_some()),
            ("modules_to_save", !self.modules_to_save.is_empty()),
            ("rank_pattern", !self.rank_pattern.is_empty()),
            ("alpha_pattern", !self.alpha_pattern.is_empty()),
            ("use_rslora", self.use_rslora.is_some()),
            ("use_dora", self.use_dora.is_some()),
            ("bias", self.bias.is_some()),
        ];
        given.into_iter().filter(|(_, given)| *given).map(|(key, _)| key)
    }

    /// What a recipe without a path asks for.
    pub(crate) fn adapters(&self) -> Adapters {
        let count = |count: u64| usize::try_from(count).unwrap_or(usize::MAX);
        let defaults = Adapters::default();
        let rank = self.rank.map_or(defaults.rank, count);
        Adapters {
            rank,
            alpha: self.alpha.unwrap_or(2.0 * rank as f64),
            scaling: if self.use_rslora == Some(true) { Scaling::ByRootOfRank } else { Scaling::ByRank },
            magnitudes: self.use_dora == Some(true),
            dropout: self.dropout.unwrap_or(0.0) as f32,
            targets: match &self.target_modules {
                None => Targets::AllLinear,
                Some(TargetsRecipe::One(text)) => Targets::of_text(text),
                Some(TargetsRecipe::Several(names)) => Targets::Names(names.clone()),
            },
            excluded: Targets::nothing(),
            saved_modules: self.modules_to_save.clone(),
            rank_pattern: self.rank_pattern.iter().map(|(key, rank)| (key.clone(), count(*rank))).collect(),
            alpha_pattern: self.alpha_pattern.clone(),
            biases: match self.bias.as_deref() {
                Some("all") => TrainedBiases::All,
                Some("lora_only") => TrainedBiases::OfAdapted,
                _ => TrainedBiases::None,
            },
        }
    }
}
