//! Optimizers on flat slices, and what surrounds a step: schedules, loss scaling, norms.
//!
//! Nothing here knows how weights are spread over ranks. An [`Optimizer`] turns its options into the numbers of one
//! step ([`Update`]); a device applies them to a stretch of f32 master weights, the gradient of that stretch in whatever
//! type it arrived, and the states, in one pass that also writes the 16-bit copy the kernels will read. On the host
//! [`Stretch::apply`] does; what a device has no kernel for ([`torch`], [`own`]) runs there alone ([`Stretch::pass`]). Every result depends on the elements alone, so a stretch may
//! be cut anywhere.

pub mod adagrad;
pub mod adam;
pub mod bench;
pub mod compression;
pub mod curriculum;
pub mod eigenvalue;
pub mod error;
pub mod lamb;
pub mod lion;
pub mod loss_scale;
pub mod muon;
pub mod norm;
pub mod one_bit;
pub mod own;
pub mod pace;
pub mod progressive_layer_drop;
pub mod random_ltd;
pub mod schedule;
pub mod schedule_free;
pub mod sgd;
pub mod stretch;
pub mod torch;

pub use error::{OptimError, Result};
pub use loss_scale::LossScaler;
pub use schedule::Scheduler;
pub use stretch::{Copy16, Gradient, Stretch};

use ferrospeed_config::Optimizer as Configured;
use ferrospeed_tensor::backend::Update;

/// What may differ between parameter groups and change from step to step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GroupOptions {
    /// Learning rate.
    pub lr: f64,
    /// Weight decay.
    pub weight_decay: f64,
    /// The two decay rates (for SGD, and for the matrices of Muon, the momentum first, and zero).
    pub betas: [f64; 2],
}

impl GroupOptions {
    /// One less the decay rates, rounded after the subtraction: 1 − 0.999 in f32 is off in the fifth digit.
    fn rest(&self) -> [f32; 2] {
        self.betas.map(|beta| (1.0 - beta) as f32)
    }
}

/// An update rule with its fixed options.
#[derive(Debug, Clone, PartialEq)]
pub enum Optimizer {
    /// Adam and AdamW.
    Adam(adam::Adam),
    /// Stochastic gradient descent with momentum.
    Sgd(sgd::Sgd),
    /// Adagrad.
    Adagrad(adagrad::Adagrad),
    /// Lion.
    Lion(lion::Lion),
    /// LAMB, which scales each parameter's update by the ratio of two norms.
    Lamb(lamb::Lamb),
    /// Muon, which moves matrices by orthogonal ones, and all else as AdamW does.
    Muon(muon::Muon),
    /// One of the framework's without a kernel on devices.
    Torch(torch::TorchOptimizer),
    /// Schedule-Free AdamW, whose weights are on their way between two other sequences.
    ScheduleFree(schedule_free::ScheduleFree),
    /// One that exchanges momentum at one bit per value.
    OneBit(one_bit::OneBit),
    /// One of the program's own.
    Own(own::Own),
}

/// One pass of a step over a stretch.
#[derive(Debug, Clone, PartialEq)]
pub enum Pass {
    /// One that every device has a kernel for.
    Kernel(Update),
    /// One that runs on the host.
    Host {
        /// The rule: [`Optimizer::Torch`], [`Optimizer::ScheduleFree`] or [`Optimizer::Own`].
        optimizer: Optimizer,
        /// The options of the group.
        options: GroupOptions,
        /// The step, counting from 1.
        step: u64,
    },
}

impl From<Update> for Pass {
    fn from(update: Update) -> Pass {
        Pass::Kernel(update)
    }
}

impl Optimizer {
    /// An optimizer of the program's own.
    pub fn own(optimizer: impl own::OwnOptimizer + 'static) -> Optimizer {
        Optimizer::Own(own::Own(std::sync::Arc::new(optimizer)))
    }

