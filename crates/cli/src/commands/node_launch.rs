//! `ferrospeed node-launch`: the part of a launch that runs once on each host.
//!
//! Its options are those of DeepSpeed's node launcher, defaults included (a Python script that gets
//! `--local_rank`), so that a recorded command line means the same here.

use std::process::ExitCode;

use clap::Args;
use ferrospeed_comm::rendezvous;
use ferrospeed_command::Failure;
use ferrospeed_launch::node::{CoreBinding, Elastic, JOB_TOKEN_VARIABLE, NodeLaunch};
use ferrospeed_launch::options::{DEFAULT_MASTER_PORT, DEFAULT_MAX_RESTARTS};
use ferrospeed_launch::run::{RunOptions, run_node};
use ferrospeed_launch::{Interpreter, surroundings, world_info};

use super::launch::{print_restart, report};
use super::{old_recorders, take_token};

#[derive(Debug, Args)]
pub(crate) struct NodeLaunchArgs {
    /// Hosts and slots of the whole job
    #[arg(long = "world_info")]
    world_info: String,
    /// The job's name: under it `take-token` has left the token
    #[arg(long = "job_id")]
    job_id: Option<String>,
    /// Which host this is
    #[arg(long = "node_rank", default_value_t = 0)]
    node_rank: usize,
    /// The address where rank 0 listens
    #[arg(long = "master_addr", default_value = "127.0.0.1")]
    master_addr: String,
    /// The port where rank 0 listens
    #[arg(long = "master_port", default_value_t = DEFAULT_MASTER_PORT)]
    master_port: u16,
    /// The program is a Python module
    #[arg(long)]
    module: bool,
    /// The program is an executable
    #[arg(long = "no_python")]
    no_python: bool,
    /// Restart the ranks when one fails
    #[arg(long = "enable_elastic_training")]
    enable_elastic_training: bool,
    /// The fewest hosts of an elastic job
    #[arg(long = "min_elastic_nodes", default_value_t = -1, allow_negative_numbers = true)]
    min_elastic_nodes: i64,
    /// The most hosts of an elastic job
    #[arg(long = "max_elastic_nodes", default_value_t = -1, allow_negative_numbers = true)]
    max_elastic_nodes: i64,
    /// How many restarts an elastic job may use
    #[arg(long = "max_restarts", default_value_t = DEFAULT_MAX_RESTARTS)]
    max_restarts: u32,
    /// Give the program no `--local_rank=R`
    #[arg(long = "no_local_rank")]
    no_local_rank: bool,
    /// The front-end's process id, to write a pid file; 0 for none
    #[arg(long = "save_pid", default_value_t = 0)]
    save_pid: u32,
    /// Keep each rank's output in a file of this folder
    #[arg(long = "enable_each_rank_log", default_value = "None")]
    enable_each_rank_log: String,
    /// Give each rank its own share of the cores
    #[arg(long = "bind_cores_to_rank")]
    bind_cores_to_rank: bool,
    /// The cores to share out
    #[arg(long = "bind_core_list")]
    bind_core_list: Option<String>,
    /// What CUDA calls slot 0, 1, …
    #[arg(long = "device_names", value_delimiter = ',')]
    device_names: Option<Vec<String>>,
    /// The program and its arguments
    #[arg(trailing_var_arg = true, required = true)]
    program: Vec<String>,
}

impl NodeLaunchArgs {
    /// What the options mean.
    pub(super) fn to_node_launch(&self) -> Result<NodeLaunch, Failure> {
        let interpreter = match (self.module, self.no_python) {
            (true, true) => {
                let text = "--no_python and --module exclude each other; keep one of them";
                return Err(Failure::Usage(text.to_owned()));
            }
            (true, false) => Interpreter::PythonModule,
            (false, true) => Interpreter::Direct,
            (false, false) => Interpreter::PythonScript,
        };
        let Some((program, args)) = self.program.split_first() else {
            return Err(Failure::Usage("no program was given".to_owned()));
        };
        // `-1` is how DeepSpeed writes "not given"; anything else that is not a count is refused as 0 is.
        let limit = |count: i64| (count != -1).then(|| u32::try_from(count).unwrap_or(0));
        Ok(NodeLaunch {
            world: world_info::decode(&self.world_info)?,
            node_rank: self.node_rank,
            master_addr: self.master_addr.clone(),
            master_port: self.master_port,
            interpreter,
            pass_local_rank: !self.no_local_rank,
            save_pid: Some(self.save_pid).filter(|&pid| pid != 0),
            log_dir: Some(self.enable_each_rank_log.clone()).filter(|folder| folder != "None"),
            elastic: self.enable_elastic_training.then(|| Elastic {
                min_nodes: limit(self.min_elastic_nodes),
                max_nodes: limit(self.max_elastic_nodes),
                max_restarts: self.max_restarts,
            }),
            binding: self.bind_cores_to_rank.then(|| CoreBinding { core_list: self.bind_core_list.clone() }),
            device_names: self.device_names.clone(),
            program: program.clone(),
            args: args.to_vec(),
        })
    }
}

pub(crate) fn run(args: &NodeLaunchArgs) -> Result<ExitCode, Failure> {
    let node = args.to_node_launch()?;
    let environment = surroundings::environment();
    let handed_over = match &args.job_id {
        Some(job_id) => take_token::redeem(job_id, args.node_rank)?,
        None => None,
    };
    let named = || rendezvous::handed_over_token(|name| environment.get(name).cloned());
    let job_token = match handed_over {
        Some(token) => Some(token),
        None => named().map_err(|error| Failure::Usage(error.to_string()))?,
    };
    let job_token = match job_token {
        Some(token) => token,
        None if node.world.len() == 1 => surroundings::new_job_token()?,
        None => {
            return Err(Failure::Usage(format!(
                "{JOB_TOKEN_VARIABLE} is not set: start jobs on several hosts with `ferrospeed launch`, \
                 over ssh, or name a file with the token that every host sees by {JOB_TOKEN_VARIABLE}_FILE"
            )));
        }
    };
    old_recorders::remove();
    let outcome = run_node(&node, environment, job_token, &RunOptions::default(), print_restart)?;
    Ok(report(&outcome))
}
