//! One node's part of a job: from the world to the command and environment of each rank here.
//!
//! Global ranks number the slots host by host in world order; a local rank is the position within its host.

use crate::cores::{self, Binding, Topology};
use crate::error::LaunchError;
use crate::exports::Environment;
use crate::filter::ActiveSlots;
use crate::options::Interpreter;
use crate::supervise::EXIT_AFTER_ANOTHER;
use crate::world_info;

/// The variable that carries the job's token to every rank.
pub const JOB_TOKEN_VARIABLE: &str = "FERROSPEED_JOB_TOKEN";

/// Tells ranks with which exit code to end where another's failure is all that they failed of.
pub const FOLLOWER_VARIABLE: &str = "FERROSPEED_FOLLOWER_EXIT";

/// What a node launcher needs to know.
#[derive(Debug, Clone)]
pub struct NodeLaunch {
    /// Hosts and slots of the whole job.
    pub world: ActiveSlots,
    /// Which of the hosts this is.
    pub node_rank: usize,
    /// Where rank 0 listens.
    pub master_addr: String,
    /// The port it listens on.
    pub master_port: u16,
    /// How the program is started.
    pub interpreter: Interpreter,
    /// Whether the program gets `--local_rank=R` as its first argument.
    pub pass_local_rank: bool,
    /// The front-end's process id, when a pid file is wanted.
    pub save_pid: Option<u32>,
    /// Where each rank's output is kept.
    pub log_dir: Option<String>,
    /// Restart the ranks when one fails.
    pub elastic: Option<Elastic>,
    /// Bind each rank to its share of the cores.
    pub binding: Option<CoreBinding>,
    /// What CUDA calls slot 0, 1, …, where the user named devices by UUID.
    pub device_names: Option<Vec<String>>,
    /// The program.
    pub program: String,
    /// Its arguments.
    pub args: Vec<String>,
}

/// The limits of an elastic job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Elastic {
    /// The fewest nodes, where one was given.
    pub min_nodes: Option<u32>,
    /// The most nodes, where one was given.
    pub max_nodes: Option<u32>,
    /// How many times the ranks are restarted.
    pub max_restarts: u32,
}

/// The cores to share out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CoreBinding {
    /// A core list; all physical cores when absent.
    pub core_list: Option<String>,
}

/// One process to start.
#[derive(Debug, Clone)]
pub struct RankSpec {
    /// Its rank in the world.
    pub rank: u32,
    /// Its rank on this host.
    pub local_rank: u32,
    /// Program and arguments.
    pub command: Vec<String>,
    /// Its whole environment.
    pub environment: Environment,
    /// Its cores and memory.
    pub binding: Option<Binding>,
}

/// The machine that ranks are prepared for.
#[derive(Debug, Clone)]
pub struct Machine {
    /// The environment that ranks inherit.
    pub environment: Environment,
    /// The Python interpreter.
    pub python: String,
    /// The job's token.
    pub job_token: String,
    /// Its cores.
    pub topology: Topology,
    /// How many times the ranks were restarted before.
    pub restart_count: u32,
}

impl NodeLaunch {
    /// The name of this node's host.
    pub fn host(&self) -> Result<&str, LaunchError> {
        Ok(self.this_node()?.0)
    }

    /// The processes of this node, in the order of their ranks.
    pub fn rank_specs(&self, machine: &Machine) -> Result<Vec<RankSpec>, LaunchError> {
        let (_, slots) = self.this_node()?;
        if slots.is_empty() {
            return Err(LaunchError::NothingLeft);
        }
        self.check_elastic_limits()?;
        let first_rank: usize = self.world.values().take(self.node_rank).map(Vec::len).sum();
        let shared = self.shared_environment(machine, slots);
        let bindings = self.bindings(machine, slots.len())?;
        let specs = bindings.into_iter().enumerate().map(|(local_rank, binding)| {
            let rank = first_rank + local_rank;
            let mut environment = shared.clone();
            environment.insert("RANK".to_owned(), rank.to_string());
            environment.insert("LOCAL_RANK".to_owned(), local_rank.to_string());
            if self.elastic.is_some() {
                environment.insert("ROLE_RANK".to_owned(), rank.to_string());
            }
            if let Some(binding) = &binding {
                environment.insert("OMP_NUM_THREADS".to_owned(), binding.cores.len().to_string());
            }
            RankSpec {
                rank: rank as u32,
                local_rank: local_rank as u32,
                command: self.command(&machine.python, local_rank),
                environment,
                binding,
            }
        });
        Ok(specs.collect())
    }

