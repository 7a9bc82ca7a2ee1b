//! The folders that a configuration offloads to, and whether this machine can write there.

use std::fs::File;
use std::path::{Path, PathBuf};

use ferrospeed_command::Failure;
use ferrospeed_command::writable::{absent, nearest, remove_empty, unmakeable, unusable};
use ferrospeed_config::{Config, OptimizerTier, ParameterTier};
use ferrospeed_launch::probe;
use ferrospeed_train::Recipe;
use serde_json::Value;

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

/// What is free on the disk of a folder; one that is made later lies on the disk of the one that it is made in.
pub(super) fn free_bytes(folder: &Path) -> Result<u64, String> {
    probe::free_disk_bytes(nearest(folder))
}

/// How a file begins that marks a folder which a run has made: who holds its lock still runs. It ends with how many folders were made,
/// this one and those it lies in, and is empty, so that it takes nothing of a disk.
const MARK: &str = ".made-by-ferrospeed-";

/// Folders that a run makes for its state: it takes them away when it is over, where nothing is in them. Those that a killed run has
/// left are taken over by the next that uses them.
#[derive(Debug)]
pub(super) struct FoldersToMake(Vec<MadeFolder>);

/// A folder with a mark, which is held.
#[derive(Debug)]
struct MadeFolder {
    mark: PathBuf,
    _lock: File,
    made: Vec<PathBuf>,
}

impl FoldersToMake {
    pub(super) fn of(recipe: &Recipe) -> FoldersToMake {
        let folders = recipe.config().map_or_else(|_| Vec::new(), |(config, _)| offload_folders(&config));
        FoldersToMake(folders.iter().filter_map(|folder| MadeFolder::make(folder)).collect())
    }
}

impl Drop for FoldersToMake {
    fn drop(&mut self) {
        // What the first has made may hold the others.
        while self.0.pop().is_some() {}
    }
}

impl MadeFolder {
    /// `None` for a folder that is somebody's, or cannot be made: who needs it says why.
    fn make(folder: &Path) -> Option<MadeFolder> {
        let folder = std::path::absolute(folder).ok()?;
        let made = absent(&folder);
        if made.is_empty() {
            return MadeFolder::take_over(&folder);
        }
        let mark = folder.join(format!("{MARK}{}", made.len()));
        let lock = std::fs::create_dir_all(&folder).and_then(|()| File::create_new(&mark));
        match lock.map(|lock| (lock.try_lock(), lock)) {
            Ok((Ok(()), lock)) => Some(MadeFolder { mark, _lock: lock, made }),
            _ => {
                let _ = std::fs::remove_file(&mark);
                remove_empty(&made);
                None
            }
        }
    }

    /// What a run has made that is no more.
    fn take_over(folder: &Path) -> Option<MadeFolder> {
        let entries = std::fs::read_dir(folder).ok()?.flatten();
        let (mark, count) = entries.into_iter().find_map(|entry| {
            let count = entry.file_name().to_str()?.strip_prefix(MARK)?.parse().ok()?;
            Some((entry.path(), count))
        })?;
        let lock = ferrospeed_files::open(&mark).ok()?;
        lock.try_lock().ok()?;
        // None of them is removed that is not empty.
        let made = folder.ancestors().take(count).map(Path::to_path_buf).collect();
        Some(MadeFolder { mark, _lock: lock, made })
    }
}

impl Drop for MadeFolder {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.mark);
        remove_empty(&self.made);
    }
}
