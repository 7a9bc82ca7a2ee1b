//! `ferrospeed launch [options] -- program args…`.
//!
//! Options have the names that DeepSpeed's launcher gives them. Unlike it, the program is an executable unless
//! `--python` or `--module` says otherwise, and gets no argument that the user did not write.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, ValueEnum};
use ferrospeed_comm::ConnectOptions;
use ferrospeed_command::{Failure, terminal};
use ferrospeed_launch::options::{DEFAULT_HOSTFILE, DEFAULT_MAX_RESTARTS};
use ferrospeed_launch::plan::{Action, LaunchPlan, Surroundings, plan};
use ferrospeed_launch::run::{RunOptions, run_backend, run_node};
use ferrospeed_launch::supervise::{OutputMode, SignalHandling};
use ferrospeed_launch::surroundings::{self, Contact, ThisHost};
use ferrospeed_launch::{Interpreter, JobOutcome, LaunchOptions, RankFailure, node_count, pod, shell};

use super::launch_write::{self, WriteArgs};
use super::{launch_elastic, old_recorders};

#[derive(Debug, Args)]
pub(crate) struct LaunchArgs {
    /// Hosts and their slots, one `NAME slots=COUNT` per line; without the file, this host alone
    #[arg(short = 'H', long, value_name = "FILE", default_value = DEFAULT_HOSTFILE)]
    pub(super) hostfile: String,
    /// Use only these hosts and slots: `HOST[:SLOT,…][@HOST…]`
    #[arg(short, long, value_name = "FILTER", default_value = "", hide_default_value = true)]
    pub(super) include: String,
    /// Use all hosts and slots but these: `HOST[:SLOT,…][@HOST…]`
    #[arg(short, long, value_name = "FILTER", default_value = "", hide_default_value = true)]
    pub(super) exclude: String,
    /// Use the first so many hosts; `MIN:MAX` in an elastic job
    #[arg(long = "num_nodes", alias = "num-nodes", value_name = "COUNT", value_parser = parse_node_count_text, allow_negative_numbers = true)]
    pub(super) num_nodes: Option<String>,
    /// Ranks to start on each host; all its slots when absent
    #[arg(short = 'n', long = "num_gpus", visible_alias = "num_accelerators", aliases = ["num-gpus", "num-accelerators", "ranks"], value_name = "COUNT", allow_negative_numbers = true)]
    pub(super) num_gpus: Option<i64>,
    /// The address where rank 0 listens
    #[arg(
        long = "master_addr",
        alias = "master-addr",
        value_name = "ADDRESS",
        default_value = "",
        hide_default_value = true
    )]
    pub(super) master_addr: String,
    /// The port where rank 0 listens; a free one on a single host, else 29500, when absent
    #[arg(long = "master_port", alias = "master-port", value_name = "PORT")]
    pub(super) master_port: Option<u16>,
    /// What starts ranks on other hosts: pdsh, openmpi, mpich, impi, slurm or mvapich
    #[arg(long, value_name = "NAME", default_value = "pdsh")]
    pub(super) launcher: String,
    /// More words for that launcher, as one string
    #[arg(
        long = "launcher_args",
        alias = "launcher-args",
        value_name = "WORDS",
        default_value = "",
        hide_default_value = true,
        allow_hyphen_values = true
    )]
    pub(super) launcher_args: String,
    /// The program is a Python script
    #[arg(long, conflicts_with_all = ["module", "no_python"])]
    pub(super) python: bool,
    /// The program is a Python module
    #[arg(long)]
    pub(super) module: bool,
    /// The program is an executable: the default
    #[arg(long = "no_python", alias = "no-python")]
    pub(super) no_python: bool,
    /// Give a Python program no `--local_rank=R`
    #[arg(long = "no_local_rank", alias = "no-local-rank")]
    pub(super) no_local_rank: bool,
    /// Give an executable `--local_rank=R` as its first argument
    #[arg(long = "pass_local_rank", alias = "pass-local-rank", conflicts_with = "no_local_rank")]
    pub(super) pass_local_rank: bool,
    /// Do not try the first host over ssh before starting
    #[arg(long = "no_ssh_check", alias = "no-ssh-check")]
    pub(super) no_ssh_check: bool,
    /// The port of the hosts' ssh servers
    #[arg(long = "ssh_port", alias = "ssh-port", value_name = "PORT")]
    pub(super) ssh_port: Option<u16>,
    /// Use the launcher for many hosts even for one
    #[arg(long = "force_multi", alias = "force-multi")]
    pub(super) force_multi: bool,
    /// Write the launcher's process id to TMPDIR/PID.ferrospeed on each host
    #[arg(long = "save_pid", alias = "save-pid")]
    pub(super) save_pid: bool,
    /// Keep each rank's output in a file of this folder
    #[arg(
        long = "enable_each_rank_log",
        visible_alias = "log-dir",
        alias = "log_dir",
        value_name = "FOLDER",
        default_value = "None",
        hide_default_value = true
    )]
    pub(super) enable_each_rank_log: String,
    /// Tuning is not a launcher's work here: refused with the reason
    #[arg(long, value_enum, hide = true)]
    pub(super) autotuning: Option<Autotuning>,
    /// Restart all ranks when one fails
    #[arg(long = "elastic_training", alias = "elastic-training")]
    pub(super) elastic_training: bool,
    /// The fewest hosts of an elastic job: with this or the next, it goes on with those that stay when some leave, and takes in
    /// those that come
    #[arg(
        long = "min_elastic_nodes",
        visible_alias = "min_nodes",
        aliases = ["min-elastic-nodes", "min-nodes"],
        value_name = "COUNT",
        allow_negative_numbers = true
    )]
    pub(super) min_elastic_nodes: Option<i64>,
    /// The most hosts of an elastic job
    #[arg(
        long = "max_elastic_nodes",
        visible_alias = "max_nodes",
        aliases = ["max-elastic-nodes", "max-nodes"],
        value_name = "COUNT",
        allow_negative_numbers = true
    )]
    pub(super) max_elastic_nodes: Option<i64>,
    /// How many restarts an elastic job may use
    #[arg(long = "max_restarts", alias = "max-restarts", value_name = "COUNT", default_value_t = DEFAULT_MAX_RESTARTS)]
    pub(super) max_restarts: u32,
    /// Start no agents: those that are started elsewhere, with `ferrospeed agent`, are the nodes of an elastic job
    #[arg(long = "no_agents", alias = "no-agents")]
    pub(super) no_agents: bool,
    /// Seconds for which an elastic job waits for hosts when there are too few
    #[arg(long = "wait_s", alias = "wait-s", value_name = "SECONDS", default_value_t = 600)]
    pub(super) wait_s: u32,
    /// Seconds after which an elastic job starts the agent of a lost host again; 0: never
    #[arg(long = "retry_s", alias = "retry-s", value_name = "SECONDS", default_value_t = 60)]
    pub(super) retry_s: u32,
    /// The ds_config.json whose batch size says which numbers of ranks an elastic job may have [default: that of the recipe
    /// that the program trains]
    #[arg(long = "elastic_config", alias = "elastic-config", value_name = "FILE")]
    pub(super) elastic_config: Option<PathBuf>,
    /// Give each rank its own share of the cores
    #[arg(long = "bind_cores_to_rank", alias = "bind-cores-to-rank")]
    pub(super) bind_cores_to_rank: bool,
    /// The cores to share out, such as `0,2-4,6`
    #[arg(long = "bind_core_list", alias = "bind-core-list", value_name = "CORES")]
    pub(super) bind_core_list: Option<String>,
    /// Variables for every rank, one `KEY=VALUE` per line
    #[arg(long = "env_file", alias = "env-file", value_name = "FILE")]
    pub(super) env_file: Option<String>,
    /// Do not begin lines of output with their rank
    #[arg(long = "no_prefix", alias = "no-prefix")]
    pub(super) no_prefix: bool,
    /// Seconds that ranks may take to go after SIGINT or SIGTERM
    #[arg(long = "grace_s", alias = "grace-s", value_name = "SECONDS", default_value_t = 30)]
    pub(super) grace_s: u32,
    /// Print the job as a file for who schedules it, and run nothing: slurm (a script for sbatch), k8s, jobset or kubeflow
    /// (manifests)
    #[arg(long, value_name = "slurm|k8s|jobset|kubeflow", num_args = 0..=1, default_missing_value = "")]
    pub(super) write: Option<String>,
    #[command(flatten, next_help_heading = "For --write")]
    pub(super) written: WriteArgs,
    /// Print what would be run, and run nothing
    #[arg(long = "dry_run", visible_alias = "dry-run")]
    pub(super) dry_run: bool,
    /// Print the dry run as JSON
    #[arg(long, requires = "dry_run")]
    pub(super) json: bool,
    /// The program and its arguments
    #[arg(trailing_var_arg = true, required = true, value_name = "PROGRAM")]
    pub(super) program: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Autotuning {
    Tune,
    Run,
}

