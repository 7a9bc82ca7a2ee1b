//! The optimizers of the tensor framework that have no kernel of their own on devices: they run on the host.
//!
//! Each follows its paper as the framework does: RMSprop (Hinton, 2012; centred: Graves, 2013), Adadelta (Zeiler, 2012),
//! Adamax (Kingma, Ba, 2015), AMSGrad (Reddi, Kale, Kumar, 2018), NAdam (Dozat, 2016), RAdam (Liu et al., 2020), averaged
//! gradient descent (Polyak, Juditsky, 1992) and Rprop (Riedmiller, Braun, 1993). What depends on the step alone (products of
//! momenta, decayed rates) is computed anew in each step, so that the states are one number per weight and name.

use ferrospeed_config::{Torch, TorchRule};

use crate::GroupOptions;
use crate::adagrad::Squares;
use crate::adam::Moments;
use crate::sgd::{Momentum, Plain};
use crate::stretch::{Rule, Stretch, run};

/// The framework's optimizer with its fixed options.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TorchOptimizer {
    /// The update rule.
    pub rule: TorchRule,
    /// Climb instead of descend.
    pub maximize: bool,
}

impl TorchOptimizer {
    pub(crate) fn from_config(torch: &Torch) -> (TorchOptimizer, GroupOptions) {
        let Torch { lr, weight_decay, betas, maximize, rule } = *torch;
        (TorchOptimizer { rule, maximize }, GroupOptions { lr, weight_decay, betas })
    }

