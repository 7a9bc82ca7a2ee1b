//! The step of optimizers that exchange momentum instead of gradients ([`ferrospeed_optim::one_bit`]).
//!
//! Every rank holds whole parameters (stage 0). Before each step the rule says whether it wants averaged gradients or this
//! rank's own; the reducer then leaves out the exchange. Where gradients are a rank's own, ranks still agree on whether
//! all of them are numbers, and clip by one norm: the root of the mean of all ranks' squares.
//!
//! What compression has lost so far, and how far ranks are from where they last met, is each rank's own ([`own`]): a run that goes on
//! on as many ranks has it back from a checkpoint, on others it begins with nothing lost. The host steps by loops of the rules
//! ([`host`]), a device by passes of its own ([`device`]). Refused: what is spread over ranks or offloaded.

mod device;
mod host;
mod own;

pub use own::OwnNumbers;

use std::collections::BTreeMap;

use device::OnDevice;
use ferrospeed_comm::Group;
use ferrospeed_config::{OptimizerTier, Stage};
use ferrospeed_optim::Optimizer;
use ferrospeed_optim::one_bit::{OneBit, Ratio};
use ferrospeed_tensor::{Device, Tensor};
use host::OnHost;

use crate::attached::State;
use crate::error::{Result, ZeroError};
use crate::memory::part;
use crate::reducer::Segment;
use crate::store::{Share, StoreOptions, ZeroStore};
use ferrospeed_placement::layout::Fragment;

/// A rule, with what it remembers and what ranks have lost between each other.
pub(crate) struct Compressing {
    rule: OneBit,
    group: Group,
    kept: Kept,
}

/// Where that is.
enum Kept {
    Host(OnHost),
    Device(OnDevice),
}

impl Kept {
    /// The ratios of 1-bit LAMB.
    fn ratios(&self) -> &[Ratio] {
        match self {
            Kept::Host(host) => &host.memory.ratios,
            Kept::Device(device) => &device.ratios,
        }
    }

    fn set_ratios(&mut self, ratios: Vec<Ratio>) {
        match self {
            Kept::Host(host) => host.memory.ratios = ratios,
            Kept::Device(device) => device.ratios = ratios,
        }
    }
}

