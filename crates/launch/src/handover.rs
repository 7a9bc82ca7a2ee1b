//! The job's token on its way to other hosts: by the standard input of ssh, one call per host.
//!
//! Command lines can be read by everybody on a host, on both ends. Nothing secret stands on one.

use std::io::Write;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::error::LaunchError;

/// How long all hosts together may take.
const LIMIT: Duration = Duration::from_secs(60);
/// Hosts that are called at a time.
const AT_ONCE: usize = 64;

/// Who gets the token, and how.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Handover {
    /// The hosts, in the order of their node ranks.
    pub hosts: Vec<String>,
    /// Options of ssh.
    pub ssh_options: Vec<String>,
    /// The command that takes the token from its standard input, without the node's rank.
    pub receiver: String,
}

impl Handover {
    /// Gives the token to every host.
    pub(crate) fn deliver(&self, token: &str) -> Result<(), LaunchError> {
        let end = Instant::now() + LIMIT;
        let node_ranks: Vec<usize> = (0..self.hosts.len()).collect();
        for some in node_ranks.chunks(AT_ONCE) {
            let calls: Vec<_> = some.iter().map(|&node| (node, call(&self.command(node), token))).collect();
            for (node, call) in calls {
                let host = &self.hosts[node];
                let refuse = |reason: String| LaunchError::SshFailed { host: host.clone(), reason };
                finish(call.map_err(|error| refuse(error.to_string()))?, end).map_err(refuse)?;
            }
        }
        Ok(())
    }

    /// The command that brings the token to a node.
    pub fn command(&self, node_rank: usize) -> Vec<String> {
        let mut words = vec!["ssh".to_owned()];
        words.extend(self.ssh_options.iter().cloned());
        words.extend(self.hosts.get(node_rank).cloned());
        words.push(format!("{} --node_rank={node_rank}", self.receiver));
        words
    }
}

fn call(words: &[String], token: &str) -> std::io::Result<Child> {
    let mut ssh = Command::new(&words[0]);
    ssh.args(["-o", "ConnectTimeout=15", "-o", "BatchMode=yes"]).args(&words[1..]);
    ssh.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = ssh.spawn()?;
    if let Some(mut input) = child.stdin.take() {
        // A host that does not listen says why when it is waited for; a pipe holds more than a token.
        let _ = input.write_all(format!("{token}\n").as_bytes());
    }
    Ok(child)
}

/// Waits for one call; the reason where it failed.
fn finish(mut call: Child, end: Instant) -> Result<(), String> {
    let status = loop {
        match call.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if Instant::now() < end => std::thread::sleep(Duration::from_millis(5)),
            Ok(None) => {
                let _ = call.kill();
                let _ = call.wait();
                return Err("the job's token could not be handed over in time".to_owned());
            }
            Err(error) => return Err(error.to_string()),
        }
    };
    if status.success() {
        return Ok(());
    }
    let mut said = String::new();
    if let Some(pipe) = call.stderr.take() {
        let _ = std::io::Read::read_to_string(&mut std::io::Read::take(pipe, 4096), &mut said);
    }
    let last = said.lines().last().unwrap_or("it said nothing").trim();
    Err(format!("the job's token could not be handed over: {last} ({status})"))
}
