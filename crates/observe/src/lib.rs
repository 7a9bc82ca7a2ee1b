//! What a run says about itself.
//!
//! A run makes one [`StepRecord`] per step and one [`EvalRecord`] per validation; everything else is a reader of
//! those: the log files, the [`monitor`]s, the [`report`], the terminal. Observing changes no number of the run.

mod calendar;
mod error;
pub mod flops;
mod log;
pub mod monitor;
mod record;
pub mod report;
pub mod roofline;
mod routing;
pub mod trace;
pub mod watch;
mod whole;

pub use calendar::civil_date;
pub use error::{ObserveError, Result};
pub use log::{JsonLines, read_json_lines};
pub use record::{EvalRecord, RankTimes, StepRecord};
pub use routing::{LayerRouting, RoutingSummary};

#[cfg(test)]
extern crate self as ferrospeed_observe;
#[cfg(test)]
#[path = "../tests/it/main.rs"]
mod it;
