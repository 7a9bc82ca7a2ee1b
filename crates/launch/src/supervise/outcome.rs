//! How a job ended, in words that say what to look at next.

use std::fmt;
use std::path::PathBuf;

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// It exited with this code.
    Code(i32),
    /// This signal killed it.
    Signal(i32),
    /// The system would not say.
    Unknown,
}

/// The exit code of a rank that has failed only because another has. The other is named, wherever it is seen.
pub const EXIT_AFTER_ANOTHER: u8 = 76;

impl Ended {
    /// Whether another process's end explains this one.
    pub fn is_followers(self) -> bool {
        self == Ended::Code(EXIT_AFTER_ANOTHER.into())
    }

    /// Whether it is what a well-behaved process does.
    pub fn is_success(self) -> bool {
        self == Ended::Code(0)
    }

    /// The code a shell would give for it: the exit code, or 128 plus the signal.
    pub fn exit_code(self) -> u8 {
        let code = match self {
            // The one that it followed was not seen here.
            _ if self.is_followers() => 1,
            Ended::Code(code) => code,
            Ended::Signal(signal) => 128 + signal,
            Ended::Unknown => 1,
        };
        u8::try_from(code).unwrap_or(1)
    }
}

/// How a job ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JobOutcome {
    /// Every rank exited with code 0.
    Succeeded,
    /// A rank failed; the others were stopped.
    Failed(RankFailure),
    /// A signal to the launcher ended it.
    Interrupted {
        /// The signal.
        signal: i32,
        /// The code that all ranks exited with when they were told, where it is the same one and not 0.
        agreed_code: Option<u8>,
        /// Whether all of them exited with 0, as ranks do that end in order when they are told.
        all_well: bool,
    },
}

impl JobOutcome {
    /// The exit code of the launcher: the first failure's; after a signal the one that the ranks agree on, or 128 plus
    /// the signal.
    pub fn exit_code(&self) -> u8 {
        match self {
            JobOutcome::Succeeded => 0,
            JobOutcome::Failed(failure) => failure.ended.exit_code(),
            JobOutcome::Interrupted { signal, agreed_code, .. } => {
                agreed_code.unwrap_or_else(|| Ended::Signal(*signal).exit_code())
            }
        }
    }
}

/// The first failure of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankFailure {
    /// What failed: `rank 3`, or the backend's name.
    pub who: String,
    /// The rank, if it was one.
    pub rank: Option<u32>,
    /// Where it ran.
    pub host: String,
    /// How it ended.
    pub ended: Ended,
    /// Another that was stopped at the time, and for which this one may have waited.
    pub frozen: Option<String>,
    /// How often the kernel's out-of-memory killer ran on this host meanwhile, where it says.
    pub oom_kills: Option<u64>,
    /// The last lines it wrote.
    pub last_lines: Vec<String>,
    /// Where all of its output is kept.
    pub log: Option<PathBuf>,
}

impl fmt::Display for RankFailure {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.frozen {
            Some(frozen) => write!(
                out,
                "{frozen} on {} is stopped (SIGSTOP, or a debugger): {} waited for it and ",
                self.host, self.who
            )?,
            None => write!(out, "{} on {} ", self.who, self.host)?,
        }
        match self.ended {
            ended if ended.is_followers() => write!(out, "ended because another rank had failed")?,
            Ended::Code(code) => write!(out, "failed with exit code {code}")?,
            Ended::Signal(signal) => {
                write!(out, "was killed by {}{}", signal_name(signal), self.explain(signal))?;
            }
            Ended::Unknown => write!(out, "ended in a way the system does not report")?,
        }
        if let Some(log) = &self.log {
            write!(out, "\n  its log: {}", log.display())?;
        }
        if self.last_lines.is_empty() {
            return write!(out, "\n  it wrote nothing");
        }
        write!(out, "\n  its last lines:")?;
        self.last_lines.iter().try_for_each(|line| write!(out, "\n    {line}"))
    }
}

