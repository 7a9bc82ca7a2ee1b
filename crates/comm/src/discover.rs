//! Who am I? Rank, world and meeting point from what a launcher left in the environment.
//!
//! Looked for in this order: the five variables of torchrun and of this launcher; AzureML; SageMaker; OpenMPI;
//! MPICH and Intel MPI (PMI); a step of Slurm; `RANK` and `WORLD_SIZE` set by hand. No trace of any launcher is
//! `Ok(None)`: a single process. Half a trace is an error that names what is missing, never a guess.

use crate::error::{Error, Result};

/// Where rank 0 listens when nobody chose a port.
pub const DEFAULT_MASTER_PORT: u16 = 29_500;

/// Looks a variable up.
pub trait Variables {
    /// The value of `name`.
    fn get(&self, name: &str) -> Option<String>;
}

impl<F: Fn(&str) -> Option<String>> Variables for F {
    fn get(&self, name: &str) -> Option<String> {
        self(name)
    }
}

/// Which launcher's variables were found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR`, `MASTER_PORT`.
    Explicit,
    /// AzureML over OpenMPI.
    AzureMl,
    /// SageMaker over OpenMPI.
    SageMaker,
    /// OpenMPI.
    OpenMpi,
    /// MPICH, Intel MPI or another PMI launcher.
    Mpich,
    /// Slurm.
    Slurm,
}

/// What a process learned about itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Discovered {
    /// Where it learned it.
    pub source: Source,
    /// Its rank in the world.
    pub rank: u32,
    /// How many ranks there are.
    pub world_size: u32,
    /// Its rank on this host, where the launcher says.
    pub local_rank: Option<u32>,
    /// How many ranks this host has, where the launcher says.
    pub local_world_size: Option<u32>,
    /// Where rank 0 listens.
    pub master_addr: String,
    /// The port it listens on.
    pub master_port: u16,
    /// What the launcher calls this job: the same on all its ranks, different for two that run at once. No secret.
    pub job_id: Option<String>,
    /// A network interface choice that the platform needs NCCL to make.
    pub nccl_socket_interface: Option<String>,
}

const EXPLICIT: [&str; 5] = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"];

/// Finds out who this process is; `None` when nothing launched it.
pub fn discover(env: &impl Variables) -> Result<Option<Discovered>> {
    let has = |name: &str| env.get(name).is_some();
    if EXPLICIT.into_iter().all(has) {
        return explicit(env).map(Some);
    }
    if has("AZUREML_EXPERIMENT_ID") && !has("DLTS_JOB_ID") {
        return azureml(env).map(Some);
    }
    if has("SM_TRAINING_ENV") {
        return sagemaker(env).map(Some);
    }
    if has("OMPI_COMM_WORLD_RANK") {
        return openmpi(env).map(Some);
    }
    if has("PMI_RANK") || has("PMIX_RANK") {
        return mpich(env).map(Some);
    }
    // A batch script has a SLURM_PROCID too; only what `srun` starts belongs to a step.
    if has("SLURM_PROCID") && has("SLURM_STEP_ID") {
        return slurm(env).map(Some);
    }
    // MASTER_ADDR and MASTER_PORT alone are often left in a shell; a rank or a world size is a launcher's.
    let refuse = |set: &str, missing: &str| {
        let reason = format!("{set} is set, but {missing} is missing");
        Err(Error::Discovery { launcher: "RANK/WORLD_SIZE", reason })
    };
    match (has("RANK"), has("WORLD_SIZE")) {
        (true, true) => explicit(env).map(Some),
        (true, false) => refuse("RANK", "WORLD_SIZE"),
        (false, true) => refuse("WORLD_SIZE", "RANK"),
        (false, false) => Ok(None),
    }
}

fn explicit(env: &impl Variables) -> Result<Discovered> {
    let read = Reader { env, launcher: "RANK/WORLD_SIZE" };
    let world_size = read.number("WORLD_SIZE")?;
    let local_world_size = match read.optional("LOCAL_WORLD_SIZE")? {
        Some(size) => Some(size),
        None => read.optional("LOCAL_SIZE")?,
    };
    checked(
        "RANK/WORLD_SIZE",
        Discovered {
            source: Source::Explicit,
            rank: read.number("RANK")?,
            world_size,
            local_rank: read.optional("LOCAL_RANK")?,
            local_world_size,
            master_addr: read.master_addr(world_size == 1 || local_world_size == Some(world_size))?,
            master_port: read.optional("MASTER_PORT")?.unwrap_or(DEFAULT_MASTER_PORT),
            job_id: None,
            nccl_socket_interface: None,
        },
    )
}

