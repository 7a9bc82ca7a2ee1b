//! A placement as text: what `ferrospeed plan --placement` prints.

use std::fmt;

use crate::program::{Action, Publish};
use crate::share::{Home, Memory, Owners, Purpose, Share, Tile};
use crate::stage::Extent;
use crate::{Departure, Kept, Placement};

impl fmt::Display for Home {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Home::Device => "device",
            Home::Host => "host",
            Home::LockedHost => "host, page-locked",
            Home::Disk => "disk",
        })
    }
}

impl fmt::Display for Purpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Purpose::Values => "values",
            Purpose::Master => "master",
            Purpose::State => "state",
            Purpose::Gradients => "gradients",
            Purpose::Buckets => "buckets",
        })
    }
}

impl fmt::Display for Tile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Tile { purpose, dtype, numel, bytes, home, memory } = self;
        let memory = match memory {
            Memory::Own => "",
            Memory::Reached => ", which peers reach",
            Memory::Common => ", once for all ranks of a host",
        };
        let dtype = format!("{dtype:?}").to_lowercase();
        write!(f, "{purpose:<9} {dtype:<4} {numel:>13} elements {bytes:>15} bytes  {home}{memory}")
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Action::Collect(Kept::AsMade) => f.write_str("collect: gradients stay where backward makes them"),
            Action::Collect(Kept::InSums { .. }) => {
                f.write_str("collect: micro-batches are added up, by bucket")
            }
            Action::Collect(Kept::InBuckets) => f.write_str("collect: gradients stay in their buckets"),
            Action::Collect(Kept::Apart) => {
                f.write_str("collect: reduced gradients are added to this rank's part")
            }
            Action::Reduce { buckets, departure, once, gets } => {
                let when = match departure {
                    Departure::AtTheEnd => "when backward is over",
                    Departure::WhenFull => "when each is full",
                    Departure::Beside => "when each is full, beside backward",
                };
                let often = if *once { "once a step" } else { "every micro-batch" };
                let gets = if *gets == Extent::Whole { "all of it" } else { "its part" };
                write!(f, "reduce {buckets} buckets {when}, {often}; each rank gets {gets}")
            }
            Action::StepOnDevice => f.write_str("step on the device alone, where it can; then publish"),
            Action::Measure { agree: true } => f.write_str("measure: no numbers, norm; ranks agree"),
            Action::Measure { agree: false } => f.write_str("measure: no numbers, norm"),
            Action::ExchangeMomentum => f.write_str("exchange momentum, and update from it"),
            Action::UpdateTensors { share } => {
                write!(f, "update the tensors of share {share} in two walks, by the ratios of their norms")
            }
            Action::UpdateMatrices { share } => write!(
                f,
                "update the matrices of share {share} by their momenta, each made orthogonal by the rank that has all of it"
            ),
            Action::Update { share, numel } => {
                write!(f, "update {numel} elements of share {share} on the device")
            }
            Action::UpdateAway { share, numel, at_a_time } => {
                write!(f, "update {numel} elements of share {share} on the host, {at_a_time} at a time")
            }
            Action::Publish(Publish::Nothing) => f.write_str("publish: every rank has made all values"),
            Action::Publish(Publish::Gather) => f.write_str("publish: owners send new values to all"),
            Action::Publish(Publish::Stretches) => f.write_str(
                "publish: owners send new values to all, a stretch at a time, beside the next forward",
            ),
            Action::Publish(Publish::DropCopies) => {
                f.write_str("publish: whole copies of old values are dropped")
            }
        }
    }
}

/// A share's first line.
struct Heading<'a>(usize, &'a Share);

impl fmt::Display for Heading<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Heading(index, share) = self;
        let (params, part) = (share.params.len(), share.layout.part_numel);
        let kind = if share.trained { format!("group {}", share.group) } else { "frozen".to_owned() };
        let whose = match share.owners {
            Owners::Everybody => "every rank owns all".to_owned(),
            Owners::Shard => format!("part {} of {}", share.own, share.layout.ranks),
            Owners::Stages => format!("part {} of {}, among stages", share.own, share.layout.ranks),
        };
        write!(f, "share {index}: {kind}, {params} parameters; {whose}, {part} elements")
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, share) in self.shares.iter().enumerate().filter(|(_, share)| !share.params.is_empty()) {
            writeln!(f, "{}", Heading(index, share))?;
            share.tiles().try_for_each(|tile| writeln!(f, "  {tile}"))?;
        }
        writeln!(f, "gradients")?;
        self.gradients.tiles(&self.buckets).try_for_each(|tile| writeln!(f, "  {tile}"))?;
        writeln!(f, "a step")?;
        self.program.actions.iter().try_for_each(|action| writeln!(f, "  {action}"))
    }
}
