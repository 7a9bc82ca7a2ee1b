//! What commands share, in whichever crate they are: the options that several take, what is printed, and why a command failed.

mod device;
mod failure;
pub mod hub;
pub mod patient;
pub mod place;
mod served_model;
mod size;
pub mod terminal;
pub mod writable;

pub use device::DeviceChoice;
pub use failure::Failure;
pub use hub::NamedModel;
pub use served_model::ServedModel;
pub use size::parse_size;
