//! What one step does to tiles, in order: a list that the store walks through.

use crate::buckets::Bucket;
use crate::facts::{DeviceKind, Request, UpdateRule};
use crate::gradients::{Departure, GradientFacts, Gradients, Kept};
use crate::share::Share;
use crate::stage::{Extent, rules};

/// How the ranks come to the new values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Publish {
    /// Every rank has made all of them.
    Nothing,
    /// Owners send theirs to all when the step ends.
    Gather,
    /// The same a stretch at a time, beside the next forward.
    Stretches,
    /// Nobody holds more than its part: whole copies of the old ones are dropped.
    DropCopies,
}

/// One thing that a step does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Backward leaves gradients there.
    Collect(Kept),
    /// Ranks average so many buckets: when each leaves, and whether every rank gets all of it.
    Reduce {
        /// How many.
        buckets: usize,
        /// When each leaves.
        departure: Departure,
        /// Whether that happens once a step: of its only micro-batch, or of the sum of all.
        once: bool,
        /// What each rank gets.
        gets: Extent,
    },
    /// The device looks for what is no number, takes the norm, clips and updates by itself, where it can; then all up to
    /// `Publish` is left out.
    StepOnDevice,
    /// Looks for what is no number and takes the norm; `agree`: with the other ranks.
    Measure {
        /// Whether ranks agree on it.
        agree: bool,
    },
    /// Ranks exchange momentum, and update from that.
    ExchangeMomentum,
    /// LAMB: a walk to find each tensor's direction and two norms, on which owners agree, and another that updates by their
    /// ratio; the second one of what is moved is left to the host.
    UpdateTensors {
        /// Which share.
        share: usize,
    },
    /// Muon: momenta first, of which each matrix is gathered to the rank that it is dealt to, made orthogonal there, and given
    /// back; then weights by what came back, that of what is moved left to the host.
    UpdateMatrices {
        /// Which share.
        share: usize,
    },
    /// Updates what stays with the device.
    Update {
        /// Which share.
        share: usize,
        /// Of how many elements.
        numel: usize,
    },
    /// The host updates what is moved, a stretch at a time, in the order in which the next forward reads.
    UpdateAway {
        /// Which share.
        share: usize,
        /// Of how many elements.
        numel: usize,
        /// How many of them at a time.
        at_a_time: usize,
    },
    /// How the ranks come to the new values.
    Publish(Publish),
}

/// What a step does, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    /// Everything, in order.
    pub actions: Vec<Action>,
}

impl Program {
    /// How the ranks come to the new values.
    pub fn publish(&self) -> Publish {
        let publish = |action: &Action| match action {
            Action::Publish(publish) => Some(*publish),
            _ => None,
        };
        self.actions.iter().find_map(publish).unwrap_or(Publish::Nothing)
    }

    /// Whether a device may do a step by itself.
    pub fn steps_on_device(&self) -> bool {
        self.actions.contains(&Action::StepOnDevice)
    }
}

pub(crate) fn program(
    request: &Request<'_>,
    shares: &[Share],
    buckets: &[Bucket],
    gradients: &Gradients,
) -> Program {
    let GradientFacts { alone, owned, .. } = gradients.facts;
    let mut actions = vec![Action::Collect(gradients.kept)];
    if !alone {
        actions.push(Action::Reduce {
            buckets: buckets.len(),
            departure: gradients.departure,
            once: !gradients.facts.accumulates || matches!(gradients.kept, Kept::InSums { .. }),
            gets: owned,
        });
    }
    let agree = request.parts_differ || request.world > 1 && rules(request.stage()).states == Extent::Part;
    let is_away = shares.iter().any(Share::is_away);
    let each_element = request.groups.iter().all(|group| group.rule == UpdateRule::EachElement);
    let by_device = each_element && !request.groups.is_empty() && request.device == DeviceKind::Beside;
    if by_device && !agree && !is_away {
        actions.push(Action::StepOnDevice);
    }
    let by_momentum = request.has(UpdateRule::Momentum);
    actions.push(Action::Measure { agree: agree || by_momentum && request.world > 1 });
    if by_momentum {
        actions.push(Action::ExchangeMomentum);
        return Program { actions };
    }
    for (index, share) in shares.iter().enumerate().filter(|(_, share)| share.trained) {
        match request.groups[share.group].rule {
            UpdateRule::EachTensor => {
                actions.push(Action::UpdateTensors { share: index });
                continue;
            }
            UpdateRule::EachMatrix => {
                actions.push(Action::UpdateMatrices { share: index });
                continue;
            }
            _ => {}
        }
        let numel = share.stays_updated().len();
        if numel > 0 {
            actions.push(Action::Update { share: index, numel });
        }
        if share.is_away() && share.moved > 0 {
            let at_a_time = share.update_numel;
            actions.push(Action::UpdateAway { share: index, numel: share.moved, at_a_time });
        }
    }
    actions.push(Action::Publish(publish(request, shares)));
    Program { actions }
}

fn publish(request: &Request<'_>, shares: &[Share]) -> Publish {
    if rules(request.stage()).values == Extent::Part {
        return Publish::DropCopies;
    }
    let published: Vec<&Share> = shares.iter().filter(|share| share.is_published()).collect();
    let common = &request.spreads[0].shard;
    // A step need not wait for the host where all is updated there, and all ranks take part.
    let beside = |share: &&Share| {
        let over_common = request.spreads[share.spread].shard.name == common.name;
        over_common && share.is_away() && share.stays_updated().is_empty()
    };
    match &published[..] {
        [] => Publish::Nothing,
        all if all.iter().all(beside) && common.count == request.world => Publish::Stretches,
        _ => Publish::Gather,
    }
}
