//! What a process must know to join a job, and the environment variables that say it.

use std::time::Duration;

use super::token;
use crate::discover::{self, Discovered};
use crate::error::{Error, Result};
use crate::world::Limits;

/// Says whether sockets are encrypted.
const ENCRYPT: &str = "FERROSPEED_COMM_ENCRYPT";

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
    /// The secret that the launcher gave to every rank of the job. Where it is empty, ranks of one host meet by a secret
    /// that rank 0 leaves in its user's private folder; ranks of several hosts are refused.
    pub token: String,
    /// What the launcher calls the job: tells jobs without a token apart.
    pub job_id: String,
    /// The hash of the configuration; must be the same on every rank.
    pub config_hash: String,
    /// The version of the binary; must be the same on every rank.
    pub version: String,
    /// Which backend to use.
    pub backend: Backend,
    /// Deadline, staging and tracing.
    pub limits: Limits,
    /// Whether sockets are encrypted; must be the same on every rank.
    pub encrypt: bool,
    /// Whether the flight recorder goes to a folder of the job in the user's private folder when none is named.
    pub traces_privately: bool,
}

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
            job_id: String::new(),
            config_hash: String::new(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            backend: Backend::Auto,
            limits: Limits::default(),
            encrypt: false,
            traces_privately: false,
        }
    }

    /// Reads who this process is from what its launcher left in the environment (see [`discover`]), the job's token
    /// (`FERROSPEED_JOB_TOKEN`, or the file `FERROSPEED_JOB_TOKEN_FILE`), `FERROSPEED_COMM_BACKEND`,
    /// `FERROSPEED_COMM_ENCRYPT` (1 encrypts sockets), `DEEPSPEED_TIMEOUT` (minutes), and `FERROSPEED_TRACE_DIR` (by default a folder of this job in the user's private folder; written only
    /// when an operation fails or on SIGUSR1). An error when nothing launched this process.
    pub fn from_env() -> Result<Self> {
        Self::discover()?.ok_or_else(|| Error::Environment {
            variable: "RANK".into(),
            problem: "not set, and nothing of MPI, Slurm, AzureML or SageMaker either; \
                      start the job with a launcher"
                .into(),
        })
    }

    /// As [`ConnectOptions::from_env`]; `None` when nothing launched this process. A variable that makes no sense is an
    /// error in either case: it would be one in every rank that this process starts.
    pub fn discover() -> Result<Option<Self>> {
        Self::from_lookup(|name| std::env::var(name).ok())
    }

    /// For what starts ranks: whether they could make sense of what the environment says about how they are to talk.
    pub fn check_environment() -> Result<()> {
        Settings::from_lookup(|name| std::env::var(name).ok().filter(|value| !value.is_empty())).map(drop)
    }

    /// As [`ConnectOptions::discover`], from any source of variables.
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        let lookup = |name: &str| lookup(name).filter(|value| !value.is_empty());
        // Before anything else: what starts ranks learns of a mistake in what it would hand on to them.
        let settings = Settings::from_lookup(lookup)?;
        let Some(found) = discover::discover(&lookup)? else { return Ok(None) };
        let mut options = ConnectOptions::of(&found);
        options.token = token::handed_over_token(lookup)?.unwrap_or_default();
        options.backend = settings.backend;
        options.encrypt = settings.encrypt;
        options.limits.deadline = settings.deadline.unwrap_or(options.limits.deadline);
        options.limits.trace_folder = lookup("FERROSPEED_TRACE_DIR").map(Into::into);
        options.traces_privately = true;
        options.check()?;
        Ok(Some(options))
    }

    fn of(found: &Discovered) -> Self {
        let mut options = ConnectOptions::new(
            found.rank as usize,
            found.world_size as usize,
            found.master_addr.clone(),
            found.master_port,
        );
        options.local_world_size = found.local_world_size.map(|size| size as usize);
        options.job_id = found.job_id.clone().unwrap_or_default();
        options
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
        if self.world_size > 1 && self.token.is_empty() && !self.is_single_host() {
            return Err(token::missing());
        }
        Ok(())
    }

    /// Whether all ranks are known to be on this host.
    pub(crate) fn is_single_host(&self) -> bool {
        let loopback = self.master_addr == "localhost"
            || self.master_addr.parse().is_ok_and(|address: std::net::IpAddr| address.is_loopback());
        loopback || self.local_world_size == Some(self.world_size)
    }
}

/// What the environment says about how ranks talk, whoever they are.
struct Settings {
    backend: Backend,
    encrypt: bool,
    deadline: Option<Duration>,
}

