//! Backends for many hosts, each a pure function from a job to a command line.
//!
//! `pdsh` starts one node launcher per host, which supervises its ranks; the MPI launchers and `srun` start the
//! ranks themselves. Variables that only this launcher knows (the meeting point, the job's token) go by name
//! through the environment where the backend carries it, and the token never stands on a command line.

mod mpi;
mod pdsh;
mod slurm;

use crate::error::{LaunchError, list_some};
use crate::exports::Environment;
use crate::handover::Handover;
use crate::hostfile::HostPool;
use crate::node::{JOB_TOKEN_VARIABLE, NodeLaunch};
use crate::options::{Backend, LaunchOptions};
use crate::supervise::Ended;

/// A job that is ready to be handed to a backend.
pub(crate) struct Job<'a> {
    pub(crate) options: &'a LaunchOptions,
    /// Every host of the hostfile.
    pub(crate) pool: &'a HostPool,
    /// What each node has to do; its world is the filtered one.
    pub(crate) node: &'a NodeLaunch,
    /// Variables that travel.
    pub(crate) exports: Environment,
    /// The environment of the front-end.
    pub(crate) environment: Environment,
    /// Variables to set for the backend's own process.
    pub(crate) command_environment: Environment,
    pub(crate) current_dir: String,
    pub(crate) executable: String,
    pub(crate) python: String,
    pub(crate) job_token: String,
    /// A random name of the job, which is no secret.
    pub(crate) job_id: String,
    pub(crate) backend_args: Vec<String>,
    pub(crate) scratch_hostfile: String,
}

/// A backend's command and what goes with it.
#[derive(Default)]
pub(crate) struct Built {
    pub(crate) command: Vec<String>,
    pub(crate) environment: Environment,
    pub(crate) files: Vec<(String, String)>,
    pub(crate) remote_stop: Option<Vec<String>>,
    pub(crate) handover: Option<Handover>,
    pub(crate) complaint: Option<fn(&str) -> Option<Ended>>,
}

/// Builds the command of a backend.
pub(crate) fn build(backend: Backend, job: &Job<'_>) -> Result<Built, LaunchError> {
    match backend {
        Backend::Pdsh => Ok(pdsh::build(job)),
        Backend::OpenMpi => mpi::openmpi(job),
        Backend::Mpich => mpi::mpich(job),
        Backend::IntelMpi => mpi::intel_mpi(job),
        Backend::Slurm => slurm::build(job),
        Backend::Mvapich => mpi::mvapich(job),
    }
}

impl Job<'_> {
    fn hosts(&self) -> String {
        self.node.world.keys().map(String::as_str).collect::<Vec<_>>().join(",")
    }

    fn total_ranks(&self) -> usize {
        self.node.world.values().map(Vec::len).sum()
    }

    /// The backend's environment with what every rank must find in its own.
    fn environment_with_meeting_point(&self) -> Environment {
        let mut environment = self.command_environment.clone();
        environment.insert("MASTER_ADDR".to_owned(), self.node.master_addr.clone());
        environment.insert("MASTER_PORT".to_owned(), self.node.master_port.to_string());
        environment.insert(JOB_TOKEN_VARIABLE.to_owned(), self.job_token.clone());
        environment
    }

    /// Refuses what a backend that starts the ranks itself cannot honour.
    fn refuse_node_launcher_options(&self, backend: Backend) -> Result<(), LaunchError> {
        let refuse =
            |what, instead| Err(LaunchError::BackendLimit { backend: backend.name(), what, instead });
        let options = self.options;
        if options.elastic {
            return refuse("restart ranks", "use --launcher pdsh for --elastic_training");
        }
        if options.log_dir.is_some() {
            return refuse(
                "keep a log per rank",
                "use its own option through --launcher_args, or --launcher pdsh",
            );
        }
        if options.bind_cores && backend != Backend::IntelMpi {
            return refuse("bind cores for this launcher", "use its own option through --launcher_args");
        }
        if options.save_pid {
            return refuse("write a pid file per node", "use --launcher pdsh for --save_pid");
        }
        Ok(())
    }

    fn refuse_filters(&self, backend: Backend) -> Result<(), LaunchError> {
        let refuse =
            |what, instead| Err(LaunchError::BackendLimit { backend: backend.name(), what, instead });
        if !self.options.include.is_empty() || !self.options.exclude.is_empty() {
            return refuse("include or exclude workers", "write a hostfile with the wanted hosts and slots");
        }
        if self.options.num_nodes.is_some() || self.options.ranks_per_node.is_some() {
            return refuse(
                "limit the number of nodes or ranks",
                "write a hostfile with the wanted hosts and slots",
            );
        }
        Ok(())
    }

    fn even_slots(&self, backend: Backend) -> Result<usize, LaunchError> {
        let mut counts = self.pool.values();
        let first = counts.next().copied().unwrap_or(0);
        if counts.any(|&count| count != first) {
            return Err(LaunchError::UnevenSlots {
                backend: backend.name(),
                counts: list_some(self.pool.iter().map(|(host, slots)| format!("{host} {slots}"))),
            });
        }
        Ok(first as usize)
    }
}

/// Turns literals into owned words.
fn words<const N: usize>(literals: [&str; N]) -> Vec<String> {
    literals.map(str::to_owned).into()
}
