//! What modules of a model cost, in the layout of DeepSpeed's flops profiler.
//!
//! [`report`] makes the text of a [`Module`] tree; [`mod@format`] writes its numbers; [`formulas`] are DeepSpeed's own estimates,
//! to reproduce a figure of one of its reports. Our counts do not come from formulas: `tensor` counts where ops run.

pub mod format;
pub mod formulas;
mod module;
mod report;

pub use module::Module;
pub use report::{Experts, Phases, Ranks, ReportOptions, Summary, report, write_report};
