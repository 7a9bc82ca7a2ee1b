//! Optimizers with their parameters.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::{OneBit, Reader, Torch, one_bit, torch};

/// The optimizer and its parameters.
#[derive(Debug, Clone, PartialEq)]
pub enum Optimizer {
    /// Adam and AdamW: they differ in [`Adam::decoupled_weight_decay`] only.
    Adam(Adam),
    /// Stochastic gradient descent.
    Sgd(Sgd),
    /// Adagrad.
    Adagrad(Adagrad),
    /// Lion.
    Lion(Lion),
    /// LAMB.
    Lamb(Lamb),
    /// Muon for matrices, AdamW for all else.
    Muon(Muon),
    /// One of the framework's.
    Torch(Torch),
    /// Schedule-Free AdamW.
    ScheduleFree(ScheduleFree),
    /// One that exchanges momentum at one bit per value.
    OneBit(OneBit),
    /// Accepted, but nothing runs it yet.
    NotYet {
        /// Its canonical name.
        name: String,
        /// Its parameters, as they are given.
        params: Map<String, Value>,
    },
}

/// Parameters of Adam and AdamW.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Adam {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the two moments.
    pub betas: [f64; 2],
    /// Added to the denominator.
    pub eps: f64,
    /// Weight decay.
    pub weight_decay: f64,
    /// Correct the moments for their start at zero.
    pub bias_correction: bool,
    /// Decay weights directly (AdamW) instead of through the gradient.
    pub decoupled_weight_decay: bool,
}

/// Parameters of stochastic gradient descent.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
pub struct Sgd {
    /// Learning rate.
    pub lr: f64,
    /// Momentum.
    pub momentum: f64,
    /// Dampening of the momentum.
    pub dampening: f64,
    /// Weight decay.
    pub weight_decay: f64,
    /// Nesterov momentum.
    pub nesterov: bool,
}

/// Parameters of Adagrad.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
pub struct Adagrad {
    /// Learning rate.
    pub lr: f64,
    /// Added to the denominator.
    pub eps: f64,
    /// Weight decay.
    pub weight_decay: f64,
}

/// Parameters of Lion.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
pub struct Lion {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the update and of the moment.
    pub betas: [f64; 2],
    /// Weight decay.
    pub weight_decay: f64,
}

/// Parameters of LAMB.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
pub struct Lamb {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the two moments.
    pub betas: [f64; 2],
    /// Added to the denominator.
    pub eps: f64,
    /// Add it under the root.
    pub eps_inside_sqrt: bool,
    /// Weight decay.
    pub weight_decay: f64,
    /// Correct the moments for their start at zero.
    pub bias_correction: bool,
    /// Largest trust ratio.
    pub max_coeff: f64,
    /// Smallest trust ratio.
    pub min_coeff: f64,
}

/// Parameters of Muon.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Muon {
    /// Learning rate of hidden matrices.
    pub lr: f64,
    /// Learning rate of all else.
    pub adam_lr: f64,
    /// Decay of the matrices' momentum.
    pub momentum: f64,
    /// Decay of the two moments of all else.
    pub betas: [f64; 2],
    /// Added to their denominator.
    pub eps: f64,
    /// Weight decay.
    pub weight_decay: f64,
    /// Decay what is no matrix directly (AdamW) instead of through the gradient.
    pub decoupled_weight_decay: bool,
}

/// Parameters of Schedule-Free AdamW.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
pub struct ScheduleFree {
    /// Learning rate.
    pub lr: f64,
    /// Where training lies between the mean and the newest step, and the decay of the second moment.
    pub betas: [f64; 2],
    /// Added to the denominator.
    pub eps: f64,
    /// Weight decay.
    pub weight_decay: f64,
    /// Steps over which the rate grows.
    pub warmup_steps: u64,
}

