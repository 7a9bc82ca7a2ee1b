//! What a rank says while it waits for others: who is missing, now and then, and less and less often.
//!
//! The wait has a deadline, but that is minutes away, and a rank that was never started will not come meanwhile.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// How long nothing is said; then twice as long, and so on,
const FIRST_WORD: Duration = Duration::from_secs(10);
/// but never longer than this: whoever watches should not take it for a hang.
const LONGEST_SILENCE: Duration = Duration::from_secs(60);

/// When to say something.
pub(super) struct Patience {
    since: Instant,
    next: Duration,
}

impl Patience {
    /// Of a wait that ends at `deadline`: a short one is told of sooner.
    pub(super) fn until(deadline: Instant) -> Patience {
        let since = Instant::now();
        let limit = deadline.saturating_duration_since(since);
        Patience { since, next: FIRST_WORD.min(limit / 4) }
    }

    /// How long the wait has been, where it is time to say so.
    pub(super) fn runs_out(&mut self) -> Option<Duration> {
        let waited = self.since.elapsed();
        if waited < self.next {
            return None;
        }
        self.next = waited + waited.min(LONGEST_SILENCE);
        Some(waited)
    }
}

/// `rank 1 of 3`, and where launchers put as many ranks on each host, which hosts these are.
pub(super) fn describe(
    world_size: usize,
    local_world_size: Option<usize>,
    came_from: &BTreeMap<usize, IpAddr>,
) -> String {
    let missing: Vec<usize> = (0..world_size).filter(|rank| !came_from.contains_key(rank)).collect();
    let text = format!("rank {} of {world_size}", ranges(&missing));
    let Some(size) = local_world_size.filter(|size| (1..world_size).contains(size)) else { return text };
    let host_of = |rank: &usize| rank / size;
    let hosts = missing.chunk_by(|one, other| host_of(one) == host_of(other)).map(|ranks| {
        let host = host_of(&ranks[0]);
        let neighbour = came_from.iter().find(|(rank, _)| host_of(rank) == host);
        let from = neighbour.map_or_else(
            || "from which nobody came".to_owned(),
            |(rank, address)| format!("{address}, from which rank {rank} came"),
        );
        format!("rank {} of host {host}, {from}", ranges(ranks))
    });
    format!("{text} ({})", hosts.collect::<Vec<_>>().join("; "))
}

/// `1, 4 to 7`.
fn ranges(ranks: &[usize]) -> String {
    let runs = ranks.chunk_by(|one, other| one + 1 == *other).map(|run| match run {
        [one] => one.to_string(),
        [one, other] => format!("{one}, {other}"),
        [first, .., last] => format!("{first} to {last}"),
        [] => String::new(),
    });
    runs.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_ranks_are_named_with_their_hosts_where_these_are_known() {
        let from = |ranks: &[(usize, [u8; 4])]| -> BTreeMap<usize, IpAddr> {
            ranks.iter().map(|(rank, address)| (*rank, IpAddr::from(*address))).collect()
        };
        let here = from(&[(0, [127, 0, 0, 1]), (2, [127, 0, 0, 1])]);
        assert_eq!(describe(3, None, &here), "rank 1 of 3");
        assert_eq!(describe(8, Some(8), &here), "rank 1, 3 to 7 of 8");
        let hosts = from(&[(0, [10, 0, 0, 1]), (1, [10, 0, 0, 1]), (3, [10, 0, 0, 2])]);
        assert_eq!(
            describe(6, Some(2), &hosts),
            "rank 2, 4, 5 of 6 (rank 2 of host 1, 10.0.0.2, from which rank 3 came; rank 4, 5 of host 2, from which nobody came)"
        );
    }

    #[test]
    fn words_come_less_and_less_often() {
        let now = Instant::now();
        let mut patience = Patience::until(now + Duration::from_secs(3600));
        assert_eq!(patience.runs_out(), None);
        patience.since = now.checked_sub(Duration::from_secs(11)).unwrap();
        assert!(patience.runs_out().is_some_and(|waited| waited.as_secs() >= 11));
        assert_eq!(patience.runs_out(), None);
        assert!(patience.next >= Duration::from_secs(22));
        // A minute of silence is the most.
        patience.since = now.checked_sub(Duration::from_secs(500)).unwrap();
        assert!(patience.runs_out().is_some());
        assert!(patience.next < Duration::from_secs(570));
    }
}