impl Settings {
    fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let backend =
            lookup("FERROSPEED_COMM_BACKEND").map_or(Ok(Backend::default()), |name| name.parse())?;
        let encrypt = match lookup(ENCRYPT).as_deref() {
            None | Some("0") => false,
            Some("1") => true,
            Some(other) => {
                let problem = format!("{other:?} is neither 1 (sockets are encrypted) nor 0 (they are not)");
                return Err(Error::Environment { variable: ENCRYPT.into(), problem });
            }
        };
        let minutes = |value: String| {
            let minutes: u64 = value.trim().parse().map_err(|_| Error::Environment {
                variable: "DEEPSPEED_TIMEOUT".into(),
                problem: format!("{value:?} is not a number of minutes"),
            })?;
            Ok(Duration::from_secs(minutes.saturating_mul(60)))
        };
        let deadline = lookup("DEEPSPEED_TIMEOUT").map(minutes).transpose()?;
        Ok(Settings { backend, encrypt, deadline })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(pairs: &[(&str, &str)]) -> Result<ConnectOptions> {
        let find =
            |name: &str| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        ConnectOptions::from_lookup(find).map(|options| options.expect("a rank"))
    }

    const OPENMPI: [(&str, &str); 4] = [
        ("OMPI_COMM_WORLD_RANK", "1"),
        ("OMPI_COMM_WORLD_SIZE", "4"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
    ];

    #[test]
    fn a_rank_of_mpirun_knows_its_place_deadline_and_backend() {
        let chosen = [("DEEPSPEED_TIMEOUT", "2"), ("FERROSPEED_COMM_BACKEND", "tcp")];
        let options = from(&[&OPENMPI[..], &chosen].concat()).unwrap();
        assert_eq!((options.rank, options.world_size, options.backend), (1, 4, Backend::Tcp));
        assert_eq!(options.limits.deadline, Duration::from_secs(120));
        assert!(options.is_single_host());
    }

    #[test]
    fn ranks_on_several_hosts_need_a_token_and_are_told_how_to_get_one() {
        let mut variables = OPENMPI.to_vec();
        variables[3].1 = "2";
        variables.push(("MASTER_ADDR", "10.0.0.1"));
        let text = from(&variables).unwrap_err().to_string();
        for hint in ["several hosts", "-x FERROSPEED_JOB_TOKEN", "FERROSPEED_JOB_TOKEN_FILE"] {
            assert!(text.contains(hint), "{text}");
        }
        variables.push(("FERROSPEED_JOB_TOKEN", "secret"));
        assert_eq!(from(&variables).unwrap().token, "secret");
    }

    #[test]
    fn a_process_that_is_no_rank_hears_of_what_its_ranks_would_refuse() {
        for (name, value) in
            [(ENCRYPT, "nonsense"), ("FERROSPEED_COMM_BACKEND", "smoke"), ("DEEPSPEED_TIMEOUT", "soon")]
        {
            let alone = ConnectOptions::from_lookup(|asked| (asked == name).then(|| value.to_owned()));
            let text = alone.unwrap_err().to_string();
            assert!(text.contains(value), "{text}");
        }
    }

    #[test]
    fn a_variable_that_makes_no_sense_is_named() {
        for (pairs, wanted) in [
            (vec![("WORLD_SIZE", "2")], "RANK is missing"),
            (vec![("RANK", "x"), ("WORLD_SIZE", "1")], "RANK=\"x\" is not"),
            (vec![("RANK", "1"), ("WORLD_SIZE", "1")], "rank 1 is not below the world size 1"),
            (vec![("RANK", "0"), ("WORLD_SIZE", "2")], "MASTER_ADDR is not set"),
            (vec![("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_PORT", "70000")], "MASTER_PORT=\"70000\""),
            (vec![("RANK", "0"), ("WORLD_SIZE", "1"), ("DEEPSPEED_TIMEOUT", "0")], "DEEPSPEED_TIMEOUT"),
            (
                vec![("RANK", "0"), ("WORLD_SIZE", "1"), ("FERROSPEED_COMM_BACKEND", "smoke")],
                "\"smoke\" is none of",
            ),
            (
                vec![("RANK", "0"), ("WORLD_SIZE", "1"), ("FERROSPEED_COMM_ENCRYPT", "yes")],
                "\"yes\" is neither 1",
            ),
        ] {
            let text = from(&pairs).unwrap_err().to_string();
            assert!(text.contains(wanted), "{text}");
        }
    }
}
