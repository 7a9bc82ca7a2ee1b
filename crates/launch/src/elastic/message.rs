//! What agents and their coordinator say to each other.

use serde::{Deserialize, Serialize};

/// What an agent says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromAgent {
    /// The first word: who it is, and which slots it has.
    Hello {
        /// What its node is called.
        name: String,
        /// Slots for ranks.
        slots: Vec<u32>,
    },
    /// None of its ranks runs; a round may begin.
    Ready {
        /// A port that is free on its node.
        port: u16,
    },
    /// All of its ranks of a round are gone.
    Ended {
        /// Which round.
        round: u32,
        /// How they went.
        how: RoundEnd,
    },
    /// It was told to leave.
    Leaving {
        /// By what.
        why: String,
    },
    /// It is there.
    Alive,
}

/// How the ranks of one node ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum RoundEnd {
    /// All with exit code 0.
    Well,
    /// They saved and left.
    Saved,
    /// They were stopped, as ordered or by a signal.
    Stopped,
    /// One of them failed.
    Failed(Failure),
}

/// A rank that failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The report.
    pub said: String,
    /// The exit code that the job gets from it.
    pub code: u8,
    /// Whether another's failure explains it.
    pub follows: bool,
}

/// What a coordinator says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToAgent {
    /// It is in the job, under this name.
    Welcome {
        /// The name.
        name: String,
    },
    /// A round begins.
    Start(Start),
    /// Ranks are to save and leave.
    Leave,
    /// Ranks are to end at once.
    End,
    /// The job is over.
    Over {
        /// With this exit code.
        code: u8,
    },
    /// It is there.
    Alive,
}

/// A round as a node sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Start {
    /// Its number; the first is 0.
    pub round: u32,
    /// Nodes and their slots, in the order of their ranks.
    pub nodes: Vec<(String, Vec<u32>)>,
    /// Which of them this is.
    pub node_rank: usize,
    /// Where ranks meet.
    pub master_addr: String,
    /// The port there.
    pub master_port: u16,
    /// Restarts that failures have cost.
    pub restarts: u32,
    /// Restarts that they may cost.
    pub max_restarts: u32,
}
