//! The step of optimizers that exchange momentum instead of gradients ([`ferrospeed_optim::one_bit`]).
//!
//! Every rank holds whole parameters (stage 0). Before each step the rule says whether it wants averaged gradients or this
//! rank's own; the reducer then leaves out the exchange. Where gradients are a rank's own, ranks still agree on whether
//! all of them are numbers, and clip by one norm: the root of the mean of all ranks' squares.
//!
//! What compression has lost so far, and how far ranks are from where they last met, are no part of a checkpoint: a run
//! that goes on from one begins with nothing lost. Refused: what is spread over ranks, offloaded or on a device.

use std::collections::{BTreeMap, BTreeSet};

use ferrospeed_collective::CollectiveError;
use ferrospeed_collective::one_bit::{self, Averaged, Feedback, padded_numel};
use ferrospeed_comm::Group;
use ferrospeed_config::Stage;
use ferrospeed_optim::Optimizer;
use ferrospeed_optim::one_bit::{Exchange, Memory, OneBit, Ratio, Whole};
use ferrospeed_tensor::{Device, Out, Tensor};

use crate::attached::State;
use crate::error::{Result, ZeroError};
use crate::memory::part;
use crate::reducer::Segment;
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

    fn average(&mut self, tensors: Vec<(usize, &mut [f32])>) -> Result<(), CollectiveError> {
        let ranks = self.group.size();
        for (tensor, values) in &tensors {
            self.feedbacks.entry(*tensor).or_insert_with(|| Feedback::new(values.len(), ranks));
        }
        // Both are in the order of tensors.
        let asked: BTreeSet<usize> = tensors.iter().map(|(tensor, _)| *tensor).collect();
        let feedbacks = self.feedbacks.iter_mut().filter(|(tensor, _)| asked.contains(tensor));
        let mut averaged: Vec<Averaged<'_>> = tensors
            .into_iter()
            .zip(feedbacks)
            .map(|((_, values), (_, feedback))| Averaged { values, feedback })
            .collect();
        one_bit::all_reduce_each(&self.group, &self.device, &mut averaged)
    }

    fn forget(&mut self) {
        self.feedbacks.clear();
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
    in_part: usize,
    weights: Tensor,
    states: Vec<Tensor>,
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
        let zeros = |share: &Share| vec![0.0f32; if share.trained { share.layout.part_numel } else { 0 }];
        let mut gradients: Vec<Vec<f32>> = shares.iter().map(zeros).collect();
        for Segment { group, in_part, values } in segments {
            let place = &mut gradients[*group][*in_part..in_part + values.numel()];
            place.copy_from_slice(&values.to_vec_f32()?);
            place.iter_mut().for_each(|value| *value *= factor);
        }
        let mut tensors = Vec::new();
        for (index, share) in shares.iter().enumerate().filter(|(_, share)| share.trained) {
            let (master, states) = (share.own_master()?, share.kept_states()?);
            for in_group in 0..share.params.len() {
                let Some(fragment) = share.layout.fragment(in_group, 0) else { continue };
                let cut = |flat: &Tensor| part(flat, fragment.in_part, fragment.len);
                tensors.push(Tensors {
                    share: index,
                    in_part: fragment.in_part,
                    weights: cut(&master)?,
                    states: states.iter().map(cut).collect::<Result<_>>()?,
                });
            }
        }
        let mut params = Vec::with_capacity(tensors.len());
        for own in &tensors {
            let gradient = &gradients[own.share][own.in_part..own.in_part + own.weights.numel()];
            // SAFETY: master and states are this store's own, the lock on its state is held, no collective over them is in
            // flight, and the parts of parameters are disjoint.
            let (weights, states) = unsafe {
                let states = own.states.iter().map(|state| state.host_mut()).collect::<Result<_, _>>()?;
                (own.weights.host_mut()?, states)
            };
            params.push(Whole { weights, gradient, states, options: shares[own.share].options });
        }
        let step = shares.iter().map(|share| share.steps).max().unwrap_or(0);
        rule.step(&self.device, memory, &mut params, step, ranks)?;
        drop(params);
        for share in shares.iter().filter(|share| share.trained) {
            if let Some(master) = &share.master {
                let values = share.own_values()?;
                // SAFETY: as above; nobody borrows a value during a step.
                self.device.backend().cast(master.memory()?, unsafe { Out::vouched(&values) })?;
            }
        }
        Ok(())
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
