//! What a user asks of a launch, before anything is looked up.

use crate::error::LaunchError;
use crate::node_count::NodeCount;

/// The port ranks meet on when more than one host takes part and none was named.
pub const DEFAULT_MASTER_PORT: u16 = 29_500;

/// Where a hostfile lies unless another place is named.
pub const DEFAULT_HOSTFILE: &str = "/job/hostfile";

/// How many times an elastic job is restarted before it is given up.
pub const DEFAULT_MAX_RESTARTS: u32 = 100;

/// How the program is started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Interpreter {
    /// It is an executable.
    #[default]
    Direct,
    /// It is a Python script.
    PythonScript,
    /// It is a Python module.
    PythonModule,
}

impl Interpreter {
    /// The words before the program.
    pub fn prefix(self, python: &str) -> Vec<String> {
        let words: &[&str] = match self {
            Interpreter::Direct => &[],
            Interpreter::PythonScript => &[python, "-u"],
            Interpreter::PythonModule => &[python, "-u", "-m"],
        };
        words.iter().map(|&word| word.to_owned()).collect()
    }
}

/// What starts node launchers or ranks on other hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backend {
    /// `pdsh` over ssh: one node launcher per host.
    Pdsh,
    /// OpenMPI's `mpirun`.
    OpenMpi,
    /// MPICH's `mpirun`.
    Mpich,
    /// Intel MPI's `mpirun`.
    IntelMpi,
    /// Slurm's `srun`.
    Slurm,
    /// MVAPICH2-GDR's `mpirun`.
    Mvapich,
}

impl Backend {
    /// Parses a `--launcher` value, in any case.
    pub fn parse(name: &str) -> Result<Self, LaunchError> {
        match name.to_ascii_lowercase().as_str() {
            "pdsh" => Ok(Backend::Pdsh),
            "openmpi" => Ok(Backend::OpenMpi),
            "mpich" => Ok(Backend::Mpich),
            "impi" => Ok(Backend::IntelMpi),
            "slurm" => Ok(Backend::Slurm),
            "mvapich" => Ok(Backend::Mvapich),
            _ => Err(LaunchError::UnknownBackend { name: crate::error::shorten(name) }),
        }
    }

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Backend::Pdsh => "pdsh",
            Backend::OpenMpi => "openmpi",
            Backend::Mpich => "mpich",
            Backend::IntelMpi => "impi",
            Backend::Slurm => "slurm",
            Backend::Mvapich => "mvapich",
        }
    }

    /// The program whose presence says that the backend is installed.
    pub fn probe_program(self) -> &'static str {
        match self {
            Backend::Pdsh => "pdsh",
            Backend::OpenMpi => "ompi_info",
            Backend::Mpich | Backend::IntelMpi => "mpirun",
            Backend::Slurm => "sinfo",
            Backend::Mvapich => "mpiname",
        }
    }
}

/// Everything a user can ask of a launch.
#[derive(Debug, Clone)]
pub struct LaunchOptions {
    /// The resource pool; a missing file means this host alone.
    pub hostfile: String,
    /// Which slots take part.
    pub include: String,
    /// Which slots do not.
    pub exclude: String,
    /// Only the first so many hosts.
    pub num_nodes: Option<NodeCount>,
    /// So many ranks on every host.
    pub ranks_per_node: Option<u32>,
    /// The fewest nodes of an elastic job.
    pub min_elastic_nodes: Option<u32>,
    /// The most nodes of an elastic job.
    pub max_elastic_nodes: Option<u32>,
    /// Where rank 0 listens; looked up when absent.
    pub master_addr: Option<String>,
    /// The port it listens on; a free one on a single host, else [`DEFAULT_MASTER_PORT`], when absent.
    pub master_port: Option<u16>,
    /// The backend for many hosts, as written.
    pub backend: String,
    /// Extra words for the backend, as one shell-quoted string.
    pub backend_args: String,
    /// How the program is started.
    pub interpreter: Interpreter,
    /// Whether the program gets `--local_rank=R` as its first argument.
    pub pass_local_rank: bool,
    /// Whether the first host is tried over ssh before anything is started.
    pub ssh_check: bool,
    /// Use the backend even for one host.
    pub force_multi: bool,
    /// Write a pid file.
    pub save_pid: bool,
    /// Where each rank's output is kept.
    pub log_dir: Option<String>,
    /// Restart the ranks when one fails.
    pub elastic: bool,
    /// How many times.
    pub max_restarts: u32,
    /// Bind each rank to its share of the cores.
    pub bind_cores: bool,
    /// The cores to share out; all physical cores when absent.
    pub core_list: Option<String>,
    /// The port of the hosts' ssh servers.
    pub ssh_port: Option<u16>,
    /// A file of variables for every rank, wherever it runs.
    pub env_file: Option<String>,
    /// The program.
    pub program: String,
    /// Its arguments.
    pub args: Vec<String>,
}

impl LaunchOptions {
    /// The options of a plain launch of `program`.
    pub fn new(program: impl Into<String>, args: Vec<String>) -> Self {
        LaunchOptions {
            hostfile: DEFAULT_HOSTFILE.to_owned(),
            include: String::new(),
            exclude: String::new(),
            num_nodes: None,
            ranks_per_node: None,
            min_elastic_nodes: None,
            max_elastic_nodes: None,
            master_addr: None,
            master_port: None,
            backend: "pdsh".to_owned(),
            backend_args: String::new(),
            interpreter: Interpreter::Direct,
            pass_local_rank: false,
            ssh_check: true,
            force_multi: false,
            save_pid: false,
            log_dir: None,
            elastic: false,
            max_restarts: DEFAULT_MAX_RESTARTS,
            bind_cores: false,
            core_list: None,
            ssh_port: None,
            env_file: None,
            program: program.into(),
            args,
        }
    }

    /// The program and its arguments, behind its interpreter.
    pub(crate) fn program_words(&self, python: &str) -> Vec<String> {
        let mut words = self.interpreter.prefix(python);
        words.push(self.program.clone());
        words.extend(self.args.iter().cloned());
        words
    }
}
