//! The router: scores of all experts in f32, and the choice among them.
//!
//! Without a capacity everything stays on the device. With one the host reads the scores, as the rule about who keeps a place
//! is one of order and not of arithmetic.

use std::sync::{Arc, Mutex, PoisonError};

use ferrospeed_tensor::ops::{self, Routes};
use ferrospeed_tensor::{DType, Operand, Param, Result, Tensor, TensorError, random};

use super::capacity::{self, Limit};
use super::config::{BalancedOver, Capacity, ExpertGroups, GateNoise, GroupScore, MoeConfig, RouterScores};
use super::statistics::Routing;
use crate::Mode;
use crate::init::{Init, LayerState};
use crate::linear::Linear;

/// Half the width of the jitter around 1.
const JITTER: f32 = 0.01;

/// Random numbers of one forward, where they are wanted.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GateDraws {
    /// Factors of the router's input, `[tokens · width]`.
    pub jitter: Option<Vec<f32>>,
    /// Gumbel noise on the logits of sampled choices, `[tokens · experts]`.
    pub gumbel: Option<Vec<f32>>,
    /// Which tokens an overfull expert prefers, `[tokens · experts]`.
    pub priority: Option<Vec<f32>>,
}

/// Moves each expert's chance to be chosen against its load, and not its weight. (Wang et al.: "Auxiliary-loss-free load
/// balancing strategy for mixture-of-experts", 2024.) It is a [`LayerState`], so checkpoints hold it.
#[derive(Debug)]
pub struct BalancingBias {
    values: Mutex<Vec<f32>>,
}

impl LayerState for BalancingBias {
    fn values(&self) -> Vec<f32> {
        self.values.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, values: &[f32]) -> Result<()> {
        let mut own = self.values.lock().unwrap_or_else(PoisonError::into_inner);
        if own.len() != values.len() || values.iter().any(|value| !value.is_finite()) {
            let why = format!("{} numbers cannot be the bias of {} experts", values.len(), own.len());
            return Err(TensorError::argument("moe", why));
        }
        own.copy_from_slice(values);
        Ok(())
    }
}

impl BalancingBias {
    /// Moves it by `rate` towards experts that had fewer tokens than the mean. `tokens_per_expert` is of a whole step, over
    /// all ranks, so that they stay alike.
    pub fn update(&self, tokens_per_expert: &[u64], rate: f32) {
        let mut own = self.values.lock().unwrap_or_else(PoisonError::into_inner);
        let mean = tokens_per_expert.iter().sum::<u64>() as f64 / tokens_per_expert.len().max(1) as f64;
        for (value, &tokens) in own.iter_mut().zip(tokens_per_expert) {
            let missing = mean - tokens as f64;
            *value += if missing == 0.0 { 0.0 } else { rate * missing.signum() as f32 };
        }
    }
}

/// The router.
pub(super) struct Gate {
    config: MoeConfig,
    router: Linear,
    bias: Option<Arc<BalancingBias>>,
    /// `[experts]`: what a model's files add to the scores by which experts are chosen.
    choice_bias: Option<Param>,
}

/// What the router chose.
pub(super) struct Choice {
    /// `[tokens, chosen]`, the number of experts where a choice was dropped.
    pub(super) experts: Tensor,
    /// `[tokens, chosen]` in f32.
    pub(super) weights: Tensor,
    pub(super) logits: Tensor,
    pub(super) probabilities: Tensor,
    /// Per expert, where it is not what [`Routes`] counts: the choices before dropping.
    chosen: Option<Tensor>,
    /// The same: those of the balancing loss.
    pub(super) balanced: Option<Tensor>,
    capacity: Option<usize>,
}

impl Gate {
    /// Of the layer that is made at `init`.
    pub(super) fn new(init: &Init, config: MoeConfig, router: Linear) -> Gate {
        let zeros = || Arc::new(BalancingBias { values: Mutex::new(vec![0.0; config.experts]) });
        let bias = config.balancing_bias.then(zeros);
        if let Some(bias) = &bias {
            init.state("balancing_bias", bias.clone());
        }
        Gate { config, router, bias, choice_bias: None }
    }

    /// The same whose choices, but not their weights, see scores with this added.
    pub(super) fn with_choice_bias(self, choice_bias: Option<Param>) -> Gate {
        Gate { choice_bias, ..self }
    }

    pub(super) fn config(&self) -> &MoeConfig {
        &self.config
    }

    pub(super) fn bias(&self) -> Option<&BalancingBias> {
        self.bias.as_deref()
    }

