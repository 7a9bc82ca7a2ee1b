//! Monitors: where a run's curves go while it trains.
//!
//! A [`Monitor`] takes one scalar at a time: a tag, a value and a position. [`TensorBoard`] writes event files,
//! [`CsvMonitor`] one file per tag, [`WandbOffline`] a run that `wandb sync` uploads. [`Monitors`] turns what
//! a step tells into the events that DeepSpeed users know and hands each to every monitor. Only one rank of a
//! run, rank 0, makes monitors.
//!
//! ```
//! use ferrospeed_observe::monitor::{CsvMonitor, Monitor};
//!
//! let folder = tempfile::tempdir()?;
//! let mut csv = CsvMonitor::create(folder.path(), "job")?;
//! csv.write("Train/Samples/lr", 0.1, 2)?;
//! let text = std::fs::read_to_string(folder.path().join("job/Train_Samples_lr.csv"))?;
//! assert_eq!(text, "step,lr\r\n2,0.1\r\n");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod csv;
mod events;
#[cfg(test)]
mod full_disk;
mod tensorboard;
mod wandb;
mod wire;

pub use csv::CsvMonitor;
use events::TRAIN_LOSS;
pub use events::{Monitors, Samples, StepEvents, TimesMs};
pub use tensorboard::{Event, TensorBoard, read_events};
pub use wandb::{WandbOffline, WandbRun};

use crate::error::Result;

/// Somewhere that scalars are written to.
pub trait Monitor: Send {
    /// Adds one value of the curve `tag` at position `step` (for the events of [`Monitors`]: global samples).
    fn write(&mut self, tag: &str, value: f64, step: u64) -> Result<()>;

    /// Makes sure that a reader sees everything written so far.
    fn flush(&mut self) -> Result<()>;

    /// Writes what was held back until the end; nothing comes after it.
    fn finish(&mut self) -> Result<()> {
        self.flush()
    }
}

/// Seconds since 1970; 0 on a clock set before that.
fn unix_time_s() -> f64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0.0, |elapsed| elapsed.as_secs_f64())
}