    /// Its name in checkpoints.
    pub fn name(&self) -> &'static str {
        match self {
            Optimizer::Adam(_) => "adam",
            Optimizer::Sgd(_) => "sgd",
            Optimizer::Adagrad(_) => "adagrad",
            Optimizer::Lion(_) => "lion",
            Optimizer::Lamb(_) => "lamb",
            Optimizer::Muon(_) => "muon",
            Optimizer::Torch(torch) => torch.name(),
            Optimizer::ScheduleFree(_) => "schedule-free-adamw",
            Optimizer::OneBit(rule) => rule.name(),
            Optimizer::Own(own) => own.0.name(),
        }
    }

    /// Whether it runs on the host only.
    pub fn is_of_the_host(&self) -> bool {
        matches!(self, Optimizer::Torch(_) | Optimizer::ScheduleFree(_) | Optimizer::Own(_))
    }

    /// The configured rule and the options that all groups start with; `None` for one that does not run yet.
    pub fn from_config(configured: &Configured) -> Option<(Optimizer, GroupOptions)> {
        let options = |lr, weight_decay, betas| GroupOptions { lr, weight_decay, betas };
        Some(match *configured {
            Configured::Adam(adam) => (
                Optimizer::Adam(adam::Adam {
                    eps: adam.eps,
                    bias_correction: adam.bias_correction,
                    decoupled: adam.decoupled_weight_decay,
                }),
                options(adam.lr, adam.weight_decay, adam.betas),
            ),
            Configured::Sgd(sgd) => (
                Optimizer::Sgd(sgd::Sgd { dampening: sgd.dampening, nesterov: sgd.nesterov }),
                options(sgd.lr, sgd.weight_decay, [sgd.momentum, 0.0]),
            ),
            Configured::Adagrad(adagrad) => (
                Optimizer::Adagrad(adagrad::Adagrad { eps: adagrad.eps }),
                options(adagrad.lr, adagrad.weight_decay, [0.0, 0.0]),
            ),
            Configured::Lion(lion) => {
                (Optimizer::Lion(lion::Lion), options(lion.lr, lion.weight_decay, lion.betas))
            }
            Configured::Lamb(lamb) => (
                Optimizer::Lamb(lamb::Lamb {
                    eps: lamb.eps,
                    eps_inside_sqrt: lamb.eps_inside_sqrt,
                    bias_correction: lamb.bias_correction,
                    max_coeff: lamb.max_coeff,
                    min_coeff: lamb.min_coeff,
                }),
                options(lamb.lr, lamb.weight_decay, lamb.betas),
            ),
            Configured::Muon(muon) => {
                let adam = adam::Adam {
                    eps: muon.eps,
                    bias_correction: true,
                    decoupled: muon.decoupled_weight_decay,
                };
                (
                    Optimizer::Muon(muon::Muon { lr: muon.lr, momentum: muon.momentum, adam }),
                    options(muon.adam_lr, muon.weight_decay, muon.betas),
                )
            }
            Configured::Torch(torch) => {
                let (optimizer, options) = torch::TorchOptimizer::from_config(&torch);
                (Optimizer::Torch(optimizer), options)
            }
            Configured::ScheduleFree(free) => (
                Optimizer::ScheduleFree(schedule_free::ScheduleFree {
                    eps: free.eps,
                    warmup_steps: free.warmup_steps,
                }),
                options(free.lr, free.weight_decay, free.betas),
            ),
            Configured::OneBit(ref configured) => {
                let (rule, options) = one_bit::OneBit::from_config(configured);
                (Optimizer::OneBit(rule), options)
            }
            Configured::NotYet { .. } => return None,
        })
    }

    /// Whether its options have `betas`, the first of which a schedule may cycle as momentum.
    pub fn has_betas(&self) -> bool {
        match self {
            Optimizer::Adam(_) | Optimizer::Lion(_) | Optimizer::Lamb(_) | Optimizer::OneBit(_) => true,
            Optimizer::Torch(torch) => torch.has_betas(),
            // One momentum cannot be cycled for both kinds of its groups.
            Optimizer::Sgd(_) | Optimizer::Adagrad(_) | Optimizer::Muon(_) => false,
            // Its first is no momentum, but where y lies between x and z.
            Optimizer::ScheduleFree(_) | Optimizer::Own(_) => false,
        }
    }

    /// The names of its states, in the order a [`Stretch`] holds them. SGD keeps its buffer only with momentum.
    pub fn state_names(&self, options: &GroupOptions) -> &'static [&'static str] {
        match self {
            Optimizer::Muon(_) if muon::Muon::moves(options) => &["momentum_buffer"],
            Optimizer::Adam(_) | Optimizer::Lamb(_) | Optimizer::Muon(_) => &["exp_avg", "exp_avg_sq"],
            Optimizer::Sgd(_) if options.betas[0] == 0.0 => &[],
            Optimizer::Sgd(_) => &["momentum_buffer"],
            Optimizer::Adagrad(_) => &["sum"],
            Optimizer::Lion(_) => &["exp_avg"],
            Optimizer::Torch(torch) => torch.state_names(options),
            Optimizer::ScheduleFree(_) => schedule_free::STATES,
            Optimizer::OneBit(rule) => rule.state_names(),
            Optimizer::Own(own) => own.0.state_names(),
        }
    }

    /// The pass of one step. `step` counts from 1. LAMB and Muon's matrices need the passes of [`lamb::Lamb`] and
    /// [`muon::Muon`] instead, and a rule of [`one_bit`] whole parameters.
    ///
    /// # Panics
    /// For these: a bug of the caller.
    pub fn pass(&self, options: &GroupOptions, step: u64) -> Pass {
        if self.is_of_the_host() {
            return Pass::Host { optimizer: self.clone(), options: *options, step };
        }
        Pass::Kernel(self.update(options, step))
    }

    /// The numbers of one step, for any device. `step` counts from 1. LAMB needs [`lamb::Lamb`]'s two passes instead.
    ///
    /// # Panics
    /// For LAMB, for Muon's matrices, for a rule of [`one_bit`] and for what runs on the host only: a bug of the caller.
    pub fn update(&self, options: &GroupOptions, step: u64) -> Update {
        match self {
            Optimizer::Adam(rule) => rule.update(options, step),
            Optimizer::Sgd(rule) => rule.update(options, step),
            Optimizer::Adagrad(rule) => rule.update(options),
            Optimizer::Lion(rule) => rule.update(options),
            Optimizer::Muon(rule) if !muon::Muon::moves(options) => rule.adam.update(options, step),
            Optimizer::Muon(_) => panic!("muon moves whole matrices"),
            Optimizer::Lamb(_) | Optimizer::OneBit(_) => panic!("{} steps whole parameters", self.name()),
            Optimizer::Torch(_) | Optimizer::ScheduleFree(_) | Optimizer::Own(_) => {
                panic!("{} has no kernel", self.name())
            }
        }
    }
}

#[cfg(test)]
extern crate self as ferrospeed_optim;
#[cfg(test)]
#[path = "../tests/it/main.rs"]
mod it;
