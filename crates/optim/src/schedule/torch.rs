//! The formulas of the framework's schedules, each in its closed form.
//!
//! The framework counts the calls of `step`; that is our iteration plus one. Where it computes a rate from the one before, the
//! closed form has the same value and can be asked for any iteration.

use std::f64::consts::PI;

use ferrospeed_config::{Anneal, CyclicLr, CyclicMode, OneCycleLr, TorchSchedule};

use super::rules::of_group;
use super::{Rates, Schedule};
use crate::GroupOptions;

impl Schedule for TorchSchedule {
    fn rates(&self, iteration: i64, group: usize, base: &GroupOptions) -> Rates {
        let count = iteration.saturating_add(1).max(0) as u64;
        let share = |total: u64| count.min(total) as f64 / total as f64;
        let factor = |factor: f64| Rates::lr(base.lr * factor);
        match self {
            TorchSchedule::Step(step) => factor(power(step.gamma, count / step.step_size)),
            TorchSchedule::MultiStep(steps) => {
                let passed = steps.milestones.iter().filter(|milestone| **milestone <= count).count();
                factor(power(steps.gamma, passed as u64))
            }
            TorchSchedule::Constant(constant) => {
                factor(if count < constant.total_iters { constant.factor } else { 1.0 })
            }
            TorchSchedule::Linear(linear) => {
                let rise = linear.end_factor - linear.start_factor;
                factor(linear.start_factor + rise * share(linear.total_iters))
            }
            TorchSchedule::Exponential(exponential) => factor(power(exponential.gamma, count)),
            TorchSchedule::Polynomial(polynomial) => {
                factor((1.0 - share(polynomial.total_iters)).powf(polynomial.power))
            }
            TorchSchedule::CosineAnnealing(cosine) => {
                let angle = PI * count as f64 / cosine.T_max as f64;
                Rates::lr(cosine.eta_min + (base.lr - cosine.eta_min) * (1.0 + angle.cos()) / 2.0)
            }
            TorchSchedule::WarmRestarts(restarts) => {
                let (mut since, mut length) = (count, restarts.T_0);
                if restarts.T_mult == 1 {
                    since %= length;
                }
                while since >= length {
                    since -= length;
                    length = length.saturating_mul(restarts.T_mult);
                }
                let angle = PI * since as f64 / length as f64;
                Rates::lr(restarts.eta_min + (base.lr - restarts.eta_min) * (1.0 + angle.cos()) / 2.0)
            }
            TorchSchedule::Cyclic(cyclic) => cycle(cyclic, count, group),
            TorchSchedule::OneCycle(one) => one_cycle(one, count, group),
            // The scheduler has the rates, which depend on more than the iteration.
            TorchSchedule::Plateau(_) => factor(1.0),
        }
    }
}

fn power(base: f64, exponent: u64) -> f64 {
    base.powf(exponent as f64)
}

/// Smith, "Cyclical learning rates for training neural networks", 2017.
fn cycle(cyclic: &CyclicLr, count: u64, group: usize) -> Rates {
    let up = cyclic.step_size_up as f64;
    let total = up + cyclic.step_size_down.unwrap_or(cyclic.step_size_up) as f64;
    let number = (1.0 + count as f64 / total).floor();
    let position = 1.0 + count as f64 / total - number;
    let rise = up / total;
    let height = if position <= rise { position / rise } else { (position - 1.0) / (rise - 1.0) };
    let scale = match cyclic.mode {
        CyclicMode::Triangular => 1.0,
        CyclicMode::Triangular2 => 0.5f64.powf(number - 1.0),
        CyclicMode::ExpRange => power(cyclic.gamma, count),
    };
    let (low, high) = (of_group(&cyclic.base_lr, group), of_group(&cyclic.max_lr, group));
    let (least, most) = (of_group(&cyclic.base_momentum, group), of_group(&cyclic.max_momentum, group));
    Rates {
        lr: low + (high - low) * height * scale,
        momentum: cyclic.cycle_momentum.then_some(most - (most - least) * height * scale),
    }
}

/// Smith, Topin, "Super-convergence", 2018. After the last step the rates stay.
fn one_cycle(one: &OneCycleLr, count: u64, group: usize) -> Rates {
    let total = one.steps() as f64;
    let highest = of_group(&one.max_lr, group);
    let first = highest / one.div_factor;
    let last = first / one.final_div_factor;
    let (least, most) = (of_group(&one.base_momentum, group), of_group(&one.max_momentum, group));
    let risen = one.pct_start * total;
    // (last step, rate from, to, momentum from, to)
    let phases = if one.three_phase {
        vec![
            (risen - 1.0, first, highest, most, least),
            (2.0 * risen - 2.0, highest, first, least, most),
            (total - 1.0, first, last, most, most),
        ]
    } else {
        vec![(risen - 1.0, first, highest, most, least), (total - 1.0, highest, last, least, most)]
    };
    let step = (count as f64).min(total - 1.0);
    let mut start = 0.0;
    let mut rates = Rates { lr: last, momentum: Some(most) };
    for (index, &(end, lr_from, lr_to, from, to)) in phases.iter().enumerate() {
        if step <= end || index + 1 == phases.len() {
            let share = (step - start) / (end - start);
            let at = |from: f64, to: f64| match one.anneal_strategy {
                Anneal::Linear => from + (to - from) * share,
                Anneal::Cos => to + (from - to) / 2.0 * (1.0 + (PI * share).cos()),
            };
            rates = Rates { lr: at(lr_from, lr_to), momentum: Some(at(from, to)) };
            break;
        }
        start = end;
    }
    Rates { momentum: rates.momentum.filter(|_| one.cycle_momentum), ..rates }
}
