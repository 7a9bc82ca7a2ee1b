//! Real processes, from the first fork to the last one reaped.
//!
//! Each process leads its own group. The first one that fails decides the outcome: the others get SIGTERM, and
//! SIGKILL when they do not go. A signal to the launcher is forwarded and escalated the same way; a second one
//! ends the patience. An exited leader stays a zombie until its whole group has been swept, so that its number
//! cannot belong to anyone else when the group is killed.
//!
//! Nothing survives: the parent-death signal covers a killed launcher's children, the guardian its
//! grandchildren, and a subreaper sweep those that left their group.

mod guardian;
mod orphans;
mod outcome;
mod output;
mod process;
mod signals;

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

pub use outcome::{Ended, JobOutcome, RankFailure};
pub use process::{OutputMode, ProcessSpec, ShownOutput};

use crate::error::LaunchError;
use crate::node::JOB_TOKEN_VARIABLE;
use guardian::Guardian;
use orphans::Orphanage;
use outcome::OomCounter;
use output::{Output, OutputOptions};
use process::Process;
use signals::{RELAYED, SignalWatch};

/// How long peers of a failed rank may take to go before they are killed.
const FAILURE_GRACE: Duration = Duration::from_secs(2);

/// How often signals and deadlines are looked at while nothing else happens.
const TICK: Duration = Duration::from_millis(50);

/// Whether a supervisor answers for its process's signals.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SignalHandling {
    /// SIGINT, SIGTERM, SIGHUP and SIGUSR2 are forwarded to the ranks; the first three start the countdown to their end.
    Forward,
    /// They keep their meaning.
    LeaveAlone,
}

/// How processes are supervised.
#[derive(Debug, Clone)]
pub struct SupervisorOptions {
    /// The name of this host, for reports.
    pub host: String,
    /// Where each process's output is kept.
    pub log_dir: Option<PathBuf>,
    /// How long ranks may take to go after a forwarded signal before they are killed.
    pub interrupt_grace: Duration,
    /// Whether this process's signals are forwarded.
    pub signals: SignalHandling,
}

/// Starts processes and stays with them.
#[derive(Debug)]
pub struct Supervisor {
    options: SupervisorOptions,
    signals: Option<SignalWatch>,
}

struct Exited {
    index: usize,
    ended: Ended,
}

/// Why the processes are being stopped.
enum Cause {
    Failure { index: usize, ended: Ended },
    Signal(i32),
}

enum Phase {
    Running,
    /// Asked to go; killed at the deadline.
    Stopping {
        cause: Cause,
        kill_at: Instant,
    },
    /// Killed; only their exits are awaited.
    Killed {
        cause: Cause,
    },
}

impl Supervisor {
    /// Prepares supervision; signals are forwarded from now on if the options say so.
    pub fn new(options: SupervisorOptions) -> Result<Self, LaunchError> {
        let signals = match options.signals {
            SignalHandling::Forward => Some(SignalWatch::install()?),
            SignalHandling::LeaveAlone => None,
        };
        Ok(Supervisor { options, signals })
    }

