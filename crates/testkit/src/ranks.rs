//! Real processes as ranks.
//!
//! A test starts its own binary again, once per rank, with a variable that names what the rank shall do; the test
//! `rank_process` of its module is then the whole program. Without the variable it has nothing to do.

use std::io::Read;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::child;

const ROLE: &str = "FERROSPEED_TEST_ROLE";

/// What this process shall do, when it was started as a rank.
pub fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}

/// A port that is free now.
pub fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// One started rank; killed when the test ends before it does.
#[derive(Debug)]
pub struct RankProcess {
    child: Child,
}

/// How a rank ended.
#[derive(Debug)]
pub struct Ending {
    /// Whether its exit status was 0.
    pub success: bool,
    /// What it wrote, its errors last.
    pub output: String,
}

/// How to start the ranks of a job.
#[derive(Debug, Clone)]
pub struct Job {
    /// How many ranks.
    pub size: usize,
    /// Where they meet, on this host unless `MASTER_ADDR` says another.
    pub port: u16,
    /// What tells the job from others at the same port.
    pub token: String,
    /// The test's `module_path!()`, whose `rank_process` the ranks are.
    pub module: &'static str,
    /// What each rank shall do.
    pub role: String,
    /// What else each rank finds in its environment.
    pub variables: Vec<(String, String)>,
    /// A command before the rank's own, such as `ip netns exec NAME`.
    pub prefix: Vec<Vec<String>>,
}

impl Job {
    /// A job of the module whose `module_path!()` this is, at a free port.
    pub fn new(module: &'static str, size: usize, role: &str) -> Self {
        let port = free_port();
        // Two tests may be given the same free port; their tokens keep the jobs apart.
        static JOBS: AtomicUsize = AtomicUsize::new(0);
        let token = format!("token-{}-{}", std::process::id(), JOBS.fetch_add(1, Ordering::Relaxed));
        Job { size, port, token, module, role: role.into(), variables: Vec::new(), prefix: Vec::new() }
    }

    /// The same, with a variable in its ranks' environment.
    pub fn with(mut self, variable: &str, value: impl ToString) -> Self {
        self.variables.push((variable.into(), value.to_string()));
        self
    }

    /// Where the ranks leave what they record, beside what cargo builds.
    fn trace_folder(&self) -> std::path::PathBuf {
        let executable = std::env::current_exe().unwrap();
        let target = executable.ancestors().nth(3).unwrap_or(&executable);
        target.join("tmp").join(format!("trace-{}", self.token))
    }

    /// Starts every rank.
    pub fn start(&self) -> Vec<RankProcess> {
        (0..self.size).map(|rank| self.start_rank(rank)).collect()
    }

    /// Starts one rank.
    pub fn start_rank(&self, rank: usize) -> RankProcess {
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
            .env("FERROSPEED_TRACE_DIR", self.trace_folder())
            .envs(self.variables.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        RankProcess { child: command.spawn().unwrap() }
    }

    /// Runs all ranks and panics unless every one of them succeeds.
    pub fn run(&self, limit: Duration) {
        for (rank, ending) in finish(self.start(), limit).into_iter().enumerate() {
            assert!(ending.success, "rank {rank} of {:?} failed:\n{}", self.role, ending.output);
        }
    }
}

impl RankProcess {
    /// Its number for the system.
    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: i32) {
        // SAFETY: signals our own child, which we have not waited for.
        unsafe { libc::kill(self.pid(), signal) };
    }

    /// Whether it has not ended.
    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Waits for the end; a rank that outlives the limit fails the test.
    pub fn finish(mut self, limit: Instant) -> Ending {
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
pub fn finish(ranks: Vec<RankProcess>, limit: Duration) -> Vec<Ending> {
    let limit = Instant::now() + limit;
    ranks.into_iter().map(|rank| rank.finish(limit)).collect()
}
