//! What the tests of every crate share.
//!
//! [`golden`] finds the recorded cases, [`cases`] goes through them all, [`tensors`] reads recorded tensors, [`close`]
//! compares floats and [`movement`] what training changed; [`property`] makes random input; [`browser`] drives a real one; [`skip`] says why a test did not run.
//! Only ever a dev-dependency: nothing here ships.

pub mod browser;
pub mod cases;
pub mod close;
pub mod golden;
pub mod movement;
pub mod property;
pub mod skip;
pub mod tensors;
