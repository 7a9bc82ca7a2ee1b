//! DeepSpeed's `init_inference`: its configuration, and an engine that generates by it.
//!
//! [`config`] reads the settings, `checkpoint` the description of weights that lie elsewhere, [`merge`] joins a file or object with arguments, [`shards`] says how weights
//! would be cut for tensor parallelism, [`quantize`] is both of its int8 quantizers, [`engine`] is what
//! [`init_inference`] gives. A setting that nothing acts on is named in a warning, one that would change results is refused.

mod checkpoint;
pub mod config;
pub mod engine;
mod fields;
pub mod merge;
pub mod quantize;
pub mod shards;

use std::path::PathBuf;

use thiserror::Error;

pub use config::{InferenceConfig, InferenceDtype};
pub use engine::{InferenceEngine, init_inference};

/// What is wrong with a configuration or a call.
#[derive(Debug, Error)]
pub enum InferenceError {
    /// A setting, by its path.
    #[error("{}: {why}", path.join(" -> "))]
    Setting {
        /// The keys, outermost first.
        path: Vec<String>,
        /// Why.
        why: String,
    },
    /// A deprecated setting beside the one that replaces it.
    #[error("Cannot provide deprecated parameter '{old}' and replacing parameter '{new}' together")]
    Replaced {
        /// The deprecated one.
        old: String,
        /// Its replacement.
        new: String,
    },
    /// Configuration and arguments disagree.
    #[error("Conflicting argument '{key}' in 'config':{config} and kwargs:{argument}")]
    Conflict {
        /// The key.
        key: String,
        /// What the configuration says.
        config: String,
        /// What the arguments say.
        argument: String,
    },
    /// Neither path nor object.
    #[error("'config' argument expected string or dictionary, got {0}")]
    NoConfig(&'static str),
    /// A file that cannot be read.
    #[error("{}: {why}", file.display())]
    File {
        /// Which.
        file: PathBuf,
        /// Why.
        why: String,
    },
    /// Something that DeepSpeed has and this engine has not.
    #[error("{what} is not supported: {why}")]
    NotBuilt {
        /// The setting.
        what: String,
        /// What to do instead.
        why: String,
    },
    /// A prompt that does not fit.
    #[error(
        "Input with size {tokens} exceeds maximum length of {most}. Please increase `max_tokens` in the DeepSpeed Inference Config."
    )]
    TooLong {
        /// Prompt and new tokens.
        tokens: usize,
        /// What may be.
        most: usize,
    },
    /// A prompt that the model cannot read.
    #[error("prompt {number} {why}")]
    Prompt {
        /// Its place in the call, from 0.
        number: usize,
        /// Why.
        why: String,
    },
    /// Times that nobody asked for.
    #[error("model profiling is not enabled")]
    NotProfiling,
    /// A layer that a policy names and the model has not.
    #[error("Injection policy layer'{0}' not valid.")]
    NoLayer(String),
    /// Two ways of replacing layers.
    #[error("Cannot use both user specified injection policy and kernel injection")]
    TwoInjections,
    /// The engine.
    #[error(transparent)]
    Serve(#[from] crate::ServeError),
    /// A request that failed.
    #[error("the engine gave no answer: {0}")]
    Failed(String),
}

/// Results of this module.
pub type Result<T, E = InferenceError> = std::result::Result<T, E>;
