//! Where gradients are between backward and step, and the memory that they pass through.

use std::collections::BTreeMap;

use ferrospeed_config::DataType;

use crate::buckets::Bucket;
use crate::share::{Home, Memory, Purpose, Share, Tile};
use crate::stage::{Extent, Reduces};

/// What decides it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GradientFacts {
    /// Of gradients a rank has, while backward makes them.
    pub extent: Extent,
    /// Of averaged gradients a rank needs.
    pub owned: Extent,
    /// Whether they are averaged while backward goes on.
    pub overlap: bool,
    /// The type in which they travel.
    pub wire: DataType,
    /// The type in which they are kept.
    pub kept: DataType,
    /// Whether micro-batches are added up.
    pub accumulates: bool,
    /// When they are averaged where that is so.
    pub reduces: Reduces,
    /// Whether they are to leave a device for its host.
    pub leave: bool,
    /// Whether this rank's gradients are all there are, as they are.
    pub alone: bool,
}

/// Where reduced gradients wait for the step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kept {
    /// Where backward made them: nobody else needs them, and nothing is added up.
    AsMade,
    /// In the sums of this rank's micro-batches, of which one exists for each bucket. `in_place`: they have the type of the
    /// wire, and are reduced where they are.
    InSums {
        /// Whether they are reduced where they are.
        in_place: bool,
    },
    /// In their buckets' buffers.
    InBuckets,
    /// In memory of the size of this rank's parts.
    Apart,
}

/// When a bucket leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Departure {
    /// When backward is over: each exchange makes ranks wait for the slower one.
    AtTheEnd,
    /// When it is full, and backward waits: others need its buffer.
    WhenFull,
    /// When it is full, beside backward.
    Beside,
}

/// Memory of buckets on their way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Buffer {
    /// Elements.
    pub numel: usize,
    /// The share whose ranks reach it.
    pub share: usize,
}

/// Where gradients are.
#[derive(Debug, Clone, PartialEq)]
pub struct Gradients {
    /// What decided it.
    pub facts: GradientFacts,
    /// Where they wait for the step.
    pub kept: Kept,
    /// Whether they wait with the host of the device that made them.
    pub leave: bool,
    /// When a bucket leaves.
    pub departure: Departure,
    /// The memory that buckets pass through.
    pub buffers: Vec<Buffer>,
    /// Which buffer each bucket uses; empty where there are none.
    pub slots: Vec<usize>,
    /// What else knows the memory that they pass through and wait in.
    parts: Vec<(usize, Memory)>,
}

/// Places gradients. `trained` are the shares that `buckets` are made of.
pub(crate) fn gradients(facts: &GradientFacts, trained: &[&Share], buckets: &[Bucket]) -> Gradients {
    let parts = trained.iter().map(|share| (share.layout.part_numel, share.reached)).collect();
    let reach: Vec<&str> = trained.iter().map(|share| share.reach.name.as_str()).collect();
    Gradients::new(*facts, parts, &reach, buckets)
}

impl Gradients {
    fn new(
        facts: GradientFacts,
        parts: Vec<(usize, Memory)>,
        reach: &[&str],
        buckets: &[Bucket],
    ) -> Gradients {
        let same_type = facts.wire == facts.kept;
        let is_whole = facts.extent == Extent::Whole;
        let kept = match (facts.accumulates, facts.reduces) {
            (false, _) if same_type && facts.alone => Kept::AsMade,
            (true, Reduces::Once) => Kept::InSums { in_place: same_type },
            (false, _) if same_type && is_whole => Kept::InBuckets,
            _ => Kept::Apart,
        };
        let departure = match (facts.overlap, is_whole) {
            (true, _) => Departure::Beside,
            (false, true) => Departure::AtTheEnd,
            (false, false) => Departure::WhenFull,
        };
        let own_buffers = is_whole && !matches!(kept, Kept::InSums { .. });
        let (buffers, slots) = match kept {
            Kept::AsMade | Kept::InSums { in_place: true } => (Vec::new(), Vec::new()),
            _ if own_buffers => {
                let own = |bucket: &Bucket| Buffer { numel: bucket.numel(), share: bucket.group };
                (buckets.iter().map(own).collect(), (0..buckets.len()).collect())
            }
            _ => in_turns(buckets, reach, if facts.overlap { 2 } else { 1 }),
        };
        let leave = facts.leave && matches!(kept, Kept::AsMade | Kept::Apart);
        Gradients { facts, kept, leave, departure, buffers, slots, parts }
    }

