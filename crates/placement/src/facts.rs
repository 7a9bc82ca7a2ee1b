//! What is asked: the configuration, parameters, ranks, and the device.

use ferrospeed_config::{DataType, OptimizerTier, Stage, Zero};

use crate::buckets::Kind;
use crate::gradients::GradientFacts;
use crate::share::Share;
use crate::stage::{Reduces, rules};

/// What is placed.
#[derive(Debug, Clone)]
pub struct Request<'a> {
    /// `zero_optimization`.
    pub zero: &'a Zero,
    /// All parameters of the model.
    pub params: &'a [ParamFacts],
    /// What is asked of each trained group.
    pub groups: &'a [GroupFacts],
    /// The ways of being spread: the common one, then others.
    pub spreads: &'a [Spread],
    /// Ranks of the world.
    pub world: usize,
    /// Where this rank computes.
    pub device: DeviceKind,
    /// The type kernels read weights in.
    pub values: DataType,
    /// The type gradients travel in.
    pub wire: DataType,
    /// The type reduced gradients are kept in.
    pub kept: DataType,
    /// Whether micro-batches are added up before a step.
    pub accumulates: bool,
    /// Whether each is averaged over ranks even where their sum would do.
    pub reduces_each_micro_batch: bool,
    /// Whether something multiplies gradients on their way, beyond the average over ranks: by spread.
    pub scales: &'a [bool],
    /// Whether ranks hold different parts of one model, so that one of several holders of a part counts it.
    pub parts_differ: bool,
}

/// A trained group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupFacts {
    /// Optimizer states per weight.
    pub states: usize,
    /// How its weights follow from gradients.
    pub rule: UpdateRule,
}

/// A parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParamFacts {
    /// Its elements.
    pub numel: usize,
    /// The dimensions of its shape.
    pub dims: usize,
    /// The trained group that it is in, and its place there; `None` where nobody trains it.
    pub group: Option<(usize, usize)>,
    /// Which way it is spread.
    pub spread: usize,
    /// How its gradient travels.
    pub kind: Kind,
}

/// Some ranks, and this one's number among them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ranks {
    /// What tells them from other ranks.
    pub name: String,
    /// How many.
    pub count: usize,
    /// This rank's number.
    pub own: usize,
    /// Whether all are on one host.
    pub on_one_host: bool,
}

impl Ranks {
    /// This rank alone.
    pub fn alone() -> Ranks {
        Ranks { name: "alone".into(), count: 1, own: 0, on_one_host: true }
    }

    /// So many, as the first of them sees it.
    pub fn first_of(count: usize, on_one_host: bool) -> Ranks {
        Ranks { name: format!("{count} ranks"), count, own: 0, on_one_host }
    }
}

/// A way of being spread over ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spread {
    /// The ranks that together hold everything once.
    pub shard: Ranks,
    /// Those that hold the same part.
    pub replicas: Ranks,
    /// Who divides states where nothing else is divided.
    pub tie: Option<Tie>,
    /// The ranks that reach each other's gradients in place.
    pub reach: Ranks,
    /// What sums of gradients are divided by.
    pub divisor: usize,
    /// Whether this rank's copy is the one that norms count.
    pub counted: bool,
}

impl Spread {
    /// Over some ranks.
    pub fn over(ranks: Ranks) -> Spread {
        Spread {
            divisor: ranks.count,
            replicas: Ranks::alone(),
            tie: None,
            reach: ranks.clone(),
            shard: ranks,
            counted: true,
        }
    }

    /// How many ranks bring gradients of their own.
    pub fn ranks(&self) -> usize {
        self.shard.count * self.replicas.count
    }
}

/// Ranks that use a weight in several stages of a pipeline.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tie {
    /// One of each stage: they own parts of its states.
    pub stages: Ranks,
    /// Those of this rank's stage: they own the same part.
    pub peers: Ranks,
}

/// Where a rank computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceKind {
    /// In the host's memory: the device is the host.
    Host,
    /// Beside a host of its own memory.
    Beside,
}

/// How weights follow from gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UpdateRule {
    /// Nothing is trained.
    None,
    /// Each element by itself, wherever it is.
    EachElement,
    /// Each element by itself, by loops that only the host has.
    EachElementOnHost,
    /// LAMB: each tensor by its norms, which takes a walk over all elements before.
    EachTensor,
    /// Muon: each matrix by the orthogonal one nearest to its momentum, which some rank finds from the whole of it.
    EachMatrix,
    /// Momentum is exchanged in place of gradients.
    Momentum,
}

impl Request<'_> {
    /// Whether any trained group has a rule.
    pub(crate) fn has(&self, rule: UpdateRule) -> bool {
        self.groups.iter().any(|group| group.rule == rule)
    }

    pub(crate) fn stage(&self) -> Stage {
        self.zero.stage
    }

    /// What decides where the gradients of these shares are.
    pub(crate) fn gradients(&self, trained: &[&Share]) -> GradientFacts {
        let rules = rules(self.stage());
        let is_pinned = self.zero.offload_optimizer.tier.is_pinned() && self.device == DeviceKind::Beside;
        let is_moved = |share: &&Share| share.is_away() && share.stays_updated().is_empty();
        // Rows of tables are few, and others in every micro-batch.
        let in_rows = self.params.iter().any(|param| param.group.is_some() && param.kind == Kind::Rows);
        let scaled = |share: &&Share| self.scales.get(share.spread).copied().unwrap_or(false);
        GradientFacts {
            extent: rules.gradients,
            owned: rules.states,
            overlap: self.zero.overlap_comm,
            wire: self.wire,
            kept: self.kept,
            accumulates: self.accumulates,
            reduces: match self.reduces_each_micro_batch || in_rows {
                true => Reduces::EachMicroBatch,
                false => rules.reduces,
            },
            leave: is_pinned && trained.iter().all(is_moved),
            alone: trained.iter().all(|share| share.ranks == 1 && !scaled(share)),
        }
    }

    /// Whether anything but the device keeps masters and states.
    pub(crate) fn states_home(&self) -> Option<crate::share::Home> {
        use crate::share::Home;
        let beside = |home| (self.device == DeviceKind::Beside).then_some(home);
        match &self.zero.offload_optimizer.tier {
            OptimizerTier::Nvme { .. } => Some(Home::Disk),
            OptimizerTier::Host(_) => beside(Home::Host),
            // Weights that are not on the device are updated by the host.
            OptimizerTier::Device if self.values_home().is_some() => beside(Home::Host),
            OptimizerTier::Device => None,
        }
    }
}
