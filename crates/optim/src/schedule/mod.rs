//! Learning-rate schedules: what the rates are at a step, as pure functions, and the counter that says which step.
//!
//! A [`Schedule`] maps an iteration and a parameter group to [`Rates`]. Iteration −1 is "before the first optimizer
//! step", so the rates of the first step are those of −1, of the second step those of 0, and so on: the numbering of
//! DeepSpeed's checkpoints. A [`Scheduler`] holds the counter and the rates the groups were configured with. Its whole
//! state is that counter (and what `ReduceLROnPlateau` remembers), and after [`Scheduler::load`] it gives what it gave before it
//! was saved.
//!
//! ```
//! use ferrospeed_optim::{GroupOptions, schedule::{Rates, Scheduler}};
//!
//! let group = GroupOptions { lr: 0.1, weight_decay: 0.0, betas: [0.9, 0.999] };
//! let halves = |iteration: i64, _group: usize, base: &GroupOptions| Rates::lr(base.lr * 0.5f64.powi(1 + iteration as i32));
//! let mut scheduler = Scheduler::custom(halves, &[group]);
//! assert_eq!(scheduler.options()[0].lr, 0.1);
//! scheduler.step();
//! assert_eq!(scheduler.options()[0].lr, 0.05);
//! ```

mod own;
mod plateau;
mod rules;
mod torch;

pub use own::OwnSchedule;
pub use plateau::PlateauState;

use std::fmt;
use std::sync::Arc;

use ferrospeed_config::{PerGroup, Scheduler as Configured, TorchSchedule};
use serde::{Deserialize, Serialize};

use self::own::Object;
use self::plateau::Plateau;
use crate::error::{OptimError, Result};
use crate::{GroupOptions, Optimizer};

/// What a schedule decides for one group at one iteration.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rates {
    /// The learning rate.
    pub lr: f64,
    /// The momentum (`betas[0]`), where the schedule moves it.
    pub momentum: Option<f64>,
}

impl Rates {
    /// Only a learning rate.
    pub fn lr(lr: f64) -> Rates {
        Rates { lr, momentum: None }
    }
}

/// A schedule: a pure function of the iteration. Closures of this signature are schedules too.
pub trait Schedule: Send + Sync {
    /// The rates of `group` once the counter stands at `iteration`; `base` is what the group was configured with.
    fn rates(&self, iteration: i64, group: usize, base: &GroupOptions) -> Rates;
}

impl<F: Fn(i64, usize, &GroupOptions) -> Rates + Send + Sync> Schedule for F {
    fn rates(&self, iteration: i64, group: usize, base: &GroupOptions) -> Rates {
        self(iteration, group, base)
    }
}

/// The counter as it is saved.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SchedulerState {
    /// Successful optimizer steps so far, less one.
    pub last_batch_iteration: i64,
    /// What `ReduceLROnPlateau` remembers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plateau: Option<PlateauState>,
    /// What an [`OwnSchedule`] remembers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub own: Option<serde_json::Value>,
}

/// A schedule, its counter, and the options the groups were configured with.
#[derive(Clone)]
pub struct Scheduler {
    name: &'static str,
    schedule: Arc<dyn Schedule>,
    base: Vec<GroupOptions>,
    iteration: i64,
    note: Option<&'static str>,
    plateau: Option<Plateau>,
    /// In place of `schedule`.
    own: Option<Object>,
}

impl fmt::Debug for Scheduler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scheduler")
            .field("name", &self.name)
            .field("iteration", &self.iteration)
            .field("base", &self.base)
            .finish_non_exhaustive()
    }
}

impl Scheduler {
    /// Rates that stay as they were configured.
    pub fn constant(groups: &[GroupOptions]) -> Scheduler {
        let constant = |_: i64, _: usize, base: &GroupOptions| Rates::lr(base.lr);
        Scheduler { name: "constant", ..Scheduler::custom(constant, groups) }
    }

    /// A schedule of the caller's own.
    pub fn custom(schedule: impl Schedule + 'static, groups: &[GroupOptions]) -> Scheduler {
        Scheduler {
            name: "custom",
            schedule: Arc::new(schedule),
            base: groups.to_vec(),
            iteration: -1,
            note: None,
            plateau: None,
            own: None,
        }
    }

