//! One round: who is in it, and how each of them ended.

use super::super::message::{Failure, RoundEnd};
use super::NodeId;

/// Whether and how a round is being ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Winding {
    /// It goes on.
    No,
    /// Some ranks left by themselves, and the others are to.
    Followed,
    /// Ranks save and leave.
    Leaving,
    /// Ranks end at once: one of them is lost.
    Ending,
}

#[derive(Debug)]
enum Fate {
    Running,
    Ended(RoundEnd),
    Lost,
}

#[derive(Debug)]
pub(super) struct Round {
    number: u32,
    members: Vec<(NodeId, usize, Fate)>,
    winding: Winding,
}

impl Round {
    pub(super) fn new(number: u32, team: &[(NodeId, usize)]) -> Round {
        let members = team.iter().map(|(id, ranks)| (*id, *ranks, Fate::Running)).collect();
        Round { number, members, winding: Winding::No }
    }

    pub(super) fn ranks(&self) -> usize {
        self.members.iter().map(|(_, ranks, _)| ranks).sum()
    }

    pub(super) fn is_member(&self, node: NodeId) -> bool {
        self.members.iter().any(|(id, ..)| *id == node)
    }

    /// Notes how a member's ranks ended; what is said of another round is old.
    pub(super) fn ended(&mut self, node: NodeId, round: u32, how: RoundEnd) {
        let member = self.members.iter_mut().find(|(id, ..)| *id == node);
        if let Some((.., fate @ Fate::Running)) = member.filter(|_| round == self.number) {
            *fate = Fate::Ended(how);
        }
    }

    /// Notes that a node is gone; says whether its ranks were running.
    pub(super) fn lost(&mut self, node: NodeId) -> bool {
        match self.members.iter_mut().find(|(id, ..)| *id == node) {
            Some((.., fate @ Fate::Running)) => {
                *fate = Fate::Lost;
                true
            }
            _ => false,
        }
    }

    /// Winds up more strongly than before; says whether that is so.
    pub(super) fn wind(&mut self, winding: Winding) -> bool {
        let is_more = winding > self.winding;
        self.winding = self.winding.max(winding);
        is_more
    }

    pub(super) fn goes_on(&self) -> bool {
        self.winding == Winding::No && self.members.iter().all(|(.., fate)| matches!(fate, Fate::Running))
    }

    /// Members whose ranks run.
    pub(super) fn running(&self) -> impl Iterator<Item = NodeId> {
        self.members.iter().filter(|(.., fate)| matches!(fate, Fate::Running)).map(|(id, ..)| *id)
    }

    pub(super) fn is_over(&self) -> bool {
        self.running().next().is_none()
    }

    fn ends(&self) -> impl Iterator<Item = &RoundEnd> {
        self.members.iter().filter_map(|(.., fate)| match fate {
            Fate::Ended(how) => Some(how),
            _ => None,
        })
    }

    /// Whether a member's ranks failed, and nobody has ended the others yet.
    pub(super) fn has_failed(&self) -> bool {
        self.winding < Winding::Ending && self.ends().any(|how| matches!(how, RoundEnd::Failed(_)))
    }

    /// Whether a member's ranks left, and the others have not been told to.
    pub(super) fn has_left(&self) -> bool {
        let left = |how: &RoundEnd| matches!(how, RoundEnd::Saved | RoundEnd::Stopped);
        self.winding == Winding::No && self.ends().any(left)
    }

    pub(super) fn has_lost(&self) -> bool {
        self.members.iter().any(|(.., fate)| matches!(fate, Fate::Lost))
    }

    pub(super) fn all_well(&self) -> bool {
        self.members.iter().all(|(.., fate)| matches!(fate, Fate::Ended(RoundEnd::Well)))
    }

    pub(super) fn all_saved(&self) -> bool {
        self.members.iter().all(|(.., fate)| matches!(fate, Fate::Ended(RoundEnd::Saved)))
    }

    /// Whether all saved and left though nobody had told the first of them to.
    pub(super) fn left_by_itself(&self) -> bool {
        self.all_saved() && self.winding <= Winding::Followed
    }

    /// Why it failed: by a rank that failed by itself, if there is one.
    pub(super) fn failure(&self) -> Option<Failure> {
        let failures = || {
            self.ends().filter_map(|how| match how {
                RoundEnd::Failed(failure) => Some(failure),
                _ => None,
            })
        };
        failures().find(|failure| !failure.follows).or_else(|| failures().next()).cloned()
    }
}
