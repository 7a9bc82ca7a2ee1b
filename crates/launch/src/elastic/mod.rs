//! A job that goes on while its nodes come and go.
//!
//! A *coordinator* (in `ferrospeed launch`) and an *agent* on every node, which calls it. The job runs in *rounds*: the coordinator
//! tells the agents who is in a round and where its ranks meet, each agent starts the ranks of its node and says how they ended.
//! When a node leaves, or one comes that can be used, the round is ended (in order where ranks can still save, at once where
//! they cannot), and the next begins with who is there: on a new port, with ranks counted anew, from the newest checkpoint.
//!
//! - `plan` says how each host's agent is started, before any is.
//! - [`course`] decides, as a pure function of events and time: who is in a round, when it ends, and why the job does.
//! - `message` is what is said, `signed` proves who says it: nothing that a stranger sends is read.
//! - [`coordinator`] and [`agent`] are the sockets, processes and clocks around both; `hosts` starts agents over ssh.
//!
//! The coordinator never sends commands: what an agent starts stands on its own command line. Nobody waits for ever: both ends
//! of every connection are heard from each second, and who is silent for [`SILENCE`] is gone.

pub mod agent;
pub mod coordinator;
pub mod course;
mod hosts;
mod message;
mod plan;
mod signed;

use std::time::Duration;

pub use agent::{AgentOptions, run_agent};
pub use coordinator::{ElasticJob, JobOptions};
pub use course::{AllowedRanks, Limits, Verdict};
pub use hosts::Host;
pub use message::RoundEnd;
pub use plan::{ElasticPlan, plan_agents};

/// How often either end of a connection is heard from.
const PULSE: Duration = Duration::from_secs(1);

/// Who says nothing for so long is gone.
pub const SILENCE: Duration = Duration::from_secs(10);

/// How long a connection may take to prove itself.
const PROOF_LIMIT: Duration = Duration::from_secs(10);

/// Ranks of a run that saved and left as it was told: `EX_TEMPFAIL`, as `ferrospeed train` has it.
pub const EXIT_SAVED: u8 = 75;

/// Tells ranks how many rounds of the job there have been before: from the second on a run goes on from what it saved.
pub const ROUND_VARIABLE: &str = "FERROSPEED_ROUND";
