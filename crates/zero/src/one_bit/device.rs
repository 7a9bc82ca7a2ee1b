//! The step on a device: each pass is one launch over all parameters of a group, and all tensors go in one exchange.
//!
//! What ranks average is written to memory beside the parameters, goes as signs from there, and comes back there. The Adams
//! never wait for the device; 1-bit LAMB waits once per step, for norms of whole parameters.

use std::collections::BTreeMap;

use ferrospeed_collective::one_bit::device::{self as one_bit, DeviceAveraged, DeviceFeedback};
use ferrospeed_collective::one_bit::{Feedback, padded_numel};
use ferrospeed_comm::Group;
use ferrospeed_optim::adam::Adam;
use ferrospeed_optim::one_bit::{OneBit, OneBitLamb, Phase, Ratio};
use ferrospeed_optim::{GroupOptions, Optimizer};
use ferrospeed_tensor::backend::{OneBitOperands, OneBitPace, OneBitPass, UpdateOperands, with_category};
use ferrospeed_tensor::{Category, DType, Device, Tensor};

use super::Tensors;
use super::own::Held;
use crate::error::Result;
use crate::memory::part;
use crate::store::Share;

/// What a rule remembers on a device, and what this rank has lost there.
pub(super) struct OnDevice {
    group: Group,
    device: Device,
    feedbacks: BTreeMap<usize, DeviceFeedback>,
    /// 0/1 Adam: how far parameters have gone since ranks last met, end to end, and the sums of rates since then.
    ways: Option<Tensor>,
    rates: Vec<f64>,
    /// 1-bit LAMB: the ratios of each parameter, and the momenta of all, end to end and padded.
    pub(super) ratios: Vec<Ratio>,
    fused: Option<Tensor>,
}

/// What passes do to parameters of one group each.
type Passes = Vec<(OneBitPass, Vec<OneBitOperands>)>;

/// The parameters of a step.
struct Params<'a> {
    tensors: &'a [Tensors],
    shares: &'a [Share],
    factor: f32,
    device: &'a Device,
}

impl Params<'_> {
    fn options(&self, own: &Tensors) -> &GroupOptions {
        &self.shares[own.share].options
    }

    fn numel(&self) -> usize {
        self.tensors.iter().map(|own| own.weights.numel()).sum()
    }

    /// What of a flat tensor belongs to each parameter.
    fn places(&self, flat: &Tensor) -> Result<Vec<Tensor>> {
        let mut start = 0;
        let place = |own: &Tensors| {
            let place = part(flat, start, own.weights.numel())?;
            start += own.weights.numel();
            Ok(place)
        };
        self.tensors.iter().map(place).collect()
    }

    /// Memory for what ranks average of each parameter.
    fn values(&self) -> Result<Vec<Tensor>> {
        self.places(&Tensor::empty_in([self.numel()], DType::F32, self.device, Category::Buffers)?)
    }

    /// A pass of each group over what `piece` gives of its parameters, which are numbered through.
    fn passes(
        &self,
        pass: impl Fn(&GroupOptions) -> OneBitPass,
        piece: impl Fn(usize, OneBitOperands) -> Option<OneBitOperands>,
    ) -> Passes {
        let (mut passes, mut last) = (Passes::new(), None);
        for (index, own) in self.tensors.iter().enumerate() {
            let Some(piece) = piece(index, operands(own)) else { continue };
            if last != Some(own.share) {
                passes.push((pass(self.options(own)), Vec::new()));
                last = Some(own.share);
            }
            passes.last_mut().expect("there is one").1.push(piece);
        }
        passes
    }

    fn run(&self, passes: &Passes) -> Result<()> {
        Ok(self.device.backend().one_bit(self.factor, passes)?)
    }

    /// What passes measure, by parameter.
    fn measure(&self, passes: &Passes) -> Result<Vec<[f64; 3]>> {
        Ok(self.device.backend().one_bit_measured(self.factor, passes)?)
    }

    /// Adam with averaged gradients, of which no moment is corrected.
    fn plain(&self, eps: f64) -> Result<()> {
        let adam = Optimizer::Adam(Adam { eps, bias_correction: false, decoupled: true });
        for of_group in self.tensors.chunk_by(|a, b| a.share == b.share) {
            let update = adam.update(self.options(&of_group[0]), 1);
            let pieces: Vec<UpdateOperands> = of_group.iter().map(update_operands).collect();
            self.device.backend().update(&update, self.factor, &pieces)?;
        }
        Ok(())
    }

    /// Writes momenta with their gradients blended in, times a number of each, where ranks average them.
    fn give_momenta(&self, values: &[Tensor], number: impl Fn(usize) -> f32) -> Result<()> {
        self.give(values, |options| blended(options.betas[0]), number)
    }

    fn give(
        &self,
        values: &[Tensor],
        blend: impl Fn(&GroupOptions) -> (f32, f32),
        number: impl Fn(usize) -> f32,
    ) -> Result<()> {
        let pass = |options: &GroupOptions| {
            let (beta, rest) = blend(options);
            OneBitPass::GiveMomentum { beta, rest }
        };
        self.run(&self.passes(pass, |at, piece| {
            Some(OneBitOperands { values: Some(values[at].clone()), number: number(at), ..piece })
        }))
    }

    /// Takes averages into momenta, which weights follow.
    fn take(&self, values: &[Tensor], eps: f64, blend: impl Fn(&GroupOptions) -> (f32, f32)) -> Result<()> {
        let pass = |options: &GroupOptions| {
            let (beta, rest) = blend(options);
            OneBitPass::Take { beta, rest, pace: pace(options, eps) }
        };
        self.run(
            &self
                .passes(pass, |at, piece| Some(OneBitOperands { values: Some(values[at].clone()), ..piece })),
        )
    }
}

