//! The folders that a configuration offloads to, and whether this machine can write there.

use std::path::{Path, PathBuf};

use ferrospeed_config::{Config, OptimizerTier, ParameterTier};
use ferrospeed_launch::probe;
use ferrospeed_train::Recipe;
use serde_json::Value;

use super::writable::{absent, impossible, nearest, remove_empty, unwritable};
use crate::failure::Failure;

/// The folders that the configuration offloads to.
pub(super) fn offload_folders(config: &Config) -> Vec<PathBuf> {
    let optimizer = match &config.zero.offload_optimizer.tier {
        OptimizerTier::Nvme { buffers, .. } => Some(&buffers.path),
        _ => None,
    };
    let parameters = match &config.zero.offload_param.tier {
        ParameterTier::Nvme { buffers, .. } => Some(&buffers.path),
        ParameterTier::Device | ParameterTier::Host(_) => None,
    };
    let mut folders: Vec<PathBuf> = optimizer.into_iter().chain(parameters).cloned().collect();
    folders.dedup();
    folders
}

/// Refuses to offload to what is there and is no folder that can be written to.
pub(super) fn check_offload_folders(config: &Config) -> Result<(), Failure> {
    refuse(offload_folders(config).iter().find_map(|folder| unusable(folder)))
}

/// Refuses folders that are not there and cannot be made, for a run on this machine.
pub(super) fn check_folders_to_make(config: &Config) -> Result<(), Failure> {
    refuse(offload_folders(config).iter().find_map(|folder| unmakeable(folder)))
}

fn refuse(why: Option<String>) -> Result<(), Failure> {
    why.map_or(Ok(()), |why| Err(Failure::Usage(format!("nvme_path: {why}"))))
}

/// What is wrong with the folders that a configuration names, whose sizes need not be known. One that is not there may be made,
/// or may be on the machine that the configuration is for.
pub(super) fn problems(source: &Value) -> Vec<String> {
    let problem = |section: &str| {
        let given = &source["zero_optimization"][section];
        let folder = given["nvme_path"].as_str().filter(|_| given["device"] == "nvme")?;
        Some(format!("zero_optimization.{section}.nvme_path: {}", unusable(Path::new(folder))?))
    };
    ["offload_param", "offload_optimizer"].into_iter().filter_map(problem).collect()
}

/// Why nothing can be written into a folder that is there, or can never be there.
pub(super) fn unusable(folder: &Path) -> Option<String> {
    if let Some(why) = impossible(folder) {
        return Some(why);
    }
    let existing = nearest(folder);
    if !existing.is_dir() {
        let file = existing.display();
        return Some(format!("{file} is no folder; name one"));
    }
    let why = unwritable(folder).filter(|_| existing == folder)?;
    Some(format!("{} cannot be written to ({why}); name a folder that can", folder.display()))
}

/// Why a folder that is not there cannot be made.
pub(super) fn unmakeable(folder: &Path) -> Option<String> {
    let existing = nearest(folder);
    let why = unwritable(existing).filter(|_| existing != folder)?;
    let (folder, existing) = (folder.display(), existing.display());
    Some(format!(
        "{folder} is not there and cannot be made: {existing} cannot be written to ({why}); name another place"
    ))
}

/// What is free on the disk of a folder; one that is made later lies on the disk of the one that it is made in.
pub(super) fn free_bytes(folder: &Path) -> Result<u64, String> {
    probe::free_disk_bytes(nearest(folder))
}

/// Folders that a run will make for its state: it takes them away when it is over, where nothing is in them.
#[derive(Debug)]
pub(super) struct FoldersToMake {
    /// What is not there yet, the innermost first.
    absent: Vec<PathBuf>,
}

impl FoldersToMake {
    pub(super) fn of(recipe: &Recipe) -> FoldersToMake {
        let folders = recipe.config().map_or_else(|_| Vec::new(), |(config, _)| offload_folders(&config));
        FoldersToMake { absent: folders.iter().flat_map(|folder| absent(folder)).collect() }
    }
}

impl Drop for FoldersToMake {
    fn drop(&mut self) {
        remove_empty(&self.absent);
    }
}
