//! The front-end: from options and surroundings to what will be run, without running it.
//!
//! [`plan`] is a pure function of its two arguments: everything it may ask of the world goes through
//! [`Surroundings`], so that the same code plans a real launch, a dry run and the recorded cases.

use crate::error::LaunchError;
use crate::exports::{self, Environment};
use crate::filter::{self, ActiveSlots};
use crate::handover::Handover;
use crate::hostfile::{self, HostPool};
use crate::node::{CoreBinding, Elastic, NodeLaunch};
use crate::node_count::NodeCount;
use crate::options::{Backend, DEFAULT_HOSTFILE, DEFAULT_MASTER_PORT, Interpreter, LaunchOptions};
use crate::runners::{self, Job};
use crate::supervise::Ended;

const MAX_RANKS: usize = 1 << 20;

/// What planning may ask of the world.
pub trait Surroundings {
    /// The text of the hostfile, if there is one.
    fn hostfile(&self, path: &str) -> Result<Option<String>, LaunchError>;
    /// The environment of the front-end.
    fn environment(&self) -> Environment;
    /// How many accelerators this host has.
    fn device_count(&self) -> u32;
    /// The current folder.
    fn current_dir(&self) -> Result<String, LaunchError>;
    /// The environment files that lie in the usual places: path and text, the later one wins.
    fn env_files(&self) -> Result<Vec<(String, String)>, LaunchError>;
    /// The text of an environment file that was named.
    fn named_env_file(&self, path: &str) -> Result<String, LaunchError>;
    /// Whether a name means this host.
    fn is_this_host(&self, host: &str) -> bool;
    /// Tries a host over ssh.
    fn check_ssh(&self, host: &str, port: Option<u16>) -> Result<(), LaunchError>;
    /// The first address of a host.
    fn address_of(&self, host: &str, port: Option<u16>) -> Result<String, LaunchError>;
    /// Whether a backend can be used here.
    fn backend_installed(&self, backend: Backend) -> bool;
    /// A port that is free on this host.
    fn free_port(&self) -> Result<u16, LaunchError>;
    /// The front-end's process id.
    fn process_id(&self) -> u32;
    /// This executable, which also is the node launcher.
    fn executable(&self) -> Result<String, LaunchError>;
    /// The Python interpreter.
    fn python(&self) -> String;
    /// Where a backend may keep a file for the time of the job.
    fn scratch_file(&self, name: &str) -> String;
    /// The token of this job.
    fn job_token(&self) -> String;
    /// A random name of this job, which is no secret.
    fn job_id(&self) -> String;
}

/// What will be run.
#[derive(Debug, Clone)]
pub struct LaunchPlan {
    /// The command: a node launcher's for this host, else the backend's.
    pub command: Vec<String>,
    /// Variables that are set for it.
    pub environment_set: Environment,
    /// Variables that are taken away from it.
    pub environment_removed: Vec<String>,
    /// Who runs the ranks.
    pub action: Action,
    /// Files to write before, and to remove after.
    pub files: Vec<(String, String)>,
    /// What stops the job on other hosts when the front-end is interrupted.
    pub remote_stop: Option<Vec<String>>,
    /// How hosts get the job's token before the command runs, where it does not carry it.
    pub handover: Option<Handover>,
    /// By which line of its standard error the command tells that a host has failed.
    pub complaint: Option<fn(&str) -> Option<Ended>>,
    /// What the user should know.
    pub notes: Vec<String>,
}

/// Who runs the ranks of a plan.
#[derive(Debug, Clone)]
pub enum Action {
    /// All ranks lie on this host: the front-end supervises them itself.
    Here(Box<NodeLaunch>),
    /// A backend starts them.
    Backend(Backend),
}

/// Plans a launch.
pub fn plan(options: &LaunchOptions, world: &dyn Surroundings) -> Result<LaunchPlan, LaunchError> {
    let backend = Backend::parse(&options.backend)?;
    check_options(options)?;
    let Resolved { pool, active, has_hostfile, device_names, environment, environment_removed, notes } =
        resolve(options, world)?;
    let first_host = active.keys().next().ok_or(LaunchError::NothingLeft)?.clone();
    let here =
        !options.force_multi && active.len() == 1 && (!has_hostfile || world.is_this_host(&first_host));
    if has_hostfile && options.ssh_check && !here {
        world.check_ssh(&first_host, options.ssh_port)?;
    }
    let master_addr = match (&options.master_addr, has_hostfile) {
        (Some(addr), _) => addr.clone(),
        (None, false) => "127.0.0.1".to_owned(),
        (None, true) => world.address_of(&first_host, options.ssh_port)?,
    };
    let master_port = match options.master_port {
        Some(port) => port,
        None if here => world.free_port()?,
        None => DEFAULT_MASTER_PORT,
    };
    let node = node_launch(options, world, active, master_addr, master_port, device_names);
    if here {
        let mut command = vec![world.executable()?, "node-launch".to_owned()];
        command.extend(node.to_arguments(None));
        return Ok(LaunchPlan {
            command,
            environment_set: named_variables(options, world)?,
            environment_removed,
            action: Action::Here(Box::new(node)),
            files: Vec::new(),
            remote_stop: None,
            handover: None,
            complaint: None,
            notes,
        });
    }
    if !world.backend_installed(backend) {
        return Err(LaunchError::BackendMissing {
            backend: backend.name(),
            program: backend.probe_program(),
        });
    }
    let job = gather_job(options, world, environment, &pool, &node)?;
    let built = runners::build(backend, &job)?;
    Ok(LaunchPlan {
        command: built.command,
        environment_set: built.environment,
        environment_removed,
        action: Action::Backend(backend),
        files: built.files,
        remote_stop: built.remote_stop,
        handover: built.handover,
        complaint: built.complaint,
        notes,
    })
}