    fn this_node(&self) -> Result<(&str, &[u32]), LaunchError> {
        let node = self.world.get_index(self.node_rank);
        let (host, slots) =
            node.ok_or(LaunchError::NodeRank { node_rank: self.node_rank, nodes: self.world.len() })?;
        Ok((host, slots))
    }

    fn check_elastic_limits(&self) -> Result<(), LaunchError> {
        let Some(elastic) = self.elastic else { return Ok(()) };
        let nodes = self.world.len() as u32;
        let (min, max) = (elastic.min_nodes.unwrap_or(1), elastic.max_nodes.unwrap_or(nodes));
        if min == 0 || max == 0 || min > max {
            return Err(LaunchError::Usage(format!(
                "elastic node limits {min} to {max} are empty; both must be at least 1, the first no larger"
            )));
        }
        if !(min..=max).contains(&nodes) {
            return Err(LaunchError::Usage(format!(
                "the job has {nodes} node(s), outside the elastic limits {min} to {max}"
            )));
        }
        Ok(())
    }

    fn command(&self, python: &str, local_rank: usize) -> Vec<String> {
        let mut words = self.interpreter.prefix(python);
        words.push(self.program.clone());
        // Elastic workers read LOCAL_RANK: their rank may change between restarts, their command line not.
        if self.pass_local_rank && self.elastic.is_none() {
            words.push(format!("--local_rank={local_rank}"));
        }
        words.extend(self.args.iter().cloned());
        words
    }

    fn shared_environment(&self, machine: &Machine, slots: &[u32]) -> Environment {
        let mut environment = machine.environment.clone();
        let world_size: usize = self.world.values().map(Vec::len).sum();
        let mut set = |name: &str, value: String| drop(environment.insert(name.to_owned(), value));
        // An empty value hides every GPU on purpose: keep it so.
        if machine.environment.get("CUDA_VISIBLE_DEVICES").is_none_or(|devices| !devices.is_empty()) {
            set("CUDA_VISIBLE_DEVICES", self.visible_devices(slots));
        }
        set("MASTER_ADDR", self.master_addr.clone());
        set("MASTER_PORT", self.master_port.to_string());
        set("WORLD_SIZE", world_size.to_string());
        set("CROSS_RANK", self.node_rank.to_string());
        set("CROSS_SIZE", self.world.len().to_string());
        set("LOCAL_SIZE", slots.len().to_string());
        set("LOCAL_WORLD_SIZE", slots.len().to_string());
        set(JOB_TOKEN_VARIABLE, machine.job_token.clone());
        set(FOLLOWER_VARIABLE, EXIT_AFTER_ANOTHER.to_string());
        if let Some(elastic) = self.elastic {
            set("GROUP_RANK", self.node_rank.to_string());
            set("GROUP_WORLD_SIZE", self.world.len().to_string());
            set("ROLE_NAME", "trainer".to_owned());
            set("ROLE_WORLD_SIZE", world_size.to_string());
            set("NCCL_ASYNC_ERROR_HANDLING", "1".to_owned());
            set("TORCHELASTIC_RESTART_COUNT", machine.restart_count.to_string());
            set("TORCHELASTIC_MAX_RESTARTS", elastic.max_restarts.to_string());
            let run_id = machine.environment.get("ELASTIC_RUN_ID").cloned();
            set("TORCHELASTIC_RUN_ID", run_id.unwrap_or_else(|| "123456789".to_owned()));
        }
        environment
    }