fn operands(own: &Tensors) -> OneBitOperands {
    OneBitOperands {
        weights: own.weights.clone(),
        gradient: Some(own.gradient.clone()),
        states: own.states.clone(),
        values: None,
        copy: own.copy.clone(),
        number: 1.0,
    }
}

fn update_operands(own: &Tensors) -> UpdateOperands {
    UpdateOperands {
        weights: own.weights.clone(),
        gradient: own.gradient.clone(),
        states: own.states.clone(),
        copy: own.copy.clone(),
    }
}

fn pace(options: &GroupOptions, eps: f64) -> OneBitPace {
    OneBitPace { lr: options.lr as f32, decay: options.weight_decay as f32, eps: eps as f32 }
}

/// What of an average stays, and what enters it.
fn blended(beta: f64) -> (f32, f32) {
    (beta as f32, (1.0 - beta) as f32)
}

/// Nothing stays.
fn replaced(_: &GroupOptions) -> (f32, f32) {
    (0.0, 1.0)
}

impl OnDevice {
    pub(super) fn new(group: &Group, device: &Device) -> OnDevice {
        OnDevice {
            group: group.clone(),
            device: device.clone(),
            feedbacks: BTreeMap::new(),
            ways: None,
            rates: Vec::new(),
            ratios: Vec::new(),
            fused: None,
        }
    }

    pub(super) fn begun_anew(&self) -> OnDevice {
        OnDevice::new(&self.group, &self.device)
    }

    pub(super) fn step(
        &mut self,
        rule: &OneBit,
        tensors: &[Tensors],
        shares: &[Share],
        step: u64,
        factor: f32,
    ) -> Result<()> {
        let device = self.device.clone();
        let params = Params { tensors, shares, factor, device: &device };
        match (rule, rule.phase(step)) {
            (OneBit::Lamb(lamb), Phase::Averaged { freezes }) => self.plain_lamb(lamb, &params, freezes),
            (OneBit::Lamb(lamb), _) => self.compressed_lamb(lamb, &params),
            (OneBit::Adam(rule), Phase::Averaged { .. }) => params.plain(rule.eps),
            (OneBit::ZeroOne(rule), Phase::Averaged { .. }) => params.plain(rule.eps),
            (OneBit::Adam(rule), _) => {
                let values = params.values()?;
                params.give_momenta(&values, |_| 1.0)?;
                self.average(values.iter().enumerate())?;
                params.take(&values, rule.eps, replaced)
            }
            (OneBit::ZeroOne(rule), Phase::Way { begins, meets }) => {
                if begins {
                    self.feedbacks.clear();
                }
                self.walk(&params, rule.eps, meets)
            }
            (OneBit::ZeroOne(rule), _) => {
                let values = params.values()?;
                params.give(&values, replaced, |_| 1.0)?;
                self.average(values.iter().enumerate())?;
                params.take(&values, rule.eps, |options| blended(options.betas[0]))
            }
        }
    }

