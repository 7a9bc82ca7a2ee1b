//! A model wherever it lies: in a Hugging Face directory, or in one GGUF file.

use std::path::{Path, PathBuf};

use ferrospeed_tensor::DType;
use serde_json::Value;

use crate::config::{ModelConfig, WindowRule, read_config, read_json};
use crate::directory::{copy_companions, end_tokens_of, write_json};
use crate::error::{ModelError, Result};
use crate::gguf;
use crate::weights::WeightFiles;

/// What says how text becomes tokens, and a conversation a text.
#[derive(Debug)]
pub enum TextFiles {
    /// The files of a directory.
    In(PathBuf),
    /// What a file holds.
    Held {
        /// `tokenizer.json`.
        tokenizer: Value,
        /// `tokenizer_config.json`.
        config: Value,
    },
}

/// A model whose files are open and whose weights are not yet read.
#[derive(Debug)]
pub struct ModelFiles {
    path: PathBuf,
    config: Value,
    weights: WeightFiles,
    dtype: DType,
    text: TextFiles,
}

impl ModelFiles {
    /// Opens a Hugging Face directory or a GGUF file. A `tokenizer.json` beside a GGUF file stands for the file's own.
    pub fn open(path: &Path) -> Result<ModelFiles> {
        if !path.exists() {
            return Err(ModelError::file(path, "does not exist"));
        }
        if !gguf::is_gguf(path) {
            return ModelFiles::in_directory(path, || WeightFiles::open_directory(path));
        }
        let opened = gguf::open(path)?;
        let beside = path.with_file_name("tokenizer.json");
        let tokenizer = match (beside.is_file(), opened.tokenizer) {
            (true, _) => read_json(&beside)?,
            (false, Ok(tokenizer)) => tokenizer,
            (false, Err(error)) => {
                let why = format!(
                    "the tokenizer inside cannot be built ({error}); put the model's tokenizer.json beside the file"
                );
                return Err(ModelError::file(path, why));
            }
        };
        Ok(ModelFiles {
            path: path.to_path_buf(),
            config: opened.config,
            weights: opened.weights,
            dtype: opened.dtype,
            text: TextFiles::Held { tokenizer, config: opened.tokenizer_config },
        })
    }

    /// Opens a Hugging Face directory whose weights are in these files.
    pub fn open_with_weights(directory: &Path, weights: &[PathBuf]) -> Result<ModelFiles> {
        ModelFiles::in_directory(directory, || WeightFiles::open(weights))
    }

    fn in_directory(path: &Path, weights: impl FnOnce() -> Result<WeightFiles>) -> Result<ModelFiles> {
        // What the directory says it is comes first: a model that we do not know needs no weights to be refused.
        let config = read_config(path)?;
        ModelConfig::from_value(&config, WindowRule::default())?;
        let weights = weights()?;
        let stored = weights.tensors().values().map(|tensor| tensor.dtype).find(|dtype| dtype.is_float());
        Ok(ModelFiles {
            path: path.to_path_buf(),
            config,
            weights,
            dtype: stored.unwrap_or(DType::F32),
            text: TextFiles::In(path.to_path_buf()),
        })
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The parsed `config.json`.
    pub fn config(&self) -> &Value {
        &self.config
    }

    /// The model that it describes.
    pub fn model(&self) -> Result<ModelConfig> {
        ModelConfig::from_value(&self.config, WindowRule::default())
    }

    /// Its tensors.
    pub fn weights(&self) -> &WeightFiles {
        &self.weights
    }

    /// The type of its whole weights.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Tokenizer and chat template.
    pub fn text(&self) -> &TextFiles {
        &self.text
    }

    /// The tokens with which it ends its texts.
    pub fn end_tokens(&self) -> Result<Vec<i64>> {
        match &self.text {
            TextFiles::In(directory) => crate::directory::end_tokens(directory),
            TextFiles::Held { .. } => Ok(end_tokens_of(&self.config, &self.path)?.unwrap_or_default()),
        }
    }

    /// Writes what is neither weights nor `config.json` into a directory.
    pub(crate) fn write_companions(&self, target: &Path) -> Result<()> {
        match &self.text {
            TextFiles::In(directory) => copy_companions(directory, target),
            TextFiles::Held { tokenizer, config } => {
                write_json(&target.join("tokenizer.json"), tokenizer)?;
                write_json(&target.join("tokenizer_config.json"), config)
            }
        }
    }
}