    /// Waits, unless a signal comes first: then says which.
    pub fn pause(&self, duration: Duration) -> Option<i32> {
        let end = Instant::now() + duration;
        loop {
            if let Some(signal) = self.signals.as_ref().and_then(SignalWatch::take)
                && signal != RELAYED as i32
            {
                return Some(signal);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            std::thread::sleep(left.min(TICK));
        }
    }

    /// Runs processes until all are gone.
    pub fn run(&self, specs: &[ProcessSpec]) -> Result<JobOutcome, LaunchError> {
        let oom = OomCounter::start();
        let orphanage = Orphanage::open()?;
        let mut running = Running::start(specs, &self.options, orphanage)?;
        let phase = self.watch(specs, &mut running);
        let agreed_code = running.agreed_code();
        let (tails, logs) = running.finish();
        let cause = match phase {
            Phase::Running => return Ok(JobOutcome::Succeeded),
            Phase::Stopping { cause, .. } | Phase::Killed { cause } => cause,
        };
        Ok(match cause {
            Cause::Signal(signal) => JobOutcome::Interrupted { signal, agreed_code },
            Cause::Failure { index, ended } => JobOutcome::Failed(RankFailure {
                who: specs[index].label.clone(),
                rank: specs[index].rank,
                host: self.options.host.clone(),
                ended,
                oom_kills: oom.kills_since_start(),
                last_lines: tails[index].clone(),
                log: logs[index].clone(),
            }),
        })
    }

    fn watch(&self, specs: &[ProcessSpec], running: &mut Running) -> Phase {
        let mut phase = Phase::Running;
        while running.alive > 0 {
            match running.exits.recv_timeout(TICK) {
                Ok(Exited { index, ended }) => {
                    running.processes[index].ended = Some(ended);
                    running.alive -= 1;
                    if matches!(phase, Phase::Running) && !ended.is_success() {
                        running.signal_alive(|_| libc::SIGTERM);
                        let cause = Cause::Failure { index, ended };
                        phase = Phase::Stopping { cause, kill_at: Instant::now() + FAILURE_GRACE };
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                // Every waiter thread reports before it ends, so this is unreachable while processes live.
                Err(RecvTimeoutError::Disconnected) => break,
            }
            let mut signal = self.signals.as_ref().and_then(SignalWatch::take);
            if signal == Some(RELAYED as i32) {
                running.signal_alive(|_| RELAYED as i32);
                signal = None;
            }
            phase = match (phase, signal) {
                (Phase::Running, Some(signal)) => {
                    running.signal_alive(|index| specs[index].stop_signal.unwrap_or(signal));
                    let kill_at = Instant::now() + self.options.interrupt_grace;
                    Phase::Stopping { cause: Cause::Signal(signal), kill_at }
                }
                (Phase::Stopping { cause, kill_at }, signal)
                    if signal.is_some() || Instant::now() >= kill_at =>
                {
                    running.signal_alive(|_| libc::SIGKILL);
                    Phase::Killed { cause }
                }
                (phase, _) => phase,
            };
        }
        phase
    }
}

/// Started processes. Dropping it kills what is left.
struct Running {
    processes: Vec<Process>,
    outputs: Vec<Output>,
    alive: usize,
    exits: Receiver<Exited>,
    guardian: Guardian,
    orphanage: Orphanage,
    tokens: HashSet<String>,
}

impl Running {
    fn start(
        specs: &[ProcessSpec],
        options: &SupervisorOptions,
        orphanage: Orphanage,
    ) -> Result<Self, LaunchError> {
        let (report, exits) = channel();
        let guardian = Guardian::start(specs.len())?;
        let tokens =
            specs.iter().filter_map(|spec| spec.environment.get(JOB_TOKEN_VARIABLE).cloned()).collect();
        let mut running = Running {
            processes: Vec::new(),
            outputs: Vec::new(),
            alive: 0,
            exits,
            guardian,
            orphanage,
            tokens,
        };
        for (index, spec) in specs.iter().enumerate() {
            running.start_one(index, spec, options, &report)?;
        }
        Ok(running)
    }

    fn start_one(
        &mut self,
        index: usize,
        spec: &ProcessSpec,
        options: &SupervisorOptions,
        report: &Sender<Exited>,
    ) -> Result<(), LaunchError> {
        let log = match (&options.log_dir, &spec.log_name) {
            (Some(folder), Some(name)) => Some(folder.join(name)),
            _ => None,
        };
        let output_options = OutputOptions::open(spec.output.clone(), log)?;
        let mut process = process::spawn(spec, self.guardian.pipe())?;
        let group = process.group();
        let pipes = process.take_pipes();
        self.processes.push(process);
        self.alive += 1;
        let report = report.clone();
        let waiter = move || {
            let ended = process::wait_without_reaping(group);
            // The receiver is gone only when the job is being torn down, and then nobody asks.
            let _ = report.send(Exited { index, ended });
        };
        spawn_thread("rank-waiter", waiter)?;
        self.outputs.push(Output::start(pipes, output_options)?);
        Ok(())
    }

    fn signal_alive(&self, choose: impl Fn(usize) -> i32) {
        for (index, process) in self.processes.iter().enumerate() {
            if process.ended.is_none() {
                process.signal_group(choose(index));
            }
        }
    }

    /// The code that every process exited with, where it is the same one and not 0.
    fn agreed_code(&self) -> Option<u8> {
        let first = self.processes.first()?.ended;
        let alike = self.processes.iter().all(|process| process.ended == first);
        match first {
            Some(Ended::Code(code)) if alike && code != 0 => u8::try_from(code).ok(),
            _ => None,
        }
    }

    /// Sweeps what is left of every group, reaps the leaders, and gives the last lines and log files.
    fn finish(mut self) -> (Vec<Vec<String>>, Vec<Option<PathBuf>>) {
        self.sweep();
        let outputs = std::mem::take(&mut self.outputs);
        outputs.into_iter().map(Output::finish).unzip()
    }

    fn sweep(&mut self) {
        if self.processes.is_empty() {
            return self.guardian.dismiss();
        }
        for process in &self.processes {
            process.signal_group(libc::SIGKILL);
        }
        let groups = self.processes.iter().map(Process::group).collect();
        self.orphanage.sweep(&groups, &self.tokens, self.guardian.pid());
        self.guardian.dismiss();
        self.processes.drain(..).for_each(Process::reap);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.sweep();
    }
}

fn spawn_thread(name: &str, body: impl FnOnce() + Send + 'static) -> Result<(), LaunchError> {
    let spawned = std::thread::Builder::new().name(name.to_owned()).stack_size(256 << 10).spawn(body);
    spawned.map(drop).map_err(|source| LaunchError::System { action: "start a thread", source })
}
