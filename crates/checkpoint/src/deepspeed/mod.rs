//! DeepSpeed's checkpoints: read, converted to f32 weights, imported with optimizer states, and written.
//!
//! [`source`] opens a folder of torch files and finds, for every parameter, the stretches of the files that hold its
//! weights and states; nothing is loaded to find out. [`fp32`] follows DeepSpeed's own `zero_to_fp32`, [`import`] and
//! [`Foreign`] understand a checkpoint, to be read where it lies or saved in our format, [`export`] writes one that DeepSpeed's loader and `zero_to_fp32` accept.

mod experts;
pub mod export;
mod exported;
mod foreign;
pub mod fp32;
pub mod import;
mod numbered;
mod pipeline;
mod pipeline_files;
mod plain;
mod slices;
pub mod source;
mod spelling;
mod split;
mod to_universal;
mod universal;

pub use export::{ExportOptions, export_deepspeed};
pub use foreign::{Foreign, check_files};
pub use fp32::{Fp32Tensor, Fp32Weights};
pub use import::import_deepspeed;
pub use pipeline_files::{PipelineFiles, export_pipeline};
pub use source::{DeepSpeedFiles, Stretch};
pub use spelling::Spelling;
pub(crate) use spelling::spell_as;
pub use to_universal::export_universal;
pub use universal::{import_universal, is_universal};
