//! Real processes as ranks.
//!
//! A test starts its own binary again, once per rank, with a variable that names what the rank shall do; the test
//! `rank_process` of its module is then the whole program. Without the variable it has nothing to do.

use ferrospeed_testkit::child;
use std::io::Read;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const ROLE: &str = "FERROSPEED_TEST_ROLE";

/// What this process shall do, when it was started as a rank.
pub(crate) fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}

/// A port that is free now.
pub(crate) fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// One started rank; killed when the test ends before it does.
pub(crate) struct RankProcess {
    child: Child,
}

/// How a rank ended.
#[derive(Debug)]
pub(crate) struct Ending {
    pub success: bool,
    pub output: String,
}

/// How to start the ranks of a job.
#[derive(Clone)]
pub(crate) struct Job {
    pub size: usize,
    pub port: u16,
    pub token: String,
    /// The test's `module_path!()`, whose `rank_process` the ranks are.
    pub module: &'static str,
    pub role: String,
    pub variables: Vec<(String, String)>,
    /// A command before the rank's own, such as `ip netns exec NAME`.
    pub prefix: Vec<Vec<String>>,
}

impl Job {
    pub(crate) fn new(module: &'static str, size: usize, role: &str) -> Self {
        let port = free_port();
        // Two tests may be given the same free port; their tokens keep the jobs apart.
        static JOBS: AtomicUsize = AtomicUsize::new(0);
        let token = format!("token-{}-{}", std::process::id(), JOBS.fetch_add(1, Ordering::Relaxed));
        Job { size, port, token, module, role: role.into(), variables: Vec::new(), prefix: Vec::new() }
    }

    pub(crate) fn with(mut self, variable: &str, value: impl ToString) -> Self {
        self.variables.push((variable.into(), value.to_string()));
        self
    }

    pub(crate) fn start(&self) -> Vec<RankProcess> {
        (0..self.size).map(|rank| self.start_rank(rank)).collect()
    }

    pub(crate) fn start_rank(&self, rank: usize) -> RankProcess {
        let program = std::env::current_exe().unwrap();
        let mut words: Vec<std::ffi::OsString> =
            self.prefix.get(rank).into_iter().flatten().map(Into::into).collect();
        words.push(program.into());
        let mut command = Command::new(&words[0]);
        command
            .args(&words[1..])
            .args(child::arguments(self.module, "rank_process"))
            .env(ROLE, &self.role)
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", self.size.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", self.port.to_string())
            .env("FERROSPEED_JOB_TOKEN", &self.token)
            .env("FERROSPEED_TRACE_DIR", format!("{}/trace-{}", env!("CARGO_TARGET_TMPDIR"), self.token))
            .envs(self.variables.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        RankProcess { child: command.spawn().unwrap() }
    }

    /// Runs all ranks and panics unless every one of them succeeds.
    pub(crate) fn run(&self, limit: Duration) {
        for (rank, ending) in finish(self.start(), limit).into_iter().enumerate() {
            assert!(ending.success, "rank {rank} of {:?} failed:\n{}", self.role, ending.output);
        }
    }
}

impl RankProcess {
    pub(crate) fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    pub(crate) fn signal(&self, signal: i32) {
        // SAFETY: signals our own child, which we have not waited for.
        unsafe { libc::kill(self.pid(), signal) };
    }

    pub(crate) fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Waits for the end; a rank that outlives the limit fails the test.
    pub(crate) fn finish(mut self, limit: Instant) -> Ending {
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            if Instant::now() > limit {
                self.signal(libc::SIGKILL);
                let _ = self.child.wait();
                panic!("a rank was still running at its limit:\n{}", self.output());
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        Ending { success: status.success(), output: self.output() }
    }

    fn output(&mut self) -> String {
        let mut text = String::new();
        let _ = self.child.stdout.take().map(|mut pipe| pipe.read_to_string(&mut text));
        let _ = self.child.stderr.take().map(|mut pipe| pipe.read_to_string(&mut text));
        text
    }
}

impl Drop for RankProcess {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            self.signal(libc::SIGKILL);
            let _ = self.child.wait();
        }
    }
}

/// Waits for all ranks.
pub(crate) fn finish(ranks: Vec<RankProcess>, limit: Duration) -> Vec<Ending> {
    let limit = Instant::now() + limit;
    ranks.into_iter().map(|rank| rank.finish(limit)).collect()
}
