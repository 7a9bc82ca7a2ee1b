//! The update of state that is not at home where kernels read weights: in the host's memory while a GPU computes, or on a
//! disk.
//!
//! It goes tile by tile, on the host. While one tile is updated the next ones are read and the last ones written, through
//! as many buffers as the configuration grants, and a GPU's gradients come and new weights leave (see [`crate::landing`]). A tile's update is the same pass over the same elements as it would be
//! elsewhere, so the bits are the same too. An update holds handles of all it works on and nothing of the store, so it can
//! run beside the next forward (see [`crate::updates`]).
//! (Ren et al.: "ZeRO-Offload", 2021; Rajbhandari et al.: "ZeRO-Infinity", 2021.)

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use ferrospeed_io::Buffer;
use ferrospeed_optim::{Copy16, Pass, Stretch};
use ferrospeed_tensor::backend::UpdateOperands;
use ferrospeed_tensor::{Category, DType, Device, Out, Tensor};

use crate::error::Result;
use crate::home::{Flat, OnDisk, Transfer};
use crate::homes::Homes;
use crate::landing::{Landing, Way};
use crate::memory::part;
use crate::reducer::Segment;
use crate::step::gradient_of;
use crate::store::{Share, ZeroStore};
use crate::updates::{Running, Tile};

/// One column (f32 weights, an optimizer state, or what kernels read) of a tile on its way.
enum Column<'a> {
    Memory(Tensor),
    Disk(&'a OnDisk, Range<usize>, Buffer),
}

enum Asked<'a> {
    Here(Tensor),
    Reading(&'a OnDisk, Range<usize>, Transfer),
}

/// A tile on its way to the update: its columns, and its gradient where that is another device's.
struct Coming<'a> {
    columns: Vec<Asked<'a>>,
    gradient: Option<Landing>,
}

/// A tile on its way back: what a disk writes, and what kernels of another device will read.
struct Leaving<'a> {
    tile: &'a Tile,
    writes: Vec<Transfer>,
    values: Option<Landing>,
}

/// What is updated of a share, and by what.
struct Target {
    share: usize,
    values: Flat,
    own_start: usize,
    master: Option<Flat>,
    states: Vec<Flat>,
    moved: usize,
    segments: Vec<Segment>,
    pass: Pass,
}

/// The update of all shares whose states are elsewhere.
pub(crate) struct AwayUpdate {
    targets: Vec<Target>,
    factor: f32,
    /// Elements of a tile, and how many tiles may be in memory.
    tile: usize,
    tile_buffers: usize,
    device: Device,
    dtype: DType,
    homes: Homes,
    way: Option<Way>,
}

impl AwayUpdate {
    pub(crate) fn new(store: &ZeroStore, factor: f32) -> AwayUpdate {
        AwayUpdate {
            targets: Vec::new(),
            factor,
            tile: 1,
            tile_buffers: 1,
            device: store.device.clone(),
            dtype: store.dtype,
            homes: store.homes().clone(),
            way: None,
        }
    }

    /// To be called when everything is added and the gradients are there.
    pub(crate) fn prepare(&mut self) -> Result<()> {
        self.way = Way::open(&self.device, self.homes.rooms(), self.tile)?;
        Ok(())
    }

    /// Adds what is elsewhere of a share.
    pub(crate) fn add(&mut self, index: usize, share: &Share, segments: &[&Segment], pass: Pass) {
        (self.tile, self.tile_buffers) = (share.tile, share.tile_buffers);
        self.targets.push(Target {
            share: index,
            values: share.values.clone(),
            own_start: share.own_start,
            master: share.master.clone(),
            states: share.states.clone(),
            moved: share.moved,
            segments: segments.iter().map(|&segment| segment.clone()).collect(),
            pass,
        });
    }

    /// Whether there is nothing to do.
    pub(crate) fn is_empty(&self) -> bool {
        self.targets.is_empty()
    }

