//! Over which ranks the parameters of a model in stages are spread.
//!
//! A stage's ranks share its state as they would share a whole model's. What several stages use (tied weights) each of them
//! holds: their gradients are summed, and each updates a part of it. Where layers are in slices too, a stage ties its slice
//! to the same slice of the others.

use std::collections::{BTreeMap, HashMap};

use ferrospeed_comm::topology::{DATA, MODEL, PIPE};
use ferrospeed_comm::{Group, Mesh, SEQUENCE};
use ferrospeed_nn::{Layer, Parameters};
use ferrospeed_pipeline::division::Division;
use ferrospeed_tensor::{Param, Slice};
use ferrospeed_zero::{Elsewhere, Sharding};

use crate::error::{EngineError, Result};
use crate::parts::{Held, Parts};

/// Which stages use which parameters.
pub(super) struct Spread {
    /// By a parameter's number, ascending.
    users: HashMap<u64, Vec<usize>>,
    /// What this rank's stage uses.
    pub(super) own: Parameters,
}

impl Spread {
    /// All ranks call it together.
    pub(super) fn of(
        mesh: &Mesh,
        parameters: &Parameters,
        layers: &[Layer],
        division: &Division,
    ) -> Result<Spread> {
        let mut users: HashMap<u64, Vec<usize>> = HashMap::new();
        for (chunk, stage) in division.stage_of_chunk.iter().enumerate() {
            for param in layers[division.layers_of_chunk(chunk)].iter().flat_map(|layer| &layer.parameters) {
                let stages = users.entry(param.id()).or_default();
                if let Err(place) = stages.binary_search(stage) {
                    stages.insert(place, *stage);
                }
            }
        }
        let refuse = |why: String| Err(EngineError::Argument { what: "pipeline.stages", why });
        for param in parameters.as_slice() {
            let holders = param.slice().map_or(1, Slice::holders);
            match users.get(&param.id()) {
                None => {
                    return refuse(format!(
                        "'{}' belongs to no layer, so no stage would hold it",
                        param.name()
                    ));
                }
                Some(stages) if stages.len() > 1 && holders > 1 => {
                    return refuse(format!(
                        "'{}' is used by several stages, and {holders} ranks of each hold the same slice of it; use fewer slices",
                        param.name()
                    ));
                }
                // Groups are made by all ranks, and not every stage has such parameters.
                Some(_) if holders > 1 => drop(mesh.neighbours(MODEL, holders)?),
                Some(_) => {}
            }
        }
        let stage = mesh.coordinate(PIPE);
        let is_own = |param: &Param| users.get(&param.id()).is_some_and(|stages| stages.contains(&stage));
        Ok(Spread { own: parameters.partition(is_own).0, users })
    }

    /// How the parameters are spread that this stage shares with others; the rest as `common` says. Collective over the
    /// world.
    pub(super) fn ties(
        &self,
        mesh: &Mesh,
        parameters: &Parameters,
        common: Option<&Sharding>,
    ) -> Result<Vec<Elsewhere>> {
        let mut ways: BTreeMap<(&[usize], bool), Vec<Param>> = BTreeMap::new();
        for param in parameters.as_slice().iter().filter(|param| param.is_trainable()) {
            if let Some(stages) = self.users.get(&param.id()).filter(|stages| stages.len() > 1) {
                ways.entry((stages, param.slice().is_none())).or_default().push(param.clone());
            }
        }
        let common =
            common.cloned().map_or_else(|| Ok(Sharding::over(&mesh.data()?)), Ok::<_, EngineError>)?;
        let mut ties = Vec::new();
        for ((stages, is_whole), params) in ways {
            let pipeline = stage_group(mesh, &[PIPE], stages, "tied")?;
            let all = stage_group(mesh, &[PIPE, DATA, SEQUENCE], stages, "all tied")?;
            let (Some(pipeline), Some(all)) = (pipeline, all) else { continue };
            let sharding = common.clone().tied_over(&all, &pipeline);
            // All slices' ranks hold it alike, and one of them speaks for it.
            let is_told = is_whole && mesh.coordinate(MODEL) > 0;
            ties.push(Elsewhere { params, sharding: if is_told { sharding.uncounted() } else { sharding } });
        }
        Ok(ties)
    }

    /// The whole model, by the stages that hold it and, within one, the ranks of its experts.
    pub(super) fn parts(
        &self,
        parameters: &Parameters,
        groups: &[Vec<Param>],
        pipe: &Group,
        experts: Option<Parts>,
    ) -> Parts {
        let groups: Vec<&[Param]> = groups.iter().map(Vec::as_slice).collect();
        let held = |(id, stages): (&u64, &Vec<usize>)| (*id, Held { group: pipe.clone(), rank: stages[0] });
        let parts = Parts::of(parameters, &groups, self.users.iter().map(held).collect());
        match experts {
            Some(within) => parts.around(within),
            None => parts,
        }
    }
}

/// A new group of the ranks of some stages that differ from this one on these axes alone; `None` on other stages. Collective
/// over the world.
pub(super) fn stage_group(mesh: &Mesh, axes: &[&str], stages: &[usize], name: &str) -> Result<Option<Group>> {
    let mut own = None;
    let is_of_them =
        |rank: &usize| mesh.topology().coordinate(*rank, PIPE).is_ok_and(|stage| stages.contains(&stage));
    for mut ranks in mesh.topology().comm_lists(axes) {
        ranks.retain(is_of_them);
        let group = mesh.world().named_group(&ranks, Some(&format!("{name} {ranks:?}")))?;
        own = own.or(group);
    }
    Ok(own)
}
