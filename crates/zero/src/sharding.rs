//! Over which ranks model state is spread.
//!
//! The ranks of a *shard* together hold everything once. Where there are more ranks than that, each has *replicas*: the
//! ranks of other shards that hold the same part. Gradients are summed over the shard first, each rank keeping its part,
//! and then over the replicas, so what crosses between shards is one part and not the whole; weights are gathered within
//! the shard alone. (Zhang et al.: "MiCS: near-linear scaling for training gigantic model on public cloud", 2022.)
//!
//! A store can hold parameters that are spread in several ways: experts over the ranks that have the same ones, slices of
//! tensors over the ranks that have the same slice, a weight that two stages of a pipeline use over both: they divide the
//! optimizer's states for it even in stage 0, where everything else is whole on every rank.

use ferrospeed_collective::exchange::Levels;
use ferrospeed_comm::{Group, Mesh, ProcessTopology, World};
use ferrospeed_placement::{self as placement, Owners, Ranks, Spread};
use ferrospeed_tensor::Param;

use crate::error::{Result, ZeroError};

const SHARD: &str = "shard";
const REPLICA: &str = "replica";

/// How a share of the model's state is spread.
#[derive(Debug, Clone)]
pub struct Sharding {
    /// The ranks that together hold it once.
    pub shard: Group,
    /// The ranks that hold the same part as this one, this one included; `None` where no other does.
    pub replicas: Option<Group>,
    /// What the sum of all ranks' gradients is divided by. The number of ranks gives their average.
    pub divisor: usize,
    /// Whether this rank's copy is the one that norms count and checkpoints take: `false` where a rank of another
    /// sharding holds the same values.
    pub counted: bool,
    /// The ranks that hold slices of the same parameters: norms of whole parameters are summed over them.
    pub slices: Option<Group>,
    /// The ranks that reach each other's gradients in place.
    reach: Group,
    /// Who divides it where nothing else is divided.
    tie: Option<Tie>,
}

/// Ranks that use a weight in several stages.
#[derive(Debug, Clone)]
struct Tie {
    /// One of each stage: they own parts of its states.
    stages: Group,
    /// Those of this rank's stage: they own the same part.
    peers: Group,
}

impl Sharding {
    /// Over the ranks of a group.
    pub fn over(group: &Group) -> Sharding {
        Sharding {
            shard: group.clone(),
            replicas: None,
            divisor: group.size(),
            counted: true,
            slices: None,
            reach: group.clone(),
            tie: None,
        }
    }

    /// Over all ranks.
    pub fn over_world(world: &World) -> Sharding {
        Sharding::over(&world.group())
    }

    /// Shards of `size` neighbouring ranks each. All ranks call it together.
    pub fn in_shards_of(world: &World, size: usize) -> Result<Sharding> {
        let ranks = world.size();
        check_size(ranks, size, "mics_shard_size")?;
        if size == ranks {
            return Ok(Sharding::over_world(world));
        }
        let topology = ProcessTopology::new([(REPLICA, ranks / size), (SHARD, size)])?;
        let mesh = Mesh::new(world.clone(), topology)?;
        Ok(Sharding {
            shard: mesh.group(SHARD)?,
            replicas: Some(mesh.group(REPLICA)?),
            divisor: ranks,
            counted: true,
            slices: None,
            reach: world.group(),
            tie: None,
        })
    }

    /// The `size` neighbouring ranks that hold what was gathered once more among themselves; `None` where that would
    /// gain nothing: each rank for itself, or all of them. All ranks call it together.
    pub(crate) fn neighbours(&self, world: &World, size: u64) -> Result<Option<Group>> {
        let (ranks, size) = (world.size(), usize::try_from(size).unwrap_or(usize::MAX));
        if size <= 1 || size >= ranks {
            return Ok(None);
        }
        check_size(ranks, size, "zero_hpz_partition_size")?;
        if self.shard.size() != ranks {
            let why = "zero_hpz_partition_size keeps a second copy of what is spread over all ranks, and here it is spread over some of them: remove it, or mics_shard_size, pipeline stages and tensor slices";
            return Err(ZeroError::Request(why.into()));
        }
        let topology = ProcessTopology::new([(REPLICA, ranks / size), (SHARD, size)])?;
        Ok(Some(Mesh::new(world.clone(), topology)?.group(SHARD)?))
    }