    /// The random numbers of a forward over so many tokens. Evaluation draws none, so that it can be repeated.
    pub(super) fn draws(&self, tokens: usize, mode: Mode) -> GateDraws {
        if mode == Mode::Evaluate {
            return GateDraws::default();
        }
        let (experts, is_one) = (self.config.experts, self.config.chosen == 1);
        let capacity = self.config.capacity.as_ref();
        let uniform = |count: usize, map: fn(f32) -> f32| {
            let key = random::next_key();
            (0..count as u64).map(|position| map(key.uniform(position))).collect::<Vec<f32>>()
        };
        // 1 - u lies in (0, 1], and only the largest f32 below 1 keeps both logarithms finite.
        let gumbel = |u: f32| -(-(1.0 - u).clamp(f32::MIN_POSITIVE, 1.0 - f32::EPSILON / 2.0).ln()).ln();
        let samples = self.config.noise == Some(GateNoise::RSample)
            || capacity.is_some_and(|capacity| !is_one && capacity.samples_second);
        let prefers = is_one && capacity.is_some_and(|capacity| capacity.random_selection);
        let jitters = self.config.noise == Some(GateNoise::Jitter);
        GateDraws {
            jitter: jitters.then(|| uniform(tokens * self.config.width, |u| 1.0 - JITTER + 2.0 * JITTER * u)),
            gumbel: samples.then(|| uniform(tokens * experts, gumbel)),
            priority: prefers.then(|| uniform(tokens * experts, |u| u)),
        }
    }

    /// Chooses for each row of `x [tokens, width]`.
    pub(super) fn choose(
        &self,
        x: &Tensor,
        mode: Mode,
        used: Option<&[bool]>,
        draws: &GateDraws,
    ) -> Result<Choice> {
        let (tokens, experts) = (x.sizes()[0], self.config.experts);
        check_draws(draws, used, tokens, self.config.width, experts)?;
        let mut seen = ops::cast_of_kept(x, DType::F32)?;
        if let Some(jitter) = &draws.jitter {
            seen = ops::mul(&seen, &Tensor::from_slice(jitter, *x.shape(), x.device())?)?;
        }
        let (weight, bias) = self.router.operands();
        let wide = |operand: Operand| Ok::<_, TensorError>(Operand::from(ops::cast(operand, DType::F32)?));
        let seen = self.router.input(&seen)?;
        let logits = ops::linear(&seen, wide(weight)?, bias.map(wide).transpose()?, self.router.layout())?;
        let probabilities = match self.config.scores {
            RouterScores::Softmax => ops::softmax(&logits)?,
            RouterScores::Sigmoid => ops::sigmoid(&logits)?,
        };
        match &self.config.capacity {
            Some(capacity) => self.bounded(logits, probabilities, capacity, mode, used, draws),
            None => self.unbounded(logits, probabilities, used, draws),
        }
    }

    fn unbounded(
        &self,
        logits: Tensor,
        probabilities: Tensor,
        used: Option<&[bool]>,
        draws: &GateDraws,
    ) -> Result<Choice> {
        let (tokens, count, device) = (logits.sizes()[0], self.config.experts, logits.device().clone());
        let mut scores = probabilities.detach();
        if let Some(gumbel) = &draws.gumbel {
            let noise = Tensor::from_slice(gumbel, [tokens, count], &device)?;
            scores = ops::add(logits.detach(), &noise)?;
        }
        if let Some(bias) = &self.bias {
            scores = ops::add(&scores, &Tensor::from_slice(&bias.values(), [count], &device)?)?;
        }
        if let Some(bias) = &self.choice_bias {
            scores = ops::add(&scores, &ops::cast(bias, DType::F32)?)?.detach();
        }
        if let Some(groups) = self.config.groups {
            scores = within_groups(&scores, groups)?;
        }
        let (_, mut experts) = ops::top_k(&scores, self.config.chosen)?;
        let mut weights = ops::gather(&probabilities, &experts)?;
        if self.config.normalized {
            let total = ops::reshape(&ops::sum_dim(&weights, 1)?, [tokens, 1])?;
            weights = ops::div(&weights, &total)?;
        }
        if self.config.factor != 1.0 {
            weights = ops::affine(&weights, self.config.factor, 0.0)?;
        }
        if let Some(used) = used {
            // Only a mask on the host brings the choices there.
            let mut ids = experts.to_vec::<i64>()?;
            for (mine, _) in ids.chunks_mut(self.config.chosen).zip(used).filter(|(_, used)| !**used) {
                mine.fill(count as i64);
            }
            experts = Tensor::from_slice(&ids, [tokens, self.config.chosen], &device)?;
        }
        let balanced = match self.config.balanced_over {
            BalancedOver::AllChoices => None,
            BalancedOver::FirstChoice => {
                Some(Routes::new(&ops::narrow(&experts, 1, 0, 1)?, count)?.counts().clone())
            }
        };
        Ok(Choice { experts, weights, logits, probabilities, chosen: None, balanced, capacity: None })
    }

