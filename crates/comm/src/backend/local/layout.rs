//! Where everything lies in a group's control area.
//!
//! ```text
//! step counters      size × Counter
//! descriptors        size × 2 × Descriptor        (parity of the sequence number)
//! cut tables         size × 2 × 2·size × u64      (bytes for and from each rank, in all-to-all)
//! staging            size × 2 × half              (see `staged`)
//! channels           size × size × Channel        (sender-major; see `messages`)
//! ```
//! The file is sparse: what a job never touches costs no memory.

use super::messages::Channel;
use super::sync::Counter;
use crate::dtype::{DType, ReduceOp};
use crate::op::{Fingerprint, Kind};
use crate::segment::SharedRange;
use crate::sys::SharedMemory;

/// Buffers per operation that a descriptor has room for; longer lists run in several operations.
pub(crate) const MAX_PARTS: usize = 32;
const CALL_SITE_BYTES: usize = 200;
const PAGE: usize = 4096;
/// No half of a rank's staging area is larger: windows that fit the second-level cache move fastest.
const MAX_HALF_BYTES: usize = 512 << 10;

/// Where a rank's buffer lies; `None` when it is not registered.
pub(super) type PostedRange = Option<SharedRange>;

/// A rank's announcement of the operation that it enters.
#[repr(C)]
#[derive(Clone, Copy)]
struct Descriptor {
    group: u64,
    sequence: u64,
    count: u64,
    shape: u64,
    root: u32,
    part_count: u32,
    kind: u8,
    dtype: u8,
    reduce: u8,
    call_site_bytes: u8,
    call_site: [u8; CALL_SITE_BYTES],
    shared_output: PlainRange,
    range_count: u32,
    ranges: [PlainRange; MAX_PARTS],
}

/// `offset` with `segment` plus one, so that zeroed memory means "not registered".
#[repr(C)]
#[derive(Clone, Copy)]
struct PlainRange {
    segment_plus_one: u64,
    offset: u64,
}

impl PlainRange {
    fn of(range: PostedRange) -> PlainRange {
        range.map_or(PlainRange { segment_plus_one: 0, offset: 0 }, |range| PlainRange {
            segment_plus_one: range.segment + 1,
            offset: range.offset,
        })
    }

    fn read(self) -> PostedRange {
        let segment = self.segment_plus_one.checked_sub(1)?;
        Some(SharedRange { segment, offset: self.offset })
    }
}

const NO_ROOT: u32 = u32::MAX;

/// What a rank posted, read back.
pub(super) struct Posted {
    pub(super) fingerprint: Fingerprint,
    pub(super) ranges: Vec<PostedRange>,
}

/// A mapped control area.
pub(super) struct Layout {
    memory: SharedMemory,
    size: usize,
    half_bytes: usize,
    descriptors_at: usize,
    tables_at: usize,
    staging_at: usize,
    channels_at: usize,
}

fn half_bytes(size: usize, staging_bytes: usize) -> usize {
    (staging_bytes / (2 * size) / PAGE * PAGE).clamp(PAGE, MAX_HALF_BYTES)
}

/// Bytes of one rank's table: what it sends to and expects from each rank.
const fn table_bytes(size: usize) -> usize {
    2 * size * size_of::<u64>()
}

impl Layout {
    fn offsets(size: usize, staging_bytes: usize) -> [usize; 5] {
        let descriptors_at = (size * size_of::<Counter>()).next_multiple_of(PAGE);
        let tables_at = descriptors_at + (size * 2 * size_of::<Descriptor>()).next_multiple_of(PAGE);
        let staging_at = tables_at + (size * 2 * table_bytes(size)).next_multiple_of(PAGE);
        let channels_at = staging_at + size * 2 * half_bytes(size, staging_bytes);
        [descriptors_at, tables_at, staging_at, channels_at, channels_at + size * size * size_of::<Channel>()]
    }

    /// Bytes of the control area of a group.
    pub(super) fn bytes(size: usize, staging_bytes: usize) -> usize {
        Self::offsets(size, staging_bytes)[4]
    }

    pub(super) fn new(memory: SharedMemory, size: usize, staging_bytes: usize) -> Self {
        let [descriptors_at, tables_at, staging_at, channels_at, bytes] = Self::offsets(size, staging_bytes);
        assert!(memory.bytes() >= bytes, "the control area is smaller than its layout");
        let half_bytes = half_bytes(size, staging_bytes);
        Layout { memory, size, half_bytes, descriptors_at, tables_at, staging_at, channels_at }
    }

    pub(super) fn step(&self, rank: usize) -> &Counter {
        debug_assert!(rank < self.size);
        // SAFETY: inside the area by `new`, aligned to 128 bytes, and only ever accessed as atomics.
        unsafe { &*self.memory.base().add(rank * size_of::<Counter>()).cast::<Counter>() }
    }