    /// Divides sums of gradients by this instead: experts get tokens, and so gradients, of ranks that do not hold them.
    pub fn divided_by(self, divisor: usize) -> Sharding {
        Sharding { divisor, ..self }
    }

    /// Over the ranks of all stages that use the same weights, of which `stages` has one each: gradients are summed over all
    /// of them without dividing more, and each stage owns a part of the optimizer's states whatever the ZeRO stage.
    pub fn tied_over(self, all: &Group, stages: &Group) -> Sharding {
        let tie = Some(Tie { stages: stages.clone(), peers: self.shard.clone() });
        Sharding { shard: all.clone(), reach: all.clone(), tie, ..self }
    }

    /// Sums gradients over these ranks as well, without dividing more: those that hold the same slice.
    pub fn tied_to(self, users: &Group) -> Sharding {
        Sharding { replicas: Some(users.clone()), ..self }
    }

    /// Leaves it to another rank to count these values and to save them.
    pub fn uncounted(self) -> Sharding {
        Sharding { counted: false, ..self }
    }

    /// Parameters that are slices are parts of wholes that these ranks hold together.
    pub fn sliced_over(self, slices: &Group) -> Sharding {
        Sharding { slices: Some(slices.clone()), ..self }
    }

    /// This rank's number among those that bring gradients of their own.
    pub fn rank(&self) -> usize {
        self.copy() * self.shard.size() + self.shard.rank()
    }

    /// The ranks of a reduction.
    pub(crate) fn levels(&self) -> Levels<'_> {
        Levels { first: &self.shard, second: self.replicas.as_ref() }
    }

    /// The same as data.
    pub(crate) fn spread(&self) -> Spread {
        let tie = self
            .tie
            .as_ref()
            .map(|tie| placement::Tie { stages: ranks(&tie.stages), peers: ranks(&tie.peers) });
        Spread {
            shard: ranks(&self.shard),
            replicas: self.replicas.as_ref().map_or_else(Ranks::alone, ranks),
            tie,
            reach: ranks(&self.reach),
            divisor: self.divisor,
            counted: self.counted,
        }
    }

    /// The ranks that own a part each of what is divided so; `None` where every rank owns everything.
    pub(crate) fn owners(&self, by: Owners) -> Option<&Group> {
        match by {
            Owners::Everybody => None,
            Owners::Shard => Some(&self.shard),
            Owners::Stages => self.tie.as_ref().map(|tie| &tie.stages),
        }
    }

    /// How many ranks bring gradients of their own.
    pub fn ranks(&self) -> usize {
        self.shard.size() * self.copies()
    }

    /// How many ranks hold the same part.
    pub(crate) fn copies(&self) -> usize {
        self.replicas.as_ref().map_or(1, Group::size)
    }

    /// This rank's number among those.
    pub(crate) fn copy(&self) -> usize {
        self.replicas.as_ref().map_or(0, Group::rank)
    }

    /// The ranks that reach each other's gradients in place.
    pub(crate) fn reach(&self) -> &Group {
        &self.reach
    }
}

/// A group as data.
fn ranks(group: &Group) -> Ranks {
    Ranks {
        name: group.name().to_owned(),
        count: group.size(),
        own: group.rank(),
        on_one_host: group.is_on_one_host(),
    }
}

fn check_size(ranks: usize, size: usize, key: &str) -> Result<()> {
    if size > 0 && ranks.is_multiple_of(size) {
        return Ok(());
    }
    let why = format!(
        "{ranks} ranks cannot be cut into shards of {size}: choose a divisor of the number of ranks (zero_optimization.{key})"
    );
    Err(ZeroError::Request(why))
}

/// Parameters that are spread in another way than the rest.
#[derive(Debug, Clone)]
pub struct Elsewhere {
    /// Which.
    pub params: Vec<Param>,
    /// How.
    pub sharding: Sharding,
}
