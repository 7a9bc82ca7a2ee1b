//! Collectives through the staging area, for memory that peers cannot see.
//!
//! Each rank owns two halves of at most 512 KB. While the ranks consume window *k* in one half, window *k* + 1 is copied
//! into the other, so a window costs one step, and the staging area stays in the cache: main memory sees each byte read
//! once and written once, whatever the message size.

use std::ops::Range;

use super::LocalCarrier;
use super::collectives::Pull;
use crate::backend::Ticket;
use crate::copy::copy;
use crate::error::Result;
use crate::op::{Collective, Kind, Part};

impl LocalCarrier {
    pub(super) fn run_staged(&self, operation: &Collective, part: &Part, ticket: &Ticket) -> Result<()> {
        match operation.kind {
            Kind::AllReduce | Kind::Reduce => {
                let takes_result = operation.root.is_none_or(|root| root == self.membership.me);
                self.reduce_staged(part, takes_result, ticket, |bases, start, bytes| {
                    match operation.root {
                        Some(root) => self.fold_range(operation, bases, &[bases[root]], start, bytes),
                        None => self.fold_range(operation, bases, bases, start, bytes),
                    }
                    Ok(())
                })
            }
            Kind::ReduceScatter => {
                let pieces = pieces_of(&part.input_cuts);
                self.fold_pieces_staged(part, &pieces, ticket, |windows, start, bytes| {
                    let output = part.output.as_ptr().wrapping_add(start);
                    self.fold_range(operation, windows, &[output], 0, bytes);
                    Ok(())
                })
            }
            _ => self.pull_staged(operation, part, ticket),
        }
    }

    /// Folds window after window inside the staging area: each rank its slice, written to all (or to the root).
    ///
    /// `fold_slice(bases, start, bytes)` folds the same slice of all ranks' windows and writes the result back to those
    /// that take it.
    pub(crate) fn reduce_staged(
        &self,
        part: &Part,
        takes_result: bool,
        ticket: &Ticket,
        mut fold_slice: impl FnMut(&[*mut u8], usize, usize) -> Result<()>,
    ) -> Result<()> {
        let (size, me) = (self.membership.size(), self.membership.me);
        let sequence = ticket.fingerprint.sequence;
        let window = self.layout.half_bytes();
        let total = part.input.len();
        let rounds = total.div_ceil(window);
        let extent = |round: usize| (round * window, window.min(total - round * window));
        let half = |round: usize| sequence.wrapping_add(round as u64);
        let copy_in = |round: usize| {
            let (start, bytes) = extent(round);
            // SAFETY: our input and our half, which nobody reads before the next step.
            unsafe { copy(part.input.as_ptr().add(start), self.layout.staging(me, half(round)), bytes) };
        };
        if rounds > 0 {
            copy_in(0);
        }
        for round in 0..=rounds {
            self.step(ticket)?;
            if round > 0 && takes_result {
                let (start, bytes) = extent(round - 1);
                // SAFETY: the step above says that every slice of this window is written.
                unsafe {
                    copy(self.layout.staging(me, half(round - 1)), part.output.as_ptr().add(start), bytes)
                };
            }
            if round + 1 < rounds {
                copy_in(round + 1);
            }
            if round < rounds {
                let bases: Vec<*mut u8> =
                    (0..size).map(|rank| self.layout.staging(rank, half(round))).collect();
                let (start, bytes) = self.my_slice(extent(round).1);
                fold_slice(&bases, start, bytes)?;
            }
        }
        Ok(())
    }

    /// Folds pieces window after window, the `i`-th of `pieces` on rank `i`.
    ///
    /// All pieces show a window at a time, so that all ranks have work. `fold_window(windows, start, bytes)` gets the
    /// same stretch of this rank's piece, from `start` on, out of every rank's input.
    pub(crate) fn fold_pieces_staged(
        &self,
        part: &Part,
        pieces: &[Range<usize>],
        ticket: &Ticket,
        mut fold_window: impl FnMut(&[*mut u8], usize, usize) -> Result<()>,
    ) -> Result<()> {
        let (size, me) = (self.membership.size(), self.membership.me);
        let sequence = ticket.fingerprint.sequence;
        let window = self.layout.half_bytes() / size / 64 * 64;
        let half = |round: usize| sequence.wrapping_add(round as u64);
        let slot = |rank: usize, round: usize, piece: usize| {
            self.layout.staging(rank, half(round)).wrapping_add(piece * window)
        };
        let copy_in = |round: usize| {
            for (index, piece) in pieces.iter().enumerate() {
                let start = (round * window).min(piece.len());
                let input = part.input.as_ptr().wrapping_add(piece.start + start);
                // SAFETY: our input and our half, which nobody reads before the next step; a slot holds a window.
                unsafe { copy(input, slot(me, round, index), window.min(piece.len() - start)) };
            }
        };
        let longest = pieces.iter().map(ExactSizeIterator::len).max().unwrap_or(0);
        let rounds = longest.div_ceil(window.max(1));
        if rounds > 0 {
            copy_in(0);
        }
        for round in 0..rounds {
            self.step(ticket)?;
            if round + 1 < rounds {
                copy_in(round + 1);
            }
            let start = round * window;
            if start < pieces[me].len() {
                let windows: Vec<*mut u8> = (0..size).map(|rank| slot(rank, round, me)).collect();
                fold_window(&windows, start, window.min(pieces[me].len() - start))?;
            }
        }
        self.step(ticket)
    }

