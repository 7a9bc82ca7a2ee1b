//! Gradients on the wire as integers of four bits (Wang et al.: "ZeRO++", 2023: qgZ).
//!
//! Of a rank's gradients an eighth of f32, or a quarter of 16 bits, travels, and of that only the sums of each host cross
//! to the others: see [`ferrospeed_collective::hops`], which this gives ranks and runs to. Ranks of one host sum as without
//! it: they share memory, which integers would not spare. Where shards lie evenly on all hosts there are two hops; where
//! they do not, or are some of the ranks (experts, slices, stages), one. What is spread with replicas (MiCS) sums as
//! without it: what crosses there is one part already.
//!
//! Groups of integers end where a parameter's part ends. Vectors (norms, biases) are few, and so sensitive that they
//! travel as f32.

use ferrospeed_collective::hops::{Hops, Parcels, Run};
use ferrospeed_collective::packing::Packing;
use ferrospeed_comm::{Mesh, ProcessTopology, World};

use crate::error::Result;
use crate::sharding::Sharding;
use ferrospeed_placement::buckets::Bucket;

const HOST: &str = "host";
const PLACE: &str = "place";

/// The hops of a sharding's gradients; `None` where they travel as they are. All ranks call it together for a sharding over
/// all of them.
pub(crate) fn hops(world: &World, sharding: &Sharding) -> Result<Option<Hops>> {
    let shard = &sharding.shard;
    if sharding.replicas.is_some() || shard.is_on_one_host() {
        return Ok(None);
    }
    let hosts = world.hosts();
    let is_all = shard.ranks().iter().copied().eq(0..world.size());
    // Hosts are in the order of their lowest rank.
    let even = hosts.concat().is_sorted() && hosts.iter().all(|host| host.len() == hosts[0].len());
    if !is_all || !even || hosts[0].len() == 1 {
        return Ok(Some(Hops { host: None, across: shard.clone() }));
    }
    let topology = ProcessTopology::new([(HOST, hosts.len()), (PLACE, hosts[0].len())])?;
    let mesh = Mesh::new(world.clone(), topology)?;
    Ok(Some(Hops { host: Some(mesh.group(PLACE)?), across: mesh.group(HOST)? }))
}

/// What of a bucket goes to each owner; `is_exact` says which parameters travel as f32.
pub(crate) fn parcels(bucket: &Bucket, is_exact: impl Fn(usize) -> bool) -> Parcels {
    let placed = bucket.params.iter().zip(&bucket.places);
    let mut places: Vec<(usize, Run)> = placed
        .flat_map(|(&param, places)| {
            let packing = if is_exact(param) { Packing::Exact } else { Packing::Four };
            places.iter().map(move |place| (place.in_bucket, Run { numel: place.len, packing }))
        })
        .collect();
    places.sort_by_key(|(in_bucket, _)| *in_bucket);
    let mut places = places.into_iter().peekable();
    let mut end = 0;
    let of_owner = |count: &usize| {
        end += count;
        std::iter::from_fn(|| places.next_if(|(in_bucket, _)| *in_bucket < end)).map(|(_, run)| run).collect()
    };
    Parcels::new(bucket.counts.iter().map(of_owner).collect())
}