    /// The configured schedule over groups with these options. Refuses lists of another length than the groups.
    pub fn from_config(
        configured: &Configured,
        optimizer: &Optimizer,
        groups: &[GroupOptions],
    ) -> Result<Scheduler> {
        let count = groups.len();
        let (name, schedule, iteration): (_, Arc<dyn Schedule>, i64) = match configured.clone() {
            Configured::LrRangeTest(params) => {
                per_group("lr_range_test_min_lr", &params.lr_range_test_min_lr, count)?;
                let start = params.last_batch_iteration;
                ("LRRangeTest", Arc::new(params), start)
            }
            Configured::OneCycle(mut params) => {
                params.cycle_momentum &= optimizer.has_betas();
                let start = params.last_batch_iteration;
                ("OneCycle", Arc::new(params), start)
            }
            Configured::WarmupLr(params) => {
                per_group("warmup_min_lr", &params.warmup_min_lr, count)?;
                if let Some(rates) = &params.warmup_max_lr {
                    per_group("warmup_max_lr", rates, count)?;
                }
                let start = params.last_batch_iteration;
                ("WarmupLR", Arc::new(params), start)
            }
            Configured::WarmupDecayLr(params) => {
                per_group("warmup_min_lr", &params.warmup_min_lr, count)?;
                per_group("warmup_max_lr", &params.warmup_max_lr, count)?;
                let start = params.last_batch_iteration;
                ("WarmupDecayLR", Arc::new(params), start)
            }
            Configured::WarmupCosineLr(params) => {
                let start = params.last_batch_iteration;
                ("WarmupCosineLR", Arc::new(params), start)
            }
            Configured::Torch(mut params) => {
                check_groups(&params, count)?;
                limit_momentum(&mut params, optimizer, groups);
                (torch_name(&params), Arc::new(params), -1)
            }
            Configured::NotYet { name, .. } => return Err(OptimError::ScheduleNotAvailable { name }),
        };
        let note = note(configured, optimizer, groups);
        let plateau = match configured {
            Configured::Torch(TorchSchedule::Plateau(params)) => Some(Plateau::new(params.clone(), groups)),
            _ => None,
        };
        Ok(Scheduler { name, schedule, base: groups.to_vec(), iteration, note, plateau, own: None })
    }

    /// The schedule's name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Something the configuration asks for that has no effect here, to be logged once.
    pub fn note(&self) -> Option<&'static str> {
        self.note
    }

    /// Where the counter stands; −1 before the first step.
    pub fn last_batch_iteration(&self) -> i64 {
        self.iteration
    }

    /// Moves on after an optimizer step that was applied. Skipped steps do not count.
    pub fn step(&mut self) {
        self.iteration = self.iteration.saturating_add(1);
        if let Some(own) = &self.own {
            own.lock().step();
        }
    }

    /// Whether it wants to know a metric after each step ([`Scheduler::observe`]).
    pub fn wants_metric(&self) -> bool {
        self.plateau.is_some() || self.own.as_ref().is_some_and(|own| own.lock().wants_metric())
    }

    /// Tells the metric of a step to a schedule that follows one. Others do not care.
    pub fn observe(&mut self, metric: f64) {
        if let Some(plateau) = &mut self.plateau {
            plateau.observe(metric);
        }
        if let Some(own) = &self.own {
            own.lock().observe(metric);
        }
    }

    /// Moves to an iteration, −1 or later.
    pub fn step_to(&mut self, iteration: i64) -> Result<()> {
        if iteration < -1 {
            return Err(OptimError::Value {
                what: "last_batch_iteration",
                value: iteration.to_string(),
                why: "it counts steps from -1 (none yet)",
            });
        }
        self.iteration = iteration;
        Ok(())
    }

    /// The options every group has now.
    pub fn options(&self) -> Vec<GroupOptions> {
        self.options_at(self.iteration)
    }

    /// The options every group has at an iteration; of an [`OwnSchedule`], those it has now.
    pub fn options_at(&self, iteration: i64) -> Vec<GroupOptions> {
        let group = |(group, base): (usize, &GroupOptions)| {
            let rates = match &self.own {
                Some(own) => own.lock().rates(group, base),
                None => self.schedule.rates(iteration, group, base),
            };
            let betas = [rates.momentum.unwrap_or(base.betas[0]), base.betas[1]];
            let followed = self.plateau.as_ref().and_then(|plateau| plateau.state.rates.get(group));
            GroupOptions { lr: followed.copied().unwrap_or(rates.lr), betas, ..*base }
        };
        self.base.iter().enumerate().map(group).collect()
    }

    /// The counter, to be saved.
    pub fn state(&self) -> SchedulerState {
        let plateau = self.plateau.as_ref().map(|plateau| plateau.state.clone());
        let own = self.own.as_ref().map(|own| own.lock().state());
        SchedulerState { last_batch_iteration: self.iteration, plateau, own }
    }

    /// Continues where a saved scheduler stood.
    pub fn load(&mut self, state: SchedulerState) -> Result<()> {
        if let Some(own) = &self.own {
            own.load(&state)?;
        }
        if let (Some(plateau), Some(saved)) = (&mut self.plateau, state.plateau) {
            if saved.rates.len() != plateau.state.rates.len() {
                let (given, groups) = (saved.rates.len(), plateau.state.rates.len());
                return Err(OptimError::GroupCount { key: "rates", given, groups });
            }
            plateau.state = saved;
        }
        self.step_to(state.last_batch_iteration)
    }
}

