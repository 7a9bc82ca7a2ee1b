//! Models of which this rank holds a part: some layers, some experts. What it knows of the rest.
//!
//! All ranks build all of a model's handles and give values only to those of their part. Checkpoints and exports speak of the
//! whole model, so every rank knows the names of all its parameters, their order, and who holds what it does not.

use std::collections::HashMap;

use ferrospeed_checkpoint::GroupState;
use ferrospeed_comm::Group;
use ferrospeed_nn::Parameters;
use ferrospeed_optim::GroupOptions;
use ferrospeed_tensor::Param;

use crate::engine::Engine;
use crate::error::Result;

/// The whole model, of which this rank holds a part.
pub(crate) struct Parts {
    /// By a parameter's number, who holds it; what is not listed, every rank holds.
    holders: HashMap<u64, Held>,
    /// Names of all parameters, in order.
    names: Vec<String>,
    /// Names of the trained ones by group of options.
    groups: Vec<Vec<String>>,
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
            holders,
            names: parameters.names().into_iter().map(str::to_owned).collect(),
            groups: groups.iter().map(|group| trained(group)).collect(),
        }
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
    /// A whole weight as kernels read it, on every rank, whichever stage, slices or expert's rank hold it. All ranks call it
    /// together.
    pub fn weight_as_read(&self, param: &Param) -> Result<Vec<f32>> {
        let own = || self.whole_of(param, self.store.full_as_read(param)?);
        let Some(held) = self.parts.as_ref().and_then(|parts| parts.holders.get(&param.id())) else {
            return own();
        };
        let mut values =
            if held.rank == held.group.rank() { own()? } else { vec![0.0; param.whole_shape().numel()] };
        held.group.broadcast(&mut values, held.rank)?;
        Ok(values)
    }
}
