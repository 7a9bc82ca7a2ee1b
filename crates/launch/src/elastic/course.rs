//! Who is in a round, when it ends, and why the job does: a pure function of what happens and when.
//!
//! [`Course::on`] takes an event and the time since the job began, and gives what is to be done about it. Nothing here waits,
//! sends or looks at a clock, so every order of events can be tried.

mod round;
mod team;

use std::collections::BTreeMap;
use std::time::Duration;

use super::EXIT_SAVED;
use super::message::{Failure, FromAgent, Start, ToAgent};
use round::{Round, Winding};
pub use team::AllowedRanks;
use team::choose;

/// What programs exit with that were asked for something that makes no sense: it would make none again.
const EXIT_MISTAKE: u8 = 2;

/// An agent's connection; a later one has a higher number.
pub type NodeId = u64;

/// At the beginning the first round waits so long for listed nodes, where enough others are there.
const FIRST_GATHERING: Duration = Duration::from_secs(30);

/// Nodes that come within this time of each other are taken in together.
const SETTLING: Duration = Duration::from_secs(2);

/// The longest pause before a round that follows a failure.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// What bounds a job.
#[derive(Debug, Clone)]
pub struct Limits {
    /// The fewest nodes of a round.
    pub min_nodes: usize,
    /// The most.
    pub max_nodes: usize,
    /// How many failures of ranks are followed by another round.
    pub max_restarts: u32,
    /// How long to wait for nodes where there are too few.
    pub wait: Duration,
    /// The nodes that are started with the job, in the order of their ranks.
    pub listed: Vec<String>,
    /// Which numbers of ranks can train.
    pub allowed: AllowedRanks,
}

/// What happens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// An agent has called and proven itself; ranks of others reach its node there.
    Came {
        /// Its connection.
        node: NodeId,
        /// What it calls itself.
        name: String,
        /// Slots for ranks.
        slots: Vec<u32>,
        /// The address of its node.
        addr: String,
    },
    /// An agent says something.
    Said(NodeId, FromAgent),
    /// An agent is not heard from any more.
    Gone(NodeId, String),
    /// A listed node could not be reached, or its agent has ended.
    Unreachable(String, String),
    /// The coordinator was told to end the job.
    Interrupted(i32),
    /// Time has passed.
    Tick,
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Say something to an agent.
    Send(NodeId, ToAgent),
    /// Tell the user.
    Tell(String),
    /// The job is over; agents have been told.
    End(Verdict),
}

/// How a job ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Every rank of the last round exited with 0.
    Succeeded,
    /// A rank failed too often, or there were too few nodes.
    Failed {
        /// What happened.
        said: String,
        /// The exit code.
        code: u8,
    },
    /// It was told to end.
    Interrupted {
        /// The signal; none where the ranks left by themselves.
        signal: Option<i32>,
        /// The exit code.
        code: u8,
    },
}

impl Verdict {
    /// The exit code of the job.
    pub fn exit_code(&self) -> u8 {
        match self {
            Verdict::Succeeded => 0,
            Verdict::Failed { code, .. } | Verdict::Interrupted { code, .. } => *code,
        }
    }
}

/// A node that has an agent.
#[derive(Debug, Clone)]
struct Node {
    name: String,
    slots: Vec<u32>,
    addr: String,
    /// A port that is free there, where none of its ranks runs.
    ready: Option<u16>,
    is_leaving: bool,
}

#[derive(Debug)]
enum Phase {
    /// Between rounds, since then; not before `pause` is over.
    Gathering {
        since: Duration,
        pause: Duration,
    },
    Running(Round),
    Over,
}

/// The course of a job.
#[derive(Debug)]
pub struct Course {
    limits: Limits,
    nodes: BTreeMap<NodeId, Node>,
    phase: Phase,
    /// The number of the next round.
    next_round: u32,
    restarts: u32,
    /// When the last node came.
    last_came: Duration,
    /// Listed nodes that are not there, and why.
    missing: BTreeMap<String, String>,
    /// Who has left, and why.
    departed: Vec<String>,
    interrupted: Option<i32>,
    actions: Vec<Action>,
}

