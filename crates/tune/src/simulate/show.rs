//! A simulated step as text.

use std::fmt;

use super::{Simulated, Spent};
use crate::plan::{Tier, human};

impl fmt::Display for Spent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Spent::Compute => f.pad("compute"),
            Spent::Bubble => f.pad("bubble"),
            Spent::Stragglers => f.pad("slower replicas"),
            Spent::Exposed(reason) => f.pad(&format!("{reason}, exposed")),
            Spent::Update => f.pad("update"),
            Spent::Offload => f.pad("offload"),
        }
    }
}

impl Simulated {
    /// Sizes of the mesh in a few letters: `pp4×dp32×tp8`.
    pub fn mesh_name(&self) -> String {
        let named = ["pp", "dp", "sp", "tp"].into_iter().zip(self.mesh);
        let named = named.filter(|(name, size)| *size > 1 || *name == "dp");
        named.map(|(name, size)| format!("{name}{size}")).collect::<Vec<_>>().join("×")
    }
}

impl fmt::Display for Simulated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let schedule = if self.mesh[0] > 1 { format!(", {}", self.schedule) } else { String::new() };
        writeln!(f, "{} ranks on {} host(s): {}{schedule}", self.ranks, self.hosts, self.mesh_name())?;
        writeln!(
            f,
            "a step of {} samples takes {}: {:.0} tokens/s, {:.1} TFLOP/s per rank",
            self.samples,
            seconds(self.step_s),
            self.tokens_per_s,
            self.flops_per_s / 1e12
        )?;
        for (what, spent) in &self.spent {
            writeln!(f, "  {what:<19} {:>10} {:>5.1} %", seconds(*spent), 100.0 * spent / self.step_s)?;
        }
        if self.mesh[0] > 1 {
            let each = self.stages.iter().map(|[computes, _]| seconds(*computes)).collect::<Vec<_>>();
            writeln!(f, "stages compute {} (bubble {:.1} %)", few(&each), 100.0 * self.bubble)?;
        }
        if let Some(rank) = self.slowest {
            writeln!(f, "the others wait for rank {rank}")?;
        }
        let (device, host) = (self.plan.total(Tier::Device), self.plan.total(Tier::Host));
        let host = if host > 0 { format!(", {} of its host", human(host)) } else { String::new() };
        writeln!(f, "the fullest rank holds {}{host}", human(device))
    }
}

/// The first and the last of many.
fn few(all: &[String]) -> String {
    match all {
        [first, .., last] if all.len() > 8 => format!("{first} … {last}"),
        all => all.join(", "),
    }
}

/// A time in the unit that somebody would say it in.
pub fn seconds(seconds: f64) -> String {
    match seconds {
        s if s < 1e-3 => format!("{:.1} µs", 1e6 * s),
        s if s < 1.0 => format!("{:.1} ms", 1e3 * s),
        s if s < 120.0 => format!("{s:.2} s"),
        s if s < 7200.0 => format!("{:.1} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}
