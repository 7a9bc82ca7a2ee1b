//! What the section means for the parameters of a model.

use ferrospeed_tensor::Param;
use ferrospeed_tensor::fake_quantize::{FakeQuantizer, Levels};

use super::mask::Units;
use super::precision::{BitSchedule, Precision};
use super::section::fault;
use super::{Compression, Patterns, PruningKind};
use crate::error::Result;

/// The modules that are compressed.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// In the order of their weights.
    pub modules: Vec<Module>,
}

/// A compressed module.
#[derive(Debug, Clone, PartialEq)]
pub struct Module {
    /// Its path.
    pub name: String,
    /// Its weight, by place among the parameters.
    pub weight: usize,
    /// Its bias, where it has one and rows are pruned, which takes them from the bias too.
    pub bias: Option<usize>,
    /// Its weight in few bits.
    pub bits: Option<WeightBits>,
    /// What of its weight is pruned, in the order in which it is done.
    pub prunings: Vec<Pruning>,
    /// Its input in few bits.
    pub activations: Option<ActivationBits>,
}

/// How a weight is read in few bits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WeightBits {
    /// After how many optimizer steps it begins.
    pub offset: u64,
    /// How bits become fewer.
    pub schedule: BitSchedule,
    /// Whether the schedule's last bits hold from the start.
    pub in_forward: bool,
    /// Whether levels lie around zero.
    pub symmetric: bool,
    /// Groups with levels of their own.
    pub groups: usize,
    /// Whether rounding is stochastic.
    pub stochastic: bool,
}

impl WeightBits {
    /// What holds after so many optimizer steps; `None` before it begins.
    pub fn after(&self, steps: u64) -> Option<Precision> {
        let quantized = steps.checked_sub(self.offset)? + 1;
        Some(match self.in_forward {
            true => {
                Precision { bits: self.schedule.target_bits, period: self.schedule.period, exact_share: 0.0 }
            }
            false => self.schedule.at(quantized),
        })
    }

    /// The same as what is done to the weight.
    pub fn quantizer_after(&self, steps: u64) -> Option<FakeQuantizer> {
        let precision = self.after(steps)?;
        let levels = Levels::of(precision.bits, self.symmetric).ok()?;
        let mixed = self.schedule.change_ratio.is_some() && !self.in_forward;
        let exact_share = if mixed { precision.exact_share as f32 } else { 0.0 };
        Some(FakeQuantizer { exact_share, ..FakeQuantizer::new(levels, self.groups) })
    }
}

/// What of a weight is read as zeros.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pruning {
    /// By which technique.
    pub kind: PruningKind,
    /// After how many optimizer steps the weight's magnitudes choose what is kept.
    pub offset: u64,
    /// How much is kept.
    pub ratio: f64,
    /// What the weight is cut into.
    pub units: Units,
}

/// How the input of a layer is read in few bits, each token with levels of its own.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ActivationBits {
    /// After how many optimizer steps it begins.
    pub offset: u64,
    /// The levels.
    pub levels: Levels,
}

/// A module that can be compressed.
struct Candidate<'a> {
    name: &'a str,
    weight: usize,
    param: &'a Param,
}

impl Candidate<'_> {
    fn is_linear(&self) -> bool {
        self.param.shape().dims() == 2 && !self.param.is_table()
    }

    /// Outputs and inputs of a linear layer.
    fn sizes(&self) -> [usize; 2] {
        match *self.param.shape().sizes() {
            [inputs, outputs] if self.param.is_inputs_first() => [outputs, inputs],
            ref sizes => [sizes[0], sizes[1]],
        }
    }

    /// What a technique prunes of it; `None` where that has no meaning for it.
    fn units(&self, kind: PruningKind, heads: usize) -> Option<Result<Units>> {
        let numel = self.param.numel();
        let inputs_first = self.param.is_inputs_first();
        match kind {
            PruningKind::Sparse => Some(Ok(Units { stride: 1, count: numel })),
            PruningKind::Row if self.is_linear() => {
                let [outputs, inputs] = self.sizes();
                Some(Ok(Units { stride: if inputs_first { 1 } else { inputs }, count: outputs }))
            }
            PruningKind::Head if self.is_linear() => {
                let [outputs, inputs] = self.sizes();
                if !inputs.is_multiple_of(heads) {
                    return Some(Err(fault(format!(
                        "head_pruning: the {inputs} inputs of {} are not those of {heads} heads; name the layers behind \
                         attention (modules), and num_heads as the model has them",
                        self.name
                    ))));
                }
                let own = inputs / heads;
                Some(Ok(Units { stride: if inputs_first { own * outputs } else { own }, count: heads }))
            }
            PruningKind::Channel if self.param.shape().dims() == 4 => {
                let outputs = self.param.shape().sizes()[0];
                Some(Ok(Units { stride: numel / outputs.max(1), count: outputs }))
            }
            _ => None,
        }
    }
}

