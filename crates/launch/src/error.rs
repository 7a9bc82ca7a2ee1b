//! Everything that can keep a job from starting, with the operands that explain it.
//!
//! A rank that starts and then fails is not an error here: it is a [`crate::JobOutcome`].

use std::path::PathBuf;

/// Why a job could not be started or supervised.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// The hostfile exists but cannot be read.
    #[error("cannot read hostfile {path}: {source}")]
    HostfileUnreadable {
        /// Where it lies.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A hostfile line does not have the form `name slots=N`.
    #[error(
        "hostfile line {line}: {reason}: {text:?}; a line reads `NAME slots=COUNT`, for example `worker-0 slots=8`"
    )]
    HostfileEntry {
        /// One-based line number.
        line: usize,
        /// The line, shortened.
        text: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// The same host is listed twice.
    #[error(
        "hostfile line {line}: host {host:?} is already listed; give each host one line with all its slots"
    )]
    HostfileDuplicate {
        /// One-based line number of the second entry.
        line: usize,
        /// The repeated host.
        host: String,
    },
    /// The hostfile lists no host.
    #[error("the hostfile lists no host; a line reads `NAME slots=COUNT`, for example `worker-0 slots=8`")]
    HostfileEmpty,
    /// The hostfile is larger than any real one.
    #[error("the hostfile has {bytes} bytes; at most {limit} are read")]
    HostfileTooLarge {
        /// Its size.
        bytes: u64,
        /// The largest accepted size.
        limit: u64,
    },

    /// Both filters were given.
    #[error("--include and --exclude exclude each other; keep one of them")]
    FilterBoth,
    /// A filter names a host that is not in the pool.
    #[error("filter {filter:?}: host {host:?} is not in the hostfile; known hosts: {known}")]
    FilterUnknownHost {
        /// The whole filter.
        filter: String,
        /// The name in it.
        host: String,
        /// The hosts of the pool, shortened.
        known: String,
    },
    /// A filter names a slot that its host does not have.
    #[error("filter {filter:?}: host {host:?} has no slot {slot}; it has slots 0 to {last}", last = i64::from(*slots) - 1)]
    FilterUnknownSlot {
        /// The whole filter.
        filter: String,
        /// The host.
        host: String,
        /// The slot as written.
        slot: String,
        /// How many slots the host has.
        slots: u32,
    },
    /// A filter does not follow the grammar.
    #[error(
        "filter {filter:?}: {part:?} is not a slot number; write `HOST` or `HOST:SLOT,SLOT`, joined by `@`"
    )]
    FilterSyntax {
        /// The whole filter.
        filter: String,
        /// The part that does not parse.
        part: String,
    },
    /// The filters leave nothing.
    #[error("no slot is left to run on: the filters exclude every slot of every host")]
    NothingLeft,

    /// A core list does not follow the grammar.
    #[error("core list {list:?}: {reason}; write ascending numbers and ranges such as `0,2-4,6`")]
    CoreList {
        /// The list as written.
        list: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// There are more ranks than cores to bind them to.
    #[error("cannot bind {ranks} ranks to {cores} cores: each rank needs at least one core")]
    TooFewCores {
        /// Ranks on this node.
        ranks: usize,
        /// Cores that may be used.
        cores: usize,
    },
    /// `KMP_AFFINITY` and core binding fight each other.
    #[error("KMP_AFFINITY is set and would fight --bind_cores_to_rank; unset it or drop the option")]
    KmpAffinity,

    /// A node count does not follow `MIN[:MAX]`.
    #[error("node count {text:?}: {reason}")]
    NodeCount {
        /// As written.
        text: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// An environment file has a line that is not `KEY=VALUE`.
    #[error("{path} line {line}: {text:?} is not `KEY=VALUE`, a comment or empty")]
    EnvFile {
        /// The file.
        path: String,
        /// One-based line number.
        line: usize,
        /// The line, shortened.
        text: String,
    },
    /// `--launcher_args` has an open quote.
    #[error("--launcher_args {text:?}: {reason}")]
    LauncherArgs {
        /// As written.
        text: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A world info string cannot be decoded.
    #[error("world info is not usable: {reason}")]
    WorldInfo {
        /// Why.
        reason: String,
    },
    /// A node rank lies outside the world.
    #[error("node rank {node_rank} is outside the world of {nodes} node(s)")]
    NodeRank {
        /// The rank that was asked for.
        node_rank: usize,
        /// How many nodes there are.
        nodes: usize,
    },

    /// Two options contradict each other, or one has a value that makes no sense.
    #[error("{0}")]
    Usage(String),
    /// `--launcher` names no backend.
    #[error("unknown launcher {name:?}; known: pdsh, openmpi, mpich, impi, slurm, mvapich")]
    UnknownBackend {
        /// The name as written.
        name: String,
    },
    /// The backend's program is not on this machine.
    #[error("launcher {backend:?} is not installed: {program:?} was not found in PATH")]
    BackendMissing {
        /// The backend.
        backend: &'static str,
        /// The program that was looked for.
        program: &'static str,
    },
    /// The backend cannot do what the options ask.
    #[error("the {backend} backend cannot {what}; {instead}")]
    BackendLimit {
        /// The backend.
        backend: &'static str,
        /// What it cannot do.
        what: &'static str,
        /// What to do about it.
        instead: &'static str,
    },
    /// The backend needs the same number of slots on every host.
    #[error("the {backend} backend needs the same number of slots on every host; the hostfile has {counts}")]
    UnevenSlots {
        /// The backend.
        backend: &'static str,
        /// The slots per host, shortened.
        counts: String,
    },
    /// Nothing says how many ranks to start.
    #[error("no GPU was found on this host, so the number of ranks is not known; say it with -n COUNT")]
    NoDevices,
    /// A host does not answer.
    #[error(
        "cannot reach host {host:?} over ssh: {reason}; set up password-less ssh, or pass --no_ssh_check"
    )]
    SshFailed {
        /// The host.
        host: String,
        /// What ssh said.
        reason: String,
    },

    /// An agent found no coordinator that knows its job.
    #[error(
        "the job at {meet} does not take this node in: {reason}; the address is the one that `ferrospeed launch` prints, and the token its job's"
    )]
    Coordinator {
        /// Where it was looked for.
        meet: String,
        /// What went wrong.
        reason: String,
    },
    /// A program could not be started.
    #[error("rank {rank}: cannot start {program:?}: {source}")]
    Spawn {
        /// The rank that it was for.
        rank: u32,
        /// The program.
        program: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file or folder of the launcher itself could not be made or written.
    #[error("cannot {action} {path}: {source}")]
    File {
        /// What was attempted.
        action: &'static str,
        /// The path.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The system refused something that supervision needs.
    #[error("cannot {action}: {source}")]
    System {
        /// What was attempted.
        action: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
    /// Another job of this process already handles its signals.
    #[error(
        "another job of this process already forwards its signals; run one at a time, or leave them alone"
    )]
    SignalsTaken,
}

/// Shortens user-supplied text for a message, on a character boundary.
pub(crate) fn shorten(text: &str) -> String {
    const LIMIT: usize = 120;
    match text.char_indices().nth(LIMIT) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// Joins names for a message and stops after a few.
pub(crate) fn list_some<T: std::fmt::Display>(items: impl ExactSizeIterator<Item = T>) -> String {
    const SHOWN: usize = 8;
    let total = items.len();
    let mut text = items.take(SHOWN).map(|item| item.to_string()).collect::<Vec<_>>().join(", ");
    if total > SHOWN {
        text.push_str(&format!(", … ({total} in all)"));
    }
    shorten(&text)
}
