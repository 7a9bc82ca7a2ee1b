//! The inference engine and its server.
//!
//! Reading order: [`core`] (which tokens are computed when, and where their keys and values lie), [`model`] (a pass),
//! [`engine`] (the thread that owns both), [`sampling`], [`speculate`], [`draft`] and [`detokenize`] (from logits to text), [`server`] (OpenAI's
//! endpoints), [`inference`] (DeepSpeed's `init_inference`).

mod answer;
pub mod core;
pub mod detokenize;
pub mod draft;
pub mod engine;
pub mod error;
pub mod inference;
pub mod metrics;
pub mod model;
pub mod request;
pub mod sampling;
pub mod server;
pub mod speculate;
pub mod template;
pub mod together;

pub use engine::Engine;
pub use error::{Result, ServeError};
