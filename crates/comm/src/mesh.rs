//! The mesh: a world laid out on named axes, with a group for every axis.
//!
//! An *axis* is a direction of the mesh (`pipe`, `data`, `sequence`, `model` …); a *dim* is a tensor's. A mesh hands out
//! the group of the ranks that differ from this one on the given axes alone. All ranks must ask for the same axes in the
//! same order, because making a group is collective; each group is made once and kept.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::error::{Error, Result};
use crate::group::Group;
use crate::layout::{ExpertGroups, ExpertOrder, expert_parallel, expert_tensor_parallel};
use crate::topology::{DATA, MODEL, PIPE, ProcessTopology};
use crate::world::World;

/// The axis whose ranks hold parts of the same sequences.
pub const SEQUENCE: &str = "sequence";

/// A world on named axes.
///
/// ```
/// use ferrospeed_comm::{Mesh, ProcessTopology, World};
///
/// let mesh = Mesh::new(World::solo(), ProcessTopology::new([("pipe", 1), ("data", 1)])?)?;
/// assert_eq!(mesh.group("data")?.size(), 1);
/// # Ok::<(), ferrospeed_comm::Error>(())
/// ```
#[derive(Clone)]
pub struct Mesh {
    world: World,
    topology: ProcessTopology,
    groups: Arc<Mutex<HashMap<String, Group>>>,
}

/// The groups of this rank for one expert-parallel size.
#[derive(Debug, Clone)]
pub struct ExpertMembership {
    /// The ranks that together hold all experts.
    pub expert: Group,
    /// The ranks that hold the same experts as this one.
    pub expert_data: Group,
}

impl Mesh {
    /// Lays a world out; the axes' lengths must multiply to its size.
    pub fn new(world: World, topology: ProcessTopology) -> Result<Mesh> {
        if topology.world_size() != world.size() {
            let axes: Vec<String> =
                topology.axes().iter().map(|axis| format!("{axis} {}", topology.dim(axis))).collect();
            let problem = format!(
                "{} make {} ranks, but the world has {}",
                axes.join(" × "),
                topology.world_size(),
                world.size()
            );
            return Err(Error::Topology { problem });
        }
        let mesh = Mesh { world, topology, groups: Arc::default() };
        mesh.tell_places();
        Ok(mesh)
    }

    /// Lets errors say where a rank is, on those axes that have more than one.
    fn tell_places(&self) {
        let axes: Vec<&String> =
            self.topology.axes().iter().filter(|axis| self.topology.dim(axis) > 1).collect();
        if axes.len() < 2 {
            return;
        }
        let place = |rank: usize| {
            let at = |axis: &&String| Some(format!("{axis} {}", self.topology.coordinate(rank, axis).ok()?));
            axes.iter().filter_map(at).collect::<Vec<_>>().join(", ")
        };
        self.world.tell_places((0..self.world.size()).map(place).collect());
    }

    /// The world under the mesh.
    pub fn world(&self) -> &World {
        &self.world
    }

    /// The mesh's topology.
    pub fn topology(&self) -> &ProcessTopology {
        &self.topology
    }

    /// This rank's place on an axis; 0 on an axis that the mesh does not have.
    pub fn coordinate(&self, axis: &str) -> usize {
        self.topology.coordinate(self.world.rank(), axis).unwrap_or(0)
    }

    /// The length of an axis; 1 for one that the mesh does not have.
    pub fn size(&self, axis: &str) -> usize {
        self.topology.dim(axis).max(1)
    }

    /// The group of the ranks that differ from this one on `axis` alone. Collective over the world.
    ///
    /// An axis that the mesh does not have gives this rank alone.
    pub fn group(&self, axis: &str) -> Result<Group> {
        self.group_over(&[axis])
    }

