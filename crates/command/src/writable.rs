//! Whether something can be written at a place, asked before the work whose result goes there.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use nix::sys::statfs::{
    CGROUP_SUPER_MAGIC, CGROUP2_SUPER_MAGIC, DEBUGFS_MAGIC, PROC_SUPER_MAGIC, SYSFS_MAGIC, statfs,
};
use nix::unistd::{AccessFlags, access};

/// Where the kernel shows itself as files. Root may write there by the rights, and then cannot.
const OF_KERNEL: [nix::sys::statfs::FsType; 5] =
    [PROC_SUPER_MAGIC, SYSFS_MAGIC, CGROUP_SUPER_MAGIC, CGROUP2_SUPER_MAGIC, DEBUGFS_MAGIC];

/// Why a path can be no file's or folder's, on any machine.
pub fn impossible(path: &Path) -> Option<String> {
    let shown = path.display();
    if path.as_os_str().as_bytes().contains(&0) {
        return Some(format!("{shown:?} holds a NUL character, which no path has"));
    }
    let is_of_kernel = statfs(nearest(path)).is_ok_and(|found| OF_KERNEL.contains(&found.filesystem_type()));
    is_of_kernel.then(|| format!("{shown} is the kernel's, which keeps nobody's files; name another place"))
}

/// A path, or the first above it that is there.
pub fn nearest(path: &Path) -> &Path {
    let is_there = |path: &&Path| !path.as_os_str().is_empty() && path.symlink_metadata().is_ok();
    path.ancestors().find(is_there).unwrap_or(Path::new("."))
}

/// What of a path is not there, the innermost first.
pub fn absent(path: &Path) -> Vec<PathBuf> {
    let existing = nearest(path);
    let missing = path.ancestors().take_while(|part| *part != existing && !part.as_os_str().is_empty());
    missing.map(Path::to_path_buf).collect()
}

/// Removes folders that are empty; one that is not is somebody's, and stays.
pub fn remove_empty(folders: &[PathBuf]) {
    for folder in folders {
        let _ = std::fs::remove_dir(folder);
    }
}

/// Why nothing can be written into a folder that is there.
pub fn unwritable(folder: &Path) -> Option<String> {
    access(folder, AccessFlags::W_OK | AccessFlags::X_OK).err().map(|error| error.desc().to_owned())
}

/// Why a file that is there cannot be written.
pub fn unwritable_file(file: &Path) -> Option<String> {
    access(file, AccessFlags::W_OK).err().map(|error| error.desc().to_owned())
}

/// Why nothing can be written into a folder that is there, or can never be there.
pub fn unusable(folder: &Path) -> Option<String> {
    if let Some(why) = impossible(folder) {
        return Some(why);
    }
    let existing = nearest(folder);
    if !existing.is_dir() {
        let file = existing.display();
        return Some(format!("{file} is no folder; name one"));
    }
    if let Err(error) = ferrospeed_files::expect_own_links(folder) {
        return Some(format!("{}: {error}", folder.display()));
    }
    let why = unwritable(folder).filter(|_| existing == folder)?;
    Some(format!("{} cannot be written to ({why}); name a folder that can", folder.display()))
}

/// Why a folder that is not there cannot be made.
pub fn unmakeable(folder: &Path) -> Option<String> {
    let existing = nearest(folder);
    let why = unwritable(existing).filter(|_| existing != folder)?;
    let (folder, existing) = (folder.display(), existing.display());
    Some(format!(
        "{folder} is not there and cannot be made: {existing} cannot be written to ({why}); name another place"
    ))
}