fn torch_name(schedule: &TorchSchedule) -> &'static str {
    match schedule {
        TorchSchedule::Step(_) => "StepLR",
        TorchSchedule::MultiStep(_) => "MultiStepLR",
        TorchSchedule::Constant(_) => "ConstantLR",
        TorchSchedule::Linear(_) => "LinearLR",
        TorchSchedule::Exponential(_) => "ExponentialLR",
        TorchSchedule::Polynomial(_) => "PolynomialLR",
        TorchSchedule::CosineAnnealing(_) => "CosineAnnealingLR",
        TorchSchedule::WarmRestarts(_) => "CosineAnnealingWarmRestarts",
        TorchSchedule::Cyclic(_) => "CyclicLR",
        TorchSchedule::OneCycle(_) => "OneCycleLR",
        TorchSchedule::Plateau(_) => "ReduceLROnPlateau",
    }
}

/// Lists of the framework's schedules hold one number per group.
fn check_groups(schedule: &TorchSchedule, groups: usize) -> Result<()> {
    let lists = match schedule {
        TorchSchedule::Cyclic(params) => vec![
            ("base_lr", &params.base_lr),
            ("max_lr", &params.max_lr),
            ("base_momentum", &params.base_momentum),
            ("max_momentum", &params.max_momentum),
        ],
        TorchSchedule::OneCycle(params) => vec![
            ("max_lr", &params.max_lr),
            ("base_momentum", &params.base_momentum),
            ("max_momentum", &params.max_momentum),
        ],
        TorchSchedule::Plateau(params) => vec![("min_lr", &params.min_lr)],
        _ => Vec::new(),
    };
    lists.into_iter().try_for_each(|(key, value)| per_group(key, value, groups))
}

/// Whether an optimizer has a momentum to cycle: betas, or one that is not zero and so has its buffer.
fn has_momentum(optimizer: &Optimizer, groups: &[GroupOptions]) -> bool {
    optimizer.has_betas() || groups.iter().all(|group| group.betas[0] != 0.0)
}

fn cycles_momentum(schedule: &mut TorchSchedule) -> Option<&mut bool> {
    match schedule {
        TorchSchedule::Cyclic(params) => Some(&mut params.cycle_momentum),
        TorchSchedule::OneCycle(params) => Some(&mut params.cycle_momentum),
        _ => None,
    }
}

fn limit_momentum(schedule: &mut TorchSchedule, optimizer: &Optimizer, groups: &[GroupOptions]) {
    if let Some(cycles) = cycles_momentum(schedule) {
        *cycles &= has_momentum(optimizer, groups);
    }
}

fn per_group(key: &'static str, value: &PerGroup, groups: usize) -> Result<()> {
    match value {
        PerGroup::Each(list) if list.len() != groups => {
            Err(OptimError::GroupCount { key, given: list.len(), groups })
        }
        _ => Ok(()),
    }
}

fn note(configured: &Configured, optimizer: &Optimizer, groups: &[GroupOptions]) -> Option<&'static str> {
    match configured {
        Configured::Torch(schedule)
            if cycles_momentum(&mut schedule.clone()) == Some(&mut true)
                && !has_momentum(optimizer, groups) =>
        {
            Some(
                "the schedule cannot cycle the momentum of an optimizer without one; only its learning rate moves",
            )
        }
        Configured::OneCycle(params) if params.cycle_momentum && !optimizer.has_betas() => Some(
            "OneCycle cannot cycle the momentum of an optimizer without betas; only its learning rate moves",
        ),
        Configured::WarmupDecayLr(params) if params.total_num_steps < params.warmup_num_steps => Some(
            "total_num_steps is less than warmup_num_steps: the rate drops to warmup_min_lr after the warm-up",
        ),
        Configured::WarmupCosineLr(params) if params.total_num_steps <= params.warmup_num_steps => {
            Some("total_num_steps leaves no step after the warm-up: the rate drops to cos_min_ratio at once")
        }
        _ => None,
    }
}
