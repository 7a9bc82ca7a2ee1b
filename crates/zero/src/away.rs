//! The update of state that is not at home where kernels read weights: in the host's memory while a GPU computes, or on a
//! disk.
//!
//! It goes tile by tile, on the host. While one tile is updated the next ones are read and the last ones written, through
//! as many buffers as the configuration grants, and a GPU's gradients come and new weights leave (see [`crate::landing`]). A tile's update is the same pass over the same elements as it would be
//! elsewhere, so the bits are the same too (`tile`). LAMB walks over the tiles twice before, for its norms (`lamb`), and Muon once, for its momenta (`matrices`). An update holds handles of all it works on and nothing of the store, so it can
//! run beside the next forward (see [`crate::updates`]).
//! (Ren et al.: "ZeRO-Offload", 2021; Rajbhandari et al.: "ZeRO-Infinity", 2021.)

mod lamb;
mod matrices;
mod tile;

use std::collections::VecDeque;
use std::ops::Range;

use ferrospeed_io::Buffer;
use ferrospeed_optim::lamb::Lamb;
use ferrospeed_optim::{GroupOptions, Pass};
use ferrospeed_tensor::{DType, Device, Tensor};

use crate::error::Result;
use crate::home::{Flat, OnDisk, Transfer};
use crate::homes::Homes;
use crate::landing::{Landing, Way};
use crate::memory::part;
use crate::publish::Publishing;
use crate::reducer::Segment;
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
    /// Whether it can be read already.
    is_done: bool,
}

/// What is updated of a share, and by what.
struct Target {
    share: usize,
    values: Flat,
    own_start: usize,
    master: Option<Flat>,
    states: Vec<Flat>,
    moved: usize,
    part_numel: usize,
    segments: Vec<Segment>,
    rule: Rule,
}

/// What an update does to the elements of a share.
pub(crate) enum Rule {
    /// One pass over each.
    Pass(Pass),
    /// LAMB, whose last pass differs from parameter to parameter: by stretch of the part.
    Lamb { lamb: Lamb, options: GroupOptions, applied: Vec<(Range<usize>, Pass)> },
    /// Muon, whose gradients become directions: the pass that finds them, and the one over weights alone.
    Matrices { direction: Pass, apply: Pass },
}

/// What a walk over tiles is for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Visit {
    /// To find moments, of LAMB or Muon.
    Moments,
    /// To look at weights and states.
    Look,
    /// To update the weights.
    Update,
}

impl Visit {
    /// Whether a walk needs the gradient.
    fn wants_gradient(self, target: &Target) -> bool {
        match self {
            Visit::Moments => true,
            Visit::Look => false,
            Visit::Update => !matches!(target.rule, Rule::Lamb { .. }),
        }
    }

    /// Whether a walk changes a column: one of the states, or of the others.
    fn changes(self, target: &Target, is_state: bool) -> bool {
        match self {
            Visit::Moments => is_state,
            Visit::Look => false,
            Visit::Update => matches!(target.rule, Rule::Pass(_)) || !is_state,
        }
    }
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
    publishing: Option<Publishing>,
}

impl AwayUpdate {
    pub(crate) fn new(store: &ZeroStore) -> AwayUpdate {
        AwayUpdate {
            targets: Vec::new(),
            factor: 1.0,
            tile: 1,
            tile_buffers: 1,
            device: store.device.clone(),
            dtype: store.dtype,
            homes: store.homes().clone(),
            way: None,
            publishing: store.publishing.clone(),
        }
    }

    /// Multiplies gradients by this.
    pub(crate) fn multiply_by(&mut self, factor: f32) {
        self.factor = factor;
    }

    /// What gradients are multiplied by.
    pub(crate) fn factor(&self) -> f32 {
        self.factor
    }

    /// Adds what is elsewhere of a share, whose gradients are there.
    pub(crate) fn add(
        &mut self,
        index: usize,
        share: &Share,
        segments: &[&Segment],
        rule: Rule,
    ) -> Result<()> {
        (self.tile, self.tile_buffers) = (share.placed.update_numel, share.tile_buffers);
        if self.way.is_none() {
            self.way = Way::open(&self.device, self.homes.rooms(), self.tile)?;
        }
        self.targets.push(Target {
            share: index,
            values: share.values.clone(),
            own_start: share.placed.own_start,
            master: share.master.clone(),
            states: share.states.clone(),
            moved: share.placed.moved,
            part_numel: share.placed.layout.part_numel,
            segments: segments.iter().map(|&segment| segment.clone()).collect(),
            rule,
        });
        Ok(())
    }

    /// Whether there is nothing to do.
    pub(crate) fn is_empty(&self) -> bool {
        self.targets.is_empty()
    }

    /// Its tiles, those that are read first before the others; `first_read` is where a stretch is read first.
    pub(crate) fn tiles(&self, first_read: impl Fn(&Tile) -> usize) -> Vec<Tile> {
        let mut tiles: Vec<Tile> = self.targets.iter().flat_map(|target| self.tiles_of(target)).collect();
        tiles.sort_by_cached_key(first_read);
        tiles
    }

