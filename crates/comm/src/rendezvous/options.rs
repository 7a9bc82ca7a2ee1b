//! What a process must know to join a job, and the environment variables that say it.

use std::time::Duration;

use crate::error::{Error, Result};
use crate::op::Digest;
use crate::world::Limits;

/// Which backend carries the groups of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    /// `local` inside a host; between hosts `tcp`, hierarchically.
    #[default]
    Auto,
    /// Shared memory; all ranks on one host.
    Local,
    /// Sockets for everything, even inside a host.
    Tcp,
    /// MPI; needs the cargo feature `mpi` and a start by `mpirun` or `srun`.
    Mpi,
    /// NVIDIA's library for the memory of GPUs, one rank per GPU, or it is an error; as `auto` for that of hosts.
    Nccl,
}

impl std::str::FromStr for Backend {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "" | "auto" => Ok(Backend::Auto),
            // Configurations written for the CPU backends of other frameworks name theirs.
            "local" => Ok(Backend::Local),
            "tcp" | "gloo" => Ok(Backend::Tcp),
            "mpi" => Ok(Backend::Mpi),
            "nccl" => Ok(Backend::Nccl),
            other => Err(Error::Environment {
                variable: "communication backend".into(),
                problem: format!("{other:?} is none of auto, local, tcp, mpi, nccl"),
            }),
        }
    }
}

/// A process's place in a job.
#[derive(Debug, Clone)]
pub struct ConnectOptions {
    /// This process's rank.
    pub rank: usize,
    /// The number of ranks.
    pub world_size: usize,
    /// The number of ranks on this host, where the launcher says so.
    pub local_world_size: Option<usize>,
    /// Where rank 0 listens.
    pub master_addr: String,
    /// The port at which rank 0 listens.
    pub master_port: u16,
    /// The secret that the launcher gave to every rank of the job.
    pub token: String,
    /// The hash of the configuration; must be the same on every rank.
    pub config_hash: String,
    /// The version of the binary; must be the same on every rank.
    pub version: String,
    /// Which backend to use.
    pub backend: Backend,
    /// Deadline, staging and tracing.
    pub limits: Limits,
}

/// The environment variables for each fact, ours first, then those of MPI, PMI and Slurm.
const RANK: &[&str] = &["RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"];
const WORLD_SIZE: &[&str] = &["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"];
const LOCAL_WORLD_SIZE: &[&str] = &["LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"];

impl ConnectOptions {
    /// A place in a job on this host.
    pub fn new(rank: usize, world_size: usize, master_addr: impl Into<String>, master_port: u16) -> Self {
        ConnectOptions {
            rank,
            world_size,
            local_world_size: None,
            master_addr: master_addr.into(),
            master_port,
            token: String::new(),
            config_hash: String::new(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            backend: Backend::Auto,
            limits: Limits::default(),
        }
    }

    /// Reads `RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT FERROSPEED_JOB_TOKEN` (or what MPI and Slurm set
    /// for the first three), `FERROSPEED_COMM_BACKEND`, `DEEPSPEED_TIMEOUT` (minutes), and `FERROSPEED_TRACE_DIR` (by default a folder of this
    /// job among the temporary files; written only when an operation fails or on SIGUSR1).
    pub fn from_env() -> Result<Self> {
        Self::from_lookup(|name| std::env::var(name).ok())
    }

    /// As [`ConnectOptions::from_env`], from any source of variables.
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let lookup = |name: &str| lookup(name).filter(|value| !value.is_empty());
        let first = |names: &[&str]| names.iter().find_map(|name| Some((name.to_string(), lookup(name)?)));
        let number = |names: &[&str]| -> Result<Option<usize>> {
            let Some((variable, value)) = first(names) else { return Ok(None) };
            let parsed = value.trim().parse();
            parsed.map(Some).map_err(|_| Error::Environment {
                variable,
                problem: format!("{value:?} is not a non-negative number"),
            })
        };
        let required = |names: &[&str], value: Option<usize>| {
            value.ok_or_else(|| Error::Environment {
                variable: names[0].into(),
                problem: format!(
                    "not set, and none of {} either; start the job with a launcher",
                    names[1..].join(", ")
                ),
            })
        };
        let rank = required(RANK, number(RANK)?)?;
        let world_size = required(WORLD_SIZE, number(WORLD_SIZE)?)?;
        let port = number(&["MASTER_PORT"])?.unwrap_or(29500);
        let master_port = u16::try_from(port).map_err(|_| Error::Environment {
            variable: "MASTER_PORT".into(),
            problem: format!("{port} is not a port number"),
        })?;
        let master_addr = lookup("MASTER_ADDR").unwrap_or_else(|| "127.0.0.1".into());
        let mut options = ConnectOptions::new(rank, world_size, master_addr, master_port);
        options.local_world_size = number(LOCAL_WORLD_SIZE)?;
        options.token = lookup("FERROSPEED_JOB_TOKEN").unwrap_or_default();
        if let Some(name) = lookup("FERROSPEED_COMM_BACKEND") {
            options.backend = name.parse()?;
        }
        if let Some(minutes) = number(&["DEEPSPEED_TIMEOUT"])? {
            options.limits.deadline = Duration::from_secs(60 * minutes as u64);
        }
        let usual = || std::env::temp_dir().join(format!("ferrospeed-trace-{:016x}", options.job_digest()));
        options.limits.trace_folder = Some(lookup("FERROSPEED_TRACE_DIR").map_or_else(usual, Into::into));
        options.check()?;
        Ok(options)
    }