    pub(crate) fn name(&self) -> &'static str {
        match self.rule {
            TorchRule::Adam { amsgrad: false, .. } => "adam",
            TorchRule::Adam { amsgrad: true, .. } => "amsgrad",
            TorchRule::Sgd { .. } => "sgd",
            TorchRule::Adagrad { .. } => "adagrad",
            TorchRule::RmsProp { .. } => "rmsprop",
            TorchRule::Adadelta { .. } => "adadelta",
            TorchRule::Adamax { .. } => "adamax",
            TorchRule::NAdam { .. } => "nadam",
            TorchRule::RAdam { .. } => "radam",
            TorchRule::Asgd { .. } => "asgd",
            TorchRule::Rprop { .. } => "rprop",
        }
    }

    pub(crate) fn has_betas(&self) -> bool {
        use TorchRule::{Adam, Adamax, NAdam, RAdam};
        matches!(self.rule, Adam { .. } | Adamax { .. } | NAdam { .. } | RAdam { .. })
    }

    pub(crate) fn state_names(&self, options: &GroupOptions) -> &'static [&'static str] {
        let has_momentum = options.betas[0] != 0.0;
        match self.rule {
            TorchRule::Adam { amsgrad: true, .. } => &["exp_avg", "exp_avg_sq", "max_exp_avg_sq"],
            TorchRule::Adam { .. } | TorchRule::NAdam { .. } | TorchRule::RAdam { .. } => {
                &["exp_avg", "exp_avg_sq"]
            }
            TorchRule::Sgd { .. } if has_momentum => &["momentum_buffer"],
            TorchRule::Sgd { .. } => &[],
            TorchRule::Adagrad { .. } => &["sum"],
            TorchRule::RmsProp { centered, .. } => match (centered, has_momentum) {
                (false, false) => &["square_avg"],
                (false, true) => &["square_avg", "momentum_buffer"],
                (true, false) => &["square_avg", "grad_avg"],
                (true, true) => &["square_avg", "grad_avg", "momentum_buffer"],
            },
            TorchRule::Adadelta { .. } => &["square_avg", "acc_delta"],
            TorchRule::Adamax { .. } => &["exp_avg", "exp_inf"],
            TorchRule::Asgd { .. } => &["ax"],
            TorchRule::Rprop { .. } => &["prev", "step_size"],
        }
    }

    /// One step over a stretch; `step` counts from 1.
    pub(crate) fn apply(&self, stretch: &mut Stretch<'_>, options: &GroupOptions, step: u64) {
        if self.maximize {
            stretch.gradient_factor = -stretch.gradient_factor;
        }
        let numbers = Numbers::of(options, step);
        match self.rule {
            TorchRule::Adam { eps, decoupled, amsgrad, bias_correction } => {
                numbers.adam(stretch, eps, decoupled, amsgrad, bias_correction);
            }
            TorchRule::Sgd { dampening, nesterov } => numbers.sgd(stretch, dampening, nesterov),
            TorchRule::Adagrad { lr_decay, initial_accumulator_value, eps } => {
                let lr = (numbers.lr / (1.0 + (step - 1) as f64 * lr_decay)) as f32;
                let start = if step <= 1 { initial_accumulator_value as f32 } else { 0.0 };
                run(stretch, &From { start, rule: Squares { lr, decay: numbers.decay, eps: eps as f32 } });
            }
            TorchRule::RmsProp { alpha, eps, centered } => numbers.rms_prop(stretch, alpha, eps, centered),
            TorchRule::Adadelta { rho, eps } => {
                let (rho, rest, eps) = (rho as f32, (1.0 - rho) as f32, eps as f32);
                run(stretch, &Adadelta { lr: numbers.lr as f32, decay: numbers.decay, rho, rest, eps });
            }
            TorchRule::Adamax { eps } => {
                let step_size = (numbers.lr / numbers.corrections[0]) as f32;
                let Numbers { betas, rest, decay, .. } = numbers;
                run(stretch, &Adamax { beta: betas[1], rest: rest[0], eps: eps as f32, decay, step_size });
            }
            TorchRule::NAdam { eps, momentum_decay, decoupled } => {
                numbers.nadam(stretch, options.betas[0], eps, momentum_decay, decoupled);
            }
            TorchRule::RAdam { eps, decoupled } => {
                numbers.radam(stretch, options.betas[1], eps, decoupled);
            }
            TorchRule::Asgd { lambd, alpha, t0 } => {
                let before = (step - 1) as f64;
                let eta = numbers.lr / (1.0 + lambd * numbers.lr * before).powf(alpha);
                let share = 1.0 / (before - t0).max(1.0);
                let (shrink, eta) = ((1.0 - lambd * eta) as f32, eta as f32);
                run(stretch, &Averaged { decay: numbers.decay, shrink, eta, share: share as f32 });
            }
            TorchRule::Rprop { etas, step_sizes } => {
                let first = (step <= 1).then_some(numbers.lr as f32);
                let [shrinks, grows] = etas.map(|eta| eta as f32);
                let [least, most] = step_sizes.map(|size| size as f32);
                run(stretch, &Resilient { first, shrinks, grows, least, most });
            }
        }
    }
}

/// The numbers of one step that several rules share.
struct Numbers {
    step: u64,
    lr: f64,
    decay: f32,
    betas: [f32; 2],
    rest: [f32; 2],
    /// One less the powers of both decay rates.
    corrections: [f64; 2],
    /// The weight decay of rules that decay weights directly.
    direct_decay: f32,
}

impl Numbers {
    fn of(options: &GroupOptions, step: u64) -> Numbers {
        let power = i32::try_from(step).unwrap_or(i32::MAX);
        Numbers {
            step,
            lr: options.lr,
            decay: options.weight_decay as f32,
            betas: options.betas.map(|beta| beta as f32),
            rest: options.rest(),
            corrections: options.betas.map(|beta| 1.0 - beta.powi(power)),
            direct_decay: (options.lr * options.weight_decay) as f32,
        }
    }

    /// (decay of weights, decay through the gradient)
    fn decays(&self, decoupled: bool) -> (f32, f32) {
        if decoupled { (self.direct_decay, 0.0) } else { (0.0, self.decay) }
    }

