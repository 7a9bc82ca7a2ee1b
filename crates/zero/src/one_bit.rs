//! The step of optimizers that exchange momentum instead of gradients ([`ferrospeed_optim::one_bit`]).
//!
//! Every rank holds whole parameters (stage 0). Before each step the rule says whether it wants averaged gradients or this
//! rank's own; the reducer then leaves out the exchange. Where gradients are a rank's own, ranks still agree on whether
//! all of them are numbers, and clip by one norm: the root of the mean of all ranks' squares.
//!
//! What compression has lost so far, and how far ranks are from where they last met, is each rank's own ([`own`]): a run that goes on
//! on as many ranks has it back from a checkpoint, on others it begins with nothing lost. Refused: what is spread over ranks,
//! offloaded or on a device.

mod own;

pub use own::OwnNumbers;

use std::collections::{BTreeMap, BTreeSet};

use ferrospeed_collective::CollectiveError;
use ferrospeed_collective::one_bit::{self, Averaged, Feedback, padded_numel};
use ferrospeed_comm::Group;
use ferrospeed_config::Stage;
use ferrospeed_optim::one_bit::{Exchange, Memory, OneBit, Ratio, Values, Whole};
use ferrospeed_optim::{Copy16, GroupOptions, Optimizer};
use ferrospeed_tensor::{DType, Device, Tensor};

use crate::attached::State;
use crate::error::{Result, ZeroError};
use crate::memory::part;
use crate::partition::Fragment;
use crate::reducer::Segment;
use crate::step::gradient_of;
use crate::store::{Share, StoreOptions, ZeroStore};

/// What a rule remembers, and what ranks have lost between each other.
pub(crate) struct Compressing {
    rule: OneBit,
    memory: Memory,
    ranks: Ranks,
}

struct Ranks {
    group: Group,
    feedbacks: BTreeMap<usize, Feedback>,
    device: Device,
}

impl Exchange for Ranks {
    type Error = CollectiveError;

    fn padded(&self, numel: usize) -> usize {
        padded_numel(numel, self.group.size())
    }

    fn average(&mut self, tensors: Vec<(usize, &mut dyn Values)>) -> Result<(), CollectiveError> {
        let ranks = self.group.size();
        for (tensor, values) in &tensors {
            self.feedbacks.entry(*tensor).or_insert_with(|| Feedback::new(values.numel(), ranks));
        }
        // Both are in the order of tensors.
        let asked: BTreeSet<usize> = tensors.iter().map(|(tensor, _)| *tensor).collect();
        let feedbacks = self.feedbacks.iter_mut().filter(|(tensor, _)| asked.contains(tensor));
        let mut lent: Vec<Lent<'_>> = tensors.into_iter().map(|(_, values)| Lent(values)).collect();
        let mut averaged: Vec<Averaged<'_>> = lent
            .iter_mut()
            .zip(feedbacks)
            .map(|(values, (_, feedback))| Averaged { values, feedback })
            .collect();
        one_bit::all_reduce_each(&self.group, &self.device, &mut averaged)
    }

    fn forget(&mut self) {
        self.feedbacks.clear();
    }
}

/// What a rule gives, as the ranks take it.
struct Lent<'a>(&'a mut dyn Values);

impl one_bit::Values for Lent<'_> {
    fn numel(&self) -> usize {
        self.0.numel()
    }

    fn give(&mut self, start: usize, block: &mut [f32]) {
        self.0.give(start, block);
    }

    fn take(&mut self, start: usize, block: &[f32]) {
        self.0.take(start, block);
    }
}