    fn visible_devices(&self, slots: &[u32]) -> String {
        let name = |&slot: &u32| {
            let named = self.device_names.as_ref().and_then(|names| names.get(slot as usize)).cloned();
            named.unwrap_or_else(|| slot.to_string())
        };
        slots.iter().map(name).collect::<Vec<_>>().join(",")
    }

    fn bindings(&self, machine: &Machine, ranks: usize) -> Result<Vec<Option<Binding>>, LaunchError> {
        let Some(binding) = &self.binding else { return Ok(vec![None; ranks]) };
        if machine.environment.contains_key("KMP_AFFINITY") {
            return Err(LaunchError::KmpAffinity);
        }
        let listed = binding.core_list.as_deref().map(cores::parse_core_list).transpose()?;
        let cores = listed.as_ref().unwrap_or(&machine.topology.cores);
        let bind = |rank| cores::bind(cores, &machine.topology.numa_cores, ranks, rank).map(Some);
        (0..ranks).map(bind).collect()
    }

    /// The arguments that make a node launcher do this.
    ///
    /// `node_rank` is the word for the rank where a backend fills it in (`%n`), or `None` for node 0 alone.
    pub fn to_arguments(&self, node_rank: Option<&str>) -> Vec<String> {
        let mut words = vec![format!("--world_info={}", world_info::encode(&self.world))];
        let mut push = |word: String| words.push(word);
        if let Some(node_rank) = node_rank {
            push(format!("--node_rank={node_rank}"));
        }
        push(format!("--master_addr={}", self.master_addr));
        push(format!("--master_port={}", self.master_port));
        match self.interpreter {
            Interpreter::Direct => push("--no_python".to_owned()),
            Interpreter::PythonModule => push("--module".to_owned()),
            Interpreter::PythonScript => {}
        }
        if !self.pass_local_rank {
            push("--no_local_rank".to_owned());
        }
        if let Some(pid) = self.save_pid {
            push("--save_pid".to_owned());
            push(pid.to_string());
        }
        match (&self.log_dir, node_rank) {
            (Some(folder), _) => push(format!("--enable_each_rank_log={folder}")),
            (None, None) => push("--enable_each_rank_log=None".to_owned()),
            (None, Some(_)) => {}
        }
        if let Some(elastic) = self.elastic {
            let number = |limit: Option<u32>| limit.map_or(-1, i64::from);
            push("--enable_elastic_training".to_owned());
            push(format!("--max_elastic_nodes={}", number(elastic.max_nodes)));
            push(format!("--min_elastic_nodes={}", number(elastic.min_nodes)));
            if elastic.max_restarts != crate::options::DEFAULT_MAX_RESTARTS {
                push(format!("--max_restarts={}", elastic.max_restarts));
            }
        }
        if let Some(binding) = &self.binding {
            push("--bind_cores_to_rank".to_owned());
            if let Some(list) = &binding.core_list {
                push(format!("--bind_core_list={list}"));
            }
        }
        if let Some(names) = &self.device_names {
            push(format!("--device_names={}", names.join(",")));
        }
        push(self.program.clone());
        words.extend(self.args.iter().cloned());
        words
    }
}

/// The two variables that Azure's DLTS leaves in a file of its own, where there is one.
pub fn dlts_variables(pod_env: &str) -> Environment {
    let wanted = ["FC_TASKROLE_NAME", "FC_TASK_INDEX"];
    let assignments = pod_env.lines().filter_map(|line| {
        let line = line.trim();
        let (name, value) = line.strip_prefix("export ").unwrap_or(line).split_once('=')?;
        Some((name.trim(), value.trim().trim_matches(['"', '\''])))
    });
    let wanted = assignments.filter(|(name, _)| wanted.contains(name));
    wanted.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}