    /// Makes values the average over ranks; one without peers keeps its own.
    fn average<'a>(&mut self, values: impl Iterator<Item = (usize, &'a Tensor)>) -> Result<()> {
        let ranks = self.group.size();
        if ranks == 1 {
            return Ok(());
        }
        let values: Vec<(usize, &Tensor)> = values.collect();
        for (at, values) in &values {
            if !self.feedbacks.contains_key(at) {
                self.feedbacks.insert(*at, DeviceFeedback::new(values.numel(), ranks, &self.device)?);
            }
        }
        let averaged =
            |&(at, values): &(usize, &'a Tensor)| DeviceAveraged { values, feedback: &self.feedbacks[&at] };
        let averaged: Vec<DeviceAveraged<'_>> = values.iter().map(averaged).collect();
        Ok(one_bit::all_reduce_each(&self.group, &self.device, &averaged)?)
    }

    /// A step of 0/1 Adam on this rank's own way, at the end of which ranks may meet.
    fn walk(&mut self, params: &Params<'_>, eps: f64, meets: bool) -> Result<()> {
        let numel = params.numel();
        let ways = match self.ways.clone().filter(|ways| ways.numel() == numel) {
            Some(ways) if self.rates.len() == params.tensors.len() => ways,
            _ => {
                self.rates = vec![0.0; params.tensors.len()];
                Tensor::zeros_in([numel], DType::F32, params.device, Category::Optimizer)?
            }
        };
        self.ways = Some(ways.clone());
        let ways = params.places(&ways)?;
        let with_way = |at: usize, mut piece: OneBitOperands| {
            piece.states.push(ways[at].clone());
            piece
        };
        let travel = |options: &GroupOptions| {
            let (beta, rest) = blended(options.betas[0]);
            OneBitPass::Travel { beta, rest, pace: pace(options, eps) }
        };
        params.run(&params.passes(travel, |at, piece| Some(with_way(at, piece))))?;
        let rates = self.rates.iter_mut().zip(params.tensors);
        rates.for_each(|(rate, own)| *rate += params.options(own).lr);
        if !meets {
            return Ok(());
        }
        // Without a rate nobody went anywhere.
        let rates: Vec<f64> = self.rates.iter_mut().map(std::mem::take).collect();
        let (values, eps) = (params.values()?, eps as f32);
        let meeting = |at: usize, piece: OneBitOperands| {
            (rates[at] > 0.0).then(|| OneBitOperands {
                values: Some(values[at].clone()),
                number: rates[at] as f32,
                ..with_way(at, piece)
            })
        };
        params.run(&params.passes(|_| OneBitPass::GoBack { eps }, meeting))?;
        self.average(values.iter().enumerate().filter(|(at, _)| rates[*at] > 0.0))?;
        params.run(&params.passes(|_| OneBitPass::Arrive { eps }, meeting))
    }

    /// A step of LAMB, without bias correction.
    fn plain_lamb(&mut self, lamb: &OneBitLamb, params: &Params<'_>, freezes: bool) -> Result<()> {
        self.ratios.resize(params.tensors.len(), Ratio::default());
        let values = params.values()?;
        let direct = |options: &GroupOptions| {
            let (betas, rest, eps, decay) = lamb_numbers(lamb, options);
            OneBitPass::Direct { betas, rest, eps, decay }
        };
        let measures = params.measure(&params.passes(direct, |at, mut piece| {
            // The second moment that goes on begins as the one that stays.
            piece.states.truncate(if freezes { 3 } else { 2 });
            Some(OneBitOperands { values: Some(values[at].clone()), ..piece })
        }))?;
        let mut step_sizes = Vec::with_capacity(measures.len());
        for ((own, ratio), [weights, update, _]) in params.tensors.iter().zip(&mut self.ratios).zip(measures)
        {
            let trust = lamb.trust(ratio, weights.sqrt(), update.sqrt());
            step_sizes.push((params.options(own).lr * trust) as f32);
        }
        follow(params, &values, &step_sizes)
    }

    /// A step after the freeze: momenta are averaged as one tensor.
    fn compressed_lamb(&mut self, lamb: &OneBitLamb, params: &Params<'_>) -> Result<()> {
        self.ratios.resize(params.tensors.len(), Ratio::default());
        if self.ratios.iter().all(|ratio| ratio.scale == 0.0) {
            let measures = params.measure(&params.passes(|_| OneBitPass::Sizes, |_, piece| Some(piece)))?;
            let size = |([squares, ..], own): (&[f64; 3], &Tensors)| {
                squares.sqrt() / (own.weights.numel().max(1) as f64).sqrt()
            };
            let sizes: Vec<f64> = measures.iter().zip(params.tensors).map(size).collect();
            OneBitLamb::set_scales(&mut self.ratios, &sizes);
        }
        // What lies beyond the last momentum stays from step to step, as DeepSpeed has it.
        let padded = padded_numel(params.numel(), self.group.size());
        let fused = match self.fused.clone().filter(|fused| fused.numel() == padded) {
            Some(fused) => fused,
            None => Tensor::zeros_in([padded], DType::F32, params.device, Category::Optimizer)?,
        };
        self.fused = Some(fused.clone());
        let values = params.places(&fused)?;
        let scales: Vec<f32> = self.ratios.iter().map(|ratio| ratio.scale as f32).collect();
        params.give_momenta(&values, |at| scales[at])?;
        self.average(std::iter::once((0, &fused)))?;
        let correct = |options: &GroupOptions| {
            let (betas, rest, eps, decay) = lamb_numbers(lamb, options);
            OneBitPass::Correct { betas, rest, eps, decay }
        };
        let measures = params.measure(&params.passes(correct, |at, piece| {
            Some(OneBitOperands { values: Some(values[at].clone()), number: scales[at], ..piece })
        }))?;
        let mut step_sizes = Vec::with_capacity(measures.len());
        for ((own, ratio), [momentum, all, drift]) in
            params.tensors.iter().zip(&mut self.ratios).zip(measures)
        {
            let options = params.options(own);
            lamb.correct(ratio, drift, options.weight_decay > 0.0, momentum.sqrt(), all.sqrt());
            step_sizes.push((options.lr * ratio.frozen * ratio.factor) as f32);
        }
        follow(params, &values, &step_sizes)
    }

    pub(super) fn held(&self, numels: &[usize]) -> Result<Held> {
        let lost = self.feedbacks.iter().map(|(at, feedback)| Ok((*at, feedback.to_host()?.numbers())));
        let total = numels.iter().sum();
        let beyond = match &self.fused {
            Some(fused) if fused.numel() > total => part(fused, total, fused.numel() - total)?.to_vec()?,
            _ => Vec::new(),
        };
        let ways = match self.ways.as_ref().filter(|_| !self.rates.is_empty()) {
            Some(ways) => {
                let all = ways.to_vec::<f32>()?;
                let mut rest = &all[..];
                let ways = numels.iter().map(|&numel| rest.split_off(..numel).unwrap_or_default().to_vec());
                Some((ways.collect(), self.rates.clone()))
            }
            None => None,
        };
        Ok(Held { lost: lost.collect::<Result<_>>()?, beyond, ways })
    }

    pub(super) fn set_lost(&mut self, at: usize, feedback: &Feedback) -> Result<()> {
        self.feedbacks.insert(at, DeviceFeedback::of(feedback, &self.device)?);
        Ok(())
    }

    pub(super) fn set_beyond(&mut self, numel: usize, beyond: &[f32]) -> Result<()> {
        let fused = [&vec![0.0; numel][..], beyond].concat();
        self.fused = Some(self.kept(&fused)?);
        Ok(())
    }

    pub(super) fn set_ways(&mut self, ways: &[Vec<f32>], rates: Vec<f64>) -> Result<()> {
        self.ways = Some(self.kept(&ways.concat())?);
        self.rates = rates;
        Ok(())
    }

    /// Numbers of the host on the device, to stay there.
    fn kept(&self, numbers: &[f32]) -> Result<Tensor> {
        let copied = || Tensor::from_slice(numbers, [numbers.len()], &self.device);
        Ok(with_category(Category::Optimizer, copied)?)
    }
}

/// Both decay rates, one less them, what is added to the denominator, and the weight decay.
fn lamb_numbers(lamb: &OneBitLamb, options: &GroupOptions) -> ([f32; 2], [f32; 2], f32, f32) {
    let [first, second] = options.betas.map(blended);
    ([first.0, second.0], [first.1, second.1], lamb.eps as f32, options.weight_decay as f32)
}

/// Weights follow their directions, each parameter by its own step.
fn follow(params: &Params<'_>, values: &[Tensor], step_sizes: &[f32]) -> Result<()> {
    params.run(&params.passes(
        |_| OneBitPass::Follow,
        |at, piece| {
            Some(OneBitOperands { values: Some(values[at].clone()), number: step_sizes[at], ..piece })
        },
    ))
}
