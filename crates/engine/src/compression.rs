//! Training a model to be compressed (`compression_training`): weights that kernels see in few bits and with zeros, of masters that
//! stay exact.
//!
//! In how many bits follows from the number of steps alone. What is pruned is chosen once, by the weights of the first pass that
//! prunes, and is part of checkpoints. All ranks see the same, in every ZeRO stage.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use ferrospeed_config::Config;
use ferrospeed_nn::activation_bits::ActivationBits;
use ferrospeed_optim::compression::{Compression, Mask, Module, Plan, Units};
use ferrospeed_tensor::fake_quantize::Levels;
use ferrospeed_tensor::random::{RandomKey, stream_of_name};
use ferrospeed_tensor::{Param, Tensor};
use ferrospeed_zero::{Lens, ZeroStore};

use crate::engine::Engine;
use crate::error::{EngineError, Result};

const KEY: &str = "compression_training";

/// The section of a run, where something of it is on.
pub(crate) fn compression(config: &Config) -> Result<Option<Compression>> {
    Ok(config.section(KEY).map_or(Ok(None), Compression::from_section)?)
}

/// What it means for a model, or why it cannot be.
pub(crate) fn plan(config: &Config, params: &[Param]) -> Result<Option<Plan>> {
    Ok(compression(config)?.map(|compression| compression.plan(params)).transpose()?)
}

/// The part of a run that compresses.
#[derive(Clone)]
pub(crate) struct Compressing {
    view: Arc<View>,
    /// Whether changes of precision are told.
    verbose: bool,
}

/// What kernels see.
struct View {
    modules: Vec<Module>,
    /// Where random numbers of each module come from.
    streams: Vec<u32>,
    /// By place among the parameters: the module, and whether it is its bias.
    roles: Vec<Option<(usize, bool)>>,
    now: RwLock<Now>,
}

/// What changes from step to step.
struct Now {
    /// Optimizer steps that changed something.
    steps: u64,
    seed: u64,
    /// By module, then by pruning: what is kept, once it was chosen.
    masks: Vec<Vec<Option<Arc<Mask>>>>,
}

impl View {
    fn now(&self) -> RwLockReadGuard<'_, Now> {
        self.now.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self) -> RwLockWriteGuard<'_, Now> {
        self.now.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is kept of a parameter at this step, with what it is cut into.
    fn masks(&self, index: usize) -> Vec<(Arc<Mask>, Units)> {
        let Some((module, is_bias)) = self.roles.get(index).copied().flatten() else { return Vec::new() };
        let now = self.now();
        let prunings = self.modules[module].prunings.iter().zip(&now.masks[module]);
        let due = prunings.filter(|(pruning, _)| now.steps >= pruning.offset);
        due.filter_map(|(pruning, mask)| {
            let units = match is_bias {
                // Of a bias, each element is an output's.
                true if !pruning.kind.takes_bias() => return None,
                true => Units { stride: 1, count: pruning.units.count },
                false => pruning.units,
            };
            Some((mask.clone()?, units))
        })
        .collect()
    }
}

impl Lens for View {
    fn seen(&self, index: usize, exact: &Tensor) -> ferrospeed_tensor::Result<Option<Tensor>> {
        let Some((module, is_bias)) = self.roles.get(index).copied().flatten() else { return Ok(None) };
        let mut seen = None;
        if let Some(bits) = self.modules[module].bits.filter(|_| !is_bias) {
            let (steps, seed) = {
                let now = self.now();
                (now.steps, now.seed)
            };
            if let Some(mut quantizer) = bits.quantizer_after(steps) {
                let key = RandomKey { step: steps as u32, ..RandomKey::new(seed, self.streams[module]) };
                quantizer.noise = bits.stochastic.then_some(key);
                seen = Some(quantizer.apply(exact)?);
            }
        }
        for (mask, units) in self.masks(index) {
            seen = Some(mask.apply(units, seen.as_ref().unwrap_or(exact))?);
        }
        Ok(seen)
    }

    fn changes_gradient(&self, index: usize) -> bool {
        !self.masks(index).is_empty()
    }

    fn gradient(&self, index: usize, gradient: Tensor) -> ferrospeed_tensor::Result<Tensor> {
        let masks = self.masks(index);
        masks.into_iter().try_fold(gradient, |gradient, (mask, units)| mask.apply(units, &gradient))
    }
}

impl Compressing {
    /// Of an engine, whose store sees weights through it from now on.
    pub(crate) fn of_engine(config: &Config, store: &ZeroStore, seed: u64) -> Result<Option<Compressing>> {
        let Some(Plan { modules }) = plan(config, store.params())? else { return Ok(None) };
        if !store.device().backend().is_host() {
            let why =
                "it runs on the CPU only, and this rank computes on a GPU; train without it, or on the CPU";
            return Err(EngineError::Unsupported { key: KEY, why: why.to_owned() });
        }
        let mut roles = vec![None; store.params().len()];
        for (at, module) in modules.iter().enumerate() {
            roles[module.weight] = Some((at, false));
            if let Some(bias) = module.bias {
                roles[bias] = Some((at, true));
            }
        }
        let stream = |module: &Module| stream_of_name(&format!("quantisation of {}", module.name));
        let none = |module: &Module| vec![None; module.prunings.len()];
        let now = Now { steps: 0, seed, masks: modules.iter().map(none).collect() };
        let streams = modules.iter().map(stream).collect();
        let view = Arc::new(View { streams, roles, now: RwLock::new(now), modules });
        store.look_through(view.clone())?;
        let section = config.section(KEY).map(|section| &section["weight_quantization"]["shared_parameters"]);
        let verbose = section.is_some_and(|shared| shared["quantize_verbose"] == true);
        Ok(Some(Compressing { view, verbose: verbose && store.world().rank() == 0 }))
    }

