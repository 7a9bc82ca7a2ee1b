//! Models of which this rank holds a part: some layers, some experts. What it knows of the rest.
//!
//! All ranks build all of a model's handles and give values only to those of their part. Checkpoints and exports speak of the
//! whole model, so every rank knows the names of all its parameters, their order, and who holds what it does not.

use std::collections::HashMap;

use ferrospeed_checkpoint::GroupState;
use ferrospeed_comm::Group;
use ferrospeed_nn::Parameters;
use ferrospeed_optim::schedule_free::{self, ScheduleFree};
use ferrospeed_optim::{GroupOptions, Optimizer};
use ferrospeed_tensor::Param;
use ferrospeed_zero::access::Which;

use crate::engine::Engine;
use crate::error::Result;

/// The whole model, of which this rank holds a part.
pub(crate) struct Parts {
    /// By a parameter's number, who holds it, the largest group first; what is not listed, every rank holds.
    holders: HashMap<u64, Vec<Held>>,
    /// Names of all parameters, in order.
    names: Vec<String>,
    /// Names of the trained ones by group of options.
    groups: Vec<Vec<String>>,
    /// How many numbers all parameters have, those in slices as the wholes that they are of.
    pub(crate) numel: u64,
}

/// A parameter that not every rank holds.
pub(crate) struct Held {
    /// The ranks that together hold all such parameters.
    pub(crate) group: Group,
    /// The first of them that holds this one.
    pub(crate) rank: usize,
}

impl Parts {
    /// Of a model whose parameters have options in groups.
    pub(crate) fn of(parameters: &Parameters, groups: &[&[Param]], holders: HashMap<u64, Held>) -> Parts {
        let trained = |params: &[Param]| -> Vec<String> {
            params.iter().filter(|param| param.is_trainable()).map(|param| param.name().to_owned()).collect()
        };
        Parts {
            holders: holders.into_iter().map(|(id, held)| (id, vec![held])).collect(),
            names: parameters.names().into_iter().map(str::to_owned).collect(),
            groups: groups.iter().map(|group| trained(group)).collect(),
            numel: parameters.whole_numel() as u64,
        }
    }

    /// Those of `within` hold parts of what one rank of these groups holds.
    pub(crate) fn around(mut self, within: Parts) -> Parts {
        for (id, held) in within.holders {
            self.holders.entry(id).or_default().extend(held);
        }
        self
    }

    /// A parameter's place in the whole model.
    pub(crate) fn place(&self, name: &str) -> Option<usize> {
        self.names.iter().position(|known| known == name)
    }

    /// The names of all parameters.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.names.iter().map(String::as_str)
    }

    /// The groups of options as a checkpoint of the whole model names them.
    pub(crate) fn saved_groups(&self, options: &[GroupOptions]) -> Vec<GroupState> {
        let state = |(params, options): (&Vec<String>, &GroupOptions)| GroupState {
            params: params.clone(),
            lr: options.lr,
            weight_decay: options.weight_decay,
            betas: options.betas,
        };
        self.groups.iter().zip(options).map(state).collect()
    }
}

impl Engine {
    /// A whole weight as kernels read it, on every rank, whichever stage, slices or expert's rank hold it; of Schedule-Free AdamW,
    /// the mean that a model is in the end. All ranks call it together.
    pub fn weight_as_read(&self, param: &Param) -> Result<Vec<f32>> {
        self.prepare_weights()?;
        let holders = self.parts.as_ref().and_then(|parts| parts.holders.get(&param.id()));
        self.held_weight(param, holders.map_or(&[][..], Vec::as_slice))
    }

    /// What this rank's store has of a weight, as it is to be written.
    fn weight_in_the_end(&self, param: &Param) -> Result<Vec<f32>> {
        let (Some(Optimizer::ScheduleFree(_)), Some(group)) =
            (self.store.optimizer(), self.store.group_of(param))
        else {
            return Ok(self.store.full_as_read(param)?);
        };
        let mut weights = self.store.full(param, Which::Weight)?;
        let ahead = self.store.full(param, Which::State(schedule_free::STATES[0]))?;
        ScheduleFree::average(&self.store.group_options()[group], &mut weights, &ahead);
        Ok(weights)
    }

    /// The same on the ranks of the first of these groups, or on this one alone.
    fn held_weight(&self, param: &Param, holders: &[Held]) -> Result<Vec<f32>> {
        let Some((held, within)) = holders.split_first() else {
            return self.whole_of(param, self.weight_in_the_end(param)?);
        };
        let mut values = match held.rank == held.group.rank() {
            true => self.held_weight(param, within)?,
            false => vec![0.0; param.whole_shape().numel()],
        };
        held.group.broadcast(&mut values, held.rank)?;
        Ok(values)
    }
}
