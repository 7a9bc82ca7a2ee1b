//! State out to a checkpoint and back in, piece by piece.
//!
//! A [`SavedPiece`] is a stretch of one value of one parameter. What a rank writes ([`ZeroStore::pieces_to_write`]) is
//! written by no other; what it reads back ([`ZeroStore::pieces_to_read`]) is all it holds. Nothing here knows files.

use std::ops::Range;

use ferrospeed_config::Stage;
use ferrospeed_tensor::{DType, Device, Tensor};

use crate::attached::State;
use crate::error::{Result, ZeroError};
use crate::hold::Hold;
use crate::home::Flat;
use crate::memory::part;
use crate::store::{Share, ZeroStore};

/// Bytes that are copied at once.
const COPY_BYTES: usize = 64 << 10;

/// Which value of a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Saved {
    /// The weights: f32 masters where they are trained, what kernels read where they are not.
    Weight,
    /// An optimizer state, by its place in [`ferrospeed_optim::Optimizer::state_names`] and its name.
    State(usize, &'static str),
}

/// A stretch of one value of one parameter on this rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SavedPiece {
    /// Index among [`ZeroStore::params`].
    pub param: usize,
    /// Which value.
    pub value: Saved,
    /// Its type.
    pub dtype: DType,
    /// Whether the parameter is trained.
    pub trained: bool,
    /// Where the stretch starts in the parameter.
    pub start: usize,
    /// How many elements.
    pub len: usize,
    /// Whether every rank holds the same stretch.
    pub replicated: bool,
    in_part: usize,
}

/// Pieces of a store that stay as they are while this lives; see [`ZeroStore::hold`].
pub struct Held {
    /// Where each piece is, from where on.
    parts: Vec<(Flat, usize)>,
    /// Where what is not in memory is read to.
    host: Device,
    hold: Hold,
}

impl Held {
    /// Whether somebody waits to change what is held: the holder should copy what it still needs, and let go.
    pub fn is_waited_for(&self) -> bool {
        self.hold.is_waited_for()
    }

    /// Appends elements `range` of the piece at `index` to `out`, in the piece's type and in this machine's order of
    /// bytes, which is little-endian on all that are supported.
    pub fn read(&self, index: usize, range: Range<usize>, out: &mut Vec<u8>) -> Result<()> {
        let (flat, first) = &self.parts[index];
        let Flat::Memory(whole) = flat else {
            let values = flat.read(first + range.start, range.len(), &self.host)?;
            let start = out.len();
            out.resize(start + values.size_bytes(), 0);
            return Ok(values.device().backend().copy_to_host(&values, &mut out[start..])?);
        };
        let range = first + range.start..first + range.end;
        let backend = whole.device().backend();
        if !backend.is_host() {
            // A device's memory is copied at once, at the full rate of its link.
            let start = out.len();
            out.resize(start + range.len() * whole.dtype().size_bytes(), 0);
            return Ok(backend.copy_to_host(&part(whole, range.start, range.len())?, &mut out[start..])?);
        }
        // Through a buffer that stays in the cache: what is appended is touched once, not filled with zeros first.
        let size = whole.dtype().size_bytes();
        let mut buffer = [0u8; COPY_BYTES];
        let mut at = range.start;
        while at < range.end {
            let count = (range.end - at).min(COPY_BYTES / size);
            let bytes = &mut buffer[..count * size];
            backend.copy_to_host(&part(whole, at, count)?, bytes)?;
            out.extend_from_slice(bytes);
            at += count;
        }
        Ok(())
    }
}

impl ZeroStore {
    /// All that this rank holds: what a load must fill.
    pub fn pieces_to_read(&self) -> Vec<SavedPiece> {
        self.pieces_of(&self.attached().lock())
    }

    fn pieces_of(&self, state: &State) -> Vec<SavedPiece> {
        let mut pieces = Vec::new();
        for (param, &(group, in_group)) in self.places().iter().enumerate() {
            let share = &state.shares[group];
            let own_rank = share.placed.own;
            let Some(fragment) = share.placed.layout.fragment(in_group, own_rank) else { continue };
            let piece = |value, dtype| SavedPiece {
                param,
                value,
                dtype,
                trained: share.placed.trained,
                start: fragment.in_param,
                len: fragment.len,
                replicated: share.placed.layout.ranks == 1,
                in_part: fragment.in_part,
            };
            pieces.push(piece(Saved::Weight, if share.placed.trained { DType::F32 } else { self.dtype }));
            let states = self.saved_states(share).iter().enumerate();
            pieces.extend(states.map(|(index, name)| piece(Saved::State(index, name), DType::F32)));
        }
        pieces
    }

