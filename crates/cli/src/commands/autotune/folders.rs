//! The two folders of a search: what is to be tried, and what came of it.
//!
//! They are folders of a search's own: a name that happens to be somebody's home is refused, before anything is written there. Of
//! those that a search made, what searches write is removed to make room, and nothing else. A search holds both while it goes on;
//! another in the same folders is refused, for each would take the other's runs for its own.

use std::fs::{self, File, TryLockError};
use std::io::Write;
use std::path::{Path, PathBuf};

use ferrospeed_command::writable::{unmakeable, unusable};
use ferrospeed_command::{Failure, terminal};
use serde_json::Value;

use super::settings::Settings;

/// Tells that a folder is a search's own, and is locked while it is at work.
const MARK: &str = ".ferrospeed-autotuning";
/// What it holds. Without it, it may be in a folder that held something else before.
const OWN: &str = "A search made this folder, and a later one may remove what it wrote.\n";
/// What a search writes into the folder of results besides folders.
const RESULTS: [&str; 4] = ["summary.txt", "report.html", BEST_CONFIG, BEST_COMMAND];
/// The configuration that was found, and the command that trains with it.
pub(super) const BEST_CONFIG: &str = "ds_config_optimal.json";
pub(super) const BEST_COMMAND: &str = "cmd_optimal.txt";
/// One of these is in the folder of an experiment, or of what was found out about the model.
const EXPERIMENT: [&str; 3] = ["cmd.txt", "exp.json", "model_info.json"];
/// Texts that became tokens: they are the same for every search.
const DATA: &str = "data";
const MAX_EXPERIMENT_BYTES: u64 = 16 << 20;

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
            if !is_own(folder) && !others(folder, &[DATA, MARK]).is_empty() {
                return Err(Failure::Usage(format!(
                    "autotuning.{key}: {} holds files that no search has left there; name a folder that is not there yet, or an empty one",
                    folder.display()
                )));
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
            ferrospeed_files::create_folder(folder).map_err(io)?;
            held.push(lock(folder)?);
            if settings.overwrite {
                for path in others(folder, &[DATA, MARK]).iter().filter(|path| is_of_search(path)) {
                    if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }
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

/// Whether a search made the folder.
fn is_own(folder: &Path) -> bool {
    ferrospeed_files::read_text(folder.join(MARK), OWN.len() as u64).is_ok_and(|text| text == OWN)
}

/// Whether something in a search's folder is what searches write.
fn is_of_search(path: &Path) -> bool {
    if path.is_symlink() {
        return false;
    }
    if path.is_dir() {
        return EXPERIMENT.iter().any(|name| path.join(name).is_file());
    }
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    RESULTS.contains(&name) || is_experiment(path)
}

/// Whether a file says what is to be tried: its own name is in it.
fn is_experiment(path: &Path) -> bool {
    let text = ferrospeed_files::read(path, MAX_EXPERIMENT_BYTES).unwrap_or_default();
    let said: Value = serde_json::from_slice(&text).unwrap_or_default();
    let name = path.file_stem().and_then(|name| name.to_str());
    said["ds_config"].is_object() && said["name"].as_str() == name
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
    // Not written again: on a full disk nothing would be left of it, and the folder somebody else's.
    if !is_own(folder) {
        file.set_len(0).and_then(|()| (&file).write_all(OWN.as_bytes())).map_err(io)?;
    }
    Ok(file)
}