impl RankFailure {
    fn explain(&self, signal: i32) -> String {
        if signal != libc::SIGKILL {
            return explanation(signal).map(|text| format!(": {text}")).unwrap_or_default();
        }
        let cause = match self.oom_kills {
            Some(0) => {
                "by `kill -9` or a batch system's limit: the kernel counted no out-of-memory kill here meanwhile"
            }
            Some(_) => {
                "likely because the host ran out of memory: the kernel's out-of-memory killer ran here meanwhile"
            }
            None => {
                "by a person, by a batch system's limit or for want of memory: `dmesg` says whether the \
                 kernel's out-of-memory killer ran"
            }
        };
        format!(", {cause}")
    }
}

fn explanation(signal: i32) -> Option<&'static str> {
    Some(match signal {
        libc::SIGSEGV => "it touched memory that is not its own",
        libc::SIGBUS => "a mapped file or shared memory ended early; often /dev/shm or a disk is full",
        libc::SIGABRT => "it aborted itself; its last lines say why",
        libc::SIGILL => "the program was built for another kind of CPU",
        libc::SIGFPE => "an integer division by zero or overflow",
        libc::SIGXCPU => "the CPU time limit (ulimit -t) was reached",
        libc::SIGXFSZ => "the file size limit (ulimit -f) was reached",
        libc::SIGTERM => "something asked it to stop; often a batch system's time limit",
        libc::SIGPIPE => "the reader of its output went away",
        _ => return None,
    })
}

/// The name of a signal.
fn signal_name(signal: i32) -> String {
    nix::sys::signal::Signal::try_from(signal)
        .map_or_else(|_| format!("signal {signal}"), |signal| signal.as_str().to_owned())
}

/// The kernel's count of out-of-memory kills, at the start of a job.
pub(super) struct OomCounter {
    at_start: Option<u64>,
}

impl OomCounter {
    pub(super) fn start() -> Self {
        OomCounter { at_start: Self::now() }
    }

    pub(super) fn kills_since_start(&self) -> Option<u64> {
        Some(Self::now()?.saturating_sub(self.at_start?))
    }

    fn now() -> Option<u64> {
        let counters = std::fs::read_to_string("/proc/vmstat").ok()?;
        counters.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(ended: Ended, oom_kills: Option<u64>) -> RankFailure {
        RankFailure {
            who: "rank 2".to_owned(),
            rank: Some(2),
            host: "node-a".to_owned(),
            ended,
            frozen: None,
            oom_kills,
            last_lines: vec!["step 7".to_owned(), "loss 3.1".to_owned()],
            log: Some(PathBuf::from("logs/r2.log")),
        }
    }

    #[test]
    fn a_failure_names_rank_host_code_log_and_last_lines() {
        assert_eq!(
            failure(Ended::Code(3), None).to_string(),
            "rank 2 on node-a failed with exit code 3\n  its log: logs/r2.log\n  its last lines:\n    step 7\n    loss 3.1"
        );
    }

    #[test]
    fn who_only_followed_another_says_so() {
        let followed = failure(Ended::Code(EXIT_AFTER_ANOTHER.into()), None);
        assert!(followed.to_string().starts_with("rank 2 on node-a ended because another rank had failed\n"));
        assert_eq!(followed.ended.exit_code(), 1);
    }

    #[test]
    fn a_sigkill_is_explained_with_what_the_kernel_counted() {
        let text = failure(Ended::Signal(9), Some(1)).to_string();
        assert!(text.starts_with(
            "rank 2 on node-a was killed by SIGKILL, likely because the host ran out of memory: \
             the kernel's out-of-memory killer ran here meanwhile\n"
        ));
        let text = failure(Ended::Signal(9), Some(0)).to_string();
        assert!(text.contains("`kill -9`") && !text.contains("likely"), "{text}");
    }

    #[test]
    fn every_signal_has_a_name_and_a_code() {
        assert!(failure(Ended::Signal(11), None).to_string().contains("SIGSEGV: it touched memory"));
        assert!(failure(Ended::Signal(40), None).to_string().contains("signal 40"));
        assert_eq!(Ended::Signal(9).exit_code(), 137);
        assert_eq!(Ended::Code(300).exit_code(), 1);
    }
}