/// Reads AzureML's variables.
pub fn azureml(env: &impl Variables) -> Result<Discovered> {
    let read = Reader { env, launcher: "AzureML" };
    let world_size: u32 = read.number("OMPI_COMM_WORLD_SIZE")?;
    let local_world_size: u32 = read.number("OMPI_COMM_WORLD_LOCAL_SIZE")?;
    let (master_addr, master_port) = if local_world_size == world_size {
        (read.text("AZ_BATCHAI_MPI_MASTER_NODE")?, 54_965)
    } else {
        let node = read.text("AZ_BATCH_MASTER_NODE")?;
        let host = node.split(':').next().unwrap_or_default().to_owned();
        (host, read.optional("MASTER_PORT")?.unwrap_or(6_105))
    };
    checked(
        "AzureML",
        Discovered {
            source: Source::AzureMl,
            rank: read.number("OMPI_COMM_WORLD_RANK")?,
            world_size,
            local_rank: Some(read.number("OMPI_COMM_WORLD_LOCAL_RANK")?),
            local_world_size: Some(local_world_size),
            master_addr,
            master_port,
            job_id: openmpi_job(env),
            nccl_socket_interface: Some("^docker0,lo".to_owned()),
        },
    )
}

/// Reads SageMaker's variables.
pub fn sagemaker(env: &impl Variables) -> Result<Discovered> {
    let read = Reader { env, launcher: "SageMaker" };
    checked(
        "SageMaker",
        Discovered {
            source: Source::SageMaker,
            rank: read.number("OMPI_COMM_WORLD_RANK")?,
            world_size: read.number("OMPI_COMM_WORLD_SIZE")?,
            local_rank: Some(read.number("OMPI_COMM_WORLD_LOCAL_RANK")?),
            local_world_size: read.optional("OMPI_COMM_WORLD_LOCAL_SIZE")?,
            master_addr: read.text("MASTER_ADDR")?,
            master_port: read.number("MASTER_PORT")?,
            job_id: openmpi_job(env),
            nccl_socket_interface: None,
        },
    )
}

fn openmpi(env: &impl Variables) -> Result<Discovered> {
    let read = Reader { env, launcher: "OpenMPI" };
    let world_size = read.number("OMPI_COMM_WORLD_SIZE")?;
    let local_world_size = read.optional("OMPI_COMM_WORLD_LOCAL_SIZE")?;
    checked(
        "OpenMPI",
        Discovered {
            source: Source::OpenMpi,
            rank: read.number("OMPI_COMM_WORLD_RANK")?,
            world_size,
            local_rank: Some(read.number("OMPI_COMM_WORLD_LOCAL_RANK")?),
            local_world_size,
            master_addr: read.master_addr(local_world_size == Some(world_size))?,
            master_port: read.optional("MASTER_PORT")?.unwrap_or(DEFAULT_MASTER_PORT),
            job_id: openmpi_job(env),
            nccl_socket_interface: None,
        },
    )
}

/// OpenMPI's own number of the job: version 5 has PMIx's, those before one of their own.
fn openmpi_job(env: &impl Variables) -> Option<String> {
    ["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri"]
        .into_iter()
        .find_map(|name| env.get(name).filter(|id| !id.is_empty()))
}

/// The rank and local rank that MPICH's or a PALS launcher's variables give.
pub fn mpich_ranks(env: &impl Variables) -> Result<(u32, u32)> {
    let read = Reader { env, launcher: "MPICH" };
    let rank = read.agreeing(["PMIX_RANK", "PMI_RANK"])?;
    let local_rank = read.agreeing(["PALS_LOCAL_RANKID", "MPI_LOCALRANKID"])?;
    Ok((rank, local_rank))
}