    /// The same where micro-batches are added up from now on, in this type.
    pub fn accumulating_in(&self, kept: DataType, reach: &[&str], buckets: &[Bucket]) -> Gradients {
        let facts = GradientFacts { accumulates: true, kept, ..self.facts };
        Gradients::new(facts, self.parts.clone(), reach, buckets)
    }

    /// Whether what waits for the step is reached by peers, who write there what they reduce of this rank's part.
    pub fn is_kept_in_reach(&self) -> bool {
        self.facts.wire == self.facts.kept && self.facts.owned == Extent::Part
    }

    /// What buckets' buffers are for: gradients wait in buckets of their own until the step, and pass through those that take
    /// turns.
    pub fn buffers_purpose(&self) -> Purpose {
        match (self.facts.extent, self.kept) {
            (Extent::Whole, Kept::InBuckets | Kept::Apart) => Purpose::Gradients,
            _ => Purpose::Buckets,
        }
    }

    /// Their tiles.
    pub(crate) fn tiles<'a>(&'a self, buckets: &'a [Bucket]) -> impl Iterator<Item = Tile> + 'a {
        let GradientFacts { wire, kept, .. } = self.facts;
        let tile = |purpose, dtype: DataType, numel: usize, home, memory| Tile {
            purpose,
            dtype,
            numel,
            bytes: numel as u64 * dtype.bytes(),
            home,
            memory,
        };
        let buffers = self.buffers.iter().map(move |buffer| {
            tile(self.buffers_purpose(), wire, buffer.numel, Home::Device, self.parts[buffer.share].1)
        });
        let sums = buckets.iter().filter(|_| matches!(self.kept, Kept::InSums { .. })).map(move |bucket| {
            let in_place = self.kept == Kept::InSums { in_place: true };
            let memory = if in_place { self.parts[bucket.group].1 } else { Memory::Own };
            tile(Purpose::Gradients, kept, bucket.numel(), Home::Device, memory)
        });
        let apart = self.parts.iter().filter(|_| matches!(self.kept, Kept::Apart | Kept::AsMade));
        let apart = apart.map(move |&(numel, memory)| {
            let memory =
                if self.is_kept_in_reach() && self.kept == Kept::Apart { memory } else { Memory::Own };
            let (home, memory) = match self.leave {
                true => (Home::LockedHost, Memory::Own),
                false => (Home::Device, memory),
            };
            tile(Purpose::Gradients, kept, numel, home, memory)
        });
        buffers.chain(sums).chain(apart)
    }
}

/// Buckets that the same ranks reach take turns with so many buffers.
fn in_turns(buckets: &[Bucket], reach: &[&str], most: usize) -> (Vec<Buffer>, Vec<usize>) {
    let mut sharers: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (index, bucket) in buckets.iter().enumerate() {
        sharers.entry(reach[bucket.group]).or_default().push(index);
    }
    let (mut buffers, mut slots) = (Vec::new(), vec![0; buckets.len()]);
    for members in sharers.values() {
        let numel = members.iter().map(|&bucket| buckets[bucket].numel()).max().unwrap_or(0);
        let count = members.len().min(most);
        for (turn, &bucket) in members.iter().enumerate() {
            slots[bucket] = buffers.len() + turn % count;
        }
        buffers.extend((0..count).map(|_| Buffer { numel, share: buckets[members[0]].group }));
    }
    (buffers, slots)
}
