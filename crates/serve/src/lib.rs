//! The inference engine and its server.
//!
//! Reading order: [`core`] (which tokens are computed when, and where their keys and values lie), [`runner`] (a pass),
//! [`model`] (what it runs on, [`weights_home`]: weights that wait elsewhere), [`engine`] (the thread that owns both), `known` (how likely a text is that is there already), [`sampling`], [`constrain`] (what an answer has to be), [`speculate`], [`draft`] and [`detokenize`] (from logits to text), [`server`] (OpenAI's
//! endpoints), [`inference`] (DeepSpeed's `init_inference`), [`hybrid`] (what trains also generates).

mod answer;
pub mod constrain;
pub mod core;
pub mod detokenize;
pub mod draft;
pub mod engine;
pub mod error;
pub mod hybrid;
pub mod inference;
mod known;
pub mod metrics;
pub mod model;
mod paired;
pub mod request;
pub mod runner;
pub mod sampling;
pub mod server;
pub mod speculate;
pub mod together;
mod untold;
pub mod weights_home;

pub use engine::Engine;
pub use error::{Result, ServeError};

#[cfg(test)]
extern crate self as ferrospeed_serve;
#[cfg(test)]
#[path = "../tests/it/main.rs"]
mod it;