fn mpich(env: &impl Variables) -> Result<Discovered> {
    let read = Reader { env, launcher: "MPICH" };
    let (rank, local_rank) = mpich_ranks(env)?;
    let world_size = match read.optional("PMI_SIZE")? {
        Some(size) => size,
        None => read.number("WORLD_SIZE")?,
    };
    let local_world_size = match read.optional("MPI_LOCALNRANKS")? {
        Some(size) => Some(size),
        None => read.optional("LOCAL_SIZE")?,
    };
    checked(
        "MPICH",
        Discovered {
            source: Source::Mpich,
            rank,
            world_size,
            local_rank: Some(local_rank),
            local_world_size,
            master_addr: read.master_addr(local_world_size == Some(world_size))?,
            master_port: read.optional("MASTER_PORT")?.unwrap_or(DEFAULT_MASTER_PORT),
            job_id: env.get("PMIX_NAMESPACE").or_else(|| env.get("PMI_JOBID")),
            nccl_socket_interface: None,
        },
    )
}

fn slurm(env: &impl Variables) -> Result<Discovered> {
    let read = Reader { env, launcher: "Slurm" };
    let nodes = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"];
    let master_addr = match env.get("MASTER_ADDR").filter(|addr| !addr.is_empty()) {
        Some(addr) => addr,
        None => {
            let list = nodes.into_iter().find_map(|name| env.get(name)).unwrap_or_default();
            first_slurm_host(&list).ok_or_else(|| {
                read.refuse(format!("no first host in the node list {list:?}; set MASTER_ADDR"))
            })?
        }
    };
    let world_size = match read.optional("SLURM_STEP_NUM_TASKS")? {
        Some(size) => size,
        None => read.number("SLURM_NTASKS")?,
    };
    // `4` is one host's, `2(x3),1` those of four.
    let per_node =
        env.get("SLURM_STEP_TASKS_PER_NODE").filter(|text| text.bytes().all(|b| b.is_ascii_digit()));
    let step = read.text("SLURM_STEP_ID")?;
    checked(
        "Slurm",
        Discovered {
            source: Source::Slurm,
            rank: read.number("SLURM_PROCID")?,
            world_size,
            local_rank: Some(read.number("SLURM_LOCALID")?),
            local_world_size: per_node.and_then(|text| text.parse().ok()),
            master_addr,
            master_port: read.optional("MASTER_PORT")?.unwrap_or(DEFAULT_MASTER_PORT),
            job_id: env.get("SLURM_JOB_ID").map(|job| format!("{job}.{step}")),
            nccl_socket_interface: None,
        },
    )
}

/// The first host of a compressed Slurm list: `gpu[007-010,12],login` → `gpu007`.
fn first_slurm_host(list: &str) -> Option<String> {
    let Some((prefix, rest)) = list.split_once('[').filter(|(prefix, _)| !prefix.contains(',')) else {
        return list.split(',').next().map(str::trim).filter(|host| !host.is_empty()).map(str::to_owned);
    };
    let (ranges, after) = rest.split_once(']')?;
    let first = ranges.split(',').next()?.split('-').next()?;
    if first.is_empty() || !first.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let suffix = after.split(',').next().unwrap_or_default();
    let host = format!("{prefix}{first}{suffix}");
    match suffix.contains('[') {
        true => first_slurm_host(&host),
        false => Some(host),
    }
}

fn checked(launcher: &'static str, found: Discovered) -> Result<Discovered> {
    let refuse = |reason: String| Err(Error::Discovery { launcher, reason });
    if found.rank >= found.world_size {
        return refuse(format!("rank {} is not below the world size {}", found.rank, found.world_size));
    }
    if let (Some(rank), Some(size)) = (found.local_rank, found.local_world_size)
        && rank >= size
    {
        return refuse(format!("local rank {rank} is not below the local size {size}"));
    }
    Ok(found)
}

/// Reads variables and blames the right launcher.
struct Reader<'a, V> {
    env: &'a V,
    launcher: &'static str,
}

