//! The update of state that is not at home where kernels read weights: in the host's memory while a GPU computes, or on a
//! disk.
//!
//! It goes tile by tile, on the host. While one tile is updated the next ones are read and the last ones written, through
//! as many buffers as the configuration grants. A tile's update is the same pass over the same elements as it would be
//! elsewhere, so the bits are the same too.
//! (Ren et al.: "ZeRO-Offload", 2021; Rajbhandari et al.: "ZeRO-Infinity", 2021.)

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use ferrospeed_io::Buffer;
use ferrospeed_optim::{Copy16, Pass, Stretch};
use ferrospeed_tensor::backend::UpdateOperands;
use ferrospeed_tensor::{Category, DType, Device, Tensor};

use crate::error::Result;
use crate::home::{Flat, OnDisk, Transfer, moved_to};
use crate::memory::part;
use crate::reducer::Segment;
use crate::step::gradient_of;
use crate::store::{Share, ZeroStore};

/// One column (f32 weights, or an optimizer state) of a tile on its way.
enum Column<'a> {
    Memory(Tensor),
    Disk(&'a OnDisk, Buffer),
}

enum Asked<'a> {
    Here(Tensor),
    Reading(&'a OnDisk, Transfer),
}

impl ZeroStore {
    /// Updates the weights of a share whose f32 weights and states are elsewhere.
    pub(crate) fn update_away(
        &self,
        share: &Share,
        segments: &[&Segment],
        factor: f32,
        pass: &Pass,
    ) -> Result<()> {
        let columns: Vec<&Flat> = share.master.iter().chain(&share.states).map(Flat::first).collect();
        let numel = share.moved;
        let tile = |index: usize| index * share.tile..((index + 1) * share.tile).min(numel);
        let tiles = numel.div_ceil(share.tile);
        let mut spare: Vec<Buffer> = Vec::new();
        let mut coming: VecDeque<Vec<Asked<'_>>> = VecDeque::new();
        let mut leaving: VecDeque<Vec<Transfer>> = VecDeque::new();
        let mut asked = 0;
        for index in 0..tiles {
            // One buffer is worked on; of the others, half may be read ahead.
            while asked < tiles && asked <= index + share.tile_buffers.saturating_sub(1) / 2 {
                let bytes = share.tile * DType::F32.size_bytes();
                let buffer = || spare.pop().unwrap_or_else(|| self.homes().tile_buffer(bytes));
                coming.push_back(begin(&columns, tile(asked), buffer)?);
                asked += 1;
            }
            let Some(ready) = coming.pop_front() else { break };
            let mut here = Vec::with_capacity(columns.len());
            for column in ready {
                here.push(match column {
                    Asked::Here(tensor) => Column::Memory(tensor),
                    Asked::Reading(disk, transfer) => Column::Disk(disk, transfer.wait()?),
                });
            }
            self.update_tile(share, tile(index), &here, segments, factor, pass)?;
            let mut writes = Vec::new();
            for column in here {
                if let Column::Disk(disk, buffer) = column {
                    writes.push(disk.start_write_tile(tile(index), buffer)?);
                }
            }
            leaving.push_back(writes);
            while leaving.len() > share.tile_buffers.saturating_sub(1).div_ceil(2).max(1) {
                end(&mut leaving, &mut spare)?;
            }
        }
        while !leaving.is_empty() {
            end(&mut leaving, &mut spare)?;
        }
        self.homes().keep_buffers(spare);
        self.update_kept(share, segments, factor, pass)
    }

    /// Updates what stays with the device of a share whose other states are elsewhere (twin-flow).
    fn update_kept(&self, share: &Share, segments: &[&Segment], factor: f32, pass: &Pass) -> Result<()> {
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

    fn update_tile(
        &self,
        share: &Share,
        tile: Range<usize>,
        columns: &[Column<'_>],
        segments: &[&Segment],
        factor: f32,
        pass: &Pass,
    ) -> Result<()> {
        let host = Device::cpu();
        let worker = if self.device.backend().is_host() { &self.device } else { &host };
        let tensors: Vec<Tensor> = columns.iter().map(|column| column.tensor(tile.len())).collect();
        let own_start = share.own_start;
        for segment in segments {
            let start = tile.start.max(segment.in_part);
            let end = tile.end.min(segment.in_part + segment.values.numel());
            if start >= end {
                continue;
            }
            let len = end - start;
            let gradient = moved_to(part(&segment.values, start - segment.in_part, len)?, &host)?;
            let mut cut: Vec<Tensor> = Vec::with_capacity(tensors.len());
            for tensor in &tensors {
                cut.push(part(tensor, start - tile.start, len)?);
            }
            let weights = match share.master {
                Some(_) => cut.remove(0),
                None => share.values.read(own_start + start, len, &host)?,
            };
            let copied = self.dtype != DType::F32;
            // Where kernels read weights in the host's memory they are written in place.
            let in_place = share.values.is_here(&host);
            let copy = match (copied, in_place) {
                (false, _) => None,
                (true, true) => Some(share.values.read(own_start + start, len, &host)?),
                (true, false) => Some(Tensor::empty_in([len], self.dtype, &host, Category::Buffers)?),
            };
            // SAFETY: the tile's columns are this call's own, the values this store's, whose lock is held while no
            // collective over them is under way; segments are disjoint.
            unsafe {
                let mut stretch = Stretch {
                    weights: weights.host_mut()?,
                    gradient: gradient_of(&gradient)?,
                    gradient_factor: factor,
                    states: cut.iter().map(|state| state.host_mut()).collect::<Result<_, _>>()?,
                    copy: match &copy {
                        Some(copy) if self.dtype == DType::BF16 => Copy16::Bf16(copy.host_mut()?),
                        Some(copy) => Copy16::F16(copy.host_mut()?),
                        None => Copy16::None,
                    },
                    device: worker,
                };
                stretch.pass(pass);
            }
            match &copy {
                Some(copy) if !in_place => share.values.write(own_start + start, copy)?,
                None if share.master.is_some() || !in_place => {
                    share.values.write(own_start + start, &weights)?
                }
                _ => {}
            }
        }
        Ok(())
    }
}

impl Column<'_> {
    fn tensor(&self, len: usize) -> Tensor {
        match self {
            Column::Memory(tensor) => tensor.clone(),
            // SAFETY: the buffer holds a whole tile of f32, outlives the update, and is used by nobody else meanwhile.
            Column::Disk(_, buffer) => unsafe {
                let (device, owner) = (Device::cpu(), Arc::new(()));
                Tensor::from_external(buffer.address(), [len], DType::F32, &device, Category::Buffers, owner)
            },
        }
    }
}

/// Asks for a tile.
fn begin<'a>(
    columns: &[&'a Flat],
    tile: Range<usize>,
    mut buffer: impl FnMut() -> Buffer,
) -> Result<Vec<Asked<'a>>> {
    let ask = |column: &&'a Flat| {
        Ok(match column {
            Flat::Disk(disk) => Asked::Reading(disk, disk.start_read_tile(tile.clone(), buffer())?),
            here => Asked::Here(part(here.memory()?, tile.start, tile.len())?),
        })
    };
    columns.iter().map(ask).collect()
}

/// Waits for the earliest tile that is being written.
fn end(leaving: &mut VecDeque<Vec<Transfer>>, spare: &mut Vec<Buffer>) -> Result<()> {
    for write in leaving.pop_front().into_iter().flatten() {
        spare.push(write.wait()?);
    }
    Ok(())
}
