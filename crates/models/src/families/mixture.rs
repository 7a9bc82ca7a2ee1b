//! Mixtures of experts in decoders: each token goes to its `chosen` best experts, none is dropped. Some families add an
//! expert that every token passes.

use std::sync::{Arc, Mutex, PoisonError};

use ferrospeed_nn::moe::{ExpertRanks, RankTokens, Routing, balance_loss};
use ferrospeed_nn::tensor_parallel::Cut;
use ferrospeed_nn::{Experts, GatedMlp, Init, Linear, Mode, Moe, MoeConfig};
use ferrospeed_tensor::ops::{self, Routes, WeightLayout};
use ferrospeed_tensor::{Activation, DType, Tensor};

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
    };

    /// What later families call them.
    pub const fn projections(declared: DeclaredMixture) -> MixtureNames {
        MixtureNames { place: "mlp", expert: ["gate_proj", "up_proj", "down_proj"], declared }
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
}

/// A router and its experts. Cloning copies handles.
#[derive(Debug, Clone)]
pub struct Mixture {
    moe: Arc<Moe>,
    shared: Option<(GatedMlp, Linear)>,
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
        let make_router = || linear(&at.at("gate").without_adapters(why), width, config.experts);
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
            let group = ranks.map(|ranks| &ranks.group);
            Experts::spread(&experts, config.experts, group, |at, _| gated(at, config.inner_width))
        };
        let (router, experts) = match config.names.declared {
            DeclaredMixture::RouterLast => {
                let experts = make_experts();
                (make_router(), experts)
            }
            _ => (make_router(), make_experts()),
        };
        let shared = config.shared_width.map(|inner| {
            (gated(&at.at("shared_expert"), inner), linear(&at.at("shared_expert_gate"), width, 1))
        });
        let numbers = MoeConfig {
            normalized: config.normalized,
            ..MoeConfig::dropless(width, config.experts, config.chosen)
        };
        Mixture {
            moe: Arc::new(Moe::from_parts(&at, numbers, router, experts, ranks)),
            shared,
            routing: Arc::default(),
        }
    }

    /// The mixture of `x [.., width]`, and the router's logits `[tokens, experts]` in f32.
    pub fn forward(&self, x: &Tensor, mode: Mode) -> Result<(Tensor, Tensor)> {
        let (mixed, shared) = self.moe.forward_beside(x, mode, || {
            let Some((expert, gate)) = &self.shared else { return Ok(None) };
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