    /// Its tiles, those that are read first before the others; `first_read` is where a stretch is read first.
    pub(crate) fn tiles(&self, first_read: impl Fn(&Tile) -> usize) -> Vec<Tile> {
        let mut tiles = Vec::new();
        for target in &self.targets {
            for start in (0..target.moved).step_by(self.tile) {
                let range = start..(start + self.tile).min(target.moved);
                tiles.push(Tile { share: target.share, range });
            }
        }
        tiles.sort_by_cached_key(first_read);
        tiles
    }

    /// Updates tiles in their order, and says of each when it can be read.
    pub(crate) fn run(&self, tiles: &[Tile], running: &Running) -> Result<()> {
        let mut spare: Vec<Buffer> = Vec::new();
        let mut coming: VecDeque<Coming<'_>> = VecDeque::new();
        let mut leaving: VecDeque<Leaving<'_>> = VecDeque::new();
        let mut asked = 0;
        for (index, tile) in tiles.iter().enumerate() {
            // One buffer is worked on; of the others, half may be read ahead.
            while asked < tiles.len() && asked <= index + self.tile_buffers.saturating_sub(1) / 2 {
                coming.push_back(self.begin(&tiles[asked], &mut spare)?);
                asked += 1;
            }
            let Some(Coming { columns, mut gradient }) = coming.pop_front() else { break };
            let mut here = Vec::with_capacity(columns.len());
            for column in columns {
                here.push(match column {
                    Asked::Here(tensor) => Column::Memory(tensor),
                    Asked::Reading(disk, range, transfer) => Column::Disk(disk, range, transfer.wait()?),
                });
            }
            gradient.as_mut().map_or(Ok(()), Landing::wait)?;
            let values = self.update_tile(self.target(tile), &tile.range, &here, gradient.as_ref())?;
            let mut writes = Vec::new();
            for column in here {
                if let Column::Disk(disk, range, buffer) = column {
                    writes.push(disk.start_write_tile(range, buffer)?);
                }
            }
            if values.is_none() && self.values_on_disk(self.target(tile), &tile.range).is_none() {
                running.done(tile);
            }
            leaving.push_back(Leaving { tile, writes, values });
            while leaving.len() > self.tile_buffers.saturating_sub(1).div_ceil(2).max(1) {
                end(&mut leaving, &mut spare, running)?;
            }
        }
        while !leaving.is_empty() {
            end(&mut leaving, &mut spare, running)?;
        }
        self.homes.keep_buffers(spare);
        Ok(())
    }

    fn target(&self, tile: &Tile) -> &Target {
        let found = self.targets.iter().find(|target| target.share == tile.share);
        found.expect("tiles are those of the targets")
    }