/// Why such an optimizer cannot run as configured.
fn refusal(options: &StoreOptions<'_>) -> Option<&'static str> {
    let sharding = &options.sharding;
    if options.zero.stage != Stage::Off {
        return Some(
            "every rank updates whole parameters from its own gradients: set zero_optimization.stage to 0",
        );
    }
    if sharding.replicas.is_some() || !options.elsewhere.is_empty() || options.agreement.is_some() {
        return Some(
            "all ranks must hold the same whole model: remove pipeline stages, tensor slices and experts that are spread over ranks",
        );
    }
    if sharding.divisor != sharding.ranks() {
        return Some(
            "it averages over all ranks, and ranks that share sequences bring summands: set sequence_parallel_size to 1",
        );
    }
    if options.zero.offload_optimizer.tier != OptimizerTier::Device {
        return Some("its state cannot be offloaded: remove offload_optimizer");
    }
    if options.sparse_gradients {
        return Some("momentum is exchanged, which is not sparse: remove sparse_gradients");
    }
    None
}

impl Compressing {
    /// For the configured optimizer, if it is one of these.
    pub(crate) fn new(options: &StoreOptions<'_>, device: &Device) -> Result<Option<Compressing>> {
        let Some(Optimizer::OneBit(rule)) = options.optimizer else { return Ok(None) };
        if let Some(why) = refusal(options) {
            return Err(ZeroError::Request(format!(
                "the optimizer {} cannot be used here: {why}",
                rule.name()
            )));
        }
        let group = options.sharding.shard.clone();
        let kept = match device.backend().is_host() {
            true => Kept::Host(OnHost::new(&group, device)),
            false => Kept::Device(OnDevice::new(&group, device)),
        };
        Ok(Some(Compressing { rule, group, kept }))
    }

    /// Whether the next step wants this rank's own gradients.
    pub(crate) fn wants_local(&self, steps_taken: u64) -> bool {
        self.group.size() > 1 && self.rule.takes_local_gradients(steps_taken.saturating_add(1))
    }

    /// Goes on from other weights and states.
    pub(crate) fn restart(&mut self) {
        match &mut self.kept {
            Kept::Host(host) => host.restart(),
            Kept::Device(device) => *device = device.begun_anew(),
        }
    }
}

/// One whole parameter's tensors.
struct Tensors {
    share: usize,
    weights: Tensor,
    gradient: Tensor,
    states: Vec<Tensor>,
    /// What kernels read, where that is not the weights themselves.
    copy: Option<Tensor>,
}

impl Tensors {
    /// Those of all trained parameters, in order.
    fn of(shares: &[Share], segments: &[Segment]) -> Result<Vec<Tensors>> {
        let mut tensors = Vec::new();
        for (index, share) in shares.iter().enumerate().filter(|(_, share)| share.placed.trained) {
            let (master, states) = (share.own_master()?, share.kept_states()?);
            let values = share.master.is_some().then(|| share.own_values()).transpose()?;
            for in_group in 0..share.placed.params.len() {
                let Some(fragment) = share.placed.layout.fragment(in_group, 0) else { continue };
                let cut = |flat: &Tensor| part(flat, fragment.in_part, fragment.len);
                tensors.push(Tensors {
                    share: index,
                    weights: cut(&master)?,
                    gradient: gradient(segments, index, fragment)?,
                    states: states.iter().map(cut).collect::<Result<_>>()?,
                    copy: values.as_ref().map(cut).transpose()?,
                });
            }
        }
        Ok(tensors)
    }
}

/// The gradient of a whole parameter, which travels with no other's in between.
fn gradient(segments: &[Segment], share: usize, fragment: &Fragment) -> Result<Tensor> {
    let range = fragment.in_part..fragment.in_part + fragment.len;
    let own = segments.iter().filter(|segment| segment.group == share);
    let mut own = own.filter_map(|segment| Some((segment, segment.within(&range)?)));
    match own.next() {
        Some((segment, (start, len))) if len == fragment.len => {
            part(&segment.values, start - segment.in_part, len)
        }
        found => Err(ZeroError::Request(format!(
            "{} of {} elements of a parameter's gradient lie together: a 1-bit optimizer steps whole ones",
            found.map_or(0, |(_, (_, len))| len),
            fragment.len
        ))),
    }
}

impl ZeroStore {
    /// The ranks that must decide together whether and how to step.
    pub(crate) fn deciding(&self, state: &State) -> Option<Group> {
        let apart = state.reducer.is_local.then(|| self.sharding.shard.clone());
        self.agreement.clone().or(apart)
    }

    pub(crate) fn one_bit_step(&self, state: &mut State, segments: &[Segment], factor: f32) -> Result<()> {
        let State { shares, compressing: Some(Compressing { rule, kept, .. }), .. } = state else {
            return Ok(());
        };
        let tensors = Tensors::of(shares, segments)?;
        let step = shares.iter().map(|share| share.steps).max().unwrap_or(0);
        match kept {
            // SAFETY: all of them are this store's own, the lock on its state is held, no collective over them is in flight,
            // nobody borrows a value during a step, and the parts of parameters are disjoint.
            Kept::Host(host) => unsafe { host.step(rule, &tensors, shares, step, factor) },
            Kept::Device(device) => device.step(rule, &tensors, shares, step, factor),
        }
    }

    /// What the optimizer keeps of whole parameters, by name: the ratios of 1-bit LAMB.
    pub fn per_parameter(&self) -> BTreeMap<String, Vec<f64>> {
        let state = self.lock();
        let ratios = state.compressing.iter().flat_map(|compressing| compressing.kept.ratios());
        let numbers = |ratio: &Ratio| vec![ratio.frozen, ratio.factor, ratio.scale];
        self.trained_names(&state).into_iter().zip(ratios.map(numbers)).collect()
    }

    /// Goes on with what [`ZeroStore::per_parameter`] gave; what is missing begins anew.
    pub fn set_per_parameter(&self, saved: &BTreeMap<String, Vec<f64>>) {
        let mut state = self.lock();
        let names = self.trained_names(&state);
        let Some(compressing) = &mut state.compressing else { return };
        let ratio = |name: &String| {
            saved.get(name).and_then(|numbers| Ratio::from_numbers(numbers)).unwrap_or_default()
        };
        if !saved.is_empty() {
            compressing.kept.set_ratios(names.iter().map(ratio).collect());
        }
    }

    /// The parameters that a rule steps, in its order.
    fn trained_names(&self, state: &State) -> Vec<String> {
        let trained = state.shares.iter().filter(|share| share.placed.trained);
        trained
            .flat_map(|share| &share.placed.params)
            .map(|&param| self.params[param].name().to_owned())
            .collect()
    }
}
