//! One collective operation as data: what every backend executes, and the fingerprint that guards it.

use std::panic::Location;

use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, Result};
use crate::region::Region;
use crate::segment::SharedRange;

/// The kinds of operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum Kind {
    /// Every rank gets the reduction of all.
    AllReduce = 1,
    /// The root gets the reduction of all.
    Reduce,
    /// Rank `i` gets part `i` of the reduction.
    ReduceScatter,
    /// Every rank gets the parts of all, in rank order.
    AllGather,
    /// Every rank gets the root's buffer.
    Broadcast,
    /// Rank `i` gets part `i` of the root's buffer.
    Scatter,
    /// The root gets the parts of all, in rank order.
    Gather,
    /// Rank `i` gets part `i` of every rank.
    AllToAll,
    /// Nobody goes on before everybody arrived.
    Barrier,
    /// One rank's half of a message.
    Send,
    /// The other half.
    Recv,
}

impl Kind {
    /// Every kind.
    pub const ALL: [Kind; 11] = [
        Kind::AllReduce,
        Kind::Reduce,
        Kind::ReduceScatter,
        Kind::AllGather,
        Kind::Broadcast,
        Kind::Scatter,
        Kind::Gather,
        Kind::AllToAll,
        Kind::Barrier,
        Kind::Send,
        Kind::Recv,
    ];

    /// The name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::AllReduce => "all_reduce",
            Kind::Reduce => "reduce",
            Kind::ReduceScatter => "reduce_scatter",
            Kind::AllGather => "all_gather",
            Kind::Broadcast => "broadcast",
            Kind::Scatter => "scatter",
            Kind::Gather => "gather",
            Kind::AllToAll => "all_to_all",
            Kind::Barrier => "barrier",
            Kind::Send => "send",
            Kind::Recv => "recv",
        }
    }

    pub(crate) fn from_code(code: u8) -> Option<Kind> {
        Kind::ALL.into_iter().find(|kind| *kind as u8 == code)
    }
}

/// One buffer of an operation on this rank. Coalesced operations have several.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    /// What the rank contributes; empty where it contributes nothing.
    pub(crate) input: Region,
    /// Where the result goes; the same region as `input` where the operation works in place.
    pub(crate) output: Region,
    /// Bytes of `input` meant for each rank, where it is cut into parts; one entry where all ranks get the same bytes.
    pub(crate) input_cuts: Vec<usize>,
    /// Bytes of `output` that come from each rank.
    pub(crate) output_cuts: Vec<usize>,
}

/// A collective operation of one rank, checked and ready to run.
#[derive(Debug, Clone)]
pub(crate) struct Collective {
    pub(crate) kind: Kind,
    pub(crate) dtype: DType,
    pub(crate) reduce: Option<ReduceOp>,
    pub(crate) root: Option<usize>,
    pub(crate) parts: Vec<Part>,
    /// What the buffers are, where the caller says so: ranks must agree on it even where all sizes agree.
    pub(crate) identity: u64,
    pub(crate) call_site: &'static Location<'static>,
}

/// What all ranks of an operation must agree on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fingerprint {
    pub(crate) group: u64,
    pub(crate) sequence: u64,
    pub(crate) kind: Kind,
    pub(crate) dtype: DType,
    pub(crate) reduce: Option<ReduceOp>,
    pub(crate) root: Option<u32>,
    pub(crate) part_count: u32,
    /// Elements, as a caller would name them: see [`Collective::count`].
    pub(crate) count: u64,
    /// A digest of the counts that must agree element by element (coalesced and unequal operations), and of the identity.
    pub(crate) shape: u64,
    /// Where the output lies in memory that the ranks have in common; known to shared memory's backend alone.
    pub(crate) shared_output: Option<SharedRange>,
}

impl Collective {
    /// The number of elements that the ranks must agree on.
    ///
    /// It is the whole buffer where all ranks hold the same, the total over all ranks where they hold parts.
    fn count(&self) -> u64 {
        let bytes: usize = self.parts.iter().map(|part| self.agreed_bytes(part)).sum();
        (bytes / self.dtype.size()) as u64
    }

    fn agreed_bytes(&self, part: &Part) -> usize {
        match self.kind {
            Kind::AllReduce | Kind::Reduce | Kind::Broadcast => part.input.len(),
            Kind::ReduceScatter => part.input_cuts.iter().sum(),
            Kind::AllGather => part.output_cuts.iter().sum(),
            Kind::Gather => part.input.len(),
            Kind::Scatter => part.output.len(),
            // Every rank's total may differ: the cuts themselves are compared, pair by pair.
            Kind::AllToAll | Kind::Barrier | Kind::Send | Kind::Recv => 0,
        }
    }