    fn adam(&self, stretch: &mut Stretch<'_>, eps: f64, decoupled: bool, amsgrad: bool, corrected: bool) {
        let [first, second] = if corrected { self.corrections } else { [1.0; 2] };
        let (betas, rest, eps) = (self.betas, self.rest, eps as f32);
        let step_size = (self.lr / first) as f32;
        let inverse_root_correction = (1.0 / second.sqrt()) as f32;
        let (shrink, decay) = self.decays(decoupled);
        match (amsgrad, decoupled) {
            (true, _) => {
                run(stretch, &AmsGrad { betas, rest, eps, shrink, decay, step_size, inverse_root_correction })
            }
            (false, true) => run(
                stretch,
                &Moments::<true> { betas, rest, eps, decay: shrink, step_size, inverse_root_correction },
            ),
            (false, false) => run(
                stretch,
                &Moments::<false> { betas, rest, eps, decay, step_size, inverse_root_correction },
            ),
        }
    }

    fn sgd(&self, stretch: &mut Stretch<'_>, dampening: f64, nesterov: bool) {
        let (lr, decay) = (self.lr as f32, self.decay);
        if stretch.states.is_empty() {
            return run(stretch, &Plain { lr, decay });
        }
        // All of the gradient enters on the first step.
        let entering = if self.step <= 1 { 1.0 } else { 1.0 - dampening as f32 };
        run(stretch, &Momentum { lr, decay, momentum: self.betas[0], entering, nesterov });
    }

    fn rms_prop(&self, stretch: &mut Stretch<'_>, alpha: f64, eps: f64, centered: bool) {
        let rule = Rms {
            lr: self.lr as f32,
            decay: self.decay,
            alpha: alpha as f32,
            rest: (1.0 - alpha) as f32,
            eps: eps as f32,
            momentum: self.betas[0],
        };
        match (centered, stretch.states.len()) {
            (false, 1) => run(stretch, &RmsPlain(rule)),
            (false, _) => run(stretch, &RmsMomentum(rule)),
            (true, 2) => run(stretch, &RmsCentered(rule)),
            (true, _) => run(stretch, &RmsCenteredMomentum(rule)),
        }
    }

    fn nadam(&self, stretch: &mut Stretch<'_>, beta: f64, eps: f64, momentum_decay: f64, decoupled: bool) {
        let mu = |step: u64| beta * (1.0 - 0.5 * 0.96f64.powf(step as f64 * momentum_decay));
        // Momenta are below one, so their product soon makes no difference to one less it.
        let mut product = 1.0;
        for earlier in 1..=self.step {
            product *= mu(earlier);
            if product < 1e-18 {
                break;
            }
        }
        let (now, next) = (mu(self.step), mu(self.step + 1));
        let (shrink, decay) = self.decays(decoupled);
        run(
            stretch,
            &NAdam {
                betas: self.betas,
                rest: self.rest,
                eps: eps as f32,
                shrink,
                decay,
                inverse_correction: (1.0 / self.corrections[1]) as f32,
                of_gradient: (self.lr * (1.0 - now) / (1.0 - product)) as f32,
                of_moment: (self.lr * next / (1.0 - product * next)) as f32,
            },
        );
    }

    fn radam(&self, stretch: &mut Stretch<'_>, beta: f64, eps: f64, decoupled: bool) {
        let longest = 2.0 / (1.0 - beta) - 1.0;
        let power = 1.0 - self.corrections[1];
        let length = longest - 2.0 * self.step as f64 * power / self.corrections[1];
        let rectified = (length > 5.0).then(|| {
            let above = (length - 4.0) * (length - 2.0) * longest;
            let below = (longest - 4.0) * (longest - 2.0) * length;
            ((above / below).sqrt() * self.corrections[1].sqrt()) as f32
        });
        let (shrink, decay) = self.decays(decoupled);
        run(
            stretch,
            &RAdam {
                betas: self.betas,
                rest: self.rest,
                eps: eps as f32,
                shrink,
                decay,
                step_size: (self.lr / self.corrections[0]) as f32,
                rectified,
            },
        );
    }
}

/// A rule whose one state starts at another number than zero.
struct From<R> {
    start: f32,
    rule: R,
}