impl Optimizer {
    /// The learning rate, where it is known.
    pub fn lr(&self) -> Option<f64> {
        match self {
            Optimizer::Adam(Adam { lr, .. })
            | Optimizer::Sgd(Sgd { lr, .. })
            | Optimizer::Adagrad(Adagrad { lr, .. })
            | Optimizer::Lion(Lion { lr, .. })
            | Optimizer::Lamb(Lamb { lr, .. })
            | Optimizer::Muon(Muon { lr, .. })
            | Optimizer::ScheduleFree(ScheduleFree { lr, .. })
            | Optimizer::Torch(Torch { lr, .. })
            | Optimizer::OneBit(OneBit { lr, .. }) => Some(*lr),
            Optimizer::NotYet { params, .. } => params.get("lr").and_then(Value::as_f64),
        }
    }

    /// How many values per parameter its state holds, besides the master weight; `None` where that is unknown.
    pub fn states_per_parameter(&self) -> Option<u64> {
        match self {
            Optimizer::Adam(_) | Optimizer::Lamb(_) | Optimizer::ScheduleFree(_) => Some(2),
            // Nearly all weights are in matrices.
            Optimizer::Adagrad(_) | Optimizer::Lion(_) | Optimizer::Muon(_) => Some(1),
            Optimizer::Sgd(sgd) => Some(u64::from(sgd.momentum != 0.0)),
            Optimizer::Torch(torch) => Some(torch.states_per_parameter()),
            Optimizer::OneBit(one_bit) => Some(one_bit.states_per_parameter()),
            Optimizer::NotYet { .. } => None,
        }
    }
}

pub(super) fn build(full: &Map<String, Value>) -> Result<Option<Optimizer>, String> {
    let read = Reader(full);
    let Some(name) = read.get::<Option<String>>("optimizer.type")? else { return Ok(None) };
    let params = "optimizer.params";
    if let Some(found) = torch::optimizer(&name, full)? {
        return Ok(Some(Optimizer::Torch(found)));
    }
    if let Some(found) = one_bit::optimizer(&name, full)? {
        return Ok(Some(Optimizer::OneBit(found)));
    }
    Ok(Some(match name.as_str() {
        "Adam" | "AdamW" => Optimizer::Adam(Adam {
            lr: read.get("optimizer.params.lr")?,
            betas: read.get("optimizer.params.betas")?,
            eps: read.get("optimizer.params.eps")?,
            weight_decay: read.get("optimizer.params.weight_decay")?,
            bias_correction: read.get("optimizer.params.bias_correction")?,
            decoupled_weight_decay: name == "AdamW" || read.get("optimizer.params.adam_w_mode")?,
        }),
        "SGD" => Optimizer::Sgd(read.get(params)?),
        "Adagrad" => Optimizer::Adagrad(read.get(params)?),
        "Lion" => Optimizer::Lion(read.get(params)?),
        "Lamb" => Optimizer::Lamb(read.get(params)?),
        "Muon" => Optimizer::Muon(muon(&read)?),
        "ScheduleFreeAdamW" => Optimizer::ScheduleFree(read.get(params)?),
        _ => Optimizer::NotYet { name, params: read.get::<Option<_>>(params)?.unwrap_or_default() },
    }))
}

/// Each kind's own rate before the common one, and the rates of the paper where neither is given.
fn muon(read: &Reader<'_>) -> Result<Muon, String> {
    let common: Option<f64> = read.get("optimizer.params.lr")?;
    let rate = |key: &str, default: f64| -> Result<f64, String> {
        Ok(read.get::<Option<f64>>(&format!("optimizer.params.{key}"))?.or(common).unwrap_or(default))
    };
    Ok(Muon {
        lr: rate("muon_lr", 0.02)?,
        adam_lr: rate("adam_lr", 3e-4)?,
        momentum: read.get("optimizer.params.momentum")?,
        betas: read.get("optimizer.params.betas")?,
        eps: read.get("optimizer.params.eps")?,
        weight_decay: read.get("optimizer.params.weight_decay")?,
        decoupled_weight_decay: read.get("optimizer.params.adam_w_mode")?,
    })
}
