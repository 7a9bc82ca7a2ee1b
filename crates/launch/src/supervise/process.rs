//! One supervised process: how it is forked, signalled and waited for.
//!
//! Between fork and exec the child enters the job's control group, joins its own process group, asks to be killed when the launcher dies, and takes its
//! cores and memory policy. All of it is system calls on memory prepared before the fork.

use std::io;
use std::os::fd::RawFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStderr, ChildStdout, Command, Stdio};

use super::cage::{self, Cage};
use super::guardian;
use super::marks::{self, Mark};
use super::outcome::Ended;
use crate::cores::{Binding, MemoryPolicy};
use crate::error::LaunchError;
use crate::exports::Environment;
use crate::node::RankSpec;

/// What becomes of the ranks' output, besides their logs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutputMode {
    /// Every line is passed on behind its rank.
    Prefixed,
    /// Every line is passed on as it is.
    Plain,
    /// Nothing is passed on; the last lines of a failure are still reported.
    Hidden,
}

/// What becomes of one process's output, besides its log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ShownOutput {
    /// Every line is passed on behind this text.
    Prefixed(String),
    /// Nothing is passed on.
    Hidden,
}

/// A process to start.
#[derive(Debug, Clone)]
pub struct ProcessSpec {
    /// What reports call it.
    pub label: String,
    /// Its rank, if it is one.
    pub rank: Option<u32>,
    /// What becomes of its output, besides its log.
    pub output: ShownOutput,
    /// The name of its log file, where logs are kept.
    pub log_name: Option<String>,
    /// Program and arguments.
    pub command: Vec<String>,
    /// Its whole environment.
    pub environment: Environment,
    /// Its cores and memory.
    pub binding: Option<Binding>,
    /// What it gets in place of a forwarded signal.
    pub stop_signal: Option<i32>,
    /// Recognises a line on its standard error by which it tells that a part of it has failed, and how, though it goes on.
    pub complaint: Option<fn(&str) -> Option<Ended>>,
}

impl ProcessSpec {
    /// The process of a rank.
    pub fn of_rank(rank: RankSpec, mode: OutputMode, log_name: Option<String>) -> Self {
        ProcessSpec {
            label: format!("rank {}", rank.rank),
            rank: Some(rank.rank),
            output: match mode {
                OutputMode::Prefixed => ShownOutput::Prefixed(format!("[rank {}] ", rank.rank)),
                OutputMode::Plain => ShownOutput::Prefixed(String::new()),
                OutputMode::Hidden => ShownOutput::Hidden,
            },
            log_name,
            command: rank.command,
            environment: rank.environment,
            binding: rank.binding,
            stop_signal: None,
            complaint: None,
        }
    }
}

/// A started process, the leader of its group.
pub(super) struct Process {
    child: Child,
    pub(super) ended: Option<Ended>,
}

pub(super) fn spawn(
    spec: &ProcessSpec,
    mark: &Mark,
    guardian: Option<RawFd>,
    cage: Option<&Cage>,
) -> Result<Process, LaunchError> {
    let refuse = |source| LaunchError::Spawn {
        rank: spec.rank.unwrap_or(0),
        program: spec.command.first().cloned().unwrap_or_default(),
        source,
    };
    let Some((program, arguments)) = spec.command.split_first() else {
        return Err(refuse(io::Error::from(io::ErrorKind::InvalidInput)));
    };
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    for name in crate::surroundings::environment().keys() {
        if !spec.environment.contains_key(name) {
            command.env_remove(name);
        }
    }
    command.envs(&spec.environment).env(marks::VARIABLE, mark.value()).process_group(0);
    let binding = spec.binding.as_ref().map(PreparedBinding::new);
    let launcher = std::process::id();
    let door = cage.map(Cage::door);
    // SAFETY: the closure runs between fork and exec and only makes system calls (prctl, getppid, signal, write,
    // sched_setaffinity, set_mempolicy) on memory that was prepared before the fork: no allocation, no lock.
    // The cage's door and the guardian's pipe are open until this process ends its job, and close themselves on exec.
    unsafe {
        command.pre_exec(move || {
            die_with_launcher(launcher)?;
            // A launcher may ignore it for itself, and what is ignored stays so across exec.
            libc::signal(libc::SIGXFSZ, libc::SIG_DFL);
            door.into_iter().for_each(cage::enter);
            guardian.map_or(Ok(()), guardian::announce)?;
            binding.as_ref().map_or(Ok(()), PreparedBinding::apply)
        });
    }
    Ok(Process { child: command.spawn().map_err(refuse)?, ended: None })
}

