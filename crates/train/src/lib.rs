//! From a recipe to a run: what `ferrospeed train` does on each rank.
//!
//! [`Recipe`] says what to train on what ([`recipe`]); [`run`] does it and fills a run's folder ([`folder`]). The
//! terminal is the caller's: [`Progress`] tells it what happens.

mod adapter;
mod analysis;
mod architecture;
mod best;
mod checkpoint;
mod curriculum;
mod data_state;
pub mod error;
mod expected;
mod export;
pub mod folder;
mod health;
mod hub;
mod inspect;
mod kept_log;
mod layer_reduction;
mod measure;
mod mesh;
mod model;
pub mod objective;
mod peak;
mod prepare;
pub mod recipe;
mod records;
mod resume;
mod routing;
mod run;
mod shape;
mod told;

pub use adapter::{frozen_and_adapters, parameters};
pub use analysis::{analyze, recipe_of_files};
pub use checkpoint::{Ending, Resumed, StopRequests};
pub use error::{Result, TrainError};
pub use expected::Expected;
pub use ferrospeed_data::{Analysis, DataError, Metric, Preparing, unheard};
pub use folder::{FolderLock, RunFolder};
pub use hub::FromHub;
pub use inspect::{Inspection, Shown, inspect};
pub use layer_reduction::layer_reduction_problem;
pub use mesh::MeshSizes;
pub use prepare::{check, model_config, problems, unusable_data};
pub use recipe::Recipe;
pub use records::report_failure;
pub use resume::Resume;
pub use run::{Job, Observing, ObservingCost, Progress, RunInfo, Summary, run};
pub use shape::shape_of;

#[cfg(test)]
extern crate self as ferrospeed_train;
#[cfg(test)]
#[path = "../tests/it/main.rs"]
mod it;
