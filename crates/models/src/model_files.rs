//! A model wherever it lies: in a Hugging Face directory, in one GGUF file, or in a directory with an adapter of another model.

use std::path::{Path, PathBuf};

use ferrospeed_tensor::DType;
use ferrospeed_tensor::store::ParamSource;
use serde_json::Value;

use crate::adapter::{AdapterFiles, MergedWeights};
use crate::config::{ModelConfig, WindowRule, read_config, read_json};
use crate::directory::{TOKENIZER_FILES, copy_companions, end_tokens_of, write_json};
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
    weights: Weights,
    dtype: DType,
    text: TextFiles,
}

/// The weights of a model.
#[derive(Debug)]
enum Weights {
    /// As they lie.
    Own(WeightFiles),
    /// With an adapter.
    Adapted(Box<MergedWeights>),
}

impl ModelFiles {
    /// Opens a Hugging Face directory or a GGUF file. A `tokenizer.json` beside a GGUF file stands for the file's own. A directory
    /// with an adapter is the model that it names, with the adapter worked into its weights.
    pub fn open(path: &Path) -> Result<ModelFiles> {
        ModelFiles::open_on(path, None)
    }

    /// The same; `base`: the directory of the model that an adapter is of.
    pub fn open_on(path: &Path, base: Option<&Path>) -> Result<ModelFiles> {
        if !path.exists() {
            return Err(ModelError::file(path, "does not exist"));
        }
        if path.is_dir() && AdapterFiles::are_in(path) && !WeightFiles::are_in(path) {
            return ModelFiles::with_adapter(AdapterFiles::open(path)?, base);
        }
        if base.is_some() {
            return Err(ModelError::file(
                path,
                "is no directory with an adapter, so it has no base model; leave out --base",
            ));
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
            weights: Weights::Own(opened.weights),
            dtype: opened.dtype,
            text: TextFiles::Held { tokenizer, config: opened.tokenizer_config },
        })
    }

    /// Opens a Hugging Face directory whose weights are in these files.
    pub fn open_with_weights(directory: &Path, weights: &[PathBuf]) -> Result<ModelFiles> {
        ModelFiles::in_directory(directory, || WeightFiles::open(weights))
    }

    /// The model that an adapter is of, with the adapter. Tokenizer and template are those beside the adapter, if there are any.
    fn with_adapter(adapter: AdapterFiles, base: Option<&Path>) -> Result<ModelFiles> {
        let base = adapter.base_directory(base)?;
        if AdapterFiles::are_in(&base) && !WeightFiles::are_in(&base) {
            let why = format!(
                "is an adapter of {}, which is an adapter too; merge that one into its model first (`ferrospeed model merge`)",
                base.display()
            );
            return Err(ModelError::file(adapter.path(), why));
        }
        let ModelFiles { config, weights, dtype, text, .. } = ModelFiles::open(&base)?;
        let Weights::Own(weights) = weights else {
            return Err(ModelError::file(&base, "is no model of its own"));
        };
        let path = adapter.path().to_path_buf();
        let text = match TOKENIZER_FILES.iter().any(|name| path.join(name).is_file()) {
            true => TextFiles::In(path.clone()),
            false => text,
        };
        let model = ModelConfig::from_value(&config, WindowRule::default())?;
        let merged = MergedWeights::new(model, weights, adapter)?;
        Ok(ModelFiles { path, config, weights: Weights::Adapted(Box::new(merged)), dtype, text })
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
            weights: Weights::Own(weights),
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

    /// Its tensors as they lie; where it has an adapter, those of the model alone.
    pub fn weights(&self) -> &WeightFiles {
        match &self.weights {
            Weights::Own(weights) => weights,
            Weights::Adapted(merged) => merged.base(),
        }
    }

    /// What gives its weights their values, with the adapter where it has one.
    pub fn source(&self) -> &dyn ParamSource {
        match &self.weights {
            Weights::Own(weights) => weights,
            Weights::Adapted(merged) => &**merged,
        }
    }

    /// The adapter, where it has one.
    pub fn adapter(&self) -> Option<&AdapterFiles> {
        match &self.weights {
            Weights::Own(_) => None,
            Weights::Adapted(merged) => Some(merged.adapter()),
        }
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
            TextFiles::In(directory) => match (crate::directory::end_tokens(directory)?, &self.weights) {
                // Beside an adapter there need be no word of it.
                (none, Weights::Adapted(_)) if none.is_empty() => {
                    Ok(end_tokens_of(&self.config, &self.path)?.unwrap_or_default())
                }
                (found, _) => Ok(found),
            },
            TextFiles::Held { .. } => Ok(end_tokens_of(&self.config, &self.path)?.unwrap_or_default()),
        }
    }

    /// Writes what is neither weights nor `config.json` into a directory.
    pub(crate) fn write_companions(&self, target: &Path) -> Result<()> {
        match &self.text {
            TextFiles::In(directory) => {
                // What lies beside an adapter stands for what lies beside its model.
                if let (Weights::Adapted(merged), Some(base)) = (&self.weights, self.weights().paths().next())
                    && let Some(base) = base.parent().filter(|base| base.join("config.json").is_file())
                    && merged.adapter().path() == directory
                {
                    copy_companions(base, target)?;
                }
                copy_companions(directory, target)
            }
            TextFiles::Held { tokenizer, config } => {
                write_json(&target.join("tokenizer.json"), tokenizer)?;
                write_json(&target.join("tokenizer_config.json"), config)
            }
        }
    }
}