    /// So many steps are done. Those that were skipped do not count.
    pub(crate) fn after(&self, steps: u64) {
        let before = std::mem::replace(&mut self.view.change().steps, steps);
        if self.verbose {
            for module in &self.view.modules {
                let bits = |steps| Some(module.bits?.after(steps)?.bits);
                if let Some(now) = bits(steps).filter(|now| Some(*now) != bits(before)) {
                    tracing::info!("{KEY}: {} is read in {now} bits after {steps} steps", module.name);
                }
            }
        }
    }

    /// Chooses what is pruned from now on, where that is due. All ranks come here together, before they use it.
    pub(crate) fn prepare(&self, store: &ZeroStore) -> Result<()> {
        for (at, module) in self.view.modules.iter().enumerate() {
            for (which, pruning) in module.prunings.iter().enumerate() {
                let is_due = {
                    let now = self.view.now();
                    now.steps >= pruning.offset && now.masks[at][which].is_none()
                };
                if is_due {
                    let exact = store.exact_as_read(&store.params()[module.weight])?;
                    let mask = Mask::of_largest(&pruning.units.scores(&exact), pruning.ratio);
                    self.view.change().masks[at][which] = Some(Arc::new(mask));
                }
            }
        }
        Ok(())
    }

    /// What was chosen, by technique and module, for checkpoints.
    pub(crate) fn saved(&self) -> BTreeMap<String, String> {
        let now = self.view.now();
        let each = self.view.modules.iter().zip(&now.masks).flat_map(|(module, masks)| {
            module.prunings.iter().zip(masks).filter_map(|(pruning, mask)| {
                Some((format!("{}:{}", pruning.kind, module.name), mask.as_ref()?.to_text()))
            })
        });
        each.collect()
    }

    /// Goes on with what was chosen; what was not, or for another share, is chosen anew when it is due.
    pub(crate) fn restore(&self, steps: u64, seed: u64, saved: &BTreeMap<String, String>) -> Result<()> {
        let mut masks = Vec::new();
        for module in &self.view.modules {
            let mut own = Vec::new();
            for pruning in &module.prunings {
                let name = format!("{}:{}", pruning.kind, module.name);
                let read = saved.get(&name).map(|text| {
                    Mask::from_text(text, pruning.units.count).ok_or_else(|| {
                        let why = format!("'{name}' is not the mask of {} units", pruning.units.count);
                        EngineError::Argument { what: "the checkpoint's masks", why }
                    })
                });
                let wanted = Mask::kept_of(pruning.units.count, pruning.ratio);
                own.push(read.transpose()?.filter(|mask| mask.kept() == wanted).map(Arc::new));
            }
            masks.push(own);
        }
        *self.view.change() = Now { steps, seed, masks };
        Ok(())
    }
}

impl Engine {
    /// With `compression_training`: of each pruned module, the share of its weight that is kept, once that was chosen; by
    /// technique and module.
    pub fn kept_shares(&self) -> BTreeMap<String, f64> {
        let Some(compressing) = &self.compressing else { return BTreeMap::new() };
        let now = compressing.view.now();
        let each = compressing.view.modules.iter().zip(&now.masks).flat_map(|(module, masks)| {
            module.prunings.iter().zip(masks).filter_map(|(pruning, mask)| {
                let mask = mask.as_ref()?;
                let share = mask.kept() as f64 / mask.units().max(1) as f64;
                Some((format!("{}:{}", pruning.kind, module.name), share))
            })
        });
        each.collect()
    }

    /// The inputs of which layers are in few bits in a pass now.
    pub(crate) fn activation_bits(&self) -> Option<ActivationBits> {
        let view = &self.compressing.as_ref()?.view;
        let steps = view.now().steps;
        let due = |module: &Module| {
            let bits = module.activations.filter(|bits| steps >= bits.offset)?;
            Some((self.store.params()[module.weight].id(), bits.levels))
        };
        let bits: HashMap<u64, Levels> = view.modules.iter().filter_map(due).collect();
        (!bits.is_empty()).then(|| Arc::new(bits))
    }

    /// Steps that changed something.
    pub(crate) fn applied_steps(&self) -> u64 {
        self.global_steps.saturating_sub(self.skipped_steps)
    }

    /// Makes ready what the next look at weights needs. All ranks call it together.
    pub(crate) fn prepare_weights(&self) -> Result<()> {
        self.compressing.as_ref().map_or(Ok(()), |compressing| compressing.prepare(&self.store))
    }
}
