//! Mixtures of experts in decoders: each token goes to its `chosen` best experts, none is dropped. Some families add an
//! expert that every token passes.

use std::sync::{Arc, Mutex, PoisonError};

use ferrospeed_nn::moe::{
    ExpertGroups, ExpertRanks, RankTokens, RouterScores, Routing, StackedExperts, balance_loss,
};
use ferrospeed_nn::tensor_parallel::Cut;
use ferrospeed_nn::{Experts, GatedMlp, Init, Linear, Mode, Moe, MoeConfig};
use ferrospeed_tensor::ops::{self, Routes, WeightLayout};
use ferrospeed_tensor::{Activation, DType, Initializer, Tensor};

use crate::error::Result;

/// How a family names the parts of its mixtures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MixtureNames {
    /// The mixture in its block.
    pub place: &'static str,
    /// Gate, up and down of an expert.
    pub expert: [&'static str; 3],
    /// In which order they are declared.
    pub declared: DeclaredMixture,
    /// The router.
    pub router: &'static str,
    /// The expert that every token passes, where there is one.
    pub shared: &'static str,
    /// What weighs it, where something does.
    pub shared_gate: Option<&'static str>,
}

/// The order of a mixture's parameters in a family's reference implementation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeclaredMixture {
    /// The router, then each expert's gate, down and up (Mixtral).
    DownBeforeUp,
    /// The router, then each expert's gate, up and down.
    RouterFirst,
    /// The router behind the experts.
    RouterLast,
}

impl MixtureNames {
    /// Mixtral's.
    pub const MIXTRAL: MixtureNames = MixtureNames {
        place: "block_sparse_moe",
        expert: ["w1", "w3", "w2"],
        declared: DeclaredMixture::DownBeforeUp,
        ..MixtureNames::projections(DeclaredMixture::DownBeforeUp)
    };

    /// What later families call them.
    pub const fn projections(declared: DeclaredMixture) -> MixtureNames {
        MixtureNames {
            place: "mlp",
            expert: ["gate_proj", "up_proj", "down_proj"],
            declared,
            router: "gate",
            shared: "shared_expert",
            shared_gate: Some("shared_expert_gate"),
        }
    }

    /// DeepSeek's, whose shared expert nothing weighs.
    pub const DEEPSEEK: MixtureNames = MixtureNames {
        shared: "shared_experts",
        shared_gate: None,
        ..MixtureNames::projections(DeclaredMixture::RouterLast)
    };
}

/// What an expert computes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ExpertKind {
    /// `down(f(gate(x))·up(x))`, a parameter for each of its layers.
    Gated,
    /// With biases, its gate within bounds, and the parameters of all experts stacked; the router has a bias too.
    Clamped {
        /// The bound.
        limit: f32,
    },
}

/// How a router chooses.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RouterRules {
    /// What it makes of its logits.
    pub scores: RouterScores,
    /// Multiplies the weights of a token's choices.
    pub factor: f32,
    /// Groups among which tokens choose first.
    pub groups: Option<ExpertGroups>,
    /// The name, beside the router's weight, of what is added to scores by which experts are chosen. Nothing trains it.
    pub choice_bias: Option<&'static str>,
}

impl Default for RouterRules {
    /// A distribution over all experts, of which the best are taken.
    fn default() -> RouterRules {
        RouterRules { scores: RouterScores::Softmax, factor: 1.0, groups: None, choice_bias: None }
    }
}

/// The numbers of a mixture.
#[derive(Debug, Clone, PartialEq)]
pub struct MixtureConfig {
    /// How many experts there are.
    pub experts: usize,
    /// How many each token uses.
    pub chosen: usize,
    /// Channels inside an expert.
    pub inner_width: usize,
    /// Whether the weights of a token's choices sum to one.
    pub normalized: bool,
    /// Weight of the balancing loss; zero leaves it out.
    pub balance_loss: f32,
    /// How its tensors are named.
    pub names: MixtureNames,
    /// Channels inside an expert that every token passes, weighted by a gate of its own.
    pub shared_width: Option<usize>,
    /// What an expert computes.
    pub kind: ExpertKind,
    /// How the router chooses.
    pub router: RouterRules,
    /// Which layers are one perceptron instead, as wide as the configuration's `inner_width`; nothing where none is.
    pub dense: Vec<bool>,
}

/// A router and its experts. Cloning copies handles.
#[derive(Debug, Clone)]
pub struct Mixture {
    moe: Arc<Moe>,
    shared: Option<(GatedMlp, Option<Linear>)>,
    /// Of the last forward that trained, for whoever logs.
    routing: Arc<Mutex<Option<Routing>>>,
}

