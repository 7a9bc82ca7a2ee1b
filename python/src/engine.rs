//! The engine as Python holds it: made from a module's parameters, then forward, backward and step as torch's autograd goes.
//!
//! Nothing here is held across calls but the engine itself. Between the begin and the end of a backward torch computes, and its
//! hooks push gradients to the store, which has its own lock.

use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::sync::{Arc, Mutex, PoisonError};

use ferrospeed_config::{AutoValues, Config};
use ferrospeed_engine::{
    BackwardOptions, Engine as Training, EngineError, Options, OutsideBackward, Setup, StepReport,
};
use ferrospeed_nn::Init;
use ferrospeed_optim::{GroupOptions, Optimizer};
use ferrospeed_tensor::{Initializer, Param, TensorError};
use ferrospeed_zero::{ParamGroup, ZeroStore};
use pyo3::prelude::*;
use serde_json::Value;

use crate::errors::{of_config, of_engine, of_tensor, refused};
use crate::memory::{gradient, sent_type, torch_name, weight_type};
use crate::source::{Buffer, FromModule, Given, broadcast};
use crate::views::{borrowed, lasting, shape_of};
use crate::waiting::detached;
use crate::world::world;

/// The engine.
#[pyclass(frozen, module = "ferrospeed._ferrospeed")]
pub(crate) struct Engine {
    training: Mutex<Training>,
    pub(crate) store: Arc<ZeroStore>,
    pub(crate) params: Vec<Param>,
    backward: Mutex<Option<OutsideBackward>>,
}

/// A parameter as Python names it: name, address, type, shape, whether it is trained.
type Parameter = (String, usize, String, Vec<usize>, bool);
/// A group: its parameters by number, learning rate, weight decay, decay rates; what it does not say is as configured.
type Group = (Vec<usize>, Option<f64>, Option<f64>, Option<[f64; 2]>);

