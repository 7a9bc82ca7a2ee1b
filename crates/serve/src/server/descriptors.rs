//! How many connections the process's limit of open files has room for: one descriptor each, beside those that it needs itself.

use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit, setrlimit};

/// For files and sockets that are opened later: weights, logs, links to other ranks.
const SPARE: usize = 64;

/// Raises the soft limit to the hard one, which costs nothing and needs no permission.
pub(super) fn raise() {
    if let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE)
        && soft < hard
        && let Err(error) = setrlimit(Resource::RLIMIT_NOFILE, hard, hard)
    {
        tracing::warn!("cannot raise the limit of open files (ulimit -n) from {soft} to {hard}: {error}");
    }
}

/// As many connections as asked for, or as the limit has room for. Whoever comes then makes the longest idle give way before
/// descriptors run out: where they do, nobody can be taken, and nobody is told to go.
pub(super) fn allow(asked: usize) -> usize {
    let limit = getrlimit(Resource::RLIMIT_NOFILE).map_or(RLIM_INFINITY, |(soft, _)| soft);
    // Where the system does not say, as many as a small server has.
    let open = std::fs::read_dir("/proc/self/fd").map_or(SPARE, Iterator::count);
    let allowed = fitting(asked, usize::try_from(limit).unwrap_or(usize::MAX), open);
    if allowed < asked {
        tracing::warn!(
            "{allowed} connections at once instead of {asked}: the limit of open files (ulimit -n) is {limit}"
        );
    }
    allowed
}

fn fitting(asked: usize, limit: usize, open: usize) -> usize {
    asked.min(limit.saturating_sub(open + SPARE)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_leave_room_for_other_files() {
        assert_eq!(fitting(1024, 1 << 20, 30), 1024);
        assert_eq!(fitting(1024, 1024, 30), 1024 - 30 - SPARE);
        assert_eq!(fitting(1024, 64, 30), 1);
        assert!(allow(4) <= 4);
    }
}
