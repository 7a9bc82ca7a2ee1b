//! Real processes, from the first fork to the last one reaped.
//!
//! Each process leads its own group. The first one that fails decides the outcome, but one that a signal killed comes
//! before those that exited a moment earlier: they noticed that it was gone. One that says by its exit code that it only followed
//! another ([`EXIT_AFTER_ANOTHER`]) comes last. The others get SIGTERM, and SIGKILL when they
//! do not go. A signal to the launcher is forwarded and escalated the same way; a second one ends the patience. An exited leader stays a zombie until its whole group has been swept, so that its number
//! cannot belong to anyone else when the group is killed.
//!
//! Where the system lets us, a job has a control group of its own, and nothing in it survives. Elsewhere nothing survives
//! that keeps its environment: the parent-death signal covers a killed launcher's children, the guardian
//! its grandchildren and what left their group, and a subreaper sweep does the same where the launcher lives.

mod cage;
mod guardian;
mod marks;
mod orders;
mod orphans;
mod outcome;
mod output;
mod process;
mod signals;

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

pub use cage::can_cage;
pub use orders::{Order, Orders};
pub use outcome::{EXIT_AFTER_ANOTHER, Ended, JobOutcome, RankFailure};
pub use process::{OutputMode, ProcessSpec, ShownOutput};
pub use signals::is_ignored;

use crate::error::LaunchError;
use cage::Cage;
use guardian::Guardian;
use marks::Mark;
use orphans::Orphanage;
use outcome::OomCounter;
use output::{Output, OutputOptions};
use process::Process;
use signals::{RELAYED, SignalWatch};

/// How long peers of a failed rank may take to go before they are killed.
const FAILURE_GRACE: Duration = Duration::from_secs(2);

/// How long after a failure to wait for news of others. A killed process is seen to be gone by its peers before its end
/// is reported, and they may have exited meanwhile.
const SETTLING: Duration = Duration::from_millis(150);

/// The same where who failed first only followed another: that one may still write down what is wrong with it.
const FOLLOWED: Duration = Duration::from_secs(1);

/// How often signals and deadlines are looked at while nothing else happens.
const TICK: Duration = Duration::from_millis(50);

/// Between two looks there is no more than a moment, unless this process was stopped. Who is, and goes on, says so.
const STOOD_STILL: Duration = Duration::from_secs(2);

/// Whether a supervisor answers for its process's signals.
#[derive(Debug, Clone)]
pub enum SignalHandling {
    /// SIGINT, SIGTERM, SIGHUP and SIGUSR2 are forwarded to the ranks; the first three start the countdown to their end.
    Forward,
    /// The same, where handlers of the program's own have listened so far: what set one of these flags is taken for its signal.
    /// Looked at once the supervisor itself listens, so that none is lost in between.
    ForwardSince(Vec<(i32, Arc<AtomicBool>)>),
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
    /// What other threads ask of the job.
    pub orders: Orders,
}

/// Starts processes and stays with them.
#[derive(Debug)]
pub struct Supervisor {
    options: SupervisorOptions,
    signals: Option<SignalWatch>,
}

enum Event {
    Exited {
        index: usize,
        ended: Ended,
    },
    /// It goes on, but tells that a part of it has failed.
    Complained {
        index: usize,
        ended: Ended,
    },
}

/// Why the processes are being stopped.
enum Cause {
    Failure { index: usize, ended: Ended },
    Signal(i32),
    Order,
}