    fn descriptor(&self, rank: usize, sequence: u64) -> *mut Descriptor {
        debug_assert!(rank < self.size);
        let index = rank * 2 + (sequence & 1) as usize;
        self.memory.base().wrapping_add(self.descriptors_at + index * size_of::<Descriptor>()).cast()
    }

    /// Writes this rank's descriptor; a step must follow before peers read it.
    pub(super) fn post(
        &self,
        rank: usize,
        fingerprint: &Fingerprint,
        call_site: &str,
        ranges: &[PostedRange],
    ) {
        let mut descriptor = Descriptor {
            group: fingerprint.group,
            sequence: fingerprint.sequence,
            count: fingerprint.count,
            shape: fingerprint.shape,
            root: fingerprint.root.unwrap_or(NO_ROOT),
            part_count: fingerprint.part_count,
            kind: fingerprint.kind as u8,
            dtype: fingerprint.dtype as u8,
            reduce: fingerprint.reduce.map_or(0, |op| op as u8),
            call_site_bytes: 0,
            call_site: [0; CALL_SITE_BYTES],
            shared_output: PlainRange::of(fingerprint.shared_output),
            range_count: ranges.len() as u32,
            ranges: [PlainRange::of(None); MAX_PARTS],
        };
        // The end of a path says more than its beginning.
        let site = &call_site.as_bytes()[call_site.len().saturating_sub(CALL_SITE_BYTES)..];
        descriptor.call_site[..site.len()].copy_from_slice(site);
        descriptor.call_site_bytes = site.len() as u8;
        for (slot, range) in descriptor.ranges.iter_mut().zip(ranges) {
            *slot = PlainRange::of(*range);
        }
        // SAFETY: inside the area; only this rank writes its descriptors, and peers read this one after the next step.
        unsafe { self.descriptor(rank, fingerprint.sequence).write(descriptor) }
    }

    /// What a rank posted for operation `sequence`; `None` when it is not a descriptor at all.
    pub(super) fn posted(&self, rank: usize, sequence: u64) -> Option<Posted> {
        // SAFETY: inside the area; the rank has stepped past the write.
        let descriptor = unsafe { self.descriptor(rank, sequence).read() };
        let ranges = &descriptor.ranges[..(descriptor.range_count as usize).min(MAX_PARTS)];
        let ranges = ranges.iter().map(|range| range.read()).collect();
        Some(Posted { fingerprint: read_fingerprint(&descriptor)?, ranges })
    }

    /// The last operation that a rank announced and its call site, for messages to people.
    pub(super) fn last_posted(&self, rank: usize) -> (Option<Fingerprint>, String) {
        // SAFETY: inside the area. A concurrent write can only garble the text of a message.
        let both = [0, 1].map(|parity| unsafe { self.descriptor(rank, parity).read_volatile() });
        let last = if both[0].sequence >= both[1].sequence { &both[0] } else { &both[1] };
        let site = &last.call_site[..(last.call_site_bytes as usize).min(CALL_SITE_BYTES)];
        (read_fingerprint(last), String::from_utf8_lossy(site).into_owned())
    }

    /// A rank's table of bytes for each rank, of operation `sequence`.
    pub(super) fn table(&self, rank: usize, sequence: u64) -> *mut u64 {
        debug_assert!(rank < self.size);
        let index = rank * 2 + (sequence & 1) as usize;
        self.memory.base().wrapping_add(self.tables_at + index * table_bytes(self.size)).cast()
    }

    pub(super) fn half_bytes(&self) -> usize {
        self.half_bytes
    }

    /// One half of a rank's staging area.
    pub(super) fn staging(&self, rank: usize, half: u64) -> *mut u8 {
        debug_assert!(rank < self.size);
        let index = rank * 2 + (half & 1) as usize;
        self.memory.base().wrapping_add(self.staging_at + index * self.half_bytes)
    }

    pub(super) fn channel(&self, sender: usize, receiver: usize) -> *mut Channel {
        debug_assert!(sender < self.size && receiver < self.size);
        let index = sender * self.size + receiver;
        self.memory.base().wrapping_add(self.channels_at + index * size_of::<Channel>()).cast()
    }
}

fn read_fingerprint(descriptor: &Descriptor) -> Option<Fingerprint> {
    Some(Fingerprint {
        group: descriptor.group,
        sequence: descriptor.sequence,
        kind: Kind::from_code(descriptor.kind)?,
        dtype: DType::from_code(descriptor.dtype)?,
        reduce: ReduceOp::from_code(descriptor.reduce),
        root: (descriptor.root != NO_ROOT).then_some(descriptor.root),
        part_count: descriptor.part_count,
        count: descriptor.count,
        shape: descriptor.shape,
        shared_output: descriptor.shared_output.read(),
    })
}
