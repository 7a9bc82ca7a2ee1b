//! What the tests of every crate share.
//!
//! [`golden`] finds the recorded cases, [`tensors`] reads recorded tensors, [`close`] compares floats.
//! Only ever a dev-dependency: nothing here ships.

pub mod close;
pub mod golden;
pub mod tensors;
