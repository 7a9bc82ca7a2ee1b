//! Pipeline parallelism as arithmetic: who has which layers, who does what when, and what that costs.
//!
//! [`partition`] divides layers over stages, [`division`] as a configuration asks. [`schedule`] says in which order a stage works; a schedule is a pure function
//! of numbers of stages and micro-batches. [`validate`] shows that it cannot deadlock and what it holds, [`simulate`] gives
//! times to its parts, [`draw`] shows it, and [`boundary`] is what a stage tells the next of the tensors it sends. Nothing
//! here starts or sends anything: the engine does.
//!
//! ```
//! use ferrospeed_pipeline::schedule::{Kind, Schedule};
//! use ferrospeed_pipeline::simulate::{Times, simulate};
//!
//! let schedule = Schedule::new(Kind::OneForwardOneBackward, 4, 8)?;
//! let told = simulate(&schedule, &Times::default())?;
//! assert!((told.bubble() - 3.0 / 11.0).abs() < 1e-9);
//! # Ok::<(), ferrospeed_pipeline::PipelineError>(())
//! ```

pub mod boundary;
pub mod division;
pub mod draw;
mod error;
pub mod partition;
pub mod schedule;
pub mod simulate;
pub mod validate;

pub use error::{PipelineError, Result};

#[cfg(test)]
extern crate self as ferrospeed_pipeline;
#[cfg(test)]
#[path = "../tests/it/main.rs"]
mod it;
