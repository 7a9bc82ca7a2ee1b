//! Optimizers and schedules of the tensor framework, which DeepSpeed takes by their names there.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::{PerGroup, Reader};

/// An optimizer of the framework, or one of ours with an option that only the framework's has.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Torch {
    /// Learning rate.
    pub lr: f64,
    /// Weight decay.
    pub weight_decay: f64,
    /// Decay of the two moments; for SGD and RMSprop, the momentum first.
    pub betas: [f64; 2],
    /// Climb instead of descend.
    pub maximize: bool,
    /// What it does.
    pub rule: TorchRule,
}

/// The update rules of the framework's optimizers with their fixed options.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum TorchRule {
    /// Adam and AdamW.
    Adam {
        /// Added to the denominator.
        eps: f64,
        /// Decay weights directly.
        decoupled: bool,
        /// Divide by the largest second moment so far.
        amsgrad: bool,
        /// Correct the moments for their start at zero.
        bias_correction: bool,
    },
    /// Gradient descent.
    Sgd {
        /// Weakens the gradient that enters the momentum.
        dampening: f64,
        /// Look one step ahead.
        nesterov: bool,
    },
    /// Adagrad.
    Adagrad {
        /// Decay of the learning rate.
        lr_decay: f64,
        /// What the sum starts with.
        initial_accumulator_value: f64,
        /// Added to the denominator.
        eps: f64,
    },
    /// RMSprop.
    RmsProp {
        /// Decay of the squares.
        alpha: f64,
        /// Added to the denominator.
        eps: f64,
        /// Divide by the deviation instead of the root of squares.
        centered: bool,
    },
    /// Adadelta.
    Adadelta {
        /// Decay of both averages.
        rho: f64,
        /// Added under the roots.
        eps: f64,
    },
    /// Adamax.
    Adamax {
        /// Added to the magnitude.
        eps: f64,
    },
    /// Adam with Nesterov's momentum.
    NAdam {
        /// Added to the denominator.
        eps: f64,
        /// How the momentum grows.
        momentum_decay: f64,
        /// Decay weights directly.
        decoupled: bool,
    },
    /// Rectified Adam.
    RAdam {
        /// Added to the denominator.
        eps: f64,
        /// Decay weights directly.
        decoupled: bool,
    },
    /// Averaged gradient descent.
    Asgd {
        /// Decay of weights.
        lambd: f64,
        /// Power of the rate's decay.
        alpha: f64,
        /// The step at which averaging starts.
        t0: f64,
    },
    /// Resilient backpropagation.
    Rprop {
        /// Factors of a step that shrinks and of one that grows.
        etas: [f64; 2],
        /// The smallest and the largest step.
        step_sizes: [f64; 2],
    },
}

impl Torch {
    /// How many values per parameter its state holds.
    pub fn states_per_parameter(&self) -> u64 {
        match self.rule {
            TorchRule::Adam { amsgrad, .. } => 2 + u64::from(amsgrad),
            TorchRule::Sgd { .. } => u64::from(self.betas[0] != 0.0),
            TorchRule::Adagrad { .. } | TorchRule::Asgd { .. } => 1,
            TorchRule::RmsProp { centered, .. } => 1 + u64::from(centered) + u64::from(self.betas[0] != 0.0),
            TorchRule::Adadelta { .. }
            | TorchRule::Adamax { .. }
            | TorchRule::NAdam { .. }
            | TorchRule::RAdam { .. }
            | TorchRule::Rprop { .. } => 2,
        }
    }
}

