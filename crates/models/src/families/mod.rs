//! One file per family: its `config.json` and its tensor names.

pub mod bloom;
pub mod dense;
pub mod gpt2;
pub mod gpt_neox;
pub mod llama;
pub mod mixture;
pub mod opt;
pub mod phi3;
pub mod sparse;