    /// Where on a disk what kernels read of a tile is, where it is there as a whole and begins at a page.
    fn values_on_disk<'a>(
        &self,
        target: &'a Target,
        tile: &Range<usize>,
    ) -> Option<(&'a OnDisk, Range<usize>)> {
        let range = target.own_start + tile.start..target.own_start + tile.end;
        let (disk, range) = match &target.values {
            Flat::Disk(disk) => (disk, range),
            Flat::Split(split) => match &split.rest {
                Flat::Disk(disk) if range.start >= split.at => {
                    (disk, range.start - split.at..range.end - split.at)
                }
                _ => return None,
            },
            _ => return None,
        };
        disk.begins_a_page(range.start).then_some((disk, range))
    }

    /// Asks for a tile.
    fn begin<'a>(&'a self, tile: &Tile, spare: &mut Vec<Buffer>) -> Result<Coming<'a>> {
        let target = self.target(tile);
        let bytes = self.tile * DType::F32.size_bytes();
        let mut read = |disk: &'a OnDisk, range: Range<usize>| -> Result<Asked<'a>> {
            let buffer = spare.pop().unwrap_or_else(|| self.homes.tile_buffer(bytes));
            Ok(Asked::Reading(disk, range.clone(), disk.start_read_tile(range, buffer)?))
        };
        let mut columns = Vec::new();
        for column in target.master.iter().chain(&target.states) {
            columns.push(match column.first() {
                Flat::Disk(disk) => read(disk, tile.range.clone())?,
                here => Asked::Here(part(here.memory()?, tile.range.start, tile.range.len())?),
            });
        }
        if let Some((disk, range)) = self.values_on_disk(target, &tile.range) {
            columns.push(read(disk, range)?);
        }
        Ok(Coming { columns, gradient: self.fetch(target, &tile.range)? })
    }

    /// Begins to bring a tile's gradient from the device.
    fn fetch(&self, target: &Target, tile: &Range<usize>) -> Result<Option<Landing>> {
        let (Some(way), Some(first)) = (&self.way, target.segments.first()) else { return Ok(None) };
        let mut landing = way.room(first.values.dtype())?;
        for segment in &target.segments {
            let Some((start, len)) = common(tile, segment) else { continue };
            let source = part(&segment.values, start - segment.in_part, len)?;
            let place = part(landing.room(), start - tile.start, len)?;
            way.begin(&mut landing, &source, &place)?;
        }
        Ok(Some(landing))
    }

    /// Room for a tile of 16-bit weights that kernels of another device read.
    fn outgoing(&self, target: &Target) -> Result<Option<Landing>> {
        match (&self.way, &target.values) {
            (Some(way), Flat::Memory(values)) if !values.device().backend().is_host() => {
                Ok((self.dtype != DType::F32).then(|| way.room(self.dtype)).transpose()?)
            }
            _ => Ok(None),
        }
    }

    /// Updates a tile. What is returned is on its way to where kernels read it.
    fn update_tile(
        &self,
        target: &Target,
        tile: &Range<usize>,
        columns: &[Column<'_>],
        landed: Option<&Landing>,
    ) -> Result<Option<Landing>> {
        let host = Device::cpu();
        let worker = if self.device.backend().is_host() { &self.device } else { &host };
        let wide = usize::from(target.master.is_some()) + target.states.len();
        let tensors: Vec<Tensor> =
            columns.iter().take(wide).map(|column| column.tensor(tile.len(), DType::F32)).collect();
        let on_disk = columns.get(wide).map(|column| column.tensor(tile.len(), self.dtype));
        let mut outgoing = self.outgoing(target)?;
        for segment in &target.segments {
            let Some((start, len)) = common(tile, segment) else { continue };
            let in_values = target.own_start + start;
            let gradient = match landed {
                Some(landed) => part(landed.room(), start - tile.start, len)?,
                None => part(&segment.values, start - segment.in_part, len)?,
            };
            let mut cut: Vec<Tensor> = Vec::with_capacity(tensors.len());
            for tensor in &tensors {
                cut.push(part(tensor, start - tile.start, len)?);
            }
            let weights = match target.master {
                Some(_) => cut.remove(0),
                None => target.values.read(in_values, len, &host)?,
            };
            // Where kernels read weights in the host's memory, or a buffer goes to where they are, they are written there.
            let place = match &on_disk {
                Some(values) => Some(part(values, start - tile.start, len)?),
                None if target.values.is_here(&host) => Some(target.values.read(in_values, len, &host)?),
                None => None,
            };
            let copy = match (self.dtype, &place, &outgoing) {
                (DType::F32, ..) => None,
                (_, Some(place), _) => Some(place.clone()),
                (_, None, Some(outgoing)) => Some(part(outgoing.room(), start - tile.start, len)?),
                (_, None, None) => Some(Tensor::empty_in([len], self.dtype, &host, Category::Buffers)?),
            };
            // SAFETY: the tile's columns are this call's own; what kernels read nobody else writes, and whoever reads it waits
            // until the tile is done; segments are disjoint.
            unsafe {
                let mut stretch = Stretch {
                    weights: weights.host_mut()?,
                    gradient: gradient_of(&gradient)?,
                    gradient_factor: self.factor,
                    states: cut.iter().map(|state| state.host_mut()).collect::<Result<_, _>>()?,
                    copy: match &copy {
                        Some(copy) if self.dtype == DType::BF16 => Copy16::Bf16(copy.host_mut()?),
                        Some(copy) => Copy16::F16(copy.host_mut()?),
                        None => Copy16::None,
                    },
                    device: worker,
                };
                stretch.pass(&target.pass);
            }
            match (&copy, &place) {
                (Some(_), Some(_)) => {}
                (Some(copy), None) => match (&self.way, &mut outgoing) {
                    (Some(way), Some(outgoing)) => {
                        way.begin(outgoing, copy, &part(target.values.memory()?, in_values, len)?)?;
                    }
                    _ => target.values.write(in_values, copy)?,
                },
                (None, _) if target.master.is_none() => {}
                // SAFETY: the tile's own place in the values, which nobody borrows before their update is done.
                (None, Some(place)) => host.backend().cast(&weights, unsafe { Out::vouched(place) })?,
                (None, None) => target.values.write(in_values, &weights)?,
            }
        }
        Ok(outgoing)
    }
}