impl Course {
    /// A job that nobody has come to yet.
    pub fn new(limits: Limits) -> Course {
        Course {
            limits,
            nodes: BTreeMap::new(),
            phase: Phase::Gathering { since: Duration::ZERO, pause: Duration::ZERO },
            next_round: 0,
            restarts: 0,
            last_came: Duration::ZERO,
            missing: BTreeMap::new(),
            departed: Vec::new(),
            interrupted: None,
            actions: Vec::new(),
        }
    }

    /// What is to be done about an event.
    pub fn on(&mut self, event: Event, now: Duration) -> Vec<Action> {
        if matches!(self.phase, Phase::Over) {
            return Vec::new();
        }
        match event {
            Event::Came { node, name, slots, addr } => self.came(node, name, slots, addr, now),
            Event::Said(node, said) => self.said(node, said),
            Event::Gone(node, why) => self.gone(node, &why),
            Event::Unreachable(name, why) => self.unreachable(name, why),
            Event::Interrupted(signal) => self.interrupted(signal),
            Event::Tick => {}
        }
        self.go_on(now);
        std::mem::take(&mut self.actions)
    }

    /// Names of nodes that have an agent.
    pub fn present(&self) -> impl Iterator<Item = &str> {
        self.nodes.values().map(|node| node.name.as_str())
    }

    fn came(&mut self, id: NodeId, name: String, slots: Vec<u32>, addr: String, now: Duration) {
        let is_taken = |name: &str| self.nodes.values().any(|node| node.name == name);
        let numbered = (2..).map(|number| format!("{name}-{number}"));
        let name = std::iter::once(name.clone()).chain(numbered).find(|name| !is_taken(name)).unwrap_or(name);
        self.missing.remove(&name);
        self.send(id, ToAgent::Welcome { name: name.clone() });
        if self.next_round > 0 {
            self.tell(format!("{name} has come, with {} slot(s)", slots.len()));
        }
        self.last_came = now;
        self.nodes.insert(id, Node { name, slots, addr, ready: None, is_leaving: false });
    }

    fn said(&mut self, id: NodeId, said: FromAgent) {
        let Some(node) = self.nodes.get_mut(&id) else { return };
        match said {
            FromAgent::Ready { port } => node.ready = Some(port),
            FromAgent::Ended { round, how } => {
                if let Phase::Running(running) = &mut self.phase {
                    running.ended(id, round, how);
                }
            }
            FromAgent::Leaving { .. } if node.is_leaving => {}
            FromAgent::Leaving { why } => {
                node.is_leaving = true;
                let departure = format!("{} leaves: {why}", node.name);
                self.departed.push(departure.clone());
                self.tell(departure);
                self.wind_up(Winding::Leaving, Some(id));
            }
            FromAgent::Hello { .. } | FromAgent::Alive => {}
        }
    }

    fn gone(&mut self, id: NodeId, why: &str) {
        let Some(node) = self.nodes.remove(&id) else { return };
        if !node.is_leaving {
            let departure = format!("{} is gone: {why}", node.name);
            self.departed.push(departure.clone());
            self.tell(departure);
        }
        if let Phase::Running(round) = &mut self.phase
            && round.lost(id)
        {
            self.wind_up(Winding::Ending, None);
        }
    }

    fn unreachable(&mut self, name: String, why: String) {
        if !self.nodes.values().any(|node| node.name == name) {
            if self.missing.get(&name) != Some(&why) {
                self.tell(format!("{name} is not there: {why}"));
            }
            self.missing.insert(name, why);
        }
    }

    fn interrupted(&mut self, signal: i32) {
        // A second signal ends the patience, as everywhere.
        let winding = if self.interrupted.is_some() { Winding::Ending } else { Winding::Leaving };
        self.interrupted.get_or_insert(signal);
        self.wind_up(winding, None);
    }

    /// Ends the round that runs: has all members that still run told, but `besides`, who tells its ranks itself.
    fn wind_up(&mut self, winding: Winding, besides: Option<NodeId>) {
        let Phase::Running(round) = &mut self.phase else { return };
        if !round.wind(winding) {
            return;
        }
        let message = if winding == Winding::Ending { ToAgent::End } else { ToAgent::Leave };
        let told: Vec<NodeId> = round.running().filter(|id| Some(*id) != besides).collect();
        told.into_iter().for_each(|id| self.send(id, message.clone()));
    }