    fn tiles_of<'a>(&self, target: &'a Target) -> impl Iterator<Item = Tile> + use<'a> {
        let numel = self.tile;
        let tile = move |start: usize| start..(start + numel).min(target.moved);
        (0..target.moved).step_by(numel).map(move |start| Tile { share: target.share, range: tile(start) })
    }

    /// Updates tiles in their order, and says of each when it can be read.
    pub(crate) fn run(&self, tiles: &[Tile], running: &Running) -> Result<()> {
        self.walk(tiles, Visit::Update, Some(running), |target, tile, columns, gradient| {
            self.update_tile(target, tile, columns, gradient)
        })
    }

    /// Brings tiles to `work` in their order, and what it changed back. What `work` returns is on its way to where kernels
    /// read it.
    fn walk(
        &self,
        tiles: &[Tile],
        visit: Visit,
        running: Option<&Running>,
        mut work: impl FnMut(&Target, &Range<usize>, &[Column<'_>], Option<&Landing>) -> Result<Option<Landing>>,
    ) -> Result<()> {
        let mut spare: Vec<Buffer> = Vec::new();
        let mut coming: VecDeque<Coming<'_>> = VecDeque::new();
        let mut leaving: VecDeque<Leaving<'_>> = VecDeque::new();
        let mut asked = 0;
        for (index, tile) in tiles.iter().enumerate() {
            // One buffer is worked on; of the others, half may be read ahead.
            while asked < tiles.len() && asked <= index + self.tile_buffers.saturating_sub(1) / 2 {
                coming.push_back(self.begin(&tiles[asked], visit, &mut spare)?);
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
            let target = self.target(tile);
            let values = work(target, &tile.range, &here, gradient.as_ref())?;
            let first_state = usize::from(target.master.is_some());
            let states = first_state..first_state + target.states.len();
            let mut writes = Vec::new();
            for (index, column) in here.into_iter().enumerate() {
                let Column::Disk(disk, range, buffer) = column else { continue };
                if visit.changes(target, states.contains(&index)) {
                    writes.push(disk.start_write_tile(range, buffer)?);
                } else {
                    spare.push(buffer);
                }
            }
            let is_done = values.is_none() && self.values_on_disk(target, &tile.range).is_none();
            if is_done {
                self.done(tile, running)?;
            }
            leaving.push_back(Leaving { tile, writes, values, is_done });
            while leaving.len() > self.tile_buffers.saturating_sub(1).div_ceil(2).max(1) {
                self.end(&mut leaving, &mut spare, running)?;
            }
        }
        while !leaving.is_empty() {
            self.end(&mut leaving, &mut spare, running)?;
        }
        self.homes.keep_buffers(spare);
        Ok(())
    }

    /// Waits for the earliest tile that is on its way back.
    fn end(
        &self,
        leaving: &mut VecDeque<Leaving<'_>>,
        spare: &mut Vec<Buffer>,
        running: Option<&Running>,
    ) -> Result<()> {
        let Some(Leaving { tile, writes, mut values, is_done }) = leaving.pop_front() else { return Ok(()) };
        for write in writes {
            spare.push(write.wait()?);
        }
        values.as_mut().map_or(Ok(()), Landing::wait)?;
        if is_done { Ok(()) } else { self.done(tile, running) }
    }

    /// Brings a tile that is updated to the ranks that read it, and says that it can be read.
    fn done(&self, tile: &Tile, running: Option<&Running>) -> Result<()> {
        let Some(running) = running else { return Ok(()) };
        let target = self.target(tile);
        if let Some(publishing) = &self.publishing {
            publishing.send(target.values.memory()?, target.part_numel, &tile.range)?;
        }
        running.done(tile);
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
    fn begin<'a>(&'a self, tile: &Tile, visit: Visit, spare: &mut Vec<Buffer>) -> Result<Coming<'a>> {
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
        if let (Visit::Update, Some((disk, range))) = (visit, self.values_on_disk(target, &tile.range)) {
            columns.push(read(disk, range)?);
        }
        let gradient = visit.wants_gradient(target).then(|| self.fetch(target, &tile.range)).transpose()?;
        Ok(Coming { columns, gradient: gradient.flatten() })
    }

    /// Begins to bring a tile's gradient from the device, where it is still there.
    fn fetch(&self, target: &Target, tile: &Range<usize>) -> Result<Option<Landing>> {
        let is_far = |segment: &&Segment| !segment.values.device().backend().is_host();
        let first = target.segments.first().filter(is_far);
        let (Some(way), Some(first)) = (&self.way, first) else { return Ok(None) };
        let mut landing = way.room(first.values.dtype())?;
        for segment in &target.segments {
            let Some((start, len)) = segment.within(tile) else { continue };
            let source = part(&segment.values, start - segment.in_part, len)?;
            let place = part(landing.room(), start - tile.start, len)?;
            way.begin(&mut landing, &source, &place)?;
        }
        Ok(Some(landing))
    }
}

#[cfg(test)]
#[path = "away_tests.rs"]
mod tests;
