//! `pdsh` over ssh: one node launcher per host, numbered by pdsh's `%n`.
//!
//! When one host fails or the front-end is interrupted, a second command ends the node launchers of all hosts. That one
//! failed is read from what pdsh says of it: it goes on waiting for the others (`-k` would end that, but Debian's 2.34
//! has no such option).
//!
//! pdsh has nothing but a command line to give to a host, and everybody can read it in `ps`. The token therefore goes
//! ahead, to each host's node launcher by the standard input of an ssh of its own; the command line names the job only.

use super::{Built, Job};
use crate::handover::Handover;
use crate::shell::quote;
use crate::supervise::Ended;

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

    let exported: String =
        job.exports.iter().map(|(name, value)| format!("export {name}={}; ", remote_word(value))).collect();

    let launcher = [remote_word(&job.executable), "node-launch".to_owned()];
    // Only pdsh's own `%n` may reach pdsh unescaped.
    let mut arguments = vec![format!("--job_id={}", job.job_id)];
    arguments.extend(job.node.to_arguments(Some("%n")));
    let arguments = arguments.into_iter().map(|word| match word.as_str() {
        "--node_rank=%n" => word,
        _ => remote_word(&word),
    });

    let mut command = prefix(&["-S"]);
    command.push(exported);
    command.push(format!("cd {};", remote_word(&job.current_dir)));
    command.extend(launcher);
    command.extend(arguments);

    // The brackets keep the pattern from matching the command line that it stands on.
    let pattern = format!("[n]ode-launch --job_id={} ", job.job_id);
    let mut remote_stop = prefix(&["-S"]);
    remote_stop.push(format!("pkill -TERM -f {}", remote_word(&pattern)));
    Built {
        command,
        environment,
        files: Vec::new(),
        remote_stop: Some(remote_stop),
        handover: Some(Handover {
            hosts: job.node.world.keys().cloned().collect(),
            ssh_options: ssh_options(job),
            receiver: [quote(&job.executable), "take-token".to_owned(), format!("--job_id={}", job.job_id)]
                .join(" "),
        }),
        complaint: Some(complaint),
    }
}

/// The options by which pdsh, too, calls ssh.
fn ssh_options(job: &Job<'_>) -> Vec<String> {
    let appended = job.environment.get("PDSH_SSH_ARGS_APPEND").map(String::as_str).unwrap_or_default();
    let mut options: Vec<String> = appended.split_whitespace().map(str::to_owned).collect();
    if let Some(port) = job.options.ssh_port {
        options.extend(["-p".to_owned(), port.to_string()]);
    }
    options
}

/// What pdsh writes when a host's command has failed: `pdsh@HERE: HOST: ssh exited with exit code 3`.
fn complaint(line: &str) -> Option<Ended> {
    let said = line.strip_prefix("pdsh@")?;
    let number = |before: &str| said.rsplit_once(before)?.1.trim().parse().ok();
    match number(" exited with exit code ") {
        Some(0) => None,
        Some(code) => Some(Ended::Code(code)),
        None => number(" killed by signal ").map(Ended::Signal),
    }
}

/// Quotes a word for the remote shell and keeps pdsh from expanding `%h`, `%u` and `%n` in it.
fn remote_word(word: &str) -> String {
    quote(word).replace('%', "%%")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_host_is_read_from_what_pdsh_says() {
        assert_eq!(complaint("pdsh@here: node-b: ssh exited with exit code 21"), Some(Ended::Code(21)));
        assert_eq!(complaint("pdsh@here: node-b: ssh killed by signal 9"), Some(Ended::Signal(9)));
        for line in
            ["node-b: sh exited with exit code 3", "pdsh@here: node-b: exited with exit code 0", "pdsh@"]
        {
            assert_eq!(complaint(line), None, "{line}");
        }
    }
}
