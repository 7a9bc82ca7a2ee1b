//! The update of one tile.

use std::ops::Range;
use std::sync::Arc;

use ferrospeed_optim::{Copy16, Pass, Stretch};
use ferrospeed_tensor::{Category, DType, Device, Out, Tensor};

use super::{AwayUpdate, Column, Rule, Target};
use crate::error::Result;
use crate::home::Flat;
use crate::landing::Landing;
use crate::memory::part;
use crate::reducer::Segment;
use crate::step::gradient_of;

/// The columns of a tile as tensors of the host.
pub(super) struct Columns {
    /// f32 weights; `None` where what kernels read is f32 itself, in the host's memory.
    pub(super) weights: Option<Tensor>,
    pub(super) states: Vec<Tensor>,
    /// What kernels read, where a buffer goes to where that is.
    values: Option<Tensor>,
}

/// A stretch of a tile, and what happens to it.
struct Piece<'a> {
    /// Where it starts in the part.
    start: usize,
    gradient: Tensor,
    factor: f32,
    /// The optimizer's states of the stretch.
    states: Vec<Tensor>,
    pass: &'a Pass,
}

impl AwayUpdate {
    pub(super) fn columns(&self, target: &Target, columns: &[Column<'_>], len: usize) -> Columns {
        let first_state = usize::from(target.master.is_some());
        let wide = first_state + target.states.len();
        let tensor = |column: &Column<'_>| column.tensor(len, DType::F32, self.device.host());
        Columns {
            weights: columns[..first_state].first().map(tensor),
            states: columns[first_state..wide].iter().map(tensor).collect(),
            values: columns.get(wide).map(|column| column.tensor(len, self.dtype, self.device.host())),
        }
    }

    /// Whose threads do the work of the host.
    pub(super) fn worker(&self) -> Device {
        self.device.host().clone()
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
    pub(super) fn update_tile(
        &self,
        target: &Target,
        tile: &Range<usize>,
        columns: &[Column<'_>],
        landed: Option<&Landing>,
    ) -> Result<Option<Landing>> {
        let columns = self.columns(target, columns, tile.len());
        let mut outgoing = self.outgoing(target)?;
        match &target.rule {
            Rule::Pass(pass) => {
                for segment in &target.segments {
                    let Some((start, len)) = segment.within(tile) else { continue };
                    let gradient = gradient(segment, landed, tile, start, len)?;
                    let cut = |state: &Tensor| part(state, start - tile.start, len);
                    let states = columns.states.iter().map(cut).collect::<Result<_>>()?;
                    let piece = Piece { start, gradient, factor: self.factor, states, pass };
                    self.update_piece(target, tile, &columns, piece, &mut outgoing)?;
                }
            }
            Rule::Matrices { apply, .. } => {
                for segment in &target.segments {
                    let Some((start, len)) = segment.within(tile) else { continue };
                    let gradient = gradient(segment, landed, tile, start, len)?;
                    let piece = Piece { start, gradient, factor: 1.0, states: Vec::new(), pass: apply };
                    self.update_piece(target, tile, &columns, piece, &mut outgoing)?;
                }
            }
            Rule::Lamb { lamb, options, applied } => {
                let directions = self.directions_again(lamb, options, target, tile, &columns)?;
                for (range, pass) in applied {
                    let (start, end) = (range.start.max(tile.start), range.end.min(tile.end));
                    if start >= end {
                        continue;
                    }
                    let gradient = part(&directions, start - tile.start, end - start)?;
                    let piece = Piece { start, gradient, factor: 1.0, states: Vec::new(), pass };
                    self.update_piece(target, tile, &columns, piece, &mut outgoing)?;
                }
            }
        }
        Ok(outgoing)
    }

    fn update_piece(
        &self,
        target: &Target,
        tile: &Range<usize>,
        columns: &Columns,
        piece: Piece<'_>,
        outgoing: &mut Option<Landing>,
    ) -> Result<()> {
        let Piece { start, gradient, factor, states, pass } = piece;
        let (host, worker, len) = (self.device.host(), self.worker(), gradient.numel());
        let in_values = target.own_start + start;
        let weights = match &columns.weights {
            Some(weights) => part(weights, start - tile.start, len)?,
            None => target.values.read(in_values, len, host)?,
        };
        // Where kernels read weights in the host's memory, or a buffer goes to where they are, they are written there.
        let place = match &columns.values {
            Some(values) => Some(part(values, start - tile.start, len)?),
            None if target.values.is_here(host) => Some(target.values.read(in_values, len, host)?),
            None => None,
        };
        let copy = match (self.dtype, &place, &outgoing) {
            (DType::F32, ..) => None,
            (_, Some(place), _) => Some(place.clone()),
            (_, None, Some(outgoing)) => Some(part(outgoing.room(), start - tile.start, len)?),
            (_, None, None) => Some(Tensor::empty_in([len], self.dtype, host, Category::Buffers)?),
        };
        // SAFETY: the tile's columns are this call's own; what kernels read nobody else writes, and whoever reads it waits
        // until the tile is done; pieces of a tile are disjoint.
        unsafe {
            let mut stretch = Stretch {
                weights: weights.host_mut()?,
                gradient: gradient_of(&gradient)?,
                gradient_factor: factor,
                states: states.iter().map(|state| state.host_mut()).collect::<Result<_, _>>()?,
                copy: match &copy {
                    Some(copy) if self.dtype == DType::BF16 => Copy16::Bf16(copy.host_mut()?),
                    Some(copy) => Copy16::F16(copy.host_mut()?),
                    None => Copy16::None,
                },
                device: &worker,
            };
            stretch.pass(pass);
        }
        match (&copy, &place) {
            (Some(_), Some(_)) => {}
            (Some(copy), None) => match (&self.way, outgoing) {
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
        Ok(())
    }
}

/// A stretch of a tile's gradient: where it landed, or where it was made.
pub(super) fn gradient(
    segment: &Segment,
    landed: Option<&Landing>,
    tile: &Range<usize>,
    start: usize,
    len: usize,
) -> Result<Tensor> {
    match landed {
        Some(landed) => part(landed.room(), start - tile.start, len),
        None => part(&segment.values, start - segment.in_part, len),
    }
}

impl Column<'_> {
    fn tensor(&self, len: usize, dtype: DType, host: &Device) -> Tensor {
        match self {
            Column::Memory(tensor) => tensor.clone(),
            // SAFETY: the buffer holds a whole tile, outlives the update, and is used by nobody else meanwhile.
            Column::Disk(_, _, buffer) => unsafe {
                let owner = Arc::new(());
                Tensor::from_uncounted(buffer.address(), [len], dtype, host, owner)
            },
        }
    }
}
