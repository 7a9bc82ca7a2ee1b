//! The step on the host, by the rules' own loops.

use std::collections::{BTreeMap, BTreeSet};

use ferrospeed_collective::CollectiveError;
use ferrospeed_collective::one_bit::{self, Averaged, Feedback, padded_numel};
use ferrospeed_comm::Group;
use ferrospeed_optim::one_bit::{Exchange, Memory, OneBit, Values, Whole};
use ferrospeed_optim::{Copy16, GroupOptions};
use ferrospeed_tensor::{DType, Device};

use super::Tensors;
use crate::error::Result;
use crate::step::gradient_of;
use crate::store::Share;

/// What a rule remembers on the host, and what this rank has lost there.
pub(super) struct OnHost {
    pub(super) memory: Memory,
    ranks: Ranks,
}

struct Ranks {
    group: Group,
    feedbacks: BTreeMap<usize, Feedback>,
    device: Device,
}

impl OnHost {
    pub(super) fn new(group: &Group, device: &Device) -> OnHost {
        let ranks = Ranks { group: group.clone(), feedbacks: BTreeMap::new(), device: device.clone() };
        OnHost { memory: Memory::default(), ranks }
    }

    pub(super) fn restart(&mut self) {
        self.memory = Memory::default();
        self.ranks.forget();
    }

    /// # Safety
    /// Nobody else reads or writes these tensors meanwhile.
    pub(super) unsafe fn step(
        &mut self,
        rule: &OneBit,
        tensors: &[Tensors],
        shares: &[Share],
        step: u64,
        factor: f32,
    ) -> Result<()> {
        let mut params = Vec::with_capacity(tensors.len());
        for own in tensors {
            // SAFETY: as the caller says.
            params.push(unsafe { own.whole(shares[own.share].options, factor)? });
        }
        let device = self.ranks.device.clone();
        Ok(rule.step(&device, &mut self.memory, &mut params, step, &mut self.ranks)?)
    }

    /// What was lost, by tensor.
    pub(super) fn lost(&self) -> impl Iterator<Item = (usize, Vec<f32>)> + '_ {
        self.ranks.feedbacks.iter().map(|(at, feedback)| (*at, feedback.numbers()))
    }

    pub(super) fn set_lost(&mut self, at: usize, feedback: Feedback) {
        self.ranks.feedbacks.insert(at, feedback);
    }
}

impl Tensors {
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
