//! The inference engine and its server.
//!
//! Reading order: [`core`] (which tokens are computed when, and where their keys and values lie).

pub mod core;
