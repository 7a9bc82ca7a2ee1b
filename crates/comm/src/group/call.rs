//! The checked description of each collective, from its buffers.

use std::panic::Location;

use super::Group;
use crate::dtype::{DType, Element, ReduceOp};
use crate::error::Result;
use crate::op::{Collective, Kind, Part, invalid};
use crate::region::Region;

impl Collective {
    /// Lists longer than a backend takes at once run as several operations.
    pub(super) fn split(&self, max_parts: usize) -> Vec<Collective> {
        if self.parts.len() <= max_parts {
            return vec![self.clone()];
        }
        let piece = |parts: &[Part]| Collective { parts: parts.to_vec(), ..self.clone() };
        self.parts.chunks(max_parts).map(piece).collect()
    }
}

/// Builds the checked description of each collective from its buffers.
pub(super) struct Call {
    size: usize,
    me: usize,
    dtype: DType,
    call_site: &'static Location<'static>,
}

impl Call {
    pub(super) fn new(group: &Group, dtype: DType, call_site: &'static Location<'static>) -> Self {
        Call { size: group.size(), me: group.rank(), dtype, call_site }
    }

    pub(super) fn operation(
        &self,
        kind: Kind,
        reduce: Option<ReduceOp>,
        root: Option<usize>,
        parts: impl IntoIterator<Item = Part>,
    ) -> Collective {
        let parts = parts.into_iter().collect();
        Collective { kind, dtype: self.dtype, reduce, root, parts, identity: 0, call_site: self.call_site }
    }

    /// Cuts `bytes` into one equal part per rank.
    pub(super) fn equal_cuts(&self, kind: Kind, what: &str, bytes: usize) -> Result<Vec<usize>> {
        let unit = self.size * self.dtype.size();
        if !bytes.is_multiple_of(unit) {
            let elements = bytes / self.dtype.size();
            let problem =
                format!("the {what}'s {elements} elements do not divide into {} equal parts", self.size);
            return Err(invalid(kind, self.call_site, problem));
        }
        Ok(vec![bytes / self.size; self.size])
    }

    /// Counts in elements, one per rank, as bytes.
    pub(super) fn given_cuts(&self, kind: Kind, what: &str, counts: &[usize]) -> Result<Vec<usize>> {
        if counts.len() != self.size {
            let problem = format!("{} {what} for a group of {} ranks", counts.len(), self.size);
            return Err(invalid(kind, self.call_site, problem));
        }
        Ok(counts.iter().map(|count| count * self.dtype.size()).collect())
    }

    pub(super) fn expect_bytes(&self, kind: Kind, what: &str, region: &Region, bytes: usize) -> Result<()> {
        if region.len() == bytes {
            return Ok(());
        }
        let unit = self.dtype.size();
        let problem =
            format!("the {what} holds {} elements, but {} are needed", region.len() / unit, bytes / unit);
        Err(invalid(kind, self.call_site, problem))
    }

    pub(super) fn in_place(region: &Region) -> Part {
        Part {
            input: region.clone(),
            output: region.clone(),
            input_cuts: Vec::new(),
            output_cuts: Vec::new(),
        }
    }

    pub(super) fn reduce_scatter(&self, op: ReduceOp, pairs: &[(Region, Region)]) -> Result<Collective> {
        let kind = Kind::ReduceScatter;
        let part = |(input, output): &(Region, Region)| {
            let input_cuts = self.equal_cuts(kind, "input", input.len())?;
            self.expect_bytes(kind, "output", output, input_cuts[self.me])?;
            Ok(Part { input: input.clone(), output: output.clone(), input_cuts, output_cuts: Vec::new() })
        };
        let parts: Result<Vec<Part>> = pairs.iter().map(part).collect();
        Ok(self.operation(kind, Some(op), None, parts?))
    }

    pub(super) fn reduce_scatter_unequal(
        &self,
        op: ReduceOp,
        input: Region,
        output: Region,
        counts: &[usize],
    ) -> Result<Collective> {
        let kind = Kind::ReduceScatter;
        let input_cuts = self.given_cuts(kind, "counts", counts)?;
        self.expect_bytes(kind, "output", &output, input_cuts[self.me])?;
        Ok(self.operation(
            kind,
            Some(op),
            None,
            [Part { input, output, input_cuts, output_cuts: Vec::new() }],
        ))
    }