impl<R: Rule<1>> Rule<1> for From<R> {
    #[inline(always)]
    fn update(&self, weight: f32, gradient: f32, [state]: &mut [f32; 1]) -> f32 {
        let mut own = [*state + self.start];
        let weight = self.rule.update(weight, gradient, &mut own);
        *state = own[0];
        weight
    }
}

struct AmsGrad {
    betas: [f32; 2],
    rest: [f32; 2],
    eps: f32,
    shrink: f32,
    decay: f32,
    step_size: f32,
    inverse_root_correction: f32,
}

impl Rule<3> for AmsGrad {
    #[inline(always)]
    fn update(&self, weight: f32, gradient: f32, [m, v, largest]: &mut [f32; 3]) -> f32 {
        let gradient = gradient + self.decay * weight;
        let weight = weight - self.shrink * weight;
        *m = self.betas[0] * *m + self.rest[0] * gradient;
        *v = self.betas[1] * *v + self.rest[1] * gradient * gradient;
        *largest = largest.max(*v);
        weight - self.step_size * (*m / (largest.sqrt() * self.inverse_root_correction + self.eps))
    }
}

/// RMSprop; its states are the squares, the mean where it is centred, and the momentum where there is one.
struct Rms {
    lr: f32,
    decay: f32,
    alpha: f32,
    rest: f32,
    eps: f32,
    momentum: f32,
}

impl Rms {
    /// The gradient over the root of squares, less that of the mean.
    #[inline(always)]
    fn direction(&self, weight: f32, gradient: f32, square: &mut f32, mean: Option<&mut f32>) -> f32 {
        let gradient = gradient + self.decay * weight;
        *square = self.alpha * *square + self.rest * gradient * gradient;
        let spread = match mean {
            None => *square,
            Some(mean) => {
                *mean += self.rest * (gradient - *mean);
                *square - *mean * *mean
            }
        };
        gradient / (spread.sqrt() + self.eps)
    }

    #[inline(always)]
    fn with_momentum(&self, weight: f32, direction: f32, buffer: &mut f32) -> f32 {
        *buffer = self.momentum * *buffer + direction;
        weight - self.lr * *buffer
    }
}

struct RmsPlain(Rms);
struct RmsMomentum(Rms);
struct RmsCentered(Rms);
struct RmsCenteredMomentum(Rms);

impl Rule<1> for RmsPlain {
    #[inline(always)]
    fn update(&self, weight: f32, gradient: f32, [square]: &mut [f32; 1]) -> f32 {
        weight - self.0.lr * self.0.direction(weight, gradient, square, None)
    }
}

impl Rule<2> for RmsMomentum {
    #[inline(always)]
    fn update(&self, weight: f32, gradient: f32, [square, buffer]: &mut [f32; 2]) -> f32 {
        let direction = self.0.direction(weight, gradient, square, None);
        self.0.with_momentum(weight, direction, buffer)
    }
}

impl Rule<2> for RmsCentered {
    #[inline(always)]
    fn update(&self, weight: f32, gradient: f32, [square, mean]: &mut [f32; 2]) -> f32 {
        weight - self.0.lr * self.0.direction(weight, gradient, square, Some(mean))
    }
}

impl Rule<3> for RmsCenteredMomentum {
    #[inline(always)]
    fn update(&self, weight: f32, gradient: f32, [square, mean, buffer]: &mut [f32; 3]) -> f32 {
        let direction = self.0.direction(weight, gradient, square, Some(mean));
        self.0.with_momentum(weight, direction, buffer)
    }
}

struct Adadelta {
    lr: f32,
    decay: f32,
    rho: f32,
    rest: f32,
    eps: f32,
}

impl Rule<2> for Adadelta {
    #[inline(always)]
    fn update(&self, weight: f32, gradient: f32, [square, moved]: &mut [f32; 2]) -> f32 {
        let gradient = gradient + self.decay * weight;
        *square = self.rho * *square + self.rest * gradient * gradient;
        let delta = (*moved + self.eps).sqrt() / (*square + self.eps).sqrt() * gradient;
        *moved = self.rho * *moved + self.rest * delta * delta;
        weight - self.lr * delta
    }
}