/// The framework's optimizer of this name; `None` where ours does the same, or nothing does.
pub(super) fn optimizer(name: &str, full: &Map<String, Value>) -> Result<Option<Torch>, String> {
    let read = Reader(full);
    let at = |key: &str| format!("optimizer.params.{key}");
    let number = |key: &str| read.get::<f64>(&at(key));
    let flag = |key: &str| read.get::<Option<bool>>(&at(key)).map(|flag| flag.unwrap_or(false));
    let pair = |key: &str| read.get::<[f64; 2]>(&at(key));
    let (betas, rule) = match name {
        "Adam" | "AdamW" if flag("amsgrad")? || flag("maximize")? => {
            let decoupled = name == "AdamW" || flag("adam_w_mode")?;
            let (amsgrad, bias_correction) = (flag("amsgrad")?, flag("bias_correction")?);
            (pair("betas")?, TorchRule::Adam { eps: number("eps")?, decoupled, amsgrad, bias_correction })
        }
        "SGD" if flag("maximize")? => (
            [number("momentum")?, 0.0],
            TorchRule::Sgd { dampening: number("dampening")?, nesterov: flag("nesterov")? },
        ),
        "Adagrad"
            if flag("maximize")?
                || number("lr_decay")? != 0.0
                || number("initial_accumulator_value")? != 0.0 =>
        {
            let lr_decay = number("lr_decay")?;
            let initial_accumulator_value = number("initial_accumulator_value")?;
            ([0.0; 2], TorchRule::Adagrad { lr_decay, initial_accumulator_value, eps: number("eps")? })
        }
        "RMSprop" => {
            let (alpha, eps, centered) = (number("alpha")?, number("eps")?, flag("centered")?);
            ([number("momentum")?, 0.0], TorchRule::RmsProp { alpha, eps, centered })
        }
        "Adadelta" => ([0.0; 2], TorchRule::Adadelta { rho: number("rho")?, eps: number("eps")? }),
        "Adamax" => (pair("betas")?, TorchRule::Adamax { eps: number("eps")? }),
        "NAdam" => {
            let (eps, momentum_decay) = (number("eps")?, number("momentum_decay")?);
            let decoupled = flag("decoupled_weight_decay")?;
            (pair("betas")?, TorchRule::NAdam { eps, momentum_decay, decoupled })
        }
        "RAdam" => {
            let (eps, decoupled) = (number("eps")?, flag("decoupled_weight_decay")?);
            (pair("betas")?, TorchRule::RAdam { eps, decoupled })
        }
        "ASGD" => {
            let (lambd, alpha, t0) = (number("lambd")?, number("alpha")?, number("t0")?);
            ([0.0; 2], TorchRule::Asgd { lambd, alpha, t0 })
        }
        "Rprop" => ([0.0; 2], TorchRule::Rprop { etas: pair("etas")?, step_sizes: pair("step_sizes")? }),
        _ => return Ok(None),
    };
    // Rprop has no decay.
    let weight_decay = read.get::<Option<f64>>(&at("weight_decay"))?.unwrap_or(0.0);
    Ok(Some(Torch { lr: number("lr")?, weight_decay, betas, maximize: flag("maximize")?, rule }))
}

/// The schedules of the framework.
#[derive(Debug, Clone, PartialEq)]
pub enum TorchSchedule {
    /// Falls every few steps.
    Step(StepLr),
    /// Falls at given steps.
    MultiStep(MultiStepLr),
    /// Lower at first.
    Constant(ConstantLr),
    /// A line.
    Linear(LinearLr),
    /// Falls in every step.
    Exponential(ExponentialLr),
    /// A power of a line.
    Polynomial(PolynomialLr),
    /// A cosine, down and up.
    CosineAnnealing(CosineAnnealingLr),
    /// Cosines that start again.
    WarmRestarts(CosineAnnealingWarmRestarts),
    /// Up and down between two rates.
    Cyclic(CyclicLr),
    /// Up, and down to almost nothing.
    OneCycle(OneCycleLr),
    /// Falls when a metric stands still.
    Plateau(ReduceLrOnPlateau),
}

/// Parameters of `StepLR`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct StepLr {
    /// Steps from one fall to the next.
    pub step_size: u64,
    /// What is left after a fall.
    pub gamma: f64,
}

/// Parameters of `MultiStepLR`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct MultiStepLr {
    /// The steps at which it falls.
    pub milestones: Vec<u64>,
    /// What is left after a fall.
    pub gamma: f64,
}

/// Parameters of `ConstantLR`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct ConstantLr {
    /// Multiplies the rate at first.
    pub factor: f64,
    /// For so many steps.
    pub total_iters: u64,
}

/// Parameters of `LinearLR`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct LinearLr {
    /// The factor at the start.
    pub start_factor: f64,
    /// The factor at the end.
    pub end_factor: f64,
    /// Steps from one to the other.
    pub total_iters: u64,
}

/// Parameters of `ExponentialLR`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct ExponentialLr {
    /// What is left after a step.
    pub gamma: f64,
}

/// Parameters of `PolynomialLR`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct PolynomialLr {
    /// Steps until nothing is left.
    pub total_iters: u64,
    /// The power.
    pub power: f64,
}

/// Parameters of `CosineAnnealingLR`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[allow(non_snake_case)]
pub struct CosineAnnealingLr {
    /// Steps of half a period.
    pub T_max: u64,
    /// The lowest rate.
    pub eta_min: f64,
}

