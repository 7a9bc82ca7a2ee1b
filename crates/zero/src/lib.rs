//! Where model state lives: ZeRO stages 0 to 3 as one store.
//!
//! Who owns what, where it lies, what travels together and what a step does is placed before, as data
//! ([`ferrospeed_placement`]); here is the memory of it, and who walks through the program. Read in this order: `sharding` (among whom), `store` (attach a
//! model; `fill` loads it), `reducer` (gradients; `sums` of micro-batches, `rows` for tables; `quantized_gradients` on the wire), `residency` (stage 3's parameters, by the order of `trace`; `quantized` on the wire, `packed` where frozen), `step` (the update; `away` where state is not at hand, `homes` says where; `matrices` for Muon, `one_bit` where momentum is exchanged), [`access`] (looking in), `snapshot`
//! (to and from checkpoints), `lens` (what kernels see of weights that are trained to be compressed).
//!
//! What the stages share is more than what separates them ([`ferrospeed_placement::stage`]). Losses, norms and weights are the same to the last bit in all four.

pub mod access;
mod attached;
mod away;
pub mod bench;
mod error;
mod fill;
mod hold;
mod home;
mod homes;
mod lamb;
mod landing;
mod layer_norms;
mod lens;
mod matrices;
mod memory;
mod one_bit;
mod packed;
mod publish;
mod quantized;
mod quantized_gradients;
mod reducer;
mod residency;
mod sharding;
mod snapshot;
mod step;
mod store;
mod trace;
mod update;
mod updates;

pub use error::{Result, ZeroError};
pub use homes::Homes;
pub use lens::Lens;
pub use one_bit::OwnNumbers;
pub use residency::Pass;
pub use sharding::{Elsewhere, Sharding};
pub use snapshot::{Held, Saved, SavedPiece};
pub use step::{StepOptions, StepOutcome};
pub use store::{ParamGroup, StoreOptions, ZeroStore, data_type, group_facts};

#[cfg(test)]
extern crate self as ferrospeed_zero;
#[cfg(test)]
#[path = "../tests/it/main.rs"]
mod it;
