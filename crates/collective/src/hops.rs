//! A reduction in small integers, in two hops: first within each host, then between the ranks that have the same place on
//! every host (Wang et al.: "ZeRO++: extremely efficient collective communication for giant model training", 2023: qgZ).
//!
//! A ring would round at every rank it passes; here each value is rounded once per hop. A rank packs all parcels, those
//! for one place on the hosts together, and its neighbours get what is for theirs. Each adds up what came and packs the
//! sums again in the same pass; those cross to the other hosts, one parcel for each, and are added up there. What crosses
//! is thus one parcel per rank and host, whatever number of ranks a host has. Sums are in f32, in rank order within a host
//! and then in the order of hosts, so the bits are always the same.
//!
//! Ranks that do not lie evenly on hosts do it in one hop. The work between the hops is done by whoever carries the second,
//! so backward goes on meanwhile.

use std::sync::Arc;

use ferrospeed_comm::{DType as CommType, Group, ReduceOp, Region, Work};
use ferrospeed_tensor::backend::Runs;
use ferrospeed_tensor::dtype::{Element, Float};
use ferrospeed_tensor::{Category, DType, Device, Out, Tensor};
use half::{bf16, f16};

use crate::error::Result;
use crate::exchange::Pending;
use crate::packing::Packing;
use crate::staging::Room;

/// The groups of the two hops.
#[derive(Debug, Clone)]
pub struct Hops {
    /// The ranks of this host; `None` where there is one hop.
    pub host: Option<Group>,
    /// The ranks with this rank's place on every host, or all.
    pub across: Group,
}

impl Hops {
    fn places(&self) -> usize {
        self.host.as_ref().map_or(1, Group::size)
    }

    fn place(&self) -> usize {
        self.host.as_ref().map_or(0, Group::rank)
    }

    fn hosts(&self) -> usize {
        self.across.size()
    }

    /// The rank at a place of a host.
    fn rank(&self, host: usize, place: usize) -> usize {
        host * self.places() + place
    }
}

/// A stretch of one tensor's values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// How many.
    pub numel: usize,
    /// How they travel.
    pub packing: Packing,
}

/// What every rank is to get of the data, as runs that lie end to end, ranks in their order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Parcels(Arc<[Vec<Run>]>);

impl Parcels {
    /// Of these runs by rank.
    pub fn new(runs: Vec<Vec<Run>>) -> Parcels {
        Parcels(runs.into())
    }

    fn numel(&self, rank: usize) -> usize {
        self.0[rank].iter().map(|run| run.numel).sum()
    }

    fn bytes(&self, rank: usize) -> usize {
        self.0[rank].iter().map(|run| run.packing.bytes(run.numel)).sum()
    }

    fn pack<T: Float>(&self, device: &Device, rank: usize, values: &[T], out: &mut [u8]) {
        let (mut values, mut out) = (values, out);
        for run in &self.0[rank] {
            let (now, later) = values.split_at(run.numel);
            let (place, rest) = out.split_at_mut(run.packing.bytes(run.numel));
            run.packing.pack(device, now, place);
            (values, out) = (later, rest);
        }
    }

    fn repack_sum(&self, device: &Device, rank: usize, parcels: &[&[u8]], out: &mut [u8]) {
        let (mut start, mut out) = (0, out);
        for run in &self.0[rank] {
            let bytes = run.packing.bytes(run.numel);
            let runs: Vec<&[u8]> = parcels.iter().map(|parcel| &parcel[start..start + bytes]).collect();
            let (place, rest) = out.split_at_mut(bytes);
            run.packing.repack_sum(device, &runs, run.numel, place);
            (start, out) = (start + bytes, rest);
        }
    }

    fn unpack_sum<T: Float>(
        &self,
        device: &Device,
        rank: usize,
        parcels: &[&[u8]],
        factor: f32,
        out: &mut [T],
    ) {
        let (mut start, mut out) = (0, out);
        for run in &self.0[rank] {
            let bytes = run.packing.bytes(run.numel);
            let runs: Vec<&[u8]> = parcels.iter().map(|parcel| &parcel[start..start + bytes]).collect();
            let (place, rest) = out.split_at_mut(run.numel);
            run.packing.unpack_sum(device, &runs, factor, place);
            (start, out) = (start + bytes, rest);
        }
    }
}