    /// Does what the state as it is asks for.
    fn go_on(&mut self, now: Duration) {
        match &self.phase {
            Phase::Running(round) => {
                if round.is_over() {
                    return self.conclude(now);
                }
                if round.has_failed() {
                    return self.wind_up(Winding::Ending, None);
                }
                if round.has_left() {
                    return self.wind_up(Winding::Followed, None);
                }
                if round.goes_on() && now >= self.last_came + SETTLING && self.would_grow() {
                    self.tell(
                        "those that came are taken in: the others save, and go on with them".to_owned(),
                    );
                    self.wind_up(Winding::Leaving, None);
                }
            }
            &Phase::Gathering { since, pause } => self.gather(now, since, pause),
            Phase::Over => {}
        }
    }

    /// Nodes that may be in the next round, in the order of their ranks.
    fn candidates(&self) -> Vec<(NodeId, &Node)> {
        let is_candidate = |node: &Node| node.ready.is_some() && !node.is_leaving;
        let mut found: Vec<(NodeId, &Node)> =
            self.nodes.iter().filter(|(_, node)| is_candidate(node)).map(|(id, node)| (*id, node)).collect();
        let place = |name: &str| self.limits.listed.iter().position(|listed| listed == name);
        found.sort_by_key(|(id, node)| (place(&node.name).unwrap_or(usize::MAX), *id));
        found
    }

    /// Whether a round with who is there now would have more ranks.
    fn would_grow(&self) -> bool {
        let Phase::Running(round) = &self.phase else { return false };
        let is_usable =
            |id: &NodeId, node: &Node| !node.is_leaving && (node.ready.is_some() || round.is_member(*id));
        let slots: Vec<usize> = self
            .nodes
            .iter()
            .filter(|(id, node)| is_usable(id, node))
            .map(|(_, node)| node.slots.len())
            .collect();
        choose(&slots, &self.limits).is_some_and(|ranks| ranks.iter().sum::<usize>() > round.ranks())
    }

    fn gather(&mut self, now: Duration, since: Duration, pause: Duration) {
        if let Some(signal) = self.interrupted {
            // What was trained before is saved, as far as it can be.
            let code = if self.next_round > 0 { EXIT_SAVED } else { of_signal(signal) };
            return self.end(Verdict::Interrupted { signal: Some(signal), code });
        }
        let candidates = self.candidates();
        let slots: Vec<usize> = candidates.iter().map(|(_, node)| node.slots.len()).collect();
        let Some(ranks) = choose(&slots, &self.limits) else {
            if now >= since + self.limits.wait {
                self.give_up(candidates.len());
            }
            return;
        };
        let is_coming = |name: &&String| {
            !self.missing.contains_key(*name) && !self.nodes.values().any(|node| node.name == **name)
        };
        let awaits_listed = self.next_round == 0
            && now < since + FIRST_GATHERING
            && self.limits.listed.iter().take(self.limits.max_nodes).any(|name| is_coming(&name));
        // Its ranks are on their way out, or its connection is about to be given up.
        let awaits_ranks = self.nodes.values().any(|node| node.ready.is_none() && !node.is_leaving);
        if now < since + pause || awaits_listed || awaits_ranks {
            return;
        }
        let team: Vec<(NodeId, usize)> =
            candidates.iter().map(|(id, _)| *id).zip(ranks).filter(|(_, ranks)| *ranks > 0).collect();
        self.begin(&team);
    }

    fn begin(&mut self, team: &[(NodeId, usize)]) {
        let of = |(id, ranks): &(NodeId, usize)| {
            let node = &self.nodes[id];
            (node.name.clone(), node.slots[..*ranks].to_vec())
        };
        let nodes: Vec<(String, Vec<u32>)> = team.iter().map(of).collect();
        let first = &self.nodes[&team[0].0];
        let start = Start {
            round: self.next_round,
            nodes,
            node_rank: 0,
            master_addr: first.addr.clone(),
            master_port: first.ready.unwrap_or(0),
            restarts: self.restarts,
            max_restarts: self.limits.max_restarts,
        };
        let ranks: usize = team.iter().map(|(_, ranks)| ranks).sum();
        let names: Vec<&str> = start.nodes.iter().map(|(name, _)| name.as_str()).collect();
        let reserve = self.candidates().len() - team.len();
        let spare = if reserve > 0 { format!("; {reserve} node(s) in reserve") } else { String::new() };
        if self.next_round > 0 || reserve > 0 {
            self.tell(format!("round {}: {ranks} rank(s) on {}{spare}", self.next_round, names.join(", ")));
        }
        for (node_rank, (id, _)) in team.iter().enumerate() {
            self.send(*id, ToAgent::Start(Start { node_rank, ..start.clone() }));
            if let Some(node) = self.nodes.get_mut(id) {
                node.ready = None;
            }
        }
        self.phase = Phase::Running(Round::new(self.next_round, team));
        self.next_round += 1;
    }