/// Checks the form of a node count; whether `MIN:MAX` is allowed depends on other options.
fn parse_node_count_text(text: &str) -> Result<String, String> {
    if text != "-1" {
        node_count::parse(text, true).map_err(|error| error.to_string())?;
    }
    Ok(text.to_owned())
}

/// `-1` is how DeepSpeed writes "not given".
fn count(option: &str, value: Option<i64>) -> Result<Option<u32>, Failure> {
    match value {
        None | Some(-1) => Ok(None),
        Some(value) => u32::try_from(value)
            .map(Some)
            .map_err(|_| Failure::Usage(format!("{option} {value} is not a usable count"))),
    }
}

impl LaunchArgs {
    /// What the options mean.
    pub(super) fn to_options(&self) -> Result<LaunchOptions, Failure> {
        if self.no_python && self.module {
            return Err(Failure::Usage(
                "--no_python and --module exclude each other; keep one of them".to_owned(),
            ));
        }
        if self.autotuning.is_some() {
            let text = "--autotuning is not part of `launch`: `ferrospeed plan` says which settings fit";
            return Err(Failure::Usage(text.to_owned()));
        }
        let interpreter = match (self.python, self.module) {
            (_, true) => Interpreter::PythonModule,
            (true, false) => Interpreter::PythonScript,
            (false, false) => Interpreter::Direct,
        };
        let many = !self.launcher.eq_ignore_ascii_case("pdsh");
        if self.pass_local_rank && many {
            let text = "--pass_local_rank needs --launcher pdsh: other launchers start the ranks themselves";
            return Err(Failure::Usage(text.to_owned()));
        }
        let pass_local_rank = match interpreter {
            Interpreter::Direct => self.pass_local_rank,
            _ => !self.no_local_rank,
        };
        let counted = self.num_nodes.as_deref().filter(|text| *text != "-1");
        let Some((program, args)) = self.program.split_first() else {
            return Err(Failure::Usage("no program was given".to_owned()));
        };
        // DeepSpeed drops a `--` between a script and its arguments; to an executable it may mean something.
        let args = match args.split_first() {
            Some((dashes, rest)) if dashes == "--" && interpreter != Interpreter::Direct => rest,
            _ => args,
        };
        Ok(LaunchOptions {
            hostfile: self.hostfile.clone(),
            include: self.include.clone(),
            exclude: self.exclude.clone(),
            num_nodes: counted.map(|text| node_count::parse(text, self.elastic_training)).transpose()?,
            ranks_per_node: count("--num_gpus", self.num_gpus)?,
            min_elastic_nodes: count("--min_elastic_nodes", self.min_elastic_nodes)?,
            max_elastic_nodes: count("--max_elastic_nodes", self.max_elastic_nodes)?,
            master_addr: Some(self.master_addr.clone()).filter(|addr| !addr.is_empty()),
            master_port: self.master_port,
            backend: self.launcher.clone(),
            backend_args: self.launcher_args.clone(),
            interpreter,
            pass_local_rank,
            ssh_check: !self.no_ssh_check,
            force_multi: self.force_multi,
            save_pid: self.save_pid,
            log_dir: Some(self.enable_each_rank_log.clone()).filter(|folder| folder != "None"),
            elastic: self.elastic_training,
            max_restarts: self.max_restarts,
            bind_cores: self.bind_cores_to_rank,
            core_list: self.bind_core_list.clone(),
            ssh_port: self.ssh_port,
            env_file: self.env_file.clone(),
            program: program.clone(),
            args: args.to_vec(),
        })
    }
}