    fn bounded(
        &self,
        logits: Tensor,
        probabilities: Tensor,
        capacity: &Capacity,
        mode: Mode,
        used: Option<&[bool]>,
        draws: &GateDraws,
    ) -> Result<Choice> {
        let (tokens, count, chosen) = (logits.sizes()[0], self.config.experts, self.config.chosen);
        let factor = if mode == Mode::Train { capacity.factor } else { capacity.evaluation_factor };
        let limit = Limit { factor, min: capacity.min, drops: capacity.drops };
        let noisy = |values: Vec<f32>| match &draws.gumbel {
            Some(gumbel) => values.iter().zip(gumbel).map(|(value, noise)| value + noise).collect(),
            None => values,
        };
        let gates = probabilities.to_vec_f32()?;
        let assignment = if chosen == 1 {
            let scores = if draws.gumbel.is_some() { noisy(logits.to_vec_f32()?) } else { gates };
            capacity::top1(&scores, count, used, draws.priority.as_deref(), limit)
                .map_err(|why| TensorError::argument("moe", why))?
        } else {
            capacity::top_k(&gates, &noisy(logits.to_vec_f32()?), count, chosen, limit)
        };
        let device = logits.device();
        let slots = || assignment.experts.iter().zip(&assignment.places);
        let routed: Vec<i64> =
            slots().map(|(&expert, place)| if place.is_some() { expert } else { count } as i64).collect();
        let picked: Vec<i64> =
            assignment.experts.iter().map(|&expert| expert.min(count - 1) as i64).collect();
        let kept: Vec<f32> = slots().map(|(_, place)| if place.is_some() { 1.0 } else { 0.0 }).collect();
        let numbers = |values: &[i64]| Tensor::from_slice(values, [tokens, chosen], device);
        let mut weights = ops::mul(
            &ops::gather(&probabilities, &numbers(&picked)?)?,
            &Tensor::from_slice(&kept, [tokens, chosen], device)?,
        )?;
        if chosen > 1 {
            let total = ops::reshape(&ops::sum_dim(&weights, 1)?, [tokens, 1])?;
            weights = ops::div(&weights, &ops::maximum(&total, &Tensor::scalar(f32::EPSILON, device)?)?)?;
        }
        let mut firsts = vec![0i64; count];
        let first_of = assignment.experts.iter().step_by(chosen).filter(|&&expert| expert < count);
        first_of.for_each(|&expert| firsts[expert] += 1);
        let all: Vec<i64> = assignment.counts.iter().map(|&count| count as i64).collect();
        let balanced = match self.config.balanced_over {
            BalancedOver::FirstChoice => firsts,
            BalancedOver::AllChoices => all.clone(),
        };
        let on_device = |counts: Vec<i64>| Tensor::from_slice(&counts, [count], device);
        Ok(Choice {
            experts: numbers(&routed)?,
            weights,
            chosen: Some(on_device(all)?),
            balanced: Some(on_device(balanced)?),
            capacity: Some(assignment.capacity),
            logits: logits.clone(),
            probabilities,
        })
    }
}

/// Scores `[tokens, experts]` of which those of groups that a token does not choose are too small to be chosen.
fn within_groups(scores: &Tensor, ExpertGroups { groups, chosen, by }: ExpertGroups) -> Result<Tensor> {
    let (tokens, each) = (scores.sizes()[0], scores.sizes()[1] / groups);
    let apart = ops::reshape(scores, [tokens * groups, each])?;
    let best = ops::top_k(&apart, if by == GroupScore::BestTwo { 2 } else { 1 })?.0;
    let of_groups = ops::reshape(&ops::sum_dim(&best, 1)?, [tokens, groups])?;
    let (_, chosen) = ops::top_k(&of_groups, chosen)?;
    let marked = ops::sum_dim(&ops::one_hot(&chosen, groups, DType::F32)?, 1)?;
    // One or zero, so this is nothing or out of reach.
    let out_of_reach = ops::reshape(&ops::affine(&marked, 1e30, -1e30)?, [tokens, groups, 1])?;
    let kept = ops::add(&ops::reshape(scores, [tokens, groups, each])?, &out_of_reach)?;
    ops::reshape(&kept, [tokens, groups * each])
}

impl Choice {
    /// Who was sent where.
    pub(super) fn routing(&self, routes: &Routes) -> Routing {
        let kept = routes.counts();
        Routing {
            chosen: self.chosen.clone().unwrap_or_else(|| kept.clone()),
            kept: kept.clone(),
            probabilities: self.probabilities.detach(),
            capacity: self.capacity,
        }
    }
}

fn check_draws(
    draws: &GateDraws,
    used: Option<&[bool]>,
    tokens: usize,
    width: usize,
    experts: usize,
) -> Result<()> {
    let sizes = [
        ("jitter", draws.jitter.as_ref().map(Vec::len), tokens * width),
        ("Gumbel noise", draws.gumbel.as_ref().map(Vec::len), tokens * experts),
        ("priorities", draws.priority.as_ref().map(Vec::len), tokens * experts),
        ("used tokens", used.map(<[bool]>::len), tokens),
    ];
    match sizes.iter().find(|(_, found, wanted)| found.is_some_and(|found| found != *wanted)) {
        Some((what, Some(found), wanted)) => {
            Err(TensorError::argument("moe", format!("{what}: {found} numbers where {wanted} are wanted")))
        }
        _ => Ok(()),
    }
}
