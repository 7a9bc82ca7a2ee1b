//! What modules of a model cost, in the layout of DeepSpeed's flops profiler.
//!
//! [`report`] makes the text of a [`Module`] tree; [`mod@format`] writes its numbers. Counts do not come from formulas:
//! `tensor` counts where ops run.

pub mod format;
mod module;
mod report;

pub use module::Module;
pub use report::{Experts, Phases, Ranks, ReportOptions, Summary, aggregated, report, write_report};