/// Why such an optimizer cannot run as configured.
fn refusal(options: &StoreOptions<'_>, device: &Device) -> Option<&'static str> {
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
    if options.homes.states().is_some() {
        return Some("its state cannot be offloaded: remove offload_optimizer");
    }
    if options.sparse_gradients {
        return Some("momentum is exchanged, which is not sparse: remove sparse_gradients");
    }
    (!device.backend().is_host())
        .then_some("it runs on the host only: train on the CPU, or use another optimizer")
}

impl Compressing {
    /// For the configured optimizer, if it is one of these.
    pub(crate) fn new(options: &StoreOptions<'_>, device: &Device) -> Result<Option<Compressing>> {
        let Some(Optimizer::OneBit(rule)) = options.optimizer else { return Ok(None) };
        if let Some(why) = refusal(options, device) {
            return Err(ZeroError::Request(format!(
                "the optimizer {} cannot be used here: {why}",
                rule.name()
            )));
        }
        let ranks = Ranks {
            group: options.sharding.shard.clone(),
            feedbacks: BTreeMap::new(),
            device: device.clone(),
        };
        Ok(Some(Compressing { rule, memory: Memory::default(), ranks }))
    }

    /// Whether the next step wants this rank's own gradients.
    pub(crate) fn wants_local(&self, steps_taken: u64) -> bool {
        self.ranks.group.size() > 1 && self.rule.takes_local_gradients(steps_taken.saturating_add(1))
    }

    /// Goes on from other weights and states.
    pub(crate) fn restart(&mut self) {
        self.memory = Memory::default();
        self.ranks.forget();
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
        for (index, share) in shares.iter().enumerate().filter(|(_, share)| share.trained) {
            let (master, states) = (share.own_master()?, share.kept_states()?);
            let values = share.master.is_some().then(|| share.own_values()).transpose()?;
            for in_group in 0..share.params.len() {
                let Some(fragment) = share.layout.fragment(in_group, 0) else { continue };
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

    /// As a rule steps them.
    ///
    /// # Safety
    /// Nobody else reads or writes these tensors meanwhile.
    unsafe fn whole(&self, options: GroupOptions, gradient_factor: f32) -> Result<Whole<'_>> {
        // SAFETY: as the caller says; the tensors are different ones.
        unsafe {
            Ok(Whole {
                weights: self.weights.host_mut()?,
                gradient: gradient_of(&self.gradient)?,
                gradient_factor,
                states: self.states.iter().map(|state| state.host_mut()).collect::<Result<_, _>>()?,
                copy: match &self.copy {
                    Some(copy) if copy.dtype() == DType::BF16 => Copy16::Bf16(copy.host_mut()?),
                    Some(copy) => Copy16::F16(copy.host_mut()?),
                    None => Copy16::None,
                },
                options,
            })
        }
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
        let State { shares, compressing: Some(Compressing { rule, memory, ranks }), .. } = state else {
            return Ok(());
        };
        let tensors = Tensors::of(shares, segments)?;
        let mut params = Vec::with_capacity(tensors.len());
        for own in &tensors {
            // SAFETY: all of them are this store's own, the lock on its state is held, no collective over them is in flight,
            // nobody borrows a value during a step, and the parts of parameters are disjoint.
            params.push(unsafe { own.whole(shares[own.share].options, factor)? });
        }
        let step = shares.iter().map(|share| share.steps).max().unwrap_or(0);
        Ok(rule.step(&self.device, memory, &mut params, step, ranks)?)
    }

    /// What the optimizer keeps of whole parameters, by name: the ratios of 1-bit LAMB.
    pub fn per_parameter(&self) -> BTreeMap<String, Vec<f64>> {
        let state = self.lock();
        let ratios = state.compressing.iter().flat_map(|compressing| &compressing.memory.ratios);
        let numbers = |ratio: &Ratio| vec![ratio.frozen, ratio.factor, ratio.scale];
        self.trained_names(&state).into_iter().zip(ratios.map(numbers)).collect()
    }

    /// Goes on with what [`ZeroStore::per_parameter`] gave; what is missing begins anew.
    pub fn set_per_parameter(&self, saved: &BTreeMap<String, Vec<f64>>) {
        let mut state = self.lock();
        let names = self.trained_names(&state);
        let Some(compressing) = &mut state.compressing else { return };
        let ratio = |name: &String| match saved.get(name).map(Vec::as_slice) {
            Some(&[frozen, factor, scale]) => Ratio { frozen, factor, scale },
            _ => Ratio::default(),
        };
        if !saved.is_empty() {
            compressing.memory.ratios = names.iter().map(ratio).collect();
        }
    }

    /// The parameters that a rule steps, in its order.
    fn trained_names(&self, state: &State) -> Vec<String> {
        let trained = state.shares.iter().filter(|share| share.trained);
        trained.flat_map(|share| &share.params).map(|&param| self.params[param].name().to_owned()).collect()
    }
}
