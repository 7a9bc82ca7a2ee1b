//! `ferrospeed agent --meet HOST:PORT -- program args…`: a node of an elastic job.
//!
//! `ferrospeed launch` starts one on every host of its hostfile; one that is started by hand, by a batch system or in a pod joins
//! a job that is under way.

use std::io::BufRead;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use ferrospeed_comm::rendezvous;
use ferrospeed_command::{Failure, terminal};
use ferrospeed_launch::Interpreter;
use ferrospeed_launch::elastic::agent::AgentEnd;
use ferrospeed_launch::elastic::{AgentOptions, run_agent};
use ferrospeed_launch::filter::ActiveSlots;
use ferrospeed_launch::node::{CoreBinding, JOB_TOKEN_VARIABLE, NodeLaunch};
use ferrospeed_launch::plan::Surroundings;
use ferrospeed_launch::run::RunOptions;
use ferrospeed_launch::supervise::{OutputMode, SignalHandling};
use ferrospeed_launch::surroundings::{self, Contact, ThisHost};

use super::old_recorders;

#[derive(Debug, Args)]
pub(crate) struct AgentArgs {
    /// Where the job's coordinator listens, as `ferrospeed launch` prints it
    #[arg(long, value_name = "HOST:PORT")]
    meet: String,
    /// What the job calls this host [default: its name]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Ranks that this host can have [default: its GPUs]
    #[arg(short = 'n', long = "num_gpus", visible_alias = "num_accelerators", aliases = ["num-gpus", "num-accelerators", "ranks"], value_name = "COUNT", conflicts_with = "slots")]
    count: Option<u32>,
    /// The slots that they take, such as `0,2,3`
    #[arg(long, value_delimiter = ',', value_name = "SLOTS")]
    slots: Option<Vec<u32>>,
    /// Read the job's token from standard input, in place of FERROSPEED_JOB_TOKEN or the file that FERROSPEED_JOB_TOKEN_FILE names
    #[arg(long = "token_stdin", alias = "token-stdin")]
    token_stdin: bool,
    /// Seconds for which to look for the coordinator
    #[arg(long = "wait_s", alias = "wait-s", value_name = "SECONDS", default_value_t = 60)]
    wait_s: u32,
    /// Seconds that ranks may take to save and go when this host or another leaves
    #[arg(long = "grace_s", alias = "grace-s", value_name = "SECONDS", default_value_t = 30)]
    grace_s: u32,
    /// The program is a Python script
    #[arg(long, conflicts_with = "module")]
    python: bool,
    /// The program is a Python module
    #[arg(long)]
    module: bool,
    /// Keep each rank's output in a file of this folder
    #[arg(long = "log-dir", alias = "log_dir", value_name = "FOLDER")]
    log_dir: Option<String>,
    /// Give each rank its own share of the cores
    #[arg(long = "bind_cores_to_rank", alias = "bind-cores-to-rank")]
    bind_cores_to_rank: bool,
    /// The cores to share out, such as `0,2-4,6`
    #[arg(
        long = "bind_core_list",
        alias = "bind-core-list",
        value_name = "CORES",
        requires = "bind_cores_to_rank"
    )]
    bind_core_list: Option<String>,
    /// Do not begin lines of output with their rank
    #[arg(long = "no_prefix", alias = "no-prefix")]
    no_prefix: bool,
    /// The program and its arguments: the same as on the other hosts
    #[arg(trailing_var_arg = true, required = true, value_name = "PROGRAM")]
    program: Vec<String>,
}

impl AgentArgs {
    fn to_options(&self) -> Result<AgentOptions, Failure> {
        let Some((program, args)) = self.program.split_first() else {
            return Err(Failure::Usage("no program was given".to_owned()));
        };
        let node = NodeLaunch {
            world: ActiveSlots::new(),
            node_rank: 0,
            master_addr: String::new(),
            master_port: 0,
            interpreter: match (self.python, self.module) {
                (true, _) => Interpreter::PythonScript,
                (_, true) => Interpreter::PythonModule,
                (false, false) => Interpreter::Direct,
            },
            pass_local_rank: false,
            save_pid: None,
            log_dir: self.log_dir.clone(),
            elastic: None,
            binding: self.bind_cores_to_rank.then(|| CoreBinding { core_list: self.bind_core_list.clone() }),
            device_names: None,
            program: program.clone(),
            args: args.to_vec(),
        };
        Ok(AgentOptions {
            meet: self.meet.clone(),
            name: self.name.clone().unwrap_or_else(surroundings::host_name),
            slots: self.slots()?,
            token: self.token()?,
            patience: Duration::from_secs(u64::from(self.wait_s)),
            node,
            run: RunOptions {
                output: if self.no_prefix { OutputMode::Plain } else { OutputMode::Prefixed },
                interrupt_grace: Duration::from_secs(u64::from(self.grace_s)),
                signals: SignalHandling::Forward,
            },
        })
    }

    fn slots(&self) -> Result<Vec<u32>, Failure> {
        let slots = match (&self.slots, self.count) {
            (Some(slots), _) => slots.clone(),
            (None, Some(count)) => (0..count.min(ferrospeed_launch::hostfile::MAX_SLOTS_PER_HOST)).collect(),
            (None, None) => (0..ThisHost::new(Contact::Never)?.device_count()).collect(),
        };
        if slots.is_empty() {
            let why = "no GPU was found on this host, so how many ranks it can have is not known; say it with -n COUNT";
            return Err(Failure::Usage(why.to_owned()));
        }
        Ok(slots)
    }

    fn token(&self) -> Result<String, Failure> {
        if self.token_stdin {
            let mut token = String::new();
            let read = std::io::stdin().lock().read_line(&mut token);
            read.map_err(|error| Failure::Run(format!("the job's token on standard input: {error}")))?;
            let token = token.trim().to_owned();
            return match token.is_empty() {
                true => Err(Failure::Usage("no token on standard input".to_owned())),
                false => Ok(token),
            };
        }
        let found = rendezvous::handed_over_token(|name| std::env::var(name).ok())
            .map_err(|error| Failure::Usage(error.to_string()))?;
        found.ok_or_else(|| {
            Failure::Usage(format!(
                "{JOB_TOKEN_VARIABLE} is not set: give this host the token of the job that it is to join, by that variable or by a file that {JOB_TOKEN_VARIABLE}_FILE names"
            ))
        })
    }
}

pub(crate) fn run(args: &AgentArgs) -> Result<ExitCode, Failure> {
    let options = args.to_options()?;
    old_recorders::remove();
    match run_agent(&options, surroundings::environment())? {
        AgentEnd::Over(code) => Ok(ExitCode::from(code)),
        AgentEnd::Left(signal) => {
            terminal::print_note(&format!("{} leaves the job, as signal {signal} asked", options.name));
            Ok(ExitCode::SUCCESS)
        }
        AgentEnd::Forsaken(why) => Err(Failure::Run(format!(
            "the coordinator at {} is gone, and the ranks of {} have been stopped: {why}",
            options.meet, options.name
        ))),
    }
}