enum Phase {
    Running,
    /// Some have failed; news of others may be on its way.
    Settling {
        cause: Cause,
        until: Instant,
    },
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
        let signals = match &options.signals {
            SignalHandling::Forward | SignalHandling::ForwardSince(_) => Some(SignalWatch::install()?),
            SignalHandling::LeaveAlone => None,
        };
        if let (Some(watch), SignalHandling::ForwardSince(flags)) = (&signals, &options.signals) {
            let set = flags.iter().filter(|(_, flag)| flag.load(Ordering::SeqCst));
            set.for_each(|(signal, _)| watch.add(*signal));
        }
        Ok(Supervisor { options, signals })
    }

    /// Waits, unless a signal comes first that ends a job: then says which. One that ranks alone understand is lost, for there
    /// are none; kept, it would kill those that come next before they listen.
    pub fn pause(&self, duration: Duration) -> Option<i32> {
        let end = Instant::now() + duration;
        loop {
            if let Some(signal) = self.take_signal()
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

    /// A signal that came since the last call.
    pub(crate) fn take_signal(&self) -> Option<i32> {
        let signal = self.signals.as_ref().and_then(SignalWatch::take)?;
        self.options.orders.hear(signal);
        Some(signal)
    }

    /// Runs processes until all are gone.
    pub fn run(&self, specs: &[ProcessSpec]) -> Result<JobOutcome, LaunchError> {
        let oom = OomCounter::start();
        let orphanage = Orphanage::open()?;
        let mut running = Running::start(specs, &self.options, orphanage)?;
        let phase = self.watch(specs, &mut running);
        let (agreed_code, all_well) = (running.agreed_code(), running.all_well());
        let frozen = running.frozen;
        let (tails, logs) = running.finish();
        let cause = match phase {
            Phase::Running => return Ok(JobOutcome::Succeeded),
            Phase::Settling { cause, .. } | Phase::Stopping { cause, .. } | Phase::Killed { cause } => cause,
        };
        Ok(match cause {
            Cause::Signal(signal) => JobOutcome::Interrupted { signal, agreed_code, all_well },
            Cause::Order => JobOutcome::Interrupted { signal: libc::SIGTERM, agreed_code, all_well },
            Cause::Failure { index, ended } => JobOutcome::Failed(RankFailure {
                who: specs[index].label.clone(),
                rank: specs[index].rank,
                host: self.options.host.clone(),
                ended,
                frozen: frozen.map(|index| specs[index].label.clone()),
                oom_kills: oom.kills_since_start(),
                last_lines: tails[index].clone(),
                log: logs[index].clone(),
            }),
        })
    }

    fn watch(&self, specs: &[ProcessSpec], running: &mut Running) -> Phase {
        let mut phase = Phase::Running;
        let mut looked = Instant::now();
        while running.alive > 0 {
            tell_of_a_stop(looked.elapsed());
            looked = Instant::now();
            match running.events.recv_timeout(TICK) {
                Ok(Event::Exited { index, ended }) => {
                    running.processes[index].ended = Some(ended);
                    running.alive -= 1;
                    if matches!(phase, Phase::Running) && !ended.is_success() {
                        running.find_frozen();
                    }
                    phase = phase.after_failure(index, ended);
                }
                Ok(Event::Complained { index, ended }) => phase = phase.after_failure(index, ended),
                Err(RecvTimeoutError::Timeout) => {}
                // Every waiter thread reports before it ends, so this is unreachable while processes live.
                Err(RecvTimeoutError::Disconnected) => break,
            }
            phase = self.obey(running, phase);
            let mut signal = self.take_signal();
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
                (Phase::Settling { cause, until }, signal) if signal.is_some() || Instant::now() >= until => {
                    running.forget_thawed();
                    running.signal_alive(|_| libc::SIGTERM);
                    Phase::Stopping { cause, kill_at: Instant::now() + FAILURE_GRACE }
                }
                // It asks for what was ordered already.
                (Phase::Stopping { cause: Cause::Order, kill_at }, Some(signal)) => {
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

impl Supervisor {
    /// Does what another thread has ordered, if anything.
    fn obey(&self, running: &Running, phase: Phase) -> Phase {
        let Some(order) = self.options.orders.take() else { return phase };
        let grace = match order {
            Order::Leave => self.options.interrupt_grace,
            Order::End => FAILURE_GRACE,
        };
        match (phase, order) {
            (Phase::Running, _) => {
                running.signal_alive(|_| libc::SIGTERM);
                Phase::Stopping { cause: Cause::Order, kill_at: Instant::now() + grace }
            }
            (Phase::Stopping { cause, kill_at }, Order::End) => {
                Phase::Stopping { cause, kill_at: kill_at.min(Instant::now() + grace) }
            }
            (phase, _) => phase,
        }
    }
}

/// A job that was stopped as a whole goes on without a word of its ranks, for whom no time has passed.
fn tell_of_a_stop(since: Duration) {
    if since >= STOOD_STILL {
        // Who has no standard error any more is told nothing.
        let _ = writeln!(
            std::io::stderr(),
            "note: the launcher stood still for {:.0} s and goes on (SIGSTOP and SIGCONT, Ctrl-Z and fg, a debugger, or a \
             machine without a moment for it); ranks that were not stopped with it may have given up waiting meanwhile",
            since.as_secs_f64()
        );
    }
}

impl Phase {
    /// What a process's end changes.
    fn after_failure(self, index: usize, ended: Ended) -> Self {
        if ended.is_success() {
            return self;
        }
        let failure = Cause::Failure { index, ended };
        match self {
            Phase::Running => {
                let wait = if ended.is_followers() { FOLLOWED } else { SETTLING };
                Phase::Settling { cause: failure, until: Instant::now() + wait }
            }
            Phase::Settling { cause, until } if cause.yields_to(ended) => {
                Phase::Settling { cause: failure, until }
            }
            // Nobody here has sent SIGKILL yet, and nobody who is told to go says that he failed.
            Phase::Stopping { cause, kill_at }
                if (ended == Ended::Signal(libc::SIGKILL) || ended == Ended::Code(1))
                    && cause.yields_to(ended) =>
            {
                Phase::Stopping { cause: failure, kill_at }
            }
            other => other,
        }
    }
}

impl Cause {
    /// Whether this is an exit that another's end explains: a death by signal, or a failure that was no other's.
    fn yields_to(&self, other: Ended) -> bool {
        match self {
            Cause::Failure { ended, .. } if ended.is_followers() => !other.is_followers(),
            Cause::Failure { ended: Ended::Code(_), .. } => matches!(other, Ended::Signal(_)),
            _ => false,
        }
    }
}

/// Started processes. Dropping it kills what is left.
struct Running {
    processes: Vec<Process>,
    outputs: Vec<Output>,
    alive: usize,
    events: Receiver<Event>,
    guardian: Guardian,
    orphanage: Orphanage,
    mark: Mark,
    /// Where the system has none for us, the rest must do.
    cage: Option<Cage>,
    /// Who was stopped when the first of the others failed.
    frozen: Option<usize>,
}

impl Running {
    fn start(
        specs: &[ProcessSpec],
        options: &SupervisorOptions,
        orphanage: Orphanage,
    ) -> Result<Self, LaunchError> {
        let (report, events) = channel();
        let mark = Mark::new()?;
        let cage = Cage::make(mark.value()).ok();
        let guardian = Guardian::start(specs.len(), &mark, cage.as_ref())?;
        let mut running = Running {
            processes: Vec::new(),
            outputs: Vec::new(),
            alive: 0,
            events,
            guardian,
            orphanage,
            mark,
            cage,
            frozen: None,
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
        report: &Sender<Event>,
    ) -> Result<(), LaunchError> {
        let log = match (&options.log_dir, &spec.log_name) {
            (Some(folder), Some(name)) => Some(folder.join(name)),
            _ => None,
        };
        let output_options = OutputOptions::open(spec.output.clone(), log)?;
        let mut process = process::spawn(spec, &self.mark, self.guardian.pipe(), self.cage.as_ref())?;
        let group = process.group();
        let pipes = process.take_pipes();
        self.processes.push(process);
        self.alive += 1;
        let (reporting, complaining) = (report.clone(), report.clone());
        let waiter = move || {
            let ended = process::wait_without_reaping(group);
            // The receiver is gone only when the job is being torn down, and then nobody asks.
            let _ = reporting.send(Event::Exited { index, ended });
        };
        spawn_thread("rank-waiter", waiter)?;
        let complaint = spec.complaint;
        let on_error_line = move |line: &[u8]| {
            if let Some(ended) = complaint.and_then(|recognise| recognise(&String::from_utf8_lossy(line))) {
                let _ = complaining.send(Event::Complained { index, ended });
            }
        };
        self.outputs.push(Output::start(pipes, output_options, on_error_line)?);
        Ok(())
    }

    /// Looks for a process that is stopped, for which the one that failed first may have waited.
    fn find_frozen(&mut self) {
        let is_frozen = |process: &Process| process.ended.is_none() && process.is_stopped();
        self.frozen = self.processes.iter().position(is_frozen);
    }

    /// Who goes on by now was not what the others waited for.
    fn forget_thawed(&mut self) {
        let is_frozen = |index: &usize| {
            let process = &self.processes[*index];
            process.ended.is_none() && process.is_stopped()
        };
        self.frozen = self.frozen.filter(is_frozen);
    }

    fn signal_alive(&self, choose: impl Fn(usize) -> i32) {
        for (index, process) in self.processes.iter().enumerate() {
            if process.ended.is_none() {
                process.signal_group(choose(index));
            }
        }
    }

    fn all_well(&self) -> bool {
        self.processes.iter().all(|process| process.ended == Some(Ended::Code(0)))
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
        self.cage.iter().for_each(Cage::kill_all);
        let groups = self.processes.iter().map(Process::group).collect();
        self.orphanage.sweep(&groups, &self.mark, self.guardian.pid());
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
