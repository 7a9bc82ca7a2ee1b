//! Starts an agent on each listed host: here as a child, elsewhere through ssh, which gets the job's token by standard input.
//!
//! An agent ends when its coordinator is gone, so nothing is left where the launcher is killed.

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::course::Event;
use crate::exports::Environment;

/// A host on which an agent is started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    /// What the job calls it.
    pub name: String,
    /// How many slots it has.
    pub slots: usize,
    /// The command that starts its agent; `{meet}` stands where the meeting point goes.
    pub command: Vec<String>,
    /// Variables for it, where it is started here.
    pub environment: Environment,
}

/// What stands for the meeting point in a command.
pub(super) const MEET: &str = "{meet}";

/// Hosts and their agents.
pub(super) struct Hosts {
    hosts: Vec<(Host, Agent)>,
    retry: Option<Duration>,
    meeting_point: String,
    token: String,
    report: Box<dyn Fn(Event)>,
}

/// What became of a host's agent.
enum Agent {
    Running(Child),
    /// It failed, or could not be reached, at that time.
    Failed(Instant),
    /// It was told to leave: its node is on its way out.
    Left,
}

impl Hosts {
    pub(super) fn start(
        hosts: Vec<Host>,
        retry: Option<Duration>,
        meeting_point: &str,
        token: &str,
        report: impl Fn(Event) + 'static,
    ) -> Hosts {
        let mut all = Hosts {
            hosts: Vec::with_capacity(hosts.len()),
            retry,
            meeting_point: meeting_point.to_owned(),
            token: token.to_owned(),
            report: Box::new(report),
        };
        for host in hosts {
            let agent = all.start_one(&host);
            all.hosts.push((host, agent));
        }
        all
    }

    /// Notes agents that have ended, and starts those again that have been gone for long enough; `present` are nodes that
    /// are there.
    pub(super) fn look_after(&mut self, present: &[&str]) {
        let mut hosts = std::mem::take(&mut self.hosts);
        for (host, agent) in &mut hosts {
            if let Agent::Running(child) = agent
                && let Ok(Some(status)) = child.try_wait()
            {
                *agent = match status.success() {
                    true => Agent::Left,
                    false => self.failed(host, format!("its agent has ended ({status})")),
                };
            }
            let is_missing = !present.contains(&host.name.as_str());
            if let (Agent::Failed(at), Some(retry)) = (&*agent, self.retry)
                && at.elapsed() >= retry
                && is_missing
            {
                *agent = self.start_one(host);
            }
        }
        self.hosts = hosts;
    }

    fn start_one(&self, host: &Host) -> Agent {
        match spawn(host, &self.meeting_point, &self.token) {
            Ok(child) => Agent::Running(child),
            Err(error) => self.failed(host, format!("its agent could not be started: {error}")),
        }
    }

    fn failed(&self, host: &Host, why: String) -> Agent {
        (self.report)(Event::Unreachable(host.name.clone(), why));
        Agent::Failed(Instant::now())
    }

    /// Waits for agents to go, and ends those that stay.
    pub(super) fn part(&mut self, patience: Duration) {
        let end = Instant::now() + patience;
        for (_, agent) in &mut self.hosts {
            let Agent::Running(child) = agent else { continue };
            while matches!(child.try_wait(), Ok(None)) && Instant::now() < end {
                std::thread::sleep(Duration::from_millis(10));
            }
            // One that is gone already is what is wanted.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn spawn(host: &Host, meeting_point: &str, token: &str) -> std::io::Result<Child> {
    let words: Vec<String> = host.command.iter().map(|word| word.replace(MEET, meeting_point)).collect();
    let (program, arguments) = words.split_first().ok_or(std::io::ErrorKind::InvalidInput)?;
    // A group of its own: Ctrl-C is the coordinator's to hear, who has ranks save.
    let mut command = Command::new(program);
    command.args(arguments).envs(&host.environment).stdin(Stdio::piped()).process_group(0);
    let mut child = command.spawn()?;
    if let Some(mut input) = child.stdin.take() {
        // A host that does not listen says why when it ends; a pipe holds more than a token.
        let _ = input.write_all(format!("{token}\n").as_bytes());
    }
    Ok(child)
}
