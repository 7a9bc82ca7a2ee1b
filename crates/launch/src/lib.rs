//! Starts the ranks of a job on one host or many, and stays with them until the last one is gone.
//!
//! Three layers, each usable alone:
//! - **Reading**: [`hostfile`], [`filter`], [`exports`], [`cores`], [`node_count`], [`world_info`].
//! - **Planning**: [`plan::plan`] turns [`LaunchOptions`] into a command line and its environment without running
//!   anything; [`node::NodeLaunch`] does the same for the ranks of one host, [`pod`] for one that a scheduler of containers
//!   has started, and [`mod@write`] makes the file that a scheduler takes.
//! - **Running**: [`LocalJob`] and [`run::run_node`] start real processes and supervise them.
//!
//! - **Going on**: [`elastic`] runs a job in rounds, with a coordinator and an agent per node, while nodes leave and come.
//!
//! The invariant: children never outlive the launcher, whichever way it ends.
//!
//! ```no_run
//! use ferrospeed_launch::LocalJob;
//!
//! let outcome = LocalJob::new("./train", ["--steps", "10"], 4).run()?;
//! std::process::exit(i32::from(outcome.exit_code()));
//! # #[allow(unreachable_code)]
//! # Ok::<(), ferrospeed_launch::LaunchError>(())
//! ```
//!
//! [`probe`] says what this host can do, by trying it.
//!
//! It refuses to guess: an option that a backend cannot honour is an error, not a shrug.

pub mod bounded;
pub mod cores;
pub mod elastic;
mod error;
pub mod exports;
pub mod filter;
pub mod handover;
pub mod hostfile;
mod local_job;
pub mod node;
pub mod node_count;
pub mod options;
pub mod plan;
pub mod pod;
pub mod probe;
pub mod run;
mod runners;
pub mod shell;
pub mod supervise;
pub mod surroundings;
pub mod world_info;
pub mod write;

pub use error::LaunchError;
pub use local_job::LocalJob;
pub use options::{Backend, Interpreter, LaunchOptions};
pub use supervise::{Ended, JobOutcome, RankFailure};

#[cfg(test)]
extern crate self as ferrospeed_launch;
#[cfg(test)]
#[path = "../tests/it/main.rs"]
mod it;