    pub(crate) fn check(&self) -> Result<()> {
        let refuse =
            |variable: &str, problem: String| Err(Error::Environment { variable: variable.into(), problem });
        if self.world_size == 0 {
            return refuse("WORLD_SIZE", "a job needs at least one rank".into());
        }
        if self.rank >= self.world_size {
            return refuse("RANK", format!("{} is not below the world size {}", self.rank, self.world_size));
        }
        if self.limits.deadline.is_zero() {
            return refuse("DEEPSPEED_TIMEOUT", "a deadline of 0 leaves no time to meet".into());
        }
        Ok(())
    }

    /// A number that tells this job's connections from those of others.
    pub(crate) fn job_digest(&self) -> u64 {
        let mut digest = Digest::new();
        self.token.bytes().for_each(|byte| digest.add(u64::from(byte)));
        digest.add(u64::from(self.master_port));
        digest.value()
    }

    /// Whether all ranks are known to be on this host.
    pub(crate) fn is_single_host(&self) -> bool {
        let loopback = self.master_addr == "localhost"
            || self.master_addr.parse().is_ok_and(|address: std::net::IpAddr| address.is_loopback());
        loopback || self.local_world_size == Some(self.world_size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(pairs: &[(&str, &str)]) -> Result<ConnectOptions> {
        let find =
            |name: &str| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        ConnectOptions::from_lookup(find)
    }

    #[test]
    fn the_launchers_variables_come_before_those_of_mpi() {
        let options = from(&[
            ("RANK", "1"),
            ("OMPI_COMM_WORLD_RANK", "0"),
            ("OMPI_COMM_WORLD_SIZE", "4"),
            ("DEEPSPEED_TIMEOUT", "2"),
            ("FERROSPEED_COMM_BACKEND", "tcp"),
        ])
        .unwrap();
        assert_eq!((options.rank, options.world_size, options.backend), (1, 4, Backend::Tcp));
        assert_eq!(options.limits.deadline, Duration::from_secs(120));
        assert!(options.is_single_host());
    }

    #[test]
    fn a_variable_that_makes_no_sense_is_named() {
        for (pairs, wanted) in [
            (vec![("WORLD_SIZE", "2")], "RANK: not set"),
            (vec![("RANK", "x"), ("WORLD_SIZE", "2")], "RANK: \"x\" is not"),
            (vec![("RANK", "2"), ("WORLD_SIZE", "2")], "RANK: 2 is not below the world size 2"),
            (vec![("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_PORT", "70000")], "MASTER_PORT: 70000"),
            (vec![("RANK", "0"), ("WORLD_SIZE", "1"), ("DEEPSPEED_TIMEOUT", "0")], "DEEPSPEED_TIMEOUT"),
            (
                vec![("RANK", "0"), ("WORLD_SIZE", "1"), ("FERROSPEED_COMM_BACKEND", "smoke")],
                "\"smoke\" is none of",
            ),
        ] {
            let text = from(&pairs).unwrap_err().to_string();
            assert!(text.contains(wanted), "{text}");
        }
    }
}
