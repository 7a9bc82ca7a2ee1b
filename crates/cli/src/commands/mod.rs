//! The commands, one module each, and the table that clap reads.

mod adapter_inspect;
mod agent;
mod autotune;
mod chat;
mod checkpoint;
mod checkpoint_diff;
mod checkpoint_verify;
mod checkpoint_weights;
mod checkpoint_which;
mod completions;
mod config;
mod counts;
mod data;
mod data_inspect;
mod doctor;
mod estimate;
mod eval;
mod fetch;
mod from_hub;
mod generate;
pub(crate) mod grammar;
mod init;
mod launch;
mod launch_elastic;
mod launch_write;
mod model;
mod model_convert;
mod model_directory;
mod model_init;
mod model_inspect;
mod model_merge;
mod node_launch;
mod offload_folders;
mod old_recorders;
mod other_files;
mod output_file;
mod outputs;
mod plan;
mod plan_asked;
mod plan_pipeline;
mod plan_search;
mod plan_simulate;
mod profile;
mod rank_env;
mod rates;
mod serve;
mod starter;
mod take_token;
mod trace;
mod train;
mod train_memory;
mod train_room;
mod train_start;
mod train_words;
mod waiting;
mod watch;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use ferrospeed_command::Failure;

/// What `plan` is asked beside its own.
const PLAN_HAS: &str = "Also:
  ferrospeed plan estimate --params 7e9 -n 8   DeepSpeed's ZeRO-2 and ZeRO-3 estimators
  ferrospeed plan pipeline zb-h1 --stages 4    a pipeline's schedule, drawn";

/// Trains and serves models larger than one device or machine, driven by ds_config.json.
#[derive(Debug, Parser)]
#[command(name = "ferrospeed", version, arg_required_else_help = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Train a model by a recipe
    Train(train::TrainArgs),
    /// Show runs as they go, on a page in the browser
    Watch(watch::WatchArgs),
    /// Continue a text with a trained model
    Generate(generate::GenerateArgs),
    /// Measure what a model knows: losses, tasks, and one model against another
    Eval(eval::EvalArgs),
    /// Answer OpenAI's requests with a model, over HTTP
    Serve(Box<serve::ServeArgs>),
    /// Talk with a model in the terminal
    Chat(Box<chat::ChatArgs>),
    /// Look at model directories, convert them, make new ones
    Model(model_directory::ModelDirectoryArgs),
    /// Look at checkpoints, check them, and carry them to and from DeepSpeed and Hugging Face
    Checkpoint(checkpoint::CheckpointArgs),
    /// Start a program on several ranks, on this host or on many, and stay with them
    Launch(Box<launch::LaunchArgs>),
    /// Be a node of an elastic job: call its coordinator, and run the ranks of this host while it goes on
    Agent(Box<agent::AgentArgs>),
    /// Check, show or document a ds_config.json
    Config(config::ConfigArgs),
    /// Make a recipe of another program's file: Axolotl's or accelerate's YAML
    Init(init::InitArgs),
    /// Measure data, for a curriculum, or show what a model sees of it
    Data(data::DataArgs),
    /// Say how many bytes each rank needs where, and whether they fit
    #[command(after_help = PLAN_HAS)]
    Plan(Box<plan::PlanArgs>),
    /// Draw a pipeline's schedule, with its bubble, what stages hold and what they send (plan pipeline)
    #[command(hide = true, override_usage = "ferrospeed plan pipeline [OPTIONS] [SCHEDULE]")]
    PlanPipeline(plan_pipeline::PlanPipelineArgs),
    /// Estimate memory by DeepSpeed's ZeRO formulas (plan estimate)
    #[command(hide = true, override_usage = "ferrospeed plan estimate [OPTIONS]")]
    Estimate(estimate::EstimateArgs),
    /// Count what the modules of a model cost: parameters, operations, time
    Profile(profile::ProfileArgs),
    /// Say what this machine can do, and what is missing
    Doctor(doctor::DoctorArgs),
    /// Measure this machine's kernels, models and collectives
    Bench(ferrospeed_bench::BenchArgs),
    /// Read what the ranks of a failed job left behind
    Trace(trace::TraceArgs),
    /// Write a completion script for a shell
    Completions(completions::CompletionsArgs),
    /// The part of `launch` that runs once on each host
    #[command(name = "node-launch", hide = true)]
    NodeLaunch(Box<node_launch::NodeLaunchArgs>),
    /// Translate an MPI launcher's rank variables, then become the program
    #[command(name = "rank-env", hide = true)]
    RankEnv(rank_env::RankEnvArgs),
    /// Take a job's token from standard input, for the node launcher that will follow
    #[command(name = "take-token", hide = true)]
    TakeToken(take_token::TakeTokenArgs),
}

/// Runs the command that was asked for.
pub(crate) fn run(cli: Cli) -> Result<ExitCode, Failure> {
    check_threads()?;
    // Ranks, and who starts them, have logs of their own.
    let starts_ranks = matches!(cli.command, Command::Launch(_) | Command::Agent(_) | Command::NodeLaunch(_));
    if !starts_ranks && !matches!(cli.command, Command::Train(_)) {
        crate::progress::show_warnings();
    }
    match cli.command {
        Command::Train(args) => train::run(&args),
        Command::Watch(args) => watch::run(&args),
        Command::Generate(args) => generate::run(&args),
        Command::Eval(args) => eval::run(&args),
        Command::Serve(args) => serve::run(&args),
        Command::Chat(args) => chat::run(&args),
        Command::Model(args) => model_directory::run(&args),
        Command::Checkpoint(args) => checkpoint::run(&args),
        Command::Launch(args) => launch::run(&args),
        Command::Agent(args) => agent::run(&args),
        Command::Config(args) => config::run(&args),
        Command::Data(args) => data::run(&args),
        Command::Init(args) => init::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::PlanPipeline(args) => plan_pipeline::run(&args),
        Command::Estimate(args) => estimate::run(&args),
        Command::Profile(args) => profile::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Bench(args) => ferrospeed_bench::run(&args),
        Command::Trace(args) => trace::run(&args),
        Command::Completions(args) => completions::run(&args),
        Command::NodeLaunch(args) => node_launch::run(&args),
        Command::RankEnv(args) => rank_env::run(&args),
        Command::TakeToken(args) => take_token::run(&args),
    }
}

/// Refuses a number of threads that is none: it was to be another than all cores.
fn check_threads() -> Result<(), Failure> {
    const NAME: &str = "FERROSPEED_THREADS";
    let Some(given) = std::env::var_os(NAME) else { return Ok(()) };
    match given.to_str().and_then(|given| given.parse::<usize>().ok()) {
        Some(threads) if threads > 0 => Ok(()),
        _ => Err(Failure::Usage(format!(
            "{NAME}: {given:?} is no number of threads; give 1 or more, or leave it unset for all cores"
        ))),
    }
}

#[cfg(test)]
mod golden_tests;

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_command_table_is_consistent() {
        super::Cli::command().debug_assert();
    }
}
