//! `ferrospeed launch --elastic_training --min_nodes … --max_nodes …`: a job that goes on when hosts leave and come.
//!
//! Which numbers of ranks can train follows from the batch: of the recipe that the program trains, or of a ds_config.

use std::collections::BTreeSet;
use std::num::NonZeroU64;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use ferrospeed_comm::rendezvous;
use ferrospeed_command::{Failure, terminal};
use ferrospeed_config::{AutoValues, Config};
use ferrospeed_launch::elastic::coordinator::{ElasticJob, JobOptions};
use ferrospeed_launch::elastic::{AllowedRanks, ElasticPlan, Limits, Verdict, plan_agents};
use ferrospeed_launch::options::DEFAULT_MASTER_PORT;
use ferrospeed_launch::plan::Surroundings;
use ferrospeed_launch::surroundings::ThisHost;
use ferrospeed_launch::{LaunchOptions, shell};
use ferrospeed_train::Recipe;

use super::launch::LaunchArgs;
use super::old_recorders;
use super::train::TrainArgs;

pub(super) fn run(
    args: &LaunchArgs,
    options: &LaunchOptions,
    this_host: &ThisHost,
) -> Result<ExitCode, Failure> {
    let mut agent_options = vec![format!("--grace_s={}", args.grace_s)];
    agent_options.extend(args.no_prefix.then(|| "--no_prefix".to_owned()));
    let plan = match args.no_agents {
        true => without_agents(options)?,
        false => plan_agents(options, this_host, &agent_options)?,
    };
    plan.notes.iter().for_each(|note| terminal::print_note(note));
    let slots: usize = plan.hosts.len().max(plan.max_nodes) * largest(&plan);
    let allowed = allowed_ranks(args, options, slots)?;
    if args.dry_run {
        terminal::print_output(&describe(&plan, args.json))?;
        return Ok(ExitCode::SUCCESS);
    }
    // Who is to join later knows a token that was given.
    let given = rendezvous::handed_over_token(|name| std::env::var(name).ok())
        .map_err(|error| Failure::Usage(error.to_string()))?;
    old_recorders::remove();
    let job = ElasticJob::new(JobOptions {
        limits: Limits {
            min_nodes: plan.min_nodes,
            max_nodes: plan.max_nodes,
            max_restarts: options.max_restarts,
            wait: Duration::from_secs(u64::from(args.wait_s)),
            listed: plan.hosts.iter().map(|host| host.name.clone()).collect(),
            allowed,
        },
        address: plan.address,
        port: plan.port,
        token: given.unwrap_or_else(|| this_host.job_token()),
        hosts: plan.hosts,
        retry: (args.retry_s > 0).then(|| Duration::from_secs(u64::from(args.retry_s))),
    })?;
    terminal::print_note(&format!("agents meet at {}", job.meeting_point()));
    let verdict = job.run(terminal::print_note)?;
    match &verdict {
        Verdict::Succeeded => {}
        Verdict::Failed { said, .. } => terminal::print_error(said),
        Verdict::Interrupted { signal: Some(signal), code } => {
            terminal::print_error(&format!(
                "interrupted by signal {signal}; the job has ended with exit code {code}"
            ));
        }
        Verdict::Interrupted { signal: None, code } => {
            terminal::print_error(&format!("the ranks saved and left by themselves, with exit code {code}"));
        }
    }
    Ok(ExitCode::from(verdict.exit_code()))
}

/// A job whose agents are started elsewhere.
fn without_agents(options: &LaunchOptions) -> Result<ElasticPlan, Failure> {
    let missing = |option: &str, why: &str| Failure::Usage(format!("--no_agents needs {option}: {why}"));
    let address = options.master_addr.clone();
    let most = options.max_elastic_nodes;
    Ok(ElasticPlan {
        hosts: Vec::new(),
        address: address.ok_or_else(|| missing("--master_addr", "where agents find this host"))?,
        port: options.master_port.unwrap_or(DEFAULT_MASTER_PORT),
        min_nodes: options.min_elastic_nodes.unwrap_or(1).max(1) as usize,
        max_nodes: most.ok_or_else(|| missing("--max_nodes", "nobody lists the hosts"))? as usize,
        environment_removed: Vec::new(),
        notes: Vec::new(),
    })
}