impl Engine {
    /// Does something with the engine, without Python's lock.
    pub(crate) fn with<R: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Training) -> Result<R, EngineError> + Send,
    ) -> PyResult<R> {
        detached(py, || work(&mut self.training.lock().unwrap_or_else(PoisonError::into_inner)))
            .map_err(of_engine)
    }

    /// Looks at it.
    fn see<R: Send>(&self, py: Python<'_>, look: impl FnOnce(&Training) -> R + Send) -> R {
        detached(py, || look(&self.training.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    /// The parameter of this number.
    pub(crate) fn param(&self, index: usize) -> PyResult<&Param> {
        self.params.get(index).ok_or_else(|| refused(format!("there is no parameter {index}")))
    }
}

/// The configuration in force: what `config` says (text, or the path of a file), some of it overridden.
fn resolved(
    config: &str,
    overrides: &[String],
    auto: &[(String, String)],
    ranks: usize,
    leads: bool,
) -> PyResult<Config> {
    let is_text = config.trim_start().starts_with('{');
    let unresolved =
        if is_text { Config::from_str("ds_config", config) } else { Config::from_argument(config) };
    let unresolved =
        unresolved.and_then(|unresolved| unresolved.with_overrides(overrides)).map_err(of_config)?;
    let mut values = AutoValues::new();
    for (path, value) in auto {
        let value: Value =
            serde_json::from_str(value).map_err(|error| refused(format!("{path}: {error}")))?;
        values = values.with(path, value);
    }
    let ranks = NonZeroU64::new(ranks as u64).unwrap_or(NonZeroU64::MIN);
    let (config, report) = unresolved.resolve(ranks, &values).map_err(of_config)?;
    if leads {
        report.warnings().for_each(|warning| eprintln!("ferrospeed: {warning}"));
    }
    Ok(config)
}

/// The module's parameters as handles, in order.
fn handles(
    init: &Init,
    parameters: &[Parameter],
    aliases: &BTreeMap<String, String>,
) -> Result<Vec<Param>, TensorError> {
    let handle = |(name, _, _, shape, trained): &Parameter| {
        let param = init.param(name, shape_of(shape)?, Initializer::Constant(0.0));
        param.set_trainable(*trained);
        Ok(param)
    };
    let params: Vec<Param> = parameters.iter().map(handle).collect::<Result<_, TensorError>>()?;
    for (alias, name) in aliases {
        params.iter().filter(|param| param.name() == name).for_each(|param| init.tie(alias, param));
    }
    Ok(params)
}

#[pymethods]
impl Engine {
    /// Makes an engine of a module's parameters. All ranks call it together.
    ///
    /// Each address is that of a contiguous tensor on the host, which the package keeps until this returns.
    #[new]
    #[pyo3(signature = (config, parameters, buffers, aliases, groups, overrides, auto, leaf_modules, seed))]
    fn new(
        py: Python<'_>,
        config: &str,
        parameters: Vec<Parameter>,
        buffers: Vec<(String, usize, usize, Py<PyAny>)>,
        aliases: BTreeMap<String, String>,
        groups: Option<Vec<Group>>,
        overrides: Vec<String>,
        auto: Vec<(String, String)>,
        leaf_modules: Vec<String>,
        seed: u64,
    ) -> PyResult<Engine> {
        let world = world()?;
        let config = resolved(config, &overrides, &auto, world.size(), world.rank() == 0)?;
        let given = |(name, address, dtype, shape, _): &Parameter| {
            let numel = shape.iter().product();
            Ok(Given { name: name.clone(), address: *address, numel, dtype: sent_type(dtype)? })
        };
        let given: Vec<Given> = parameters.iter().map(given).collect::<PyResult<_>>()?;
        let init = Init::root();
        let params = handles(&init, &parameters, &aliases).map_err(of_tensor)?;
        for (name, address, numel, owner) in buffers {
            // SAFETY: the package lays buffers down there, and gives the object that keeps them.
            init.state(&name, Arc::new(unsafe { Buffer::new(address, numel, owner) }));
        }
        let configured =
            config.optimizer.as_ref().and_then(Optimizer::from_config).map(|(_, options)| options);
        let configured = configured.unwrap_or(GroupOptions { lr: 0.0, weight_decay: 0.0, betas: [0.0; 2] });
        let group = |(members, lr, weight_decay, betas): Group| {
            let missing = members.iter().find(|member| **member >= params.len());
            missing.map_or(Ok(()), |member| {
                Err(refused(format!("a group names parameter {member}, which is not there")))
            })?;
            let params = members.iter().map(|member| params[*member].clone()).collect();
            let options = GroupOptions {
                lr: lr.unwrap_or(configured.lr),
                weight_decay: weight_decay.unwrap_or(configured.weight_decay),
                betas: betas.unwrap_or(configured.betas),
            };
            Ok(ParamGroup { params, options })
        };
        let groups =
            groups.map(|groups| groups.into_iter().map(group).collect::<PyResult<_>>()).transpose()?;
        let training = detached(py, || -> PyResult<Training> {
            // SAFETY: the package keeps the tensors, and waits here.
            let source = unsafe {
                broadcast(&world, &given)?;
                FromModule::new(given)
            };
            let setup = Setup { seed, ..Setup::new(config, world, ferrospeed_cpu::device()) };
            let options = Options { groups, source: Some(&source), leaf_modules, ..Options::default() };
            let parameters = init.parameters();
            let made =
                ferrospeed_engine::initialize_model(&setup, &parameters, options).map_err(of_engine)?;
            Ok(made)
        })?;
        let store = Arc::clone(training.store());
        Ok(Engine { training: Mutex::new(training), store, params, backward: Mutex::new(None) })
    }

    /// The values of a parameter where they stay, as a DLPack capsule; `None` where they come and go.
    fn lasting(&self, py: Python<'_>, index: usize) -> PyResult<Option<Py<PyAny>>> {
        lasting(py, &self.store, self.param(index)?)
    }

    /// The values of a parameter, whole for as long as a tensor over them lives.
    fn read(&self, py: Python<'_>, index: usize) -> PyResult<Py<PyAny>> {
        borrowed(py, self.param(index)?)
    }

    /// Takes the gradient of a parameter: a contiguous tensor on the host, with the object that owns it.
    fn push_grad(
        &self,
        py: Python<'_>,
        index: usize,
        address: usize,
        dtype: &str,
        owner: Py<PyAny>,
    ) -> PyResult<()> {
        let (param, dtype) = (self.param(index)?, weight_type(dtype)?);
        // SAFETY: the package gives the gradient up with this call.
        let gradient = unsafe { gradient(address, param, dtype, self.store.device(), owner)? };
        detached(py, || param.push_grad(gradient)).map_err(of_tensor)
    }

    fn begin_forward(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, Training::begin_outside_forward)
    }

    /// Begins a backward and says what the gradient of the loss begins with.
    fn begin_backward(&self, py: Python<'_>, scale_wrt_gas: bool, retain_graph: bool) -> PyResult<f32> {
        let options = BackwardOptions { scale_wrt_gas, retain_graph, ..BackwardOptions::default() };
        let backward = self.with(py, |training| training.begin_outside_backward(options))?;
        let seed = backward.seed;
        *self.backward.lock().unwrap_or_else(PoisonError::into_inner) = Some(backward);
        Ok(seed)
    }

    fn end_backward(&self, py: Python<'_>, loss: Option<f32>) -> PyResult<()> {
        let begun = self.backward.lock().unwrap_or_else(PoisonError::into_inner).take();
        let begun = begun.ok_or_else(|| refused("no backward has begun that could end"))?;
        self.with(py, |training| training.end_outside_backward(begun, loss))
    }

    /// Gives up a backward that failed, and all gradients since the last step.
    fn abandon_backward(&self, py: Python<'_>) -> PyResult<()> {
        *self.backward.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.zero_grad(py)
    }

    /// Ends a micro-batch: `None` where the accumulation goes on, else whether weights were updated. They are when this returns.
    fn step(&self, py: Python<'_>) -> PyResult<Option<bool>> {
        self.with(py, |training| {
            let report = training.step()?;
            // The module looks at its weights without asking.
            training.store().settle("step")?;
            Ok(match report {
                StepReport::Accumulating => None,
                StepReport::Applied { .. } => Some(true),
                StepReport::Skipped { .. } => Some(false),
            })
        })
    }

    fn set_synchronize(&self, py: Python<'_>, synchronize: bool) {
        self.see(py, |training| training.set_synchronize(synchronize));
    }

    fn set_mode(&self, py: Python<'_>, training: bool) -> PyResult<()> {
        self.with(py, |engine| {
            if training {
                engine.train()
            } else {
                engine.eval()
            }
            Ok(())
        })
    }

    fn zero_grad(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |training| {
            training.zero_grad();
            Ok(())
        })
    }

    fn is_boundary(&self, py: Python<'_>) -> bool {
        self.see(py, Training::is_gradient_accumulation_boundary)
    }

    fn set_boundary(&self, py: Python<'_>, boundary: Option<bool>) -> PyResult<()> {
        self.with(py, |training| {
            training.set_gradient_accumulation_boundary(boundary);
            Ok(())
        })
    }

    /// Of every group: learning rate, weight decay, decay rates.
    fn group_options(&self) -> Vec<(f64, f64, [f64; 2])> {
        let options = self.store.group_options();
        options.into_iter().map(|options| (options.lr, options.weight_decay, options.betas)).collect()
    }

    fn set_group_options(&self, group: usize, lr: f64, weight_decay: f64, betas: [f64; 2]) {
        self.store.set_group_options(group, GroupOptions { lr, weight_decay, betas });
    }

    /// The counters: steps, samples, micro-batches, skipped steps.
    fn counters(&self, py: Python<'_>) -> (u64, u64, u64, u64) {
        self.see(py, |training| {
            (
                training.global_steps(),
                training.global_samples(),
                training.micro_steps(),
                training.skipped_steps(),
            )
        })
    }

    fn was_step_applied(&self, py: Python<'_>) -> bool {
        self.see(py, Training::was_step_applied)
    }

    fn grad_norm(&self, py: Python<'_>) -> Option<f64> {
        self.see(py, Training::global_grad_norm)
    }

    fn loss_scale(&self, py: Python<'_>) -> f64 {
        self.see(py, Training::loss_scale)
    }

    /// Global batch, micro-batch, micro-batches per step.
    fn batch_sizes(&self, py: Python<'_>) -> (u64, u64, u64) {
        self.see(py, |training| {
            let micro = training.train_micro_batch_size_per_gpu();
            (training.train_batch_size(), micro, training.gradient_accumulation_steps())
        })
    }

    /// The configuration in force, as JSON.
    fn config(&self, py: Python<'_>) -> String {
        self.see(py, |training| training.config().to_json().to_string())
    }

    /// The ZeRO stage.
    fn stage(&self) -> u8 {
        self.store.stage() as u8
    }

    /// torch's name of the type in which kernels read weights.
    fn dtype(&self) -> &'static str {
        torch_name(self.store.dtype())
    }

    /// The most elements that stage 3 had whole at once.
    fn peak_live_numel(&self) -> u64 {
        self.store.peak_live_numel()
    }
}
