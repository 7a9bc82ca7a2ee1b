//! How the ranks of a run are laid out: stages of the model, samples, parts of a sequence, slices of layers, experts.
//!
//! Ranks that hold slices of the same layers are neighbours, for they talk most; then come those that share sequences, those
//! that see different samples, and the stages. Experts are spread over ranks that see different samples (or parts of them), so
//! they need no ranks of their own. What does not run together is refused before any rank starts.

use std::num::NonZeroUsize;

use ferrospeed_comm::topology::{DATA, MODEL, PIPE};
use ferrospeed_comm::{Mesh, ProcessTopology, SEQUENCE, World};

use crate::error::Result;

/// How many ranks there are on every axis but that of the data, which has the rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MeshSizes {
    /// Stages of the model: `pipeline.stages`.
    pub pipe: NonZeroUsize,
    /// Ranks that share one sequence: `sequence_parallel_size`.
    pub sequence: NonZeroUsize,
    /// Ranks that hold slices of the same layers: `tensor_parallel.autotp_size`.
    pub tensor: NonZeroUsize,
    /// Ranks, of those that see different samples, that hold different experts: `expert_parallel.autoep_size`.
    pub expert: NonZeroUsize,
}

impl MeshSizes {
    /// How many ranks work on one sample.
    pub fn ranks_of_a_sample(self) -> usize {
        [self.pipe, self.sequence, self.tensor].iter().fold(1, |ranks, size| ranks.saturating_mul(size.get()))
    }

    /// Lays a world out.
    pub(crate) fn over(self, world: &World) -> Result<Mesh> {
        let data = world.size() / self.ranks_of_a_sample();
        let (pipe, sequence, tensor) = (self.pipe.get(), self.sequence.get(), self.tensor.get());
        let axes = [(PIPE, pipe), (DATA, data), (SEQUENCE, sequence), (MODEL, tensor)];
        Ok(Mesh::new(world.clone(), ProcessTopology::new(axes)?)?)
    }

    /// Tells what `ranks` ranks cannot be laid out for.
    pub(crate) fn problems(self, ranks: usize, refuse: &mut impl FnMut(bool, String)) {
        let sizes = [
            (self.pipe.get(), "pipeline.stages", "stages"),
            (self.sequence.get(), "sequence_parallel_size", "parts of a sequence"),
            (self.tensor.get(), "tensor_parallel.autotp_size", "slices of a layer"),
        ];
        let named: Vec<_> = sizes.iter().filter(|(size, ..)| *size > 1).collect();
        let needed = self.ranks_of_a_sample();
        let keys: Vec<&str> = named.iter().map(|(_, key, _)| *key).collect();
        let what: Vec<String> = named.iter().map(|(size, _, what)| format!("{size} {what}")).collect();
        let cannot = !ranks.is_multiple_of(needed);
        refuse(
            cannot,
            format!(
                "{}: {} need a multiple of {needed} ranks, and there are {ranks}; start {} (-n, ranks), or change the others",
                keys.join(", "),
                what.join(" × "),
                ranks.next_multiple_of(needed)
            ),
        );
        let (expert, room) =
            (self.expert.get(), ranks / self.pipe.get().saturating_mul(self.tensor.get()).max(1));
        refuse(
            !cannot && !room.is_multiple_of(expert),
            format!(
                "expert_parallel.autoep_size: experts on {expert} ranks need a multiple of {expert} ranks that hold the same slices of a stage, and there are {room}"
            ),
        );
    }
}
