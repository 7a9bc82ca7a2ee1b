//! `ferrospeed launch --write TARGET`: the job as a file for who schedules it; and a pod of such a job, which is one of its nodes.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use ferrospeed_comm::rendezvous;
use ferrospeed_command::{Failure, terminal};
use ferrospeed_launch::filter::ActiveSlots;
use ferrospeed_launch::node::{CoreBinding, JOB_TOKEN_VARIABLE, NodeLaunch};
use ferrospeed_launch::plan::Surroundings;
use ferrospeed_launch::pod::PodPlace;
use ferrospeed_launch::run::{RunOptions, run_node};
use ferrospeed_launch::supervise::{OutputMode, SignalHandling};
use ferrospeed_launch::surroundings::{self, Contact, ThisHost};
use ferrospeed_launch::write::{Request, Target, write};
use ferrospeed_launch::{LaunchOptions, hostfile, shell};

use super::launch::{LaunchArgs, print_restart, report};
use super::old_recorders;

/// Seconds before the end of a job at which it is told, and saves.
const NOTICE_S: u32 = 120;

#[derive(Debug, Args)]
pub(crate) struct WriteArgs {
    /// What the job is called [default: after the program]
    #[arg(long = "job_name", alias = "job-name", value_name = "NAME", requires = "write")]
    job_name: Option<String>,
    /// Slurm: so many jobs one after the other, each going on with the run
    #[arg(long, value_name = "COUNT", requires = "write")]
    array: Option<u32>,
    /// Seconds before its end at which a job is told to save [default: 120]
    #[arg(long = "notice_s", alias = "notice-s", value_name = "SECONDS", requires = "write")]
    notice_s: Option<u32>,
    /// Kubernetes: the image of the containers
    #[arg(long, value_name = "IMAGE", requires = "write")]
    image: Option<String>,
    /// Kubernetes: a volume claim that all pods mount at /workspace, for data and checkpoints
    #[arg(long, value_name = "CLAIM", requires = "write")]
    claim: Option<String>,
    /// Ranks compute on the processor: no GPUs are asked for
    #[arg(long = "no_gpus", alias = "no-gpus", requires = "write")]
    no_gpus: bool,
}

pub(super) fn run(args: &LaunchArgs, options: &LaunchOptions, target: &str) -> Result<ExitCode, Failure> {
    let target = if target.is_empty() { args.launcher.as_str() } else { target };
    let target = Target::parse(target)?;
    let counted = options.num_nodes.map(|count| count.max.unwrap_or(count.min));
    let nodes = options.max_elastic_nodes.or(counted).unwrap_or(1);
    let ranks_per_node = options.ranks_per_node.ok_or_else(|| {
        Failure::Usage("--write: how many ranks a node has is not known; say it with -n COUNT".to_owned())
    })?;
    let mut program = options.interpreter.prefix("python3");
    program.push(options.program.clone());
    program.extend(options.args.iter().cloned());
    let written = &args.written;
    let request = Request {
        name: written.job_name.clone().unwrap_or_else(|| name_of(&options.program)),
        nodes,
        min_nodes: options.min_elastic_nodes,
        ranks_per_node,
        gpus: !written.no_gpus,
        array: written.array,
        notice_s: written.notice_s.unwrap_or(NOTICE_S),
        image: written.image.clone().unwrap_or_else(|| "ferrospeed:latest".to_owned()),
        claim: written.claim.clone(),
        options: shell::split(&options.backend_args)?,
        token: surroundings::new_job_token()?,
        executable: match target {
            // Nodes of a cluster share a file system, or have the same one; images have a PATH.
            Target::Slurm => ThisHost::new(Contact::Never)?.executable()?,
            Target::Kubernetes | Target::JobSet | Target::Kubeflow => "ferrospeed".to_owned(),
        },
        program,
    };
    terminal::print_output(write(target, &request)?.trim_end())?;
    Ok(ExitCode::SUCCESS)
}

/// A name for schedulers, of a program's.
fn name_of(program: &str) -> String {
    let last = program.rsplit('/').next().unwrap_or_default().to_ascii_lowercase();
    let last = last.split('.').next().unwrap_or_default();
    let plain: String =
        last.chars().map(|letter| if letter.is_ascii_alphanumeric() { letter } else { '-' }).collect();
    let plain = plain.trim_matches(|letter: char| letter == '-' || letter.is_ascii_digit());
    if plain.is_empty() {
        "job".to_owned()
    } else {
        plain.chars().take(40).collect::<String>().trim_end_matches('-').to_owned()
    }
}

/// Runs the ranks of this pod, one node of its job.
pub(super) fn be_node(
    args: &LaunchArgs,
    options: &LaunchOptions,
    place: &PodPlace,
) -> Result<ExitCode, Failure> {
    let PodPlace { nodes, node_rank, ranks, master_addr, master_port } = place;
    let here = || Ok::<u32, Failure>(ThisHost::new(Contact::Never)?.device_count());
    let ranks = match options.ranks_per_node.or(*ranks) {
        Some(ranks) => ranks,
        None => here()?,
    };
    if ranks == 0 || ranks > hostfile::MAX_SLOTS_PER_HOST {
        return Err(Failure::Usage(format!(
            "{ranks} ranks on this node: give a number from 1 to {} with -n, or PET_NPROC_PER_NODE",
            hostfile::MAX_SLOTS_PER_HOST
        )));
    }
    let slots: Vec<u32> = (0..ranks).collect();
    let world: ActiveSlots = (0..*nodes).map(|node| (format!("node-{node}"), slots.clone())).collect();
    let node = NodeLaunch {
        world,
        node_rank: *node_rank as usize,
        master_addr: master_addr.clone(),
        master_port: *master_port,
        interpreter: options.interpreter,
        pass_local_rank: options.pass_local_rank,
        save_pid: None,
        log_dir: options.log_dir.clone(),
        elastic: None,
        binding: options.bind_cores.then(|| CoreBinding { core_list: options.core_list.clone() }),
        device_names: None,
        program: options.program.clone(),
        args: options.args.clone(),
    };
    if args.dry_run {
        let mut words = vec!["ferrospeed".to_owned(), "node-launch".to_owned()];
        words.extend(node.to_arguments(Some(&node_rank.to_string())));
        terminal::print_output(&shell::join(&words))?;
        return Ok(ExitCode::SUCCESS);
    }
    let named = rendezvous::handed_over_token(|name| std::env::var(name).ok());
    let token = match named.map_err(|error| Failure::Usage(error.to_string()))? {
        Some(token) => token,
        None if *nodes == 1 => surroundings::new_job_token()?,
        None => {
            return Err(Failure::Usage(format!(
                "{JOB_TOKEN_VARIABLE} is not set, and the job has {nodes} nodes: give all of them the same one, from a Secret (as `ferrospeed launch --write k8s` does)"
            )));
        }
    };
    let run_options = RunOptions {
        output: if args.no_prefix { OutputMode::Plain } else { OutputMode::Prefixed },
        interrupt_grace: Duration::from_secs(u64::from(args.grace_s)),
        signals: SignalHandling::Forward,
    };
    old_recorders::remove();
    let outcome = run_node(&node, surroundings::environment(), token, &run_options, print_restart)?;
    Ok(report(&outcome))
}