impl Mixture {
    /// Builds router and experts; where the experts are spread over ranks, this one computes with its own.
    pub fn new(
        init: &Init,
        config: &MixtureConfig,
        width: usize,
        activation: Activation,
        std: f32,
        ranks: Option<&ExpertRanks>,
    ) -> Mixture {
        let at = init.at(config.names.place);
        let linear = |init: &Init, inputs, outputs| {
            Linear::normal(init, inputs, outputs, false, WeightLayout::OutIn, std)
        };
        let why =
            "is of a mixture's router or experts, which have no adapters yet; name the layers of attention";
        let make_router = || {
            let at = at.at(config.names.router).without_adapters(why);
            let has_bias = matches!(config.kind, ExpertKind::Clamped { .. });
            let router = Linear::normal(&at, width, config.experts, has_bias, WeightLayout::OutIn, std);
            let choice_bias = config.router.choice_bias.map(|name| {
                let bias = at.param(name, [config.experts], Initializer::Constant(0.0));
                bias.set_trainable(false);
                bias
            });
            (router, choice_bias)
        };
        // A rank's tokens choose which experts it reads; all of them are gathered, whatever was chosen.
        let mut experts = at.at("experts").without_adapters(why).as_unit();
        // Ranks that have the same tokens and slices of the other layers hold whole experts.
        if ranks.is_some_and(|ranks| ranks.tokens == RankTokens::Same) {
            experts = experts.over(None);
        }
        let gated = |at: &Init, inner: usize| {
            let [gate, up, down] = config.names.expert;
            // Ranks that have tokens of their own send them to whole experts.
            let cut = |name: &str, cut| {
                if at.has_all_tokens() { at.at(name).cut(cut) } else { at.at(name) }
            };
            let (outwards, inwards) =
                (Cut::Outputs { sections: 1, units: inner }, Cut::Inputs { units: inner });
            let gate = linear(&cut(gate, outwards), width, inner);
            let make_up = || linear(&cut(up, outwards), width, inner);
            let make_down = || linear(&cut(down, inwards), inner, width);
            // Parameters are listed in the order in which these are called.
            let (up, down) = match config.names.declared {
                DeclaredMixture::DownBeforeUp => {
                    let down = make_down();
                    (make_up(), down)
                }
                _ => (make_up(), make_down()),
            };
            GatedMlp::new(gate, up, down, activation)
        };
        let make_experts = || {
            if let ExpertKind::Clamped { limit } = config.kind {
                let stack =
                    StackedExperts::new(&experts, config.experts, width, config.inner_width, limit, std);
                return Experts::stacked(config.experts, stack);
            }
            let group = ranks.map(|ranks| &ranks.group);
            Experts::spread(&experts, config.experts, group, |at, _| gated(at, config.inner_width))
        };
        let ((router, choice_bias), experts) = match config.names.declared {
            DeclaredMixture::RouterLast => {
                let experts = make_experts();
                (make_router(), experts)
            }
            _ => (make_router(), make_experts()),
        };
        let shared = config.shared_width.map(|inner| {
            let expert = gated(&at.at(config.names.shared), inner);
            (expert, config.names.shared_gate.map(|name| linear(&at.at(name), width, 1)))
        });
        let numbers = MoeConfig {
            normalized: config.normalized,
            scores: config.router.scores,
            factor: config.router.factor,
            groups: config.router.groups,
            ..MoeConfig::dropless(width, config.experts, config.chosen)
        };
        Mixture {
            moe: Arc::new(
                Moe::from_parts(&at, numbers, router, experts, ranks).with_choice_bias(choice_bias),
            ),
            shared,
            routing: Arc::default(),
        }
    }

    /// The mixture of `x [.., width]`, and the router's logits `[tokens, experts]` in f32.
    pub fn forward(&self, x: &Tensor, mode: Mode) -> Result<(Tensor, Tensor)> {
        let (mixed, shared) = self.moe.forward_beside(x, mode, || {
            let Some((expert, gate)) = &self.shared else { return Ok(None) };
            let Some(gate) = gate else { return Ok(Some(expert.forward(x)?)) };
            let share = ops::activate(&gate.forward(x)?, Activation::Sigmoid)?;
            Ok(Some(ops::mul(&expert.forward(x)?, &share)?))
        })?;
        // A decoding step that a device records must leave no tensor behind.
        if mode == Mode::Train {
            *self.routing.lock().unwrap_or_else(PoisonError::into_inner) = Some(mixed.routing);
        }
        let output = match shared {
            Some(shared) => ops::add(&mixed.output, &shared)?,
            None => mixed.output,
        };
        Ok((output, mixed.logits))
    }

    /// Who was sent where in the last forward.
    pub fn routing(&self) -> Option<Routing> {
        self.routing.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl MixtureConfig {
    /// Gate, up and down of layers without a mixture.
    pub const DENSE: [&'static str; 3] = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"];

    /// Whether a layer has no mixture.
    pub fn is_dense(&self, layer: usize) -> bool {
        self.dense.get(layer).copied().unwrap_or(false)
    }

    /// The balancing loss over all layers' router logits; masked tokens do not count.
    pub fn balance(&self, routers: &[Tensor], mask: Option<&[Vec<u8>]>) -> Result<Tensor> {
        let mut all = ops::concat(routers, 0)?;
        if let Some(mask) = mask {
            let real: Vec<u8> = mask.concat();
            let rows = all.sizes()[0];
            let is_real = |row: usize| real[row % real.len()] != 0;
            // Real rows first, the others nowhere.
            let places: Vec<i64> = (0..rows).map(|row| i64::from(!is_real(row))).collect();
            let kept = (0..rows).filter(|&row| is_real(row)).count();
            let routes = Routes::new(&Tensor::from_slice(&places, [rows, 1], all.device())?, 1)?;
            all = ops::narrow(&routes.spread(&all)?, 0, 0, kept)?;
        }
        let probabilities = ops::softmax(&ops::cast(&all, DType::F32)?)?;
        let (_, choices) = ops::top_k(&probabilities.detach(), self.chosen)?;
        Ok(balance_loss(&probabilities, Routes::new(&choices, self.experts)?.counts())?)
    }
}