    /// Publishes every rank's pieces window by window; each rank takes what is meant for it.
    ///
    /// A buffer that is cut into a piece per rank shows a window of every piece at a time, so that all ranks have work.
    fn pull_staged(&self, operation: &Collective, part: &Part, ticket: &Ticket) -> Result<()> {
        let sequence = ticket.fingerprint.sequence;
        let cut = matches!(operation.kind, Kind::Scatter | Kind::AllToAll);
        let slots = if cut { self.membership.size() } else { 1 };
        let window = self.layout.half_bytes() / slots / 64 * 64;
        let half = |round: usize| sequence.wrapping_add(round as u64);
        let mine = self.own_pieces(operation, part);
        let copy_in = |round: usize| {
            let mut offset = 0;
            for (slot, bytes) in mine.iter().enumerate() {
                let start = (round * window).min(*bytes);
                let staging =
                    self.layout.staging(self.membership.me, half(round)).wrapping_add(slot * window);
                // SAFETY: our input and our half, which nobody reads before the next step; a slot holds a window.
                unsafe { copy(part.input.as_ptr().add(offset + start), staging, window.min(bytes - start)) };
                offset += bytes;
            }
        };
        let pulls = self.pulls(operation, part, sequence);
        let rounds = self.longest_piece(operation, part, sequence).div_ceil(window.max(1));
        if rounds > 0 {
            copy_in(0);
        }
        for round in 0..rounds {
            self.step(ticket)?;
            if round + 1 < rounds {
                copy_in(round + 1);
            }
            self.take_window(part, &pulls, round * window, window, half(round));
        }
        self.step(ticket)
    }

    fn take_window(&self, part: &Part, pulls: &[Pull], start: usize, window: usize, half: u64) {
        let staged = |pull: &Pull| self.layout.staging(pull.source, half).wrapping_add(pull.piece * window);
        for pull in pulls.iter().filter(|pull| start < pull.bytes) {
            let bytes = window.min(pull.bytes - start);
            // SAFETY: the source has stepped past filling this window and refills it only after our next step.
            unsafe { copy(staged(pull), part.output.as_ptr().add(pull.output_offset + start), bytes) };
        }
    }

    /// Bytes of each piece of this rank's input; none where nobody reads it.
    fn own_pieces(&self, operation: &Collective, part: &Part) -> Vec<usize> {
        let me = self.membership.me;
        match operation.kind {
            _ if !self.shares(operation, me) => Vec::new(),
            Kind::AllToAll | Kind::Scatter => part.input_cuts.clone(),
            _ => vec![part.input.len()],
        }
    }

    /// The longest piece of any rank: all ranks must take the same number of rounds.
    fn longest_piece(&self, operation: &Collective, part: &Part, sequence: u64) -> usize {
        let longest = |cuts: &[usize]| cuts.iter().copied().max().unwrap_or(0);
        match operation.kind {
            Kind::AllGather => longest(&part.output_cuts),
            Kind::Scatter => part.output.len(),
            Kind::AllToAll => {
                let of_rank = |rank| longest(&self.posted_cuts(rank, sequence).0);
                (0..self.membership.size()).map(of_rank).max().unwrap_or(0)
            }
            _ => part.input.len(),
        }
    }
}

/// Where each of the pieces lies that follow one another, by their lengths.
pub(crate) fn pieces_of(lengths: &[usize]) -> Vec<Range<usize>> {
    let mut end = 0;
    let piece = |length: &usize| {
        end += length;
        end - length..end
    };
    lengths.iter().map(piece).collect()
}