/// What a tile has of a segment: where it starts in the part, and its length.
fn common(tile: &Range<usize>, segment: &Segment) -> Option<(usize, usize)> {
    let start = tile.start.max(segment.in_part);
    let end = tile.end.min(segment.in_part + segment.values.numel());
    (start < end).then(|| (start, end - start))
}

impl ZeroStore {
    /// Updates what stays with the device of a share whose other states are elsewhere (twin-flow).
    pub(crate) fn update_kept(
        &self,
        share: &Share,
        segments: &[&Segment],
        factor: f32,
        pass: &Pass,
    ) -> Result<()> {
        for segment in segments {
            let start = share.moved.max(segment.in_part);
            let end = segment.in_part + segment.values.numel();
            if start >= end {
                continue;
            }
            let (len, in_values) = (end - start, share.own_start + start);
            let cut = |flat: &Flat| part(flat.rest().memory()?, start - share.moved, len);
            let in_place = share.values.is_here(&self.device);
            let weights = match &share.master {
                Some(master) => cut(master)?,
                None => share.values.read(in_values, len, &self.device)?,
            };
            let copy = match (self.dtype != DType::F32, in_place) {
                (false, _) => None,
                (true, true) => Some(share.values.read(in_values, len, &self.device)?),
                (true, false) => Some(Tensor::empty_in([len], self.dtype, &self.device, Category::Buffers)?),
            };
            let operands = UpdateOperands {
                weights: weights.clone(),
                gradient: part(&segment.values, start - segment.in_part, len)?,
                states: share.states.iter().map(cut).collect::<Result<_>>()?,
                copy: copy.clone(),
            };
            self.apply(&[operands], factor, pass)?;
            match &copy {
                Some(copy) if !in_place => share.values.write(in_values, copy)?,
                None if share.master.is_some() => share.values.write(in_values, &weights)?,
                _ => {}
            }
        }
        Ok(())
    }
}

impl Column<'_> {
    fn tensor(&self, len: usize, dtype: DType) -> Tensor {
        match self {
            Column::Memory(tensor) => tensor.clone(),
            // SAFETY: the buffer holds a whole tile, outlives the update, and is used by nobody else meanwhile.
            Column::Disk(_, _, buffer) => unsafe {
                let (device, owner) = (Device::cpu(), Arc::new(()));
                Tensor::from_external(buffer.address(), [len], dtype, &device, Category::Buffers, owner)
            },
        }
    }
}

/// Waits for the earliest tile that is on its way back.
fn end(leaving: &mut VecDeque<Leaving<'_>>, spare: &mut Vec<Buffer>, running: &Running) -> Result<()> {
    let Some(Leaving { tile, writes, mut values }) = leaving.pop_front() else { return Ok(()) };
    for write in writes {
        spare.push(write.wait()?);
    }
    values.as_mut().map_or(Ok(()), Landing::wait)?;
    running.done(tile);
    Ok(())
}

#[cfg(test)]
#[path = "away_tests.rs"]
mod tests;