/// What is asked for of nodes that nobody lists.
const MOST_SLOTS: usize = 16;

/// The most slots of a host that is listed: others are taken to be alike.
fn largest(plan: &ElasticPlan) -> usize {
    plan.hosts.iter().map(|host| host.slots).max().unwrap_or(MOST_SLOTS)
}

/// A `ferrospeed train …` command line.
#[derive(Debug, Parser)]
#[command(name = "train")]
struct TrainWords {
    #[command(flatten)]
    args: TrainArgs,
}

/// What the program trains by, where it is this one.
fn recipe_of(options: &LaunchOptions) -> Option<Result<Recipe, Failure>> {
    let is_ours = std::path::Path::new(&options.program).file_name().is_some_and(|name| name == "ferrospeed");
    if !is_ours || options.args.first().is_none_or(|command| command != "train") {
        return None;
    }
    // A command line that means nothing is refused by the ranks, in their words.
    let TrainWords { args } = TrainWords::try_parse_from(&options.args).ok()?;
    let loaded = Recipe::load(args.recipe(), &args.overrides());
    Some(loaded.map_err(|error| Failure::Usage(error.to_string())))
}

/// Which numbers of ranks, of up to `most`, the batch allows. The user is told where the batch is not the same for all of them.
fn allowed_ranks(args: &LaunchArgs, options: &LaunchOptions, most: usize) -> Result<AllowedRanks, Failure> {
    let batches: Vec<Option<u64>> = if let Some(path) = &args.elastic_config {
        let read = Config::from_path(path).map_err(|error| Failure::Usage(error.to_string()))?;
        let of = |ranks| Some(read.resolve(NonZeroU64::new(ranks)?, &AutoValues::new()).ok()?.0);
        (1..=most as u64).map(|ranks| of(ranks).map(|config| config.batch.train_batch_size.get())).collect()
    } else if let Some(recipe) = recipe_of(options) {
        let mut recipe = recipe?;
        let replica = recipe.mesh().ranks_of_a_sample() as u32;
        let mut of = |ranks: u32| {
            recipe.ranks = ranks;
            let config = ranks.is_multiple_of(replica).then(|| recipe.config().ok()).flatten()?;
            Some(config.0.batch.train_batch_size.get())
        };
        (1..=most as u32).map(&mut of).collect()
    } else {
        return Ok(AllowedRanks::any());
    };
    let sizes: BTreeSet<u64> = batches.iter().flatten().copied().collect();
    if sizes.is_empty() {
        let why = format!(
            "no number of up to {most} ranks suits the batch size; give --elastic_config a ds_config.json whose train_batch_size or elasticity section does"
        );
        return Err(Failure::Usage(why));
    }
    if sizes.len() > 1 {
        terminal::print_note(&format!(
            "the batch of a step changes with the number of ranks (from {} to {} samples), and learning rates do not follow it: write train_batch_size, or an elasticity section, to keep it",
            sizes.first().unwrap_or(&0),
            sizes.last().unwrap_or(&0)
        ));
    }
    Ok(AllowedRanks::by(move |ranks| ranks > 0 && batches.get(ranks - 1).is_some_and(Option::is_some)))
}

fn describe(plan: &ElasticPlan, json: bool) -> String {
    if json {
        let agents: Vec<_> = plan
            .hosts
            .iter()
            .map(|host| serde_json::json!({"name": host.name, "command": host.command}))
            .collect();
        let document = serde_json::json!({
            "agents": agents,
            "coordinator": {"address": plan.address, "port": plan.port},
            "min_nodes": plan.min_nodes,
            "max_nodes": plan.max_nodes,
        });
        return serde_json::to_string_pretty(&document).unwrap_or_default();
    }
    let port = if plan.port == 0 { "a free port".to_owned() } else { format!("port {}", plan.port) };
    let mut text = format!(
        "# listens at {}, {port}, for agents of {} to {} nodes; each gets the job's token by standard input\n",
        plan.address, plan.min_nodes, plan.max_nodes
    );
    for host in &plan.hosts {
        text.push_str(&format!("{}\n", shell::join(&host.command)));
    }
    text.trim_end().to_owned()
}
