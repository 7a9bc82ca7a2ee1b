//! The two folders of a search: what is to be tried, and what came of it.
//!
//! Only folders that a search made are emptied: a name that happens to be somebody's home is refused. A search holds both while
//! it goes on; another in the same folders is refused, for each would take the other's runs for its own.

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

use super::settings::Settings;
use crate::commands::offload_folders::{unmakeable, unusable};
use crate::failure::Failure;
use crate::terminal;

/// Tells that a folder is a search's own, and is locked while it is at work.
const MARK: &str = ".ferrospeed-autotuning";
/// Texts that became tokens: they are the same for every search.
const DATA: &str = "data";

/// `exps_dir` and `results_dir`.
pub(super) struct Folders {
    pub(super) experiments: PathBuf,
    pub(super) results: PathBuf,
    /// The marks, locked.
    _held: Vec<File>,
}

impl Folders {
    /// Refuses places where they cannot be.
    pub(super) fn check(settings: &Settings) -> Result<(), Failure> {
        for (key, folder) in [("exps_dir", &settings.exps_dir), ("results_dir", &settings.results_dir)] {
            if let Some(why) = unusable(folder).or_else(|| unmakeable(folder)) {
                return Err(Failure::Usage(format!("autotuning.{key}: {why}")));
            }
        }
        Ok(())
    }

    /// Makes both, or goes on with what an earlier search left in them.
    pub(super) fn open(settings: &Settings) -> Result<Folders, Failure> {
        let mut held = Vec::new();
        let mut folders = vec![&settings.exps_dir];
        // A file is locked once.
        folders.extend(Some(&settings.results_dir).filter(|folder| **folder != settings.exps_dir));
        for folder in folders {
            let io = |error: std::io::Error| Failure::Run(format!("{}: {error}", folder.display()));
            let is_own = folder.join(MARK).exists();
            if settings.overwrite && !is_own && !others(folder, &[DATA]).is_empty() {
                return Err(Failure::Usage(format!(
                    "{} holds files that no search has left there, and would be emptied; name another folder in autotuning.results_dir and exps_dir, or set autotuning.overwrite to false",
                    folder.display()
                )));
            }
            fs::create_dir_all(folder).map_err(io)?;
            held.push(lock(folder)?);
            if settings.overwrite {
                for path in others(folder, &[DATA, MARK]) {
                    if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) }
                        .map_err(io)?;
                }
            }
        }
        Ok(Folders {
            experiments: settings.exps_dir.clone(),
            results: settings.results_dir.clone(),
            _held: held,
        })
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
            ferrospeed_files::write(path, text)
        };
        write().map_err(|error: std::io::Error| Failure::Run(format!("{}: {error}", path.display())))
    }
}

/// What a folder holds besides some names.
fn others(folder: &Path, names: &[&str]) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let entries = entries.filter_map(Result::ok);
    let is_other = |entry: &fs::DirEntry| !names.iter().any(|name| entry.file_name() == *name);
    entries.filter(is_other).map(|entry| entry.path()).collect()
}

/// Takes a folder for this search; the system gives it back when the process ends, however that happens.
fn lock(folder: &Path) -> Result<File, Failure> {
    let path = folder.join(MARK);
    let io = |error: std::io::Error| Failure::Run(format!("{}: {error}", path.display()));
    let file = ferrospeed_files::open_lock(&path).map_err(io)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            return Err(Failure::Run(format!(
                "another search is at work in {}; wait for it, or name other folders in autotuning.results_dir and exps_dir",
                folder.display()
            )));
        }
        Err(TryLockError::Error(error)) => {
            terminal::print_error(&format!(
                "warning: {}: this file system has no locks ({error}); two searches must not share the folder",
                folder.display()
            ));
        }
    }
    Ok(file)
}
