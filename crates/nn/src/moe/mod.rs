//! Mixture of experts: a router sends each token to a few of many feed-forward layers.
//!
//! The way of a token: the gate scores all experts in f32 and chooses; [`Routes`] sorts the chosen rows by
//! expert; [`Experts::forward`] takes sorted rows and how many each expert has, and gives rows back in the same order;
//! `Routes` collects them weighted. Experts that live on other ranks ([`Moe::over`]) change only the step in the middle.
//!
//! Without a capacity (the default) no token is dropped and nothing is padded. With one it is DeepSpeed's rule, to the
//! number: Lepikhin et al., "GShard" (2020), and Fedus, Zoph, Shazeer, "Switch transformers" (2022).
//!
//! ```
//! use ferrospeed_nn::{GatedMlp, Init, Linear, Mode, Moe, MoeConfig};
//! use ferrospeed_tensor::store::{FromInitializers, PlainStore};
//! use ferrospeed_tensor::{Activation, DType, Tensor};
//!
//! # fn main() -> ferrospeed_tensor::Result<()> {
//! let init = Init::root();
//! let moe = Moe::new(&init.at("moe"), MoeConfig::dropless(16, 4, 2), |init, _| {
//!     let linear = |name, inputs, outputs| Linear::new(&init.at(name), inputs, outputs, false);
//!     GatedMlp::new(linear("gate", 16, 32), linear("up", 16, 32), linear("down", 32, 16), Activation::Silu)
//! })?;
//! let device = ferrospeed_cpu::device();
//! let _store = PlainStore::attach(init.parameters().as_slice(), DType::F32, &device, &FromInitializers { seed: 1 })?;
//! let mixed = moe.forward(&Tensor::full([2, 8, 16], 0.5, DType::F32, &device)?, Mode::Train)?;
//! assert_eq!(mixed.output.sizes(), [2, 8, 16]);
//! assert_eq!(mixed.routing.statistics()?.tokens_per_expert.iter().sum::<u64>(), 32);
//! # Ok(())
//! # }
//! ```

mod apart;
pub mod capacity;
mod config;
mod experts;
mod gate;
mod losses;
mod param_groups;
mod stacked;
mod statistics;

pub use apart::{ExpertRanks, RankTokens};
pub use config::{BalancedOver, Capacity, ExpertGroups, GateNoise, GroupScore, MoeConfig, RouterScores};
pub use experts::{Expert, Experts};
pub use gate::{BalancingBias, GateDraws};
pub use losses::{balance_loss, z_loss};
pub use param_groups::{GroupPlan, PlannedGroup, split_param_groups};
pub use stacked::StackedExperts;
pub use statistics::{Routing, RoutingStatistics, RoutingTally};

use ferrospeed_comm::Group;
use ferrospeed_tensor::ops::{self, Routes};
use ferrospeed_tensor::{Param, Result, Tensor, profile};

use crate::init::Init;
use crate::linear::Linear;
use crate::{Mode, Module};
use gate::Gate;

/// What a mixture gives.
#[derive(Debug, Clone)]
pub struct Mixed {
    /// In the shape of the input. A token whose choices were all dropped has a row of zeros.
    pub output: Tensor,
    /// The router's logits `[tokens, experts]` in f32.
    pub logits: Tensor,
    /// Who was sent where.
    pub routing: Routing,
    /// With their history.
    probabilities: Tensor,
    balanced: Tensor,
}

impl Mixed {
    /// The load-balancing loss, one f32: 1 where first choices are spread evenly. Add it to the loss with a weight.
    pub fn balance_loss(&self) -> Result<Tensor> {
        balance_loss(&self.probabilities, &self.balanced)
    }

    /// [`z_loss`] of the router.
    pub fn z_loss(&self) -> Result<Tensor> {
        z_loss(&self.logits)
    }
}

/// `y = moe(x)·c₀ + mlp(x)·c₁` with `c = softmax(coefficient(x))`: a layer that every token passes beside the experts.
/// (Rajbhandari et al.: "DeepSpeed-MoE", 2022, section 4.1.)
struct Beside {
    mlp: Box<dyn Module>,
    coefficient: Linear,
}

/// A router and its experts.
pub struct Moe {
    gate: Gate,
    /// All experts, or this rank's.
    experts: Experts,
    /// The ranks over which they are spread.
    ranks: Option<ExpertRanks>,
    beside: Option<Beside>,
    path: String,
}

impl std::fmt::Debug for Moe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Moe of {:?}", self.experts)
    }
}

impl Moe {
    /// With parameters named as DeepSpeed's layer names them; `expert` makes each at its place.
    pub fn new<E: Into<Expert>>(
        init: &Init,
        config: MoeConfig,
        expert: impl Fn(&Init, usize) -> E,
    ) -> Result<Moe> {
        Moe::build(init, config, None, expert)
    }

    /// The same with experts spread over the ranks of a group, an equal stretch on each. Every rank knows the parameters of
    /// all, and [`crate::Parameters::holder`] whose they are; it computes with its own, which alone need values.
    pub fn over<E: Into<Expert>>(
        init: &Init,
        config: MoeConfig,
        group: &Group,
        expert: impl Fn(&Init, usize) -> E,
    ) -> Result<Moe> {
        Moe::build(init, config, Some(group), expert)
    }

