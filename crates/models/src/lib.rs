//! Transformer families in their Hugging Face form: `config.json` in, safetensors in and out, GGUF in.
//!
//! A decoder is one structure ([`Decoder`]) described by data ([`DecoderConfig`]); a family is a file in
//! [`families`] that reads its `config.json` and says how its tensors are named. BERT, which is no decoder, is a
//! model of its own. There is no training logic here.
//!
//! Reading order: [`config`], [`decoder`], one family (`families/llama.rs`), [`weights`], [`directory`], [`generate`].

pub mod adapter;
pub mod bert;
pub mod config;
pub mod decoder;
pub mod directory;
pub mod error;
pub mod families;
pub mod fields;
pub mod generate;
pub mod gguf;
pub mod json;
mod limits;
mod model_files;
pub mod pack;
pub mod presets;
pub mod roles;
mod rope;
mod shortlist;
mod stepper;
pub mod weights;

pub use bert::Bert;
pub use config::{ModelConfig, WindowRule};
pub use decoder::{Decoder, DecoderConfig, Labelled, PageSteps, Tokens};
pub use error::{ModelError, Result};
pub use model_files::{ModelFiles, TextFiles};

#[cfg(test)]
extern crate self as ferrospeed_models;
#[cfg(test)]
#[path = "../tests/it/main.rs"]
mod it;