    pub(super) fn all_gather(&self, pairs: &[(Region, Region)]) -> Result<Collective> {
        let kind = Kind::AllGather;
        let part = |(input, output): &(Region, Region)| {
            let output_cuts = self.equal_cuts(kind, "output", output.len())?;
            self.expect_bytes(kind, "input", input, output_cuts[self.me])?;
            Ok(Part { input: input.clone(), output: output.clone(), input_cuts: Vec::new(), output_cuts })
        };
        let parts: Result<Vec<Part>> = pairs.iter().map(part).collect();
        Ok(self.operation(kind, None, None, parts?))
    }

    pub(super) fn all_gather_unequal(
        &self,
        input: Region,
        output: Region,
        counts: &[usize],
    ) -> Result<Collective> {
        let kind = Kind::AllGather;
        let output_cuts = self.given_cuts(kind, "counts", counts)?;
        self.expect_bytes(kind, "input", &input, output_cuts[self.me])?;
        Ok(self.operation(kind, None, None, [Part { input, output, input_cuts: Vec::new(), output_cuts }]))
    }

    /// `input` matters on the root only.
    pub(super) fn scatter(&self, input: Option<Region>, output: Region, root: usize) -> Result<Collective> {
        let kind = Kind::Scatter;
        let (input, input_cuts) = match input {
            Some(input) if self.me == root => {
                self.expect_bytes(kind, "root's input", &input, output.len() * self.size)?;
                (input, vec![output.len(); self.size])
            }
            None if self.me == root => {
                return Err(invalid(kind, self.call_site, "the root gives no input"));
            }
            _ => (output.slice(0..0), Vec::new()),
        };
        Ok(self.operation(
            kind,
            None,
            Some(root),
            [Part { input, output, input_cuts, output_cuts: Vec::new() }],
        ))
    }

    /// `output` matters on the root only.
    pub(super) fn gather(&self, input: Region, output: Option<Region>, root: usize) -> Result<Collective> {
        let kind = Kind::Gather;
        let (output, output_cuts) = match output {
            Some(output) if self.me == root => {
                self.expect_bytes(kind, "root's output", &output, input.len() * self.size)?;
                (output, vec![input.len(); self.size])
            }
            None if self.me == root => {
                return Err(invalid(kind, self.call_site, "the root gives no output"));
            }
            _ => (input.slice(0..0), Vec::new()),
        };
        Ok(self.operation(
            kind,
            None,
            Some(root),
            [Part { input, output, input_cuts: Vec::new(), output_cuts }],
        ))
    }

    pub(super) fn all_to_all(&self, input: Region, output: Region) -> Result<Collective> {
        let kind = Kind::AllToAll;
        self.expect_bytes(kind, "output", &output, input.len())?;
        let cuts = self.equal_cuts(kind, "input", input.len())?;
        Ok(self.operation(
            kind,
            None,
            None,
            [Part { input, output, input_cuts: cuts.clone(), output_cuts: cuts }],
        ))
    }

    pub(super) fn all_to_all_unequal(
        &self,
        input: Region,
        output: Region,
        send_counts: &[usize],
        recv_counts: &[usize],
    ) -> Result<Collective> {
        let kind = Kind::AllToAll;
        let input_cuts = self.given_cuts(kind, "send counts", send_counts)?;
        let output_cuts = self.given_cuts(kind, "receive counts", recv_counts)?;
        Ok(self.operation(kind, None, None, [Part { input, output, input_cuts, output_cuts }]))
    }

    pub(super) fn barrier(&self) -> Collective {
        self.operation(Kind::Barrier, None, None, [])
    }
}

/// The bytes of a typed slice as regions for the length of a blocking call.
///
/// # Safety
/// The region must not outlive the borrow.
pub(super) unsafe fn output_region<T: Element>(values: &mut [T]) -> Region {
    // SAFETY: the caller's contract.
    unsafe { Region::borrowed(bytemuck::cast_slice_mut(values)) }
}

/// # Safety
/// The region must not outlive the borrow, and the operation must only read it.
pub(super) unsafe fn input_region<T: Element>(values: &[T]) -> Region {
    // SAFETY: the caller's contract.
    unsafe { Region::borrowed_input(bytemuck::cast_slice(values)) }
}
