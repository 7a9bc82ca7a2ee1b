//! Tensors between ranks.
//!
//! [`exchange`] moves tensors, wherever their memory is, and returns at once; [`ops`] are collectives that autograd knows:
//! each has its transpose as its backward; [`hops`] reduces in integers of four bits, as [`packing`] lays them out; [`one_bit`] averages at one bit per value; [`shelf`] spreads what waits
//! for backward; [`mod@bench`] measures packing. Groups are handed in; nothing here knows of parameters or of the world.
//!
//! ```
//! use ferrospeed_collective::ops;
//! use ferrospeed_comm::World;
//! use ferrospeed_tensor::{DType, Tensor};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let group = World::solo().group();
//! let x = Tensor::full([2, 3], 1.0, DType::F32, &ferrospeed_cpu::device())?;
//! assert_eq!(ops::all_gather(&x, 1, &group)?.sizes(), [2, 3]);
//! # Ok(())
//! # }
//! ```

pub mod bench;
mod error;
pub mod exchange;
pub mod hops;
pub mod one_bit;
pub mod ops;
pub mod packing;
pub mod shelf;
mod staging;

pub use error::{CollectiveError, Result};

#[cfg(test)]
extern crate self as ferrospeed_collective;
#[cfg(test)]
#[path = "../tests/it/main.rs"]
mod it;
