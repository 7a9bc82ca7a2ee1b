//! State as it was when a save began, read while training goes on.

use std::ops::Range;

use ferrospeed_zero::{Held, SavedPiece};

/// What a save in the background reads, piece by piece and in order.
///
/// On a processor that also computes, a copy costs the step what it costs, so state is read where it is for as long as
/// nobody wants to change it; only what is left then is copied. State on another device is fetched at once: its memory
/// is read over a link, beside which computing goes on.
pub(super) struct Snapshot {
    pieces: Vec<SavedPiece>,
    /// Elements that nobody has read yet.
    left: usize,
    from: Source,
}

enum Source {
    /// Where it was.
    Held(Held),
    /// A copy of pieces from `piece` on, the first of them from `element` on.
    Copied { piece: usize, element: usize, copies: Vec<Vec<u8>> },
    /// It could not be copied.
    Failed(String),
}

impl Snapshot {
    pub(super) fn new(held: Held, pieces: Vec<SavedPiece>, in_place: bool) -> Snapshot {
        let left = pieces.iter().map(|piece| piece.len).sum();
        let from = if in_place && left > 0 { Source::Held(held) } else { copy(held, &pieces, 0, 0) };
        Snapshot { pieces, left, from }
    }

    /// Appends elements `range` of a piece to `out`.
    pub(super) fn read(
        &mut self,
        piece: usize,
        range: Range<usize>,
        out: &mut Vec<u8>,
    ) -> Result<(), String> {
        if matches!(&self.from, Source::Held(held) if held.is_waited_for()) {
            let failed = Source::Failed(String::new());
            if let Source::Held(held) = std::mem::replace(&mut self.from, failed) {
                self.from = copy(held, &self.pieces, piece, range.start);
            }
        }
        self.left -= range.len();
        match &self.from {
            Source::Held(held) => held.read(piece, range, out).map_err(|error| error.to_string())?,
            Source::Copied { piece: first, element, copies } => {
                let skipped = if piece == *first { *element } else { 0 };
                let size = self.pieces[piece].dtype.size_bytes();
                let bytes = (range.start - skipped) * size..(range.end - skipped) * size;
                out.extend_from_slice(&copies[piece - first][bytes]);
            }
            Source::Failed(why) => return Err(why.clone()),
        }
        if self.left == 0 {
            self.from = Source::Copied { piece, element: 0, copies: Vec::new() };
        }
        Ok(())
    }
}

/// Copies all from an element of a piece on, and lets go of it.
fn copy(held: Held, pieces: &[SavedPiece], first: usize, element: usize) -> Source {
    let copies = pieces.iter().enumerate().skip(first).map(|(index, piece)| {
        let start = if index == first { element } else { 0 };
        let mut copy = Vec::with_capacity((piece.len - start) * piece.dtype.size_bytes());
        held.read(index, start..piece.len, &mut copy).map(|()| copy)
    });
    match copies.collect() {
        Ok(copies) => Source::Copied { piece: first, element, copies },
        Err(error) => Source::Failed(ferrospeed_zero::ZeroError::to_string(&error)),
    }
}
