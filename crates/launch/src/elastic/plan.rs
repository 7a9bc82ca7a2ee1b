//! How an elastic job is started: the command of each host's agent, without running any.

use super::hosts::{Host, MEET};
use crate::error::LaunchError;
use crate::exports::{self, Environment};
use crate::node::NodeLaunch;
use crate::options::{Interpreter, LaunchOptions};
use crate::plan::{Surroundings, named_variables, node_launch, resolve};
use crate::shell::{join, quote};

/// What will be run.
#[derive(Debug, Clone)]
pub struct ElasticPlan {
    /// The hosts of the job, with the commands of their agents.
    pub hosts: Vec<Host>,
    /// Where agents call the coordinator.
    pub address: String,
    /// The port; a free one when 0.
    pub port: u16,
    /// The fewest nodes.
    pub min_nodes: usize,
    /// The most nodes.
    pub max_nodes: usize,
    /// Variables that are taken away from agents of this host.
    pub environment_removed: Vec<String>,
    /// What the user should know.
    pub notes: Vec<String>,
}

/// Plans an elastic job; `agent_options` are further words for each agent.
pub fn plan_agents(
    options: &LaunchOptions,
    world: &dyn Surroundings,
    agent_options: &[String],
) -> Result<ElasticPlan, LaunchError> {
    let refuse = |text: &str| Err(LaunchError::Usage(text.to_owned()));
    if !options.backend.eq_ignore_ascii_case("pdsh") {
        return refuse(
            "--min_nodes and --max_nodes start agents over ssh; in a Slurm job or a pod start `ferrospeed agent` on each node (docs/cluster.md)",
        );
    }
    if !options.elastic {
        return refuse("--min_nodes and --max_nodes need --elastic_training");
    }
    let resolved = resolve(options, world)?;
    let nodes = resolved.active.len();
    let min_nodes = options.min_elastic_nodes.unwrap_or(1) as usize;
    let max_nodes = options.max_elastic_nodes.map_or(nodes.max(min_nodes), |most| most as usize);
    if min_nodes == 0 || min_nodes > max_nodes {
        return Err(LaunchError::Usage(format!(
            "--min_nodes {min_nodes} and --max_nodes {max_nodes}: both must be at least 1, the first no larger"
        )));
    }
    let is_here = |host: &str| !resolved.has_hostfile || world.is_this_host(host);
    let all_here = resolved.active.keys().all(|host| is_here(host));
    let address = match &options.master_addr {
        Some(address) => address.clone(),
        None if all_here => "127.0.0.1".to_owned(),
        None => world.address_of("localhost", options.ssh_port)?,
    };
    let node =
        node_launch(options, world, resolved.active.clone(), address.clone(), 0, resolved.device_names);
    let mut exported = exports::travelling(&resolved.environment);
    for (path, text) in world.env_files()? {
        exports::add_env_file(&mut exported, &path, &text)?;
    }
    let named = named_variables(options, world)?;
    exported.extend(named.clone());
    let (executable, folder) = (world.executable()?, world.current_dir()?);
    let hosts = resolved.active.iter().map(|(name, slots)| {
        let words = agent_words(&executable, name, slots, &node, agent_options);
        match is_here(name) {
            true => {
                Host { name: name.clone(), slots: slots.len(), command: words, environment: named.clone() }
            }
            false => {
                let command = over_ssh(options, name, &folder, &exported, &words);
                Host { name: name.clone(), slots: slots.len(), command, environment: Environment::new() }
            }
        }
    });
    Ok(ElasticPlan {
        hosts: hosts.collect(),
        address,
        port: options.master_port.unwrap_or(0),
        min_nodes,
        max_nodes,
        environment_removed: resolved.environment_removed,
        notes: resolved.notes,
    })
}

fn agent_words(
    executable: &str,
    name: &str,
    slots: &[u32],
    node: &NodeLaunch,
    agent_options: &[String],
) -> Vec<String> {
    let numbers: Vec<String> = slots.iter().map(u32::to_string).collect();
    let mut words = vec![
        executable.to_owned(),
        "agent".to_owned(),
        format!("--meet={MEET}"),
        format!("--name={name}"),
        format!("--slots={}", numbers.join(",")),
        "--token_stdin".to_owned(),
    ];
    words.extend(agent_options.iter().cloned());
    match node.interpreter {
        Interpreter::Direct => {}
        Interpreter::PythonScript => words.push("--python".to_owned()),
        Interpreter::PythonModule => words.push("--module".to_owned()),
    }
    words.extend(node.log_dir.iter().map(|folder| format!("--log-dir={folder}")));
    if let Some(binding) = &node.binding {
        words.push("--bind_cores_to_rank".to_owned());
        words.extend(binding.core_list.iter().map(|list| format!("--bind_core_list={list}")));
    }
    words.push("--".to_owned());
    words.push(node.program.clone());
    words.extend(node.args.iter().cloned());
    words
}

/// The same on another host, in the same folder.
fn over_ssh(
    options: &LaunchOptions,
    host: &str,
    folder: &str,
    exported: &Environment,
    words: &[String],
) -> Vec<String> {
    let mut command: Vec<String> =
        ["ssh", "-o", "ConnectTimeout=15", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=5"]
            .map(str::to_owned)
            .into();
    if let Some(port) = options.ssh_port {
        command.extend(["-p".to_owned(), port.to_string()]);
    }
    command.push(host.to_owned());
    let exports: String =
        exported.iter().map(|(name, value)| format!("export {name}={}; ", quote(value))).collect();
    command.push(format!("{exports}cd {} && exec {}", quote(folder), join(words)));
    command
}
