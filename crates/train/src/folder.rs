//! A run's folder and its fixed layout.
//!
//! | path | content |
//! | --- | --- |
//! | `log.jsonl` | one object per step |
//! | `eval.jsonl` | one object per validation |
//! | `config/recipe.toml`, `config/ds_config.json` | the resolved recipe and configuration: they reproduce the run |
//! | `config/run.json` | what the run is: sizes, ranks, steps; for `ferrospeed watch` |
//! | `checkpoints/` | what a run goes on from |
//! | `model/` | a Hugging Face directory with the trained weights |
//! | `report.html` | charts and numbers of the run, in one page that needs nothing else |
//! | `events/` | the same for TensorBoard |
//! | `wandb/` | the same for Weights & Biases, to be uploaded later; with `wandb.enabled` in the ds_config |
//! | `sample.txt` | text the trained model wrote |
//! | `data/` | texts as tokens, where the recipe names texts; made once, of no use to a finished run |
//! | `logs/` | each rank's output |

use std::path::{Path, PathBuf};

use crate::error::{Result, TrainError};

/// Where a run keeps its files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunFolder(PathBuf);

impl RunFolder {
    /// The folder at this path; nothing is created yet.
    pub fn at(path: impl Into<PathBuf>) -> RunFolder {
        RunFolder(path.into())
    }

    /// The folder itself.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// `log.jsonl`
    pub fn log(&self) -> PathBuf {
        self.0.join("log.jsonl")
    }

    /// `eval.jsonl`
    pub fn eval(&self) -> PathBuf {
        self.0.join("eval.jsonl")
    }

    /// `config/`
    pub fn config(&self) -> PathBuf {
        self.0.join("config")
    }

    /// `checkpoints/`
    pub fn checkpoints(&self) -> PathBuf {
        self.0.join("checkpoints")
    }

    /// `config/run.json`
    pub fn about(&self) -> PathBuf {
        self.config().join("run.json")
    }

    /// `wandb/`
    pub fn wandb(&self) -> PathBuf {
        self.0.join("wandb")
    }

    /// `model/`
    pub fn model(&self) -> PathBuf {
        self.0.join("model")
    }

    /// `sample.txt`
    pub fn sample(&self) -> PathBuf {
        self.0.join("sample.txt")
    }

    /// `report.html`
    pub fn report(&self) -> PathBuf {
        self.0.join("report.html")
    }

    /// `data/`
    pub fn data(&self) -> PathBuf {
        self.0.join("data")
    }

    /// `logs/`
    pub fn logs(&self) -> PathBuf {
        self.0.join("logs")
    }

    /// Makes the folders.
    pub fn create(&self) -> Result<()> {
        for folder in [self.config(), self.model(), self.logs()] {
            std::fs::create_dir_all(&folder).map_err(TrainError::io(&folder))?;
        }
        Ok(())
    }
}
