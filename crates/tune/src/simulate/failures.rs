//! What is left of the time where hosts fail: steps that are lost, saves, and the way back.
//!
//! Failures come at a rate per host, evenly over time; each costs what was trained since the last save and the time until training
//! goes on. Saves come at Young's interval, √(2 · save · time between failures) (Young: "A first order approximation to the
//! optimum checkpoint interval", 1974). Months are run through by draws of a seed, so two layouts meet the same failures.

use serde::Serialize;

use super::events::mix;

/// Simulated seconds: a quarter of a year.
const HORIZON_S: f64 = 90.0 * 86_400.0;
/// However often hosts fail, no more failures are drawn.
const MOST_FAILURES: u64 = 1_000_000;

/// How hosts fail, and what a failure costs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Failures {
    /// Hours between two failures of one host.
    pub host_hours: f64,
    /// Hosts.
    pub hosts: u64,
    /// Seconds that a save keeps training waiting.
    pub save_s: f64,
    /// Seconds from a failure until training goes on.
    pub restart_s: f64,
    /// When they come.
    pub seed: u64,
}

/// What became of the time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Availability {
    /// Hours between two failures of the job.
    pub job_hours: f64,
    /// Seconds from a save to the next.
    pub save_every_s: f64,
    /// The share of the time in which training got on.
    pub useful: f64,
    /// Shares that went into saves, into training that was lost, and into coming back.
    pub lost: [f64; 3],
    /// Failures in a quarter of a year.
    pub failures: u64,
}

impl Failures {
    /// Runs through a quarter of a year.
    pub fn run(&self) -> Availability {
        let between_s = self.host_hours * 3600.0 / self.hosts.max(1) as f64;
        let save_every_s = (2.0 * self.save_s.max(1e-3) * between_s).sqrt().min(between_s).max(1.0);
        let (mut now, mut failures) = (0.0, 0);
        let [mut saving, mut lost, mut returning] = [0.0f64; 3];
        while now < HORIZON_S && failures < MOST_FAILURES {
            let drawn = ((mix(self.seed ^ mix(failures)) >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
            // Until then training goes on, save by save.
            let until = (-drawn.ln() * between_s).min(HORIZON_S - now);
            let round = save_every_s + self.save_s;
            let rounds = (until / round).floor();
            saving += rounds * self.save_s;
            now += until;
            if now >= HORIZON_S {
                break;
            }
            failures += 1;
            lost += until - rounds * round;
            returning += self.restart_s;
            now += self.restart_s;
        }
        let share = |seconds: f64| seconds / now.max(f64::MIN_POSITIVE);
        let shares = [saving, lost, returning].map(share);
        let useful = (1.0 - shares.iter().sum::<f64>()).max(0.0);
        Availability { job_hours: between_s / 3600.0, save_every_s, useful, lost: shares, failures }
    }
}