/// Hosts and slots that are to take part.
pub(crate) struct Resolved {
    /// Every host of the hostfile.
    pub(crate) pool: HostPool,
    /// Those that take part.
    pub(crate) active: ActiveSlots,
    pub(crate) has_hostfile: bool,
    pub(crate) device_names: Option<Vec<String>>,
    pub(crate) environment: Environment,
    pub(crate) environment_removed: Vec<String>,
    pub(crate) notes: Vec<String>,
}

/// Finds them.
pub(crate) fn resolve(options: &LaunchOptions, world: &dyn Surroundings) -> Result<Resolved, LaunchError> {
    let mut notes = Vec::new();
    let mut environment = world.environment();
    let mut environment_removed = Vec::new();

    let listed = world.hostfile(&options.hostfile)?.map(|text| hostfile::parse(&text)).transpose()?;
    if listed.is_none() && options.hostfile != DEFAULT_HOSTFILE {
        notes.push(format!("there is no hostfile at {}: the job runs on this host alone", options.hostfile));
    }
    let visible = match &listed {
        Some(_) => VisibleDevices::Unset,
        None => take_visible_devices(options, &mut environment, &mut environment_removed, &mut notes),
    };
    let filtered = !options.include.is_empty() || !options.exclude.is_empty();
    if filtered && (options.num_nodes.is_some() || options.ranks_per_node.is_some()) {
        return Err(LaunchError::Usage(
            "--num_nodes and --num_gpus cannot be combined with --include or --exclude; keep one pair"
                .to_owned(),
        ));
    }
    let has_hostfile = listed.is_some();
    let (pool, include, device_names) = resolve_pool(options, world, listed, visible)?;
    let active = limit(options, filter::apply(&pool, &include, &options.exclude)?)?;
    Ok(Resolved { pool, active, has_hostfile, device_names, environment, environment_removed, notes })
}

fn check_options(options: &LaunchOptions) -> Result<(), LaunchError> {
    let refuse = |text: &str| Err(LaunchError::Usage(text.to_owned()));
    if options.elastic && options.master_addr.is_none() {
        return refuse(
            "--elastic_training needs --master_addr: restarted ranks must find the same place again",
        );
    }
    // A direct program never gets --local_rank from this command line, so only scripts can ask to lose it.
    if options.elastic && !options.pass_local_rank && options.interpreter != Interpreter::Direct {
        return refuse("--no_local_rank cannot be combined with --elastic_training");
    }
    if options.num_nodes.is_some_and(|count| count.min == 0) || options.ranks_per_node == Some(0) {
        return refuse("--num_nodes and --num_gpus must be at least 1");
    }
    if !options.elastic && (options.min_elastic_nodes.is_some() || options.max_elastic_nodes.is_some()) {
        return refuse("--min_elastic_nodes and --max_elastic_nodes need --elastic_training");
    }
    if options.core_list.is_some() && !options.bind_cores {
        return refuse("--bind_core_list needs --bind_cores_to_rank");
    }
    Ok(())
}

/// What `CUDA_VISIBLE_DEVICES` said.
enum VisibleDevices {
    Unset,
    Numbers(String),
    Names(Vec<String>),
}

/// Takes `CUDA_VISIBLE_DEVICES` out of the environment; the ranks get one of their own.
fn take_visible_devices(
    options: &LaunchOptions,
    environment: &mut Environment,
    removed: &mut Vec<String>,
    notes: &mut Vec<String>,
) -> VisibleDevices {
    const NAME: &str = "CUDA_VISIBLE_DEVICES";
    let Some(value) = environment.get(NAME).filter(|value| !value.is_empty()).cloned() else {
        return VisibleDevices::Unset;
    };
    environment.shift_remove(NAME);
    removed.push(NAME.to_owned());
    let explicit = !options.include.is_empty()
        || !options.exclude.is_empty()
        || options.ranks_per_node.is_some()
        || options.num_nodes.is_some_and(|count| count.min > 1);
    if explicit {
        notes.push(format!("{NAME}={value} is ignored: the options say which slots to use"));
        return VisibleDevices::Unset;
    }
    let names: Vec<String> = value.split(',').map(|name| name.trim().to_owned()).collect();
    match names.iter().all(|name| name.parse::<i64>().is_ok()) {
        true => VisibleDevices::Numbers(value),
        false => VisibleDevices::Names(names),
    }
}

type ResolvedPool = (HostPool, String, Option<Vec<String>>);