struct Adamax {
    beta: f32,
    rest: f32,
    eps: f32,
    decay: f32,
    step_size: f32,
}

impl Rule<2> for Adamax {
    #[inline(always)]
    fn update(&self, weight: f32, gradient: f32, [m, largest]: &mut [f32; 2]) -> f32 {
        let gradient = gradient + self.decay * weight;
        *m += self.rest * (gradient - *m);
        *largest = (self.beta * *largest).max(gradient.abs() + self.eps);
        weight - self.step_size * *m / *largest
    }
}

struct NAdam {
    betas: [f32; 2],
    rest: [f32; 2],
    eps: f32,
    shrink: f32,
    decay: f32,
    inverse_correction: f32,
    of_gradient: f32,
    of_moment: f32,
}

impl Rule<2> for NAdam {
    #[inline(always)]
    fn update(&self, weight: f32, gradient: f32, [m, v]: &mut [f32; 2]) -> f32 {
        let gradient = gradient + self.decay * weight;
        let weight = weight - self.shrink * weight;
        *m = self.betas[0] * *m + self.rest[0] * gradient;
        *v = self.betas[1] * *v + self.rest[1] * gradient * gradient;
        let denominator = (*v * self.inverse_correction).sqrt() + self.eps;
        weight - self.of_gradient * gradient / denominator - self.of_moment * *m / denominator
    }
}

struct RAdam {
    betas: [f32; 2],
    rest: [f32; 2],
    eps: f32,
    shrink: f32,
    decay: f32,
    step_size: f32,
    /// The rectification, once the second moment is long enough to be trusted.
    rectified: Option<f32>,
}

impl Rule<2> for RAdam {
    #[inline(always)]
    fn update(&self, weight: f32, gradient: f32, [m, v]: &mut [f32; 2]) -> f32 {
        let gradient = gradient + self.decay * weight;
        let weight = weight - self.shrink * weight;
        *m = self.betas[0] * *m + self.rest[0] * gradient;
        *v = self.betas[1] * *v + self.rest[1] * gradient * gradient;
        let adapted = self.rectified.map_or(1.0, |factor| factor / (v.sqrt() + self.eps));
        weight - self.step_size * *m * adapted
    }
}

/// Averaged gradient descent; the state is the average, which training itself does not read.
struct Averaged {
    decay: f32,
    shrink: f32,
    eta: f32,
    share: f32,
}

impl Rule<1> for Averaged {
    #[inline(always)]
    fn update(&self, weight: f32, gradient: f32, [average]: &mut [f32; 1]) -> f32 {
        let weight = weight * self.shrink - self.eta * (gradient + self.decay * weight);
        *average = if self.share == 1.0 { weight } else { *average + self.share * (weight - *average) };
        weight
    }
}

struct Resilient {
    /// The size of the first step.
    first: Option<f32>,
    shrinks: f32,
    grows: f32,
    least: f32,
    most: f32,
}

impl Rule<2> for Resilient {
    #[inline(always)]
    fn update(&self, weight: f32, gradient: f32, [previous, size]: &mut [f32; 2]) -> f32 {
        let agreement = gradient * *previous;
        let factor = if agreement > 0.0 {
            self.grows
        } else if agreement < 0.0 {
            self.shrinks
        } else {
            1.0
        };
        *size = (self.first.unwrap_or(*size) * factor).max(self.least).min(self.most);
        // After a change of sign the weight stays, and the next step does not see one again.
        let gradient = if agreement < 0.0 { 0.0 } else { gradient };
        *previous = gradient;
        let sign = if gradient > 0.0 {
            1.0
        } else if gradient < 0.0 {
            -1.0
        } else {
            0.0
        };
        weight - sign * *size
    }
}
