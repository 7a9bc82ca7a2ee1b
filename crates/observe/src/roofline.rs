//! What holds modules back: the cores or the memory.
//!
//! A module that does few operations for each byte it moves cannot be faster than memory lets it, one that does many not faster
//! than the cores: the roof is the lower of both (Williams, Waterman and Patterson: "Roofline", 2009). Peaks are measured on the
//! machine, operations and bytes counted where they happen, so a share may be a little above one where caches serve what is
//! counted as memory's.
//!
//! ```
//! use ferrospeed_observe::roofline::{Limit, Peak, Place, Roofline};
//!
//! let peak = Peak { flops_per_s: 1e12, bytes_per_s: 1e11 };
//! let place = Place { module: "mlp".into(), flops: 1_000_000, bytes: 1_000_000, seconds: 2e-5 };
//! assert_eq!(peak.limit(&place), Limit::Memory);
//! let roofline = Roofline { peak, places: vec![place] };
//! assert!(roofline.table(10).contains("50.0 %"));
//! ```

use std::fmt::{self, Write};

use serde::{Deserialize, Serialize};

use crate::flops::format::NumberStyle;

/// What a machine can do at most.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Peak {
    /// Floating-point operations per second.
    pub flops_per_s: f64,
    /// Bytes per second between memory and cores.
    pub bytes_per_s: f64,
}

/// What a module, or several alike, did.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Place {
    /// Its path; numbers in it are `*` where several are one.
    pub module: String,
    /// Floating-point operations, of all passes.
    pub flops: u64,
    /// Bytes read and written.
    pub bytes: u64,
    /// How long it took.
    pub seconds: f64,
}

/// What a module cannot be faster than.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Limit {
    /// The cores.
    Compute,
    /// The memory.
    Memory,
}

/// Modules under the roof of a machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Roofline {
    /// The roof.
    pub peak: Peak,
    /// What lies below it.
    pub places: Vec<Place>,
}

impl Peak {
    /// Which limit binds.
    pub fn limit(&self, place: &Place) -> Limit {
        let compute_s = place.flops as f64 / self.flops_per_s;
        let memory_s = place.bytes as f64 / self.bytes_per_s;
        if compute_s > memory_s { Limit::Compute } else { Limit::Memory }
    }

    /// Operations per byte from which on the cores bind.
    pub fn ridge(&self) -> f64 {
        self.flops_per_s / self.bytes_per_s
    }
}

impl Place {
    /// Operations per byte.
    pub fn intensity(&self) -> f64 {
        self.flops as f64 / self.bytes.max(1) as f64
    }

    /// The share of a peak that so much work was.
    fn share(&self, work: u64, per_s: f64) -> f64 {
        if self.seconds > 0.0 && per_s > 0.0 { work as f64 / self.seconds / per_s } else { 0.0 }
    }

    /// Shares of the peak of operations and of that of bytes.
    pub fn shares(&self, peak: &Peak) -> [f64; 2] {
        [self.share(self.flops, peak.flops_per_s), self.share(self.bytes, peak.bytes_per_s)]
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Limit::Compute => "cores",
            Limit::Memory => "memory",
        })
    }
}

impl Roofline {
    /// Joins modules that differ in numbers alone, as the blocks of a model do.
    pub fn of_modules(peak: Peak, modules: impl IntoIterator<Item = Place>) -> Roofline {
        let mut places: Vec<Place> = Vec::new();
        for module in modules {
            let part =
                |part: &str| if part.parse::<u64>().is_ok() { "*".to_owned() } else { part.to_owned() };
            let name = module.module.split('.').map(part).collect::<Vec<_>>().join(".");
            match places.iter_mut().find(|place| place.module == name) {
                Some(place) => {
                    place.flops += module.flops;
                    place.bytes += module.bytes;
                    place.seconds += module.seconds;
                }
                None => places.push(Place { module: name, ..module }),
            }
        }
        places.retain(|place| place.bytes > 0 && place.seconds > 0.0);
        Roofline { peak, places }
    }

    /// The modules that took longest first.
    pub fn by_time(&self) -> Vec<&Place> {
        let mut places: Vec<&Place> = self.places.iter().collect();
        places.sort_by(|one, other| other.seconds.total_cmp(&one.seconds));
        places
    }

    /// A table of the `most` modules that took longest.
    pub fn table(&self, most: usize) -> String {
        let style = NumberStyle::default();
        let places = self.by_time();
        let width = places.iter().take(most).map(|place| place.module.len()).max().unwrap_or(0).clamp(6, 48);
        let mut text = format!(
            "measured peaks: {} and {}B/s; the cores bind from {:.1} operations per byte on\n{:<width$} {:>10} {:>14} {:>9} {:>14} {:>9} {:>9} {:>7}\n",
            style.flops(self.peak.flops_per_s),
            style.number(self.peak.bytes_per_s),
            self.peak.ridge(),
            "module",
            "time",
            "operations",
            "of peak",
            "bytes",
            "of peak",
            "op/byte",
            "limit",
        );
        for place in places.iter().take(most) {
            let [of_flops, of_bytes] = place.shares(&self.peak);
            let module = if place.module.is_empty() { "(model)" } else { &place.module };
            // Writing to a string does not fail.
            let _ = writeln!(
                text,
                "{module:<width$} {:>10} {:>14} {:>7.1} % {:>14} {:>7.1} % {:>9.1} {:>7}",
                style.duration(place.seconds),
                style.flops(place.flops as f64 / place.seconds),
                100.0 * of_flops,
                style.number(place.bytes as f64 / place.seconds) + "B/s",
                100.0 * of_bytes,
                place.intensity(),
                self.peak.limit(place)
            );
        }
        if places.len() > most {
            let _ = writeln!(text, "and {} more", places.len() - most);
        }
        text
    }
}