pub(crate) fn run(args: &LaunchArgs) -> Result<ExitCode, Failure> {
    ConnectOptions::check_environment().map_err(|error| Failure::Usage(error.to_string()))?;
    let options = args.to_options()?;
    if let Some(target) = &args.write {
        return launch_write::run(args, &options, target);
    }
    if let Some(place) = pod::place(&surroundings::environment())? {
        return launch_write::be_node(args, &options, &place);
    }
    let contact = if args.dry_run { Contact::Never } else { Contact::Allowed };
    let this_host = ThisHost::new(contact)?;
    if options.elastic && (options.min_elastic_nodes.is_some() || options.max_elastic_nodes.is_some()) {
        return launch_elastic::run(args, &options, &this_host);
    }
    let plan = plan(&options, &this_host)?;
    plan.notes.iter().for_each(|note| terminal::print_note(note));
    if args.dry_run {
        terminal::print_output(&describe(&plan, args.json))?;
        return Ok(ExitCode::SUCCESS);
    }
    let run_options = RunOptions {
        output: if args.no_prefix { OutputMode::Plain } else { OutputMode::Prefixed },
        interrupt_grace: Duration::from_secs(u64::from(args.grace_s)),
        signals: SignalHandling::Forward,
    };
    old_recorders::remove();
    let outcome = match &plan.action {
        Action::Here(node) => {
            let mut environment = this_host.environment();
            environment.retain(|name, _| !plan.environment_removed.contains(name));
            environment.extend(plan.environment_set.clone());
            run_node(node, environment, this_host.job_token(), &run_options, print_restart)?
        }
        Action::Backend(backend) => run_backend(&plan, backend.name(), &this_host.job_token(), &run_options)?,
    };
    Ok(report(&outcome))
}