impl<V: Variables> Reader<'_, V> {
    fn refuse(&self, reason: String) -> Error {
        Error::Discovery { launcher: self.launcher, reason }
    }

    fn text(&self, name: &str) -> Result<String> {
        let value = self.env.get(name).filter(|value| !value.is_empty());
        value.ok_or_else(|| self.refuse(format!("{name} is not set")))
    }

    fn number<T: std::str::FromStr>(&self, name: &str) -> Result<T> {
        let text = self.text(name)?;
        text.trim().parse().map_err(|_| self.refuse(format!("{name}={text:?} is not a number in range")))
    }

    fn optional<T: std::str::FromStr>(&self, name: &str) -> Result<Option<T>> {
        match self.env.get(name) {
            Some(text) if !text.is_empty() => self.number(name).map(Some),
            _ => Ok(None),
        }
    }

    /// The number that several names give; they must agree.
    fn agreeing(&self, names: [&str; 2]) -> Result<u32> {
        match (self.optional(names[0])?, self.optional(names[1])?) {
            (Some(a), Some(b)) if a != b => {
                Err(self.refuse(format!("{}={a} and {}={b} do not match", names[0], names[1])))
            }
            (Some(value), _) | (None, Some(value)) => Ok(value),
            (None, None) => Err(self.refuse(format!("neither {} nor {} is set", names[0], names[1]))),
        }
    }

    fn master_addr(&self, all_ranks_here: bool) -> Result<String> {
        match self.env.get("MASTER_ADDR").filter(|addr| !addr.is_empty()) {
            Some(addr) => Ok(addr),
            None if all_ranks_here => Ok("127.0.0.1".to_owned()),
            None => Err(self.refuse(
                "the ranks lie on several hosts and MASTER_ADDR is not set; \
                 start them with `ferrospeed launch`, or pass the first host's address to every rank"
                    .to_owned(),
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(variables: &[(&str, &str)]) -> Result<Option<Discovered>> {
        discover(&|name: &str| {
            variables.iter().find(|(key, _)| *key == name).map(|(_, value)| value.to_string())
        })
    }

    #[test]
    fn nothing_in_the_environment_is_a_single_process() {
        assert!(find(&[]).unwrap().is_none());
        assert!(find(&[("MASTER_ADDR", "x")]).unwrap().is_none());
    }

    #[test]
    fn half_of_the_explicit_variables_is_an_error_that_names_the_rest() {
        let error = |variables: &[(&str, &str)]| find(variables).unwrap_err().to_string();
        assert_eq!(
            error(&[("RANK", "0")]),
            "RANK/WORLD_SIZE environment: RANK is set, but WORLD_SIZE is missing"
        );
        let several_hosts = error(&[("RANK", "0"), ("WORLD_SIZE", "2")]);
        assert!(several_hosts.contains("MASTER_ADDR is not set"), "{several_hosts}");
        let one_host = find(&[("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")]);
        assert_eq!(one_host.unwrap().unwrap().master_addr, "127.0.0.1");
    }

    #[test]
    fn a_batch_script_of_slurm_is_no_rank() {
        let mut variables = vec![("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8"), ("SLURM_LOCALID", "0")];
        assert!(find(&variables).unwrap().is_none());
        variables.extend([("SLURM_STEP_ID", "1"), ("SLURM_JOB_ID", "7"), ("SLURM_STEP_NODELIST", "a")]);
        assert_eq!(find(&variables).unwrap().unwrap().job_id.as_deref(), Some("7.1"));
    }

    #[test]
    fn slurm_gives_the_first_host_of_its_list() {
        let found = find(&[
            ("SLURM_PROCID", "5"),
            ("SLURM_NTASKS", "8"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_STEP_ID", "0"),
            ("SLURM_JOB_NODELIST", "gpu[007-010,12],login"),
        ])
        .unwrap()
        .unwrap();
        assert_eq!((found.source, found.rank, found.master_addr.as_str()), (Source::Slurm, 5, "gpu007"));
    }

    #[test]
    fn slurm_lists_of_every_form_are_read() {
        for (list, first) in [
            ("a", Some("a")),
            ("a,b[1-2]", Some("a")),
            ("b[1-2],a", Some("b1")),
            ("r[1-2]n[03-04]", Some("r1n03")),
            ("n[3-4]-ib", Some("n3-ib")),
            ("", None),
            ("a[", None),
            ("a[]", None),
        ] {
            assert_eq!(first_slurm_host(list).as_deref(), first, "{list}");
        }
    }

    #[test]
    fn openmpi_on_one_host_needs_no_address_and_on_two_does() {
        let one = [
            ("OMPI_COMM_WORLD_RANK", "1"),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
        ];
        assert_eq!(find(&one).unwrap().unwrap().master_addr, "127.0.0.1");
        let mut two = one;
        two[3].1 = "1";
        two[2].1 = "0";
        assert!(find(&two).unwrap_err().to_string().contains("MASTER_ADDR is not set"));
    }

    #[test]
    fn a_rank_outside_the_world_is_refused() {
        let variables = [
            ("RANK", "2"),
            ("WORLD_SIZE", "2"),
            ("LOCAL_RANK", "0"),
            ("MASTER_ADDR", "m"),
            ("MASTER_PORT", "1"),
        ];
        assert!(find(&variables).is_err());
    }
}
