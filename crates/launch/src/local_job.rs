//! A job on this host alone, for programs that start their own ranks.

use std::path::PathBuf;
use std::time::Duration;

use crate::error::LaunchError;
use crate::exports::Environment;
use crate::filter::ActiveSlots;
use crate::node::NodeLaunch;
use crate::options::Interpreter;
use crate::run::{DEFAULT_INTERRUPT_GRACE, RunOptions, run_node};
use crate::supervise::{JobOutcome, OutputMode, SignalHandling};
use crate::surroundings;

/// One program on several ranks of this host.
///
/// Ranks find the usual variables (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR`, `MASTER_PORT`, …) and
/// `FERROSPEED_JOB_TOKEN`, a secret that no other job has.
#[derive(Debug, Clone)]
pub struct LocalJob {
    /// The program.
    pub program: String,
    /// Its arguments.
    pub args: Vec<String>,
    /// How many ranks to start.
    pub ranks: u32,
    /// Variables on top of this process's own.
    pub env: Environment,
    /// Where each rank's output is kept.
    pub log_dir: Option<PathBuf>,
    /// What becomes of the ranks' output, besides their logs.
    pub output: OutputMode,
    /// The port ranks meet on; a free one when absent.
    pub master_port: Option<u16>,
    /// How long ranks may take to go after a forwarded signal.
    pub interrupt_grace: Duration,
    /// Whether this process's signals are forwarded to the ranks.
    pub signals: SignalHandling,
}

impl LocalJob {
    /// A job with the usual choices: prefixed output, no logs, signals forwarded.
    pub fn new<A: Into<String>>(
        program: impl Into<String>,
        args: impl IntoIterator<Item = A>,
        ranks: u32,
    ) -> Self {
        LocalJob {
            program: program.into(),
            args: args.into_iter().map(Into::into).collect(),
            ranks,
            env: Environment::new(),
            log_dir: None,
            output: OutputMode::Prefixed,
            master_port: None,
            interrupt_grace: DEFAULT_INTERRUPT_GRACE,
            signals: SignalHandling::Forward,
        }
    }

    /// Gives each rank its share of the cores, unless somebody has said how many threads there are to be.
    pub fn share_cores(&mut self) {
        if std::env::var_os("FERROSPEED_THREADS").is_none() && std::env::var_os("OMP_NUM_THREADS").is_none() {
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            let threads = (cores / self.ranks.max(1) as usize).max(1);
            self.env.insert("FERROSPEED_THREADS".into(), threads.to_string());
        }
    }

    /// Starts the ranks and waits until all are gone.
    pub fn run(&self) -> Result<JobOutcome, LaunchError> {
        let slots: Vec<u32> = (0..self.ranks.min(crate::hostfile::MAX_SLOTS_PER_HOST + 1)).collect();
        if slots.len() > crate::hostfile::MAX_SLOTS_PER_HOST as usize {
            return Err(LaunchError::Usage(format!("{} ranks are more than a host can hold", self.ranks)));
        }
        let log_dir = self.log_dir.as_ref().map(|folder| folder.display().to_string());
        let node = NodeLaunch {
            world: ActiveSlots::from_iter([("localhost".to_owned(), slots)]),
            node_rank: 0,
            master_addr: "127.0.0.1".to_owned(),
            master_port: self.master_port.map_or_else(surroundings::free_port, Ok)?,
            interpreter: Interpreter::Direct,
            pass_local_rank: false,
            save_pid: None,
            log_dir,
            elastic: None,
            binding: None,
            device_names: None,
            program: self.program.clone(),
            args: self.args.clone(),
        };
        let mut environment = surroundings::environment();
        environment.extend(self.env.clone());
        let options = RunOptions {
            output: self.output,
            interrupt_grace: self.interrupt_grace,
            signals: self.signals.clone(),
        };
        run_node(&node, environment, surroundings::new_job_token()?, &options, |_, _| {})
    }
}