/// Says how a job ended and gives its exit code.
pub(super) fn report(outcome: &JobOutcome) -> ExitCode {
    match outcome {
        JobOutcome::Succeeded => {}
        JobOutcome::Failed(failure) => terminal::print_error(&failure.to_string()),
        JobOutcome::Interrupted { signal, agreed_code, .. } => {
            let code = agreed_code.map_or(String::new(), |code| format!(" with exit code {code}"));
            let text = format!("interrupted by signal {signal}; every rank has been stopped{code}");
            terminal::print_error(&text);
        }
    }
    ExitCode::from(outcome.exit_code())
}

pub(super) fn print_restart(failure: &RankFailure, restart: u32) {
    terminal::print_note(&format!("{failure}\nrestart {restart} of all ranks"));
}

fn describe(plan: &LaunchPlan, json: bool) -> String {
    if json {
        let document = serde_json::json!({
            "command": plan.command,
            "environment_set": plan.environment_set,
            "environment_removed": plan.environment_removed,
            "token_to": plan.handover.iter().flat_map(|handover| (0..handover.hosts.len()).map(|node| handover.command(node))).collect::<Vec<_>>(),
            "files": plan.files.iter().map(|(path, text)| serde_json::json!({"path": path, "text": text})).collect::<Vec<_>>(),
        });
        return serde_json::to_string_pretty(&document).unwrap_or_default();
    }
    let mut text = String::new();
    for (path, content) in &plan.files {
        text.push_str(&format!("# writes {path}:\n"));
        content.lines().for_each(|line| text.push_str(&format!("#   {line}\n")));
    }
    if let Some(handover) = &plan.handover {
        text.push_str("# hands the job's token by standard input to:\n");
        let commands = (0..handover.hosts.len()).map(|node| shell::join(&handover.command(node)));
        commands.for_each(|command| text.push_str(&format!("#   {command}\n")));
    }
    plan.environment_removed.iter().for_each(|name| text.push_str(&format!("unset {name}\n")));
    let set = plan.environment_set.iter().map(|(name, value)| format!("{name}={}", shell::quote(value)));
    let words: Vec<String> = set.chain([shell::join(&plan.command)]).collect();
    text.push_str(&words.join(" "));
    text
}