fn die_with_launcher(launcher: u32) -> io::Result<()> {
    // SAFETY: a plain system call with integer arguments.
    if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // The launcher may have died before the request: then no signal will ever come.
    if std::os::unix::process::parent_id() != launcher {
        return Err(io::Error::from_raw_os_error(libc::ESRCH));
    }
    Ok(())
}

/// Waits until a child has exited and leaves it a zombie, so that its number stays its own.
pub(super) fn wait_without_reaping(pid: i32) -> Ended {
    loop {
        // SAFETY: siginfo_t is plain data for which all zeroes is a valid value.
        let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
        let flags = libc::WEXITED | libc::WNOWAIT;
        // SAFETY: `info` outlives the call, which writes at most one siginfo_t to it.
        let result = unsafe { libc::waitid(libc::P_PID, pid as libc::id_t, &mut info, flags) };
        if result == 0 {
            // SAFETY: waitid returned a child's state, for which si_status is the field that is set.
            let status = unsafe { info.si_status() };
            return match info.si_code {
                libc::CLD_EXITED => Ended::Code(status),
                _ => Ended::Signal(status),
            };
        }
        if io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
            return Ended::Unknown;
        }
    }
}

impl Process {
    /// The number of the process and of its group.
    pub(super) fn group(&self) -> i32 {
        self.child.id() as i32
    }

    /// Whether somebody has stopped it.
    pub(super) fn is_stopped(&self) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.group())).unwrap_or_default();
        // The name before the state may be anything.
        stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with(['T', 't']))
    }

    pub(super) fn take_pipes(&mut self) -> (Option<ChildStdout>, Option<ChildStderr>) {
        (self.child.stdout.take(), self.child.stderr.take())
    }

    /// Signals the whole group. A group that is gone is no error.
    pub(super) fn signal_group(&self, signal: i32) {
        // SAFETY: a plain system call with integer arguments; the leader is unreaped, so the group is ours.
        unsafe { libc::kill(-self.group(), signal) };
    }

    pub(super) fn reap(mut self) {
        // The process was killed or has exited: this cannot wait long, and its status is already known.
        let _ = self.child.wait();
    }
}

/// A binding as the bit masks that the system calls take.
struct PreparedBinding {
    cores: Vec<u64>,
    memory: Option<(libc::c_long, Vec<u64>)>,
}

impl PreparedBinding {
    fn new(binding: &Binding) -> Self {
        const MPOL_PREFERRED: libc::c_long = 1;
        const MPOL_BIND: libc::c_long = 2;
        let memory = match &binding.memory {
            MemoryPolicy::Anywhere => None,
            MemoryPolicy::Bind(nodes) => Some((MPOL_BIND, bit_mask(nodes))),
            MemoryPolicy::Prefer(node) => Some((MPOL_PREFERRED, bit_mask(&[*node]))),
        };
        PreparedBinding { cores: bit_mask(&binding.cores), memory }
    }

    fn apply(&self) -> io::Result<()> {
        let bytes = std::mem::size_of_val(self.cores.as_slice());
        // SAFETY: the mask is `bytes` long and lives through the call, which only reads it.
        if unsafe { libc::syscall(libc::SYS_sched_setaffinity, 0, bytes, self.cores.as_ptr()) } < 0 {
            return Err(io::Error::last_os_error());
        }
        let Some((mode, nodes)) = &self.memory else { return Ok(()) };
        // The kernel reads one bit less than it is told.
        let bits = nodes.len() * 64 + 1;
        // SAFETY: the mask has `bits - 1` bits and lives through the call, which only reads it.
        if unsafe { libc::syscall(libc::SYS_set_mempolicy, *mode, nodes.as_ptr(), bits) } < 0 {
            let error = io::Error::last_os_error();
            // Containers often forbid the policy. Bound cores allocate from their own node first anyway.
            let forbidden = [libc::EPERM, libc::ENOSYS];
            return if error.raw_os_error().is_some_and(|code| forbidden.contains(&code)) {
                Ok(())
            } else {
                Err(error)
            };
        }
        Ok(())
    }
}

fn bit_mask(bits: &[u32]) -> Vec<u64> {
    let words = bits.iter().max().map_or(0, |&last| last as usize / 64 + 1);
    let mut mask = vec![0; words];
    bits.iter().for_each(|&bit| mask[bit as usize / 64] |= 1 << (bit % 64));
    mask
}
