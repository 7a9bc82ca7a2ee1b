//! `pdsh` over ssh: one node launcher per host, numbered by pdsh's `%n`.
//!
//! When one host fails or the front-end is interrupted, a second command ends the node launchers of all hosts.

use super::{Built, Job};
use crate::node::JOB_TOKEN_VARIABLE;
use crate::shell::quote;

pub(super) fn build(job: &Job<'_>) -> Built {
    let mut environment = job.command_environment.clone();
    environment.insert("PDSH_RCMD_TYPE".to_owned(), "ssh".to_owned());
    if let Some(port) = job.options.ssh_port {
        let before = job.environment.get("PDSH_SSH_ARGS_APPEND").map(String::as_str).unwrap_or_default();
        environment
            .insert("PDSH_SSH_ARGS_APPEND".to_owned(), format!("{before} -p {port}").trim().to_owned());
    }

    let prefix = |options: &[&str]| -> Vec<String> {
        let fixed =
            ["pdsh"].iter().chain(options).chain(&["-f", "1024", "-w"]).map(|word| (*word).to_owned());
        fixed.chain([job.hosts()]).chain(job.backend_args.iter().cloned()).collect()
    };

    let mut exports = job.exports.clone();
    exports.insert(JOB_TOKEN_VARIABLE.to_owned(), job.job_token.clone());
    let exported: String =
        exports.iter().map(|(name, value)| format!("export {name}={}; ", remote_word(value))).collect();

    let launcher = [remote_word(&job.executable), "node-launch".to_owned()];
    // Only pdsh's own `%n` may reach pdsh unescaped.
    let arguments = job.node.to_arguments(Some("%n"));
    let arguments = arguments.into_iter().map(|word| match word.as_str() {
        "--node_rank=%n" => word,
        _ => remote_word(&word),
    });

    // `-k` ends the wait for the other hosts when one fails; the stop command then ends them.
    let mut command = prefix(&["-S", "-k"]);
    command.push(exported);
    command.push(format!("cd {};", remote_word(&job.current_dir)));
    command.extend(launcher);
    command.extend(arguments);

    // The encoded world and the port tell this job's node launchers from those of any other; the brackets keep
    // the pattern from matching the command line that it stands on.
    let pattern = format!(
        "[n]ode-launch --world_info={} --node_rank=.* --master_port={} ",
        crate::world_info::encode(&job.node.world),
        job.node.master_port
    );
    let mut remote_stop = prefix(&["-S"]);
    remote_stop.push(format!("pkill -TERM -f {}", remote_word(&pattern)));
    Built { command, environment, files: Vec::new(), remote_stop: Some(remote_stop) }
}

/// Quotes a word for the remote shell and keeps pdsh from expanding `%h`, `%u` and `%n` in it.
fn remote_word(word: &str) -> String {
    quote(word).replace('%', "%%")
}