fn resolve_pool(
    options: &LaunchOptions,
    world: &dyn Surroundings,
    listed: Option<HostPool>,
    visible: VisibleDevices,
) -> Result<ResolvedPool, LaunchError> {
    if let Some(pool) = listed {
        return Ok((pool, options.include.clone(), None));
    }
    if options.num_nodes.is_some_and(|count| count.min > 1) {
        return Err(LaunchError::Usage(format!(
            "--num_nodes asks for more than one node, but there is no hostfile at {}",
            options.hostfile
        )));
    }
    let localhost = |slots: u32| HostPool::from_iter([("localhost".to_owned(), slots)]);
    match (visible, world.device_count()) {
        (VisibleDevices::Names(names), _) => {
            Ok((localhost(names.len() as u32), options.include.clone(), Some(names)))
        }
        // Ranks without a device train on the CPU: a count is all that is needed.
        (_, 0) => match options.ranks_per_node {
            Some(ranks) => Ok((localhost(ranks), options.include.clone(), None)),
            None => Err(LaunchError::NoDevices),
        },
        (VisibleDevices::Numbers(list), devices) => {
            Ok((localhost(devices), format!("localhost:{list}"), None))
        }
        (VisibleDevices::Unset, devices) => Ok((localhost(devices), options.include.clone(), None)),
    }
}

fn limit(options: &LaunchOptions, mut active: ActiveSlots) -> Result<ActiveSlots, LaunchError> {
    if let Some(NodeCount { min, max }) = options.num_nodes {
        let wanted = max.unwrap_or(min) as usize;
        if active.len() < min as usize {
            return Err(LaunchError::Usage(format!(
                "--num_nodes asks for {min} nodes, but only {} are in the hostfile",
                active.len()
            )));
        }
        active.truncate(wanted);
    }
    if let Some(ranks) = options.ranks_per_node {
        if ranks > hostfile::MAX_SLOTS_PER_HOST {
            return Err(LaunchError::Usage(format!("--num_gpus {ranks} is more than a host can hold")));
        }
        active.values_mut().for_each(|slots| *slots = (0..ranks).collect());
    }
    active.retain(|_, slots| !slots.is_empty());
    let ranks: usize = active.values().map(Vec::len).sum();
    if ranks > MAX_RANKS {
        return Err(LaunchError::Usage(format!(
            "{ranks} ranks are more than the {MAX_RANKS} that can be started"
        )));
    }
    Ok(active)
}

pub(crate) fn node_launch(
    options: &LaunchOptions,
    world: &dyn Surroundings,
    active: ActiveSlots,
    master_addr: String,
    master_port: u16,
    device_names: Option<Vec<String>>,
) -> NodeLaunch {
    let max_from_count = options.num_nodes.and_then(|count| count.max);
    let min_from_count = max_from_count.and(options.num_nodes).map(|count| count.min);
    NodeLaunch {
        world: active,
        node_rank: 0,
        master_addr,
        master_port,
        interpreter: options.interpreter,
        pass_local_rank: options.pass_local_rank,
        save_pid: options.save_pid.then(|| world.process_id()),
        log_dir: options.log_dir.clone(),
        elastic: options.elastic.then_some(Elastic {
            min_nodes: options.min_elastic_nodes.or(min_from_count),
            max_nodes: options.max_elastic_nodes.or(max_from_count),
            max_restarts: options.max_restarts,
        }),
        binding: options.bind_cores.then(|| CoreBinding { core_list: options.core_list.clone() }),
        device_names,
        program: options.program.clone(),
        args: options.args.clone(),
    }
}

/// The variables of `--env_file`.
pub(crate) fn named_variables(
    options: &LaunchOptions,
    world: &dyn Surroundings,
) -> Result<Environment, LaunchError> {
    let mut variables = Environment::new();
    if let Some(path) = &options.env_file {
        exports::add_env_file(&mut variables, path, &world.named_env_file(path)?)?;
    }
    Ok(variables)
}

fn gather_job<'a>(
    options: &'a LaunchOptions,
    world: &dyn Surroundings,
    mut environment: Environment,
    pool: &'a HostPool,
    node: &'a NodeLaunch,
) -> Result<Job<'a>, LaunchError> {
    let current_dir = world.current_dir()?;
    let python_path = match environment.get("PYTHONPATH") {
        Some(path) => format!("{current_dir}:{path}"),
        None => current_dir.clone(),
    };
    environment.insert("PYTHONPATH".to_owned(), python_path.clone());
    let mut exports = exports::travelling(&environment);
    for (path, text) in world.env_files()? {
        exports::add_env_file(&mut exports, &path, &text)?;
    }
    exports.extend(named_variables(options, world)?);
    let mut command_environment = Environment::new();
    command_environment.insert("PYTHONPATH".to_owned(), python_path);
    Ok(Job {
        options,
        pool,
        node,
        exports,
        environment,
        command_environment,
        current_dir,
        executable: world.executable()?,
        python: world.python(),
        job_token: world.job_token(),
        job_id: world.job_id(),
        backend_args: crate::shell::split(&options.backend_args)?,
        scratch_hostfile: world.scratch_file("mvapich_hostfile"),
    })
}