    /// What this rank writes: its own parts, and its share of what all ranks hold alike.
    pub fn pieces_to_write(&self) -> Vec<SavedPiece> {
        let state = self.lock();
        let mut pieces = self.pieces_of(&state);
        // The ranks that hold the same pieces all find the same writer of each parameter: the one with the least to write
        // so far.
        let mut load: Vec<Vec<usize>> =
            state.shares.iter().map(|share| vec![0; share.placed.holders]).collect();
        let mut writer = vec![0; self.params.len()];
        for piece in pieces.iter().filter(|piece| piece.value == Saved::Weight) {
            let load = &mut load[self.places()[piece.param].0];
            let lightest = (0..load.len()).min_by_key(|holder| load[*holder]).unwrap_or(0);
            load[lightest] += piece.len;
            writer[piece.param] = lightest;
        }
        pieces.retain(|piece| {
            let share = &state.shares[self.places()[piece.param].0];
            share.sharding.counted && share.placed.holder == writer[piece.param]
        });
        pieces
    }

    fn saved_states(&self, share: &Share) -> &'static [&'static str] {
        let optimizer = self.optimizer.as_ref().filter(|_| share.placed.trained);
        let names = optimizer.map_or(&[][..], |optimizer| optimizer.state_names(&share.options));
        // A schedule may move the option that decides; what was allocated stays.
        &names[..names.len().min(share.states.len())]
    }

    /// The flat values a piece lies in, and where this rank's part begins in them.
    fn flat_of<'a>(&self, state: &'a State, piece: &SavedPiece) -> Result<(&'a Flat, usize)> {
        let share = &state.shares[self.places()[piece.param].0];
        match piece.value {
            Saved::Weight => Ok(share.weights()),
            Saved::State(index, name) => {
                share.states.get(index).map(|flat| (flat, 0)).ok_or_else(|| ZeroError::Parameter {
                    name: self.params[piece.param].name().into(),
                    why: format!("has no optimizer state '{name}'"),
                })
            }
        }
    }

    /// Keeps pieces as they are now until what is returned is dropped: whoever would change them waits.
    ///
    /// Forward and backward go on meanwhile, since they only read weights.
    pub fn hold(&self, pieces: &[SavedPiece]) -> Result<Held> {
        self.settle("save")?;
        let state = self.lock();
        let parts = pieces.iter().map(|piece| {
            let (flat, start) = self.flat_of(&state, piece)?;
            Ok((flat.clone(), start + piece.in_part))
        });
        let host = self.device.host().clone();
        Ok(Held { parts: parts.collect::<Result<_>>()?, host, hold: self.holds.take() })
    }

    /// Replaces elements of a piece from `start` on. Kernels see new weights after [`ZeroStore::finish_restore`]. All ranks
    /// have met before the first of them calls this: the ranks of a host may have the weights in common.
    pub fn write_piece(&self, piece: &SavedPiece, start: usize, values: &[f32]) -> Result<()> {
        let state = self.lock();
        if piece.value == Saved::Weight {
            self.refuse_while_borrowed("loading a checkpoint")?;
        }
        self.holds.wait_for_none();
        let share = &state.shares[self.places()[piece.param].0];
        let at = piece.in_part + start;
        let values = Tensor::from_slice(values, [values.len()], self.device.host())?;
        let (flat, first) = self.flat_of(&state, piece)?;
        flat.write(first + at, &values)?;
        if piece.value == Saved::Weight && share.master.is_some() {
            share.values.write(share.placed.own_start + at, &values)?;
        }
        Ok(())
    }

    /// Brings every rank the weights that were read. All ranks call it together.
    pub fn finish_restore(&self) -> Result<()> {
        let mut state = self.lock();
        state.reducer.clear();
        self.publish(&mut state)?;
        self.attached().updates.set_half_stepped(false);
        Ok(())
    }

    /// Updates the optimizer made.
    pub fn optimizer_steps(&self) -> u64 {
        self.attached().lock().shares.iter().map(|share| share.steps).max().unwrap_or(0)
    }

    /// Goes on as if the optimizer had made this many updates.
    pub fn set_optimizer_steps(&self, steps: u64) {
        let mut state = self.lock();
        state.shares.iter_mut().for_each(|share| share.steps = steps);
        if let Some(compressing) = &mut state.compressing {
            compressing.restart();
        }
        state.expect_step();
    }

    /// The parameters of every trained group, as indices among [`ZeroStore::params`].
    pub fn group_members(&self) -> Vec<Vec<usize>> {
        self.groups.clone()
    }

    /// Whether gradients wait for a step: they are no part of a checkpoint.
    pub fn has_gradients(&self) -> bool {
        self.attached().lock().reducer.has_gradients()
    }

    /// The stage.
    pub fn stage(&self) -> Stage {
        self.stage
    }
}