impl Compression {
    /// What is done to which of these parameters, or why it cannot be.
    pub fn plan(&self, params: &[Param]) -> Result<Plan> {
        let candidates: Vec<Candidate<'_>> = params
            .iter()
            .enumerate()
            .filter(|(_, param)| param.shape().dims() >= 2 && param.numel() > 0)
            .filter_map(|(weight, param)| {
                let name = param.name().strip_suffix("weight")?;
                Some(Candidate { name: name.strip_suffix('.').unwrap_or(name), weight, param })
            })
            .collect();
        let mut modules: Vec<Module> = candidates.iter().map(Module::of).collect();
        if let Some(weights) = &self.weights {
            let fits = |_: &Candidate<'_>| true;
            for (module, schedule) in matched("weight_quantization", &weights.bits, &candidates, fits)? {
                let candidate = &candidates[module];
                // Rows of a table are looked up one by one.
                let is_table = candidate.param.is_table();
                let groups = if is_table { candidate.param.shape().sizes()[0] } else { weights.groups };
                if !candidate.param.numel().is_multiple_of(groups) {
                    return Err(fault(format!(
                        "weight_quantization: {}.weight {} cannot be cut into {groups} groups alike (quantize_groups)",
                        candidate.name,
                        candidate.param.shape()
                    )));
                }
                modules[module].bits = Some(WeightBits {
                    offset: weights.offset,
                    schedule: *schedule,
                    in_forward: weights.in_forward,
                    symmetric: weights.symmetric,
                    groups,
                    stochastic: weights.stochastic,
                });
            }
        }
        for technique in &self.pruning {
            let (kind, heads) = (technique.kind, technique.heads.unwrap_or(1).max(1));
            let fits = |candidate: &Candidate<'_>| candidate.units(kind, heads).is_some();
            for (module, ratio) in matched(kind.technique(), &technique.ratios, &candidates, fits)? {
                let candidate = &candidates[module];
                let Some(units) = candidate.units(kind, heads) else { continue };
                let pruning = Pruning { kind, offset: technique.offset, ratio: *ratio, units: units? };
                modules[module].prunings.push(pruning);
                if kind.takes_bias() {
                    let bias = params.iter().position(|param| {
                        param.name().strip_suffix("bias").and_then(|name| name.strip_suffix('.'))
                            == Some(candidate.name)
                            && param.numel() == pruning.units.count
                    });
                    modules[module].bias = bias;
                }
            }
        }
        if let Some(activations) = &self.activations {
            let name = "activation_quantization";
            for (module, levels) in
                matched(name, &activations.bits, &candidates, |candidate| candidate.is_linear())?
            {
                if candidates[module].param.unit().is_some() {
                    return Err(fault(format!(
                        "{name}: {} is of a mixture's experts, which take all of their tokens in one kernel; leave it out \
                         (modules)",
                        candidates[module].name
                    )));
                }
                modules[module].activations =
                    Some(ActivationBits { offset: activations.offset, levels: *levels });
            }
        }
        modules.retain(|module| {
            module.bits.is_some() || !module.prunings.is_empty() || module.activations.is_some()
        });
        Ok(Plan { modules })
    }
}

impl Module {
    fn of(candidate: &Candidate<'_>) -> Module {
        Module {
            name: candidate.name.to_owned(),
            weight: candidate.weight,
            bias: None,
            bits: None,
            prunings: Vec::new(),
            activations: None,
        }
    }
}

/// Which modules are of which group of a technique. A module of two, and a pattern of none, is a mistake.
fn matched<'g, T>(
    technique: &str,
    groups: &'g [(Patterns, T)],
    candidates: &[Candidate<'_>],
    fits: impl Fn(&Candidate<'_>) -> bool,
) -> Result<Vec<(usize, &'g T)>> {
    let mut found: Vec<Option<(&str, &T)>> = vec![None; candidates.len()];
    for (patterns, params) in groups {
        for (pattern, regex) in &patterns.patterns {
            let mut is_used = false;
            for (candidate, found) in candidates.iter().zip(&mut found) {
                if !fits(candidate) || !regex.is_match(candidate.name) {
                    continue;
                }
                is_used = true;
                if let Some((other, _)) = found.replace((&patterns.group, params)) {
                    let (name, group) = (candidate.name, &patterns.group);
                    return Err(fault(format!(
                        "{technique}: {name} is named twice, by different_groups.{other} and by {pattern:?} of \
                         different_groups.{group}; a module is of one group, by one pattern"
                    )));
                }
            }
            if !is_used {
                let names: Vec<&str> = candidates.iter().filter(|c| fits(c)).map(|c| c.name).collect();
                let some = match names.len() {
                    0 => "the model has no module that it is for".to_owned(),
                    1..=8 => format!("there are {}", names.join(", ")),
                    count => format!("there are {count}, of which the first are {}", names[..8].join(", ")),
                };
                return Err(fault(format!(
                    "{technique}.different_groups.{}.modules: {pattern:?} is found in the name of no module; {some}",
                    patterns.group
                )));
            }
        }
    }
    let found = found.into_iter().enumerate();
    Ok(found.filter_map(|(at, found)| found.map(|(_, params)| (at, params))).collect())
}