    fn build<E: Into<Expert>>(
        init: &Init,
        config: MoeConfig,
        group: Option<&Group>,
        expert: impl Fn(&Init, usize) -> E,
    ) -> Result<Moe> {
        let at = init.at("deepspeed_moe");
        let why = "is of a mixture's router or experts, which have no adapters yet";
        let at = at.without_adapters(why);
        let router = Linear::new(&at.at("gate.wg"), config.width, config.experts, false);
        // A rank's tokens choose which experts it needs; all of them come and go together, whatever was chosen.
        let place = at.at("experts.deepspeed_experts").as_unit();
        let experts = Experts::spread(&place, config.experts, group, expert);
        let moe = Moe::from_parts(init, config, router, experts, group.map(ExpertRanks::from).as_ref());
        moe.check()?;
        Ok(moe)
    }

    /// From a router `[experts, width]` and experts that have their names already; where ranks are given, this rank's of
    /// them ([`Experts::spread`]). Numbers that make no sense are refused by `forward`.
    pub fn from_parts(
        init: &Init,
        config: MoeConfig,
        router: Linear,
        experts: Experts,
        ranks: Option<&ExpertRanks>,
    ) -> Moe {
        Moe {
            gate: Gate::new(init, config, router),
            experts,
            ranks: ranks.cloned(),
            beside: None,
            path: init.path().to_owned(),
        }
    }

    /// The same whose choices, but not their weights, see scores with `[experts]` of a model's files added.
    pub fn with_choice_bias(self, bias: Option<Param>) -> Moe {
        Moe { gate: self.gate.with_choice_bias(bias), ..self }
    }

    fn check(&self) -> Result<()> {
        self.gate.config().validate()?;
        let ranks = self.ranks.as_ref().map_or(1, |ranks| ranks.group.size());
        apart::check_division(self.gate.config().experts, ranks)?;
        self.experts.expect(self.gate.config().experts / ranks)
    }

    /// Adds a layer that every token passes, mixed in by a coefficient of the token.
    pub fn beside(mut self, init: &Init, mlp: impl Module + 'static) -> Moe {
        let coefficient = Linear::new(&init.at("coefficient"), self.gate.config().width, 2, true);
        self.beside = Some(Beside { mlp: Box::new(mlp), coefficient });
        self
    }

    /// The router's bias, where it balances by one.
    pub fn balancing_bias(&self) -> Option<&BalancingBias> {
        self.gate.bias()
    }

    /// The mixture of `x [.., width]`.
    pub fn forward(&self, x: &Tensor, mode: Mode) -> Result<Mixed> {
        let draws = self.gate.draws(x.shape().rows(), mode);
        self.forward_with(x, mode, None, &draws)
    }

    /// The same with the random numbers given, and with tokens left out where `used` is false.
    pub fn forward_with(
        &self,
        x: &Tensor,
        mode: Mode,
        used: Option<&[bool]>,
        draws: &GateDraws,
    ) -> Result<Mixed> {
        Ok(self.mixed(x, mode, used, draws, || Ok(()))?.0)
    }

    /// The mixture of `x`, and what `beside` makes, such as a shared expert's part: where experts are on several ranks it is
    /// computed while tokens are on their way to them, and its gradients while the tokens' are on their way back.
    pub fn forward_beside<T>(
        &self,
        x: &Tensor,
        mode: Mode,
        beside: impl FnOnce() -> Result<T>,
    ) -> Result<(Mixed, T)> {
        let draws = self.gate.draws(x.shape().rows(), mode);
        self.mixed(x, mode, None, &draws, beside)
    }

    /// Shares of the mixture and of the layer that every token passes, and what that makes.
    fn dense(&self, x: &Tensor, mode: Mode) -> Result<Option<(Tensor, Tensor)>> {
        let Some(beside) = &self.beside else { return Ok(None) };
        let shares = ops::softmax(&beside.coefficient.forward(x)?)?;
        Ok(Some((shares, beside.mlp.forward(x, mode)?)))
    }

    fn mixed<T>(
        &self,
        x: &Tensor,
        mode: Mode,
        used: Option<&[bool]>,
        draws: &GateDraws,
        beside: impl FnOnce() -> Result<T>,
    ) -> Result<(Mixed, T)> {
        self.check()?;
        profile::scope_at(&self.path, "Moe", || {
            let flat = ops::reshape(x, [x.shape().rows(), x.shape().last()])?;
            let choice = self.gate.choose(&flat, mode, used, draws)?;
            let routes = Routes::new(&choice.experts, self.gate.config().experts)?;
            let all_beside = || Ok((self.dense(x, mode)?, beside()?));
            let (mixed, (dense, made_beside)) = match &self.ranks {
                None => (self.experts.mixed(&flat, &routes, &choice.weights, mode)?, all_beside()?),
                Some(ExpertRanks { group, tokens }) => {
                    let sent = (&routes.spread(&flat)?, routes.counts());
                    let (rows, beside) = match tokens {
                        RankTokens::Own => apart::forward(&self.experts, group, sent, mode, all_beside)?,
                        RankTokens::Same => {
                            (apart::forward_same(&self.experts, group, sent, mode)?, all_beside()?)
                        }
                    };
                    (routes.collect(&rows, &choice.weights)?, beside)
                }
            };
            let mut output = ops::reshape(&mixed, *x.shape())?;
            if let Some((shares, dense)) = dense {
                let dim = x.shape().dims() - 1;
                let share = |index| ops::narrow(&shares, dim, index, 1);
                output = ops::add(&ops::mul(&output, &share(0)?)?, &ops::mul(&dense, &share(1)?)?)?;
            }
            let routing = choice.routing(&routes);
            let balanced = choice.balanced.unwrap_or_else(|| routes.counts().clone());
            let (logits, probabilities) = (choice.logits, choice.probabilities);
            Ok((Mixed { output, logits, routing, probabilities, balanced }, made_beside))
        })
    }
}