/// `result` becomes the sum or the average of this rank's stretch of every rank's data, which may change after the call.
pub fn reduce_scatter(
    hops: &Hops,
    parcels: &Parcels,
    data: &Tensor,
    result: &Tensor,
    op: ReduceOp,
) -> Result<Pending> {
    match data.dtype() {
        DType::BF16 => typed::<bf16>(hops, parcels, data, result, op),
        DType::F16 => typed::<f16>(hops, parcels, data, result, op),
        _ => typed::<f32>(hops, parcels, data, result, op),
    }
}

fn typed<T: Float + Element + ferrospeed_comm::Element>(
    hops: &Hops,
    parcels: &Parcels,
    data: &Tensor,
    result: &Tensor,
    op: ReduceOp,
) -> Result<Pending> {
    let device = data.device();
    let host = device.host().clone();
    let sent = if device.backend().is_host() {
        packed(hops, parcels, &host, data.host::<T>()?)
    } else if let Some(packed) = packed_there(hops, parcels, data)? {
        // What leaves the device is what travels.
        Room::filled_from(&packed)?.1
    } else {
        let (_, copy) = Room::awaiting(data)?;
        // SAFETY: nobody else has this room.
        device.backend().copy_to_host(data, unsafe { copy.as_mut_slice::<u8>() })?;
        // SAFETY: as above.
        packed(hops, parcels, &host, unsafe { copy.as_slice::<T>() })
    };
    let own = hops.rank(hops.across.rank(), hops.place());
    let ranks = hops.places() * hops.hosts();
    let factor = if op == ReduceOp::Avg { 1.0 / ranks as f32 } else { 1.0 };
    let (work, arrived) = exchanged(hops, parcels, &host, &sent, own);
    let (parcels, result, hosts) = (parcels.clone(), result.clone(), hops.hosts());
    let finish = move || {
        // SAFETY: the exchange is over, and nobody else knows this region.
        let bytes = unsafe { arrived.as_slice::<u8>() };
        let received: Vec<&[u8]> = (0..hosts).map(|host| piece(bytes, host, parcels.bytes(own))).collect();
        if result.device().backend().is_host() {
            // SAFETY: whoever started the reduction does not touch its result before it has waited for it.
            parcels.unpack_sum(&host, own, &received, factor, unsafe { result.host_mut::<T>()? });
            return Ok(());
        }
        if unpacked_there(&parcels, own, bytes, hosts, factor, &result)? {
            return Ok(());
        }
        let (room, landing) = Room::awaiting(&result)?;
        // SAFETY: nobody else has this room.
        parcels.unpack_sum(&host, own, &received, factor, unsafe { landing.as_mut_slice::<T>() });
        room.land(&result)
    };
    Ok(Pending::finished_by(work, finish))
}

/// The order in which parcels are sent: by place and then by host.
fn order(hops: &Hops) -> impl Iterator<Item = usize> {
    (0..hops.places()).flat_map(move |place| (0..hops.hosts()).map(move |host| hops.rank(host, place)))
}

/// All parcels, in the order in which they are sent, packed by the device that has the values; `None` where it cannot.
fn packed_there(hops: &Hops, parcels: &Parcels, data: &Tensor) -> Result<Option<Tensor>> {
    let ranks = hops.places() * hops.hosts();
    let (backend, bytes) =
        (data.device().backend(), (0..ranks).map(|rank| parcels.bytes(rank)).sum::<usize>());
    let packed = Tensor::empty_in([bytes], DType::U8, data.device(), Category::Buffers)?;
    let mut out = 0;
    for rank in order(hops) {
        let mut start: usize = (0..rank).map(|earlier| parcels.numel(earlier)).sum();
        for run in &parcels.0[rank] {
            let values = data.slice(start, [run.numel])?;
            if !backend.pack_run(run.packing.form(), &values, Out::of_device(&packed)?, out)? {
                return Ok(None);
            }
            (start, out) = (start + run.numel, out + run.packing.bytes(run.numel));
        }
    }
    Ok(Some(packed))
}