    /// The group of the ranks that differ from this one on these axes alone. Collective over the world.
    pub fn group_over(&self, axes: &[&str]) -> Result<Group> {
        let name = axes.join("+");
        let mut lists = self.topology.comm_lists(axes);
        if lists.is_empty() {
            lists = (0..self.world.size()).map(|rank| vec![rank]).collect();
        }
        self.make(&name, &lists)
    }

    /// The `count` neighbours on `axis` that this rank is one of, where the axis is cut into such groups. Collective over the
    /// world; ranks behind the last whole group have a smaller one.
    pub fn neighbours(&self, axis: &str, count: usize) -> Result<Group> {
        let lists = self.topology.axis_comm_lists(axis);
        let parts: Vec<Vec<usize>> =
            lists.iter().flat_map(|list| list.chunks(count.max(1)).map(<[usize]>::to_vec)).collect();
        self.make(&format!("{count} of {axis}"), &parts)
    }

    fn make(&self, name: &str, lists: &[Vec<usize>]) -> Result<Group> {
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = groups.get(name) {
            return Ok(known.clone());
        }
        let mut own = None;
        for list in lists {
            let group = self.world.named_group(list, Some(&format!("{name} {list:?}")))?;
            own = own.or(group);
        }
        let own = own.ok_or_else(|| Error::Topology {
            problem: format!("rank {} is in no group of {name}: {lists:?}", self.world.rank()),
        })?;
        groups.insert(name.to_owned(), own.clone());
        Ok(own)
    }

    /// The data-parallel group.
    pub fn data(&self) -> Result<Group> {
        self.group(DATA)
    }

    /// The tensor-parallel group.
    pub fn tensor(&self) -> Result<Group> {
        self.group(MODEL)
    }

    /// The pipeline group.
    pub fn pipe(&self) -> Result<Group> {
        self.group(PIPE)
    }

    /// The sequence-parallel group.
    pub fn sequence(&self) -> Result<Group> {
        self.group(SEQUENCE)
    }

    /// The ranks over which ZeRO shards and gradients are reduced: sequence × data.
    pub fn sequence_data(&self) -> Result<Group> {
        self.group_over(&[DATA, SEQUENCE])
    }

    /// The ranks of this replica, over which overflow and norms are reduced: everything but data and sequence.
    pub fn model_parallel(&self) -> Result<Group> {
        let axes: Vec<&str> = self
            .topology
            .axes()
            .iter()
            .map(String::as_str)
            .filter(|axis| ![DATA, SEQUENCE].contains(axis))
            .collect();
        self.group_over(&axes)
    }

    /// Expert and expert-data groups for one expert-parallel size. Collective over the world.
    ///
    /// Stages must be consecutive blocks of ranks (`pipe` first) and slices neighbours (`model` last).
    pub fn expert(&self, expert: usize, order: ExpertOrder) -> Result<ExpertMembership> {
        let (world, tensor, pipe) = (self.world.size(), self.size(MODEL), self.size(PIPE));
        let out_of_place =
            |axis: &str, place: Option<&String>| self.size(axis) > 1 && place.is_none_or(|name| name != axis);
        if out_of_place(PIPE, self.topology.axes().first())
            || out_of_place(MODEL, self.topology.axes().last())
        {
            let problem = format!(
                "expert groups need the axis pipe first and model last, not {}",
                self.topology.axes().join(", ")
            );
            return Err(Error::Topology { problem });
        }
        let ExpertGroups { expert: expert_lists, expert_data } = if tensor > 1 {
            expert_tensor_parallel(world, tensor, expert, pipe, order)?
        } else {
            expert_parallel(world, expert, pipe, order)?
        };
        let order = if order == ExpertOrder::DataBeforeExpert { " data first" } else { "" };
        let expert_data = self.make(&format!("ep_size_{expert}{order} data"), &expert_data)?;
        let expert = self.make(&format!("ep_size_{expert}{order}"), &expert_lists)?;
        Ok(ExpertMembership { expert, expert_data })
    }
}

impl std::fmt::Debug for Mesh {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Mesh({:?}, rank {})", self.topology, self.world.rank())
    }
}
