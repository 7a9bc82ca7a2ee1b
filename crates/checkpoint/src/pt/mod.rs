//! Torch's `.pt` files: a zip of stored entries, one of which is a pickle that describes tensors in the others.
//!
//! Reading interprets the pickle as data: a fixed set of opcodes, a fixed list of names that mean something, and
//! nothing is ever called. Sizes, depths and counts have limits ([`pickle::Limits`]); compressed entries are refused,
//! so a file cannot unpack to more than it is. Writing uses the same opcodes and names, so torch reads it.

pub mod pickle;
mod pickle_write;
mod read;
mod value;
mod write;
pub mod zip;

pub use pickle::Unknown;
pub use read::PtFile;
pub use value::{StoredTensor, Value};
pub use write::{StorageToWrite, TensorTable, write_pt};