    fn shape(&self) -> u64 {
        let mut digest = Digest::new();
        digest.add(self.identity);
        for part in &self.parts {
            digest.add(self.agreed_bytes(part) as u64);
            match self.kind {
                Kind::ReduceScatter => part.input_cuts.iter().for_each(|cut| digest.add(*cut as u64)),
                Kind::AllGather => part.output_cuts.iter().for_each(|cut| digest.add(*cut as u64)),
                _ => {}
            }
        }
        digest.value()
    }

    pub(crate) fn fingerprint(&self, group: u64, sequence: u64) -> Fingerprint {
        Fingerprint {
            group,
            sequence,
            kind: self.kind,
            dtype: self.dtype,
            reduce: self.reduce,
            root: self.root.map(|root| root as u32),
            part_count: self.parts.len() as u32,
            count: self.count(),
            shape: self.shape(),
            shared_output: None,
        }
    }

    /// The message size of reports: the whole buffer, or this rank's part for all_gather and reduce_scatter.
    pub(crate) fn message_bytes(&self) -> usize {
        let of_part = |part: &Part| match self.kind {
            Kind::AllGather => part.input.len(),
            Kind::ReduceScatter => part.output.len(),
            _ => part.input.len().max(part.output.len()),
        };
        self.parts.iter().map(of_part).sum()
    }

    pub(crate) fn invalid(&self, problem: impl Into<String>) -> Error {
        invalid(self.kind, self.call_site, problem)
    }

    /// Checks what can be known on this rank alone.
    pub(crate) fn check(&self, group_size: usize) -> Result<()> {
        if let Some(op) = self.reduce {
            op.check(self.dtype)?;
        }
        if let Some(root) = self.root
            && root >= group_size
        {
            return Err(self.invalid(format!("root {root} is not a rank of a group of {group_size}")));
        }
        for part in &self.parts {
            for region in [&part.input, &part.output] {
                if region.len() % self.dtype.size() != 0 {
                    let problem =
                        format!("{} bytes are not a whole number of {} elements", region.len(), self.dtype);
                    return Err(self.invalid(problem));
                }
            }
            for (name, region, cuts) in
                [("input", &part.input, &part.input_cuts), ("output", &part.output, &part.output_cuts)]
            {
                let wanted: usize = cuts.iter().sum();
                if !cuts.is_empty() && wanted != region.len() {
                    let problem =
                        format!("the {name} holds {} bytes, but its counts add up to {wanted}", region.len());
                    return Err(self.invalid(problem));
                }
            }
        }
        Ok(())
    }
}

pub(crate) fn invalid(kind: Kind, call_site: &Location<'_>, problem: impl Into<String>) -> Error {
    Error::InvalidArgument {
        operation: kind.name(),
        problem: problem.into(),
        call_site: call_site.to_string(),
    }
}

impl Fingerprint {
    /// The operation as a person reads it: `all_reduce(sum, f32, 1024 elements) #17 at src/a.rs:3:9`.
    pub(crate) fn describe(&self, call_site: &str) -> String {
        let mut arguments = Vec::new();
        if let Some(op) = self.reduce {
            arguments.push(op.name().to_owned());
        }
        if self.kind != Kind::Barrier {
            arguments.push(self.dtype.name().to_owned());
        }
        if !matches!(self.kind, Kind::Barrier | Kind::AllToAll) {
            arguments.push(format!("{} elements", self.count));
        }
        if self.part_count > 1 {
            arguments.push(format!("{} buffers", self.part_count));
        }
        if let Some(root) = self.root {
            arguments.push(format!("root {root}"));
        }
        if let Some(place) = self.shared_output {
            arguments.push(format!("into byte {} of shared memory {}", place.offset, place.segment));
        }
        format!("{}({}) #{} at {call_site}", self.kind.name(), arguments.join(", "), self.sequence)
    }
}

/// A 64-bit FNV-1a digest.
pub(crate) struct Digest(u64);

impl Digest {
    pub(crate) fn new() -> Self {
        Digest(0xcbf2_9ce4_8422_2325)
    }

    pub(crate) fn add(&mut self, value: u64) {
        for byte in value.to_le_bytes() {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        }
    }

    pub(crate) fn value(&self) -> u64 {
        self.0
    }
}
