//! What a mixture is asked for, and what makes no sense.

use ferrospeed_tensor::{Result, TensorError};

/// Noise on the router while it trains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GateNoise {
    /// The router sees its input times uniform numbers around 1.
    Jitter,
    /// The choice, not the weight, is made with Gumbel noise on the logits: experts are sampled by their probability.
    RSample,
}

/// Which choices the balancing loss counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BalancedOver {
    /// Each token's best, as DeepSpeed does.
    FirstChoice,
    /// All, as Hugging Face's models do: the loss of a balanced router is the number of choices.
    AllChoices,
}

/// A bound on how many tokens an expert takes, as DeepSpeed has it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Capacity {
    /// Times the even share of tokens, in training. With two choices or more, times their number.
    pub factor: f32,
    /// The same in evaluation.
    pub evaluation_factor: f32,
    /// Never less than this.
    pub min: usize,
    /// Whether tokens beyond the capacity are dropped. Otherwise it grows to what the fullest expert needs.
    pub drops: bool,
    /// With one choice, while training: an overfull expert keeps random tokens instead of the first.
    pub random_selection: bool,
    /// With two choices, while training: the second is sampled.
    pub samples_second: bool,
}

impl Default for Capacity {
    fn default() -> Self {
        Capacity {
            factor: 1.0,
            evaluation_factor: 1.0,
            min: 4,
            drops: true,
            random_selection: true,
            samples_second: true,
        }
    }
}

/// What the router makes of its logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RouterScores {
    /// A distribution over all experts.
    #[default]
    Softmax,
    /// A number from 0 to 1 for each expert. (DeepSeek-AI: "DeepSeek-V3", 2024, section 2.1.2.)
    Sigmoid,
}

/// By what a group of experts is judged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupScore {
    /// The best of its experts.
    Best,
    /// The two best, together.
    BestTwo,
}

/// Experts in groups of neighbours, of which a token chooses a few before it chooses among their experts. (DeepSeek-AI:
/// "DeepSeek-V2", 2024, section 2.2.2.)
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertGroups {
    /// How many groups there are.
    pub groups: usize,
    /// How many of them a token's experts are in.
    pub chosen: usize,
    /// By what they are chosen.
    pub by: GroupScore,
}

/// A mixture in numbers.
#[derive(Debug, Clone, PartialEq)]
pub struct MoeConfig {
    /// Channels in and out.
    pub width: usize,
    /// How many experts there are.
    pub experts: usize,
    /// How many each token goes to.
    pub chosen: usize,
    /// A bound on the tokens of an expert; none are dropped where there is no bound.
    pub capacity: Option<Capacity>,
    /// Without a capacity: whether the weights of a token's choices are divided by their sum. (With one, DeepSpeed's rule
    /// holds: two choices are, one is not.)
    pub normalized: bool,
    /// Noise on the router.
    pub noise: Option<GateNoise>,
    /// Which choices the balancing loss counts.
    pub balanced_over: BalancedOver,
    /// Whether a bias on the scores, moved against each expert's load, balances without a loss.
    pub balancing_bias: bool,
    /// What the router makes of its logits. Without a capacity, as what follows.
    pub scores: RouterScores,
    /// Multiplies the weights of a token's choices.
    pub factor: f32,
    /// Groups among which tokens choose first.
    pub groups: Option<ExpertGroups>,
}

impl MoeConfig {
    /// No token is dropped; weights of the choices sum to one.
    pub fn dropless(width: usize, experts: usize, chosen: usize) -> MoeConfig {
        MoeConfig {
            width,
            experts,
            chosen,
            capacity: None,
            normalized: true,
            noise: None,
            balanced_over: BalancedOver::AllChoices,
            balancing_bias: false,
            scores: RouterScores::Softmax,
            factor: 1.0,
            groups: None,
        }
    }

    /// DeepSpeed's layer.
    pub fn with_capacity(width: usize, experts: usize, chosen: usize, capacity: Capacity) -> MoeConfig {
        MoeConfig {
            capacity: Some(capacity),
            balanced_over: BalancedOver::FirstChoice,
            ..MoeConfig::dropless(width, experts, chosen)
        }
    }

    pub(super) fn validate(&self) -> Result<()> {
        let refuse = |why: String| Err(TensorError::argument("moe", why));
        // Two choices among one expert are the same expert twice in DeepSpeed.
        let choosable = if self.capacity.is_some() { self.experts.max(2) } else { self.experts };
        if self.experts == 0 || self.chosen == 0 || self.chosen > choosable {
            return refuse(format!("a token cannot choose {} of {} experts", self.chosen, self.experts));
        }
        if let Some(ExpertGroups { groups, chosen, by }) = self.groups {
            let each =
                if groups > 0 && self.experts.is_multiple_of(groups) { self.experts / groups } else { 0 };
            let least = if by == GroupScore::BestTwo { 2 } else { 1 };
            if each < least || chosen == 0 || chosen > groups || chosen * each < self.chosen {
                return refuse(format!(
                    "{} of {} experts cannot be chosen from {chosen} of {groups} groups",
                    self.chosen, self.experts
                ));
            }
        }
        let Some(capacity) = &self.capacity else { return Ok(()) };
        if self.groups.is_some() || self.scores != RouterScores::Softmax || self.factor != 1.0 {
            return refuse("groups, sigmoid scores and a factor are for mixtures without a capacity".into());
        }
        for factor in [capacity.factor, capacity.evaluation_factor] {
            if !(factor.is_finite() && factor >= 0.0) {
                return refuse(format!("a capacity factor of {factor}; it is a number from 0 on"));
            }
        }
        if self.noise == Some(GateNoise::RSample) && self.chosen > 1 {
            return refuse(format!(
                "RSample samples the only choice, and here are {}: sample the second choice instead",
                self.chosen
            ));
        }
        if self.balancing_bias {
            return refuse("a balancing bias is for mixtures without a capacity".into());
        }
        Ok(())
    }
}