/// Parameters of `CosineAnnealingWarmRestarts`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[allow(non_snake_case)]
pub struct CosineAnnealingWarmRestarts {
    /// Steps until the first restart.
    pub T_0: u64,
    /// How much longer each run is than the one before.
    pub T_mult: u64,
    /// The lowest rate.
    pub eta_min: f64,
}

/// How the height of a cycle changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CyclicMode {
    /// Not at all.
    Triangular,
    /// It halves.
    Triangular2,
    /// It falls in every step.
    ExpRange,
}

/// Parameters of `CyclicLR`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct CyclicLr {
    /// The lower rate.
    pub base_lr: PerGroup,
    /// The upper rate.
    pub max_lr: PerGroup,
    /// Steps up.
    pub step_size_up: u64,
    /// Steps down; `None` means as many.
    pub step_size_down: Option<u64>,
    /// How the height changes.
    pub mode: CyclicMode,
    /// With `exp_range`.
    pub gamma: f64,
    /// Cycle the momentum against the rate.
    pub cycle_momentum: bool,
    /// The lower momentum.
    pub base_momentum: PerGroup,
    /// The upper momentum.
    pub max_momentum: PerGroup,
}

/// The shape of a phase of `OneCycleLR`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Anneal {
    /// A cosine.
    Cos,
    /// A line.
    Linear,
}

/// Parameters of `OneCycleLR`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct OneCycleLr {
    /// The highest rate.
    pub max_lr: PerGroup,
    /// Steps in all.
    pub total_steps: Option<u64>,
    /// Or epochs…
    pub epochs: Option<u64>,
    /// …of so many steps.
    pub steps_per_epoch: Option<u64>,
    /// The share that rises.
    pub pct_start: f64,
    /// The shape.
    pub anneal_strategy: Anneal,
    /// Cycle the momentum against the rate.
    pub cycle_momentum: bool,
    /// The lower momentum.
    pub base_momentum: PerGroup,
    /// The upper momentum.
    pub max_momentum: PerGroup,
    /// The highest rate over the first.
    pub div_factor: f64,
    /// The first rate over the last.
    pub final_div_factor: f64,
    /// Fall to the first rate before falling to the last.
    pub three_phase: bool,
}

impl OneCycleLr {
    /// Steps in all; the rules have refused a file that does not say it.
    pub fn steps(&self) -> u64 {
        let product = self.epochs.unwrap_or(1).saturating_mul(self.steps_per_epoch.unwrap_or(1));
        self.total_steps.unwrap_or(product)
    }
}

/// Parameters of `ReduceLROnPlateau`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct ReduceLrOnPlateau {
    /// Whether less is better (`min`) or more (`max`).
    pub mode: String,
    /// What is left after a fall.
    pub factor: f64,
    /// Steps without progress that are suffered.
    pub patience: u64,
    /// What counts as progress.
    pub threshold: f64,
    /// Whether that is a share (`rel`) or a difference (`abs`).
    pub threshold_mode: String,
    /// Steps after a fall that do not count.
    pub cooldown: u64,
    /// The lowest rate.
    pub min_lr: PerGroup,
    /// A fall of less is none.
    pub eps: f64,
}

/// The framework's schedule of this name.
pub(super) fn schedule(name: &str, full: &Map<String, Value>) -> Result<Option<TorchSchedule>, String> {
    let (read, params) = (Reader(full), "scheduler.params");
    Ok(Some(match name {
        "StepLR" => TorchSchedule::Step(read.get(params)?),
        "MultiStepLR" => TorchSchedule::MultiStep(read.get(params)?),
        "ConstantLR" => TorchSchedule::Constant(read.get(params)?),
        "LinearLR" => TorchSchedule::Linear(read.get(params)?),
        "ExponentialLR" => TorchSchedule::Exponential(read.get(params)?),
        "PolynomialLR" => TorchSchedule::Polynomial(read.get(params)?),
        "CosineAnnealingLR" => TorchSchedule::CosineAnnealing(read.get(params)?),
        "CosineAnnealingWarmRestarts" => TorchSchedule::WarmRestarts(read.get(params)?),
        "CyclicLR" => TorchSchedule::Cyclic(read.get(params)?),
        "OneCycleLR" => TorchSchedule::OneCycle(read.get(params)?),
        "ReduceLROnPlateau" => TorchSchedule::Plateau(read.get(params)?),
        _ => return Ok(None),
    }))
}
