//! Ranks that compute for long without a step, as a validation does, meet on the way.
//!
//! Between steps nobody looks at what signals ask, and a rank that stands still is missed by the others only where they next need it.
//! So there is a meeting every so many rounds, about twice a second whatever a round costs: what one rank was asked all hear at the same
//! round, so that none waits for another that has left; and who does not come is named, as in a step.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use ferrospeed_comm::{Group, ReduceOp};

use crate::checkpoint::{Ending, StopRequests};
use crate::error::Result;

/// Between meetings, about.
const APART: Duration = Duration::from_millis(500);
/// However fast rounds are.
const MOST_ROUNDS: u64 = 1 << 16;

/// What goes on in rounds that all ranks take together, and may be told to stop.
pub(super) struct Listening {
    group: Group,
    requests: StopRequests,
    /// What the run was told before: it ends that way already.
    before: Option<Ending>,
    /// Rounds from one meeting to the next, and since the last.
    interval: u64,
    rounds: u64,
    met: Instant,
}

impl Listening {
    /// The first meeting is at the first round.
    pub(super) fn new(group: Group, requests: &StopRequests, before: Option<Ending>) -> Listening {
        Listening { group, requests: requests.clone(), before, interval: 1, rounds: 0, met: Instant::now() }
    }

    /// Before each round. All ranks break at the same one.
    pub(super) fn round(&mut self) -> Result<ControlFlow<Ending>> {
        self.rounds = self.rounds.saturating_sub(1);
        if self.rounds > 0 {
            return Ok(ControlFlow::Continue(()));
        }
        let [finish, leave] = self.requests.asked().map(|so| f32::from(u8::from(so)));
        let mut said = [finish, leave, self.met.elapsed().as_secs_f32()];
        self.group.all_reduce(&mut said, ReduceOp::Max)?;
        let [finish, leave, seconds] = said;
        // Every rank has the same seconds: those of the slowest.
        self.interval = interval_after(self.interval, seconds);
        (self.rounds, self.met) = (self.interval, Instant::now());
        // Who ends after a step has asked for what comes behind it, too; who leaves wants none of it.
        Ok(match Ending::asked([finish > 0.0 && self.before.is_none(), leave > 0.0]) {
            Some(ending) => ControlFlow::Break(ending),
            None => ControlFlow::Continue(()),
        })
    }
}

/// Rounds to the next meeting, where so many took so long.
fn interval_after(rounds: u64, seconds: f32) -> u64 {
    let apart = APART.as_secs_f32();
    match seconds {
        seconds if seconds < apart / 2.0 => (rounds * 2).min(MOST_ROUNDS),
        seconds if seconds > apart * 2.0 => (rounds / 2).max(1),
        _ => rounds,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meetings_come_about_twice_a_second_whatever_a_round_costs() {
        for (cost, least, most) in
            [(1e-4, 1024, 16384), (0.01, 16, 128), (0.3, 1, 4), (40.0, 1, 1), (0.0, MOST_ROUNDS, MOST_ROUNDS)]
        {
            let rounds = (0..40).fold(1, |rounds, _| interval_after(rounds, rounds as f32 * cost));
            assert!((least..=most).contains(&rounds), "{cost} s: {rounds}");
        }
        assert_eq!(interval_after(1024, 1024.0), 512, "rounds may become slow");
    }
}
