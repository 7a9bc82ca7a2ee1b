//! Checkpoints: whole or absent, any layout, in and out of DeepSpeed.
//!
//! Our format is a folder per checkpoint: one safetensors file per rank and a [`manifest`] that says which elements of
//! which tensor lie where. Read in this order: [`manifest`], [`shard`] (one rank's file), [`mod@save`] (the protocol),
//! [`directory`] (finding, sweeping, rotating), [`load`] (any stretch of any tensor).
//!
//! The invariant: no code from a file ever runs, and what a file says about itself is checked before it is used.

pub mod deepspeed;
pub mod directory;
mod disk;
mod error;
pub mod fs;
pub mod load;
pub mod manifest;
mod part;
pub mod pt;
pub mod save;
pub mod shard;
pub mod weights;

pub use directory::{
    Listed, Retention, SetAside, candidates, list, of_run, resolve, resolve_any, resolve_newest,
    resolve_universal, set_aside,
};
pub use error::{CheckpointError, Result};
pub use fs::{Disk, FileSystem};
pub use load::{Checkpoint, Readers, Verified, Wanted};
pub use manifest::{Dtype, GroupState, Kind, Manifest, Origin, TensorEntry, TrainingState};
pub use part::Part;
pub use save::{Contents, Target, agree, all_or_none, save};
pub use shard::{PieceBytes, PieceSpec};

#[cfg(test)]
extern crate self as ferrospeed_checkpoint;
#[cfg(test)]
#[path = "../tests/it/main.rs"]
mod it;