/// `result` becomes the sum of what arrived for a rank, times `factor`, by the device that has it; `false` where it cannot.
fn unpacked_there(
    parcels: &Parcels,
    rank: usize,
    arrived: &[u8],
    sources: usize,
    factor: f32,
    result: &Tensor,
) -> Result<bool> {
    let bytes = Tensor::from_slice(arrived, [arrived.len()], result.device())?;
    let (mut start, mut first) = (0, 0);
    for run in &parcels.0[rank] {
        let runs = Runs { bytes: &bytes, first, stride: parcels.bytes(rank), count: sources };
        let place = result.slice(start, [run.numel])?;
        let backend = result.device().backend();
        if !backend.unpack_sum(run.packing.form(), runs, factor, Out::of_device(&place)?)? {
            return Ok(false);
        }
        (start, first) = (start + run.numel, first + run.packing.bytes(run.numel));
    }
    Ok(true)
}

fn piece(bytes: &[u8], index: usize, len: usize) -> &[u8] {
    &bytes[index * len..(index + 1) * len]
}

/// All parcels, by place and then by host.
fn packed<T: Float>(hops: &Hops, parcels: &Parcels, device: &Device, values: &[T]) -> Region {
    let ranks = hops.places() * hops.hosts();
    let sent = Region::zeroed((0..ranks).map(|rank| parcels.bytes(rank)).sum());
    let mut starts = Vec::with_capacity(ranks);
    let mut start = 0;
    for rank in 0..ranks {
        starts.push(start);
        start += parcels.numel(rank);
    }
    // SAFETY: the region was just made and nobody else knows it.
    let mut rest = unsafe { sent.as_mut_slice::<u8>() };
    for rank in order(hops) {
        let (parcel, later) = rest.split_at_mut(parcels.bytes(rank));
        parcels.pack(device, rank, &values[starts[rank]..starts[rank] + parcels.numel(rank)], parcel);
        rest = later;
    }
    sent
}

/// Starts the hops; what arrives is every host's parcel for this rank.
fn exchanged(hops: &Hops, parcels: &Parcels, device: &Device, sent: &Region, own: usize) -> (Work, Region) {
    let hosts = hops.hosts();
    // Bytes for a place, by host.
    let for_place =
        |place: usize| (0..hosts).map(|host| parcels.bytes(hops.rank(host, place))).collect::<Vec<usize>>();
    let arrived = Region::zeroed(parcels.bytes(own) * hosts);
    let (mine, received) = (for_place(hops.place()), vec![parcels.bytes(own); hosts]);
    let Some(host) = &hops.host else {
        let work = hops.across.all_to_all_unequal_async(sent, &arrived, &mine, &received, CommType::U8);
        return (work, arrived);
    };
    let places = hops.places();
    let bytes: usize = mine.iter().sum();
    let send: Vec<usize> = (0..places).map(|place| for_place(place).iter().sum()).collect();
    let (near, onward) = (Region::zeroed(bytes * places), Region::zeroed(bytes));
    let first = host.all_to_all_unequal_async(sent, &near, &send, &vec![bytes; places], CommType::U8);
    let prepare = {
        let (hops, parcels, device) = (hops.clone(), parcels.clone(), device.clone());
        let (near, onward) = (near.clone(), onward.clone());
        move || {
            // SAFETY: the first hop is over and the second has not begun; nobody else knows these regions.
            let (near, mut rest) = unsafe { (near.as_slice::<u8>(), onward.as_mut_slice::<u8>()) };
            let mut start = 0;
            for host in 0..hosts {
                let rank = hops.rank(host, hops.place());
                let len = parcels.bytes(rank);
                let sources: Vec<&[u8]> =
                    (0..places).map(|place| &piece(near, place, bytes)[start..start + len]).collect();
                let (parcel, later) = rest.split_at_mut(len);
                parcels.repack_sum(&device, rank, &sources, parcel);
                (start, rest) = (start + len, later);
            }
        }
    };
    let regions = [&onward, &arrived];
    let work =
        hops.across.all_to_all_unequal_after(&first, prepare, regions, [&mine, &received], CommType::U8);
    (work, arrived)
}
