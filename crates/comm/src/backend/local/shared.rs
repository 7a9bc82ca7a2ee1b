//! All_gather into memory that the ranks have in common: each rank puts its own part in its place, and that is all.

use super::LocalCarrier;
use super::layout::PostedRange;
use super::staged::pieces_of;
use crate::backend::Ticket;
use crate::copy::copy;
use crate::error::Result;
use crate::op::{Collective, Digest, Kind};
use crate::region::Region;
use crate::segment::SharedRange;

impl LocalCarrier {
    /// The ticket of an all_gather whose outputs all lie in common memory: ranks must agree on where.
    pub(super) fn shared_ticket(&self, operation: &Collective, ticket: &Ticket) -> Option<Ticket> {
        if operation.kind != Kind::AllGather {
            return None;
        }
        let places: Option<Vec<SharedRange>> =
            operation.parts.iter().map(|part| self.locate_shared(&part.output)).collect();
        let places = places?;
        let mut digest = Digest::new();
        digest.add(ticket.fingerprint.shape);
        for place in &places {
            digest.add(place.segment);
            digest.add(place.offset);
        }
        let mut ticket = ticket.clone();
        ticket.fingerprint.shared_output = Some(*places.first()?);
        ticket.fingerprint.shape = digest.value();
        Some(ticket)
    }

    /// Nothing is moved where every rank's input lies in its place; then meeting is all there is to do.
    pub(super) fn gather_shared(&self, operation: &Collective, ticket: &Ticket) -> Result<()> {
        let inputs: Vec<PostedRange> =
            operation.parts.iter().map(|part| self.locate_shared(&part.input)).collect();
        self.enter(ticket, &inputs)?;
        if (0..self.membership.size()).all(|rank| self.is_in_place(operation, ticket, rank)) {
            return Ok(());
        }
        for part in &operation.parts {
            let own = pieces_of(&part.output_cuts).swap_remove(self.membership.me);
            // SAFETY: all ranks have entered, so nobody reads this rank's part of the output any more.
            unsafe { copy(part.input.as_ptr(), part.output.as_ptr().add(own.start), own.len()) };
        }
        self.step(ticket)
    }

    fn locate_shared(&self, region: &Region) -> Option<SharedRange> {
        self.segments.locate_shared(region, &self.membership.ranks)
    }

    /// Whether the inputs of `rank` lie where the output has them.
    fn is_in_place(&self, operation: &Collective, ticket: &Ticket, rank: usize) -> bool {
        let posted = self.layout.posted(rank, ticket.fingerprint.sequence);
        let inputs = posted.map(|posted| posted.ranges).unwrap_or_default();
        inputs.len() == operation.parts.len()
            && operation.parts.iter().zip(inputs).all(|(part, input)| {
                let piece = pieces_of(&part.output_cuts).swap_remove(rank);
                let place = self.locate_shared(&part.output);
                let place =
                    place.map(|output| SharedRange { offset: output.offset + piece.start as u64, ..output });
                piece.is_empty() || input == place
            })
    }
}
