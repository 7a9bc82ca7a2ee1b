//! Over which ranks model state is spread.
//!
//! The ranks of a *shard* together hold everything once. Where there are more ranks than that, each has *replicas*: the
//! ranks of other shards that hold the same part. Gradients are summed over the shard first, each rank keeping its part,
//! and then over the replicas, so what crosses between shards is one part and not the whole; weights are gathered within
//! the shard alone. (Zhang et al.: "MiCS: near-linear scaling for training gigantic model on public cloud", 2022.)

use ferrospeed_collective::exchange::Levels;
use ferrospeed_comm::{Group, Mesh, ProcessTopology, World};

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
}

impl Sharding {
    /// Over all ranks.
    pub fn over_world(world: &World) -> Sharding {
        Sharding { shard: world.group(), replicas: None }
    }

    /// Shards of `size` neighbouring ranks each. All ranks call it together.
    pub fn in_shards_of(world: &World, size: usize) -> Result<Sharding> {
        let ranks = world.size();
        if size == 0 || !ranks.is_multiple_of(size) {
            let why = format!(
                "{ranks} ranks cannot be cut into shards of {size}: choose a divisor of the number of ranks (zero_optimization.mics_shard_size)"
            );
            return Err(ZeroError::Request(why));
        }
        if size == ranks {
            return Ok(Sharding::over_world(world));
        }
        let topology = ProcessTopology::new([(REPLICA, ranks / size), (SHARD, size)])?;
        let mesh = Mesh::new(world.clone(), topology)?;
        Ok(Sharding { shard: mesh.group(SHARD)?, replicas: Some(mesh.group(REPLICA)?) })
    }

    /// The ranks of a reduction.
    pub(crate) fn levels(&self) -> Levels<'_> {
        Levels { first: &self.shard, second: self.replicas.as_ref() }
    }

    /// How many ranks bring gradients of their own.
    pub(crate) fn ranks(&self) -> usize {
        self.shard.size() * self.replicas.as_ref().map_or(1, Group::size)
    }
}