    /// All members of the round have ended.
    fn conclude(&mut self, now: Duration) {
        let Phase::Running(round) =
            std::mem::replace(&mut self.phase, Phase::Gathering { since: now, pause: Duration::ZERO })
        else {
            return;
        };
        let lost_a_node = round.has_lost() || self.nodes.values().any(|node| node.is_leaving);
        if let Some(signal) = self.interrupted {
            let code = if round.all_saved() { EXIT_SAVED } else { of_signal(signal) };
            return self.end(Verdict::Interrupted { signal: Some(signal), code });
        }
        if round.all_well() {
            return self.end(Verdict::Succeeded);
        }
        match round.failure().filter(|_| !lost_a_node) {
            Some(failure) => self.after_failure(failure, now),
            // Told by nobody whom this job knows: the program ends so.
            None if round.left_by_itself() && !lost_a_node => {
                self.end(Verdict::Interrupted { signal: None, code: EXIT_SAVED });
            }
            None => {}
        }
        if matches!(self.phase, Phase::Gathering { .. }) {
            self.tell_of_too_few();
        }
    }

    fn tell_of_too_few(&mut self) {
        let staying = self.nodes.values().filter(|node| !node.is_leaving);
        let usable: Vec<usize> = staying.map(|node| node.slots.len()).collect();
        if choose(&usable, &self.limits).is_none() {
            let (there, wait) = (usable.len(), self.limits.wait.as_secs());
            self.tell(format!(
                "{there} node(s) are left, which is too few: the job waits {wait} s for others to come"
            ));
        }
    }

    fn after_failure(&mut self, failure: Failure, now: Duration) {
        if failure.code == EXIT_MISTAKE || self.restarts >= self.limits.max_restarts {
            return self.end(Verdict::Failed { said: failure.said, code: failure.code });
        }
        let pause = Duration::from_secs(1 << self.restarts.min(5)).min(LONGEST_PAUSE);
        self.restarts += 1;
        let count = format!("restart {} of at most {}", self.restarts, self.limits.max_restarts);
        self.tell(format!("{}\n{count}, from the newest checkpoint", failure.said));
        self.phase = Phase::Gathering { since: now, pause };
    }

    fn give_up(&mut self, there: usize) {
        let Limits { min_nodes, wait, .. } = self.limits;
        let mut said = format!(
            "{there} node(s) are there and no round can begin with them in {} s: the job needs at least {min_nodes}, and a number of \
             ranks that its batch size allows",
            wait.as_secs()
        );
        let missing = self.missing.iter().map(|(name, why)| format!("{name} is not there: {why}"));
        for line in self.departed.iter().cloned().chain(missing) {
            said.push_str(&format!("\n  {line}"));
        }
        self.end(Verdict::Failed { said, code: 1 });
    }

    fn end(&mut self, verdict: Verdict) {
        let code = verdict.exit_code();
        let told: Vec<NodeId> = self.nodes.keys().copied().collect();
        told.into_iter().for_each(|id| self.send(id, ToAgent::Over { code }));
        self.actions.push(Action::End(verdict));
        self.phase = Phase::Over;
    }

    fn send(&mut self, node: NodeId, message: ToAgent) {
        self.actions.push(Action::Send(node, message));
    }

    fn tell(&mut self, text: String) {
        self.actions.push(Action::Tell(text));
    }
}

/// The exit code that a shell gives to what a signal ended.
fn of_signal(signal: i32) -> u8 {
    128u8.saturating_add(u8::try_from(signal).unwrap_or(0))
}

#[cfg(test)]
mod tests;
