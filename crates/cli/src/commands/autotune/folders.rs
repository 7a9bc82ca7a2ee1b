//! The two folders of a search: what is to be tried, and what came of it.
//!
//! Only folders that a search made are emptied: a name that happens to be somebody's home is refused.

use std::fs;
use std::path::{Path, PathBuf};

use super::settings::Settings;
use crate::failure::Failure;

/// Tells that a folder is a search's own.
const MARK: &str = ".ferrospeed-autotuning";

/// `exps_dir` and `results_dir`.
pub(super) struct Folders {
    pub(super) experiments: PathBuf,
    pub(super) results: PathBuf,
}

impl Folders {
    /// Makes both, or goes on with what an earlier search left in them.
    pub(super) fn open(settings: &Settings) -> Result<Folders, Failure> {
        for folder in [&settings.exps_dir, &settings.results_dir] {
            let io = |error: std::io::Error| Failure::Run(format!("{}: {error}", folder.display()));
            let is_own = folder.join(MARK).exists();
            let is_used = fs::read_dir(folder).is_ok_and(|mut entries| {
                entries.any(|entry| entry.is_ok_and(|entry| entry.file_name() != "data"))
            });
            if settings.overwrite && is_used {
                if !is_own {
                    return Err(Failure::Usage(format!(
                        "{} holds files that no search has left there, and would be emptied; name another folder in autotuning.results_dir and exps_dir, or set autotuning.overwrite to false",
                        folder.display()
                    )));
                }
                fs::remove_dir_all(folder).map_err(io)?;
            }
            fs::create_dir_all(folder).map_err(io)?;
            fs::write(folder.join(MARK), "").map_err(io)?;
        }
        Ok(Folders { experiments: settings.exps_dir.clone(), results: settings.results_dir.clone() })
    }

    /// Where the files of an experiment are.
    pub(super) fn result(&self, name: &str) -> PathBuf {
        self.results.join(name)
    }

    /// What is to be tried.
    pub(super) fn experiment(&self, name: &str) -> PathBuf {
        self.experiments.join(format!("{name}.json"))
    }

    /// Writes a file, with the folder it is in.
    pub(super) fn write(&self, path: &Path, text: &str) -> Result<(), Failure> {
        let write = || {
            path.parent().map_or(Ok(()), fs::create_dir_all)?;
            fs::write(path, text)
        };
        write().map_err(|error: std::io::Error| Failure::Run(format!("{}: {error}", path.display())))
    }
}
