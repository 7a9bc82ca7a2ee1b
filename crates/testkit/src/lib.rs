//! What the tests of every crate share.
//!
//! [`golden`] finds the recorded cases, [`cases`] goes through them all, [`tensors`] reads recorded tensors, [`close`]
//! compares floats and [`movement`] what training changed; [`property`] makes random input; [`browser`] drives a real one;
//! [`child`] starts a test in a process of its own, [`ranks`] jobs of them, [`hosts`] on several hosts; [`skip`] says why a test did not run.
//! Only ever a dev-dependency: nothing here ships.

pub mod browser;
pub mod cases;
pub mod child;
pub mod close;
pub mod golden;
pub mod hosts;
pub mod movement;
pub mod property;
pub mod ranks;
pub mod skip;
pub mod tensors;

#[cfg(test)]
extern crate self as ferrospeed_testkit;
#[cfg(test)]
#[path = "../tests/it/main.rs"]
mod it;
