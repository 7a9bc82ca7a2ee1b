//! What serving decides without running anything: which tokens are computed when, and where their keys and values lie.
//!
//! [`pool`] hands out blocks of the cache; [`schedule`] says which tokens the next pass computes. Neither knows a model, a
//! clock or a client, so both are tested by random histories.

pub mod pool;
pub mod schedule;
