//! Slurm's `srun`: Slurm places the tasks, so hosts can be chosen but slots of a host cannot.

use super::{Built, Job, words};
use crate::error::LaunchError;
use crate::options::Backend;

pub(super) fn build(job: &Job<'_>) -> Result<Built, LaunchError> {
    job.refuse_node_launcher_options(Backend::Slurm)?;
    let options = job.options;
    if options.include.contains(':') || options.exclude.contains(':') {
        return Err(LaunchError::BackendLimit {
            backend: Backend::Slurm.name(),
            what: "choose slots within a host",
            instead: "name whole hosts, or let Slurm choose with --launcher_args",
        });
    }
    let mut command = words(["srun", "-n"]);
    command.push(job.total_ranks().to_string());
    command.extend(job.backend_args.iter().cloned());
    let mut add = |option: &str, value: String| command.extend([option.to_owned(), value]);
    if !options.include.is_empty() {
        add("--nodelist", options.include.replace('@', ","));
    }
    if !options.exclude.is_empty() {
        add("--exclude", options.exclude.replace('@', ","));
    }
    if let Some(count) = options.num_nodes {
        add("--nodes", count.min.to_string());
    }
    if let Some(ranks) = options.ranks_per_node {
        add("--gpus", ranks.to_string());
    }
    // A comma ends a value in --export, so such a value travels by name from srun's own environment.
    let mut environment = job.environment_with_meeting_point();
    let exports = job.exports.iter().map(|(name, value)| match value.contains(',') {
        true => {
            environment.insert(name.clone(), value.clone());
            name.clone()
        }
        false => format!("{name}={value}"),
    });
    let exported: Vec<String> = std::iter::once("ALL".to_owned()).chain(exports).collect();
    command.push(format!("--export={}", exported.join(",")));
    command.extend(options.program_words(&job.python));
    Ok(Built { command, environment, ..Built::default() })
}
