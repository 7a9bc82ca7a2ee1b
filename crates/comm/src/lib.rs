//! Ranks talk: process groups, collectives, deadlines.
//!
//! This crate knows bytes, element types and counts, no tensors. It promises three things: results are **bit-identical**
//! on every rank, from run to run and on every backend, because every reduction is a fold in rank order; an operation
//! **never hangs silently**, because each has a deadline and a fingerprint that peers compare; and collectives over
//! **registered memory** ([`World::allocate`]) copy no byte that they need not.
//!
//! ```
//! use ferrospeed_comm::{ReduceOp, World};
//!
//! let ranks: Vec<_> = World::threads(4)
//!     .into_iter()
//!     .map(|world| {
//!         std::thread::spawn(move || {
//!             let mut values = vec![world.rank() as f32; 3];
//!             world.group().all_reduce(&mut values, ReduceOp::Sum)?;
//!             Ok::<_, ferrospeed_comm::Error>(values)
//!         })
//!     })
//!     .collect();
//! for rank in ranks {
//!     assert_eq!(rank.join().unwrap()?, [6.0; 3]);
//! }
//! # Ok::<(), ferrospeed_comm::Error>(())
//! ```

mod auth;
mod backend;
pub mod bench;
pub mod blame;
mod copy;
pub mod discover;
mod dtype;
mod error;
mod group;
mod lane;
pub mod layout;
pub mod logger;
mod mesh;
mod op;
pub mod private;
mod reception;
pub mod recorder;
pub mod reduce;
mod region;
pub mod rendezvous;
mod said;
mod sealed;
mod segment;
mod state;
mod store;
mod sys;
pub mod topology;
pub mod trace;
mod world;

pub use backend::nccl::DeviceStream;
pub use dtype::{DType, Element, ReduceOp};
pub use error::{Error, Loss, Result};
pub use group::Group;
pub use lane::{Work, wait_all};
pub use mesh::{ExpertMembership, Mesh, SEQUENCE};
pub use op::Kind;
pub use region::Region;
pub use rendezvous::init_distributed;
pub use rendezvous::{Backend, ConnectOptions, leave_meetings};
pub use said::{ASKED_FOR, print_what_was_asked_for, tell};
pub use segment::Registered;
pub use topology::ProcessTopology;
pub use world::{DEFAULT_DEADLINE, DEFAULT_STAGING_BYTES, Limits, World};
