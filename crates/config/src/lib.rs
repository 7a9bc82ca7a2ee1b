//! `ds_config.json`, read, checked and resolved into types that cannot hold a contradiction.
//!
//! The way of a configuration: text → a tree with positions (`reader`) → along the option table ([`table`]) →
//! rules between options → `"auto"`, defaults and batch sizes → [`Config`]. Every mistake of a file is reported at
//! once, each with its place, its full key path, why, and what to write instead ([`Report`]). Nothing is ignored in
//! silence: a key that has no effect is accepted with a warning, one that would have to be ignored and matters is refused with the reason, and an
//! unknown one is an error.
//!
//! This crate refuses to read the environment, to touch anything but the one file, and to guess.

mod auto;
pub mod batch;
mod canonical;
mod check;
mod compat;
mod defaults;
mod diagnostic;
pub mod docs;
pub mod elasticity;
mod error;
mod overrides;
pub mod print;
mod reader;
mod rules;
pub mod schema;
pub mod table;
mod typed;
mod unresolved;

pub use auto::{AutoValues, Filled};
pub use batch::BatchSizes;
pub use check::coerce::whole;
pub use compat::{Compat, Drifted, DriftedTo};
pub use diagnostic::{Code, Diagnostic, Position, Report, Severity};
pub use elasticity::Elasticity;
pub use error::ConfigError;
pub use overrides::set;
pub use reader::{MAX_BYTES, MAX_DEPTH};
pub use typed::*;
pub use unresolved::Unresolved;

#[cfg(test)]
extern crate self as ferrospeed_config;
#[cfg(test)]
#[path = "../tests/it/main.rs"]
mod it;
